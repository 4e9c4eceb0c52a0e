"""A checkpoint's routing of some texts, traced once, batch by batch, into files that are compared without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_rl.analysis.checkpoints.texts import TextBatch, Texts
from moe_rl.routing import Observation, RoutingTrace, observe

NOISE_EVERY = 8
"""Every how many batches one is traced again for the noise floor."""
ITSELF, AGAIN = "itself", "again_"
"""The name, in the file of a batch seen again, of the checkpoint's own routes; what begins the names of that part."""


@dataclass(frozen=True)
class Traced:
    """Unconstrained routing of a batch, and by name what goes with it, if the family returns router scores: `gates`,
    `margins`, `log_probs` of the used experts; with ratios `logprobs`, log π of the response tokens.

    `log_probs_at_X` are at the experts that checkpoint X used, and `replayed_logprobs_X` is log π under its routes.
    """

    routes: RoutingTrace
    beside: Mapping[str, Tensor]

    @staticmethod
    def load(path: Path, again: bool = False) -> Traced:
        """What `trace` wrote of a batch, or of the same batch seen again."""
        routes, parts = RoutingTrace.load(path), RoutingTrace.load_beside(path)
        start = AGAIN if again else ""
        beside = {n.removeprefix(start): x for n, x in parts.items() if n.startswith(AGAIN) == again}
        if "gates" in beside:
            beside["gates"] = beside["gates"].float()
        if again:  # what goes with a trace is 0 at padding
            padding = ~routes.attention_mask[..., None, None]
            routes = replace(routes, experts=beside.pop("experts").masked_fill(padding, routes.layout.unknown))
        return Traced(routes, beside)


def file_of(side: Path, batch: int) -> Path:
    """The trace file of a batch in the folder of one checkpoint."""
    return side / f"{batch:06d}.safetensors"


def trace(
    model: Any,
    side: Path,
    texts: Texts,
    references: Sequence[Path],
    *,
    ratios: bool,
    noise: bool,
    advance: Callable[[int], None],
) -> None:
    """Write the files that the folder of a checkpoint lacks. `references` are the folders of earlier checkpoints that
    it will be compared with; with `noise` every eighth batch is also traced again in other batches."""
    side.mkdir(parents=True, exist_ok=True)
    for i, batch in enumerate(texts.batches()):
        if not file_of(side, i).exists():
            seen = _observe(model, batch, ratios)
            beside = _read(seen, batch, ratios)
            for reference in references:
                routes = Traced.load(file_of(reference, i)).routes.to(model.device)
                if seen.scores is not None:
                    beside[f"log_probs_at_{reference.name}"] = seen.scores.log_probs_at(routes.ids())
                if ratios:
                    replayed = _observe(model, batch, ratios, routes)
                    beside[f"replayed_logprobs_{reference.name}"] = replayed.logprobs(batch.tokens, batch.response_mask)
            if noise and i % NOISE_EVERY == 0:
                beside |= {AGAIN + n: x for n, x in _observe_again(model, batch, ratios, seen.routes).items()}
            _save(file_of(side, i), seen.routes, beside | {"response": batch.response_mask})
        advance(texts.sizes[i])


def _observe(model: Any, batch: TextBatch, ratios: bool, routes: RoutingTrace | None = None) -> Observation:
    """One forward; with `ratios` the logits from the first response token on are kept."""
    first = int(batch.response_mask.any(0).long().argmax()) or 1  # the first token of all is nobody's
    inputs = {"input_ids": batch.tokens.to(model.device), "attention_mask": batch.attention_mask.to(model.device)}
    logits = batch.tokens.shape[1] - first + 1 if ratios else 0
    return observe(model, inputs, scores=routes is None, logits=logits, routes=routes)


def _read(seen: Observation, batch: TextBatch, ratios: bool) -> dict[str, Tensor]:
    """What a file has beside the routes."""
    beside = {"logprobs": seen.logprobs(batch.tokens, batch.response_mask)} if ratios else {}
    if (scores := seen.scores) is not None:
        beside |= {"gates": scores.gates.half(), "log_probs": scores.log_probs, "margins": scores.margins}
    return beside


def _observe_again(model: Any, batch: TextBatch, ratios: bool, reference: RoutingTrace) -> dict[str, Tensor]:
    """Routes, as `experts`, and what goes with them in other batches: rows in reverse, in two forwards of unequal size,
    with three padded columns."""
    order, time = torch.arange(len(batch.lines) - 1, -1, -1), batch.tokens.shape[1]
    joined: dict[str, Tensor] = {}
    for index in filter(len, order.tensor_split([-(-len(order) // 3)])):
        tokens, mask, response = (
            nn.functional.pad(x[index], (0, 3)) for x in (batch.tokens, batch.attention_mask, batch.response_mask)
        )
        part = replace(batch, tokens=tokens, attention_mask=mask, response_mask=response)
        seen = _observe(model, part, ratios)
        beside = _read(seen, part, ratios) | {"experts": seen.routes.experts}
        if seen.scores is not None:
            ids = nn.functional.pad(reference.ids()[index], (0, 0, 0, 0, 0, 3), value=-1).to(model.device)
            beside[f"log_probs_at_{ITSELF}"] = seen.scores.log_probs_at(ids)
        for name, x in beside.items():
            joined.setdefault(name, x.new_empty((len(order), time, *x.shape[2:])))[index] = x[:, :time]
    return joined


def _save(path: Path, routes: RoutingTrace, beside: Mapping[str, Tensor]) -> None:
    """Write a trace file that carries more beside the routes; whole or not at all."""
    aside = path.with_name(f".tmp-{path.name}")
    routes.to("cpu").save(aside, {name: x.cpu() for name, x in beside.items()})
    os.replace(aside, path)
