"""A policy whose ratio has routes of its own, against autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_rl.config import Arm, Optimizer
from moe_rl.objectives import objective_of
from moe_rl.objectives.weights import seq_mean_token_mean
from moe_rl.policies.hf import HFPolicy
from moe_rl.routing import replay_routing
from tests.conftest import build as build_tiny
from tests.conftest import perturb
from tests.policies.test_hf import make_batch, part_of


@pytest.mark.parametrize("ratio, gradient", [(True, False), (False, True)])
def test_ratio_and_gradient_may_have_routes_of_their_own(ratio, gradient):
    """Against autograd: Σ weights · sg[r · A, where not clipped] · log π, r and log π under routes of their own."""
    batch = make_batch()
    policy = HFPolicy(build_tiny("qwen3_moe"), Optimizer(grad_clip=0.0))
    old = policy.score(batch)
    of_ratio, of_gradient = (old.routes if replayed else None for replayed in (ratio, gradient))
    perturb(policy.model, 0.5)
    objective = objective_of(Arm(name="grpo"))
    found = {}
    policy.optimizer.register_step_pre_hook(
        lambda *_: found.update({n: p.grad.clone() for n, p in policy.model.named_parameters()})
    )
    reference = build_tiny("qwen3_moe")
    reference.load_state_dict(policy.model.state_dict())
    log_r = policy.score(batch, of_ratio).logprobs - old.logprobs
    r, a = log_r.exp(), batch.advantages
    kept = batch.response_mask & ~((a > 0) & (r > 1.27)) & ~((a < 0) & (r < 0.8))
    assert 0 < kept.sum() < batch.response_mask.sum()
    weights = seq_mean_token_mean(batch.response_mask)
    forced = None if of_gradient is None else of_gradient.rows(slice(None), batch.tokens.shape[1] - 1)
    with replay_routing(reference, forced):
        log_p = reference(batch.tokens[:, :-1]).logits.log_softmax(-1)
        chosen = torch.nn.functional.pad(log_p.gather(-1, batch.tokens[:, 1:, None])[..., 0], (1, 0))
        (-(weights * kept * r * a * chosen).sum()).backward()
    part = replace(part_of(batch, old, of_gradient), ratio_logprobs=log_r + old.logprobs)
    policy.update(part, objective)
    for name, p in reference.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, atol=1e-6, rtol=1e-4, msg=name)
