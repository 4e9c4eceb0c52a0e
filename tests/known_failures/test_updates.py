"""Objectives, updates and hooks: classes 1 to 12 of the table in `__init__.py`."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moe_rl.config import Arm
from moe_rl.errors import RoutingError
from moe_rl.integrations.vllm.payloads import decode_routes
from moe_rl.objectives import objective_of
from moe_rl.objectives.losses import LOSSES
from moe_rl.registry import Component
from moe_rl.rollouts.batches import collate
from moe_rl.routing import layout_of, record_routing, replay_routing
from moe_rl.routing.intercept import recomputing
from moe_rl.routing.moe_layers import find_moe_layers
from moe_rl.routing.selection import TOPK
from moe_rl.routing.sources import random_sets
from moe_rl.types import Batch, Prompt, Rollout
from tests.conftest import build, perturb
from tests.objectives.examples import inputs
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of
from tests.routing import families
from tests.routing.test_hooks import record
from tests.test_trainer import TINY, carry_out


# ---------------------------------------------------------------------- objectives
def test_gspo_weighs_sequences_alike_whatever_their_lengths():
    """trl#3823: ratios per sequence, normalised by the number of tokens: long responses dominate the gradient."""
    rollouts = [Rollout(Prompt("", tokens=(3, 4)), (5,) * n, torch.zeros(n), "", True) for n in (1, 9)]
    sampled, advantages = collate(rollouts, [0, 0], [0.0, 0.0], 0), torch.tensor([[1.0], [-1.0]]).expand(2, 11)
    batch = Batch(**vars(sampled), old_logprobs=sampled.rollout_logprobs, advantages=advantages)
    policy = policy_of(build("qwen3_moe"), micro_batch=1)
    loss = policy.update(part_of(batch, policy.score(batch)), objective_of(Arm(name="gspo", loss="gspo"))).loss
    assert loss == pytest.approx(0, abs=1e-6), "-(1 - 1) / 2; over tokens it would be -(1 - 9) / 10"


def test_each_level_of_ratio_has_a_range_that_clips_it():
    """trl#3834: GRPO's 0.2 on sequence ratios, which stay within a few percent of 1: nothing is ever clipped."""
    log_ratio = 0.2 * torch.randn(64, 400, generator=torch.Generator().manual_seed(0))
    mask, old = torch.ones(64, 400, dtype=torch.bool), torch.zeros(64, 400)
    with pytest.warns(UserWarning, match="never clips the sequence ratio"):
        wide = objective_of(Arm(name="wide", loss=Component("gspo", clip_low=0.2, clip_high=0.27)))
    lost = []
    for objective in (objective_of(Arm(name="grpo")), objective_of(Arm(name="gspo", loss="gspo")), wide):
        lost.append((objective.of(inputs(log_ratio, old, torch.ones(64), mask)).clipped_by != 0).double().mean())
    assert lost[0] > 0.1 and lost[1] > 0.1 and lost[2] == 0


@pytest.mark.parametrize("loss", ["grpo", "gspo", "gspo_token", "gmpo", "crossed"])
def test_a_response_twice_as_long_weighs_the_same(loss):
    """ROLL#165: a sequence's ratio, copied to its tokens and summed, multiplies its loss by its length."""
    found = []
    for length in (4, 8):
        mask = torch.arange(8)[None] < length
        logprobs = torch.full((1, 8), 1e-4, dtype=torch.float64, requires_grad=True)
        x = inputs(logprobs, torch.zeros(1, 8), torch.tensor([0.7]), mask)
        out = LOSSES[loss](x, clip_low=0.1, clip_high=0.1)
        out.loss.backward()
        found.append((out.loss.item(), logprobs.grad.sum().item()))
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0][0] == pytest.approx(-0.7 * np.exp(1e-4), rel=1e-6)


def test_clip_fractions_stand_beside_the_mini_batch_they_belong_to(tmp_path):
    """verl#7356, verl#2775: one number for all mini-batches and both units; healthy and broken runs look alike."""
    run = TINY.replace(arm=Arm(name="gspo", loss="gspo"), steps=1, eval_prompts=2, save_every=1)
    tables = carry_out(run, tmp_path / "run")
    updates = tables["updates"].set_index("update")
    assert updates.loc[1, "clip_tokens"] == 0 and updates.loc[1, "sequence_log_ratio_max"] < 1e-5, "nothing has moved"
    assert (updates.loc[2:, "clip_tokens"] > 0).any() and (updates.loc[2:, "sequence_log_ratio_max"] > 3e-4).all()
    for unit in ("clip_tokens", "clip_sequences"):
        assert np.allclose(updates[unit], updates[f"{unit}_high"] + updates[f"{unit}_low"])
    assert tables["steps"]["engine_logprob_max"].iloc[-1] < 1e-5, "the engine's own share, which is no staleness"


# ---------------------------------------------------------------------- which router, which row
def test_dense_layers_in_an_engines_rows_shift_no_route(tokens):
    """verl#5037: engines report dense layers too; counted among routing layers only, every layer replays another's."""
    model, tokens = build("deepseek_v3"), tokens[:1]
    trace, logits = record(model, tokens[:, :-1])
    assert [moe_layer.decoder_layer for moe_layer in trace.layout.moe_layers] == [1, 2], "layer 0 is dense"
    payload = np.concatenate([np.zeros((8, 1, 2), int), trace.ids()[0].numpy()], 1)
    decoded = decode_routes(payload, layout=layout_of(model), tokens=tokens[0].tolist())
    assert decoded == trace
    with torch.no_grad(), replay_routing(model, decoded):
        assert torch.equal(model(tokens[:, :-1]).logits, logits)


