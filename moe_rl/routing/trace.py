"""`RoutingTrace`: which experts every token of a batch used, at every MoE layer. Immutable, compact, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing import trace_files
from moe_rl.routing.ids import blocks, signed, sorted_slots
from moe_rl.routing.moe_layers import Layout, MoeLayer
from moe_rl.routing.trace_files import unpacked

__all__ = ["Layout", "RoutingTrace", "MoeLayer"]
ROUTED = ("experts", "gates")
PER_TOKEN = (*ROUTED, "attention_mask", "tokens")
"""Fields with rows and columns; those of `ROUTED` come from a router."""


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Expert ids of a padded batch. `==` compares ids in order; `same_sets` ignores their order within a row.

    A row (batch, time, MoE layer) is *unknown* at padding, at the last token of a rollout (it was never an input) and
    wherever an engine reported nothing; under replay such a row routes freely.
    """

    experts: Integer[Tensor, "batch time moe_layer k"]
    """Ids in selection order, in `layout.dtype`. MoE layers that use fewer than k slots leave the last ones unknown."""
    attention_mask: Bool[Tensor, "batch time"]
    """True at tokens, False at padding (on either side)."""
    layout: Layout
    tokens: Integer[Tensor, "batch time"] | None = None
    """The tokens that were routed; when present, replay checks that the model reads the same ones."""
    weight_version: str | None = None
    """A name for the weights that routed; None also where they are several."""
    keep: float = 0.0
    """Under replay an expert stays only where its live score is at least this share of the weakest live top-k score
    (`sources.soft`); at 0 it stays whatever its score."""
    gates: Float[Tensor, "batch time moe_layer k"] | None = None
    """Combine weights that replay forces with the ids, float32 or float16 (`sources.recall`); None: the live
    router's."""

    # ------------------------------------------------------------------ making one
    @staticmethod
    def from_ids(
        ids: Integer[Tensor, "batch time moe_layer k"],
        layout: Layout,
        *,
        tokens: Integer[Tensor, "batch time"] | None = None,
        attention_mask: Bool[Tensor, "batch time"] | None = None,
        weight_version: str | None = None,
        check: bool = True,
    ) -> RoutingTrace:
        """A trace of copies of ids in any integer dtype, -1 where unknown. Raises RoutingError for impossible ids.

        `check=False` is for ids in `layout.dtype` that a model's own top-k just produced; they are not copied.
        """
        if attention_mask is None:
            attention_mask = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
        if check:
            layout.check_ids(ids)
            ids = layout.compact(ids)
        tokens = None if tokens is None else tokens.to(torch.int32, copy=True)
        mask = attention_mask.to(torch.bool, copy=True)
        return RoutingTrace(ids.to(layout.dtype), mask, layout, tokens, weight_version)

    @staticmethod
    def cat(
        traces: Sequence[RoutingTrace],
        tokens: Integer[Tensor, "batch time"],
        attention_mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
        *,
        mixed: bool = False,
    ) -> RoutingTrace:
        """Right-padded traces of consecutive rows as one trace over `tokens`, on its device.

        Padding is unknown, and so are the columns that a trace lacks. Raises RoutingError for traces of other tokens
        (padding aside), of more columns or another number of rows than the batch, of two models, that are replayed by
        different rules, and, unless they may be `mixed`, of different weight versions.
        """
        row = 0
        for number, trace in enumerate(traces):
            _require_rows(trace, number, traces[0], tokens[row : row + trace.shape[0]], row, mixed)
            row += trace.shape[0]
        if (row, tokens.shape[1]) != attention_mask.shape or row != len(tokens):
            raise RoutingError(
                f"the traces have {row} rows, but the batch has {len(tokens)}, and an attention mask of shape "
                f"{tuple(attention_mask.shape)}"
            )
        wide = [trace.wide(tokens.shape[1]) for trace in traces]
        joined: dict[str, Any] = {name: [getattr(trace, name) for trace in wide] for name in ROUTED}
        joined = {name: None if x[0] is None else torch.cat(x).to(tokens.device) for name, x in joined.items()}
        padding = ~attention_mask.bool().to(tokens.device)
        joined["experts"].masked_fill_(padding[..., None, None], wide[0].layout.unknown)
        joined["weight_version"] = _one_version(wide)
        return replace(wide[0], **joined, attention_mask=~padding, tokens=tokens.to(torch.int32, copy=True))

    @staticmethod
    def splice(
        parts: Sequence[RoutingTrace],
        tokens: Integer[Tensor, "batch time"],
        attention_mask: Bool[Tensor, "batch time"] | None = None,
    ) -> RoutingTrace:
        """What several engine calls reported of the same right-padded rows, as one trace over `tokens`.

        The calls may be continuations under new weights, turns of a conversation, or a cached prefix and its rest.
        Column t of every part is token t. A part may be shorter than the rows, and unknown where it saw nothing
        (`decode_routes` with `start`). Each token takes all its routes from the first part that knows any of them. In
        the order of the calls a token thus keeps the routes under which it was sampled; reverse the parts where a later
        prefill counts. Raises RoutingError as `cat` does, but not for weight versions, and for no parts.
        """
        if not parts:
            raise RoutingError("no traces to join. For rows without routing, replay None.")
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        for number, part in enumerate(parts):
            _require_rows(part, number, parts[0], tokens, 0, mixed=True)
        *earlier, joined = (RoutingTrace.cat([part], tokens, mask, mixed=True) for part in parts)
        for part in reversed(earlier):
            joined = _prefer(part, joined)
        return replace(joined, weight_version=_one_version(parts))

    # ------------------------------------------------------------------ reading it
    @property
    def shape(self) -> torch.Size:
        """(batch, time, MoE layer, k)"""
        return self.experts.shape

    def ids(self) -> Integer[Tensor, "batch time moe_layer k"]:
        """Ids as int64, -1 where unknown."""
        return signed(self.experts)

    @property
    def known(self) -> Bool[Tensor, "batch time moe_layer"]:
        return self.experts[..., 0] != self.layout.unknown

    @property
    def coverage(self) -> float:
        """Share of (token, MoE layer) pairs whose route is known; padding does not count."""
        tokens = int(self.attention_mask.sum()) * len(self.layout.moe_layers)
        return int((self.known & self.attention_mask[..., None]).sum()) / tokens if tokens else float("nan")

    def require_known(self) -> None:
        """Raise unless some token's route is known."""
        if not bool((self.known & self.attention_mask[..., None]).any()):
            raise RoutingError(
                "the trace contains no known routing, so replay would do nothing. Replay None, or, for a part of a "
                "trace, use replay_routing(model, trace, part=True)."
            )

    def __eq__(self, other: object) -> bool:
        def alike(mine: Tensor | None, theirs: Tensor | None) -> bool:
            """Where routes are known, which both then know."""
            return mine is theirs is None or (
                mine is not None and theirs is not None and torch.equal(mine[self.known], theirs[self.known])
            )

        if not isinstance(other, RoutingTrace):
            return False
        other = other.to(self.experts.device)
        return (
            self.layout == other.layout
            and torch.equal(self.experts, other.experts)
            and torch.equal(self.attention_mask, other.attention_mask)
            and self.keep == other.keep
            and alike(self.gates, other.gates)
        )

    def __repr__(self) -> str:
        batch, time, moe_layers, k = self.shape
        experts = max(moe_layer.num_experts for moe_layer in self.layout.moe_layers)
        shape = f"{batch} × {time} tokens, {moe_layers} MoE layers, top {k} of {experts}"
        return f"RoutingTrace({shape}, {self.coverage:.1%} known)"

    def same_sets(self, other: RoutingTrace) -> Bool[Tensor, "batch time moe_layer"]:
        """Where both chose the same experts, in any order. Unknown equals unknown alone, so padding is the same
        everywhere: `agreement` gives a share. Raises RoutingError for traces of other models or tokens."""
        self.layout.require(other.layout, "the other trace")
        if self.shape != other.shape:
            raise RoutingError(f"traces of shapes {tuple(self.shape)} and {tuple(other.shape)} cannot be compared")
        if self.tokens is not None and other.tokens is not None:
            mine = self.attention_mask.to(other.tokens.device)
            require_same(self.tokens, other.tokens, mine & other.attention_mask)
        theirs = other.experts.to(self.experts.device)
        same = torch.empty(self.shape[:3], dtype=torch.bool, device=theirs.device)
        for at in blocks(*self.shape[:3], device=theirs.device):
            mine, other_slots = sorted_slots(self.experts[at]), sorted_slots(theirs[at])
            same[at] = torch.eq(mine, other_slots, out=mine).amin(0).bool()
        return same

    def agreement(self, other: RoutingTrace) -> float:
        """Share of the (token, MoE layer) pairs known in both at which both chose the same experts, in any order.
        Padding does not count. NaN where there is no such pair."""
        same, other = self.same_sets(other), other.to(self.experts.device)
        both = self.known & other.known & (self.attention_mask & other.attention_mask)[..., None]
        return same[both].double().mean().item()

    # ------------------------------------------------------------------ cutting it
    def rows(self, index: Int[Tensor, " rows"] | slice, time: int | None = None) -> RoutingTrace:
        """The given rows and their first `time` columns."""
        return self.each(lambda _, x: x[index][:, :time])

    def only(self, where: Bool[Tensor, "batch time moe_layer"]) -> RoutingTrace:
        """Without the routes of other (token, MoE layer) pairs than those of `where`: replay leaves these free."""
        return replace(self, experts=self.experts.masked_fill(~where[..., None], self.layout.unknown))

    def align(self, attention_mask: Bool[Tensor, "batch time"]) -> RoutingTrace:
        """The same routes under another padding: token i of a row moves to the i-th True of `attention_mask`."""
        attention_mask = attention_mask.to(self.experts.device, torch.bool, copy=True)
        mine, theirs = self.attention_mask.sum(1), attention_mask.sum(1)
        if not torch.equal(mine, theirs):
            raise RoutingError(
                f"cannot align: rows of the trace have {mine.tolist()} tokens, rows of the mask have {theirs.tolist()}"
            )
        moved = self.each(lambda _, x: unpacked(x[self.attention_mask], attention_mask))
        experts = unpacked(self.experts[self.attention_mask], attention_mask, self.layout.unknown)
        return replace(moved, experts=experts, attention_mask=attention_mask)

    def to(self, device: torch.device | str) -> RoutingTrace:
        return self.each(lambda _, x: x.to(device))

    def wide(self, time: int) -> RoutingTrace:
        """With columns of padding up to `time` of them."""
        more = time - self.shape[1]

        def fill(name: str, x: Tensor) -> Tensor:
            value = self.layout.unknown if name == "experts" else 0
            return nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, more), value=value)

        return self.each(fill) if more else self

    def each(self, change: Callable[[str, Tensor], Tensor], names: Sequence[str] = PER_TOKEN) -> RoutingTrace:
        """Apply `change(name of the field, tensor)` to every tensor of the trace, or to those of these names."""
        tensors = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: change(name, x) for name, x in tensors.items() if x is not None}
        return replace(self, **changed)

    # ------------------------------------------------------------------ keeping it
    def save(self, path: str | Path, beside: Mapping[str, Tensor] | None = None) -> None:
        """Write a safetensors file: ids and tokens of real tokens, packed; everything else in the header. `beside` are
        further tensors [batch, time, …] of the same forward (margins, log-probs), which `load_beside` reads."""
        trace_files.write_fields(vars(self), path, beside)

    @staticmethod
    def load(path: str | Path) -> RoutingTrace:
        """Read what `save` wrote. Raises RoutingError for a foreign file, another format or a wrong checksum."""
        return RoutingTrace(**trace_files.read_fields(path))

    @staticmethod
    def load_beside(path: str | Path) -> dict[str, Tensor]:
        """What a file holds beside its trace, padded with zeros; empty for a trace saved alone."""
        return trace_files.read_beside(path)


