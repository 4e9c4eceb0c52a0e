"""A run of a study as settings of verl's PPO trainer. What verl can do is listed; all else is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.config import Arm, RunConfig, fields_of
from moe_rl.errors import ConfigError
from moe_rl.integrations.verl import losses
from moe_rl.integrations.verl.mode import NAMES, PREFIX, Mode
from moe_rl.models.tokens import encode_prompts
from moe_rl.objectives.methods import spell
from moe_rl.registry import Component
from moe_rl.seeds import PROMPTS, derive
from moe_rl.tasks.base import Environment, draw, held_out, load_task
from moe_rl.types import Prompt

TRANSLATED = {
    "seed", "task", "steps", "prompts_per_step", "group_size", "mini_batches", "epochs", "micro_batch",
    "micro_batch_tokens", "activation_checkpointing", "temperature", "max_new_tokens", "eval_every", "eval_prompts",
    "save_every", "engine", "model.name", "model.device", "model.dtype", "optimizer.lr", "optimizer.betas",
    "optimizer.eps", "optimizer.weight_decay", "optimizer.grad_clip", "measure.responses",
    "measure.rollouts", "arm.name", "arm.loss", "arm.aggregate", "arm.corrections", "arm.filters", "arm.terms",
    "arm.advantage", "arm.routes", "arm.anchor",
}  # fmt: skip
"""Settings that become settings of verl."""
WITHOUT_EFFECT = {"measure.detail_every", "sampling_mask", "cold_start.seed",
                  "cold_start.max_steps", "cold_start.batch_size", "cold_start.lr"}
"""Settings of what verl does not measure, and of what is off."""
ONLY: dict[str, tuple[Any, ...]] = {"cold_start.target": (0,), "policy": (Component("hf"), Component("fsdp"))}
"""Other settings that need not have their default."""
REMEDIES = {
    "cold_start.target": "Save the first model with our trainer (hf_checkpoints=0), and give that folder as model.name",
    "optimizer.warmup": "verl warms up over steps, not over updates",
    "top_p": "verl's actor does not renormalise over the kept tokens",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
ENGINES = ("vllm", "sglang", "trtllm")
LEAST_TOKENS = 128
"""Of a forward: verl fills batches up with sequences of this length."""
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of a model that has none: verl asks for one."""


@dataclass(frozen=True)
class Data:
    """What a run asks, as verl's dataset has it: `train` in the order of the steps."""

    train: list[Prompt]
    held_out: list[Prompt]
    template: str | None
    """A chat template for a tokenizer that has none."""

    @property
    def longest(self) -> int:
        return max(len(prompt.tokens) for prompt in (*self.train, *self.held_out))

    @staticmethod
    def of(run: RunConfig) -> Data:
        """The prompts that our trainer draws for the same run, step by step. Raises ConfigError for a conversation, and
        for a tokenizer whose prompts verl would read otherwise."""
        from moe_rl.models.load import load_tokenizer

        task, tokenizer = load_task(run.task), load_tokenizer(run.model.name)
        if isinstance(task, Environment):
            raise ConfigError(f"task={run.task} has several turns, which --trainer verl cannot run. Use our own "
                              "trainer.")
        asked = held_out(task, run.eval_prompts)
        texts = {prompt.text for prompt in asked}
        train = [prompt for step in range(1, run.steps + 1)
                 for prompt in draw(task, run.prompts_per_step, derive(run.seed, PROMPTS, step), texts)]
        data = Data(encode_prompts(train, tokenizer), encode_prompts(asked, tokenizer),
                    None if tokenizer.chat_template else PLAIN)
        first = data.train[0]
        given = tokenizer.apply_chat_template([{"role": "user", "content": first.text}], add_generation_prompt=True,
                                              chat_template=data.template, return_dict=False)
        if tuple(given) != first.tokens:
            raise ConfigError(f"model.name={run.model.name}: verl would read {first.text!r} as the tokens {given}, and "
                              f"our trainer as {[*first.tokens]}. Give the tokenizer the same chat template.")
        return data


