"""How much routes and log-probs differ at equal weights on the device: numbers, beside what must hold exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_rl.config import ModelConfig, Optimizer
from moe_rl.metrics.volatility import route_change
from moe_rl.models.load import load
from moe_rl.models.tokens import encode_prompts
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import _padded
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import RoutingTrace
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.types import Sampling, response_rows
from tests.gpu.conftest import DEVICE, DRY, DTYPES, NEEDS_GPU, short

pytestmark = NEEDS_GPU
PROMPTS, GROUP, OTHER = (6, 2, 5) if DRY else (64, 8, 61)


class Sampled:
    """Completions of an untrained model, sampled on the device and scored there."""

    def __init__(self, dtype: torch.dtype):
        loaded = load(ModelConfig(device=DEVICE, dtype=short(dtype)), seed=0)
        prompts = encode_prompts(RunningSums(digits=12).prompts(PROMPTS, 1), loaded.tokenizer)
        drawn = HFEngine(loaded.model, loaded.tokenizer).generate(
            prompts, GROUP, key=(0,), sampling=Sampling(max_new_tokens=12)
        )
        index = [i // GROUP for i in range(len(drawn))]
        self.batch = collate(drawn, index, [0.0] * len(drawn), loaded.tokenizer.pad_token_id)
        self.policies = {size: HFPolicy(loaded.model, Optimizer(), score_batch=size) for size in (256, OTHER)}
        self.first = self.policies[256].score(self.batch)

    def scored(self, way: str, routes=None):
        """The batch scored in another way, its rows in their order: log-probs and routes."""
        batch, time = self.batch, self.batch.tokens.shape[1]
        if way == "rows permuted":
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
            again = self.policies[256].score(batch.rows(order), None if routes is None else routes.rows(order))
            return again.rows(order.argsort(), time)
        if way == "padded":
            wide = _padded(batch, 7)
            forced = None if routes is None else RoutingTrace.cat([routes], wide.tokens, wide.attention_mask)
            return self.policies[256].score(wide, forced).rows(slice(None), time)
        return self.policies[OTHER if way == "other micro-batch" else 256].score(batch, routes)

    def change(self, again) -> dict[str, float]:
        row = route_change(self.first.routes.ids(), again.routes.ids(), response_rows(self.batch)).row()
        return {"sets": row["any_change_rate"], "logprob": (again.logprobs - self.first.logprobs).abs().max().item()}


@pytest.fixture(params=DTYPES, ids=short, scope="module")
def sampled(request):
    return Sampled(request.param), short(request.param)


@pytest.mark.parametrize("way", ["rows permuted", "other micro-batch", "padded"])
def test_scored_in_another_way(way, sampled, report):
    """Under replay no expert may differ, whatever the rounding; without, on a card, some do: how many is reported."""
    found, dtype = sampled
    unconstrained = found.change(found.scored(way))
    replayed = found.change(found.scored(way, found.first.routes))
    assert replayed["sets"] == 0
    report(f"{dtype}, {way}: expert sets that changed", f"{unconstrained['sets']:.2%}")
    report(f"{dtype}, {way}: largest change of a log-prob, nats", unconstrained["logprob"])
    report(f"{dtype}, {way}: the same under replay", replayed["logprob"])


def test_sampled_and_scored(sampled, report):
    found, dtype = sampled
    engine = replace(found.first, logprobs=found.batch.rollout_logprobs, routes=found.batch.rollout_routes)
    gap, replayed = found.change(engine), found.policies[256].score(found.batch, found.batch.rollout_routes)
    known = found.batch.rollout_routes.known
    assert torch.equal(replayed.routes.experts[known], found.batch.rollout_routes.experts[known])
    report(f"{dtype}, sampled with a cache: expert sets that changed", f"{gap['sets']:.2%}")
    report(f"{dtype}, sampled with a cache: largest change of a log-prob, nats", gap["logprob"])
    left = (replayed.logprobs - found.batch.rollout_logprobs).abs().max().item()
    report(f"{dtype}, sampled with a cache: the same under replay of its routes", left)
