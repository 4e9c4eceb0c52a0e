"""What every part of an objective and every step to an advantage is given, and what a loss gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from moe_rl.errors import ConfigError
from moe_rl.routing.inputs import RouterInputs

Values = Float[Tensor, "batch ..."]
"""One number per row, [batch], or per token, [batch, time]."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Some rows of a mini-batch. Only `logprobs` has a gradient, and `entropy` and `router` where a part needs them.

    Everything is 0 or without meaning outside the response, `mask`; log-probs are of the batch's tokens, in nats, at
    the run's temperature. Raises ConfigError where shapes differ.
    """

    logprobs: Float[Tensor, "batch time"]
    """log π_θ."""
    old_logprobs: Float[Tensor, "batch time"]
    """log π_old: what the ratio is taken against."""
    mask: Bool[Tensor, "batch time"]
    """Response tokens; it may have holes, which tools or an environment wrote."""
    advantages: Float[Tensor, "batch time"]
    """Per token; a method with one advantage per sequence finds the same number at all of its tokens."""
    weights: Float[Tensor, "batch time"]
    """The aggregation, for a loss times the corrections: these rows of what was computed over the whole mini-batch."""
    trust: Float[Tensor, "batch time"] | None = None
    """These rows of the product of the corrections over the whole mini-batch; None: they are computed of these rows."""
    marks: Float[Tensor, "batch time"] | None = None
    """These rows of `LossOutput.marks` of the whole mini-batch; None: these rows are all of it."""
    entropy: Float[Tensor, "batch time"] | None = None
    """Of the distribution each token was drawn from, in nats."""
    rollout_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_engine: as the engine that sampled reported it."""
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_ref, under the routes of `logprobs`."""
    finished: Bool[Tensor, "batch time"] | None = None
    """Whether the token's response ended by itself, and was not cut off."""
    ratio_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_θ under the ratio's own routes, where they are not the gradient's; without gradient."""
    router: RouterInputs | None = None
    """The routers behind every token."""
    log_shift: Float[Tensor, "batch time"] | None = None
    """Log of a factor on every token's ratio, before its region, in nats; without gradient."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(x.shape) for name, x in vars(self).items() if isinstance(x, Tensor)}
        if len(set(shapes.values())) > 1:
            raise ConfigError(f"the inputs of a loss must have one shape (batch, time), but they have {shapes}")

    @property
    def log_ratio(self) -> Float[Tensor, "batch time"]:
        """log π_θ − log π_old, and `log_shift`, at response tokens, 0 elsewhere, whatever the padding holds.

        With `ratio_logprobs` its value is that of the ratio's routes, and its gradient that of `logprobs`.
        """
        difference = self.logprobs - self.old_logprobs.detach()
        if self.ratio_logprobs is not None:
            difference = self.ratio_logprobs - self.old_logprobs.detach() + (self.logprobs - self.logprobs.detach())
        if self.log_shift is not None:
            difference = difference + self.log_shift.detach()
        return torch.where(self.mask, difference, 0)


@dataclass(frozen=True)
class LossOutput:
    """A loss and what it did to every token."""

    loss: Float[Tensor, ""]
    """To be minimised; differentiable with respect to the log-probs of the policy."""
    log_ratio: Float[Tensor, "batch time"]
    """Log importance ratio the method used, in nats, detached, 0 outside the response. At sequence level it is the
    sequence's value at each of its tokens."""
    clipped_by: Int8[Tensor, "batch time"]
    """+1 where the upper bound took a response token's gradient, -1 where the lower one did, else 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that add up over the parts of a mini-batch, e.g. the value of each term."""
    marks: Float[Tensor, "batch time"] | None = None
    """What a loss that is marked `needs("mini_batch")` found out about its tokens from statistics of all of them. It is
    asked for it on the whole mini-batch first, without gradient; its parts then find it in `LossInputs.marks`, so that
    how a mini-batch is cut changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Earned:
    """What the rollouts of a step earned, and what the steps before this one have made of it."""

    values: Values
    """At first the rewards, float32; then what the last step gave."""
    rewards: Float[Tensor, " batch"]
    prompt: Int[Tensor, " batch"]
    """Which prompt of the step a row answers; rows of equal number form a group."""
    mask: Bool[Tensor, "batch time"]
    """Response tokens."""
    finished: Bool[Tensor, " batch"]
    """False where the response was cut off."""
    turn: Int[Tensor, "batch time"]
    """The number of a response token's turn, from 1; 0 outside the response. Where a task has one turn, that is 1."""
    turn_rewards: Float[Tensor, "batch time"]
    """What each turn earned, at its last token, 0 elsewhere; a row adds up to that of `rewards`."""
    old_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_old; for steps that are marked `needs("reference")`."""
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_ref; likewise."""
    state_values: Float[Tensor, "batch time"] | None = None
    """V_old before every token; for steps that are marked `needs("values")`."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What this step keeps from one batch to the next, as JSON has it; it is saved and resumed with the run."""
