"""A declared study that verl carries out, with R2 and our GSPO: from the command, through the death of verl's training
worker, to the tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
DECLARED = """
from moe_rl.config import Arm, ColdStart, Measure, ModelConfig, Optimizer, RunConfig
from moe_rl.registry import Component
from moe_rl.study.declaration import Study

study = Study(
    name="in_verl", question="Does verl run what is declared?", hypothesis="It does.", seeds=(0,),
    arms=("gspo(clip_low=0.02,clip_high=0.02)+old_policy+name=replay",), figures=("learning", "expert_change"),
    base=RunConfig(
        arm=Arm(name="any"), model=ModelConfig(name={model!r}), cold_start=ColdStart(target=0), steps=4,
        task=Component("tests.verl.reward:Digits", digits=2), optimizer=Optimizer(lr=1e-2), save_every=2,
        measure=Measure(responses=4, rollouts=5), prompts_per_step=4, group_size=4, mini_batches=2, max_new_tokens=8,
        eval_prompts=8, eval_every=4, engine="tests.verl.rollout_server:hugging_face"))
"""
MACHINE = (
    "+ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.num_cpus=6",
    "reward.num_workers=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "+ray_kwargs.ray_init.object_store_memory=200000000",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.agent.num_workers=1",
)


def test_the_keys_that_a_study_decides_are_verl_s():
    """But for those of its dataclasses alone. A word of the user's for a key that verl lacks is an error."""
    from hydra import compose, initialize_config_module
    from hydra.errors import ConfigCompositionException

    from moe_rl.integrations.verl.settings import FIXED, SETTINGS

    fsdp = "actor_rollout_ref.actor.fsdp_config"
    added = {f"{fsdp}.router_replay.{name}" for name in ("mode", "measured_sequences", "updates_per_step")}
    added |= {f"{fsdp}.mixed_precision"}
    with initialize_config_module("verl.trainer.config", version_base=None):
        tree = OmegaConf.to_container(compose("ppo_trainer", overrides=[]), resolve=False)
        for key in {*FIXED, *(key for keys in SETTINGS.values() for key in keys)} - added:
            below = tree
            for part in key.split("."):
                assert part in below, key
                below = below[part]
        with pytest.raises(ConfigCompositionException, match="trainer.nnode"):
            compose("ppo_trainer", overrides=["trainer.nnode=2"])


def kill_the_worker(process, log, step):
    """End the training worker of verl, which holds the weights, as soon as verl has saved and logged this step."""
    while not (log.exists() and f'{{"step":{step},' in log.read_text()):
        assert process.poll() is None, "verl ended before it had logged the step"
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    named = psutil.process_iter(["cmdline"])  # processes of Ray that end meanwhile have no words
    next(child for child in named if child in below and "WorkerDict" in "".join(child.info["cmdline"] or [])).kill()


def test_a_study_is_run_by_verl_and_read_into_our_tables(assets, tmp_path):
    from moe_rl.storage.frames import load_study, read_table

    (tmp_path / "declared.py").write_text(DECLARED.format(model=str(assets / "model")))
    words = ["run", "declared.py", "--trainer", "verl", *(w for text in MACHINE for w in ("--set", f"verl.{text}"))]
    call = {
        "args": [sys.executable, "-W", "ignore", "-m", "moe_rl", *words],
        "cwd": tmp_path,
        "env": os.environ | {"PYTHONPATH": str(ROOT)},
    }
    folder = tmp_path / "runs" / "in_verl" / "replay" / "base" / "seed=0"
    with subprocess.Popen(**call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        kill_the_worker(first, folder / "verl" / "log-000.jsonl", 2)
        assert first.wait(timeout=400) != 0
    done = subprocess.run(**call, capture_output=True, text=True, timeout=900)
    printed = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").exists() else ""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + printed[-3000:]
    drawn = {file.stem for file in (tmp_path / "runs" / "in_verl" / "figures").iterdir()}
    assert drawn >= {"learning", "expert_change"}

    before, after = (
        [json.loads(line) for line in (folder / "verl" / f"log-00{n}.jsonl").read_text().splitlines()] for n in (0, 1)
    )
    assert [line["step"] for line in before] == [0, 1, 2], "the third step was not logged"
    assert [line["step"] for line in after if "actor/routing/coverage" in line["data"]] == [3, 4]
    for data in [line["data"] for line in [*before[1:], *after] if "actor/routing/coverage" in line["data"]]:
        assert data["actor/routing/coverage"] == 1 and 0 < data["actor/routing/pull"] < 1
        assert data["actor/routing/engine_kl_k3"] < 1e-9 and data["training/rollout_probs_diff_max"] < 1e-5

    frames = load_study(tmp_path / "runs" / "in_verl")
    steps, updates = frames["steps"].set_index("step"), frames["updates"].set_index(["step", "update"])
    assert [*steps.index] == [0, 1, 2, 3, 4] and [*updates.index] == [(s, u) for s in (1, 2, 3, 4) for u in (1, 2)]
    assert steps["reward"][1:].between(0, 1).all() and steps["eval_reward_greedy"][[0, 4]].notna().all()
    assert steps["expert_change_rate"][1:].between(0, 1, inclusive="neither").all()
    ess = updates["token_ess"].unstack()
    assert (ess[1] > 0.999999).all() and (ess[2] < 0.999).all(), "the first update replays what was just recorded"
    assert (updates["coverage"] == 1).all() and updates["expert_change_rate"].between(0, 1).all()
    assert steps["own_token_ess"][1:].tolist() == pytest.approx(ess.mean(axis=1).tolist(), rel=1e-12)
    assert [*frames["layers"]["layer"].unique()] == [0, 1, 2] and len(frames["layers"]) == 4 * 3
    by_step = frames["layers"].groupby("step")["expert_change_rate"].mean()
    assert by_step.tolist() == pytest.approx(steps["expert_change_rate"][1:].tolist(), rel=1e-9)
    read = read_table(folder, "rollouts")
    assert read.groupby("step").size().to_dict() == dict.fromkeys((1, 2, 3, 4), 5)
    assert "loss" not in updates and "replay_gap_std" not in steps, "verl does not measure it"
