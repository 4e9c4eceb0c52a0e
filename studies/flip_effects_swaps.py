"""Single swaps of experts under replay: how `flip_effects` makes them, and what each moved and did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.policies.hf import HFPolicy
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.sites import find_sites
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Scored

PROBES = 6
"""Batches of responses on which swaps are made and log-ratios measured."""
NEAR, DRAWN = 0.2, {"near": 1800, "far": 600, "random": 300}
"""Weakest chosen → runner-up where margins are the smallest NEAR of a site's, and where they are not; a random chosen
→ a random other expert. Swaps per run, spread evenly over sites and probes."""
CHUNK = 128
"""Swaps in one forward."""


# ---------------------------------------------------------------------- one batch at θ
@dataclass(frozen=True)
class View:
    """A batch as the policy sees it: log-probs, routes and router scores, and what goes in and out of every block."""

    batch: Batch
    scored: Scored
    inputs: Tensor
    """What the experts of a site read, [batch, time, site, hidden], as the next two."""
    outputs: Tensor
    """What the block of a site adds to the residual stream."""
    stream: Tensor
    """The residual stream after that."""

    @staticmethod
    def of(policy: HFPolicy, batch: Batch) -> View:
        if len(batch) > policy.score_batch:
            raise ConfigError(f"{len(batch)} responses per step are more than one forward's {policy.score_batch}, "
                              "whose hidden states are kept: lower prompts_per_step or group_size.")
        with tapped(policy.model) as seen:
            scored = policy.score(batch, scores=True)
        return View(batch, scored, *(torch.stack(seen[name], 2) for name in ("inputs", "outputs", "stream")))

    @property
    def scores(self) -> RouterScores:
        assert self.scored.scores is not None, "they were asked for"
        return self.scored.scores

    @property
    def pairs(self) -> Tensor:
        """(row, time) of every token whose output is a real token: the routes that a response can depend on."""
        return self.batch.attention_mask[:, 1:].nonzero()

    def boundary(self, site: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of every pair at a site: the weakest chosen expert, the best of the others, their difference in logits."""
        row, time = self.pairs.T
        log_p = self.scores.all_log_probs[site][row, time]
        chosen = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, self.scored.routes.ids()[row, time, site], True)
        weakest = log_p.masked_fill(~chosen, torch.inf).min(1)
        runner_up = log_p.masked_fill(chosen, -torch.inf).max(1)
        return weakest.indices, runner_up.indices, weakest.values - runner_up.values

    def noise(self, policy: HFPolicy) -> dict[str, float]:
        """Largest change of a log-prob where nothing is swapped: the same rows under their own routes, and in the
        other rows and forwards in which swaps are made."""
        again = policy.score(self.batch, self.scored.routes).logprobs - self.scored.logprobs
        flips = Flips(torch.arange(len(self.batch)).flip(0), *torch.zeros(2, len(self.batch), dtype=torch.long), None)
        moved = swapped(policy, self.batch, self.scored, flips)[0]
        return {"noise_self_replay": float(again.abs().max()), "noise_other_rows": float(moved.abs().max())}


