"""Imports go one way: a room may import only from rooms above it (docs/design.md, section 3)."""

import ast
import statistics
from pathlib import Path

import pytest

from tests.rooms import ROOMS

ZOO = Path(__file__).parents[1] / "zoo"


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "zoo"}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("zoo.")} & set(ROOMS)


def room_of(path: Path) -> str:
    return path.relative_to(ZOO).parts[0].removesuffix(".py")


def test_every_file_lies_in_a_room():
    assert {room_of(path) for path in ZOO.rglob("*.py")} == {*ROOMS, "__init__"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_above(room):
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in ZOO.rglob("*.py"):
        if room_of(path) == room:
            assert imported_rooms(path) <= allowed, path


def test_only_parallel_knows_mesh_axes():
    for path in ZOO.rglob("*.py"):
        if room_of(path) in {"layers", "models", "kernels", "objectives"}:
            words = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
            assert not words & {"data", "fsdp", "tensor", "context"}, path


def test_functions_and_files_are_short():
    lengths = []
    for path in ZOO.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 450, path
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths += [f.end_lineno - f.lineno + 1 for f in functions]
    assert statistics.median(lengths) <= 12


def test_no_two_test_files_have_one_name():
    """pytest would take the second for the first, and collect nothing from it in a fresh checkout."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names))