def check_settings(run: RunConfig) -> None:
    """Raise ConfigError for the first setting that verl cannot do, by its name."""
    for key, field in fields_of(RunConfig):
        value, allowed = _value_at(run, key), ONLY.get(key, (field.get_default(call_default_factory=True),))
        if key not in TRANSLATED | WITHOUT_EFFECT and value not in allowed:
            remedy = REMEDIES.get(key, "Leave it out, or use our own trainer")
            raise ConfigError(f"{key}={value}: --trainer verl supports only {' or '.join(map(str, allowed))}. "
                              f"{remedy}.")
    engine, name, mode = Component.of(run.engine), run.model.name, Mode.of({"mode": _mode(run)})
    losses.usable_objective(_loss(run))
    wrong = {
        f"engine={engine}": (engine.options or not (engine.own or engine.name in ENGINES), "use "
                             f"{', '.join(ENGINES)} or module:NAME, without options. Set the options with --set "
                             "verl.actor_rollout_ref.rollout.…."),
        f"model.dtype={run.model.dtype}": (run.model.dtype not in DTYPES, f"choose {' or '.join(DTYPES)}."),
        f"mini_batches={run.mini_batches}": (run.prompts_per_step % run.mini_batches, "choose a number "
                                             f"that divides {run.prompts_per_step}."),
        "optimizer.grad_clip=0": (not run.optimizer.grad_clip, "choose a norm, e.g. 1.0."),
        "arm.anchor=engine": (run.arm.anchor == "engine" and mode.routes in ("recorded", "made"), "use "
                              f"routes=rollout instead of {run.arm.routes}."),
        f"arm.aggregate={run.arm.aggregate}": (losses.mode_of(run.arm.aggregate) is None, "choose "
                                               f"{', '.join(losses.AGGREGATIONS.values())}."),
        f"model.name={name}": ("/" not in name and not Path(name).is_dir(), "give a checkpoint: a folder, or a name on "
                               f"the hub. {REMEDIES['cold_start.target']}."),
    }  # fmt: skip
    for setting, (found, remedy) in wrong.items():
        if found:
            raise ConfigError(f"{setting} does not work with --trainer verl: {remedy}")


def overrides_of(run: RunConfig, folder: Path, further: Sequence[str] = ()) -> list[str]:
    """verl's command line for a run whose data, checkpoints and logs are in `folder`. `further`, as `KEY=VALUE`, are
    about machines and engines: raises ConfigError for one that the study decides."""
    data = Data.of(run)
    decided = _decided(run, data, folder)
    for text in further:
        if "=" not in text or text.partition("=")[0] in decided:
            raise ConfigError(f"verl.{text}: " + ("the study decides this; change its own setting." if "=" in text
                              else "write verl.KEY=VALUE."))
    written = {key: _written(value) for key, value in (_machine(run, data) | decided).items()}
    return [f"++{key}={text}" for key, text in (written | dict(text.split("=", 1) for text in further)).items()]


