"""Rows: padding, turns, and what engines send. Classes 13 to 20 of the table in `__init__.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from moe_rl.errors import RoutingError
from moe_rl.integrations.vllm.payloads import RoutesRefused, decode_routes
from moe_rl.metrics.rounding import SUMMED, rounding
from moe_rl.metrics.volatility import load_statistics
from moe_rl.recorder import update_row
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import RoutingTrace, record_routing, replay_routing
from moe_rl.routing.sources import rollout as rollout_routes
from moe_rl.types import Sampling, response_rows
from tests.conftest import build, perturb
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of
from tests.rollouts.fake_engine import PROMPTS, small
from tests.routing.test_hooks import expert_calls, record


# ---------------------------------------------------------------------- rows without a route of their own
def test_padding_is_forced_nowhere_and_counted_nowhere():
    """miles#645, slime#1052, slime#2308, verl#7524, prime-rl#3350, SkyRL#2091: padded rows given zeros or one expert
    for all, or their whole sequence left out of replay: other hidden states, a hot expert, wrong metrics."""
    batch, model = make_batch(), build("qwen3_moe")
    policy = policy_of(model)
    routes = policy.score(batch).routes
    inputs = nn.functional.pad(batch.attention_mask[:, 1:], (0, 1))
    assert torch.equal(routes.known.all(-1), inputs) and torch.equal(routes.known.any(-1), inputs)
    other = replace(batch, tokens=batch.tokens.where(batch.attention_mask, 7))
    perturb(model)
    old, again = policy.score(batch, routes), policy.score(other, routes)
    assert again.routes == old.routes == routes
    apart, magnitude = (again.logprobs - old.logprobs).abs().max().item(), old.logprobs.abs().max().item()
    assert apart <= rounding(SUMMED, 3, magnitude)  # other padding gives each expert another number of rows
    part = part_of(batch, old, routes)
    updated = policy.update(part, GRPO)
    row = update_row(part, updated.logprobs - part.old_logprobs, updated, old)
    assert row["coverage"] == 1 and row["token_n"] == batch.response_mask.sum()
    counted = load_statistics(routes.ids(), [8, 8, 8], response_rows(batch))
    assert counted["load"].sum() == 3 * 2 * batch.response_mask.sum()


def test_the_next_turn_keeps_the_prefix_and_routes_its_last_token_anew(qwen, tokens):
    """NeMo-RL#3485, prime-rl#1807, AReno#524: the last token of a turn kept a dummy route when it became context, and
    turns were joined by length where the tokens had been split otherwise."""
    with record_routing(qwen) as recording:
        turn = qwen.generate(tokens[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    first = recording.trace(turn)
    longer = torch.cat([turn, tokens[1:2]], 1)
    routes = RoutingTrace.cat([first], longer, torch.ones_like(longer, dtype=torch.bool))
    last = turn.shape[1] - 1
    assert routes.known[0, :last].all() and not routes.known[0, last:].any()
    perturb(qwen)
    with torch.no_grad(), replay_routing(qwen, routes) as replay, record_routing(qwen) as recording:
        qwen(longer)
    used = recording.trace(longer)
    assert torch.equal(used.experts[:, :last], first.experts[:, :last])
    assert torch.equal(used.experts[:, last:], replay.preferred.experts[:, last:])
    longer[0, last] += 1
    with pytest.raises(RoutingError, match="other tokens"):
        RoutingTrace.cat([first], longer, torch.ones_like(longer, dtype=torch.bool))


def test_the_last_prompt_token_keeps_its_route_however_little_is_sampled():
    """sglang#20964: one row less than tokens, also where nothing was sampled: the row that decides the first response
    token is gone."""
    loaded = small()
    for rollout in HFEngine(loaded.model, loaded.tokenizer).generate(
        PROMPTS, 2, key=(0,), sampling=Sampling(max_new_tokens=1)
    ):
        prompt = torch.tensor([rollout.prompt.tokens])
        full, _ = record(loaded.model, prompt)
        assert full.coverage == rollout.routes.coverage == 1
        assert torch.equal(rollout.routes.experts, full.experts)


# ---------------------------------------------------------------------- what engines send
@pytest.mark.parametrize("fill", ["stale", 0, -1])
def test_rows_beyond_the_sequence_are_refused(qwen, tokens, fill):
    """sglang#36404: the capture buffer's rows past the request were sent along, with the ids of an earlier one."""
    trace, _ = record(qwen, tokens)
    ids = trace.ids()[:2].flatten(0, 1).numpy()[: 9 + 3]
    if fill != "stale":
        ids[9:] = fill
    with pytest.raises(RoutingError, match=r"shape \(12, 3, 2\); expected \[8 rows"):
        decode_routes(ids, layout=trace.layout, tokens=tokens[0].tolist())
    kept = decode_routes(ids[:9], layout=trace.layout, tokens=tokens[0].tolist())
    assert torch.equal(kept.experts, trace.experts[:1, :8]), "of N rows the last one has no meaning"


