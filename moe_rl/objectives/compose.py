"""An arm's components as one objective: loss = −Σ W · c · φ(r, A) + Σ terms.

Two stages: `Objective.attach_weights` before the update of a mini-batch, when π_θ is not known; then the objective
itself, called on the mini-batch or on parts of it, which only add.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.objectives.advantages import advantage_of
from moe_rl.objectives.losses import CLIPS, LOSSES, MEANS, CorrectionInputs, LossInputs, LossOutput, Mask, PerToken
from moe_rl.objectives.methods import arm as arm_of_text
from moe_rl.objectives.router import ROUTER_LOSSES, ROUTER_TERMS
from moe_rl.objectives.spelling import suggest_field
from moe_rl.objectives.terms import TERMS
from moe_rl.objectives.weights import AGGREGATIONS, CORRECTIONS
from moe_rl.registry import Component, Part, lookup, needs_of, unknown
from moe_rl.routing.inputs import RouterInputs
from moe_rl.types import Batch, require_logprobs, require_mask

NARROW = (torch.bfloat16, torch.float16)

FIELDS = {field.name for field in dataclasses.fields(LossInputs)} | {"log_ratio"}
"""What a loss, a term or a correction can read."""
GIVEN = {"reference": "ref_logprobs", "entropy": "entropy", "lag": "lag"}
"""Which of a loss's inputs is there for components that need it."""


