"""Megatron-core on two CPU ranks against the Hugging Face policy, fp32, random weights; and what is refused.

Two launches of torchrun serve all tests here: `megatron_on_two_ranks.py` states facts as JSON, and the command line
carries out `megatron_study.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from moe_rl.config import EngineConfig, ModelConfig, Parallel, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.execute import check, execute
from moe_rl.frames import read_table
from moe_rl.models import hf_config
from moe_rl.policies.megatron_layout import check_layout
from moe_rl.rollouts import choose
from moe_rl.runs import RunFolder
from tests.policies.megatron_study import replay, study

pytest.importorskip("megatron.core", reason="pip install 'moe_rl[megatron]'")
pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent
LAYOUTS = [name + recompute for name in ("dp2", "ep2", "tp2", "pp2") for recompute in ("", "+recompute")] + ["tp2+ep2"]


def torchrun(*words: str | Path) -> subprocess.CompletedProcess:
    """Two ranks, on a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, words)]
    root = HERE.parents[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """One for all workers of a parallel test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    (shared / "megatron").mkdir(exist_ok=True)
    return shared / "megatron"


def launched_once(folder: Path, name: str, *words: str | Path) -> dict:
    """Launch, unless another worker has; one launch at a time."""
    done = folder / f"{name}.json"
    with FileLock(folder / "lock"):
        if not done.exists():
            ran = torchrun(*words)
            done.write_text(json.dumps({"code": ran.returncode, "out": ran.stdout, "err": ran.stderr}))
    return json.loads(done.read_text())


@pytest.fixture(scope="session")
def launch(folder) -> dict:
    return launched_once(folder, "launch", HERE / "megatron_on_two_ranks.py", folder)


@pytest.fixture(scope="session")
def facts(folder, launch) -> dict:
    assert (folder / "facts.json").exists(), launch["err"][-5000:]
    return json.loads((folder / "facts.json").read_text())


@pytest.fixture(scope="session")
def command(folder) -> dict:
    words = ("run", HERE / "megatron_study.py", "--policy", "megatron", "--ep", "2", "--out", folder / "runs")
    return launched_once(folder, "command", "-m", "moe_rl", *words)


# ---------------------------------------------------------------------- the verbs, in every layout
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_survive_the_way_there_and_back_bit_for_bit(layout, facts):
    assert facts[layout]["exported"] and facts[layout]["imported"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_natural_scores_and_recorded_routes_are_those_of_the_hugging_face_model(layout, facts):
    found = facts[layout]
    assert found["recorded"], "expert ids differ"
    assert found["natural"] < 1e-5 and found["entropy"] < 1e-5
    assert max(found[kind] for kind in ("gates", "margins", "log_probs")) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_uses_exactly_the_given_experts_and_routes_freely_where_none_is_given(layout, facts):
    found = facts[layout]
    assert found["replayed ids"] and found["preferred"], "ids used, or preferred, differ from the Hugging Face replay"
    assert found["replayed"] < 1e-5 < 1e-3 < found["replay matters"]
    assert found["preferred elsewhere"] > 0.1, "the weights must have moved far enough for replay to mean something"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replayed_update_has_the_gradients_of_the_hugging_face_policy(layout, facts):
    update = facts[layout]["update"]
    assert update["routes"] and update["clipped"] == [True, True]
    assert max(update[kind] for kind in ("logprobs", "entropy", "loss", "norm", "metrics")) < 1e-5
    assert facts[layout]["gradients"] < 1e-5, "in units of each tensor's largest entry"
    assert facts[layout]["router gradient"] > 1e-6, "gradient must reach every router"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_step_of_adamw_log_probs_agree(layout, facts):
    assert facts[layout]["stepped"] < 1e-5
    assert facts[layout]["stepped weights"] < 0.01, "in learning rates, where rounding does not decide the sign"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "pp2" not in name])
def test_an_update_that_fails_leaves_no_route_behind(layout, facts):
    assert facts[layout]["after an exception"]


@pytest.mark.parametrize("name", ["mixtral", "unnormalised"])
def test_mixtral_gates_that_are_not_renormalised_and_the_other_dispatcher_agree_too(name, facts):
    found = facts[name]
    assert found["recorded"]
    assert max(found[kind] for kind in ("natural", "gates", "replayed", "stepped")) < 1e-5


def test_a_checkpoint_written_under_ep2_is_read_under_tp2_with_its_moments(facts):
    found = facts["checkpoint"]
    assert found["ep2 weights"] and found["tp2 weights"], "weights must be equal bit for bit"
    assert found["ep2 next step, bits"], "under the same layout training goes on bit for bit"
    assert max(found["ep2 next step"], found["tp2 next step"]) < 1e-5
    assert found["moved"] > 1e-4


def test_an_interrupted_run_goes_on_and_ends_identical(facts):
    assert facts["resumed"] == {"tables": True, "weights": True}


def test_a_rank_that_fails_ends_the_job_with_its_traceback(facts, launch):
    assert launch["code"] != 0
    assert "rank 1 fails on purpose" in launch["err"] and "Traceback" in launch["err"]
    assert "rank 0 went on without rank 1" not in launch["err"]


# ---------------------------------------------------------------------- a whole run
@pytest.fixture(scope="module")
def tables(command, folder, tmp_path_factory) -> dict:
    """The tables of the run on two ranks, and of the same run with the Hugging Face policy."""
    assert command["code"] == 0, command["err"][-5000:]
    ours = folder / "runs/megatron/replay/base/seed=0"
    path = tmp_path_factory.mktemp("hf")
    run = study.base.replace(arm=replay)
    with RunFolder.open(path / "run", run.to_dict(), run.hash) as opened:
        execute(run, opened, cache=path)
    return {n: (read_table(ours, n), read_table(path / "run", n)) for n in ("steps", "updates", "layers")}


def test_the_command_completes_a_study_on_two_ranks_and_rank_0_writes_it_once(command, tables, folder):
    assert command["out"].count("3/3  finished") == 1
    assert (folder / "runs/megatron/figures/learning.png").exists()


def test_a_step_is_exported_with_the_weights_of_all_ranks(tables, folder):
    saved = [load_file(folder / f"runs/megatron/replay/base/seed=0/checkpoints/step={n:06d}/model.safetensors")
             for n in (1, 3)]
    assert saved[0].keys() == saved[1].keys()
    assert all(not torch.equal(w, saved[1][name]) for name, w in saved[0].items() if "proj" in name)


def test_three_steps_of_grpo_with_replay_get_the_rewards_of_the_hugging_face_policy(tables):
    ours, theirs = tables["steps"]
    assert len(ours) == 4
    for column in ("reward", "exact", "eval_reward_greedy", "eval_reward_sampled", "response_tokens"):
        assert ours[column].equals(theirs[column]), column
    assert theirs["reward"].nunique() > 1


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
        gap = (ours["slot_change"] - theirs["slot_change"]).abs().dropna()
        assert len(gap) >= 2 and gap.max() <= 2e-3


def test_parity_of_engine_and_policy_is_reported_for_every_push(tables):
    ours, theirs = tables["steps"]
    assert ours["push_gap_max"].dropna().between(0, 1e-5).sum() == 3
    assert "push_gap_max" not in theirs


# ---------------------------------------------------------------------- refusals
TINY = ModelConfig()


@pytest.mark.parametrize(
    ("parallel", "world", "reason"),
    [
        (Parallel(tp=2, etp=1), 2, "silently wrong"),
        (Parallel(dp=2, ep=2), 4, "needs 2 processes, but 4 run"),
        (Parallel(dp=2, ep=4), 2, "does not divide"),
        (Parallel(dp=3, ep=3), 3, "16 experts over ep=3"),
        (Parallel(tp=4), 4, "2 key-value heads over tp=4"),
        (Parallel(pp=4), 4, "6 layers over pp=4"),
        (Parallel(settings={"moe_router_fusion": True}), 1, "replay would be ignored"),
        (Parallel(settings={"moe_expert_capacity_factor": 1.0}), 1, "dropped"),
        (Parallel(settings={"virtual_pipeline_model_parallel_size": 2}), 1, "interleaved"),
        (Parallel(settings={"moe_router_load_balancing_type": "sinkhorn"}), 1, "sinkhorn"),
    ],
)
def test_layouts_that_megatron_gets_wrong_are_refused_with_the_reason(parallel, world, reason):
    with pytest.raises(ConfigError, match=reason):
        check_layout(parallel, hf_config(TINY), world)


@pytest.mark.parametrize("preset, reason", [("olmoe-tiny", "over all heads"), ("gpt_oss-tiny", "no mapping")])
def test_families_without_a_mapping_are_refused_by_name(preset, reason):
    with pytest.raises(ConfigError, match=reason):
        check_layout(Parallel(), hf_config(ModelConfig(name=preset)), 1)


def test_pushes_to_a_server_reach_parity_before_and_after_a_step(facts):
    found = facts["server"]
    assert found["gap"] < 1e-5 and found["gap after a step"] < 1e-5 < found["moved"] and found["pushes"] == 2


@pytest.mark.parametrize("name", ["vllm", "http://127.0.0.1:8000"])
def test_vllm_and_servers_are_engines_of_this_policy_too(name, monkeypatch):
    monkeypatch.setattr(choose, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=bool)))  # vLLM is there
    run = RunConfig(arm=replay, policy="megatron", model=TINY)
    check(run.replace(engine=EngineConfig(name=name, dtype="bfloat16")))
    check(run.replace(engine=EngineConfig(routes="unknown")))
    with pytest.raises(ConfigError, match="another dtype, other experts"):
        check(run.replace(engine=EngineConfig(dtype="bfloat16")))


def test_torchrun_is_refused_for_a_policy_of_one_process(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--policy megatron"):
        check(RunConfig(arm=replay))
