"""Families on Megatron-core in one process against the Hugging Face policy; on two ranks: `test_megatron.py`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from moe_rl import ranks
from moe_rl.config import Optimizer
from moe_rl.integrations.megatron.layout import Parallel
from moe_rl.policies.hf import HFPolicy
from tests.integrations.megatron_layouts import (
    FAMILIES,
    OBJECTIVE,
    ROWS,
    compared,
    example,
    far,
    megatron,
    of_family,
    require,
    table,
)
from tests.policies.test_hf import part_of

pytest.importorskip("megatron", reason="pip install 'moe_rl[megatron]'")


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """Megatron's process groups, of one process, for this file alone."""
    ranks.join("cpu")
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    ranks.leave()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_scores_replays_and_learns_as_the_hugging_face_policy(family):
    require(compared(partial(of_family, family), Parallel(), recompute=family in ("deepseek_v3", "qwen2_moe")))


def test_the_table_of_families_and_layouts_is_current():
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    assert table() in page.read_text(), f"docs/distributed.md needs:\n{table()}"


def both(settings: Optimizer) -> list:
    """The two policies of one model, with the same settings."""
    family = "deepseek_v3" if settings.loss_free_bias else "qwen2_moe"
    return [HFPolicy(of_family(family), settings, **ROWS), megatron(of_family(family), Parallel(), settings)]


def trained(policy, batch, routes) -> None:
    policy.update(part_of(batch, policy.score(batch), routes), OBJECTIVE)


@pytest.mark.parametrize(
    "settings",
    [
        Optimizer(name="sgd", lr=0.1, betas=(0.9, 0.0), weight_decay=0.1, router_lr_scale=0.5, grad_clip=0.5, warmup=2),
        Optimizer(lr=1e-3, eps=1e-4, warmup=5, weight_decay=0.1, loss_free_bias=0.01),
    ],
    ids=["sgd", "adamw"],
)
def test_three_steps_of_either_optimizer_warmed_up_and_resumed_are_those_of_the_hugging_face_policy(settings, tmp_path):
    """AdamW divides a gradient by its own size + eps, so weights are apart by what other orders of summation make of
    gradients (at most 0.15), over eps: 33 · 2⁻²³ · 0.15 / 1e-4 is 0.006 of each step's rate, and three rates are two of
    the last."""
    hf, ours = both(settings)
    batch = example()
    routes = hf.score(batch).routes
    start = {name: weight.clone() for name, weight in hf.weights()}
    for step in range(3):
        for policy in (hf, ours):
            trained(policy, batch, routes)
        if step == 1:  # another process takes over
            ours.save(tmp_path)
            _, ours = both(settings)
            ours.load(tmp_path)
            assert ours.updates == 2
    mine = dict(ours.weights())
    assert far(hf.score(batch).logprobs, ours.score(batch).logprobs) < 1e-5
    for name, weight in hf.weights():
        scale = settings.lr_at(3) if settings.name == "adamw" else (weight - start[name]).abs().max().item()
        assert far(mine[name], weight) <= 0.012 * scale, name
    bias = [name for name in start if name.endswith("correction_bias")]
    assert all(torch.equal(mine[name], start[name]) != bool(settings.loss_free_bias) for name in bias)