@dataclass(frozen=True)
class Objective:
    """What an arm minimises, its options bound. Made by `objective_of`."""

    loss: Callable[[LossInputs], LossOutput]
    aggregate: Callable[[Mask], PerToken]
    corrections: tuple[Callable[..., Tensor], ...] = ()
    filters: tuple[Callable[..., Tensor], ...] = ()
    terms: Mapping[str, Callable[[LossInputs], Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """What its components ask for beyond the log-probs: `reference` (log-probs), `entropy` (with gradient), `lag`,
        `router` (`RouterInputs`), `load` (theirs of all the mini-batch), and `mini_batch`: its marks, from log-probs
        and entropy of all of it. Corrections say `engine` (they compare with it) and `policy` (they read π_θ, row by
        row, so that they wait for the update)."""
        components: tuple[Callable[..., Any], ...] = (self.loss, *self.corrections, *self.filters, *self.terms.values())
        return frozenset().union(*map(needs_of, components))

    # ------------------------------------------------------------------ on a mini-batch, in this order
    def attach_weights(self, mini_batch: Batch) -> Batch:
        """The mini-batch with what spans all of it and is known before its update: its filtered mask, aggregation
        weights and the product of the corrections that do not read π_θ."""
        x = CorrectionInputs(**_known_inputs(mini_batch))
        mask = self.filter_tokens(x)
        x = dataclasses.replace(x, mask=mask)
        factors = [compute_factors(one, x) for one in self.corrections if "policy" not in needs_of(one)]
        return dataclasses.replace(mini_batch, loss_mask=mask if self.filters else None, weights=self.aggregate(mask),
                                   trust=functools.reduce(torch.mul, factors) if factors else None)

    def attach_statistics(self, mini_batch: Batch, logprobs: PerToken, entropy: PerToken) -> Batch:
        """The mini-batch, which has its weights, with its marks, from the policy's log-probs and entropy of all of
        it."""
        return dataclasses.replace(mini_batch, marks=self.loss(_all_inputs(mini_batch, logprobs, entropy)).marks)

    def __call__(self, part: Batch, logprobs: PerToken, entropy: PerToken, **further: Any) -> LossOutput:
        """The loss on some rows of a mini-batch with weights, from the policy's log-probs and entropy of its tokens."""
        assert part.old_logprobs is not None, "the trainer fills it in before an update"
        return self.of(_all_inputs(part, logprobs, entropy, **further))

    # ------------------------------------------------------------------ on inputs that somebody else has put together
    def filter_tokens(self, x: CorrectionInputs) -> Mask:
        """The response tokens that no filter takes out."""
        return functools.reduce(torch.logical_and, [compute_factors(one, x) != 0 for one in self.filters], x.mask)

    def of(self, x: LossInputs) -> LossOutput:
        """The loss of inputs whose mask and weights are what they should be."""
        weights = x.weights if x.trust is None else x.weights * x.trust
        for correction in self.corrections:
            if x.trust is None or "policy" in needs_of(correction):
                weights = weights * compute_factors(correction, x)
        output = self.loss(dataclasses.replace(x, weights=weights))
        if not isinstance(output, LossOutput):
            raise ConfigError(f"the loss {_name(self.loss)} returned a {type(output).__name__}. Return "
                              "moe_rl.objectives.LossOutput(loss, log_ratio, clipped_by).")
        loss, metrics = output.loss, dict(output.metrics)
        for name, term in self.terms.items():
            value = term(x)
            loss = loss + value
            metrics[f"term_{name}"] = metrics.get(f"term_{name}", 0.0) + value.item()
        if torch.is_grad_enabled() and x.logprobs.requires_grad and not loss.requires_grad:
            raise ConfigError(f"the loss {_name(self.loss)} has no gradient. Compute it from x.logprobs or x.log_ratio "
                              "without detach().")
        return dataclasses.replace(output, loss=loss, metrics=metrics, log_ratio=output.log_ratio.detach())


def _known_inputs(part: Batch) -> dict[str, Any]:
    """The `CorrectionInputs` of a batch, as keyword arguments."""
    return {"old_logprobs": part.rollout_logprobs if part.old_logprobs is None else part.old_logprobs,
            "rollout_logprobs": part.rollout_logprobs, "ref_logprobs": part.ref_logprobs,
            "mask": part.response_mask if part.loss_mask is None else part.loss_mask, "advantages": part.advantages,
            "finished": part.finished[:, None].expand(part.response_mask.shape)}


def _all_inputs(part: Batch, logprobs: PerToken, entropy: PerToken, **further: Any) -> LossInputs:
    assert part.weights is not None, "attach_weights comes before the update"
    return LossInputs(**_known_inputs(part), logprobs=logprobs, entropy=entropy, weights=part.weights,
                      trust=part.trust, marks=part.marks, ratio_logprobs=part.ratio_logprobs,
                      lag=None if part.lag is None else part.lag.to(logprobs.dtype), **further)


def _name(part: Callable[..., Any]) -> str:
    return getattr(getattr(part, "func", part), "__name__", str(part))


def compute_factors(correction: Callable[..., Tensor], x: CorrectionInputs) -> PerToken:
    """A correction's factors, 1 outside the mask, where 0 · NaN would be NaN. Raises ConfigError for another shape, for
    NaN, and for a correction that reads π_θ before it is known."""
    try:
        factors = correction(x)
    except AttributeError as error:
        if not isinstance(error.obj, CorrectionInputs) or error.name not in FIELDS:
            raise
        raise ConfigError(f"the correction {_name(correction)} uses log π_θ (x.{error.name}), which is unknown before "
                          "the update. Mark it with moe_rl.registry.needs('policy'), and use it as a correction, not "
                          "as a filter.") from error
    if factors.shape != x.mask.shape:
        raise ConfigError(f"a correction has shape {tuple(factors.shape)}. Return one factor per token: (batch, time), "
                          f"here {tuple(x.mask.shape)}.")
    factors = torch.where(x.mask, factors, 1)
    if bool(factors.isnan().any()):
        raise ConfigError("a correction is NaN: some of its log-probs are not numbers")
    return factors


# ---------------------------------------------------------------------- from an arm
def objective_of(arm: Arm) -> Objective:
    """The objective that an arm's components make, tried on one token, so that options out of range are refused here.

    Raises ConfigError for a component or an option that is not there, and for advantages that the loss cannot take;
    warns when a sequence-level loss gets a range so wide that it never clips.
    """
    find = functools.partial(lookup, hint=suggest_field)
    objective = Objective(loss=find("loss", arm.loss, LOSSES | ROUTER_LOSSES),
                          aggregate=find("aggregation", arm.aggregate, AGGREGATIONS),
                          corrections=tuple(find("correction", part, CORRECTIONS) for part in arm.corrections),
                          filters=tuple(find("correction", part, CORRECTIONS) for part in arm.filters),
                          terms={_term_name(part): find("term", part, TERMS | ROUTER_TERMS) for part in arm.terms})
    _check_corrections(arm, objective)
    try:
        output = _try_on_one_token(objective)
    except MoeRlError:
        raise
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename}:{at.lineno}"
        if isinstance(error, AttributeError) and isinstance(error.obj, CorrectionInputs):
            unknown(f"field of {type(error.obj).__name__} ({where})", str(error.name), FIELDS)
        raise ConfigError(f"arm {arm.name!r}: a component failed on one test token ({where}: {error}). Check the types "
                          "of its options and what it returns, and mark what it needs with "
                          "moe_rl.registry.needs('entropy'), ('reference') or ('router').") from error
    for name, shape, needed in (("loss", (), "one number"), ("log_ratio", (1, 1), "(batch, time)"),
                                ("clipped_by", (1, 1), "(batch, time)")):
        value = getattr(output, name)
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        if found != f"shape {shape}":
            raise ConfigError(f"arm {arm.name!r}: its loss returned a {name} of {found} for one token. Return a tensor "
                              f"of {needed}, here {shape}.")
    if taken := [name for name in output.metrics if not name.startswith(("own_", "term_"))]:
        raise ConfigError(f"arm {arm.name!r}: its loss returns the metrics {', '.join(taken)}, which may be names of "
                          "measured columns. Start their names with own_.")
    _check_per_token(arm, objective)
    _warn_of_wide_range(arm, objective)
    return objective


def policy_loss(
    arm: Arm | Part,
    *,
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: Float[Tensor, " batch"] | PerToken,
    mask: Mask,
    weights: PerToken | None = None,
    **further: Any,
) -> LossOutput:
    """The objective of an arm on a mini-batch of somebody else's loop.

    A text is an arm as a study has it (`dapo`, `sapo(tau_neg=1.05)+token_mean`). A `Component` or a function of your
    own is a loss alone, with everything else as in GRPO. `logprobs` has the gradient; log-probs are of response tokens,
    in nats; `advantages` are one per row or per token. `further` are the other fields of `LossInputs` that the arm
    needs; under anchor='engine' `rollout_logprobs` take the place of `old_logprobs`. For one part of a mini-batch give
    `weights`: its rows of `objective_of(arm).aggregate(mask)` over the whole; parts then only add, unless a correction
    or the loss takes statistics of the mini-batch: then give `trust` and `marks` of it, too. Filters take tokens out of
    `mask`, and are refused where `weights` are given. What has less than 32 bits is computed in float32: bfloat16 has
    no number between 1 and 1.0078.

    Raises ConfigError where something is missing, has another shape or is not finite, and for an arm with routes or
    advantages of its own, which nothing here makes: see docs/your_trainer.md.
    """
    arm = arm_of_text(arm) if isinstance(arm, str) else arm if isinstance(arm, Arm) else Arm(name="loss", loss=arm)
    _require_plain(arm)
    objective = _objective_once(arm)
    logprobs, old_logprobs, advantages, weights = map(_widen, (logprobs, old_logprobs, advantages, weights))
    further = {name: _widen(x) for name, x in further.items()}
    if arm.anchor == "engine":
        if further.get("rollout_logprobs") is None:
            raise ConfigError(f"arm {arm.name!r} divides by the engine's probabilities: give rollout_logprobs")
        old_logprobs = further["rollout_logprobs"]
    require_mask(mask)
    _require_finite(mask, old_logprobs=old_logprobs, rollout_logprobs=further.get("rollout_logprobs"),
                    ref_logprobs=further.get("ref_logprobs"))
    if logprobs.shape == mask.shape:
        require_logprobs(logprobs, mask, "logprobs")
    if advantages.dim() not in (1, 2) or advantages.dim() == 2 and advantages.shape != mask.shape:
        raise ConfigError(f"advantages have shape {tuple(advantages.shape)}. Give one per row, {len(mask)}, or one per "
                          f"token, {tuple(mask.shape)}.")
    if advantages.dim() == 1 and len(advantages) != len(mask):
        raise ConfigError(f"{len(advantages)} advantages for {len(mask)} rows. Give one per row, or one per token.")
    if weights is not None and objective.filters:
        raise ConfigError("filters need the whole mini-batch, so they cannot run on a part with given weights. Give "
                          "the arm without filters, a mask after the filters, and weights of that mask.")
    counted = advantages[mask if advantages.dim() == 2 else mask.any(1)]
    if not bool(counted.isfinite().all()):
        raise ConfigError(f"{int((~counted.isfinite()).sum())} of {counted.numel()} advantages are not finite, so "
                          "every weight would be NaN")
    x = LossInputs(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask,
                   advantages=advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages,
                   weights=torch.zeros_like(logprobs) if weights is None else weights, **further)
    if weights is None:
        mask = objective.filter_tokens(x)
        x = dataclasses.replace(x, mask=mask, weights=objective.aggregate(mask))
    return objective.of(x)


def compute_advantages(
    arm: Arm | str,
    *,
    rewards: Shaped[Tensor, " batch"],
    prompt: Int[Tensor, " batch"],
    mask: Mask,
    finished: Bool[Tensor, " batch"] | None = None,
    **inputs: Any,
) -> PerToken:
    """The advantages that an arm, or its text, makes of the rewards of one step, per token, 0 outside the response.

    `prompt` says which prompt a row answers; the rows of all its responses belong into one call. `finished` is false
    where a response was cut off (default: none was); `inputs` are the other fields of `AdvantageInputs` that the arm
    needs. Nothing is kept from one call to the next. Raises RunError for a reward that is not finite, ConfigError for
    an input that the arm needs and does not get, and for an arm whose steps remember earlier batches: for these make
    `advantage_of(arm)` once, and call its `compute` step after step.
    """
    made = advantage_of(arm_of_text(arm) if isinstance(arm, str) else arm)
    require_mask(mask)
    if not len(rewards) == len(prompt) == len(mask) == len(mask if finished is None else finished):
        raise ConfigError(f"{len(rewards)} rewards and {len(prompt)} prompts for {len(mask)} rows. Give one per row.")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()  # of 0 and 1 steps make fractions
    every = torch.ones(len(mask), dtype=torch.bool) if finished is None else finished
    require_mask(every, "finished")
    found = made.compute(rewards=rewards, prompt=prompt, mask=mask, finished=every, **inputs)[0]
    if any(made.memory.values()):
        raise ConfigError("an advantage of this arm remembers earlier batches, and compute_advantages does not. Call "
                          "moe_rl.objectives.advantage_of(arm) once, and its compute(…) for each batch.")
    return found


def correction_weights(arm: Arm | str, **inputs: Any) -> PerToken:
    """The product of an arm's corrections, one factor per token, 1 where it has none; `inputs` are the fields of
    `CorrectionInputs`. Raises ConfigError for an arm of which one reads π_θ, which is not known yet."""
    objective = _objective_once(arm_of_text(arm) if isinstance(arm, str) else arm)
    require_mask(inputs["mask"])
    _require_finite(**{n: x for n, x in inputs.items() if n == "mask" or n.endswith("logprobs")})
    if objective.filters:
        raise ConfigError("filters must run before corrections. Give the arm without filters (filters=none), and a "
                          "mask after the filters.")
    x = CorrectionInputs(**{name: _widen(value) for name, value in inputs.items()})
    return functools.reduce(torch.mul, (compute_factors(one, x) for one in objective.corrections),
                            torch.ones_like(x.old_logprobs))


def _require_finite(mask: Mask, **logprobs: PerToken | None) -> None:
    """Raise ConfigError for log-probs of response tokens that are no numbers. Those of the policy are not looked at:
    they make the loss or its gradient NaN, which is seen."""
    for name, x in logprobs.items():
        if x is not None and x.shape == mask.shape and not bool((found := x[mask].isfinite()).all()):
            raise ConfigError(f"{name} is not finite at {int((~found).sum())} of {found.numel()} response tokens")
        if x is not None and x.shape == mask.shape:
            require_logprobs(x, mask, name)


def _require_plain(arm: Arm) -> None:
    """Raise ConfigError for what an arm says and a loss alone cannot do."""
    if Component.of(arm.routes).name != "live" or arm.ratio_routes is not None:
        raise ConfigError(f"arm {arm.name!r} replays routing, but a loss cannot. Score under "
                          "moe_rl.routing.replay_routing, and give the arm with routes=none.")
    assert isinstance(arm.advantage, tuple), "an arm makes one of a part alone"
    if arm.advantage not in ((), (Component("group"),)):
        raise ConfigError(f"arm {arm.name!r} computes advantages ({', '.join(map(str, arm.advantage))}), but a loss "
                          "takes given advantages. Call moe_rl.objectives.compute_advantages, and give the arm with "
                          "advantage=none.")


def _widen(x: Any) -> Any:
    """A tensor of less than 32 bits as float32, whose gradient flows on; anything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in NARROW else x


_objective_once = functools.lru_cache(maxsize=64)(objective_of)
"""For `policy_loss`, which a loop calls for every micro-batch: an arm is looked up and tried once."""


def _inputs_of_zeros(objective: Objective, tokens: int) -> LossInputs:
    """One row, with what the objective says that it needs, and nothing else."""
    zeros, mask = torch.zeros(1, tokens), torch.ones(1, tokens, dtype=torch.bool)
    named = dict.fromkeys((GIVEN[need] for need in objective.needs & set(GIVEN)), zeros)
    return LossInputs(logprobs=zeros, old_logprobs=zeros, rollout_logprobs=zeros, mask=mask, advantages=zeros,
                      finished=mask, weights=objective.aggregate(mask), **named,
                      router=RouterInputs.of_one_token() if "router" in objective.needs and tokens == 1 else None)


def _try_on_one_token(objective: Objective) -> LossOutput:
    """Both stages. Corrections that are not marked with `policy` are given nothing of π_θ."""
    x = _inputs_of_zeros(objective, tokens=1)
    before = CorrectionInputs(**{f.name: getattr(x, f.name) for f in dataclasses.fields(CorrectionInputs)})
    objective.filter_tokens(before)
    for correction in objective.corrections:
        if "policy" not in needs_of(correction):
            compute_factors(correction, before)
    return objective.of(x)


def _check_corrections(arm: Arm, objective: Objective) -> None:
    """Refuse combinations of components that make no sense."""
    functions = (*objective.corrections, *objective.filters)
    for part, function in zip((*arm.corrections, *arm.filters), functions, strict=True):
        if arm.anchor == "engine" and "engine" in needs_of(function):
            raise ConfigError(
                f"arm {arm.name!r}: with anchor='engine' π_old is the engine's policy, so every weight of "
                f"{Component.of(part).name} is 1. Remove one of the two."
            )
    for part, function in zip(arm.filters, objective.filters, strict=True):
        if Component.of(part).name == "truncated":
            raise ConfigError(f"arm {arm.name!r}: truncated is never 0, so it has no effect as a filter. Use it as a "
                              "correction.")
        if "policy" in needs_of(function):
            raise ConfigError(f"arm {arm.name!r}: {part} uses π_θ, which is unknown when filters run. Use it as a "
                              "correction.")
    for kind, names in (("correction", [*map(str, arm.corrections)]), ("term", [*map(_term_name, arm.terms)])):
        if len(set(names)) < len(names):
            raise ConfigError(f"arm {arm.name!r} has a {kind} twice: {', '.join(names)}")


def _check_per_token(arm: Arm, objective: Objective) -> None:
    """Refuse advantages that differ within a response for a loss that cannot take them, tried on two tokens."""
    if "router" in needs_of(objective.loss) or not advantage_of(arm).per_token:
        return
    x = _inputs_of_zeros(objective, tokens=2)
    try:
        objective.loss(dataclasses.replace(x, advantages=torch.tensor([[1.0, -1.0]])))
    except ConfigError as error:
        assert isinstance(arm.advantage, tuple), "an arm makes one of a part alone"
        steps = ", ".join(map(str, arm.advantage))
        raise ConfigError(f"arm {arm.name!r}: its advantage ({steps}) differs within a response. {error}") from error


def _warn_of_wide_range(arm: Arm, objective: Objective) -> None:
    name = Component.of(arm.loss).name
    options = {option: p.default for option, p in inspect.signature(objective.loss).parameters.items()}
    high, low = (options.get(bound, 0.0) for bound in ("clip_high", "clip_low"))
    level = options.get(CLIPS.get(name, ""), CLIPS.get(name, ""))
    if CLIPS.get(level, level) in MEANS and max(high, low) >= 0.1:
        warnings.warn(
            f"arm {arm.name!r}: the clip range {low:g}/{high:g} never clips the sequence ratio of {name}, which stays "
            "within a few percent of 1. The paper uses 3e-4/4e-4; short responses need another range, usually below "
            "0.05.", stacklevel=3)


def _term_name(part: Part) -> str:
    """What a term is called in metrics."""
    return Component.of(part).name.rpartition(":")[2]
