"""Which weights drew what a step trains on: the queue's order worked by hand, parts of responses, exchanged groups."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.build import build
from moe_rl.config import Measure, Optimizer
from moe_rl.errors import RunError
from moe_rl.metrics.volatility import route_change
from moe_rl.models.tokens import byte_tokenizer, encode_prompts
from moe_rl.objectives import objective_of
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import Recorder
from moe_rl.rollouts.batches import Queue, collate, join_responses
from moe_rl.rollouts.engine import sampling_of
from moe_rl.seeds import NOISE, PROMPTS, derive
from moe_rl.storage import frames
from moe_rl.storage.folder import digest
from moe_rl.tasks.base import draw
from moe_rl.trainer import train_step
from moe_rl.types import Prompt, Rollout, ScoredRollouts, response_rows
from tests.test_trainer import ARMS, TINY, carry_out, weights, whole_and_cut

SMALL = TINY.replace(
    prompts_per_step=2,
    mini_batches=2,
    eval_prompts=2,
    steps=6,
    eval_every=6,
    measure=Measure(responses=2, detail_every=100),
)
LAGGED = SMALL.replace(batches="lagged(lag=2)")
PARTIAL = LAGGED.replace(**{"batches.partial_tokens": 2})


class Listening:
    """An engine, and the keys that it was asked for."""

    def __init__(self, engine):
        self.engine, self.reports_routes, self.keys = engine, engine.reports_routes, []
        self.load, self.close = engine.load, engine.close

    def generate(self, prompts, group_size, *, key, sampling):
        self.keys.append((*key[2:], sampling.max_new_tokens))
        return self.engine.generate(prompts, group_size, key=key, sampling=sampling)


def trained(run, tmp_path):
    """The batch of every step as the trainer used it, what was asked of the engine in it, and the policy as it was
    before each step."""
    parts = build(run, tmp_path, tmp_path)
    parts = replace(parts, collector=replace(parts.collector, engine=Listening(parts.collector.engine)))
    recorder, batches, asked, before = Recorder(run, parts.policy), [], [], []
    for step in range(1, run.steps + 1):
        before.append(HFPolicy(copy.deepcopy(parts.policy.model), run.optimizer))
        parts.collector.engine.keys.clear()
        train_step(run, parts, step, recorder)
        batches.append(recorder.batch)
        asked.append(list(parts.collector.engine.keys))
    assert all(number > run.steps for number in (*parts.batches.begun, *parts.batches.ready)), "the others wait no more"
    return batches, asked, before


@pytest.fixture(scope="module")
def lagged(tmp_path_factory):
    return trained(LAGGED, tmp_path_factory.mktemp("lagged"))


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory):
    return trained(PARTIAL, tmp_path_factory.mktemp("parts"))


# ---------------------------------------------------------------------- whole responses
def test_without_a_lag_a_batch_is_what_the_engine_draws_in_its_step(tmp_path):
    """The same bits as a loop that knows no queue; only what drew them is said, too."""
    parts = build(SMALL, tmp_path, tmp_path)
    its = parts.collector
    for step in (1, 2, 7):
        drawn = draw(its.task, 2, derive(SMALL.seed, PROMPTS, step), {p.text for p in its.held_out})
        prompts = encode_prompts(drawn, its.tokenizer)
        rollouts = its.engine.generate(prompts, 4, key=(SMALL.seed, NOISE, step), sampling=sampling_of(SMALL))
        rewards = [its.task.reward(r.prompt, r.text) for r in rollouts]
        expected = collate(rollouts, [0, 0, 0, 0, 1, 1, 1, 1], rewards, its.tokenizer.pad_token_id)
        found = parts.batches.next(parts.collector, step)
        for name in (
            "tokens",
            "attention_mask",
            "response_mask",
            "prompt_index",
            "rollout_logprobs",
            "rewards",
            "finished",
        ):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert found.rollout_routes == expected.rollout_routes
        assert found.rollout_routes.weight_version == f"step {step - 1}"
        assert (found.sampled_at[found.response_mask] == step - 1).all()
    assert not parts.batches.ready and not parts.batches.begun


def test_batches_are_drawn_so_many_steps_before_they_are_trained_on(lagged):
    """By hand, for a lag of 2: step 1 draws batches 1, 2 and 3, every later step the one after the next."""
    batches, asked, _ = lagged
    assert asked == [[(1, 6), (2, 6), (3, 6)], [(4, 6)], [(5, 6)], [(6, 6)], [(7, 6)], [(8, 6)]]
    drawn_by = [set(b.sampled_at[b.response_mask].tolist()) for b in batches]
    assert drawn_by == [{0}, {0}, {0}, {1}, {2}, {3}]
    assert [b.rollout_routes.weight_version for b in batches] == [f"step {n}" for n in (0, 0, 0, 1, 2, 3)]


@pytest.mark.parametrize("which", ["lagged", "in_parts"])
def test_what_the_engine_said_is_what_the_weights_of_that_time_say(which, request):
    """Log-probs and routes of every token are those of the weights that the batch names, and not the trainer's own."""
    batches, _, before = request.getfixturevalue(which)
    stale = 0
    for step, batch in enumerate(batches, 1):
        for version in batch.sampled_at[batch.response_mask].unique().tolist():
            there = batch.response_mask & (batch.sampled_at == version)
            part = replace(batch, response_mask=there)
            scored, now = before[version].score(batch), before[step - 1].score(batch)
            gap, moved = ((s.logprobs - batch.rollout_logprobs)[there].abs().max() for s in (scored, now))
            assert gap < 1e-5, (step, version)
            change = route_change(scored.routes.ids(), batch.rollout_routes.ids(), response_rows(part)).row()
            assert change["any_change_rate"] == 0, (step, version)
            stale += bool(moved > 1e-3)
    assert stale >= 3, "else old weights and new ones could not be told apart"


