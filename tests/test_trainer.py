"""The whole loop on a tiny model: what arms share, what replay changes, and that an interrupted run ends identical."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from moe_rl.build import build, execute
from moe_rl.config import Arm, ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.errors import ConfigError, Diverged, RunError
from moe_rl.models.load import load
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import Recorder
from moe_rl.registry import Component
from moe_rl.rollouts.batches import Queue
from moe_rl.storage import frames
from moe_rl.storage.folder import RunFolder
from moe_rl.trainer import sample, train

TINY = RunConfig(
    arm=Arm(name="grpo"),
    task="tests.even_task:EvenCharacters",
    model=ModelConfig(overrides={"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 258}),
    cold_start=ColdStart(target=0.0),
    optimizer=Optimizer(lr=2e-3),
    measure=Measure(responses=8, detail_every=2),
    steps=4,
    prompts_per_step=4,
    group_size=4,
    mini_batches=4,
    max_new_tokens=6,
    eval_every=2,
    eval_prompts=6,
    save_every=2,
)
CLIP = {"clip_low": 0.01, "clip_high": 0.013}
ARMS = {
    "grpo": Arm(name="grpo"),
    "replay": Arm(name="replay", routes="old_policy"),
    "r3": Arm(name="r3", routes="rollout"),
    "shuffled": Arm(name="shuffled", routes="shuffled"),
    "random": Arm(name="random", routes="random_sets"),
    "dose": Arm(name="dose", routes=Component("random_share", share=0.5)),
    "margins": Arm(name="margins", routes=Component("by_margin", below=0.5)),
    "gspo": Arm(name="gspo", loss=Component("gspo", **CLIP)),
    "gspo_token": Arm(name="gspo_token", loss=Component("gspo_token", **CLIP)),
    "ratio-replayed": Arm(name="ratio-replayed", ratio_routes="old_policy"),
    "gradient-replayed": Arm(name="gradient-replayed", routes="old_policy", ratio_routes="live"),
    "soft": Arm(name="soft", routes=Component("soft", ratio=0.9)),
    "recall": Arm(name="recall", routes="recall"),
    "undecided": Arm(name="undecided", routes=Component("by_margin", below=0.1)),
    "rspo": Arm(
        name="rspo", loss=Component("rspo", base="gspo", options=CLIP), terms=(Component("load_balance", coef=0.01),)
    ),
    "routers": Arm(name="routers", routes="random_sets", terms=(Component("router_kl", coef=0.1),)),
    "kl": Arm(name="kl", terms=(Component("kl", coef=0.1), Component("entropy", coef=0.01))),
}


def carry_out(run, path, listen=lambda rows: None):
    with RunFolder.open(path, run.to_dict(), run.hash) as folder:
        execute(run, folder, cache=path.parent, listen=listen)
    return {name: frames.read_table(path, name) for name in ("steps", "updates", "layers")}


def weights(path):
    return torch.load(next(path.glob("commit/*/checkpoint/optimizer.pt"))), next(
        path.glob("commit/*/checkpoint/model.safetensors")
    ).read_bytes()


def whole_and_cut(run, folder):
    """Tables of a run, and of the same one interrupted at step 3, after a commit at step 2, that went on and ended
    identical, in `folder`'s `whole` and `cut`."""
    whole = carry_out(run, folder / "whole")

    def interrupt(rows):
        if rows["steps"][0]["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(run, folder / "cut", interrupt)
    cut = carry_out(run, folder / "cut")
    assert frames.diff(folder / "whole", folder / "cut") is None
    assert weights(folder / "whole")[1] == weights(folder / "cut")[1]
    return whole, cut


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Tables of one small run of every arm; after the first step weights have moved, and a second shows it."""
    root = tmp_path_factory.mktemp("arms")
    return {
        name: carry_out(TINY.replace(arm=arm, steps=4 if name == "grpo" else 2), root / name)
        for name, arm in ARMS.items()
    }


@pytest.mark.parametrize("arm", ARMS)
def test_first_mini_batch_ratios_are_one_in_every_arm(finished, arm):
    steps = finished[arm]["steps"]
    assert (steps["first_update_log_ratio_max"].dropna() < 1e-5).all()
    later = finished[arm]["updates"].query("update > 1")
    assert (later["token_log_ratio_max"] > 1e-4).any(), "later mini-batches must be off-policy, or nothing is compared"


def test_rollouts_and_evaluations_are_kept_and_keeping_changes_nothing(finished, tmp_path):
    """Every number and weight is that of the same run without."""
    run = TINY.replace(arm=ARMS["replay"], steps=2)
    for rollouts in (0, 8):
        carry_out(run.replace(**{"measure.rollouts": rollouts}), tmp_path / str(rollouts))
    assert weights(tmp_path / "0")[1] == weights(tmp_path / "8")[1]
    part = frames.diff(tmp_path / "0", tmp_path / "8")
    assert part.table == "rollouts" and part.column is None, "all other tables are equal"
    assert frames.read_table(tmp_path / "8", "rollouts").groupby("step").size().to_dict() == {1: 8, 2: 8}
    rows, steps = (frames.read_table(tmp_path / "8", name) for name in ("evaluations", "steps"))
    assert len(rows) == 2 * 6 * 2 and set(rows["benchmark"]) == {"held_out"}
    means = rows[rows["sample"] == 1].groupby("step")["reward"].mean()
    assert means.to_numpy() == pytest.approx(steps.set_index("step")["eval_reward_sampled"].dropna().to_numpy())


class Flips(Recorder):
    """Adds up the flips of the rows of every mini-batch."""

    found: list[tuple[float, float]] = []

    def end(self, push_gap, probed):
        rows, moe_layers = super().end(push_gap, probed), len(self.unconstrained.routes.layout.moe_layers)
        for index, update in zip(self.split, rows["updates"], strict=True):
            flips = self.flips(index)[self.batch.response_mask[index]].sum().item() / moe_layers
            self.found.append((flips, update["fresh_any_change_rate"] * update["token_n"]))
        return rows


def test_flips_are_the_changes_of_sets_that_a_mini_batch_reports(tmp_path):
    """Another way to count them: `fresh_any_change_rate` is their mean over tokens and MoE layers."""
    run, Flips.found = TINY.replace(steps=1), []
    with RunFolder.open(tmp_path / "run", run.to_dict(), run.hash) as folder:
        parts = build(run, folder.path, tmp_path)
        folder.finish(train(run, replace(parts, recorder=Flips), folder))
    counted, reported = zip(*Flips.found, strict=True)
    assert counted == pytest.approx(reported) and counted[0] == 0 < max(counted)


def test_arms_start_from_the_same_rollouts(finished):
    first = {
        name: tables["steps"].iloc[:2][["reward", "response_tokens", "eval_exact_sampled"]]
        for name, tables in finished.items()
    }
    for name, rows in first.items():
        pd.testing.assert_frame_equal(rows, first["grpo"], obj=name)


def test_only_replay_arms_report_coverage_and_it_is_complete(finished):
    for name, tables in finished.items():
        replays = ARMS[name].routes.name != "live"
        assert ("coverage" in tables["updates"]) == replays
        if name in ("replay", "r3", "random"):
            assert (tables["updates"]["coverage"] == 1).all()
    assert (finished["shuffled"]["updates"]["coverage"] < 1).any(), "other prompts are shorter: those rows route freely"


def test_replay_of_the_rollout_is_replay_of_the_old_policy_when_the_engine_is_the_policy(finished):
    """One set of weights in fp32 routes alike while sampling and while scoring, so R2 and R3 coincide."""
    for table in ("steps", "updates"):
        a, b = (finished[arm][table] for arm in ("replay", "r3"))
        for column in ("reward", "expert_change_rate", "token_log_ratio_var", "pull"):
            if column in a:
                pd.testing.assert_series_equal(a[column], b[column], rtol=1e-4, atol=1e-6)


def test_routers_are_compared_under_the_same_routes(finished):
    """At equal weights they are equal, under a placebo's routes, too; and later they are not."""
    for name, column in (("rspo", "own_router_shift"), ("routers", "term_router_kl")):
        found = finished[name]["updates"].set_index(["step", "update"])[column]
        assert (found.xs(1, level="update").abs() < 1e-6).all() and (found.xs(4, level="update") > 1e-6).all(), name
    assert (finished["rspo"]["updates"]["term_load_balance"] > 0.01).all()


def test_details_are_measured_when_due(finished):
    steps, updates = finished["grpo"]["steps"].set_index("step"), finished["grpo"]["updates"]
    due = steps["noise_floor_any_change_rate"].notna()
    assert list(steps.index[due]) == [2, 4]
    assert (steps["noise_floor_any_change_rate"].dropna() == 0).all()
    assert (steps["noise_floor_logprob"].dropna() < 1e-5).all()
    measured = updates[updates["attribution_n"].notna()]
    assert set(measured["step"]) == {2, 4} and set(measured["update"]) == {2, 3, 4}
    assert set(updates[updates["expert_change_rate"].notna()]["step"]) == {2, 4}
    assert steps["expert_change_rate"].notna().sum() == 4, "the step's own volatility is measured at every step"


def test_with_one_update_per_step_all_arms_coincide(tmp_path):
    """N = 1: every ratio is 1, so clipping, the unit of the ratio and replay change neither value nor gradient."""
    rewards = {}
    for name in ("grpo", "replay", "gspo"):
        run = TINY.replace(arm=ARMS[name], mini_batches=1, steps=3)
        with pytest.warns(UserWarning, match="one update per step"):
            rewards[name] = carry_out(run, tmp_path / name)["steps"]
    for name in ("replay", "gspo"):
        for column in ("reward", "eval_reward_greedy", "entropy"):
            pd.testing.assert_series_equal(rewards[name][column], rewards["grpo"][column], rtol=1e-4)


def test_an_interrupted_run_ends_identical(tmp_path):
    whole, cut = whole_and_cut(TINY.replace(arm=ARMS["replay"]), tmp_path)
    assert len(cut["steps"]) == len(whole["steps"]) == 5


def test_more_steps_extend_a_run_as_if_it_had_never_stopped(tmp_path):
    carry_out(TINY.replace(steps=2), tmp_path / "grown")
    carry_out(TINY, tmp_path / "grown")
    carry_out(TINY.replace(eval_every=2), tmp_path / "whole")
    assert frames.diff(tmp_path / "grown", tmp_path / "whole") is None


def test_what_terms_add_to_the_loss_is_in_its_row(finished):
    """At the first update the weights are the reference's; later ones have moved away. No other arm has the columns."""
    updates = finished["kl"]["updates"]
    first = updates.query("step == 1 and update == 1").iloc[0]
    assert abs(first["term_kl"]) < 1e-9 and (updates.query("step > 1")["term_kl"] > 1e-5).all()
    assert (updates["term_entropy"] < 0).all()
    assert first["term_entropy"] == pytest.approx(-0.01 * first["entropy"], rel=0.2), "by token instead of by response"
    for name in (name for name, arm in ARMS.items() if not arm.terms):
        assert not [column for column in finished[name]["updates"] if column.startswith("term_")]


@pytest.mark.parametrize("routes", ["old_policy", "random_sets", "shuffled"])
def test_the_reference_is_scored_under_the_routes_that_are_forced(routes, tmp_path):
    """Else a placebo would be pulled away from its experts at equal weights: a KL of nats instead of 0."""
    arm = Arm(name="kl", routes=routes, terms=(Component("kl", coef=1.0),))
    updates = carry_out(TINY.replace(arm=arm, steps=1), tmp_path / "run")["updates"].set_index("update")
    assert abs(updates.loc[1, "term_kl"]) < 1e-9 and updates.loc[4, "term_kl"] > 1e-6


def test_measuring_changes_no_weight(tmp_path):
    """The same run with the least and the most measurement: identical weights."""
    least = TINY.replace(measure=Measure(responses=4, detail_every=100))
    most = TINY.replace(measure=Measure(full=True, detail_every=1))
    carry_out(least, tmp_path / "least")
    carry_out(most, tmp_path / "most")
    assert weights(tmp_path / "least")[1] == weights(tmp_path / "most")[1]


def test_a_diverged_run_that_was_killed_before_it_said_so_is_not_trained_on(tmp_path, monkeypatch):
    """Its last checkpoint holds weights in the middle of a step: to go on from them would train that step again."""
    update, finish, calls = HFPolicy.update, RunFolder.finish, []

    def explode(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise Diverged("the gradient norm is nan")
        return update(self, *args, **kwargs)

    def killed(self, diverged=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(HFPolicy, "update", explode)
    monkeypatch.setattr(RunFolder, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        carry_out(TINY, tmp_path / "run")
    monkeypatch.setattr(RunFolder, "finish", finish)
    for _ in range(2):
        assert list(carry_out(TINY, tmp_path / "run")["steps"]["step"]) == [0, 1]
        assert len(calls) == 7
        with RunFolder.open(tmp_path / "run", TINY.to_dict(), TINY.hash) as folder:
            assert folder.manifest["diverged"].startswith("step 2: the gradient norm")


def test_a_batch_may_have_groups_of_any_size_in_any_order(tmp_path, monkeypatch):
    """Of a source of one's own: fifteen rows of four prompts, shuffled; a prompt with equal rewards has no signal."""
    draw, shares, order = Queue.next, [], [14, 3, 9, 0, 12, 7, 1, 5, 11, 2, 8, 13, 4, 6, 10]

    def own(self, collector, step):
        batch = draw(self, collector, step).rows(torch.tensor(order))
        batch = replace(batch, rewards=torch.where(batch.prompt_index == step % 4, 1.0, batch.rewards))
        groups = [batch.rewards[batch.prompt_index == n] for n in batch.prompt_index.unique()]
        shares.append(sum(len(set(group.tolist())) == 1 for group in groups) / len(groups))
        return batch

    monkeypatch.setattr(Queue, "next", own)
    steps = carry_out(TINY, tmp_path / "run")["steps"]
    assert steps["zero_variance_groups"].dropna().to_list() == shares and 0 < sum(shares) < 4


def test_a_mini_batch_of_which_the_trace_knows_nothing_is_live(tmp_path):
    """A hundredth of the pairs is replayed: some mini-batches have none."""
    arm = Arm(name="a", routes=Component("random_share", share=0.004))
    updates = carry_out(TINY.replace(arm=arm), tmp_path / "run")["updates"]
    assert 0 < updates["coverage"].notna().sum() < len(updates)
    assert (updates["coverage"].dropna() > 0).all()


@pytest.mark.parametrize("when", ["sampling", "evaluation"])
def test_a_run_diverges_where_its_policy_can_no_longer_be_sampled_from(tmp_path, monkeypatch, when):
    """The last update of step 2 left weights that are not finite: its evaluation meets them, or the next sampling."""
    update, calls = HFPolicy.update, []

    def breaks_the_weights(self, *args, **kwargs):
        updated = update(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 8:
            with torch.no_grad():
                self.model.lm_head.weight.fill_(float("nan"))
        return updated

    monkeypatch.setattr(HFPolicy, "update", breaks_the_weights)
    run = TINY.replace(eval_every=2 if when == "evaluation" else 3)
    steps = carry_out(run, tmp_path / "run")["steps"]
    assert list(steps["step"]) == [0, 1, 2], "what was measured of a whole step is kept"
    with RunFolder.open(tmp_path / "run", run.to_dict(), run.hash) as folder:
        assert "NaN or infinite" in folder.manifest["diverged"]


def test_a_task_whose_prompts_leave_no_room_in_the_context_is_refused_before_any_compute(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_rl.build.cold_start", lambda *a, **k: pytest.fail("a cold start was made"))
    run = TINY.replace(**{"model.overrides": TINY.model.overrides | {"max_position_embeddings": 8}})
    with pytest.raises(ConfigError, match="max_position_embeddings.* at most 8"):
        carry_out(run, tmp_path / "run")


def test_any_step_can_be_saved_as_a_hugging_face_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    run = TINY.replace(hf_checkpoints=(0, 1, 4))
    carry_out(run, tmp_path / "run")
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / f"run/checkpoints/step={n:06d}") for n in (0, 1, 4)]
    begun, *later = (m.model.layers[0].mlp.gate.weight for m in saved)
    assert torch.equal(begun, load(run.model, run.cold_start.seed).model.model.layers[0].mlp.gate.weight)
    assert not torch.equal(begun, later[0]) and not torch.equal(*later)
    again = run.replace(
        steps=2,
        hf_checkpoints=(),
        **{"cold_start.target": 0.0, "model": ModelConfig(name=str(tmp_path / "run/checkpoints/step=000004"))},
    )
    carry_out(again, tmp_path / "again")
    (last,) = (tmp_path / "again/checkpoints").iterdir()  # a run that begins with a checkpoint leaves one
    assert last.name == "step=000002" and (last / "tokenizer_config.json").exists()
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(last).model.layers[0].mlp.gate.weight, later[1])


def test_a_step_whose_groups_are_all_equal_warns(tmp_path):
    run = TINY.replace(task=Component("running_sums", digits=3), steps=1)
    with pytest.warns(UserWarning, match="step 1: all rewards"):
        carry_out(run, tmp_path / "run")


def test_a_step_never_trains_on_held_out_prompts(tmp_path):
    parts = build(TINY, tmp_path, tmp_path)
    evaluation = {p.tokens for p in parts.collector.held_out}
    for step in range(1, 6):
        batch = sample(parts, step)
        prompts = batch.attention_mask & ~batch.response_mask
        assert not evaluation & {tuple(row[mask].tolist()) for row, mask in zip(batch.tokens, prompts, strict=True)}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
        OSError(12, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("where", ["load", "update"])
def test_a_full_memory_is_no_damaged_checkpoint_and_names_the_setting_to_lower(tmp_path, monkeypatch, where, error):
    run = TINY.replace(steps=2, save_every=1, micro_batch=3)
    carry_out(run.replace(steps=1), tmp_path / "run")

    def full(self, *args, **options):
        raise error

    monkeypatch.setattr(HFPolicy, where, full)
    with pytest.raises(RunError, match="micro_batch=3, .*micro_batch_tokens") as raised:
        carry_out(run, tmp_path / "run")
    assert "delete" not in str(raised.value).lower()