# ---------------------------------------------------------------------- small parts
def _require_rows(
    trace: RoutingTrace, number: int, first: RoutingTrace, tokens: Integer[Tensor, "rows time"], row: int, mixed: bool
) -> None:
    """Raise unless trace `number` can be joined with the first one, over these rows of a batch, from `row` on."""
    first.layout.require(trace.layout, f"trace {number}")
    if trace.weight_version != first.weight_version and not mixed:
        raise RoutingError(
            f"traces 0 and {number} have the weight versions {first.weight_version!r} and {trace.weight_version!r}. "
            "Join them separately, or set mixed=True."
        )
    if trace.keep != first.keep or (trace.gates is None) != (first.gates is None):
        raise RoutingError(f"traces 0 and {number} have different keep or gates. Join them separately.")
    rows, time = trace.shape[:2]
    if time > tokens.shape[1]:
        raise RoutingError(f"trace {number} has {time} columns, but the batch has {tokens.shape[1]}")
    if trace.tokens is not None and rows == len(tokens):  # too many rows are refused by their sum
        advice = "Give the traces in the order of the rows."
        require_same(trace.tokens, tokens[:, :time], trace.attention_mask, f"trace {number} is", row, advice)


def require_same(
    mine: Integer[Tensor, "batch time"],
    theirs: Integer[Tensor, "batch time"],
    counted: Bool[Tensor, "batch time"],
    what: str = "the trace is",
    first: int = 0,
    advice: str = "Align paddings with trace.align(attention_mask).",
) -> None:
    """Raise RoutingError, which counts rows from `first`, unless tokens are the same where they are `counted`."""
    other = (mine.to(theirs.device) != theirs) & counted.to(theirs.device)
    if bool(other.any()):
        b, t = other.nonzero()[0].tolist()
        raise RoutingError(
            f"{what} of other tokens: row {first + b}, position {t} is token {int(theirs[b, t])} here, and "
            f"{int(mine[b, t])} there. {advice}"
        )


def _one_version(traces: Sequence[RoutingTrace]) -> str | None:
    """The weight version of all traces; None where they have several."""
    versions = {trace.weight_version for trace in traces}
    return versions.pop() if len(versions) == 1 else None


def _prefer(first: RoutingTrace, second: RoutingTrace) -> RoutingTrace:
    """The routes of `first` at tokens of which it knows any route, else those of `second`."""
    known = first.known.any(-1)

    def choose(name: str, theirs: Tensor) -> Tensor:
        return getattr(first, name).where(known.view(*known.shape, *(1,) * (theirs.dim() - 2)), theirs)

    return second.each(choose, ROUTED)
