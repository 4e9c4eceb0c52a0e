"""An arm's components as one objective: loss = −Σ W · c · φ(r, A) + Σ terms.

`Objective.attach_weights` comes before the update of a mini-batch, when π_θ is not known. The objective itself is then
called on the mini-batch or on parts of it, which only add.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, Diverged, renamed_arguments
from moe_rl.objectives.advantages import advantage_of, explain_zeros
from moe_rl.objectives.losses import CLIPS, LOSSES, MEANS, CorrectionInputs, LossInputs, LossOutput, Mask, PerToken
from moe_rl.objectives.methods import arm as arm_of_text
from moe_rl.objectives.router import ROUTER_LOSSES, ROUTER_TERMS
from moe_rl.objectives.spelling import suggest_field
from moe_rl.objectives.terms import TERMS
from moe_rl.objectives.weights import AGGREGATIONS, CORRECTIONS
from moe_rl.registry import Component, Part, lookup, needs_of, on_a_test_token
from moe_rl.routing.inputs import RouterInputs
from moe_rl.types import Batch, MiniBatch, require_logprobs, require_mask

NARROW = (torch.bfloat16, torch.float16)

INPUTS = {"reference": "ref_logprobs", "entropy": "entropy", "lag": "lag"}
"""The input of a loss for each mark of `registry.needs`."""


@dataclass(frozen=True)
class Objective:
    """The components of an arm, their options bound. Made by `objective_of`."""

    loss: Callable[[LossInputs], LossOutput]
    aggregate: Callable[[Mask], PerToken]
    corrections: tuple[Callable[..., Tensor], ...] = ()
    filters: tuple[Callable[..., Tensor], ...] = ()
    terms: Mapping[str, Callable[[LossInputs], Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """The marks of all components, i.e. their inputs beyond the log-probs: `reference` (log-probs), `entropy` (with
        gradient), `lag`, `router` (`RouterInputs`), `load` (of the whole mini-batch) and `mini_batch` (statistics of
        it). Corrections have `engine` (they compare with it) and `policy` (they read π_θ, so they wait for the
        update)."""
        components: tuple[Callable[..., Any], ...] = (self.loss, *self.corrections, *self.filters, *self.terms.values())
        return frozenset().union(*map(needs_of, components))

    # ------------------------------------------------------------------ on a mini-batch, in this order
    def attach_weights(self, rows: Batch) -> MiniBatch:
        """The mini-batch of these rows, with what spans all of them and is known before its update: its filtered mask,
        aggregation weights and the product of the corrections that do not read π_θ."""
        x = CorrectionInputs(**_known_inputs(rows), mask=rows.response_mask)
        mask = self.filter_tokens(x)
        x = dataclasses.replace(x, mask=mask)
        factors = [compute_factors(part, x) for part in self.corrections if "policy" not in needs_of(part)]
        importance_weights = functools.reduce(torch.mul, factors) if factors else None
        return MiniBatch(
            **vars(rows) | {"mask": mask, "weights": self.aggregate(mask), "importance_weights": importance_weights}
        )

    def attach_statistics(self, mini_batch: MiniBatch, logprobs: PerToken, entropy: PerToken) -> MiniBatch:
        """The mini-batch, which has its weights, with its batch statistics, from the policy's log-probs and entropy of
        all of it."""
        return dataclasses.replace(
            mini_batch, batch_statistics=self.loss(_all_inputs(mini_batch, logprobs, entropy)).batch_statistics
        )

    def __call__(self, part: MiniBatch, logprobs: PerToken, entropy: PerToken, **further: Any) -> LossOutput:
        """The loss on some rows of a mini-batch, from the policy's log-probs and entropy of its tokens."""
        output = self.of(_all_inputs(part, logprobs, entropy, **further))
        if not self.filters:
            return output
        filtered = int((part.response_mask & ~part.mask).sum())
        corrected = output.metrics.get("corrected_tokens", 0) + filtered
        return dataclasses.replace(output, metrics={**output.metrics, "corrected_tokens": corrected})

    def locate_divergence(self, mini_batch: MiniBatch, logprobs: PerToken, entropy: PerToken) -> str:
        """The worst token of a mini-batch, from the policy's log-probs and entropy of all of it."""
        x = _all_inputs(mini_batch, logprobs.detach().requires_grad_(), entropy)
        return _describe_worst(x, None if "router" in self.needs else _gradient(self.of(x).loss, x.logprobs))

    # ------------------------------------------------------------------ on inputs of another loop
    def filter_tokens(self, x: CorrectionInputs) -> Mask:
        """The response tokens that no filter takes out."""
        return functools.reduce(torch.logical_and, [compute_factors(rule, x) != 0 for rule in self.filters], x.mask)

    def of(self, x: LossInputs) -> LossOutput:
        """The loss of inputs with their final mask and weights."""
        factors = [
            compute_factors(correction, x)
            for correction in self.corrections
            if x.importance_weights is None or "policy" in needs_of(correction)
        ]
        weights = functools.reduce(
            torch.mul, factors, x.weights if x.importance_weights is None else x.weights * x.importance_weights
        )
        output = self.loss(dataclasses.replace(x, weights=weights))
        if not isinstance(output, LossOutput):
            kind = type(output).__name__
            raise ConfigError(
                f"the loss {_name(self.loss)} returned a value of type {kind}. Return moe_rl.objectives.LossOutput."
            )
        for part, shape in (("loss", ()), ("log_ratio", x.mask.shape), ("clipped_by", x.mask.shape)):
            _require_shape(getattr(output, part), shape, f"the loss {_name(self.loss)} returned a {part}")
        loss, metrics = output.loss, dict(output.metrics)
        for factor in factors if x.importance_weights is None else [x.importance_weights, *factors]:
            acted = int((((factor - 1).abs() > 1e-6) & x.mask).sum())
            metrics["corrected_tokens"] = metrics.get("corrected_tokens", 0) + acted
        for name, term in self.terms.items():
            value = term(x)
            _require_shape(value, (), f"the term {name} returned a value")
            loss = loss + value
            metrics[f"term_{name}"] = metrics.get(f"term_{name}", 0.0) + value.item()
        if torch.is_grad_enabled() and x.logprobs.requires_grad and not loss.requires_grad:
            raise ConfigError(f"the loss {_name(self.loss)} has no gradient. Use x.log_ratio without detach().")
        return dataclasses.replace(output, loss=loss, metrics=metrics, log_ratio=output.log_ratio.detach())


