"""verl's own PPO trainers on CPUs: GRPO with a rollout that samples and gets new weights, read back from verl's log.
`test_study` is the third run of a trainer: R2 and our GSPO in the default one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 3
SETTINGS = f"""
trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console,file] trainer.total_epochs=1
trainer.val_before_train=False trainer.test_freq=-1 trainer.total_training_steps={STEPS} trainer.resume_mode=disable
+ray_kwargs.ray_init.num_gpus=1 ray_kwargs.ray_init.num_cpus=6 +ray_kwargs.ray_init.include_dashboard=false
+ray_kwargs.ray_init.object_store_memory=200000000 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
algorithm.adv_estimator=grpo reward.num_workers=1 reward.custom_reward_function.path={HERE / "reward.py"}
data.train_batch_size=4 data.max_prompt_length=16 data.max_response_length=8 data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=True +actor_rollout_ref.model.override_config.attn_implementation=sdpa
{ACTOR}.strategy=fsdp2 {ACTOR}.fsdp_config.strategy=fsdp2 {ACTOR}.fsdp_config.use_torch_compile=False
++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}
{ACTOR}.use_torch_compile=False {ACTOR}.ppo_mini_batch_size=2 {ACTOR}.use_dynamic_bsz=True {ACTOR}.optim.lr=1e-2
{ACTOR}.ppo_max_token_len_per_gpu=128 {ACTOR}.use_kl_loss=False {ACTOR}.loss_agg_mode=seq-mean-token-mean
{ROLLOUT}.name=hugging_face {ROLLOUT}.n=4 {ROLLOUT}.dtype=float32 {ROLLOUT}.tensor_model_parallel_size=1
{ROLLOUT}.agent.num_workers=1 {ROLLOUT}.calculate_log_probs=True
""".split()
ACTIVE = "actor_rollout_ref.model.external_lib=moe_rl.integrations.verl.active"
REPLAY = f"++{ACTOR}.fsdp_config.router_replay"
ON_POLICY = f"{ACTOR}.ppo_mini_batch_size=4"


def policy_loss(written):
    return f'{ACTOR}.policy_loss.loss_mode="moe_rl:{written}"'


def train(assets, folder, *settings):
    """What verl's trainer logged, step by step, as numbers by name; its console has the same."""
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "tests.verl.rollout_server",
        "PYTHONPATH": str(ROOT),
        "VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl"),
    }
    data = [f"data.{kind}_files={assets / 'sums.parquet'}" for kind in ("train", "val")]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "verl.trainer.main_ppo",
        *SETTINGS,
        *data,
        f"actor_rollout_ref.model.path={assets / 'model'}",
        f"trainer.default_local_dir={folder}",
        *settings,
    ]
    run = subprocess.run(command, env=os.environ | variables, cwd=folder, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert all(f"step:{line['step']} - " in run.stdout for line in lines)
    return [line["data"] for line in lines]


def check_rollouts(steps):
    """The rollout samples from the weights that were just trained: its log-probs are those of the trainer, after every
    step, and other ones after other steps."""
    for step in steps:
        assert "actor/routing/coverage" in step, "moe_rl is not active in verl's workers"
        assert step["actor/routing/engine_kl_k3"] < 1e-9 and step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 0 and step["response_length/mean"] <= 8
    assert len({step["critic/score/mean"] for step in steps}) > 1


def test_r3_with_sapo_is_exact_on_policy(assets, tmp_path):
    """One update per step, so that every ratio is one: the pass for the old log-probs and the update replay the routes
    of the rollout. These are the trainer's own, but for ties that other shapes of a product round to another side. The
    two passes may batch otherwise, so a log-ratio may be one float32 rounding (1e-7) away from 0."""
    steps = train(
        assets,
        tmp_path,
        ACTIVE,
        f"{REPLAY}.mode=R3",
        f"{ROLLOUT}.enable_rollout_routing_replay=True",
        policy_loss("sapo(tau_neg=1.05)"),
        ON_POLICY,
    )
    check_rollouts(steps)
    for step in steps:
        assert step["actor/routing/coverage"] == 1 and step["actor/routing/pull"] < 0.01
        assert 1 - step["actor/routing/token_ess"] < 1e-12 and step["actor/routing/token_log_ratio_var"] < 1e-12


def test_the_former_trainer_replays_too(assets, tmp_path):
    """With verl's own loss of GRPO."""
    steps = train(assets, tmp_path, ACTIVE, "trainer.use_v1=False", f"{REPLAY}.mode=R2")
    check_rollouts(steps)
    for step in steps:
        assert step["actor/routing/coverage"] == 1 and 0 < step["actor/routing/pull"] < 1
        assert 0 < step["actor/routing/token_ess"] < 1 and "actor/routing/expert_change_rate" not in step
