"""The rules that keep the package readable: who may import whom, and what must stay free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "moe_rl"

LAYERS = [
    ["errors", "seeds", "lookup", "older", "config", "values", "columns", "commits", "inputs", "versions", "terminal",
     "json_lines"],
    ["routing.layout", "routing.trace", "types"],
    ["routing", "tasks", "objectives", "metrics", "runs", "ranks", "frames", "stats", "pooling"],
    ["checkpoints", "models", "memory", "policies", "rollouts", "experts_cpu"],
    ["cold_start", "probe", "recorder", "evaluate", "trainer"],
    ["execute", "study"],
    ["workers", "study_on_ranks", "summary", "factors", "plots", "figures", "tables", "report", "page", "collect",
     "rerun", "volatility", "view", "trl"],
    ["cli", "__main__"],
]
"""A module may import from its own layer and from those above it."""
PROTOCOLS_ONLY = {"probe", "recorder", "evaluate", "trainer"}
HEAVY = {"transformers", "vllm", "megatron", "trl"}
MAY_IMPORT_HEAVY = (
    "checkpoints", "models", "memory", "cold_start", "policies", "rollouts", "experts_cpu", "volatility", "trl",
)  # fmt: skip


def layer(module: str) -> int | None:
    for depth, names in enumerate(LAYERS):
        if module in names:
            return depth
    return layer(module.rpartition(".")[0]) if "." in module else None


def imports(file: Path) -> set[str]:
    """Every module a file imports, in functions too; imports for type checking only do not count."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = {
    file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.parent != PACKAGE or file.name != "__init__.py"
}


@pytest.mark.parametrize("module", FILES)
def test_no_module_imports_from_a_later_layer(module):
    own = layer(module)
    assert own is not None, f"{module} has no place in LAYERS: give it one"
    for name in imports(FILES[module]):
        if name.startswith("moe_rl."):
            other = layer(name.removeprefix("moe_rl."))
            assert other is None or other <= own, f"{module} imports {name}, which is of a later layer"
        assert not name.startswith("studies"), f"{module} imports {name}: the library never imports studies"


@pytest.mark.parametrize("module", FILES)
def test_only_the_edges_import_backends(module):
    heavy = {name.partition(".")[0] for name in imports(FILES[module])} & HEAVY
    assert not heavy or module.startswith(MAY_IMPORT_HEAVY), f"{module} imports {heavy}"


@pytest.mark.parametrize("module", sorted(PROTOCOLS_ONLY))
def test_the_trainer_knows_protocols_only(module):
    concrete = {"policies.hf", "policies.megatron", "rollouts.hf", "rollouts.vllm", "models"}
    assert not {f"moe_rl.{name}" for name in concrete} & imports(FILES[module])


@pytest.mark.parametrize(
    "module",
    ["moe_rl", "moe_rl.config", "moe_rl.values", "moe_rl.columns", "moe_rl.runs", "moe_rl.frames", "moe_rl.stats",
     "moe_rl.study", "moe_rl.plots", "moe_rl.page", "moe_rl.collect", "moe_rl.rerun", "moe_rl.cli",
     "moe_rl.metrics.convergence"],
)  # fmt: skip
def test_reading_and_declaring_never_imports_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize("package", ["policies", "rollouts"])
def test_packages_of_backends_import_nothing_by_themselves(package):
    assert (PACKAGE / package / "__init__.py").read_text() == ""
