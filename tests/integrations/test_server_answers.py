"""What an engine sends back is read strictly; routes that cannot be are refused, or unknown and counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.config import Arm
from moe_rl.errors import RunError
from moe_rl.integrations.vllm.answers import Answer, Reader
from moe_rl.integrations.vllm.payloads import RoutesRefused
from moe_rl.objectives import objective_of
from moe_rl.recorder import engine_row
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing.sources import rollout as replay_rollout
from moe_rl.types import Batch, Prompt, Sampling
from tests.policies.test_hf import part_of
from tests.rollouts.fake_engine import PROMPTS, policy_of, routes_of, small
from tests.routing.families import FAMILIES, build

SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def loaded():
    return small()


@pytest.fixture(scope="module")
def drawn(loaded):
    return HFEngine(loaded.model, loaded.tokenizer).generate(PROMPTS, 2, key=(0,), sampling=SAMPLING)


def reader(loaded, routes="raise"):
    return Reader(loaded.tokenizer, loaded.model, routes)


def answers(drawn, **changes):
    """The rollouts as an engine would report them; `changes` by field of the first."""
    found = [Answer(list(r.tokens), r.logprobs.tolist(), r.finished, routes_of(r)) for r in drawn]
    return [Answer(**{**vars(found[0]), **changes}), *found[1:]]


def prompts(drawn):
    return [r.prompt for r in drawn]


def test_answers_become_the_rollouts_they_report(loaded, drawn):
    for mine, theirs in zip(reader(loaded).read(prompts(drawn), answers(drawn), SAMPLING), drawn, strict=True):
        assert (mine.tokens, mine.text, mine.finished) == (theirs.tokens, theirs.text, theirs.finished)
        assert torch.equal(mine.logprobs, theirs.logprobs)
        assert mine.routes.same_sets(theirs.routes).all() and mine.routes != theirs.routes
        assert torch.equal(mine.routes.tokens, theirs.routes.tokens)


def test_a_stop_string_ends_the_text_and_counts_as_finished(loaded, drawn):
    text = next(r.text for r in drawn if len(r.text) > 3)
    r = next(r for r in drawn if r.text == text)
    sampling = Sampling(max_new_tokens=6, stop=(text[2:4],))
    answer = Answer(list(r.tokens), r.logprobs.tolist(), True, routes_of(r))
    assert reader(loaded).read([r.prompt], [answer], sampling)[0].text == text[:2]


def test_after_a_prompt_that_ends_within_a_character_stop_strings_are_found_here(loaded):
    """The engine is not asked for them, draws on, and the rollouts are those of one that stopped."""
    cut, sampling = Prompt("", tokens=(65, 66, 0xC3)), replace(SAMPLING, stop=tuple("abcdefghijABCDEFGHIJ0123"))
    assert reader(loaded).asked(cut, sampling) == SAMPLING
    assert reader(loaded).asked(PROMPTS[0], sampling) is sampling
    engine = HFEngine(loaded.model, loaded.tokenizer)
    stopped, free = (engine.generate([cut], 16, key=(0,), sampling=s) for s in (sampling, SAMPLING))
    assert sum(len(a.tokens) < len(b.tokens) for a, b in zip(stopped, free, strict=True)) > 3
    for mine, theirs in zip(reader(loaded).read(prompts(free), answers(free), sampling), stopped, strict=True):
        assert (mine.tokens, mine.text, mine.finished) == (theirs.tokens, theirs.text, theirs.finished)
        assert torch.allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
        assert mine.routes.same_sets(theirs.routes).all() and torch.equal(mine.routes.tokens, theirs.routes.tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [], "logprobs": []}, "0 tokens"),
        ({"logprobs": [-1.0]}, "1 log-prob"),
        ({"tokens": [65] * 7, "logprobs": [-1.0] * 7}, "7 tokens"),
        ({"tokens": [65, 66], "logprobs": [-1.0, float("nan")], "finished": False}, "nan"),
        ({"tokens": [65, 66], "logprobs": [-1.0, 3.0], "finished": False}, "3.0"),
        ({"tokens": [65, 66], "logprobs": [-1.0, -9999.0], "finished": False}, "-9999.0"),  # −inf, by vLLM's servers
        ({"tokens": [65, 66], "logprobs": [-1.0, -1.0], "finished": True}, "was cut off|ended"),
        ({"tokens": [65, 256], "logprobs": [-1.0, -1.0], "finished": False}, "was cut off|ended"),
        ({"tokens": [65, 258], "logprobs": [-1.0, -1.0], "finished": False}, "token 258"),
        ({"tokens": [-1, 65], "logprobs": [-1.0, -1.0], "finished": False}, "token -1"),
        ({"tokens": [65, 66.0], "logprobs": [-1.0, -1.0], "finished": False}, "66.0"),
        ({"tokens": [65, None], "logprobs": [-1.0, -1.0], "finished": False}, "None"),
        ({"tokens": [65, 66], "logprobs": [-1.0, None], "finished": False}, "None"),
        ({"tokens": [65, 66], "logprobs": [-1.0, "-1"], "finished": False}, "'-1'"),
        ({"tokens": [65, 256, 66], "logprobs": [-1.0] * 3, "finished": False}, "256, 66"),
    ],
)
def test_an_answer_that_cannot_be_one_is_refused(loaded, drawn, changes, message):
    with pytest.raises(RunError, match=message):
        reader(loaded).read(prompts(drawn), answers(drawn, **changes), SAMPLING)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe", "qwen3_omni_moe_thinker"])
def test_a_model_of_text_and_images_is_read_by_its_text_configuration(loaded, name):
    (family,) = (f for f in FAMILIES if f.model_type == name)
    model = build(family)
    text = model.config.get_text_config()
    made = Reader(loaded.tokenizer, model)
    assert (made.vocabulary, made.num_layers) == (text.vocab_size, text.num_hidden_layers)


def bad_routes(drawn):
    good = routes_of(drawn[0])
    zeros, twice, beyond, unknown, dummies = (good.astype(np.int32).copy() for _ in range(5))
    zeros[2] = 0
    twice[1, 1] = 5
    beyond[0, 0, 0] = 8
    unknown[3] = -1
    dummies[-3:] = [0, 1]
    moe_layers = good.shape[1]
    return {
        "all zero": (zeros, moe_layers),
        "twice": (twice, 1),
        "out of range": (beyond, 1),
        "missing rows": (unknown, moe_layers),
        "none": (None, good.shape[0] * moe_layers),
        "too few rows": (good[:-1], moe_layers),
        "dummies": (dummies, 3 * moe_layers),
        "another model's layers": (good[:, :2], good.shape[0] * moe_layers),
    }


KINDS = (
    "all zero",
    "dummies",
    "twice",
    "out of range",
    "missing rows",
    "none",
    "too few rows",
    "another model's layers",
)


@pytest.mark.parametrize("kind", KINDS)
def test_or_they_are_unknown_and_counted_and_replay_routes_freely_there(loaded, drawn, kind):
    payload, rows = bad_routes(drawn)[kind]
    tolerant = reader(loaded, "unknown")
    with pytest.warns(RoutesRefused, match=f"{rows} of "):
        rollouts = tolerant.read(prompts(drawn), answers(drawn, routes=payload), SAMPLING)
    assert tolerant.refused == rows
    assert int((~rollouts[0].routes.known).sum()) == rows
    assert all(r.routes.coverage == 1 for r in rollouts[1:])

    sampled = collate(rollouts, [0, 0, 1, 1, 2, 2], [0.0] * 6, 257)
    zeros = torch.zeros(sampled.tokens.shape)
    batch = Batch(**vars(sampled), old_logprobs=zeros, advantages=zeros)
    policy = policy_of(loaded)
    unconstrained = policy.score(batch)
    row, _ = engine_row(batch, unconstrained)
    inputs = sum(len(r.prompt.tokens) + len(r.tokens) - 1 for r in rollouts) * 3
    assert row["engine_unknown"] == pytest.approx(rows / inputs)
    assert row["engine_any_change_rate"] == 0, "unknown rows are no changes"
    routes = replay_rollout(batch, unconstrained)
    old = policy.score(batch, routes)
    torch.testing.assert_close(old.logprobs, unconstrained.logprobs, atol=1e-5, rtol=0)
    updated = policy.update(part_of(batch, old, routes), objective_of(Arm(name="r3")))
    torch.testing.assert_close(updated.logprobs, old.logprobs, atol=1e-5, rtol=0)