def test_old_policy_is_rescored_or_what_sampled_as_the_arm_says(tmp_path):
    """Rescored, the first mini-batch has no ratio; against the engine it has all of the staleness, from step 2 on."""
    tables = {
        anchor: carry_out(LAGGED.replace(arm=ARMS["grpo"].replace(anchor=anchor), steps=3), tmp_path / anchor)
        for anchor in ("policy", "engine")
    }
    steps = {anchor: t["steps"].query("step > 0").set_index("step") for anchor, t in tables.items()}
    assert (steps["policy"]["first_update_log_ratio_max"] < 1e-5).all()
    first = steps["engine"]["first_update_log_ratio_max"]
    assert first[1] < 1e-5 and (first[[2, 3]] > 1e-3).all()
    assert steps["policy"]["reward"][1:2].equals(steps["engine"]["reward"][1:2])


def test_random_lags_are_within_bounds_and_all_of_them_happen(tmp_path):
    run, queue = SMALL.replace(batches="lagged(lag=3, mode=random)", steps=8), Queue(3, "random")
    lags = [queue.lag_of(run.seed, n) for n in range(1, 400)]
    assert set(lags) == {0, 1, 2, 3} and min(map(lags.count, range(4))) > 70
    assert lags != [queue.lag_of(1, n) for n in range(1, 400)]
    batches, asked, _ = trained(run, tmp_path)
    begins = {n: max(1, n - lags[n - 1]) for n in range(1, 12)}
    for step, (batch, keys) in enumerate(zip(batches, asked, strict=True), 1):
        assert keys == [(n, 6) for n, begun in begins.items() if begun == step]
        assert (batch.sampled_at[batch.response_mask] == begins[step] - 1).all()


