"""A run of a study as settings of verl's PPO trainer: `SETTINGS` lists what verl can do, and all else is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from moe_rl.config import Arm, RunConfig, fields_of
from moe_rl.errors import ConfigError
from moe_rl.integrations.verl import losses
from moe_rl.integrations.verl.mode import NAMES, PREFIX, Mode
from moe_rl.models.tokens import encode_prompts
from moe_rl.objectives.methods import spell
from moe_rl.registry import Component, Part
from moe_rl.seeds import PROMPTS, derive
from moe_rl.tasks.base import Environment, draw, held_out, load_task
from moe_rl.types import Prompt

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
ENGINES = ("vllm", "sglang", "trtllm")
LEAST_TOKENS = 128
"""Of a forward: verl fills batches up with sequences of this length."""
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of a model that has none: verl needs one."""


@dataclass(frozen=True)
class Data:
    """The prompts of a run, in the order of its steps."""

    train: list[Prompt]
    held_out: list[Prompt]
    template: str | None
    """A chat template for a tokenizer that has none."""

    @property
    def longest(self) -> int:
        return max(len(prompt.tokens) for prompt in (*self.train, *self.held_out))

    @staticmethod
    def of(run: RunConfig) -> Data:
        """The prompts that our trainer draws for the same run, step by step. Raises ConfigError for a task with several
        turns, and for a tokenizer with which verl would read other tokens."""
        from moe_rl.models.load import load_tokenizer

        task, tokenizer = load_task(run.task), load_tokenizer(run.model.name)
        if isinstance(task, Environment):
            raise ConfigError(f"task={run.task} has several turns. Use our own trainer.")
        asked = held_out(task, run.eval_prompts)
        texts = {prompt.text for prompt in asked}
        seeds = [derive(run.seed, PROMPTS, step) for step in range(1, run.steps + 1)]
        train = [prompt for seed in seeds for prompt in draw(task, run.prompts_per_step, seed, texts)]
        data = Data(
            encode_prompts(train, tokenizer),
            encode_prompts(asked, tokenizer),
            None if tokenizer.chat_template else PLAIN,
        )
        first = data.train[0]
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": first.text}],
            add_generation_prompt=True,
            chat_template=data.template,
            return_dict=False,
        )
        if tuple(tokens) != first.tokens:
            raise ConfigError(
                f"model.name={run.model.name}: verl would read {first.text!r} as the tokens {tokens}, and our trainer "
                f"as {[*first.tokens]}. Give the tokenizer the same chat template."
            )
        return data


# ---------------------------------------------------------------------- the table
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
FSDP, OPTIMIZER = f"{ACTOR}.fsdp_config", f"{ACTOR}.optim"
REPLAY = f"{FSDP}.router_replay"
CHECKPOINT = "save the first model with our trainer (hf_checkpoints=0), and give that folder as model.name"


def _dtypes(run: RunConfig) -> tuple[str, str]:
    """In which the policy computes, and the engine: their own options, or the model's."""
    parts = Component.of(run.policy).options.get("compute_dtype"), Component.of(run.engine).options.get("dtype")
    return parts[0] or run.model.dtype, parts[1] or run.model.dtype


def _mixed_precision(run: RunConfig) -> dict[str, str]:
    sums = DTYPES[run.model.dtype]
    return {"param_dtype": DTYPES[_dtypes(run)[0]], "reduce_dtype": sums, "buffer_dtype": sums}


def _mode(run: RunConfig) -> str:
    """The routes of the run's arm as `router_replay.mode` has them."""
    source = Component.of(run.arm.routes)
    names = {ours: theirs for theirs, ours in NAMES.items()}
    return names.get(str(source), f"{PREFIX}{source}")


def _loss(run: RunConfig) -> Arm:
    """The arm without what verl has settings of its own for."""
    return run.arm.replace(routes="live", anchor="policy")


def _aggregation(run: RunConfig) -> tuple[str, float | None]:
    return losses.mode_of(run.arm.aggregate) or ("", None)


def _path(run: RunConfig) -> str:
    return str(Path(run.model.name).absolute()) if Path(run.model.name).is_dir() else run.model.name


