"""ROLL's configuration, by its own names, as an arm: `from_roll({"adv_estimator": "grpo", "pg_clip": 0.2})`.

Names and defaults are those of ROLL's page on GSPO and of its code at the commit that `methods.toml` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.lookup import Use, unknown

DEAD = "read by nothing in ROLL: refused where it is set"
OPTIONS: dict[str, tuple[Any, str]] = {
    "adv_estimator": ("gae", "`reinforce`: no step of its own; `grpo`: group for both norms; `gae`: refused"),
    "importance_sampling": ("token", "`seq` is `grpo(level=sequence)`: GSPO's ratio"),
    "rollout_batch_size": (None, "the run's `prompts_per_step`"),
    "num_return_sequences_in_group": (None, "the run's `group_size`"),
    "prompt_length": (None, "left aside: prompts are not cut"),
    "response_length": (None, "the run's `max_new_tokens`"),
    "ppo_epochs": (1, "the run's `epochs`"),
    "pg_clip": (0.2, "`grpo(clip_low=…,clip_high=…)`; at 0.2 it never clips a ratio of sequences"),
    "use_pg_clip_range": (False, "whether the next two count, in place of `pg_clip`"),
    "pg_clip_low": (0.2, "`grpo(clip_low=…)`"),
    "pg_clip_high": (0.2, "`grpo(clip_high=…)`"),
    "dual_clip_loss": (False, "`grpo(dual=1 + 2·pg_clip)`, whatever the range is"),
    "use_kl_loss": (False, "whether the next one counts"),
    "kl_loss_coef": (0.0, "`kl(coef=…,clamp=10.0)`, k3"),
    "entropy_loss_coef": (0.0, "`entropy(coef=…)`"),
    "loss_agg_mode": ("seq-mean-token-mean", "the same name with `_`; `seq-mean-token-sum-norm` is refused: there, "
                                             "it is not divided by the number of sequences"),
    "norm_mean_type": (None, "`normalized(center=…,eps=1e-06)`"),
    "norm_std_type": (None, "`normalized(scale=…,eps=1e-06)`"),
    "reward_clip": (None, "`clipped(at=…)`, after the norm"),
    "add_token_level_kl": (False, "`kl_penalty(coef=init_kl_coef)`, then `returns`"),
    "init_kl_coef": (0.2, "see there; without a controller"),
    "gamma": (1.0, "`returns(gamma=…)`"),
    "lambd": (0.95, "left aside: gae is refused"),
    "whiten_advantages": (False, "`whitened`"),
    "advantage_clip": (None, "`clipped(at=…)`, last"),
    "reward_norm": (None, f"{DEAD}; meant are `norm_mean_type` and `norm_std_type`"),
    "reward_shift": (False, DEAD),
    "reward_scale": (False, DEAD),
    "add_len_reward": (False, DEAD),
    "use_reward_scaling": (False, DEAD),
    "use_reward_norm": (False, DEAD),
}
"""ROLL's name of an option → its default there, and what becomes of it."""
RUN = {"rollout_batch_size": "prompts_per_step", "num_return_sequences_in_group": "group_size",
       "response_length": "max_new_tokens", "ppo_epochs": "epochs"}
"""What is no part of an arm: ROLL's name → the setting of a `RunConfig`."""
EPS = 1e-6


def from_roll(given: Mapping[str, Any]) -> tuple[Arm, dict[str, Any]]:
    """The arm that a configuration of ROLL describes, named `roll`, and what `RunConfig.replace` needs beside it.

    What is not given has ROLL's default. Rewards are made advantages in ROLL's order: norm, reward_clip, KL, estimator,
    whitening, advantage_clip. Left aside: `prompt_length` and `lambd` (prompts are not cut, gae is refused), ROLL's
    + 1e-8 on |y| and N. Raises ConfigError for an option that is not there, for one that has no effect in ROLL and is
    set all the same, with what would have, and for what cannot be an arm.
    """
    for name in given:
        if name not in OPTIONS:
            unknown("option of ROLL that can be translated", name, OPTIONS)
    o = {name: default for name, (default, _) in OPTIONS.items()} | dict(given)
    for name in given:
        _of_its_type(name, o[name])
    _refuse_dead(o)
    if (mode := o["loss_agg_mode"]) == "seq-mean-token-sum-norm":
        raise ConfigError("loss_agg_mode: seq-mean-token-sum-norm is divided by T in ROLL, but not by the number of "
                          "sequences, so its gradient grows with the mini-batch: take "
                          "seq_mean_token_sum_norm(horizon=T) and as many times the learning rate")
    aggregate = _one_of("loss_agg_mode", mode, {"token-mean": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum",
                                                "seq-mean-token-mean": "seq_mean_token_mean"})
    terms = []
    if o["use_kl_loss"] and o["kl_loss_coef"]:
        terms.append(Use("kl", coef=o["kl_loss_coef"], clamp=10.0))
    if o["entropy_loss_coef"]:
        terms.append(Use("entropy", coef=o["entropy_loss_coef"]))
    arm = Arm(name="roll", loss=_loss(o), aggregate=aggregate, terms=tuple(terms), advantage=tuple(_advantage(o)))
    return arm, {setting: o[name] for name, setting in RUN.items() if name in given}


