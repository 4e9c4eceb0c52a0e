"""An arm's parts as one objective: loss = −Σ W · c · φ(r, A) + Σ terms."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.lookup import Part, Use, lookup, needs_of
from moe_rl.objectives.advantages import advantage_of
from moe_rl.objectives.aggregate import AGGREGATIONS
from moe_rl.objectives.base import LossInputs, LossOutput
from moe_rl.objectives.corrections import CORRECTIONS
from moe_rl.objectives.losses import CLIPS, LOSSES
from moe_rl.objectives.ratios import MEANS
from moe_rl.objectives.router import ROUTER_LOSSES, ROUTER_TERMS
from moe_rl.objectives.terms import TERMS
from moe_rl.routing.inputs import RouterInputs
from moe_rl.types import Batch

PerToken = Float[Tensor, "batch time"]
GIVEN = {"reference": "ref_logprobs", "entropy": "entropy"}
"""Which of a loss's inputs is there for parts that need it."""


@dataclass(frozen=True)
class Objective:
    """What an arm minimises, its options bound. Made by `objective_of`."""

    loss: Callable[[LossInputs], LossOutput]
    aggregate: Callable[[Bool[Tensor, "batch time"]], PerToken]
    corrections: tuple[Callable[[LossInputs], Tensor], ...] = ()
    filters: tuple[Callable[[LossInputs], Tensor], ...] = ()
    terms: Mapping[str, Callable[[LossInputs], Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """What its parts ask for beyond the log-probs: `reference` (log-probs), `entropy` (with gradient), `router`
        (`RouterInputs`), `load` (theirs of all the mini-batch), and `mini_batch`: its marks, from log-probs and entropy
        of all of it. Corrections say `engine` (they compare with it) and `policy` (they read π_θ, row by row, so that
        they wait for the update)."""
        parts = (self.loss, *self.corrections, *self.filters, *self.terms.values())
        return frozenset().union(*map(needs_of, parts))

    # ------------------------------------------------------------------ on a mini-batch, in this order
    def weighed(self, mini_batch: Batch) -> Batch:
        """The mini-batch with what spans all of it: its filtered mask, aggregation weights and corrections."""
        # π_θ is not known before the update; a part that reads it all the same is found out by NaN.
        x = _inputs(mini_batch, torch.full_like(mini_batch.rollout_logprobs, torch.nan))
        mask = self._filtered(x)
        x = dataclasses.replace(x, mask=mask)
        factors = [_number(one(x), mask) for one in self.corrections if "policy" not in needs_of(one)]
        return dataclasses.replace(mini_batch, loss_mask=mask if self.filters else None, weights=self.aggregate(mask),
                                   trust=functools.reduce(torch.mul, factors) if factors else None)

    def marked(self, mini_batch: Batch, logprobs: PerToken, entropy: PerToken) -> Batch:
        """The weighed mini-batch with its marks, from the policy's log-probs and entropy of all of it."""
        return dataclasses.replace(mini_batch, marks=self.loss(_inputs(mini_batch, logprobs, entropy=entropy)).marks)

    def __call__(self, part: Batch, logprobs: PerToken, entropy: PerToken, **further: Any) -> LossOutput:
        """The loss on some rows of a weighed mini-batch, from the policy's log-probs and entropy of its tokens."""
        assert part.old_logprobs is not None and part.weights is not None, "the trainer fills in both before an update"
        return self.of(_inputs(part, logprobs, entropy=entropy, **further))

    # ------------------------------------------------------------------ on inputs that somebody else has put together
    def of(self, x: LossInputs) -> LossOutput:
        """The loss of inputs whose mask and weights are what they should be."""
        trusted = x.weights if x.trust is None else x.weights * x.trust
        for correction in self.corrections:
            if x.trust is None or "policy" in needs_of(correction):
                trusted = trusted * _factors(correction(x), x.mask)
        output = self.loss(dataclasses.replace(x, weights=trusted))
        loss, metrics = output.loss, dict(output.metrics)
        for name, term in self.terms.items():
            value = term(x)
            loss = loss + value
            metrics[f"term_{name}"] = metrics.get(f"term_{name}", 0.0) + value.item()
        return dataclasses.replace(output, loss=loss, metrics=metrics)

    def _filtered(self, x: LossInputs) -> Bool[Tensor, "batch time"]:
        """The response tokens that no filter takes out."""
        return functools.reduce(torch.logical_and, [_number(one(x), x.mask) != 0 for one in self.filters], x.mask)


def _inputs(part: Batch, logprobs: PerToken, **further: Any) -> LossInputs:
    """What a batch says to the parts of an objective."""
    old = part.rollout_logprobs if part.old_logprobs is None else part.old_logprobs
    return LossInputs(logprobs=logprobs, old_logprobs=old, rollout_logprobs=part.rollout_logprobs,
                      ref_logprobs=part.ref_logprobs, ratio_logprobs=part.ratio_logprobs,
                      mask=part.response_mask if part.loss_mask is None else part.loss_mask, advantages=part.advantages,
                      finished=part.finished[:, None].expand(logprobs.shape),
                      weights=torch.zeros_like(logprobs) if part.weights is None else part.weights, trust=part.trust,
                      marks=part.marks, **further)


def _factors(factors: Tensor, mask: Bool[Tensor, "batch time"]) -> PerToken:
    """A correction's factors, 1 outside the mask, where 0 · NaN would be NaN."""
    if factors.shape != mask.shape:
        raise ConfigError(f"a correction gave shape {tuple(factors.shape)}: it needs one factor per token, "
                          f"(batch, time), here {tuple(mask.shape)}")
    return torch.where(mask, factors, 1)


def _number(factors: Tensor, mask: Bool[Tensor, "batch time"]) -> PerToken:
    """A correction's factors, unless some are NaN."""
    factors = _factors(factors, mask)
    if bool(factors.isnan().any()):
        raise ConfigError("a correction gave NaN: it reads log π_θ, which is not known when a mini-batch is weighed "
                          "(make it a part of the loss, or a term), or log-probs that are no numbers")
    return factors


def objective_of(arm: Arm) -> Objective:
    """The objective that an arm's parts make, tried on one token, so that options out of range are refused here.

    Raises ConfigError for a part or an option that is not there, and for advantages that the loss cannot take; warns
    when a sequence-level loss gets a range so wide that it never clips.
    """
    objective = Objective(loss=lookup("loss", arm.loss, LOSSES | ROUTER_LOSSES),
                          aggregate=lookup("aggregation", arm.aggregate, AGGREGATIONS),
                          corrections=tuple(lookup("correction", part, CORRECTIONS) for part in arm.corrections),
                          filters=tuple(lookup("correction", part, CORRECTIONS) for part in arm.filters),
                          terms={_term(part): lookup("term", part, TERMS | ROUTER_TERMS) for part in arm.terms})
    names = ("logprobs", "old_logprobs", "rollout_logprobs", *(GIVEN[n] for n in objective.needs & set(GIVEN)))
    mask, some = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1)
    try:
        x = LossInputs(**dict.fromkeys(names, some), mask=mask, advantages=some, finished=mask,
                       weights=objective.aggregate(mask),
                       router=RouterInputs.of_one_token() if "router" in objective.needs else None)
        objective._filtered(x)
        found = objective.of(x)
        reads = [str(part) for part, one in _weighing(arm, objective) if "policy" not in needs_of(one)
                 and _reads_policy(one, x)]
    except MoeRlError:
        raise
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"arm {arm.name!r}: a part failed when it was tried on one token ({error}). Is an option of "
                          "another type? One that reads the entropy, the reference or the routers is marked with "
                          "moe_rl.lookup.needs('entropy'), ('reference') or ('router').") from error
    if reads:
        raise ConfigError(f"arm {arm.name!r}: {', '.join(reads)} reads log π_θ, which is not known when a mini-batch "
                          "is weighed: mark it with moe_rl.lookup.needs('policy') and make it a correction")
    for name, shape, needed in (("loss", (), "one number"), ("log_ratio", (1, 1), "(batch, time)"),
                                ("clipped_by", (1, 1), "(batch, time)")):
        if (given := tuple(getattr(found, name).shape)) != shape:
            raise ConfigError(f"arm {arm.name!r}: its loss, tried on one token, gave a {name} of shape {given}: it "
                              f"needs {needed}, here {shape}")
    if taken := [name for name in found.metrics if not name.startswith(("own_", "term_"))]:
        raise ConfigError(f"arm {arm.name!r}: its loss gives the metrics {', '.join(taken)}, which could be the names "
                          "of measured columns; let them begin with own_")
    _check_arm(arm, objective)
    _check_per_token(arm, objective.loss, names)
    return objective