SETTINGS: dict[str, Mapping[str, Callable[[RunConfig], Any] | None]] = {
    "seed": {f"{ACTOR}.data_loader_seed": None, f"{ROLLOUT}.seed": None},
    "task": {},
    "steps": {"trainer.total_training_steps": None},
    "prompts_per_step": {"data.train_batch_size": None},
    "group_size": {f"{ROLLOUT}.n": None, f"{ACTOR}.rollout_n": None},
    "mini_batches": {
        f"{ACTOR}.ppo_mini_batch_size": lambda run: run.prompts_per_step // run.mini_batches,
        f"{REPLAY}.updates_per_step": lambda run: run.mini_batches * run.epochs,
    },
    "epochs": {f"{ACTOR}.ppo_epochs": None},
    "micro_batch": {},
    "micro_batch_tokens": {},
    "activation_checkpointing": {f"{MODEL}.enable_gradient_checkpointing": None},
    "temperature": {f"{ROLLOUT}.temperature": None},
    "max_new_tokens": {"data.max_response_length": None, f"{ROLLOUT}.response_length": None},
    "eval_every": {"trainer.test_freq": None},
    "eval_prompts": {},
    "save_every": {"trainer.save_freq": None},
    "engine": {
        f"{ROLLOUT}.name": lambda run: Component.of(run.engine).name.rpartition(":")[2],
        f"{ROLLOUT}.dtype": lambda run: _dtypes(run)[1],
    },
    "policy": {f"{FSDP}.mixed_precision": _mixed_precision},
    "model.name": {f"{MODEL}.path": _path},
    "model.device": {"trainer.device": lambda run: run.model.device.partition(":")[0]},
    "model.dtype": {f"{FSDP}.model_dtype": lambda run: DTYPES[run.model.dtype]},
    "optimizer.lr": {f"{OPTIMIZER}.lr": None},
    "optimizer.betas": {f"{OPTIMIZER}.betas": None},
    "optimizer.eps": {f"{OPTIMIZER}.override_optimizer_config": lambda run: {"eps": run.optimizer.eps}},
    "optimizer.weight_decay": {f"{OPTIMIZER}.weight_decay": None},
    "optimizer.grad_clip": {f"{OPTIMIZER}.clip_grad": None},
    "measure.responses": {f"{REPLAY}.measured_sequences": None},
    "measure.rollouts": {},
    "arm.loss": {f"{ACTOR}.policy_loss.loss_mode": lambda run: losses.PREFIX + spell(_loss(run))},
    **dict.fromkeys(("arm.name", "arm.corrections", "arm.filters", "arm.terms", "arm.advantage"), {}),  # of that loss
    "arm.aggregate": {
        f"{ACTOR}.loss_agg_mode": lambda run: _aggregation(run)[0],
        f"{ACTOR}.loss_scale_factor": lambda run: _aggregation(run)[1],
    },
    "arm.routes": {
        f"{REPLAY}.mode": _mode,
        f"{ROLLOUT}.enable_rollout_routing_replay": lambda run: Mode.of({"mode": _mode(run)}).of_rollout,
    },
    "arm.anchor": {"algorithm.rollout_correction.bypass_mode": lambda run: run.arm.anchor == "engine"},
    **dict.fromkeys((f"cold_start.{name}" for name in ("target", "seed", "max_steps", "batch_size", "lr")), {}),
    "measure.detail_every": {},
    "sampling_mask": {},
}
"""Every setting that may differ from its default, and the keys of verl that it decides, with their values; None: the
setting's own. Where there are none, the value is in `_further`, or of what verl does not measure or is off."""
WORKS: dict[str, tuple[Callable[[RunConfig], Any], str]] = {
    "mini_batches": (lambda run: run.prompts_per_step % run.mini_batches == 0, "choose a divisor of prompts_per_step"),
    "engine": (
        lambda run: _works(run.engine, ENGINES, "dtype", own=True),
        f"use {', '.join(ENGINES)} or module:NAME, with dtype={' or '.join(DTYPES)} as the only option, and "
        f"--set verl.{ROLLOUT}.… for others",
    ),
    "policy": (
        lambda run: _works(run.policy, ("hf", "fsdp"), "compute_dtype"),
        f"use hf or fsdp, with compute_dtype={' or '.join(DTYPES)} as the only option",
    ),
    "model.name": (lambda run: "/" in _path(run), f"{CHECKPOINT}, or give the name of one on the hub"),
    "model.dtype": (lambda run: run.model.dtype in DTYPES, f"choose {' or '.join(DTYPES)}"),
    "optimizer.grad_clip": (lambda run: run.optimizer.grad_clip, "choose a norm, e.g. 1.0"),
    "arm.aggregate": (
        lambda run: losses.mode_of(run.arm.aggregate),
        f"choose {', '.join(losses.AGGREGATIONS)}",
    ),
    "arm.anchor": (
        lambda run: run.arm.anchor == "policy" or Mode.of({"mode": _mode(run)}).routes in ("", "reported"),
        "replay the routes of the rollout, or none",
    ),
    "cold_start.target": (lambda run: not run.cold_start.target, CHECKPOINT),
}
"""When a setting works, and what to do where it does not."""
FIXED: dict[str, Any] = {
    f"{ACTOR}.strategy": "fsdp2",
    f"{FSDP}.strategy": "fsdp2",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.shuffle": False,
    f"{OPTIMIZER}.optimizer": "AdamW",
    f"{OPTIMIZER}.lr_scheduler_type": "constant",
    f"{OPTIMIZER}.lr_warmup_steps": 0,
    f"{OPTIMIZER}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIMIZER}.warmup_style": None,
    f"{ROLLOUT}.calculate_log_probs": True,
    **{f"{ROLLOUT}.{key}": value for key, value in (("top_k", -1), ("top_p", 1), ("do_sample", True))},
    **{f"{ROLLOUT}.val_kwargs.{key}": value for key, value in (("n", 1), ("do_sample", False), ("temperature", 0))},
    f"{MODEL}.external_lib": "moe_rl.integrations.verl.active",
    "data.shuffle": False,
    "trainer.logger": ["console", "file"],
    "trainer.total_epochs": 1,
    "trainer.val_before_train": True,
    "trainer.resume_mode": "auto",
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "reward.custom_reward_function": {"path": f"{Path(__file__).with_name('reward.py')}", "name": "compute_score"},
}
"""What is the same in every study."""
FORMER = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""verl's former names of what a study decides."""