def _known_inputs(part: Batch) -> dict[str, Any]:
    """The `CorrectionInputs` of a batch but for its mask, as keyword arguments."""
    return {
        "old_logprobs": part.old_logprobs,
        "rollout_logprobs": part.rollout_logprobs,
        "ref_logprobs": part.ref_logprobs,
        "advantages": part.advantages,
        "finished": part.finished[:, None].expand(part.response_mask.shape),
    }


def _all_inputs(part: MiniBatch, logprobs: PerToken, entropy: PerToken, **further: Any) -> LossInputs:
    return LossInputs(
        **_known_inputs(part),
        mask=part.mask,
        logprobs=logprobs,
        entropy=entropy,
        weights=part.weights,
        importance_weights=part.importance_weights,
        batch_statistics=part.batch_statistics,
        ratio_logprobs=part.ratio_logprobs,
        lag=None if part.lag is None else part.lag.to(logprobs.dtype),
        **further,
    )


def _gradient(loss: Float[Tensor, ""], logprobs: PerToken) -> PerToken | None:
    """The gradient by the log-probs alone; None where there is none."""
    if not (loss.requires_grad and logprobs.requires_grad):
        return None
    with suppress(RuntimeError):  # a graph of torch.compile allows one backward, which is the caller's
        return torch.autograd.grad(loss, logprobs, retain_graph=True, allow_unused=True)[0]
    return None


def _describe_worst(x: LossInputs, gradient: PerToken | None) -> str:
    """The first token whose log-ratio or gradient is not finite, or else that of the largest log-ratio."""
    log_ratio = x.log_ratio.detach()
    finite = log_ratio.isfinite() if gradient is None else log_ratio.isfinite() & gradient.isfinite()
    row, token = divmod(int(log_ratio.abs().masked_fill(~finite, math.inf).argmax()), x.mask.shape[1])
    ratio, advantage = log_ratio[row, token].item(), x.advantages[row, token].item()
    bound = " grpo(dual=3), or grpo(level=sequence,dual=3), bounds it." if advantage < 0 < ratio < math.inf else ""
    return f"Row {row}, token {token} has the log-ratio {ratio:g} and the advantage {advantage:g}.{bound}"


def _name(part: Callable[..., Any]) -> str:
    return getattr(getattr(part, "func", part), "__name__", str(part))


