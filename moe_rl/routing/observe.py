"""`observe`: one forward without gradient, with its routes, router scores and logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moe_rl.errors import RoutingError
from moe_rl.routing.hooks import RouterScores, record_routing, replay_routing
from moe_rl.routing.moe_layers import token_readers
from moe_rl.routing.trace import RoutingTrace

LOGITS = 2**24
"""Logits that are normalised at once."""


@dataclass(frozen=True)
class Observation:
    """One forward, on the device of the model."""

    routes: RoutingTrace
    """The experts used. Padding is unknown."""
    scores: RouterScores | None
    """None where they were not asked for, or the family does not return them."""
    logits: Float[Tensor, "batch kept vocabulary"] | None
    """Of the last inputs, as many as were asked for."""

    def logprobs(
        self, tokens: Integer[Tensor, "batch time"], response: Bool[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time"]:
        """log π of the tokens of `response`, in nats at temperature 1; 0 elsewhere. The observed inputs are all of
        `tokens`, or all but the last. Raises RoutingError where their logits were not kept."""
        tokens, response = tokens.to(self.routes.experts.device), response.to(self.routes.experts.device)
        count = 0 if self.logits is None else self.logits.shape[1]
        start = self.routes.shape[1] - count + 1
        if self.logits is None or bool(response[:, :start].any()):
            raise RoutingError(f"logits={count} are too few for a response that begins before token {start}.")
        wanted = response[:, start:]
        logits = self.logits[:, : wanted.shape[1]][wanted]
        pieces = logits.split(max(1, LOGITS // logits.shape[-1]))
        chosen = tokens[:, start:][wanted].split(max(1, LOGITS // logits.shape[-1]))
        read = [x.float().log_softmax(-1).gather(-1, own[:, None])[:, 0] for x, own in zip(pieces, chosen, strict=True)]
        return torch.zeros(tokens.shape, device=tokens.device).masked_scatter(response, torch.cat(read))


@torch.no_grad()
def observe(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    scores: bool = False,
    logits: int = 0,
    routes: RoutingTrace | None = None,
    part: bool = False,
    lost: Literal["raise", "unknown"] = "raise",
) -> Observation:
    """One forward of `model` in evaluation mode.

    `inputs` are the keyword arguments of the model, with `input_ids` or `inputs_embeds` [batch, time, …], and perhaps
    `attention_mask` [batch, time]. `scores` also reads gates, log-probabilities and margins of the routers. `logits`:
    of how many of the last inputs. `routes` are replayed; `part` as in `replay_routing`. Raises RoutingError unless the
    model runs one forward, and NotFinite for a router without finite scores for a real token, unless
    `lost="unknown"`.
    """
    read = inputs.get("input_ids")
    batch, time = (inputs["inputs_embeds"] if read is None else read).shape[:2]
    mask = inputs.get("attention_mask")
    mask = mask.bool() if isinstance(mask, Tensor) and mask.shape == (batch, time) else None
    known = {name for module in token_readers(model) for name in inspect.signature(module.forward).parameters}
    settings = {"use_cache": False, "logits_to_keep": max(1, logits)}
    settings = {name: value for name, value in settings.items() if name in known}
    recorder = record_routing(model, "where_possible" if scores else False)
    with evaluation_mode(model), replay_routing(model, routes, part=part), recorder as recording:
        output = model(**settings, **inputs)
    read_scores = recording.scores(batch) if recording.scored else None
    ids = recording.take()
    if len(ids) != batch * time:
        raise RoutingError(f"the model routed {len(ids)} tokens of {batch} rows of {time}. Observe one forward.")
    ids = ids.unflatten(0, (batch, time))
    layout = recording.layout
    mask = torch.ones(batch, time, dtype=torch.bool, device=ids.device) if mask is None else mask.to(ids.device)
    if lost == "raise":
        recording.require_routes(ids, mask)
    ids.masked_fill_(~mask[..., None, None], layout.unknown)  # stacked just now, so nobody else's
    trace = RoutingTrace.from_ids(ids, layout, tokens=read, attention_mask=mask, check=False)
    head = output.logits[:, -logits:] if logits else None
    return Observation(trace, read_scores, head)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a forward between its steps; its modes come back afterwards. FSDP2's modules
    give back the weights that they gathered."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else the outermost keeps its weights of now, whatever the optimizer does
