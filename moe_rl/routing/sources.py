"""The routes that an update replays: functions from a batch and its unconstrained scoring to a trace, or to None for
live routing. `Arm.routes` names one of these, or a user's own `pkg.module:function`; options are keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int, Integer
from pydantic import Field, NonNegativeInt
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.registry import Component, NotNegative, Share, checked, needs
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.trace import RoutingTrace

NOTHING, BASE, ALL = "replays nothing", "replays all routes of its base", "replays all routes, its own"
"""What the check of a source returns; else a number of MoE layers, or None for a part of the routes."""
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Base = Literal["old_policy", "rollout"]
"""All routes, of which a source takes a part."""


@runtime_checkable
class Sampled(Protocol):
    """What a source may read of a mini-batch; `types.Batch` has it."""

    @property
    def tokens(self) -> Integer[Tensor, "batch time"]: ...
    @property
    def prompt_index(self) -> Int[Tensor, " batch"]:
        """Rows of one prompt have equal numbers."""

    @property
    def rollout_routes(self) -> RoutingTrace | None: ...


@runtime_checkable
class Unconstrained(Protocol):
    """What a source may read of a forward of π_old without replay; `types.Scored` has it."""

    @property
    def routes(self) -> RoutingTrace: ...
    @property
    def scores(self) -> RouterScores | None:
        """Only for a source that is marked with `needs("scores")`."""


def live(batch: Sampled, unconstrained: Unconstrained) -> None:
    """No replay: unconstrained routing."""
    return None


@checked(lambda run: ALL)
def old_policy(batch: Sampled, unconstrained: Unconstrained) -> RoutingTrace:
    """Routing Replay (R2): the routing of π_old in the trainer. GSPO, arXiv 2507.18071, section 5.3."""
    return unconstrained.routes


@needs("engine")
@checked(lambda run: ALL)
def rollout(batch: Sampled, unconstrained: Unconstrained) -> RoutingTrace:
    """Rollout Routing Replay (R3): the routing of the inference engine. arXiv 2510.11370."""
    if batch.rollout_routes is None:
        raise RoutingError("routes='rollout': the rollouts have no routing. Use an engine that reports it.")
    return batch.rollout_routes


def _check_shuffled(run: Any) -> str:
    if run.prompts_per_step < 2:
        raise ConfigError(f"routes='shuffled' needs prompts_per_step of at least 2, not {run.prompts_per_step}")
    return ALL


@checked(_check_shuffled)
def shuffled(batch: Sampled, unconstrained: Unconstrained) -> RoutingTrace:
    """Placebo: the routing of a response to another prompt, position by position.

    Later positions of the same prompt would leak the sampled token. A position beyond the other response routes freely.
    Raises RoutingError for a batch of one prompt.
    """
    groups = batch.prompt_index.unique()
    if len(groups) < 2:
        raise RoutingError("routes='shuffled' takes routing from another prompt, but the batch has only one")
    rows = [(batch.prompt_index == g).nonzero()[:, 0] for g in groups]
    donor = torch.empty_like(batch.prompt_index)
    for mine, theirs in zip(rows, rows[1:] + rows[:1], strict=True):
        donor[mine] = theirs[torch.arange(len(mine)) % len(theirs)]
    routes = unconstrained.routes
    experts = routes.experts[donor.to(routes.experts.device)]
    return replace(routes, experts=experts).only(routes.attention_mask[..., None])


@checked(lambda run, **_: ALL)
def random_sets(batch: Sampled, unconstrained: Unconstrained, *, seed: int = 0) -> RoutingTrace:
    """Placebo: uniformly random distinct experts.

    Where the unconstrained route is known. Drawn from `seed` and the batch's tokens, so that a resumed run draws the
    same."""
    routes = unconstrained.routes
    generator = _generator(seed, batch)
    experts = torch.full_like(routes.experts, routes.layout.unknown, device="cpu")
    for s, moe_layer in enumerate(routes.layout.moe_layers):
        order = torch.rand(*routes.shape[:2], moe_layer.num_experts, generator=generator).argsort(-1)
        experts[:, :, s, : moe_layer.top_k] = order[..., : moe_layer.top_k].to(experts.dtype)
    return replace(routes, experts=experts.to(routes.experts.device)).only(routes.known)


@needs("policy")
@checked(lambda run, sigma, **_: ALL if sigma else BASE)
def under_noise(
    batch: Sampled, unconstrained: Unconstrained, score: Callable[..., Unconstrained], *, sigma: Finite, seed: int = 0
) -> RoutingTrace:
    """Placebo: the routing of π_old with its routers moved by `sigma` standard deviations.

    Along a random direction, one per step (`router_noise.Noise`): as constant as `old_policy`'s routing, but wrong.
    `score` is the policy's method. Drawn from `seed` and the batch's tokens. A sigma of 0 is `old_policy`.
    """
    return score(batch, noise=Noise("weights", sigma, _seed(seed, batch))).routes if sigma else unconstrained.routes


@checked(lambda run, share, **_: _replayed(share))
def random_share(batch: Sampled, unconstrained: Unconstrained, *, share: Share, seed: int = 0) -> RoutingTrace | None:
    """Replay for a random `share` of (token, layer) pairs.

    A share of 1 is `old_policy`; one of 0 is `live`, and so is a draw that hits no pair.
    """
    routes = unconstrained.routes
    if share == 1:
        return routes
    noise = torch.rand(routes.shape[:3], generator=_generator(seed, batch)) < share
    return _where(routes, noise)


def _check_by_layer(run: Any, *, base: Any = None, **options: Any) -> str | int | None:
    """Raises ConfigError unless exactly one option is given."""
    options = {name: value for name, value in options.items() if value is not None}
    if len(options) != 1:
        raise ConfigError(f"by_layer takes exactly one of first, last, share and moe_layers, not {options or 'none'}")
    ((name, value),) = options.items()
    return _replayed(value) if name == "share" else len({*value}) if name == "moe_layers" else value


@checked(_check_by_layer)
def by_layer(
    batch: Sampled,
    unconstrained: Unconstrained,
    *,
    first: NonNegativeInt | None = None,
    last: NonNegativeInt | None = None,
    share: Share | None = None,
    moe_layers: Sequence[NonNegativeInt] | None = None,
    base: Base = "old_policy",
) -> RoutingTrace | None:
    """Replay in some MoE layers: the `first` or `last` n, an even `share`, or those numbered in `moe_layers`.

    `moe_layers` counts from 0 in forward order; a `share` is spread evenly over the depth; the others route freely.
    All MoE layers are `base`, none is `live`. Raises ConfigError unless exactly one of the four is given, and in range.
    """
    count = len(unconstrained.routes.layout.moe_layers)
    options = {"first": first, "last": last, "share": share, "moe_layers": moe_layers}
    _check_by_layer(None, **options)
    if share is not None:
        done = [
            int(round(s * share, 9)) for s in range(count + 1)
        ]  # 100 · 0.29 is 28.999…: rounding takes no MoE layer
        moe_layers = [s for s in range(count) if done[s + 1] > done[s]]
    elif moe_layers is None:
        moe_layers = range(count)[:first] if last is None else range(count)[max(0, count - last) :]
    if any(s >= count for s in moe_layers):
        raise ConfigError(f"by_layer(moe_layers={moe_layers}): the model has {count} MoE layers, numbered from 0")
    routes = BASES[base](batch, unconstrained)
    chosen = torch.zeros(count, dtype=torch.bool, device=routes.experts.device)
    chosen[list(moe_layers)] = True
    return _where(routes, chosen.expand_as(routes.known))


@needs("scores")
@checked(lambda run, below, **_: NOTHING if not below else BASE if below == torch.inf else None)
def by_margin(
    batch: Sampled, unconstrained: Unconstrained, *, below: NotNegative, base: Base = "old_policy"
) -> RoutingTrace | None:
    """Replay where the margin of π_old's router, k-th minus (k+1)-th score, is less than `below`.

    below=inf is `base`, 0 is `live`.
    """
    assert unconstrained.scores is not None
    routes = BASES[base](batch, unconstrained)
    return routes if below == torch.inf else _where(routes, unconstrained.scores.margins < below)


@checked(lambda run, ratio, **_: NOTHING if ratio >= 1 else ALL if ratio else BASE)
def soft(batch: Sampled, unconstrained: Unconstrained, *, ratio: Finite, base: Base = "old_policy") -> RoutingTrace:
    """Replay of an expert while its current score is at least `ratio` times the weakest top-k score.

    In every forward; the slots of other experts are filled with the best of the live top-k that are not there yet.
    Soft replay, "extend router replay", prime-rl's pull request 2703. Scores are the router's choice scores, correction
    bias and closed groups included, less the least bias; for a router that chooses by logits, their softmax. Both sides
    of the ratio are scored under the rule. A ratio of 0 is `base`, bit for bit; from 1 on the sets are `live`'s.
    Raises RoutingError in the forward for a bias below 0 at every expert.
    """
    routes = BASES[base](batch, unconstrained)
    return replace(routes, keep=ratio) if ratio else routes


def _check_recall(run: Any, *, base: str = "old_policy") -> str:
    if base != "old_policy" and Component.of(run.engine).name in ("hf", "perturbed", "vllm"):
        raise ConfigError(
            f"recall(base={base!r}): engine={run.engine} reports no combine weights. Use base=old_policy."
        )
    return ALL


@needs("scores")
@checked(_check_recall)
def recall(batch: Sampled, unconstrained: Unconstrained, *, base: Base = "old_policy") -> RoutingTrace:
    """Replay of ids and combine weights of π_old, or with `base="rollout"` of the engine.

    No gradient of the policy's loss then reaches a router.
    "Total Router Recall", prime-rl's pull request 3523; weights are float32, as the family computes them. At π_old's
    weights it is `old_policy`, value for value. Raises RoutingError for an engine that reports no combine weights and,
    at the first forward, for routers that do not return (logits, combine weights, ids).
    """
    if base != "old_policy":
        routes = BASES[base](batch, unconstrained)
        if routes.gates is None:
            raise RoutingError("recall(base=rollout): the rollouts have no gate weights. To replay ids, use 'rollout'.")
        return routes
    assert unconstrained.scores is not None
    return replace(unconstrained.routes, gates=unconstrained.scores.gates)


def _where(routes: RoutingTrace, chosen: Bool[Tensor, "batch time moe_layer"]) -> RoutingTrace | None:
    """Known routes at the chosen pairs; None where there are none."""
    where = routes.known & chosen.to(routes.experts.device)
    return routes.only(where) if bool(where.any()) else None


def _replayed(share: float) -> str | None:
    """The check of a source that replays this share."""
    return NOTHING if not share else BASE if share == 1 else None


def _generator(seed: int, batch: Sampled) -> torch.Generator:
    """Of the batch's own tokens, so that a resumed run draws the same."""
    return torch.Generator().manual_seed(_seed(seed, batch))


def _seed(seed: int, batch: Sampled) -> int:
    return hash((seed, int(batch.tokens.sum()), batch.tokens.shape)) % 2**63


BASES: dict[str, Callable[[Sampled, Unconstrained], RoutingTrace]] = {"old_policy": old_policy, "rollout": rollout}
SOURCES: dict[str, Callable[..., RoutingTrace | None]] = {
    "live": live,
    "old_policy": old_policy,
    "rollout": rollout,
    "shuffled": shuffled,
    "random_sets": random_sets,
    "under_noise": under_noise,
    "random_share": random_share,
    "by_layer": by_layer,
    "by_margin": by_margin,
    "soft": soft,
    "recall": recall,
}