def compute_factors(correction: Callable[..., Tensor], x: CorrectionInputs) -> PerToken:
    """A correction's factors, 1 outside the mask. Raises ConfigError for another shape and for NaN."""
    factors = correction(x)
    _require_shape(factors, x.mask.shape, f"the correction {_name(correction)} returned factors")
    factors = torch.where(x.mask, factors, 1)
    if bool(factors.isnan().any()):
        raise ConfigError(f"the correction {_name(correction)} is NaN: some of its log-probs are not numbers")
    return factors


def _require_shape(value: object, shape: tuple[int, ...], description: str) -> None:
    """Raise ConfigError for anything but a tensor of this shape."""
    form = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    if form != f"shape {tuple(shape)}":
        raise ConfigError(f"{description} of {form}. Return a tensor of shape {tuple(shape)}.")


# ---------------------------------------------------------------------- from an arm
def objective_of(arm: Arm) -> Objective:
    """The objective of an arm, tried on one token.

    Raises ConfigError for an unknown component or option, for options that do not fit together, and for advantages that
    the loss cannot take. Warns of a range so wide that a sequence-level loss never clips.
    """
    find = functools.partial(lookup, hint=suggest_field)
    objective = Objective(
        loss=find("loss", arm.loss, LOSSES | ROUTER_LOSSES),
        aggregate=find("aggregation", arm.aggregate, AGGREGATIONS),
        corrections=tuple(find("correction", part, CORRECTIONS) for part in arm.corrections),
        filters=tuple(find("correction", part, CORRECTIONS) for part in arm.filters),
        terms={_term_name(part): find("term", part, TERMS | ROUTER_TERMS) for part in arm.terms},
    )
    _check_corrections(arm, objective)
    with on_a_test_token(f"arm {arm.name!r}"):
        output = _try_on_one_token(objective)
    if taken := [name for name in output.metrics if not name.startswith(("own_", "term_", "corrected_"))]:
        raise ConfigError(f"arm {arm.name!r}: start the names of its loss's metrics {', '.join(taken)} with own_")
    _check_per_token(arm, objective)
    _warn_of_wide_range(arm, objective)
    return objective


@renamed_arguments(trust="importance_weights", marks="batch_statistics")
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
    """The objective of an arm on a mini-batch of another training loop.

    A text is an arm as in a study (`dapo`, `sapo(tau_neg=1.05)+token_mean`). A `Component` or a function of your own is
    a loss, with everything else as in GRPO. `logprobs` has the gradient; log-probs are of response tokens, in nats;
    `advantages` are one per row or per token. `further` are the other fields of `LossInputs` that the arm needs; under
    anchor='engine' `rollout_logprobs` replace `old_logprobs`. For a part of a mini-batch give `weights`: its rows of
    `objective_of(arm).aggregate(mask)` over the whole. Parts then only add; if a correction or the loss takes
    statistics of the mini-batch, give its `importance_weights` and `batch_statistics`, too. Filters take tokens out of
    `mask`, and cannot be used with `weights`. Types of less than 32 bits are computed in float32.

    Raises ConfigError for inputs that are missing, of another shape or not finite, for an arm with routes or advantages
    of its own (see docs/your_trainer.md), and for a part without the statistics of its mini-batch; warns where that is
    uncertain. Raises RunError, with the token, where the loss, a log-ratio or a gradient by a log-prob is not finite.
    """
    arm = arm_of_text(arm) if isinstance(arm, str) else arm if isinstance(arm, Arm) else Arm(name="loss", loss=arm)
    _require_plain(arm)
    objective = _objective_once(arm)
    further = {name: _widen(x) for name, x in further.items()}
    differentiated = logprobs = logprobs.view_as(logprobs)  # a view: the caller's hooks see one gradient, of its own
    logprobs, old_logprobs, advantages, weights = map(_widen, (logprobs, old_logprobs, advantages, weights))
    if arm.anchor == "engine":
        if further.get("rollout_logprobs") is None:
            raise ConfigError(f"arm {arm.name!r} divides by the engine's probabilities: give rollout_logprobs")
        old_logprobs = further["rollout_logprobs"]
    require_mask(mask)
    _require_finite(
        mask,
        old_logprobs=old_logprobs,
        weights=weights,
        **{n: x for n, x in further.items() if n != "ratio_logprobs" and (n != "entropy" or n in objective.needs)},
    )
    if logprobs.shape == mask.shape:
        require_logprobs(logprobs, mask, "logprobs")
    if weights is not None and objective.filters:
        raise ConfigError("filters need the whole mini-batch. Give filters=none, and a mask and weights after them.")
    x = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        mask=mask,
        advantages=_spread_advantages(advantages, mask),
        weights=torch.zeros_like(logprobs) if weights is None else weights,
        **further,
    )
    _require_statistics(objective, x, weights)
    if weights is None:
        mask = objective.filter_tokens(x)
        x = dataclasses.replace(x, mask=mask, weights=objective.aggregate(mask))
    output = objective.of(x)
    _require_finite_loss(objective, x, output.loss, _gradient(output.loss, differentiated))
    return output


