"""The routes that an update replays: functions from a batch and its unconstrained scoring to a trace, or to None for
live routing. `Arm.routes` names one of these, or a user's own `pkg.module:function`; options are keyword-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int, Integer
from pydantic import Field, NonNegativeInt
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.registry import NotNegative, Share, checked, needs
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


@checked(lambda run: ALL)
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


@checked(
    lambda run, first=None, last=None, share=None, moe_layers=(), **_: (
        len(set(moe_layers)) or first or last or 0 if share is None else _replayed(share)
    )
)
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
    selected = {name: value for name, value in options.items() if value is not None}
    if len(selected) != 1:
        raise ConfigError(f"by_layer takes exactly one of first, last, share and MoE layers, not {selected or 'none'}")
    if share is not None:
        done = [
            int(round(s * share, 9)) for s in range(count + 1)
        ]  # 100 · 0.29 is 28.999…: rounding takes no MoE layer
        moe_layers = [s for s in range(count) if done[s + 1] > done[s]]
    elif moe_layers is None:
        moe_layers = range(count)[:first] if last is None else range(count)[max(0, count - last) :]
    if any(s >= count for s in moe_layers):
        raise ConfigError(f"by_layer({selected}): the model has {count} MoE layers, numbered from 0")
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


@needs("scores")
@checked(lambda run, below, **_: NOTHING if not below else BASE if below > 1 else None)
def by_probability(
    batch: Sampled, unconstrained: Unconstrained, *, below: NotNegative, base: Base = "old_policy"
) -> RoutingTrace | None:
    """Replay where the k used experts of π_old have together less than `below` of the probability.

    Probabilities are the softmax of the router's logits. A bound above 1 is `base`, 0 is `live`.
    """
    assert unconstrained.scores is not None
    routes = BASES[base](batch, unconstrained)
    mass = unconstrained.scores.log_probs.exp().where(unconstrained.scores.ids >= 0, 0).sum(-1)
    return routes if below > 1 else _where(routes, mass < below)


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


@needs("scores")
@checked(lambda run, **_: ALL)
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


@needs("scores")
@checked(lambda run, share: ALL if _replayed(share) != NOTHING else BASE)
def false_flips(batch: Sampled, unconstrained: Unconstrained, *, share: Share) -> RoutingTrace:
    """Placebo: π_old's routing, with the weakest expert replaced by the next one at the `share` of smallest margins.

    The next one is the most probable expert that is not used. A share of 0 is `old_policy`. Raises RoutingError for
    MoE layers of different numbers of experts.
    """
    if share == 0:
        return unconstrained.routes
    routes, scores = unconstrained.routes, unconstrained.scores
    assert scores is not None
    if len({moe_layer.num_experts for moe_layer in routes.layout.moe_layers}) > 1:
        raise RoutingError("false_flips needs the same number of experts in every MoE layer")
    ids, log_probs = routes.ids(), torch.stack(scores.all_log_probs, 2)
    used = ids.clamp(min=0)
    runner_up = log_probs.scatter(-1, used, -torch.inf).argmax(-1)
    weakest = log_probs.gather(-1, used).argmin(-1, keepdim=True)
    margins = scores.margins.masked_fill(~routes.known, torch.inf)
    count = int(share * routes.known.sum())
    flipped = torch.zeros_like(routes.known).flatten()
    flipped[margins.flatten().argsort(stable=True)[:count]] = True
    swapped = ids.scatter(-1, weakest, runner_up[..., None]).where(flipped.view_as(routes.known)[..., None], ids)
    return replace(routes, experts=swapped.to(routes.experts.dtype)).only(routes.known)


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
    "by_probability": by_probability,
    "soft": soft,
    "recall": recall,
    "false_flips": false_flips,
}
