"""What a `record_routing` scope hands out: the routes of its forwards, for the tokens that those read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.scores import RouterScores
from moe_rl.routing.sites import Layout
from moe_rl.routing.trace import RoutingTrace


@dataclass
class Recording:
    """Routes of the forwards run inside a `record_routing` scope."""

    layout: Layout
    scored: bool = False
    graphed: bool = False
    _ids: list[list[Tensor]] = field(default_factory=list)
    """Per site, the [tokens, k] ids of each forward."""
    _read: list[tuple[torch.Size | None, Tensor | None]] = field(default_factory=list)
    """The shape [batch, time] of what each forward read, and the ids; None for one that was given embeddings."""
    _reading: tuple[torch.Size | None, Tensor | None] = (None, None)
    """The same of the forward now running, until it reaches its first site."""
    _scores: list[list[dict[str, Tensor]]] = field(default_factory=list)
    _logits: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def __repr__(self) -> str:
        read = [len(call) for call in self._ids[0]]
        what = [name for name, kept in (("scores", self.scored), ("logits", self.graphed)) if kept]
        return (f"Recording({len(read)} forward{'s' * (len(read) != 1)}, {sum(read)} tokens, {len(self.layout.sites)} "
                f"sites{''.join(f', {name}' for name in what)})")

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self._ids = [[] for _ in self.layout.sites]
        self._read, self._reading = [], (None, None)
        self._scores = [[] for _ in self.layout.sites]
        self._logits = [None for _ in self.layout.sites]

    def take(self) -> Integer[Tensor, "tokens site k"]:
        """Rows of the last forward, batch-major, in the layout's narrow dtype; then forget everything.

        For engines that gather or repeat rows between forwards, which `trace` could not put in order.
        """
        self._require_forward()
        ids = self._stack([calls[-1] for calls in self._ids])
        self.clear()
        return ids

    def trace(
        self, input_ids: Integer[Tensor, "batch time"], attention_mask: Bool[Tensor, "batch time"] | None = None
    ) -> RoutingTrace:
        """The routes of `input_ids`, from one forward or from a prefill and decode forwards of the same rows.

        The last column may never have been an input (it was sampled last); it is unknown then. Padding is unknown.
        Raises RoutingError for tokens that the forwards did not read, as after beam search, which moves rows, and
        assisted decoding, which takes tokens back. Not compared are padding, and embeddings, of which only the
        shape is known; and rows that exchange their caches while they read the same tokens look alike.
        """
        self._require_forward()
        batch, time = input_ids.shape
        pieces = [call.shape[0] for call in self._ids[0]]
        columns = sum(pieces) // batch
        if any(piece % batch for piece in pieces) or columns not in (time, time - 1):
            raise RoutingError(
                f"recorded forwards of {pieces} tokens do not add up to {batch} rows of {time} (or {time - 1}) tokens. "
                "Record one forward, or a prefill and decode steps of the same rows; use take() for anything else."
            )
        forwards = zip(*self._ids, strict=True)
        ids = torch.cat([self._stack(sites).unflatten(0, (batch, -1)) for sites in forwards], 1).to(input_ids.device)
        ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, time - columns), value=self.layout.unknown)
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        mask = mask.to(input_ids.device)
        self._require_read(input_ids, mask, [piece // batch for piece in pieces])
        if attention_mask is not None:
            ids = ids.masked_fill(~mask[..., None, None], self.layout.unknown)
        return RoutingTrace.from_ids(ids, self.layout, tokens=input_ids, attention_mask=mask, check=False)

    def scores(self, batch: int) -> RouterScores:
        """Router scores of the last forward, for `batch` rows. Needs `record_routing(model, scores=True)`."""
        if not self.scored:
            raise RoutingError("router scores were not recorded; use record_routing(model, scores=True).")
        self._require_forward()

        def rows(key: str, k: int | None = None) -> list[Tensor]:
            values = [calls[-1][key] for calls in self._scores]
            return [(v if k is None else pad_k(v, k)).unflatten(0, (batch, -1)) for v in values]

        k = self.layout.top_k
        ids = self._stack([calls[-1] for calls in self._ids]).unflatten(0, (batch, -1))
        return RouterScores(
            ids=ids.to(torch.int16).masked_fill(ids == self.layout.unknown, -1),
            gates=torch.stack(rows("gates", k), 2),
            log_probs=torch.stack(rows("log_probs", k), 2),
            margins=torch.stack(rows("margins"), 2),
            all_log_probs=tuple(rows("all_log_probs")),
        )

    def logits(self, batch: int) -> tuple[Float[Tensor, "batch time _"], ...]:
        """Logits of every site's router in the last forward, with their graph, for `batch` rows. Needs
        `record_routing(model, logits=True)`."""
        if not self.graphed:
            raise RoutingError("router logits were not recorded; use record_routing(model, logits=True).")
        self._require_forward()
        return tuple(x.reshape(batch, -1, x.shape[-1]) for x in self._logits if x is not None)

    def _require_forward(self) -> None:
        calls = [len(c) for c in self._ids]
        if min(calls) != max(calls) or not calls[0]:
            raise RoutingError(
                f"the sites of the model were reached {min(calls)} to {max(calls)} times inside the scope; "
                "run whole forwards of the recorded model inside it."
            )

    def _require_read(
        self, tokens: Integer[Tensor, "batch time"], mask: Bool[Tensor, "batch time"], widths: list[int]
    ) -> None:
        """Raise unless the forwards, each of which read so many columns, read these tokens, padding aside."""
        read, start = [], 0
        for (shape, here), width in zip(self._read, widths, strict=True):
            if shape is not None and shape != (len(tokens), width):
                raise RoutingError(
                    f"a recorded forward read {shape[0]} rows of {shape[1]} tokens, but {len(tokens)} rows "
                    f"of {width} are asked for. Ask for the rows that were read, or use take()."
                )
            read.append(tokens[:, start : start + width] if here is None else here.to(tokens.device))
            start += width
        joined = torch.cat(read, 1)
        other = (joined != tokens[:, :start]) & mask[:, :start]
        if bool(other.any()):
            b, t = other.nonzero()[0].tolist()
            raise RoutingError(
                f"the recorded forwards read other tokens: row {b}, position {t} is token {int(tokens[b, t])} here, "
                f"but they read token {int(joined[b, t])}. Beam search and other schemes that move rows or take tokens "
                "back leave routes of other rows or tokens: use take() after each forward, or record a fresh forward "
                "of these tokens."
            )

    # ------------------------------------------------------------------ for the sites
    def reads(self, shape: torch.Size, tokens: Integer[Tensor, "batch time"] | None) -> None:
        """A forward was given these tokens, or embeddings; of what its wrapper was given they are made."""
        self._reading = (shape, self._reading[1] if tokens is None else tokens)

    def routed(
        self, site: int, used: Integer[Tensor, "tokens k"], scores: dict[str, Tensor] | None, logits: Tensor | None
    ) -> None:
        """A site used these experts, and chose them by these scores, made of these logits."""
        if site == 0:
            (shape, tokens), self._reading = self._reading, (None, None)
            fits = shape is not None and shape.numel() == len(used)
            # A copy: the caller may go on filling the buffer that these are a part of.
            ids = tokens.clone() if fits and tokens is not None and tokens.shape == shape else None
            self._read.append((shape if fits else None, ids))
        self._ids[site].append(used.detach())
        if scores is not None:
            self._scores[site] = [scores]
        self._logits[site] = logits

    def _stack(self, sites: Sequence[Tensor]) -> Integer[Tensor, "tokens site k"]:
        return stack_sites(sites, self.layout)


# ---------------------------------------------------------------------- small parts
def stack_sites(sites: Sequence[Tensor], layout: Layout) -> Integer[Tensor, "tokens site k"]:
    """One [tokens, k] tensor per site, wherever its layer is, as one tensor in the layout's narrow dtype."""
    device = sites[0].device
    return torch.stack([pad_k(ids, layout.top_k, layout.unknown).to(device, layout.dtype) for ids in sites], 1)


def pad_k(x: Tensor, k: int, value: float = 0.0) -> Tensor:
    """Widen the last axis to k slots."""
    return x if x.shape[-1] == k else nn.functional.pad(x, (0, k - x.shape[-1]), value=value)
