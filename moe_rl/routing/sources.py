"""Which routes an update replays: a function from a batch and its natural scoring to a trace, or None for live routing.

`Arm.routes` names one of these, or a user's own `pkg.module:function` of the same signature; options are keyword-only.
Placebos force routes that carry no information about the tokens they are forced on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.registry import checked, needs
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.trace import RoutingTrace


@runtime_checkable
class Sampled(Protocol):
    """What a source may read of a mini-batch; `types.Batch` has it."""

    @property
    def tokens(self) -> Integer[Tensor, "batch time"]: ...
    @property
    def prompt_index(self) -> Int[Tensor, " batch"]:
        """Rows of one prompt have equal numbers."""
    @property
    def rollout_routes(self) -> RoutingTrace | None:
        """Those that the engine reported."""


@runtime_checkable
class Natural(Protocol):
    """What a source may read of a forward of π_old without replay; `types.Scored` has it."""

    @property
    def routes(self) -> RoutingTrace: ...
    @property
    def scores(self) -> RouterScores | None:
        """For a source that is marked as needing scores."""


def live(batch: Sampled, natural: Natural) -> None:
    """No replay: unconstrained routing."""
    return None


def old_policy(batch: Sampled, natural: Natural) -> RoutingTrace:
    """Routing Replay (R2): the routing of π_old in the trainer. GSPO, arXiv 2507.18071, section 5.3."""
    return natural.routes


def rollout(batch: Sampled, natural: Natural) -> RoutingTrace:
    """Rollout Routing Replay (R3): the routing of the inference engine. arXiv 2510.11370."""
    if batch.rollout_routes is None:
        raise RoutingError(
            "routes='rollout' replays the engine's routing, but the rollouts have none. Use an engine that reports "
            "routing, or routes='old_policy'."
        )
    return batch.rollout_routes


def shuffled(batch: Sampled, natural: Natural) -> RoutingTrace:
    """Placebo: the routing of a response to another prompt, position by position.

    Later positions of the same prompt would leak the sampled token. A position that the other response does not have
    routes freely. Raises RoutingError for a batch of one prompt.
    """
    groups = batch.prompt_index.unique()
    if len(groups) < 2:
        raise RoutingError("routes='shuffled' takes routing from another prompt, but the batch has only one. Use two "
                           "prompts or more per batch.")
    rows = [(batch.prompt_index == g).nonzero()[:, 0] for g in groups]
    donor = torch.empty_like(batch.prompt_index)
    for mine, theirs in zip(rows, rows[1:] + rows[:1], strict=True):
        donor[mine] = theirs[torch.arange(len(mine)) % len(theirs)]
    routes = natural.routes
    experts = routes.experts[donor.to(routes.experts.device)]
    return replace(routes, experts=experts).only(routes.attention_mask[..., None])


def random_sets(batch: Sampled, natural: Natural, *, seed: int = 0) -> RoutingTrace:
    """Placebo: uniformly random distinct experts.

    Where the natural route is known. Drawn from `seed` and the batch's tokens, so that a resumed run draws the same.
    """
    routes = natural.routes
    generator = _generator(seed, batch)
    experts = torch.full_like(routes.experts, routes.layout.unknown, device="cpu")
    for s, site in enumerate(routes.layout.sites):
        order = torch.rand(*routes.shape[:2], site.num_experts, generator=generator).argsort(-1)
        experts[:, :, s, : site.top_k] = order[..., : site.top_k].to(experts.dtype)
    return replace(routes, experts=experts.to(routes.experts.device)).only(routes.known)


@needs("policy")
def under_noise(
    batch: Sampled, natural: Natural, score: Callable[..., Natural], *, sigma: float, seed: int = 0
) -> RoutingTrace:
    """Placebo: the routing of π_old with its routers moved by `sigma` standard deviations.

    Along a random direction, one per step (`router_noise.Noise`): as constant as `old_policy`'s routing, but wrong.
    `score` is the policy's verb. Drawn from `seed` and the batch's own tokens, so that it is independent of the router
    noise. A sigma of 0 is `old_policy`. Raises ConfigError for one that is negative or infinite.
    """
    if not 0 <= sigma < torch.inf:
        raise ConfigError(f"under_noise(sigma={sigma:g}): the noise scale must be at least 0")
    return score(batch, noise=Noise("weights", sigma, _seed(seed, batch))).routes if sigma else natural.routes


@checked(lambda run, share, **_: _require_dose("random_share", share))
def random_share(batch: Sampled, natural: Natural, *, share: float, seed: int = 0) -> RoutingTrace | None:
    """Replay for a random `share` of (token, layer) pairs.

    A share of 1 is `old_policy`; one of 0 is `live`, and so is a draw that hits no pair. Raises ConfigError for a share
    outside [0, 1].
    """
    _require_share("random_share", share)
    routes = natural.routes
    if share == 1:
        return routes
    noise = torch.rand(routes.shape[:3], generator=_generator(seed, batch)) < share
    return _where(routes, noise)


@checked(lambda run, share=None, **_: None if share is None else _require_dose("by_layer", share))
def by_layer(
    batch: Sampled,
    natural: Natural,
    *,
    first: int | None = None,
    last: int | None = None,
    share: float | None = None,
    sites: Sequence[int] | None = None,
    base: str = "old_policy",
) -> RoutingTrace | None:
    """Replay in some MoE layers: the `first` or `last` n, an even `share`, or those numbered in `sites`.

    `sites` counts from 0 in forward order; a `share` is spread evenly over the depth; the others route freely.
    All sites are `base`, none is `live`. Raises ConfigError unless exactly one of the four is given, and in range.
    """
    count = len(natural.routes.layout.sites)
    options = {"first": first, "last": last, "share": share, "sites": sites}
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(f"by_layer takes exactly one of first, last, share and sites, not {given or 'none'}")
    if share is not None:
        _require_share("by_layer", share)
        done = [int(round(s * share, 9)) for s in range(count + 1)]  # 100 · 0.29 is 28.999…: rounding takes no site
        sites = [s for s in range(count) if done[s + 1] > done[s]]
    elif sites is None:
        sites = range(count)[:first] if last is None else range(count)[max(0, count - last) :]
    if any(not 0 <= s < count for s in sites) or min(first or 0, last or 0) < 0:
        raise ConfigError(f"by_layer({given}): the model has {count} MoE layers, numbered from 0")
    routes = _base("by_layer", base, batch, natural)
    chosen = torch.zeros(count, dtype=torch.bool, device=routes.experts.device)
    chosen[list(sites)] = True
    return _where(routes, chosen.expand_as(routes.known))


@needs("scores")
def by_margin(batch: Sampled, natural: Natural, *, below: float, base: str = "old_policy") -> RoutingTrace | None:
    """Replay where the margin of π_old's router, k-th minus (k+1)-th score, is less than `below`.

    below=inf is `base`, 0 is `live`. Raises ConfigError for a bound that is negative.
    """
    if not below >= 0:
        raise ConfigError(f"by_margin(below={below:g}) selects nothing: margins of scores are at least 0")
    assert natural.scores is not None, "what is marked as needing scores is given them"
    routes = _base("by_margin", base, batch, natural)
    return routes if below == torch.inf else _where(routes, natural.scores.margins < below)


@needs("scores")
def by_probability(batch: Sampled, natural: Natural, *, below: float, base: str = "old_policy") -> RoutingTrace | None:
    """Replay where the k used experts of π_old have together less than `below` of the probability.

    The probability is the softmax of the router's logits over all experts.

    A bound above 1 is `base`, 0 is `live`. Raises ConfigError for a bound that is negative.
    """
    if not below >= 0:
        raise ConfigError(f"by_probability(below={below:g}) selects nothing: probabilities are at least 0")
    assert natural.scores is not None, "what is marked as needing scores is given them"
    routes = _base("by_probability", base, batch, natural)
    mass = natural.scores.log_probs.exp().where(natural.scores.ids >= 0, 0).sum(-1)
    return routes if below > 1 else _where(routes, mass < below)


def soft(batch: Sampled, natural: Natural, *, ratio: float, base: str = "old_policy") -> RoutingTrace:
    """Replay of an expert while its current score is at least `ratio` times the weakest top-k score.

    In every forward; the slots of other experts are filled with the best of the live top-k that are not there yet.
    Soft replay, "extend router replay", prime-rl's pull request 2703. Scores are those the router chooses by,
    correction bias and closed groups included; where it chooses by logits, which may be negative, their softmax. Both
    sides of the ratio are scored under the rule, and activation checkpointing recomputes with the ids of its forward.
    A ratio of 0 is `base`, bit for bit; from 1 on (at positive scores) the sets are `live`'s, in another order. Raises
    ConfigError for a ratio that is negative or infinite.
    """
    if not 0 <= ratio < torch.inf:
        raise ConfigError(f"soft(ratio={ratio:g}): the ratio must be from 0 (replay all) to 1 (replay none)")
    routes = _base("soft", base, batch, natural)
    return replace(routes, keep=ratio) if ratio else routes


@needs("scores")
def recall(batch: Sampled, natural: Natural, *, base: str = "old_policy") -> RoutingTrace:
    """Replay of ids and combine weights of π_old, or with `base="rollout"` of the engine.

    No gradient of the policy's loss then reaches a router.
    "Total Router Recall", prime-rl's pull request 3523; weights are float32, as the family computes them. At π_old's
    weights it is `old_policy`, value for value. Raises RoutingError for an engine that reports no combine weights and,
    at the first forward, for families whose routers hand out something else than (logits, combine weights, ids).
    """
    if base != "old_policy":
        routes = _base("recall", base, batch, natural)
        if routes.gates is None:
            raise RoutingError('routes=\'recall(base="rollout")\' needs the gate weights of the engine, but its '
                               'rollouts have none. To replay ids only, use routes=\'rollout\'.')
        return routes
    assert natural.scores is not None, "what is marked as needing scores is given them"
    return replace(natural.routes, gates=natural.scores.gates)


@needs("scores")
@checked(lambda run, share, **_: _require_dose("false_flips", share))
def false_flips(batch: Sampled, natural: Natural, *, share: float) -> RoutingTrace:
    """Placebo: π_old's routing, with the weakest expert replaced by the next one at the `share` of smallest margins.

    The runner-up is the most probable expert that is not used, so families that choose by other scores (groups,
    correction biases) get a near one. A share of 0 is `old_policy`. Raises RoutingError for sites of different numbers
    of experts, ConfigError for a share outside [0, 1].
    """
    _require_share("false_flips", share)
    if share == 0:
        return natural.routes
    routes, scores = natural.routes, natural.scores
    assert scores is not None, "what is marked as needing scores is given them"
    if len({site.num_experts for site in routes.layout.sites}) > 1:
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


def _base(source: str, base: str, batch: Sampled, natural: Natural) -> RoutingTrace:
    """The whole routes that a source takes a part of."""
    if base not in BASES:
        raise ConfigError(f"{source}(base={base!r}): choose {' or '.join(BASES)}.")
    return BASES[base](batch, natural)


def _where(routes: RoutingTrace, chosen: Bool[Tensor, "batch time site"]) -> RoutingTrace | None:
    """Known routes at the chosen pairs; None where that is none of them."""
    where = routes.known & chosen.to(routes.experts.device)
    return routes.only(where) if bool(where.any()) else None


def _require_share(source: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(f"{source}: the share of (token, layer) pairs must be from 0 to 1, not {share}")


def _require_dose(source: str, share: float) -> None:
    """Raise ConfigError for a share that a run cannot have; warn of one with which it replays nothing."""
    _require_share(source, share)
    if not share:
        warnings.warn(f"{source}(share=0) replays nothing. Use routes=live for a run without replay.", stacklevel=2)


def _generator(seed: int, batch: Sampled) -> torch.Generator:
    """Of the batch's own tokens, so that a resumed run draws the same."""
    return torch.Generator().manual_seed(_seed(seed, batch))


def _seed(seed: int, batch: Sampled) -> int:
    return hash((seed, int(batch.tokens.sum()), batch.tokens.shape)) % 2**63


BASES: dict[str, Callable[[Sampled, Natural], RoutingTrace]] = {"old_policy": old_policy, "rollout": rollout}
"""Whole routes, of which other sources take a part."""
SOURCES: dict[str, Callable[..., RoutingTrace | None]] = {
    source.__name__: source
    for source in (live, old_policy, rollout, shuffled, random_sets, under_noise, random_share, by_layer, by_margin,
                   by_probability, soft, recall, false_flips)
}
