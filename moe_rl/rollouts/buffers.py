"""The memory of a batch of completions while it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from moe_rl.routing import Layout, Recording, RoutingTrace
from moe_rl.types import KeptTokens


@dataclass(frozen=True)
class CompletionBuffers:
    """What a batch of completions has so far: one buffer per quantity, prompts left-padded, filled in place."""

    tokens: Int[Tensor, "rows time"]
    """Prompt and completion."""
    mask: Bool[Tensor, "rows time"]
    """False at the prompt's padding only."""
    logprobs: Float[Tensor, "rows new"]
    lengths: Int[Tensor, " rows"]
    """Completion tokens so far."""
    finished: Bool[Tensor, " rows"]
    routes: Integer[Tensor, "rows time site k"] | None
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of every position in turn: the row and the id of each token that truncated sampling kept."""

    @staticmethod
    def empty(
        prompts: Int[Tensor, "prompts start"],
        mask: Bool[Tensor, "prompts start"],
        group_size: int,
        new: int,
        layout: Layout | None,
    ) -> CompletionBuffers:
        rows, device = len(prompts) * group_size, prompts.device
        tokens = nn.functional.pad(prompts, (0, new)).repeat_interleave(group_size, 0)
        routes = None
        if layout is not None:
            shape = (*tokens.shape, len(layout.sites), layout.top_k)
            routes = torch.full(shape, layout.unknown, dtype=layout.dtype, device=device)
        return CompletionBuffers(
            tokens=tokens,
            mask=nn.functional.pad(mask, (0, new), value=True).repeat_interleave(group_size, 0),
            logprobs=torch.zeros(rows, new, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            finished=torch.zeros(rows, dtype=torch.bool, device=device),
            routes=routes,
        )

    def decode_inputs(self, rows: Int[Tensor, " rows"], time: int) -> dict[str, Tensor]:
        """Mask and position of the token at `time - 1`, for rows whose prompts were padded."""
        mask = self.mask[rows, :time].long()
        return {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}

    def keep_routes(
        self, rows: Int[Tensor, " rows"] | slice, time: slice, recording: Recording | None, repeat: int = 1
    ) -> None:
        """Store the routes of the last forward; `repeat` rows share those of one prompt."""
        if recording is not None and self.routes is not None:
            ids = recording.take().unflatten(0, (-1, time.stop - time.start))
            self.routes[rows, time] = ids.repeat_interleave(repeat, 0) if repeat > 1 else ids

    def keep_tokens(self, rows: Int[Tensor, " rows"], may_be_drawn: Bool[Tensor, "rows vocabulary"]) -> None:
        """Store what truncated sampling kept at the next position of these rows."""
        row, token = may_be_drawn.nonzero(as_tuple=True)
        self.kept.append((rows[row], token.int()))

    def kept_tokens(self) -> Sequence[KeptTokens | None]:
        """What was kept at every token of each row; None where nothing was stored."""
        if not self.kept:
            return [None] * len(self.tokens)
        counts = torch.stack([row.bincount(minlength=len(self.tokens)) for row, _ in self.kept], 1).int()
        order = torch.cat([row for row, _ in self.kept]).argsort(stable=True)
        return KeptTokens(torch.cat([token for _, token in self.kept])[order], counts).each(self.lengths.tolist())

    def cpu(self) -> CompletionBuffers:
        buffers: dict[str, Any] = {name: x.cpu() for name, x in vars(self).items() if isinstance(x, Tensor)}
        buffers["kept"] = [(row.cpu(), token.cpu()) for row, token in self.kept]
        return replace(self, **buffers | {"tokens": buffers["tokens"].to(torch.int32)})

    def trace(self, row: int, time: slice, recording: Recording | None) -> RoutingTrace | None:
        """The routes of one row, without its padding."""
        if recording is None or self.routes is None:
            return None
        tokens, mask, ids = (x[row : row + 1, time] for x in (self.tokens, self.mask, self.routes))
        return RoutingTrace.from_ids(ids, recording.layout, tokens=tokens, attention_mask=mask, check=False)