def test_routes_of_two_weight_versions_do_not_become_one_trace(qwen, tokens):
    """miles#3277, verl#6029: a resumed request brought log-probs of old weights and routes of new ones, unnoticed."""
    trace, _ = record(qwen, tokens)
    mask = torch.ones_like(tokens[:2], dtype=torch.bool)
    rows = [replace(trace.rows(slice(b, b + 1)), weight_version=f"push {b}") for b in range(2)]
    assert RoutingTrace.cat([rows[0]], tokens[:1], mask[:1]).weight_version == "push 0"
    with pytest.raises(RoutingError, match="traces 0 and 1 .*'push 0' and 'push 1'"):
        RoutingTrace.cat(rows, tokens[:2], mask)


@pytest.mark.parametrize("layers", [[1], [0, 1, 2]])
def test_a_capture_of_zeros_is_refused_layer_by_layer(qwen, tokens, layers):
    """vllm-ascend#16314, vllm-ascend#15451, vllm#49184: a kernel bypassed the capture: every token got expert 0."""
    trace, _ = record(qwen, tokens)
    ids = trace.ids()[0, :8].numpy()
    ids[:, layers] = 0
    answer = {"layout": trace.layout, "tokens": tokens[0].tolist()}
    with pytest.raises(RoutingError, match=rf"{8 * len(layers)} all zero.*layers.{layers[0]}.mlp.gate"):
        decode_routes(ids, **answer)
    with pytest.warns(RoutesRefused, match=f"{8 * len(layers)} all zero"):
        holes = decode_routes(ids, **answer, invalid="unknown")
    assert holes.coverage == pytest.approx(1 - len(layers) / 3)


def test_experts_beyond_255_survive_recording_saving_and_replay(tokens, tmp_path):
    """prime-rl#3051, prime-rl#2487, NeMo-RL#3113, NeMo-RL#4240: in a byte, expert 256 is replayed as expert 0."""
    model = build("qwen3_moe", num_experts=300)
    trace, logits = record(model, tokens)
    assert (trace.ids() > 255).any()
    trace.save(tmp_path / "trace")
    loaded = RoutingTrace.load(tmp_path / "trace")
    rows = RoutingTrace.cat([loaded.rows(slice(b, b + 1)) for b in range(4)], tokens, loaded.attention_mask)
    assert rows == loaded == trace
    calls, _ = expert_calls(model)
    with torch.no_grad(), replay_routing(model, rows):
        assert torch.equal(model(tokens).logits, logits)
    assert torch.equal(calls[0][0], trace.ids()[:, :, 0].flatten(0, 1))


def test_replay_without_routes_is_an_error_and_of_some_reports_its_share():
    """miles#407, slime#1909, slime#1145: replay was on, the batch held no routes, and the run went on without."""
    batch = make_batch()
    policy = policy_of(build("qwen3_moe"))
    unconstrained = policy.score(batch)
    with pytest.raises(RoutingError, match="the rollouts have no routing"):
        rollout_routes(batch, unconstrained)
    for share, rows in ((0.5, slice(0, None, 2)), (0, slice(None))):
        experts = unconstrained.routes.experts.clone()
        experts[rows] = unconstrained.routes.layout.unknown
        routes = rollout_routes(
            replace(batch, rollout_routes=replace(unconstrained.routes, experts=experts)), unconstrained
        )
        part = part_of(batch, unconstrained, routes)
        if not share:
            with pytest.raises(RoutingError, match="no known routing"):
                policy.update(part, GRPO)
            continue
        updated = policy.update(part, GRPO)
        row = update_row(part, updated.logprobs - part.old_logprobs, updated, unconstrained)
        kept = batch.attention_mask.sum(1) - 1
        assert row["coverage"] == pytest.approx((kept.sum() - kept[rows].sum()).item() / kept.sum().item())
