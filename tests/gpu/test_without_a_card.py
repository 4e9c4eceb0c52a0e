"""What of `make test-gpu` and `make bench-gpu` can be held where there is no card."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_rl.config import Optimizer
from moe_rl.policies.hf import HFPolicy
from tests.benchmarks import gpu
from tests.benchmarks.gpu_models import GRPO, Sizes, products, random_batch, random_model, weighed
from tests.gpu.conftest import NEEDS_GPU

FILES = [file.stem for file in sorted(Path(__file__).parent.glob("test_*.py")) if file.stem != Path(__file__).stem]


def test_files_import_and_are_skipped_with_a_sentence_where_there_is_no_card():
    assert "make test-gpu" in NEEDS_GPU.mark.kwargs["reason"]
    for file in FILES:
        marks = import_module(f"tests.gpu.{file}").pytestmark
        assert NEEDS_GPU in (marks if isinstance(marks, list) else [marks]), file
    assert len(FILES) >= 4


def test_the_benchmark_explains_itself_and_its_dry_run(capsys):
    with pytest.raises(SystemExit, match="0"):
        gpu.main(["--help"])
    assert "--device cpu --small" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--device", "cpu"], *([] if torch.cuda.is_available() else [["--small"]])])
def test_what_it_cannot_measure_it_refuses_and_says_what_would_do(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main(arguments)
    assert "the dry run is --device cpu --small" in capsys.readouterr().err


def test_products_are_those_that_torch_counts():
    """Eager attention multiplies every pair of positions, a causal one half of them; the rest is rotary angles."""
    sizes = Sizes.of(small=True)
    batch, model = random_batch(3, 16, 256), random_model("olmoe", sizes.olmoe, torch.device("cpu"))
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    policy = HFPolicy(model, Optimizer())
    part = weighed(batch, policy.score(batch), replayed=True)
    with FlopCounterMode(display=False) as counter:
        policy.update(part, GRPO)
    half_of_attention = 6 * sizes.olmoe["num_hidden_layers"] * 3 * 15**2 * sizes.olmoe["hidden_size"]
    assert counter.get_total_flops() == pytest.approx(products(sizes.olmoe, batch) + half_of_attention, rel=1e-3)
