"""Megatron-core on two and four CPU ranks against the Hugging Face policy, fp32, random weights.

Three launches serve all tests here: `megatron_on_ranks.py` states facts as JSON, once on two ranks and once on four,
and the command line carries out `megatron_study.py` on two. Those on two are torchrun's; the four are forks of one
process, since importing everything takes longer than a layout does. The layouts are in `megatron_layouts.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from moe_rl.build import execute
from moe_rl.config import RunConfig
from moe_rl.storage.folder import RunFolder
from moe_rl.storage.frames import read_table
from tests.integrations.megatron_layouts import LAYOUTS, ON_RANKS, of_ranks, ranks_of, require
from tests.integrations.megatron_study import replay, short, study

pytest.importorskip("megatron", reason="pip install 'moe_rl[megatron]'")
pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent
REWARDS = ("reward", "exact", "eval_reward_greedy", "eval_reward_sampled", "response_tokens")
CASES = [name + recompute for name in LAYOUTS for recompute in ("", "+recompute")]


def torchrun(world: int) -> tuple[str, ...]:
    """The beginning of a command for so many ranks, on a free port."""
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """One for all workers of a parallel test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (shared / "megatron").mkdir(exist_ok=True)
    return shared / "megatron"


def launched_once(folder: Path, name: str, *words: str | Path | int) -> dict:
    """Launch, unless another worker has; one launch at a time."""
    done, root = folder / f"{name}.json", HERE.parents[1]
    with FileLock(folder / "lock"):
        if not done.exists():
            env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
            ran = subprocess.run(
                [sys.executable, *map(str, words)], env=env, cwd=root, capture_output=True, text=True, timeout=1200
            )
            done.write_text(json.dumps({"code": ran.returncode, "out": ran.stdout, "err": ran.stderr}))
    return json.loads(done.read_text())


@pytest.fixture(scope="session")
def launch(folder) -> Callable[[int], dict]:
    """What the launch on so many ranks said; it is made when a test first asks."""
    script = HERE / "megatron_on_ranks.py"
    words = {2: (*torchrun(2), script, folder / "2"), 4: (script, folder / "4", 4)}
    return cache(lambda world: launched_once(folder, f"on-{world}", *words[world]))


@pytest.fixture(scope="session")
def facts(folder, launch) -> Callable[[int], dict]:
    """The facts that were found on so many ranks."""

    @cache
    def of(world: int) -> dict:
        said, file = launch(world), folder / str(world) / "facts.json"
        assert file.exists(), said["err"][-5000:]
        return json.loads(file.read_text())

    return of


@pytest.fixture(scope="session")
def command(folder) -> dict:
    words = ("run", HERE / "megatron_study.py", "--policy", "megatron(ep=2)", "--out", folder / "runs")
    return launched_once(folder, "command", *torchrun(2), "-m", "moe_rl", *words)


# ---------------------------------------------------------------------- the verbs, in every layout
@pytest.mark.parametrize("layout", CASES)
def test_a_layout_scores_replays_and_learns_as_the_hugging_face_policy(layout, facts):
    require(facts(ranks_of(layout.removesuffix("+recompute")))[layout])