# ---------------------------------------------------------------------- parts of responses
def test_a_response_draws_so_many_tokens_per_step(in_parts):
    """By hand, for a lag of 2 and 2 tokens of 6 per step: batch 1 is due at once, batch 2 has two steps, all later ones
    have three."""
    batches, asked, _ = in_parts
    assert asked[0] == [(1, 6), (2, 2), (3, 2)]
    assert asked[1] == [(2, 0, 2, 4), (3, 0, 2, 2), (4, 2)]
    assert asked[2] == [(3, 0, 4, 2), (4, 0, 2, 2), (5, 2)]
    whole = {1: [0] * 6, 2: [0, 0, 1, 1, 1, 1], 3: [0, 0, 1, 1, 2, 2], 4: [1, 1, 2, 2, 3, 3], 6: [3, 3, 4, 4, 5, 5]}
    for step, versions in whole.items():
        batch, complete = batches[step - 1], 0
        for row, own in zip(batch.sampled_at, batch.response_mask, strict=True):
            length = int(own.sum())
            assert row[own].tolist() == versions[:length]
            complete += length == 6
        assert complete > 4
    assert [b.rollout_routes.weight_version for b in batches[:3]] == ["step 0", None, None]


def test_parts_at_equal_weights_are_one_response(tmp_path):
    """Nothing moves: the text is that of all tokens, rewards are of it, and routes are those of one pass."""
    run = PARTIAL.replace(optimizer=Optimizer(lr=0.0))
    batches, _, before = trained(run, tmp_path)
    task = build(run, tmp_path, tmp_path).collector.task
    for batch in batches[2:]:
        scored = before[0].score(batch)
        known = batch.rollout_routes.known
        assert known[batch.attention_mask[:, 1:].nonzero(as_tuple=True)].all(), "every token that was followed"
        assert torch.equal(scored.routes.experts[known], batch.rollout_routes.experts[known])
        for row, own, reward in zip(batch.tokens, batch.response_mask, batch.rewards, strict=True):
            ids = [token for token in row[own].tolist() if token != byte_tokenizer().eos_token_id]
            text = byte_tokenizer().decode(ids, skip_special_tokens=False)
            assert reward.item() == pytest.approx(task.reward(Prompt(""), text))


def rollout(text: str, prompt: Prompt, finished: bool = False, version: int = 0) -> Rollout:
    tokens = tuple(text.encode())
    return Rollout(
        prompt, tokens, torch.arange(len(tokens)) - 9.0, text, finished, sampled_at=torch.full((len(tokens),), version)
    )


@pytest.mark.parametrize(
    ("then", "finished", "text", "drawn", "ended"),
    [
        ("#cd", False, "ab", "ab##", True),  # across the seam: what comes after it is left out
        ("#", False, "ab", "ab##", True),  # the last token completes it
        ("c##", True, "ab#c", "ab#c##", True),  # the engine saw it itself
        ("cde", False, "ab#cde", "ab#cde", False),
    ],
)
def test_a_stop_string_across_a_seam_ends_the_response_there(then, finished, text, drawn, ended):
    prompt = Prompt("p", tokens=(1, 2))
    found = join_responses(
        rollout("ab#", prompt), rollout(then, prompt, finished, 1), lambda ids: bytes(ids).decode(), ("##",)
    )
    assert (found.text, bytes(found.tokens).decode(), found.finished) == (text, drawn, ended)
    assert found.sampled_at.tolist() == [0, 0, 0] + [1] * (len(drawn) - 3)
    assert len(found.logprobs) == len(drawn)


def test_a_character_whose_bytes_lie_on_both_sides_of_a_seam_is_read_whole():
    first, then = (
        Rollout(
            Prompt("p"),
            tuple(part),
            torch.zeros(len(part)),
            part.decode(errors="replace"),
            False,
            sampled_at=torch.zeros(len(part), dtype=torch.long),
        )
        for part in (b"a\xc3", b"\xa9b")
    )
    assert join_responses(first, then, lambda ids: bytes(ids).decode()).text == "aéb"