def _works(part: Part, names: tuple[str, ...], option: str, own: bool = False) -> bool:
    """Whether a component is one of these, or its user's own, with no option but this one, a dtype."""
    use = Component.of(part)
    return (
        (use.name in names or own and use.own)
        and {*use.options} <= {option}
        and use.options.get(option) in (None, *DTYPES)
    )


def check_settings(run: RunConfig) -> None:
    """Raise ConfigError for the first setting that verl does not have, by its name."""
    for key, setting in fields_of(RunConfig):
        value = attrgetter(key)(run)
        works, remedy = WORKS.get(key, (lambda run: True, ""))
        if key not in SETTINGS and value != setting.get_default(call_default_factory=True):
            works, remedy = lambda run: False, "leave it out, or use our own trainer"
        if not works(run):
            raise ConfigError(f"{key}={value} does not work with --trainer verl: {remedy}.")
    losses.usable_objective(_loss(run))
    Mode.of({"mode": _mode(run)})


def overrides_of(run: RunConfig, folder: Path, words: Sequence[str] = ()) -> list[str]:
    """verl's command line for a run whose data, checkpoints and logs are in `folder`. Further `words` of it are about
    machines and engines: raises ConfigError for one that sets what the study decides."""
    data = Data.of(run)
    decided = FIXED | _further(run, data, folder)
    for setting, keys in SETTINGS.items():
        own = attrgetter(setting)(run)
        decided |= {key: own if value is None else value(run) for key, value in keys.items()}
    written = {key: f"++{key}={_written(value)}" for key, value in (_machine(run, data) | decided).items()}
    return [*(written | {_key_of(word, decided): word for word in words}).values()]


def _key_of(word: str, decided: Mapping[str, Any]) -> str:
    """The key that a word of verl's command line sets."""
    match = re.match(r"\+{0,2}([\w-]+(?:\.[\w-]+)+)=", word)
    if match is None:
        raise ConfigError(f"verl.{word}: write verl.PART.KEY=VALUE.")
    key = match[1]
    if key.endswith("._target_"):
        raise ConfigError(f"verl.{word}: a study of verl runs verl's own classes. Set other keys.")
    for own in (*decided, *FORMER):
        if f"{key}.".startswith(f"{own}.") or f"{own}.".startswith(f"{key}."):
            raise ConfigError(f"verl.{word}: the study decides {own}. Change its own setting, or set other keys.")
    return key


def _written(value: Any) -> str:
    """A value in the grammar of verl's command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(below)}" for key, below in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _further(run: RunConfig, data: Data, folder: Path) -> dict[str, Any]:
    """What depends on the prompts, and on where files are."""
    return {
        "data.train_files": f"{folder / 'train.parquet'}",
        "data.val_files": f"{folder / 'held_out.parquet'}",
        "data.max_prompt_length": data.longest,
        f"{ROLLOUT}.prompt_length": data.longest,
        f"{MODEL}.custom_chat_template": data.template,
        "trainer.default_local_dir": f"{folder / 'checkpoints'}",
        "trainer.rollout_data_dir": f"{folder / 'rollouts'}" if run.measure.rollouts else None,
    }


def _machine(run: RunConfig, data: Data) -> dict[str, Any]:
    """What may be set otherwise, and changes no more than rounding."""
    most = data.longest + run.max_new_tokens
    tokens = max(run.micro_batch_tokens or run.micro_batch * most, most, LEAST_TOKENS)
    plain = {
        f"{MODEL}.override_config.attn_implementation": "sdpa",
        f"{ACTOR}.use_torch_compile": False,
        f"{FSDP}.use_torch_compile": False,
    }
    return (plain if run.model.device == "cpu" else {}) | {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{MODEL}.use_remove_padding": True,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
        "trainer.max_actor_ckpt_to_keep": 1,
    }