def _of_its_type(name: str, value: Any) -> None:
    """Refuse what YAML leaves as text, such as 1e-3 without a point, and what would count as true, such as "false"."""
    default = 0.0 if name in ("reward_clip", "advantage_clip") else OPTIONS[name][0]
    wanted = bool if isinstance(default, bool) else (int, float) if isinstance(default, int | float) else None
    fits = isinstance(value, bool) == (wanted is bool) and isinstance(value, wanted or object)
    if wanted and value is not None and not fits:
        kind = "true or false" if wanted is bool else "a number (YAML reads 1e-3 as text: write 1.0e-3)"
        raise ConfigError(f"{name}: {value!r}: {kind} is wanted")


def _loss(o: Mapping[str, Any]) -> Use:
    level = _one_of("importance_sampling", o["importance_sampling"], {"token": "token", "seq": "sequence"})
    low, high = (o["pg_clip_low"], o["pg_clip_high"]) if o["use_pg_clip_range"] else (o["pg_clip"], o["pg_clip"])
    dual = {"dual": 1 + 2 * o["pg_clip"]} if o["dual_clip_loss"] else {}
    return Use("grpo", clip_low=low, clip_high=high, **({} if level == "token" else {"level": level}), **dual)


def _advantage(o: Mapping[str, Any]) -> list[Use]:
    """The steps in ROLL's order."""
    estimator = o["adv_estimator"]
    if estimator == "gae":
        raise ConfigError("adv_estimator: gae, ROLL's default, needs a critic, whose options are not among these: use "
                          "reinforce or grpo, or give the arm the step gae(lam=…) and the run critic.lr")
    _one_of("adv_estimator", estimator, dict.fromkeys(("reinforce", "grpo")))
    center, scale = ("group", "group") if estimator == "grpo" else (o["norm_mean_type"], o["norm_std_type"])
    kinds = {"batch": "batch", "group": "group", "running": "running", None: "none"}
    center, scale = _one_of("norm_mean_type", center, kinds), _one_of("norm_std_type", scale, kinds)
    if scale == "group" and center != "group":
        raise ConfigError(f"norm_std_type: group with norm_mean_type: {o['norm_mean_type']} gives ROLL's rewards the "
                          "shape (groups, responses), which no loss takes: use group for both")
    steps = [Use("normalized", center=center, scale=scale, eps=EPS)] if (center, scale) != ("none", "none") else []
    if o["reward_clip"] is not None:
        steps.append(Use("clipped", at=float(o["reward_clip"])))
    if o["add_token_level_kl"]:
        steps.append(Use("kl_penalty", coef=o["init_kl_coef"]))
    if o["add_token_level_kl"] or o["gamma"] != 1:
        steps.append(Use("returns", gamma=float(o["gamma"])))
    if o["whiten_advantages"]:
        steps.append(Use("whitened"))
    if o["advantage_clip"] is not None:
        steps.append(Use("clipped", at=float(o["advantage_clip"])))
    return steps


def _refuse_dead(o: Mapping[str, Any]) -> None:
    """Options that are set, and do nothing in ROLL."""
    dead = [name for name, (_, what) in OPTIONS.items() if what.startswith(DEAD) and o[name]]
    if not dead:
        return
    said = ", ".join(f"{name}: {o[name]}" for name in dead)
    raise ConfigError(f"{said}: ROLL's code reads this nowhere, whatever its pages say{_instead(o)}")


def _instead(o: Mapping[str, Any]) -> str:
    if (kind := o["reward_norm"]) is None:
        return "; leave it out"
    mean = "null" if o["reward_scale"] else kind
    std = "null" if o["reward_shift"] else kind
    return f"; what it was meant to be is norm_mean_type: {mean}, norm_std_type: {std}"


def _one_of(name: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    if not isinstance(value, str | None) or value not in choices:
        raise ConfigError(f"{name}: {value}: choose {' or '.join(map(str, choices))}")
    return choices[value]