def policy_loss(
    arm: Arm | Part,
    *,
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: Float[Tensor, " batch"] | PerToken,
    mask: Bool[Tensor, "batch time"],
    weights: PerToken | None = None,
    **further: Any,
) -> LossOutput:
    """The objective of an arm, or of a loss alone, on a mini-batch of somebody else's loop.

    `logprobs` has the gradient; log-probs are of response tokens, in nats; `advantages` are one per row or per token.
    `further` are the other fields of `LossInputs` that the arm needs. For one part of a mini-batch give `weights`: its
    rows of `objective_of(arm).aggregate(mask)` over the whole; parts then only add, unless a correction or the loss
    takes statistics of the mini-batch: then give `trust` and `marks` of it, too. Filters take tokens out of `mask`,
    and are refused where `weights` are given. Raises ConfigError where something is missing or has another shape.
    """
    objective = _objective_once(arm if isinstance(arm, Arm) else Arm(name="loss", loss=arm))
    if advantages.dim() == 1 and len(advantages) != len(mask):
        raise ConfigError(f"{len(advantages)} advantages for {len(mask)} rows: give one per row, or one per token")
    if weights is not None and objective.filters:
        raise ConfigError("filters say over a whole mini-batch what counts, so they cannot be asked about a part that "
                          "has weights: give the arm without filters, a mask they have been applied to, and weights "
                          "of that mask")
    x = LossInputs(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask,
                   advantages=advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages,
                   weights=torch.zeros_like(logprobs) if weights is None else weights, **further)
    if weights is None:
        mask = objective._filtered(x)
        x = dataclasses.replace(x, mask=mask, weights=objective.aggregate(mask))
    return objective.of(x)


