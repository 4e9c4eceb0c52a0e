"""What travels with a batch is cut, moved and named alike, whatever it is."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, KeptTokens, MiniBatch, Prompt, Rollout, Rollouts, Turn, prompt_rows, response_rows
from tests.conftest import build
from tests.objectives.examples import rewarded
from tests.policies.test_hf import make_batch, policy_of


@pytest.fixture(scope="module")
def full() -> MiniBatch:
    """A mini-batch whose every field has a value: traces, and numbers of several dtypes."""
    batch = make_batch()
    policy = policy_of(build("qwen3_moe"))
    generator = torch.Generator().manual_seed(0)
    unconstrained = policy.score(batch).routes
    values = {}
    for field in fields(MiniBatch):
        kind = str(field.type)
        if "RoutingTrace" in kind:
            values[field.name] = unconstrained
        elif "RouterScores" in kind:
            values[field.name] = policy.score(batch, scores=True).scores
        elif "KeptTokens" in kind:
            counts = torch.randint(1, 5, batch.tokens.shape, generator=generator).where(batch.response_mask, 0).int()
            values[field.name] = KeptTokens(torch.arange(int(counts.sum())).int(), counts)
        elif getattr(batch, field.name, None) is None:
            dtype = torch.float64 if field.name == "weights" else torch.float32
            drawn = torch.rand(batch.tokens.shape, generator=generator, dtype=dtype)
            values[field.name] = drawn < 0.5 if "Bool" in kind else (9 * drawn).long() if "Int[" in kind else drawn
    return MiniBatch(**vars(batch) | values)


ROWS = [torch.tensor([7, 2, 9]), torch.tensor([0]), slice(3, 8), slice(None), torch.tensor([4, 4])]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_every_field_of_some_rows_is_those_rows_without_common_padding(rows, full):
    part = full.rows(rows)
    time = int(full.attention_mask[rows].sum(1).max())
    assert part.tokens.shape[1] == time and part.attention_mask[:, -1].any()
    for field in fields(MiniBatch):
        value, found = getattr(full, field.name), getattr(part, field.name)
        assert value is not None, f"{field.name} is empty: give the fixture a value, or nobody sees that it is cut"
        if isinstance(value, RoutingTrace):
            assert torch.equal(found.experts, value.experts[rows][:, :time]), field.name
            assert torch.equal(found.tokens, part.tokens) and found.layout == value.layout
        elif isinstance(value, KeptTokens):
            assert torch.equal(found.counts, value.counts[rows][:, :time])
            whole = value.only(torch.zeros(*value.counts.shape, len(value.ids)))
            assert torch.equal(found.only(torch.zeros(*found.counts.shape, len(value.ids))), whole[rows][:, :time])
        elif isinstance(value, RouterScores):
            pairs = zip(
                [value.gates, value.log_probs, value.margins, *value.all_log_probs],
                [found.gates, found.log_probs, found.margins, *found.all_log_probs],
                strict=True,
            )
            assert all(torch.equal(new, old[rows][:, :time]) for old, new in pairs), field.name
        else:
            expected = value[rows] if value.dim() == 1 else value[rows][:, :time]
            assert torch.equal(found, expected) and found.dtype == value.dtype, field.name
    assert len(part) == len(full.tokens[rows])


def test_what_a_batch_does_not_have_its_rows_do_not_have(full):
    part = make_batch().rows(slice(2))
    assert type(part) is Batch and part.routes is part.ratio_routes is part.ref_logprobs is None


def test_no_rows_are_a_batch_without_columns(full):
    assert full.rows(slice(0, 0)).tokens.shape == (0, 0)


def test_a_batch_moves_as_a_whole(full):
    """To `meta`, which is a device wherever the tests run; what is None stays None."""
    there = full.to("meta")
    for field in fields(MiniBatch):
        value, moved = getattr(full, field.name), getattr(there, field.name)
        tensor, original = (
            x.experts
            if isinstance(x, RoutingTrace)
            else x.all_log_probs[-1]
            if isinstance(x, RouterScores)
            else x.ids
            if isinstance(x, KeptTokens)
            else x
            for x in (moved, value)
        )
        assert tensor.device.type == "meta" and tensor.dtype == original.dtype and tensor.shape == original.shape
    assert replace(full, routes=None).to("meta").routes is None


# ---------------------------------------------------------------------- whose token comes next
def batch_of(*rows: str) -> Rollouts:
    """Of letters: p prompt, r response, e an environment, . padding."""
    letters = [list(row) for row in rows]
    response = torch.tensor([[x == "r" for x in row] for row in letters])
    real = torch.tensor([[x != "." for x in row] for row in letters])
    return rewarded([0.0] * len(rows), [0] * len(rows), response, attention_mask=real)


def written(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if one else "-" for one in row) for row in mask]


def test_rows_of_a_trace_decide_the_token_that_comes_next():
    batch = batch_of("ppprrr..", "prrrrrrr", "pppppppr")
    assert written(response_rows(batch)) == ["--xxx---", "xxxxxxx-", "------x-"]
    assert written(prompt_rows(batch)) == ["xx------", "--------", "xxxxxx--"]


def test_what_an_environment_writes_is_neither_prompt_nor_response():
    batch = batch_of("ppprreerr.", "pprrrree..", "preeereeer")
    assert written(response_rows(batch)) == ["--xx--xx--", "-xxxx-----", "x---x---x-"]
    assert written(prompt_rows(batch)) == ["xx--------", "x---------", "----------"]
    assert not (response_rows(batch) & prompt_rows(batch)).any()


def test_a_row_without_a_response_is_all_prompt():
    batch = batch_of("ppp..", "pprr.")
    assert written(prompt_rows(batch)) == ["xx---", "x----"] and written(response_rows(batch)) == ["-----", "-xx--"]


def test_of_a_conversation_own_tokens_are_those_that_the_policy_drew():
    rollout = Rollout(Prompt("1+1="), (5, 6, 7, 8, 9), torch.zeros(5), "", True)
    assert rollout.own_tokens == 5
    assert replace(rollout, turns=(Turn(0, 2, "3", "no"), Turn(4, 5, "2", ""))).own_tokens == 3