@pytest.mark.parametrize("name", [*ON_RANKS, "unnormalised"])
def test_other_families_and_gates_agree_on_ranks_too(name, facts):
    require(facts(2)[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_is_read_with_its_moments_in_the_same_layout_and_refused_in_another(layout, facts):
    checkpoint = facts(ranks_of(layout))[f"{layout} checkpoint"]
    assert checkpoint["weights"] and checkpoint["next step, bits"], "bit for bit"
    assert checkpoint["next step"] < (1e-4 if layout == "pp2" else 1e-5)
    assert checkpoint["moved"] > 1e-4 and f"checkpoint-{layout} was written with" in checkpoint["refused"]


def test_an_interrupted_run_goes_on_and_ends_identical(facts):
    assert facts(2)["resumed"] == {"tables": True, "weights": True}


def test_a_rank_that_fails_ends_the_job_with_its_traceback(launch):
    said = launch(2)
    assert said["code"] != 0 and "rank 1 fails on purpose" in said["err"] and "Traceback" in said["err"]
    assert "rank 0 went on without rank 1" not in said["err"]


def test_a_rank_holds_its_share_of_a_recording(facts):
    """Each of two has the whole at hand, and half of it in memory; what it replays is its own rows and no more."""
    found = facts(2)["memory"]
    assert found["right"] and found["aimed"]
    assert found["shards held"] <= 1.4 and found["shards aimed"] <= 1


def test_pushes_to_a_server_reach_parity_before_and_after_a_step(facts):
    found = facts(2)["server"]
    assert found["gap"] < 1e-5 and found["gap after a step"] < 1e-5 < found["moved"] and found["pushes"] == 2


# ---------------------------------------------------------------------- a whole run
@pytest.fixture(scope="module")
def tables(command, folder, tmp_path_factory) -> dict:
    """The tables of the run on two ranks, and of the same run with the Hugging Face policy."""
    assert command["code"] == 0, command["err"][-5000:]
    theirs = in_one_process(study.base.replace(arm=replay), tmp_path_factory)
    return beside(folder / "runs/megatron/replay/base/seed=0", theirs)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> Path:
    return in_one_process(short, tmp_path_factory)


def in_one_process(run: RunConfig, tmp_path_factory) -> Path:
    """The run with the Hugging Face policy."""
    path = tmp_path_factory.mktemp("hf")
    with RunFolder.open(path / "run", run.to_dict(), run.hash) as opened:
        execute(run, opened, cache=path)
    return path / "run"


def beside(ours: Path, theirs: Path) -> dict:
    return {n: (read_table(ours, n), read_table(theirs, n)) for n in ("steps", "updates", "layers")}


def test_the_command_completes_a_study_on_two_ranks_and_rank_0_writes_it_once(command, tables, folder):
    assert command["out"].count("3/3  finished") == 1
    assert (folder / "runs/megatron/figures/learning.png").exists()


def test_a_step_is_exported_with_the_weights_of_all_ranks(tables, folder):
    saved = [
        load_file(folder / f"runs/megatron/replay/base/seed=0/checkpoints/step={n:06d}/model.safetensors")
        for n in (1, 3)
    ]
    assert saved[0].keys() == saved[1].keys()
    assert all(not torch.equal(w, saved[1][name]) for name, w in saved[0].items() if "proj" in name)


def test_three_steps_of_grpo_with_replay_get_the_rewards_of_the_hugging_face_policy(tables):
    ours, theirs = tables["steps"]
    assert len(ours) == 4 and theirs["reward"].nunique() > 1
    for column in REWARDS:
        assert ours[column].equals(theirs[column]), column


def test_three_steps_of_grpo_with_replay_have_its_ratio_statistics_and_slot_change(tables):
    for name in ("steps", "updates"):
        ours, theirs = (table[table["step"] > 0] for table in tables[name])
        moved = theirs["token_log_ratio_var"] > 1e-9  # the ratios of a first mini-batch are nothing but rounding
        assert moved.sum() >= 3
        for column in ("token_log_ratio_mean", "token_log_ratio_var", "sequence_log_ratio_var", "token_kl_k3"):
            gap = (ours[column] - theirs[column]).abs()[moved]
            scale = theirs["token_log_ratio_var"][moved] ** 0.5 if column.endswith("mean") else theirs[column][moved]
            assert (gap <= 1e-2 * scale.abs()).all(), column
    for name in ("steps", "updates", "layers"):
        ours, theirs = tables[name]
        gap = (ours["expert_change_rate"] - theirs["expert_change_rate"]).abs().dropna()
        assert len(gap) >= 2 and gap.max() <= 2e-3


def test_parity_of_engine_and_policy_is_reported_for_every_push(tables):
    ours, theirs = tables["steps"]
    assert ours["push_gap_max"].dropna().between(0, 1e-5).sum() == 3
    assert "push_gap_max" not in theirs


@pytest.mark.parametrize("layout", of_ranks(4))
def test_two_steps_on_four_ranks_with_every_part_of_a_loss_are_those_of_one_process(layout, facts, folder, short_run):
    facts(4)  # which says so when the launch failed
    both = beside(folder / "4/runs" / layout, short_run)
    assert both["steps"][0]["push_gap_max"].dropna().between(0, 1e-5).sum() == 2
    assert all(both["steps"][0][column].equals(both["steps"][1][column]) for column in REWARDS)
    ours, theirs = (updates[["term_kl", "term_entropy", "loss", "grad_norm"]] for updates in both["updates"])
    assert len(ours) == 4 and (ours - theirs).abs().max().max() < 1e-4
