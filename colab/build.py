"""Writes quickstart.ipynb from quickstart.py: cells begin at `# %%`, those at `# %% [markdown]` are text.

python colab/build.py
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def notebook(source: str) -> dict[str, Any]:
    """A notebook (nbformat 4.5) without outputs, from Python text in the percent format."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)[1:]
    cells = [_cell(i, head, body) for i, (head, body) in enumerate(zip(parts[::2], parts[1::2], strict=True))]
    metadata = {
        "colab": {"name": "quickstart.ipynb", "provenance": []},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _cell(number: int, head: str, body: str) -> dict[str, Any]:
    lines = body.strip("\n").splitlines(keepends=True)
    common = {"id": f"cell-{number}", "metadata": {}}
    if head.strip() == "[markdown]":
        return {"cell_type": "markdown", **common, "source": [re.sub("^# ?", "", line) for line in lines]}
    return {"cell_type": "code", "execution_count": None, **common, "outputs": [], "source": lines}


def text(source: str) -> str:
    """The file's content."""
    return json.dumps(notebook(source), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (HERE / "quickstart.ipynb").write_text(text((HERE / "quickstart.py").read_text()))