def _written(value: Any) -> str:
    """A value in the grammar of verl's command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(below)}" for key, below in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _machine(run: RunConfig, data: Data) -> dict[str, Any]:
    """What may be set otherwise, and changes no more than rounding."""
    actor, most = "actor_rollout_ref.actor", data.longest + run.max_new_tokens
    tokens = max(run.micro_batch_tokens or run.micro_batch * most, most, LEAST_TOKENS)
    plain = {"actor_rollout_ref.model.override_config.attn_implementation": "sdpa", f"{actor}.use_torch_compile": False,
             f"{actor}.fsdp_config.use_torch_compile": False}
    return (plain if run.model.device == "cpu" else {}) | {
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.model.use_remove_padding": True, f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": tokens, "trainer.max_actor_ckpt_to_keep": 1,
    }  # fmt: skip


def _decided(run: RunConfig, data: Data, folder: Path) -> dict[str, Any]:
    """What the study decides, part by part of verl's configuration."""
    optimizer, dtype, name = run.optimizer, DTYPES[run.model.dtype], run.model.name
    aggregation, factor = losses.mode_of(run.arm.aggregate) or ("", None)
    actor = {
        "strategy": "fsdp2", "fsdp_config.strategy": "fsdp2", "fsdp_config.model_dtype": dtype,
        "fsdp_config.mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), dtype),
        "fsdp_config.router_replay.mode": _mode(run),
        "fsdp_config.router_replay.measured_sequences": run.measure.responses,
        "fsdp_config.router_replay.updates_per_step": run.mini_batches * run.epochs,
        "policy_loss.loss_mode": losses.PREFIX + spell(_loss(run)), "loss_agg_mode": aggregation,
        "loss_scale_factor": factor, "use_kl_loss": False, "entropy_coeff": 0, "ppo_epochs": run.epochs,
        "ppo_mini_batch_size": run.prompts_per_step // run.mini_batches, "shuffle": False,
        "data_loader_seed": run.seed, "optim.optimizer": "AdamW", "optim.lr": optimizer.lr,
        "optim.betas": optimizer.betas, "optim.weight_decay": optimizer.weight_decay,
        "optim.clip_grad": optimizer.grad_clip, "optim.override_optimizer_config": {"eps": optimizer.eps},
        "optim.lr_scheduler_type": "constant", "optim.lr_warmup_steps": 0,
    }  # fmt: skip
    rollout = {
        "name": Component.of(run.engine).name.rpartition(":")[2], "n": run.group_size, "dtype": run.model.dtype,
        "seed": run.seed, "temperature": run.temperature, "calculate_log_probs": True,
        "enable_rollout_routing_replay": Mode.of({"mode": _mode(run)}).of_rollout,
    }  # fmt: skip
    model = {
        "path": str(Path(name).absolute()) if Path(name).is_dir() else name,
        "external_lib": "moe_rl.integrations.verl.active",
        "enable_gradient_checkpointing": run.activation_checkpointing, "custom_chat_template": data.template,
    }  # fmt: skip
    data_settings = {
        "train_files": f"{folder / 'train.parquet'}", "val_files": f"{folder / 'held_out.parquet'}", "shuffle": False,
        "train_batch_size": run.prompts_per_step, "max_prompt_length": data.longest,
        "max_response_length": run.max_new_tokens,
    }  # fmt: skip
    trainer = {
        "device": run.model.device.partition(":")[0], "logger": ["console", "file"], "total_epochs": 1,
        "total_training_steps": run.steps, "val_before_train": True, "test_freq": run.eval_every,
        "save_freq": run.save_every, "resume_mode": "auto", "default_local_dir": f"{folder / 'checkpoints'}",
        "rollout_data_dir": f"{folder / 'rollouts'}" if run.measure.rollouts else None,
    }  # fmt: skip
    algorithm = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False,
                 "rollout_correction.bypass_mode": run.arm.anchor == "engine"}
    reward = {"path": f"{Path(__file__).with_name('reward.py')}", "name": "compute_score"}
    parts: dict[str, dict[str, Any]] = {
        "actor_rollout_ref.actor": actor, "actor_rollout_ref.rollout": rollout, "actor_rollout_ref.model": model,
        "data": data_settings, "trainer": trainer, "algorithm": algorithm, "reward.custom_reward_function": reward}
    return {f"{part}.{key}": value for part, values in parts.items() for key, value in values.items()}


def _mode(run: RunConfig) -> str:
    """The routes of the run's arm as `router_replay.mode` has them."""
    source = Component.of(run.arm.routes)
    names = {"live": "disabled"} | {ours: theirs for theirs, ours in NAMES.items()}
    return names.get(str(source), f"{PREFIX}{source}")


def _loss(run: RunConfig) -> Arm:
    """The arm without what verl has settings of its own for."""
    return run.arm.replace(routes="live", anchor="policy")


def _value_at(run: RunConfig, key: str) -> Any:
    found: Any = run
    for name in key.split("."):
        found = getattr(found, name)
    return found