def test_a_discarded_decoder_is_neither_heard_nor_kept_alive(tokens):
    """verl#7340, miles#2570: a process-wide list still held the routers of a decoder that had been replaced."""
    model, other = build("qwen3_moe"), build("qwen3_moe", seed=1)
    record(model, tokens)
    discarded = weakref.ref(model.model.layers[0].mlp.gate)
    model.model = build("qwen3_moe", seed=1).model
    gc.collect()
    assert discarded() is None
    trace, _ = record(model, tokens)
    assert trace == record(other, tokens)[0]
    with torch.no_grad(), record_routing(model) as recording, pytest.raises(RoutingError, match="no MoE layer ran"):
        other(tokens)
        recording.trace(tokens)


@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_every_row_replays_its_own_routes_and_none_when_off(micro_batch):
    """verl#7106, #7786, #7805: packed batches recorded the rows of others, and the fix changed runs without replay."""
    batch, model = make_batch(), build("qwen3_moe")
    policy = policy_of(model, micro_batch=micro_batch)
    routes = policy.score(batch).routes
    perturb(model)
    live = policy.score(batch)
    assert live.routes != routes
    assert policy.score(batch, routes).routes == routes
    again = policy.score(batch)
    assert again.routes == live.routes and torch.equal(again.logprobs, live.logprobs)
    assert policy.update(part_of(batch, live, routes), GRPO).routes == routes


def test_a_multi_token_prediction_router_takes_no_decoder_layers_routes(qwen, tokens):
    """NeMo-RL#3903, Megatron-LM#7404: its layers are numbered anew, so it ate the routes of a decoder layer."""
    trace, _ = record(qwen, tokens)
    perturb(qwen)
    chosen = []
    qwen.model.mtp_layers = nn.ModuleList([copy.deepcopy(qwen.model.layers[1])])
    gate = qwen.model.mtp_layers[0].mlp.gate
    qwen.model.register_forward_hook(lambda module, args, output: chosen.extend(gate(output.last_hidden_state)))
    with torch.no_grad(), replay_routing(qwen, trace), record_routing(qwen) as recording:
        qwen(tokens)
    assert recording.trace(tokens) == trace
    logits, _, ids = chosen
    assert torch.equal(ids, logits.topk(2).indices), "it routes freely"


# ---------------------------------------------------------------------- backward
class OffByMoreThanRounding(TorchFunctionMode):
    """Inside a router: the selection of a recomputation reads other scores than that of its forward did."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in TOPK and recomputing():
            noise = torch.rand(args[0].shape, generator=torch.Generator().manual_seed(0))
            args = (args[0] + noise, *args[1:])
        return func(*args, **(kwargs or {}))

    def disturb(self, router):
        router.register_forward_pre_hook(lambda *_: (self.__enter__(), None)[1])
        router.register_forward_hook(lambda *_: self.__exit__(None, None, None), always_call=True)


RECOMPUTED = [
    ("qwen3_moe", "live"),
    ("qwen3_moe", "old_policy"),
    ("deepseek_v2", "live"),  # group-limited
]


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize(("family", "arm"), RECOMPUTED)
def test_the_backward_recomputation_uses_the_forwards_routes(family, arm, mode):
    """Automodel#3156: a recomputation that is off by rounding picks other experts than its forward: an error where
    shapes differ, else silently the gradient of another function than the loss."""
    batch, weights = make_batch(), []
    for checkpointing in (False, mode):
        model = families.build(next(f for f in families.FAMILIES if f.model_type == family))
        policy = policy_of(model, activation_checkpointing=checkpointing, micro_batch=5)
        routes = policy.score(batch).routes if arm == "old_policy" else None
        perturb(model)
        old = policy.score(batch, routes)
        for moe_layer in find_moe_layers(model):
            OffByMoreThanRounding().disturb(moe_layer.module)
        policy.update(part_of(batch, old, routes), GRPO)
        weights.append(dict(policy.weights()))
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name]), name


def test_forwards_without_backward_leave_nothing_for_the_next_update():
    """SkyRL#1908: routes queued by a forward-only pass, or before an exception, were replayed in the next backward."""

    def second_fails(x, calls=[]):  # noqa: B006
        calls.append(1)
        return GRPO.loss(x) if len(calls) == 1 else 1 / 0

    batch, weights = make_batch(), []
    for disturbed in (False, True):
        model = build("qwen3_moe")
        policy = policy_of(model, micro_batch=5, activation_checkpointing="non-reentrant")
        unconstrained = policy.score(batch)
        perturb(model)
        old = policy.score(batch, unconstrained.routes)
        if disturbed:
            other = random_sets(batch, unconstrained)
            policy.score(batch, other)
            with pytest.raises(ZeroDivisionError):
                policy.update(part_of(batch, old, other), replace(GRPO, loss=second_fails))
        policy.update(part_of(batch, old, unconstrained.routes), GRPO)
        weights.append(torch.cat([w.flatten() for _, w in policy.weights()]))
    assert torch.equal(*weights)
