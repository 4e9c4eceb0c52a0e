"""What of `make test-gpu` and `make bench-gpu` can be held where there is no card."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_rl.config import Optimizer
from moe_rl.policies.hf import HFPolicy
from tests.benchmarks.gpu_models import GRPO, Sizes, products, random_batch, random_model, weighed


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
