"""`RoutingTrace`: which experts every token of a batch used, at every site. Immutable, compact, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Int16, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing import trace_files
from moe_rl.routing.ids import blocks, signed, sorted_slots
from moe_rl.routing.sites import Layout, Site
from moe_rl.routing.trace_files import ALL, unpacked

__all__ = ["Layout", "RoutingTrace", "Site"]
ROUTED = ("experts", "gates", "version_index")
PER_TOKEN = ("experts", "attention_mask", "tokens", "gates", "version_index")
"""Fields with rows and columns; those of `ROUTED` come from a router."""
CUTS = ("rows", "tokens", "zigzag", "layers")


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Expert ids of a padded batch. `==` compares ids in order; `same_sets` ignores their order within a row.

    A row (batch, time, site) is *unknown* at padding, at the last token of a rollout (it was never an input) and
    wherever an engine reported nothing; under replay such a row routes freely.
    """

    experts: Integer[Tensor, "batch time site k"]
    """Ids in selection order, in `layout.dtype`. Sites that use fewer than k slots leave the last ones unknown."""
    attention_mask: Bool[Tensor, "batch time"]
    """True at tokens, False at padding (on either side)."""
    layout: Layout
    tokens: Integer[Tensor, "batch time"] | None = None
    """The tokens that were routed; when present, replay checks that the model reads the same ones."""
    weight_version: str | None = None
    """Which weights routed, in the words of whoever recorded it; None also where they are several: `versions`."""
    keep: float = 0.0
    """Under replay an expert stays only where its live score is at least this share of the weakest live top-k score
    (`sources.soft`); at 0 it stays whatever its score."""
    gates: Float[Tensor, "batch time site k"] | None = None
    """Combine weights that replay forces with the ids, float32 or float16 (`sources.recall`); None: the live
    router's."""
    versions: tuple[str | None, ...] = ()
    """The weights that routed, where tokens were routed by different ones; empty: `weight_version` routed all."""
    version_index: Int16[Tensor, "batch time"] | None = None
    """Which of `versions` routed each token, -1 where none of its routes is known; see `segments`."""

    # ------------------------------------------------------------------ making one
    @staticmethod
    def from_ids(
        ids: Integer[Tensor, "batch time site k"],
        layout: Layout,
        *,
        tokens: Integer[Tensor, "batch time"] | None = None,
        attention_mask: Bool[Tensor, "batch time"] | None = None,
        weight_version: str | None = None,
        check: bool = True,
    ) -> RoutingTrace:
        """A trace of ids in any integer dtype, -1 where unknown. Raises RoutingError for ids that cannot be routes.

        `check=False` is for ids that a model's own top-k just produced, in `layout.dtype` already.
        """
        if attention_mask is None:
            attention_mask = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
        if check:
            layout.check_ids(ids)
            ids = layout.compact(ids)
        tokens = None if tokens is None else tokens.to(torch.int32)
        return RoutingTrace(ids.to(layout.dtype), attention_mask.bool(), layout, tokens, weight_version)

    @staticmethod
    def cat(
        traces: Sequence[RoutingTrace], tokens: Integer[Tensor, "batch time"],
        attention_mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"], *, mixed: bool = False,
    ) -> RoutingTrace:
        """Right-padded traces of consecutive rows, single ones or micro-batches, as one trace over `tokens`, on its
        device.

        Padding, and columns that a trace lacks, as that of the last sampled token, are unknown. Raises RoutingError for
        traces of other tokens (padding aside), of more columns or another number of rows than the batch, of two models,
        for a mask of another shape, for traces that are replayed by different rules and, unless they may be `mixed`,
        for different weight versions.
        """
        row = 0
        for number, trace in enumerate(traces):
            _require_rows(trace, number, traces[0], tokens[row : row + trace.shape[0]], row, mixed)
            row += trace.shape[0]
        if row != tokens.shape[0]:
            raise RoutingError(f"the traces have {row} rows, but the batch has {tokens.shape[0]}")
        if attention_mask.shape != tokens.shape:
            raise RoutingError(f"the attention mask has shape {tuple(attention_mask.shape)}, the tokens have "
                               f"{tuple(tokens.shape)}")
        wide = _with_one_index([trace.wide(tokens.shape[1]) for trace in traces])
        joined: dict[str, Any] = {name: [getattr(trace, name) for trace in wide] for name in ROUTED}
        joined = {name: None if x[0] is None else torch.cat(x).to(tokens.device) for name, x in joined.items()}
        padding = ~attention_mask.bool().to(tokens.device)
        joined["experts"].masked_fill_(padding[..., None, None], wide[0].layout.unknown)
        if joined["version_index"] is not None:
            joined["version_index"].masked_fill_(padding, -1)
        return replace(wide[0], **joined, attention_mask=~padding, tokens=tokens.to(torch.int32))

    @staticmethod
    def splice(
        parts: Sequence[RoutingTrace], tokens: Integer[Tensor, "batch time"],
        attention_mask: Bool[Tensor, "batch time"] | None = None,
    ) -> RoutingTrace:
        """What several calls reported of the same right-padded rows, in order of precedence, as one trace over
        `tokens`: rollouts continued under new weights, turns of a conversation, a cached prefix and what follows it.

        Column t of every part is token t, what a part did not see is unknown (`decode_routes` with `start`), and parts
        may be shorter than the rows. Of each token the first part that knows any of its routes gives them all, with
        their weight version: in order of the calls, what sampled a token stays, and the last token of a call, which was
        no input yet, and what the environment wrote after it come from the next one. Reverse the parts where a later
        prefill counts. `attention_mask` is True everywhere where it is left out. Raises RoutingError as `cat` does, but
        not for weight versions, and for no parts.
        """
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if not parts:
            raise RoutingError("no traces to join. For rows without routing, replay None.")
        for number, part in enumerate(parts):
            _require_rows(part, number, parts[0], tokens, 0, mixed=True)
        *earlier, whole = _with_one_index([RoutingTrace.cat([part], tokens, mask, mixed=True) for part in parts])
        for part in reversed(earlier):
            whole = _prefer(part, whole)
        return whole

    # ------------------------------------------------------------------ reading it
    @property
    def shape(self) -> torch.Size:
        """(batch, time, site, k)"""
        return self.experts.shape

    def ids(self) -> Integer[Tensor, "batch time site k"]:
        """Ids as int64, -1 where unknown."""
        return signed(self.experts)

    @property
    def known(self) -> Bool[Tensor, "batch time site"]:
        return self.experts[..., 0] != self.layout.unknown

    @property
    def coverage(self) -> float:
        """Share of (token, site) pairs whose route is known; padding does not count."""
        tokens = int(self.attention_mask.sum()) * len(self.layout.sites)
        return int((self.known & self.attention_mask[..., None]).sum()) / tokens if tokens else float("nan")

    @property
    def weights(self) -> tuple[str | None, ...]:
        """Every weight version that routed."""
        return self.versions or (self.weight_version,)

    def segments(self, row: int) -> list[tuple[int, int, str | None]]:
        """(first column, end, weight version) of each part of a row that one version routed; columns without a known
        route belong to none."""
        index = self.known[row].any(-1).short() - 1 if self.version_index is None else self.version_index[row]
        values, counts = index.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        runs = zip((ends - counts).tolist(), ends.tolist(), values.tolist(), strict=True)
        return [(start, end, self.weights[which]) for start, end, which in runs if which >= 0]

    def require_known(self) -> None:
        """Raise unless some token's route is known."""
        if not bool((self.known & self.attention_mask[..., None]).any()):
            raise RoutingError(
                "the trace contains no known routing, so replay would do nothing. Replay None, or use part=True if it "
                "is a part of a trace: replay_routing(model, trace, part=True)."
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
        batch, time, sites, k = self.shape
        version = f"of {len(self.versions)} versions" if self.versions else self.weight_version
        extra = [f"weights {version}"] * (version is not None) + \
            [f"keep {self.keep:g}"] * bool(self.keep) + ["gates"] * (self.gates is not None)
        return (f"RoutingTrace({batch} × {time} tokens, {sites} sites, top {k} of "
                f"{max(site.num_experts for site in self.layout.sites)}, {self.coverage:.1%} known"
                f"{''.join(f', {e}' for e in extra)}, {self.experts.dtype}, {self.experts.device})")

    __hash__ = None  # type: ignore[assignment]  # equal traces would need equal hashes of all they hold

    def same_sets(self, other: RoutingTrace) -> Bool[Tensor, "batch time site"]:
        """Where both chose the same experts, in whatever order; unknown equals unknown only, so that padding is the
        same everywhere: for a share, see `agreement`."""
        self.layout.require(other.layout, "the other trace")
        if self.shape != other.shape:
            raise RoutingError(f"this trace has shape {tuple(self.shape)}, the other {tuple(other.shape)}. Compare the "
                               "same rows: trace.rows(rows) gives those of a micro-batch.")
        theirs = other.experts.to(self.experts.device)
        same = torch.empty(self.shape[:3], dtype=torch.bool, device=theirs.device)
        for at in blocks(*self.shape[:3], device=theirs.device):
            mine, other_slots = sorted_slots(self.experts[at]), sorted_slots(theirs[at])
            same[at] = torch.eq(mine, other_slots, out=mine).amin(0).bool()
        return same

    def agreement(self, other: RoutingTrace) -> float:
        """Share of (token, site) pairs at which both chose the same experts, in whatever order, of those whose route
        both know; padding does not count. NaN where there is no such pair."""
        same, other = self.same_sets(other), other.to(self.experts.device)
        both = self.known & other.known & (self.attention_mask & other.attention_mask)[..., None]
        return same[both].double().mean().item()

    # ------------------------------------------------------------------ cutting it
    def rows(self, index: Int[Tensor, " rows"] | slice, time: int | None = None) -> RoutingTrace:
        """The given rows and their first `time` columns."""
        return self.each(lambda _, x: x[index][:, :time])

    def only(self, where: Bool[Tensor, "batch time site"]) -> RoutingTrace:
        """Without the routes of other (token, site) pairs than those of `where`: replay leaves these free."""
        return replace(self, experts=self.experts.masked_fill(~where[..., None], self.layout.unknown))

    def align(self, attention_mask: Bool[Tensor, "batch time"]) -> RoutingTrace:
        """The same routes under another padding: token i of a row moves to the i-th True of `attention_mask`."""
        attention_mask = attention_mask.bool().to(self.experts.device)
        mine, theirs = self.attention_mask.sum(1), attention_mask.sum(1)
        if not torch.equal(mine, theirs):
            raise RoutingError(f"cannot align: rows of the trace have {mine.tolist()} tokens, rows of the mask have "
                               f"{theirs.tolist()}")
        moved = self.each(lambda _, x: unpacked(x[self.attention_mask], attention_mask))
        experts = unpacked(self.experts[self.attention_mask], attention_mask, self.layout.unknown)
        index = self.version_index
        index = None if index is None else unpacked(index[self.attention_mask], attention_mask, -1)
        return replace(moved, experts=experts, attention_mask=attention_mask, version_index=index)

    def shard(self, rank: int, world: int, by: str = "rows", *, num_layers: int | None = None) -> RoutingTrace:
        """The part of one of `world` ranks, copied, so that the whole can be let go.

        `by` "rows": consecutive rows, the first ranks one more where they do not come out even. "tokens" and "zigzag":
        context parallelism, a block of columns, or blocks `rank` and 2 · world − 1 − rank of 2 · world, as
        Megatron-core cuts them; columns are filled up with padding until they come out even. "layers": the decoder
        layers of a pipeline stage, of `num_layers` (without it, they end with the last that routes), which must come
        out even. Raises RoutingError for a rank that there is not, and for a stage without a layer that routes.
        """
        if not 0 <= rank < world:
            raise RoutingError(f"rank={rank} must be from 0 to {world - 1}")
        batch, time = self.shape[:2]
        if by == "rows":
            return self.rows(torch.arange(batch).tensor_split(world)[rank])
        if by in ("tokens", "zigzag"):
            count = world if by == "tokens" else 2 * world
            wide = self.wide(-(-time // count) * count)
            blocks = torch.arange(wide.shape[1]).chunk(count)
            mine = blocks[rank] if by == "tokens" else torch.cat([blocks[rank], blocks[count - 1 - rank]])
            return wide.each(lambda _, x: x[:, mine])
        if by == "layers":
            return self._stage(rank, world, num_layers)
        raise RoutingError(f"by={by!r}: cut by {', '.join(CUTS)}.")

    def _stage(self, rank: int, world: int, num_layers: int | None) -> RoutingTrace:
        layers = [site.decoder_layer for site in self.layout.sites]
        total = num_layers or max(layers) + 1
        if total % world or total <= max(layers):
            raise RoutingError(f"{total} decoder layers cannot be cut into {world} equal stages that include layer "
                               f"{max(layers)}. Give num_layers, the number of decoder layers.")
        each = total // world
        here = [s for s, layer in enumerate(layers) if layer // each == rank]
        if not here:
            raise RoutingError(f"stage {rank} of {world} has layers {rank * each} to {rank * each + each - 1}, which "
                               "have no router. It needs no trace.")
        layout = Layout(tuple(self.layout.sites[s] for s in here), self.layout.architecture)
        experts = self.experts[:, :, here, : layout.top_k].contiguous().to(layout.dtype)
        if layout.dtype != self.experts.dtype:
            experts = experts.masked_fill(~self.known[:, :, here, None], layout.unknown)
        gates = None if self.gates is None else self.gates[:, :, here, : layout.top_k]
        return replace(self, layout=layout, experts=experts, gates=gates)

    def to(self, device: torch.device | str) -> RoutingTrace:
        return self.each(lambda _, x: x.to(device))

    def wide(self, time: int) -> RoutingTrace:
        """With columns of padding up to `time` of them."""
        more, blank = time - self.shape[1], {"experts": self.layout.unknown, "version_index": -1}

        def fill(name: str, x: Tensor) -> Tensor:
            return nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, more), value=blank.get(name, 0))

        return self.each(fill) if more else self

    def each(self, change: Callable[[str, Tensor], Tensor], names: Sequence[str] = PER_TOKEN) -> RoutingTrace:
        """A change, which is told the name of the field, to everything that has rows and columns, and is there."""
        found = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: change(name, x) for name, x in found.items() if x is not None}
        return replace(self, **changed)

    # ------------------------------------------------------------------ keeping it
    def save(self, path: str | Path, beside: Mapping[str, Tensor] | None = None) -> None:
        """Write a safetensors file: ids and tokens of real tokens only, packed; everything else in the header.

        `beside` are tensors [batch, time, …] of the same forward (gates, margins), packed alike, which the trace itself
        does not hold; `load_beside` reads them, `load` and replay ignore them.
        """
        trace_files.write_fields(vars(self), path, beside)

    @staticmethod
    def load(path: str | Path, *, rows: slice = ALL, columns: slice = ALL, sites: slice = ALL) -> RoutingTrace:
        """Read what `save` wrote, or a part of it: the file is mapped, and no more of it is read than is asked for.

        The whole is held against its sums; a part only against what ids can be. A file that would unpack to more than
        1 GiB and more than 256 times its size is refused. Raises RoutingError for a missing, foreign or corrupted file,
        for one of another format, and for slices with a step.
        """
        return RoutingTrace(**trace_files.read_fields(path, rows, columns, sites))

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
    if trace.weights != first.weights and not mixed:
        versions = " and ".join(", ".join(map(repr, one.weights)) for one in (first, trace))
        raise RoutingError(f"traces 0 and {number} have different weight versions, {versions}. Join them separately, "
                           "or set mixed=True to keep the version of every token.")
    if trace.keep != first.keep or (trace.gates is None) != (first.gates is None):
        raise RoutingError(f"traces 0 and {number} have different keep or gates, so they are replayed by different "
                           "rules. Join them separately.")
    rows, time = trace.shape[:2]
    if time > tokens.shape[1]:
        raise RoutingError(f"trace {number} has {time} columns, but the batch has {tokens.shape[1]}. Give the trace of "
                           "these rows.")
    if trace.tokens is None or rows != len(tokens):  # too many rows are refused by their sum
        return
    other = (trace.tokens.to(tokens.device) != tokens[:, :time]) & trace.attention_mask.to(tokens.device)
    if bool(other.any()):
        b, t = other.nonzero()[0].tolist()
        raise RoutingError(
            f"trace {number} is of other tokens than row {row + b} of the batch: position {t} is token "
            f"{int(trace.tokens[b, t])}, in the batch {int(tokens[b, t])}. Give the traces in the order of the rows."
        )


def _with_one_index(traces: Sequence[RoutingTrace]) -> list[RoutingTrace]:
    """The traces, numbering the weight versions of all of them alike."""
    names = tuple(dict.fromkeys(name for trace in traces for name in trace.weights))
    if len(names) == 1:
        return [replace(trace, weight_version=names[0], versions=(), version_index=None) for trace in traces]
    found = []
    for trace in traces:
        own = trace.known.any(-1).short() - 1 if trace.version_index is None else trace.version_index
        number = own.new_tensor([*(names.index(name) for name in trace.weights), -1])  # the last one is that of -1
        found.append(replace(trace, weight_version=None, versions=names, version_index=number[own.long()]))
    return found


def _prefer(first: RoutingTrace, second: RoutingTrace) -> RoutingTrace:
    """The routes of `first` at tokens of which it knows any route, else those of `second`."""
    known = first.known.any(-1)

    def choose(name: str, theirs: Tensor) -> Tensor:
        return getattr(first, name).where(known.view(*known.shape, *(1,) * (theirs.dim() - 2)), theirs)

    return second.each(choose, ROUTED)