def _require_finite_loss(objective: Objective, x: LossInputs, loss: Tensor, gradient: PerToken | None) -> None:
    """Raise RunError, with the token, for a loss, a log-ratio or a gradient that is not finite."""
    finite = loss.isfinite() & x.log_ratio.isfinite().all()
    if not bool(finite if gradient is None else finite & gradient.isfinite().all()):
        raise Diverged(
            f"the loss {_name(objective.loss)} is {loss.item():g}, or its gradient is not finite. "
            f"{_describe_worst(x, gradient)}"
        )


def _spread_advantages(advantages: Tensor, mask: Mask) -> PerToken:
    """Advantages per token. Raises ConfigError for another shape, and where they are not finite."""
    if advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ConfigError(
            f"advantages have shape {tuple(advantages.shape)}; expected ({len(mask)},) or {tuple(mask.shape)}"
        )
    advantages = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
    _require_finite(mask, advantages=advantages)
    return advantages


def compute_advantages(
    arm: Arm | str,
    *,
    rewards: Shaped[Tensor, " batch"],
    prompt: Int[Tensor, " batch"],
    mask: Mask,
    finished: Bool[Tensor, " batch"] | None = None,
    **inputs: Any,
) -> PerToken:
    """An arm's advantages from the rewards of one step, per token, 0 outside the response.

    `prompt` numbers the prompt of each row; all responses to a prompt belong into one call, and for steps that compare
    with the batch (`whitened`, `normalized`) all rows. `finished` is false where a response was cut off (default: none
    was); `inputs` are the other fields of `AdvantageInputs` that the arm needs. Warns where a row is alone in its
    group, or nothing is learned. Raises RunError for a reward that is not finite, ConfigError for a missing input, and
    for an arm whose steps remember earlier batches: for these make `advantage_of(arm)` once, and call its `compute`.
    """
    advantage = advantage_of(arm_of_text(arm) if isinstance(arm, str) else arm)
    require_mask(mask)
    if mask.dim() != 2 or any(x.shape != mask.shape[:1] for x in (rewards, prompt, finished) if x is not None):
        raise ConfigError(f"{len(rewards)} rewards and {len(prompt)} prompts for {len(mask)} rows. Give one per row.")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()  # integers become fractions
    every = torch.ones(len(mask), dtype=torch.bool) if finished is None else finished
    require_mask(every, "finished")
    advantages = advantage.compute(rewards=rewards, prompt=prompt, mask=mask, finished=every, **inputs)[0]
    if any(advantage.memory.values()):
        raise ConfigError("an advantage of this arm remembers earlier batches. Make advantage_of(arm) once.")
    if reason := explain_zeros(advantages, rewards, prompt):
        warnings.warn(reason, stacklevel=2)
    return advantages


def correction_weights(arm: Arm | str, **inputs: Any) -> PerToken:
    """The product of an arm's corrections, one factor per token, 1 where it has none. `inputs` are the fields of
    `CorrectionInputs`. Raises ConfigError for an arm with filters, or with a correction that reads π_θ."""
    objective = _objective_once(arm_of_text(arm) if isinstance(arm, str) else arm)
    require_mask(inputs["mask"])
    _require_finite(**{n: x for n, x in inputs.items() if n == "mask" or n.endswith("logprobs")})
    if objective.filters or "policy" in objective.needs:
        raise ConfigError("filters must run before, and corrections that read π_θ after this. Remove them.")
    x = CorrectionInputs(**{name: _widen(value) for name, value in inputs.items()})
    return functools.reduce(
        torch.mul,
        (compute_factors(correction, x) for correction in objective.corrections),
        torch.ones_like(x.old_logprobs),
    )


