"""Our objectives as policy losses of verl: `actor.policy_loss.loss_mode="moe_rl:sapo(tau_neg=1.05)"`.

The name is an arm, written as in a study. verl has settings of its own for advantages, corrections, entropy and KL, so
an arm with such components is refused. The loss ignores verl's `clip_ratio_*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import Objective, objective_of, policy_loss
from moe_rl.objectives.methods import arm as arm_of
from moe_rl.registry import Component, Part, needs_of

PREFIX = "moe_rl:"
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
"""Our names of verl's loss_agg_mode, which has `-` for `_`."""
PerToken = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]


def register_named(loss_function: Any) -> None:
    """Register the loss that an actor's loss function names, if it is ours: names with options are known only here."""
    config = getattr(loss_function, "keywords", {}).get("config")
    mode = getattr(getattr(config, "policy_loss", None), "loss_mode", "")
    if isinstance(mode, str) and mode.startswith(PREFIX):
        register(mode)


def register(name: str) -> None:
    """Register the loss of this name with verl. Raises ConfigError for an unknown arm, or for one with components that
    a policy loss of verl lacks the inputs for."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    if name not in POLICY_LOSS_REGISTRY:
        register_policy_loss(name)(loss_of(arm_of(name.removeprefix(PREFIX))))


def loss_of(arm: Arm) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """A policy loss with verl's signature."""
    objective = usable_objective(arm)
    arm = arm.replace(advantage=())  # verl makes them

    def loss(
        old_log_prob: PerToken,
        log_prob: PerToken,
        advantages: PerToken,
        response_mask: Mask,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: PerToken | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Any]]:
        mask = response_mask.bool()
        _require_aggregation(arm, loss_agg_mode, config.global_batch_info.get("loss_scale_factor"))
        weights = objective.aggregate(mask) * _share(mask, loss_agg_mode, config.global_batch_info)
        importance_weights = None if rollout_is_weights is None else torch.where(mask, rollout_is_weights, 1)
        output = policy_loss(
            arm,
            logprobs=log_prob,
            old_logprobs=old_log_prob,
            mask=mask,
            weights=weights,
            advantages=torch.where(mask, advantages, 0),
            importance_weights=importance_weights,
        )
        count, dual = mask.sum().clamp(min=1), (output.clipped_by > 0) & (advantages < 0)
        change = torch.where(mask, old_log_prob - log_prob.detach(), 0)
        return output.loss.to(log_prob.dtype), {
            "actor/pg_clipfrac": ((output.clipped_by != 0) & ~dual).sum().item() / count.item(),
            "actor/pg_clipfrac_lower": dual.sum().item() / count.item(),  # the other bound where A < 0, as in verl
            "actor/ppo_kl": change.sum().item() / count.item(),
        }

    return loss


def _share(mask: Mask, loss_agg_mode: str, batch: Mapping[str, Any]) -> float:
    """What these rows weigh in verl's `agg_loss`, whose counts are of the whole mini-batch, times the ranks, over which
    gradients are averaged."""
    here, all_rows = mask.any(1).sum(), batch.get("global_batch_size")
    if loss_agg_mode in ("token-mean", "token-sum"):
        here, all_rows = mask.sum(), batch.get("batch_num_tokens") if loss_agg_mode == "token-mean" else None
    return (batch.get("dp_size") or 1) * (float(here) / all_rows if all_rows else 1.0)


def _require_aggregation(arm: Arm, loss_agg_mode: str, factor: float | None) -> None:
    aggregate = Component.of(arm.aggregate)
    name, norm = loss_agg_mode.replace("-", "_"), loss_agg_mode == "seq-mean-token-sum-norm"
    if aggregate.name != name or dict(aggregate.options) != ({"horizon": factor} if norm else {}):
        raise ConfigError(
            f"the arm {arm.name!r} has aggregate={aggregate}, but actor.loss_agg_mode={loss_agg_mode!r} and "
            f"loss_scale_factor={factor}. Set both to what the arm has, or aggregate={name} in the arm."
        )


def mode_of(aggregate: Part) -> tuple[str, float | None] | None:
    """verl's loss_agg_mode and loss_scale_factor for an arm's aggregation; None where verl has none."""
    use = Component.of(aggregate)
    return (use.name.replace("_", "-"), use.options.get("horizon")) if use.name in AGGREGATIONS else None


def _is_group(step: Component) -> bool:
    """Whether a step to advantages is what verl's GRPO computes."""
    return step.name in ("group", "normalized") and all(
        step.options.get(of, "group") == "group" for of in ("center", "scale")
    )


def usable_objective(arm: Arm) -> Objective:
    """The arm's objective. Raises ConfigError for components that a policy loss of verl lacks the inputs for."""
    objective = objective_of(arm)
    steps = arm.advantage if isinstance(arm.advantage, tuple) else (arm.advantage,)
    live = Component.of(arm.routes).name == "live" and arm.ratio_routes is None
    elsewhere = {
        "filters": (arm.filters, "algorithm.rollout_correction"),
        "routes": (not live, "actor.fsdp_config.router_replay.mode"),
        "advantage": (not all(_is_group(Component.of(step)) for step in steps), "algorithm.adv_estimator"),
        "anchor": (arm.anchor != "policy", "algorithm.rollout_correction.bypass_mode=True"),
        "corrections": (
            any("policy" not in needs_of(part) for part in objective.corrections),
            "algorithm.rollout_correction",
        ),
        "terms": (
            any(needs_of(part) for part in objective.terms.values()),
            "actor.use_kl_loss, kl_loss_coef and entropy_coeff",
        ),
    }
    for field, (has, setting) in elsewhere.items():
        if has:
            raise ConfigError(f"{field} of the arm {arm.name!r} are settings of verl: remove them, and set {setting}.")
    if needed := sorted(objective.needs - {"policy"}):
        raise ConfigError(f"the arm {arm.name!r} needs {', '.join(needed)}, which verl does not give a policy loss.")
    return objective
