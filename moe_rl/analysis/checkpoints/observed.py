"""What the routers of one checkpoint did on one batch of texts, and its file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from moe_rl.analysis.checkpoints.texts import TextBatch
from moe_rl.errors import RoutingError
from moe_rl.routing.hooks import record_routing, replay_routing
from moe_rl.routing.trace import Layout, RoutingTrace

PerSlot = Float[Tensor, "batch time site k"]
PerToken = Float[Tensor, "batch time"]
Ids = Int64[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]
LOGITS = 2**24
"""Logits that are normalised at once."""


@dataclass(frozen=True)
class Observed:
    """Natural routes of a batch and how sure the routers were. The scores are None for a family that hands out none."""

    routes: RoutingTrace
    gates: PerSlot | None = None
    """Combine weights of the used experts."""
    log_probs: PerSlot | None = None
    """Of the experts of a reference (by default the used ones themselves), from the router's full softmax."""
    margins: Float[Tensor, "batch time site"] | None = None
    """k-th minus (k+1)-th choice score, in the router's own units."""
    logprobs: PerToken | None = None
    """log π of the response tokens, in nats at temperature 1; 0 elsewhere. None unless they were asked for."""
    replayed_logprobs: PerToken | None = None
    """The same with the routes of the reference forced."""

    def save(self, path: Path, batch: TextBatch) -> None:
        """Write a trace file that carries the scores and the response beside the routes; whole or not at all."""
        beside = {"response": batch.response_mask}
        if self.gates is not None and self.log_probs is not None and self.margins is not None:
            beside |= {"gates": self.gates.half(), "log_probs": self.log_probs, "margins": self.margins}
        if self.logprobs is not None:
            beside["logprobs"] = self.logprobs
        aside = path.with_name(f".tmp-{path.name}")
        self.routes.save(aside, beside)
        os.replace(aside, path)

    @staticmethod
    def load(path: Path) -> Observed:
        """Read what `save` wrote."""
        beside = RoutingTrace.load_beside(path)
        gates = beside.get("gates")
        return Observed(
            RoutingTrace.load(path), None if gates is None else gates.float(), beside.get("log_probs"),
            beside.get("margins"), beside.get("logprobs"),
        )


class Observer:
    """One loaded checkpoint, seen through its routers; with `ratios`, through what it says of the responses, too."""

    def __init__(self, model: nn.Module, ratios: bool = False):
        self.model, self.ratios = model, ratios
        self.device = next(model.parameters()).device
        self.decoder = getattr(model, "base_model", model)  # without the head: nobody reads logits
        self.scored = self._hands_out_scores()

    def observe(self, batch: TextBatch, reference: RoutingTrace | None = None) -> Observed:
        """One forward. `reference` names the experts whose log-probabilities are wanted: those used before. With
        `ratios` a second one replays them."""
        asked = batch.tokens, batch.attention_mask, batch.response_mask
        layout, found = self._forward(asked[0], asked[1], reference, asked[2])
        if self.ratios and reference is not None:
            with replay_routing(self.model, reference.to(self.device)):
                found["replayed_logprobs"] = self._read(*(x.to(self.device) for x in asked)).cpu()
        return _observed(batch, layout, found)

    def observe_again(self, batch: TextBatch, reference: RoutingTrace) -> Observed:
        """The same in other company: rows in reverse, in two forwards of unequal size, with three padded columns."""
        order = torch.arange(len(batch.lines) - 1, -1, -1)
        time = batch.tokens.shape[1]
        found: dict[str, Tensor] = {}
        for index in order.tensor_split([-(-len(order) // 3)]):
            if not len(index):
                continue
            tokens, mask, response = (nn.functional.pad(x[index], (0, 3)) for x in (
                batch.tokens, batch.attention_mask, batch.response_mask))
            layout, part = self._forward(tokens, mask, reference.rows(index).to(tokens.device), response)
            for name, x in part.items():
                whole = found.setdefault(name, x.new_empty((len(order), time, *x.shape[2:])))
                whole[index] = x[:, :time]
        return _observed(batch, layout, found)

    @torch.no_grad()
    def _forward(
        self, tokens: Ids, mask: Mask, reference: RoutingTrace | None, response: Mask | None = None
    ) -> tuple[Layout, dict[str, Tensor]]:
        """Experts, gates, log-probabilities and margins of one forward, on the CPU; log π of the `response`."""
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        said = {}
        with record_routing(self.model, scores=self.scored) as recording:
            if self.ratios and response is not None:
                said["logprobs"] = self._read(tokens, mask, response.to(self.device))
            else:
                self.decoder(input_ids=tokens, attention_mask=mask, use_cache=False)
        routes = recording.trace(tokens, mask)
        found = {"experts": routes.experts} | said
        if self.scored:
            scores = recording.scores(len(tokens))
            log_probs = scores.log_probs
            if reference is not None:
                ids = reference.ids().to(self.device)
                ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, tokens.shape[1] - ids.shape[1]), value=-1)
                log_probs = scores.log_probs_at(ids)
            found |= {"gates": scores.gates.half().float(), "log_probs": log_probs, "margins": scores.margins}
        return routes.layout, {name: x.cpu() for name, x in found.items()}

    @torch.no_grad()
    def _read(self, tokens: Ids, mask: Mask, response: Mask) -> PerToken:
        """log π of the response tokens by one forward, head included; 0 elsewhere."""
        first = int(response.any(0).long().argmax()) or 1  # the first token of all is nobody's
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False,
                            logits_to_keep=tokens.shape[1] - first + 1).logits[:, :-1][response[:, first:]]
        size = max(1, LOGITS // logits.shape[-1])
        pieces = zip(logits.split(size), tokens[response].split(size), strict=True)
        found = [x.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0] for x, chosen in pieces]
        return torch.zeros(tokens.shape, device=self.device).masked_scatter(response, torch.cat(found))

    def _hands_out_scores(self) -> bool:
        tokens = torch.zeros(1, 2, dtype=torch.long)
        self.scored = True
        try:
            self._forward(tokens, torch.ones_like(tokens).bool(), None)
        except RoutingError:
            self.scored = False
            self._forward(tokens, torch.ones_like(tokens).bool(), None)  # raises when not the scores were at fault
        return self.scored


def _observed(batch: TextBatch, layout: Layout, found: dict[str, Tensor]) -> Observed:
    experts, tokens, mask = found.pop("experts"), batch.tokens, batch.attention_mask
    routes = RoutingTrace.from_ids(experts, layout, tokens=tokens, attention_mask=mask, check=False)
    return Observed(routes, **found)
