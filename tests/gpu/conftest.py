"""What only a CUDA device can show: `make test-gpu`. Skipped where torch sees none.

MOE_RL_TEST_DEVICE names the device; `cpu` is a dry run of the same tests at smaller sizes. Numbers that a test reports
are printed at the end, as a table with the name of the card, for tests/benchmarks/README.md.
"""

from __future__ import annotations

import os

import pytest
import torch

from moe_rl.models.load import make_deterministic
from tests.benchmarks.card import card
from tests.routing.families import FAMILIES, build

DEVICE = os.environ.get("MOE_RL_TEST_DEVICE", "cuda")
DRY = torch.device(DEVICE).type == "cpu"
NEEDS_GPU = pytest.mark.skipif(
    not (DRY or torch.cuda.is_available()), reason="tests on a GPU are run by `make test-gpu`, where torch sees one"
)
ROWS, TIME = (4, 8) if DRY else (16, 64)
DTYPES = (torch.float32, torch.bfloat16)
TEN = (
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "qwen2_moe",
    "deepseek_v2",
    "ernie4_5_moe",
)
FAMILY = {family.model_type: family for family in FAMILIES}
NUMBERS: list[tuple[str, str]] = []
"""What tests report: a name, a value."""


def on_device(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model on the device, its weights in this dtype; buffers stay, as in every checkpoint."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(DEVICE)


def family_on_device(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return on_device(build(FAMILY[name]), dtype)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture(scope="session")
def report():
    """Notes a number for the table at the end."""
    return lambda name, value: NUMBERS.append((name, f"{value:.3g}" if isinstance(value, float) else str(value)))


@pytest.fixture(scope="module")
def repeatable():
    """The documented settings under which a card repeats itself, for the tests of one file."""
    kinds = ("flash", "mem_efficient", "cudnn")
    allowed = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in kinds}
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    for kind, was in allowed.items():
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(was)


def pytest_terminal_summary(terminalreporter):
    if NUMBERS:
        terminalreporter.write_line(f"\n{card(torch.device(DEVICE))}\n\n| test | measured |\n|---|---|")
        for name, value in NUMBERS:
            terminalreporter.write_line(f"| {name} | {value} |")
