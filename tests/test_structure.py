"""The rules that keep the package readable: the blocks of the tree in docs/extending.md are the layers of imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_rl"
TREE = re.search(r"^moe_rl/\n((?:  .*\n|\n(?=  ))+)", (ROOT / "docs" / "extending.md").read_text(), re.M).group(1)
LAYERS = [
    [re.match(r"  (\w+)(?:/|\.py) ", line).group(1) for line in block.splitlines()] for block in TREE.split("\n\n")
]
ROOMS = [room for layer in LAYERS for room in layer]
"""Files and folders of the package, by layers."""
HEAVY = {"transformers", "vllm", "megatron", "trl"}
MAY_IMPORT_HEAVY = {"models", "policies", "rollouts", "analysis", "integrations"}


def imports(file: Path) -> set[str]:
    """Every module a file imports, in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.parent != PACKAGE or file.name not in ("__init__.py", "__main__.py")
}


def test_the_tree_in_the_docs_is_the_package():
    entries = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix in ("", ".py")}
    entries -= {"__pycache__", "__init__", "__main__"}
    assert set(ROOMS) == entries and len(ROOMS) == len(set(ROOMS))


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_from_its_own_layer_and_from_earlier_ones(module):
    layer = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    own = layer[module.partition(".")[0]]
    found = {name for name in imports(FILES[module]) if name.partition(".")[0] in ("moe_rl", "studies")}
    assert not any(name.startswith("studies") for name in found), "the library never imports studies"
    files = {name.removeprefix("moe_rl.") for name in found} & FILES.keys()
    assert not {name for name in files if layer[name.partition(".")[0]] > own}


def graph() -> dict[str, set[str]]:
    """The files of the package that each of its files imports."""
    known = {f"moe_rl.{module}": module for module in FILES}
    return {m: {known[n] for n in imports(f) if n in known and known[n] != m} for m, f in FILES.items()}


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Those that import themselves by way of others."""
    reached = {m: set(to) for m, to in graph.items()}
    for middle in graph:
        for m in graph:
            if middle in reached[m]:
                reached[m] |= reached[middle]
    return {m for m in graph if m in reached[m]}


def test_no_imports_go_in_circles():
    files = {m: {n for n in to if not n.startswith(f"{m}.")} for m, to in graph().items()}  # what a room hands on
    assert not in_circles(files)


def test_no_imports_of_rooms_go_in_circles():
    """Files of two rooms that import each other, be it for type checking, make one room of both."""
    rooms: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, to in graph().items():
        own = module.partition(".")[0]
        rooms[own] |= {name.partition(".")[0] for name in to} - {own}
    assert not in_circles(rooms)


@pytest.mark.parametrize("module", FILES)
def test_only_the_edges_import_backends(module):
    heavy = {name.partition(".")[0] for name in imports(FILES[module])} & HEAVY
    assert not heavy or module.partition(".")[0] in MAY_IMPORT_HEAVY, f"{module} imports {heavy}"


def new_interpreter(code: str) -> str:
    """What it prints."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_reading_and_declaring_never_imports_torch_and_scipys_statistics_only_when_they_are_asked_for():
    """One after the other in one interpreter: what the last of them has not imported, none of them has."""
    reading = [f"moe_rl.{m}" for m in FILES if m.startswith(("storage.", "results."))]
    modules = [
        "moe_rl",
        "moe_rl.config",
        "moe_rl.study",
        "moe_rl.study.declaration",
        "moe_rl.study.workers",
        "moe_rl.cli",
        "moe_rl.objectives.methods_page",
        "moe_rl.metrics.convergence",
        *reading,
    ]
    slow = {"torch", "transformers", "scipy.stats"}
    found = "next((m for m in modules if importlib.import_module(m) and heavy & {*sys.modules}), None)"
    assert new_interpreter(f"import importlib, sys; heavy = {slow}; modules = {modules}; print({found})") == "None\n"


def test_printing_a_table_never_imports_matplotlib():
    code = "import sys, moe_rl.results.tables; print('matplotlib' in sys.modules)"
    assert new_interpreter(code) == "False\n"
