"""Corrections for tokens that another distribution drew: factors on the weights of a loss, without gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.objectives.base import LossInputs


def truncated(x: LossInputs, *, cap: float = 2.0) -> Float[Tensor, "batch time"]:
    """min(π_old / π_engine, cap) per response token, 1 elsewhere: truncated importance sampling.

    Corrects for tokens that the engine drew from another distribution than the trainer's π_old; the cap bounds the
    variance and biases towards 0 where the ratio exceeds it (Ionides 2008; for RL with two engines, Yao et al. 2025).
    Raises ConfigError for a cap that is not positive, and where the engine's log-probs are not known.
    """
    if not cap > 0:
        raise ConfigError(f"truncated(cap={cap:g}): the cap of importance weights must be positive, usually 2")
    if x.rollout_logprobs is None:
        raise ConfigError("truncated weighs π_old against the engine, but there are no rollout_logprobs")
    log_ratio = torch.where(x.mask, x.old_logprobs - x.rollout_logprobs, 0).detach()
    return log_ratio.exp().clamp(max=cap)


CORRECTIONS: dict[str, Callable[..., Float[Tensor, "batch time"]]] = {"truncated": truncated}