def _require_statistics(objective: Objective, x: LossInputs, weights: PerToken | None) -> None:
    """Raise ConfigError for weights of a part of a mini-batch without the statistics of all of it; warn where no
    weights are given."""
    components: list[Callable[..., Any]] = [objective.loss] if x.batch_statistics is None else []
    components += objective.corrections if x.importance_weights is None else ()
    lacking = [
        _name(part)
        for part in components
        if "mini_batch" in needs_of(part) or getattr(part, "keywords", {}).get("batch_normalized")
    ]
    if not lacking or not x.mask.any():
        return
    of_all, twice = map(objective.aggregate, (x.mask, x.mask.repeat(2, 1)))
    text = f"{' and '.join(lacking)} needs statistics of the mini-batch, not of a part. "
    text += "Give its batch_statistics and importance_weights"
    if weights is None or torch.equal(of_all, twice[: len(of_all)]):  # weights of a sum do not show it
        warnings.warn(f"{text} or, of all its rows, its weights (objective_of(arm).aggregate(mask)).", stacklevel=3)
    elif not torch.allclose(weights.double(), of_all, 1e-4, 0):
        raise ConfigError(f"{text}; these weights are those of a part.")


def _require_finite(mask: Mask, **values: Any) -> None:
    """Raise ConfigError for inputs at response tokens that are not finite, or no log-probs."""
    for name, x in values.items():
        if not isinstance(x, Tensor) or x.shape != mask.shape:
            continue
        if len(wrong := (mask & ~x.isfinite()).nonzero()):
            places = f"{len(wrong)} of {int(mask.sum())} response tokens, first at (row, token) {wrong[0].tolist()}"
            raise ConfigError(f"{name} is not finite at {places}")
        if name.endswith("logprobs"):
            require_logprobs(x, mask, name)


def _require_plain(arm: Arm) -> None:
    """Raise ConfigError for an arm with replay, or with advantages of its own."""
    if Component.of(arm.routes).name != "live" or arm.ratio_routes is not None:
        raise ConfigError(
            f"arm {arm.name!r} replays routing, but a loss cannot. Score under replay_routing, and give routes=none."
        )
    if arm.advantage not in ((), (Component("group"),)):
        raise ConfigError(
            f"arm {arm.name!r} computes advantages ({', '.join(map(str, arm.advantage))}). Call compute_advantages, "
            "and give advantage=none."
        )


def _widen(x: Any) -> Any:
    """A tensor of less than 32 bits as float32, with its gradient; anything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in NARROW else x


_objective_once = functools.lru_cache(maxsize=64)(objective_of)
"""For `policy_loss`, which a loop calls for every micro-batch."""


def _inputs_of_zeros(objective: Objective, tokens: int) -> LossInputs:
    """One row, with the inputs that the objective needs."""
    zeros, mask = torch.zeros(1, tokens), torch.ones(1, tokens, dtype=torch.bool)
    weights = objective.aggregate(mask)
    _require_shape(weights, mask.shape, f"the aggregation {_name(objective.aggregate)} returned weights")
    named = dict.fromkeys((INPUTS[need] for need in objective.needs & set(INPUTS)), zeros)
    return LossInputs(
        logprobs=zeros,
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        mask=mask,
        advantages=zeros,
        finished=mask,
        weights=weights,
        **named,
        router=RouterInputs.of_one_token() if "router" in objective.needs and tokens == 1 else None,
    )


def _try_on_one_token(objective: Objective) -> LossOutput:
    """Both stages. Only corrections that are marked with `policy` get π_θ."""
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
                f"arm {arm.name!r}: with anchor='engine' every weight of {Component.of(part).name} is 1. Remove one of "
                "the two."
            )
    for part, function in zip(arm.filters, objective.filters, strict=True):
        name = Component.of(part).name
        if name in ("truncated", "cis") or "policy" in needs_of(function):
            raise ConfigError(
                f"arm {arm.name!r}: {name} is never 0, or reads π_θ, which is unknown when filters run. Use it as a "
                "correction."
            )
    for kind, names in (("correction", [*map(str, arm.corrections)]), ("term", [*map(_term_name, arm.terms)])):
        if len(set(names)) < len(names):
            raise ConfigError(f"arm {arm.name!r} has a {kind} twice: {', '.join(names)}")


def _check_per_token(arm: Arm, objective: Objective) -> None:
    """Refuse advantages that differ within a response where the loss does, on two tokens."""
    if "router" in needs_of(objective.loss) or not advantage_of(arm).per_token:
        return
    x = _inputs_of_zeros(objective, tokens=2)
    try:
        objective.loss(dataclasses.replace(x, advantages=torch.tensor([[1.0, -1.0]])))
    except ConfigError as error:
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
            "within a few percent of 1. The paper uses 3e-4/4e-4; short responses need a range below 0.05.",
            stacklevel=3,
        )


def _term_name(part: Part) -> str:
    """The name of a term in metrics."""
    return Component.of(part).name.rpartition(":")[2]