@contextmanager
def tapped(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What the block of every site reads and adds, and the residual stream after it, of the forward inside."""
    seen: dict[str, list[Tensor]] = {"inputs": [], "outputs": [], "stream": []}

    def block_ran(module: nn.Module, args: tuple, output: Tensor) -> None:
        seen["inputs"].append(args[0])
        seen["outputs"].append(output)

    handles = []
    for block, layer in blocks(model):
        handles += [block.register_forward_hook(block_ran),
                    layer.register_forward_hook(lambda module, args, output: seen["stream"].append(output))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def blocks(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The block around every router (`…layers.3.mlp.gate` → `…layers.3.mlp`), and its layer."""
    names = [spec.site.name.rsplit(".", 2) for spec in find_sites(model)]
    return [(model.get_submodule(f"{layer}.{block}"), model.get_submodule(layer)) for layer, block, _ in names]


# ---------------------------------------------------------------------- swaps
@dataclass(frozen=True)
class Flips:
    """(row, time, site), and the ids that replace the ones there; None: none does."""

    row: Tensor
    time: Tensor
    site: Tensor
    ids: Tensor | None

    def rows(self, index: slice) -> Flips:
        return Flips(self.row[index], self.time[index], self.site[index], None if self.ids is None else self.ids[index])


def swapped(policy: HFPolicy, batch: Batch, base: Scored, flips: Flips) -> tuple[Tensor, Tensor]:
    """Each flip in a row of its own, all else under the routes of `base`: changes of log-probs, [flip, time], and what
    its block then adds to the stream at its token, [flip, hidden]."""
    deltas, outputs = [], []
    for start in range(0, len(flips.row), CHUNK):
        here = flips.rows(slice(start, start + CHUNK))
        each, part = torch.arange(len(here.row)), batch.rows(here.row)
        time = part.tokens.shape[1]
        routes = changed(base.routes.rows(here.row, time), here)
        with tapped(policy.model) as seen:
            scored = policy.score(part, routes)
        delta = scored.logprobs - base.logprobs[here.row, :time]
        deltas.append(nn.functional.pad(delta, (0, batch.tokens.shape[1] - time)))
        outputs.append(torch.stack(seen["outputs"], 2)[each, here.time, here.site])
    return torch.cat(deltas).double(), torch.cat(outputs)


def changed(routes: RoutingTrace, flips: Flips) -> RoutingTrace:
    """A row of routes per flip, with the flip."""
    if flips.ids is None:
        return routes
    experts = routes.experts.clone()
    experts[torch.arange(len(experts)), flips.time, flips.site] = flips.ids.to(experts.dtype)
    return replace(routes, experts=experts)


def made(policy: HFPolicy, view: View, generator: torch.Generator) -> pd.DataFrame:
    """Swaps drawn from every site of a batch, and what each did, a row per swap. `weight`: how many (token, site) pairs
    of the batch one swap of its kind stands for."""
    layout, flips, labels = view.scored.routes.layout, [], []
    for site in range(len(layout.sites)):
        weakest, runner_up, margin = view.boundary(site)
        order = margin.argsort()
        cut = max(1, round(NEAR * len(order)))
        for kind, pool in {"near": order[:cut], "far": order[cut:], "random": order}.items():
            count = min(len(pool), round(DRAWN[kind] / len(layout.sites) / PROBES))
            pick = pool[torch.randperm(len(pool), generator=generator)[:count]]
            row, time = view.pairs[pick].T
            ids, old, new = view.scored.routes.ids()[row, time, site], weakest[pick], runner_up[pick]
            if kind == "random":
                old, new = at_random(ids, layout.sites[site].num_experts, generator)
            ids = torch.where(ids == old[:, None], new[:, None], ids)
            flips.append((row, time, torch.full_like(row, site), ids, old, new, margin[pick]))
            labels += [(kind, len(pool) / max(count, 1))] * count
    row, time, site, ids, old, new, margin = (torch.cat(parts) for parts in zip(*flips, strict=True))
    table = described(policy, view, Flips(row, time, site, ids), old, new)
    kinds, weights = zip(*labels, strict=True)
    return table.assign(kind=kinds, margin=margin.numpy(), weight=weights)


def at_random(ids: Tensor, experts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One of every row's experts, and one of the others."""
    slot = torch.randint(ids.shape[1], (len(ids), 1), generator=generator)
    others = torch.rand(len(ids), experts, generator=generator).scatter(1, ids, -1.0)
    return ids.gather(1, slot)[:, 0], others.argmax(1)


def described(policy: HFPolicy, view: View, flips: Flips, old: Tensor, new: Tensor) -> pd.DataFrame:
    """What each swap of `old` for `new` moved, and what that did."""
    at = (flips.row, flips.time, flips.site)
    delta, output = swapped(policy, view.batch, view.scored, flips)
    ids = view.scored.routes.ids()[at]
    gate = view.scores.gates[at][ids == old[:, None]]
    block, stream = view.outputs[at], view.stream[at].norm(dim=1)
    distance = apart(policy.model, view.inputs[at], flips.site, old, new) / stream
    return pd.DataFrame({
        "site": flips.site, "time": flips.time, "gate": gate, "distance": distance, "x": gate * distance,
        "moved": (output - block).norm(dim=1) / stream, "jump": (output - block).norm(dim=1) / block.norm(dim=1),
        "block": block.norm(dim=1) / stream, **effect(view, flips, delta),
    })  # fmt: skip


def effect(view: View, flips: Flips, delta: Tensor) -> dict[str, Tensor]:
    """δ of the token that the swapped position produces, whether it is the policy's own, and Σ δ² over the response."""
    own = flips.row, flips.time + 1
    return {"own": delta[torch.arange(len(delta)), flips.time + 1], "total2": (delta**2).sum(1),
            "in_response": view.batch.response_mask[own].double(), "logprob": view.scored.logprobs[own]}


@torch.no_grad()
def apart(model: nn.Module, inputs: Tensor, site: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """‖E_new(h) − E_old(h)‖, from the family's own experts, one expert with a weight of 1 at a time."""
    result = torch.zeros(len(inputs))
    for number, (block, _) in enumerate(blocks(model)):
        here = site == number
        one = torch.ones(int(here.sum()), 1)
        if len(one):
            first, second = (block.experts(inputs[here], e[here, None], one) for e in (old, new))
            result[here] = (second - first).norm(dim=1)
    return result