_objective_once = functools.lru_cache(maxsize=64)(objective_of)
"""For `policy_loss`, which a loop calls for every micro-batch: an arm is looked up and tried once."""


def _check_arm(arm: Arm, objective: Objective) -> None:
    """Refuse combinations of parts that make no sense, and say which are void. The parts have been tried."""
    loss = Use.of(arm.loss)
    options = {name: option.default for name, option in inspect.signature(objective.loss).parameters.items()}
    high, low = (options.get(bound, 0.0) for bound in ("clip_high", "clip_low"))
    level = options.get(CLIPS.get(loss.name, ""), CLIPS.get(loss.name, ""))
    if CLIPS.get(level, level) in MEANS and max(high, low) >= 0.1:
        warnings.warn(
            f"arm {arm.name!r}: the clip range {low:g}/{high:g} never clips the sequence-level ratio of "
            f"{loss.name}, a mean over tokens that stays within a few percent of 1, so nothing bounds its updates; "
            "the paper uses 3e-4/4e-4 (short responses need a range of their own, usually below 0.05)", stacklevel=3)
    for part, correction in _weighing(arm, objective):
        if arm.anchor == "engine" and "engine" in needs_of(correction):
            raise ConfigError(
                f"arm {arm.name!r}: {Use.of(part).name} weighs the trainer's π_old against the engine, but "
                "anchor='engine' takes the engine's log-probs for π_old: every weight is 1. Choose one of the two."
            )
    if "truncated" in (Use.of(part).name for part in arm.filters):
        raise ConfigError(f"arm {arm.name!r}: truncated is never 0, so as a filter it does nothing: make it a "
                          "correction")
    if waiting := [
        str(part) for part, one in zip(arm.filters, objective.filters, strict=True) if "policy" in needs_of(one)
    ]:
        raise ConfigError(f"arm {arm.name!r}: {', '.join(waiting)} reads π_θ, which is not known when filters decide "
                          "what counts: make it a correction")
    if len(set(map(str, arm.corrections))) < len(arm.corrections):
        raise ConfigError(f"arm {arm.name!r} has a correction twice: {', '.join(map(str, arm.corrections))}")
    names = [_term(part) for part in arm.terms]
    if len(set(names)) < len(names):
        raise ConfigError(f"arm {arm.name!r} has a term twice: {', '.join(names)}")


def _check_per_token(arm: Arm, loss: Callable[[LossInputs], LossOutput], names: Sequence[str]) -> None:
    """Refuse advantages that differ within a response for a loss that cannot take them, tried on two tokens."""
    if "router" in needs_of(loss) or not advantage_of(arm).per_token:
        return
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    given: dict[str, Any] = dict.fromkeys(names, zeros)
    try:
        loss(LossInputs(**given, mask=mask, advantages=torch.tensor([[1.0, -1.0]]), weights=zeros, finished=mask))
    except ConfigError as error:
        assert isinstance(arm.advantage, tuple), "an arm makes one of a part alone"
        steps = ", ".join(map(str, arm.advantage))
        raise ConfigError(f"arm {arm.name!r}: its advantage ({steps}) differs within a response; {error}") from error


def _weighing(arm: Arm, objective: Objective) -> list[tuple[Part, Callable[[LossInputs], Tensor]]]:
    """Corrections and filters: what they were asked for, and what that is."""
    functions = (*objective.corrections, *objective.filters)
    return list(zip((*arm.corrections, *arm.filters), functions, strict=True))


def _reads_policy(correction: Callable[[LossInputs], Tensor], x: LossInputs) -> bool:
    """Whether its factors change with log π_θ; of NaN, a comparison would say no and nobody would know."""
    def factors(advantage: float, logprob: float) -> Tensor:
        torch.default_generator.manual_seed(0)  # not torch.manual_seed, which would also seed CUDA, for good
        moved = dataclasses.replace(x, advantages=x.advantages + advantage, logprobs=x.logprobs + logprob)
        return correction(moved).nan_to_num(nan=-1.0)

    with torch.random.fork_rng(devices=[]):
        pairs = [(factors(a, 0.0), factors(a, 0.0), factors(a, to)) for a in (-1, 1) for to in (-9, -0.3, 9, math.nan)]
    return any(torch.equal(one, again) and not torch.equal(one, other) for one, again, other in pairs)


def _term(part: Part) -> str:
    """What a term is called in metrics."""
    return Use.of(part).name.rpartition(":")[2]
