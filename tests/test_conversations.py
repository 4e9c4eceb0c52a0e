"""Runs of several turns: one turn is the task it is, what an environment says trains nothing, interrupts and errors."""

from __future__ import annotations

import pytest
import torch

from moe_rl.build import build, check
from moe_rl.config import Arm, Measure
from moe_rl.errors import ConfigError, RunError
from moe_rl.recorder import evaluate
from moe_rl.registry import Component
from moe_rl.rollouts.batches import Queue
from moe_rl.rollouts.engine import sampling_of
from moe_rl.storage import frames
from moe_rl.trainer import attach_advantages, attach_old_policy, sample
from moe_rl.types import prompt_rows, response_rows
from tests.talking_task import Talking
from tests.test_trainer import TINY, carry_out, weights, whole_and_cut

SHORT = {"stop": ("A", "B", "C", "D", "E", "0", "1", "2", "3", "4", " ", "\n"), "max_new_tokens": 24}
"""An untrained model says one of these soon, so that a turn is short."""
TOKEN = Arm(
    name="token", loss=Component("gspo_token", clip_low=0.01, clip_high=0.013), advantage="by_turn", routes="old_policy"
)
CALLS: list[int] = []
"""Of the environment, after every step of the whole run."""
TALK = TINY.replace(
    task="tests.talking_task:Talking",
    arm=TOKEN,
    steps=3,
    eval_every=3,
    save_every=2,
    **SHORT,
    measure=Measure(responses=8, detail_every=3),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder, Talking.calls = tmp_path_factory.mktemp("talk") / "whole", 0
    return folder, carry_out(TALK, folder, lambda rows: CALLS.append(Talking.calls))


def test_a_task_of_one_turn_is_the_environment_that_never_answers(tmp_path):
    """Bit for bit, with the advantage per turn, too, which is then that of the group."""
    same = TINY.replace(steps=1, eval_every=1)
    for name, run in {
        "task": same,
        "environment": same.replace(task="tests.talking_task:OneTurn"),
        "by_turn": same.replace(arm=Arm(name="grpo", advantage="by_turn")),
    }.items():
        carry_out(run, tmp_path / name)
    for other in ("environment", "by_turn"):
        a, b = (frames.read_table(tmp_path / name, "updates") for name in ("task", other))
        assert a["loss"].equals(b["loss"]) and a["grad_norm"].equals(b["grad_norm"])
        assert weights(tmp_path / "task")[1] == weights(tmp_path / other)[1]


def sampled(tmp_path):
    """A first batch of conversations, and what they were built with."""
    parts = build(TALK, tmp_path, tmp_path)
    rollouts = sample(parts, 1)
    scored = attach_old_policy(TALK, parts, 1, rollouts, parts.policy.score(rollouts))
    return parts, attach_advantages(parts, 1, scored)


def test_what_an_environment_says_is_neither_prompt_nor_response(tmp_path):
    parts, batch = sampled(tmp_path)
    said = batch.attention_mask & ~batch.response_mask & (batch.response_mask.cumsum(1) > 0)
    assert int(said.sum()) > 20 and int(batch.turn.max()) == 3
    assert torch.equal(batch.turn > 0, batch.response_mask) and not batch.advantages[said].any()
    assert not batch.rollout_logprobs[said].any() and (batch.rollout_logprobs[batch.response_mask] < 0).all()
    torch.testing.assert_close(batch.turn_rewards.sum(1), batch.rewards)
    assert (batch.turn_rewards != 0).sum() <= batch.turn.amax(1).sum()
    before = torch.nn.functional.pad(said[:, 1:], (0, 1))  # rows whose next token the environment wrote
    assert not (before & (response_rows(batch) | prompt_rows(batch))).any()
    assert (batch.advantages.std(1) > 0).any(), "turns of one response have advantages of their own"

    unconstrained = parts.policy.score(batch)
    gap = (unconstrained.logprobs - batch.rollout_logprobs)[batch.response_mask].abs().max()
    assert gap < 1e-5, "sampled from the cache what one pass over the whole says, up to rounding"
    assert unconstrained.routes.experts[batch.rollout_routes.known].equal(
        batch.rollout_routes.experts[batch.rollout_routes.known]
    )
    assert not unconstrained.logprobs[said].any() and not unconstrained.entropy[said].any()


def test_the_tables_count_turns_and_what_is_not_the_policys(whole):
    steps = whole[1]["steps"].query("step > 0")
    assert steps["turns"].between(1, 3).all() and (steps["environment_tokens"] > 0).all()
    assert (steps["response_tokens"] + steps["environment_tokens"] <= TALK.max_new_tokens).all()
    assert (whole[1]["steps"]["first_update_log_ratio_max"].dropna() < 1e-5).all()
    assert steps["noise_floor_any_change_rate"].dropna().eq(0).all()


def test_a_run_whose_environment_raises_names_the_prompt_and_goes_on_when_it_is_mended(whole, tmp_path, monkeypatch):
    def breaks(calls):
        if calls == CALLS[2] + 9:  # in step 3
            raise ValueError("on purpose")

    monkeypatch.setattr(Talking, "calls", 0)
    monkeypatch.setattr(Talking, "broken", staticmethod(breaks))
    with pytest.raises(RunError, match=r"Talking: .*'on purpose'"):
        carry_out(TALK, tmp_path / "cut")
    assert frames.read_table(tmp_path / "cut", "steps")["step"].tolist() == [0, 1, 2]
    monkeypatch.setattr(Talking, "broken", staticmethod(lambda calls: None))
    carry_out(TALK, tmp_path / "cut")
    assert frames.diff(whole[0], tmp_path / "cut") is None
    assert weights(tmp_path / "cut")[1] == weights(whole[0])[1]


def test_an_interrupted_run_whose_conversations_wait_ends_identical(tmp_path):
    """Seed 8 draws, at random, batch 5 in step 3, and batches 3 and 4 before."""
    run = TALK.replace(
        arm=TOKEN.replace(routes="rollout"),
        batches="lagged(lag=2, mode=random)",
        seed=8,
        prompts_per_step=2,
        mini_batches=2,
        eval_every=4,
        eval_prompts=2,
        measure=Measure(responses=2, detail_every=100),
    )
    whole_and_cut(run, tmp_path)
    assert list((tmp_path / "cut").glob("commit/step=*/checkpoint/batches.pt"))


def test_conversations_that_wait_are_not_drawn_on(tmp_path):
    """Those that were cut off since a reply left no room, too: at equal weights a lag changes nothing."""
    run = TALK.replace(batches="lagged(lag=2)", prompts_per_step=2)
    parts, early = build(run, tmp_path, tmp_path), 0
    for step in (1, 2, 3):
        waited, drawn = parts.batches.next(parts.collector, step), Queue().next(parts.collector, step)
        for name in ("tokens", "attention_mask", "response_mask", "rewards", "finished", "turn", "turn_rewards"):
            assert torch.equal(getattr(waited, name), getattr(drawn, name)), name
        written = (waited.attention_mask.sum(1) - waited.response_mask.int().argmax(1))[~waited.finished]
        early += int((written < run.max_new_tokens).sum())
    assert early and not parts.batches.begun


def test_an_evaluation_counts_the_tokens_of_the_policy_alone(tmp_path):
    parts = build(TALK, tmp_path, tmp_path)
    found = evaluate(
        parts.collector.engine, parts.collector.task, parts.collector.held_out, sampling_of(TALK), key=(0, 0, 0)
    )
    said = [(row["response_tokens"], sum(t.end - t.start for t in r.turns), len(r.tokens)) for row, r in found]
    assert all(counted == own for counted, own, _ in said) and any(own < whole for _, own, whole in said)


def test_parts_of_conversations_are_refused_before_anything_is_drawn():
    with pytest.raises(ConfigError, match="partial_tokens=4"):
        check(TALK.replace(batches="lagged(lag=1, partial_tokens=4)"))
    assert check(TALK) == check(TALK.replace(batches="lagged(lag=1)")) == []
