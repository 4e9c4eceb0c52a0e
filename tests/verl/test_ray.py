"""verl's own workers in Ray, two of them on gloo: R2 by verl's fields, and a plugin that never fails silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.verl.worker_inputs import SINGLE, batch, with_old_policy

ROOT = Path(__file__).parents[2]
NAMES = ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, for two groups of workers. They get moe_rl by verl's entry point alone."""
    import ray

    variables = {name: os.environ[name] for name in NAMES} | {"MOE_RL_VERL": "1", "PYTHONPATH": str(ROOT)}
    ray.init(
        num_cpus=12,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=2**27,
        log_to_driver=True,
        runtime_env={"env_vars": variables},
    )
    yield ray
    ray.shutdown()


def workers(checkpoint, replay, learning_rate, strategy):
    """Two of verl's training workers, with verl's loss of an actor."""
    import ray
    from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from tests.verl.worker_inputs import actor_loss

    model = HFModelConfig(
        path=str(checkpoint),
        load_tokenizer=False,
        use_remove_padding=True,
        enable_gradient_checkpointing=True,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy=strategy,
        use_torch_compile=False,
        mixed_precision=SINGLE,
        model_dtype="fp32",
        router_replay=replay,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=24,
        infer_max_token_len_per_gpu=32,
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        checkpoint_config=CheckpointConfig(),
        optimizer_config=FSDPOptimizerConfig(lr=learning_rate, total_training_steps=10, lr_warmup_steps=0),
        profiler_config=None,
    )
    remote = ray.remote(TrainingWorker)
    group = RayWorkerGroup(
        RayResourcePool([2], use_gpu=True, max_colocate_count=1),
        RayClassWithInitArgs(remote, config=config),
        device_name="cpu",
    )
    group.reset()
    group.set_loss_fn(actor_loss())
    return group


def eight_sequences(**tensors):
    data = batch(64, prompts=(4, 3, 4, 2) * 2, responses=(5, 9, 1, 6, 3, 4, 8, 2), dynamic=True, **tensors)
    for name in ("micro_batch_size_per_gpu", "max_token_len_per_gpu", "use_remove_padding", "use_dynamic_bsz"):
        data.pop(name)
    return data


def passed(group, data):
    """The pass of the old policy, and the batch that follows it."""
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, compute_loss=False)
    return group.infer_batch(data.copy()).get()


def updated(group, data, mini_batch_size=8):
    from verl.utils import tensordict_utils as tu

    data = data.copy()
    tu.assign_non_tensor(
        data,
        global_batch_size=mini_batch_size,
        mini_batch_size=mini_batch_size,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    return tu.get(group.train_mini_batch(data).get(), "metrics")


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_r2_in_two_workers(cluster, checkpoint, strategy):
    from transformers import AutoModelForCausalLM

    from moe_rl.routing import record_routing

    group = workers(checkpoint, {"mode": "R2", "measured_sequences": 1}, learning_rate=3e-2, strategy=strategy)
    data = eight_sequences()
    found = passed(group, data)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    for row, ids in zip(data["input_ids"].unbind(), found["routed_experts"].unbind(), strict=True):
        with torch.no_grad(), record_routing(model) as recording:
            model(input_ids=row[None])
        assert torch.equal(recording.take().short()[:-1], ids[:-1]) and bool((ids[-1] == -2).all())
    old = with_old_policy(data, found)
    first = updated(group, old)
    assert first["routing/coverage"] == [1.0, 1.0] and first["routing/pull"] == [0.0, 0.0]  # of all ranks
    assert first["routing/token_log_ratio_var"] == [0.0, 0.0] and first["routing/token_ess"] == [1.0, 1.0]
    assert len(set(first["routing/expert_change_rate"])) == 1 and first["routing/expert_change_rate"][0] > 0
    metrics = updated(group, old, mini_batch_size=4)
    assert metrics["routing/coverage"] == [1.0] * 4 and min(metrics["routing/pull"]) > 0
    again = passed(group, data)
    assert not torch.equal(again["routed_experts"].values(), found["routed_experts"].values())


# ---------------------------------------------------------------------- the plugin's state
def imported(code, **variables):
    """A process that imports verl."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
    )


CHOSEN = (
    "import verl; from verl.workers.engine import EngineRegistry as registry\n"
    "print([registry.get_engine_cls('language_model', s).__name__ for s in ('fsdp', 'fsdp2')])"
)


def test_the_entry_point_acts_where_it_is_asked_to():
    run = imported(
        "import verl, sys; print('torch.fx' in sys.modules, 'moe_rl.integrations.verl.engine' in sys.modules)",
        MOE_RL_VERL="0",
    )
    assert run.returncode == 0 and run.stdout.split()[-1] == "False", run.stderr[-500:]
    run = imported(CHOSEN, MOE_RL_VERL="1", VERL_ENGINE_DEVICE="cuda", VERL_ENGINE_VENDOR="nvidia")
    assert "['RoutingFSDPEngine', 'RoutingFSDPEngine']" in run.stdout, run.stderr[-500:]


@pytest.mark.parametrize("value, missing", [("yes", "yes"), ("1", "verl.workers.engine.fsdp.transformer_impl")])
def test_a_plugin_that_fails_ends_the_process(value, missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import verl; print('went on')"
    run = imported(code, MOE_RL_VERL=value)
    assert run.returncode == 1 and missing in run.stderr and "went on" not in run.stdout, run.stderr[-500:]


def test_a_plugin_that_fails_in_a_worker_stops_the_run(cluster, checkpoint):
    import ray
    from verl.workers.engine_workers import TrainingWorker

    broken = ray.remote(TrainingWorker).options(runtime_env={"env_vars": {"MOE_RL_VERL": "broken"}})
    with pytest.raises(ray.exceptions.RayError):
        ray.get(broken.remote(config=None).__ray_ready__.remote())


def test_the_configuration_activates_it_too():
    run = imported("import verl, moe_rl.integrations.verl.active\n" + CHOSEN)
    assert "['RoutingFSDPEngine', 'RoutingFSDPEngine']" in run.stdout, run.stderr[-500:]