# ---------------------------------------------------------------------- dynamic sampling
class Scripted:
    """Prompts as they are written down; `differ` alone gives its samples different rewards. Four samples of three
    tokens per prompt, the first of which succeeds."""

    reports_routes = False

    def __init__(self, *calls: str):
        self.calls, self.keys = [call.split() for call in calls], []

    def prompts(self, count, seed):
        call = self.calls.pop(0)
        assert len(call) == count
        return [Prompt(f"{word}{len(self.calls)}{i}", tokens=(1,)) for i, word in enumerate(call)]

    def reward(self, prompt, completion):
        return float(prompt.text.startswith("all") or (prompt.text.startswith("differ") and completion == "0"))

    def generate(self, prompts, group_size, *, key, sampling):
        self.keys.append(key)
        return [Rollout(p, (1, 2, 3), torch.zeros(3), str(n), True) for p in prompts for n in range(group_size)]

    def load(self, weights):
        """It has none."""

    def close(self):
        """Nothing to give back."""


@pytest.mark.parametrize(
    ("refills", "calls", "kept", "counts"),
    [
        (1, ("differ all differ none", "none differ"), "differ differ differ all", (6, 3)),
        (2, ("differ all differ none", "none differ", "all"), "differ differ differ all", (7, 4)),
        (9, ("all none none none", "differ differ differ differ"), "differ differ differ differ", (8, 4)),
        (9, ("differ differ differ differ",), "differ differ differ differ", (4, 0)),
    ],
)
def test_groups_without_signal_give_way_and_what_that_cost_is_counted(refills, calls, kept, counts, tmp_path):
    script, queue = Scripted(*calls), Queue(refills=refills)
    collector = replace(build(SMALL, tmp_path, tmp_path).collector, run=TINY, task=script, engine=script)
    batch = queue.next(collector, 3)
    rewards = {"differ": [1, 0, 0, 0], "all": [1] * 4, "none": [0] * 4}
    assert batch.rewards.tolist() == [r for word in kept.split() for r in rewards[word]]
    assert batch.prompt_index.tolist() == [i for i in range(4) for _ in range(4)] and len(batch) == 16
    row, groups = queue.row, " ".join(calls).split()
    assert (row["sampled_groups"], row["sampled_zero_variance_groups"]) == counts
    assert row["sampled_tokens"] == 12 * len(groups)
    assert row["sampled_reward"] == pytest.approx(np.mean([r for word in groups for r in rewards[word]]))
    assert script.keys == [(0, NOISE, 3), (0, NOISE, 3, 1, 0), (0, NOISE, 3, 2, 0)][: len(calls)]


@pytest.mark.filterwarnings("ignore:step .* all rewards of every group are equal")
def test_with_dynamic_sampling_no_batch_has_groups_without_signal_while_refills_last(tmp_path):
    """A reward that half of the groups share: one byte of a random model is even or odd."""
    run = SMALL.replace(max_new_tokens=1, group_size=2, steps=3)
    plain, refilled = (
        carry_out(r, tmp_path / r.batches.name)["steps"].query("step > 0")
        for r in (run, run.replace(batches="dynamic(refills=20)"))
    )
    assert plain["zero_variance_groups"].max() > 0 == refilled["zero_variance_groups"].max()
    cost = refilled["sampled_groups"] - refilled["sampled_zero_variance_groups"]
    assert (cost == 2).all() and (refilled["sampled_groups"] > 2).any() and "sampled_groups" not in plain


