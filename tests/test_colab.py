"""The notebook is the one that its source gives, is valid, and runs from top to bottom on a CPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COLAB = Path(__file__).parents[1] / "colab"
SOURCE = (COLAB / "quickstart.py").read_text()
NOTEBOOK = json.loads((COLAB / "quickstart.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]

# Runs the cells as a kernel would, but for IPython, which need not be installed; tells what was displayed.
KERNEL = """
import json, sys, types
shown = []
display = types.ModuleType("IPython.display")
display.Image = lambda path, width: path
display.display = shown.append
sys.modules |= {"IPython": types.SimpleNamespace(version_info=(9, 0)), "IPython.display": display}  # matplotlib asks
names = {}
for i, cell in enumerate(json.load(sys.stdin)):
    exec(compile(cell, f"cell {i}", "exec"), names)
*pictures, trace = shown
print("RESULT", json.dumps({
    "pictures": [path.read_bytes()[1:4].decode() for path in pictures],
    "page": trace._repr_html_()[:8],
    "pieces": trace.pieces,
    "bits": names["result"].validation["val/bits_per_byte"],
    "texts": names["texts"],
}))
"""


def test_the_notebook_is_up_to_date():
    spec = importlib.util.spec_from_file_location("build", COLAB / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert (COLAB / "quickstart.ipynb").read_text() == build.text(SOURCE), "run python colab/build.py"


def test_the_notebook_is_valid():
    """What the schema of nbformat 4.5 asks for."""
    assert set(NOTEBOOK) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK["metadata"]["kernelspec"].keys() >= {"name", "display_name"}
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) for name in ids)
    for cell in NOTEBOOK["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        wanted |= {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == wanted and cell["cell_type"] in ("code", "markdown")
        assert all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])


def test_nothing_of_the_source_is_lost():
    def source(cell: dict) -> str:
        if cell["cell_type"] == "code":
            return "# %%\n" + "".join(cell["source"])
        return "# %% [markdown]\n" + "".join(f"# {line}" for line in cell["source"])

    assert "\n\n".join(map(source, NOTEBOOK["cells"])).replace("# \n", "#\n") + "\n" == SOURCE


def test_the_cells_run_from_top_to_bottom(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(COLAB.parent), "ZOO_CACHE": str(tmp_path / "cache")}
    found = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(CODE),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout.partition("RESULT")[2])
    assert result["pictures"] == ["PNG", "PNG"] and result["page"] == "<iframe "
    assert result["bits"] < 2.5 and all(result["texts"])
    assert "".join(result["pieces"]).endswith(":\n    return self._loop")
    assert "cpu cpu\nA CPU: the sizes below suit it.\n" in found.stdout


@pytest.mark.parametrize(
    ("jax", "kept"),
    [("0.10.2", "jax==0.10.2\njaxlib==0.10.2\n"), ("0.12.0.1", "jax==0.12.0.1\njaxlib==0.12.0.1\n"), (None, "")],
)
def test_the_runtimes_jax_is_kept(jax, kept, tmp_path, monkeypatch):
    names, commands = installer(jax, monkeypatch)
    monkeypatch.setattr(names["tempfile"], "gettempdir", lambda: tmp_path)
    clone = tmp_path / "clone"
    (clone / "colab").mkdir(parents=True)
    (clone / "pyproject.toml").write_text("")
    monkeypatch.chdir(clone / "colab")
    names["install"]()
    assert commands == [[sys.executable, "-m", "pip", "install", "-q", "-c", str(tmp_path / "kept.txt"), str(clone)]]
    assert (tmp_path / "kept.txt").read_text() == kept
    names["REPOSITORY"] = "https://x.org/zoo.git"
    names["install"]()
    assert commands[1][-1] == "git+https://x.org/zoo.git"


@pytest.mark.parametrize("jax", ["0.7.2", "0.10.1", "0.13.0"])
def test_a_jax_that_does_not_fit_is_answered_with_what_to_do(jax, tmp_path, monkeypatch):
    names, commands = installer(jax, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"This runtime has JAX {jax}, and zoo needs 0.10.2 to 0.12. Choose another"):
        names["install"]()
    assert commands == [] and not list(tmp_path.iterdir())


def installer(jax: str | None, monkeypatch) -> tuple[dict, list]:
    """The names of the first cell in a runtime with this JAX, and the commands that it has run."""
    names, commands = {}, []
    exec(CODE[0], names)
    names["installed"] = lambda package: jax
    monkeypatch.setattr(names["subprocess"], "run", lambda command, check: commands.append(command))
    return names, commands