# ---------------------------------------------------------------------- what is measured
def test_a_row_per_lag_and_the_engine_only_at_equal_weights(tmp_path):
    tables = carry_out(PARTIAL, tmp_path / "run")
    steps = tables["steps"].query("step > 0").set_index("step")
    lags = frames.read_table(tmp_path / "run", "lags").set_index(["step", "lag"])
    assert [list(lags.loc[s].index) for s in (1, 2, 3, 6)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
    for step, row in steps.iterrows():
        mine = lags.loc[step]
        assert mine["lag_tokens"].sum() == row["token_n"] == mine["token_n"].sum()
        assert row["lag_mean"] == pytest.approx((mine.index * mine["lag_tokens"]).sum() / row["token_n"])
        assert row["lag_max"] == max(mine.index)
        pooled = (mine["token_log_ratio_mean"] * mine["token_n"]).sum() / row["token_n"]
        assert pooled == pytest.approx(row["token_log_ratio_mean"], abs=1e-9)
    assert list(steps.index[steps["engine_kl_k3"].notna()]) == [1]
    assert steps.loc[1, "engine_logprob_max"] < 1e-5 and (lags.xs(0, level="lag")["stale_logprob_max"] < 1e-5).all()
    assert (lags.xs(2, level="lag")["stale_kl_k3"] > 1e-6).all()
    assert not len(frames.read_table(tmp_path / "run", "lags").query("step == 0"))


def test_the_cosine_of_consecutive_gradients_is_that_of_the_vectors(tmp_path):
    """Against numpy, from `gradient`, which takes no step; the first update of a run has none before it."""
    parts = build(SMALL, tmp_path, tmp_path)
    policy = HFPolicy(parts.policy.model, SMALL.optimizer, gradient_cosine=True)
    objective = objective_of(SMALL.arm)
    rollouts = parts.batches.next(parts.collector, 1)
    scored = ScoredRollouts(**vars(rollouts), old_logprobs=policy.score(rollouts).logprobs)
    batch = parts.advantage.attach_advantages(scored)
    vectors, said = [], []
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        part = objective.attach_weights(batch.rows(rows))
        vectors.append(policy.gradient(part, objective).double().numpy())
        said.append(policy.update(part, objective).metrics.get("grad_cosine"))
    by_hand = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(vectors, vectors[1:], strict=False)]
    assert said[0] is None and said[1:] == pytest.approx(by_hand, rel=1e-9)
    assert all(0.001 < abs(c) < 0.999 for c in by_hand), "numbers that a mistake would change"


def test_the_cosine_is_a_column_where_it_is_asked_for_and_changes_no_weight(tmp_path):
    asked = SMALL.replace(steps=2, eval_every=2, measure=SMALL.measure.replace(gradient_cosine=True))
    tables = carry_out(asked, tmp_path / "asked")
    carry_out(SMALL.replace(steps=2, eval_every=2), tmp_path / "plain")
    assert weights(tmp_path / "asked")[1] == weights(tmp_path / "plain")[1]
    cosines = tables["updates"]["grad_cosine"]
    assert np.isnan(cosines[0]) and cosines[1:].between(-1, 1).all()
    steps = tables["steps"].query("step > 0")["grad_cosine"]
    assert steps.tolist() == pytest.approx([cosines[1], (cosines[2] + cosines[3]) / 2])


# ---------------------------------------------------------------------- kills, and settings that cannot be
EVERYTHING = PARTIAL.replace(
    group_size=2,
    mini_batches=2,
    steps=5,
    **{"batches.refills": 2},
    measure=Measure(responses=2, detail_every=100, gradient_cosine=True),
)


@pytest.mark.parametrize("mode", ["fixed", "random"])
def test_an_interrupted_run_ends_identical_with_all_that_waited(mode, tmp_path):
    whole_and_cut(EVERYTHING.replace(arm=ARMS["r3"], **{"batches.mode": mode}), tmp_path)
    lags = frames.read_table(tmp_path / "cut", "lags")
    assert lags["lag"].max() == (
        2 if mode == "fixed" else max(Queue(2, mode).lag_of(EVERYTHING.seed, n) for n in range(3, 6))
    )


def test_a_queue_whose_file_is_gone_is_not_filled_anew(tmp_path):
    run = LAGGED.replace(steps=2, eval_every=2)
    carry_out(run, tmp_path / "run")
    (commit,) = (tmp_path / "run").glob("commit/*")
    (commit / "checkpoint/batches.pt").unlink()
    (commit / "checkpoint.sha256").write_text(digest(commit / "checkpoint"))  # else it is known not to be whole
    (tmp_path / "run" / "manifest.json").write_text(
        (tmp_path / "run" / "manifest.json").read_text().replace('"finished": 2', '"finished": 1')
    )
    with pytest.raises(RunError, match="step 3 .*in step 1.*batches.pt"):
        carry_out(run.replace(steps=4), tmp_path / "run")
