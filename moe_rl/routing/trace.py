"""`RoutingTrace`: which experts every token of a batch used, at every site. Immutable, compact, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.file_mode import usual_mode
from moe_rl.routing.layout import Layout, Site
from moe_rl.routing.trace_checks import check_ids, require_rows

FORMAT = 2
"""Of files; 1 has neither `keep` nor `gates`, and is written where a trace has neither."""


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
    """Which weights routed, in the words of whoever recorded it."""
    keep: float = 0.0
    """Under replay an expert stays only where its live score is at least this share of the weakest live top-k score
    (`sources.soft`); at 0 it stays whatever its score."""
    gates: Float[Tensor, "batch time site k"] | None = None
    """Combine weights that replay forces with the ids, float32 (`sources.recall`); None: the live router's."""

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
            check_ids(ids, layout)
            if layout.dtype == torch.uint8 and ids.dtype != torch.uint8:
                ids = ids.masked_fill(ids < 0, layout.unknown)
        tokens = None if tokens is None else tokens.to(torch.int32)
        return RoutingTrace(ids.to(layout.dtype), attention_mask.bool(), layout, tokens, weight_version)

    @staticmethod
    def stack(
        traces: list[RoutingTrace], tokens: Integer[Tensor, "batch time"], attention_mask: Bool[Tensor, "batch time"]
    ) -> RoutingTrace:
        """One-row traces of unequal length as one right-padded trace over `tokens`.

        A trace may be shorter than its row (the last sampled token has no route); the rest is unknown. Raises
        RoutingError as `cat` does.
        """
        for b, trace in enumerate(traces):
            if trace.shape[0] != 1:
                raise RoutingError(f"trace {b} has {trace.shape[0]} rows; stack joins traces of one, cat of several.")
        return RoutingTrace.cat(traces, tokens, attention_mask)

    @staticmethod
    def cat(
        traces: Sequence[RoutingTrace],
        tokens: Integer[Tensor, "batch time"],
        attention_mask: Bool[Tensor, "batch time"],
    ) -> RoutingTrace:
        """Right-padded traces of consecutive rows, micro-batches say, as one trace over `tokens`, on its device.

        Columns that a trace lacks are unknown. Raises RoutingError for traces of other tokens (padding aside), of more
        columns or another number of rows than the batch, of two weight versions, of two models, and for traces that are
        replayed by different rules.
        """
        layout, row = traces[0].layout, 0
        for number, trace in enumerate(traces):
            require_rows(trace, number, traces[0], tokens[row : row + trace.shape[0]], row)
            row += trace.shape[0]
        if row != tokens.shape[0]:
            raise RoutingError(f"the traces have {row} rows, the batch has {tokens.shape[0]}.")

        def join(parts: list[Tensor], value: float) -> Tensor:
            wide = [nn.functional.pad(x, (0, 0, 0, 0, 0, tokens.shape[1] - x.shape[1]), value=value) for x in parts]
            return torch.cat(wide).to(tokens.device)

        gates = [t.gates for t in traces if t.gates is not None]
        return replace(
            traces[0],
            experts=join([t.experts for t in traces], layout.unknown),
            attention_mask=attention_mask,
            tokens=tokens.to(torch.int32),
            gates=join(gates, 0.0) if gates else None,
        )

    # ------------------------------------------------------------------ reading it
    @property
    def shape(self) -> torch.Size:
        """(batch, time, site, k)"""
        return self.experts.shape

    def ids(self) -> Integer[Tensor, "batch time site k"]:
        """Ids as int64, -1 where unknown."""
        ids = self.experts.long()
        return ids.masked_fill_(ids == self.layout.unknown, -1)

    @property
    def known(self) -> Bool[Tensor, "batch time site"]:
        return self.experts[..., 0] != self.layout.unknown

    @property
    def coverage(self) -> float:
        """Share of (token, site) pairs whose route is known; padding does not count."""
        tokens = int(self.attention_mask.sum()) * len(self.layout.sites)
        return int((self.known & self.attention_mask[..., None]).sum()) / tokens if tokens else float("nan")

    def require_known(self) -> None:
        """Raise unless some token's route is known."""
        if not bool((self.known & self.attention_mask[..., None]).any()):
            raise RoutingError(
                "the trace holds no known route, so replay would do nothing. For live routing replay None; where it is "
                "a part of a trace that does know some, say replay_routing(model, trace, part=True)."
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
        extra = [f"weights {self.weight_version}"] * (self.weight_version is not None) + \
            [f"keep {self.keep:g}"] * bool(self.keep) + ["gates"] * (self.gates is not None)
        return (f"RoutingTrace({batch} × {time} tokens, {sites} sites, top {k} of "
                f"{max(site.num_experts for site in self.layout.sites)}, {self.coverage:.1%} known"
                f"{''.join(f', {e}' for e in extra)}, {self.experts.dtype}, {self.experts.device})")

    __hash__ = None  # type: ignore[assignment]  # equal traces would need equal hashes of all they hold

    def same_sets(self, other: RoutingTrace) -> Bool[Tensor, "batch time site"]:
        """Where both chose the same experts, in whatever order; unknown equals unknown only, so that padding is the
        same everywhere: for a share, see `agreement`."""
        self.layout.require(other.layout, "the other trace")
        theirs = other.experts.to(self.experts.device)
        return (self.experts.sort(-1).values == theirs.sort(-1).values).all(-1)

    def agreement(self, other: RoutingTrace) -> float:
        """Share of (token, site) pairs at which both chose the same experts, in whatever order, of those whose route
        both know; padding does not count. NaN where there is no such pair."""
        same, other = self.same_sets(other), other.to(self.experts.device)
        both = self.known & other.known & (self.attention_mask & other.attention_mask)[..., None]
        return same[both].double().mean().item()

    # ------------------------------------------------------------------ cutting it
    def rows(self, index: Int[Tensor, " rows"] | slice, time: int | None = None) -> RoutingTrace:
        """The given rows and their first `time` columns."""
        return self._each(lambda x: x[index][:, :time])

    def only(self, where: Bool[Tensor, "batch time site"]) -> RoutingTrace:
        """Without the routes of other (token, site) pairs than those of `where`: replay leaves these free."""
        return replace(self, experts=self.experts.masked_fill(~where[..., None], self.layout.unknown))

    def align(self, attention_mask: Bool[Tensor, "batch time"]) -> RoutingTrace:
        """The same routes under another padding: token i of a row moves to the i-th True of `attention_mask`."""
        attention_mask = attention_mask.bool().to(self.experts.device)
        mine, theirs = self.attention_mask.sum(1), attention_mask.sum(1)
        if not torch.equal(mine, theirs):
            raise RoutingError(f"cannot align: rows of the trace hold {mine.tolist()} tokens, rows of the mask "
                               f"{theirs.tolist()}.")
        moved = self._each(lambda x: _unpacked(x[self.attention_mask], attention_mask))
        experts = _unpacked(self.experts[self.attention_mask], attention_mask, self.layout.unknown)
        return replace(moved, experts=experts, attention_mask=attention_mask)

    def to(self, device: torch.device | str) -> RoutingTrace:
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> RoutingTrace:
        """The same change to everything that has rows and columns."""
        tokens, gates = (None if x is None else change(x) for x in (self.tokens, self.gates))
        mask = change(self.attention_mask)
        return replace(self, experts=change(self.experts), attention_mask=mask, tokens=tokens, gates=gates)

    # ------------------------------------------------------------------ keeping it
    def save(self, path: str | Path, beside: Mapping[str, Tensor] | None = None) -> None:
        """Write a safetensors file: ids and tokens of real tokens only, packed; everything else in the header.

        `beside` are tensors [batch, time, …] of the same forward (gates, margins), packed alike, which the trace itself
        does not hold; `load_beside` reads them, `load` and replay ignore them.
        """
        from safetensors.torch import save_file

        mask = self.attention_mask
        tensors = {f"beside.{name}": x[mask].cpu().contiguous() for name, x in (beside or {}).items()}
        tensors |= {"experts": self.experts[mask].cpu().contiguous(), "attention_mask": mask.cpu().contiguous()}
        if self.tokens is not None:
            tensors["tokens"] = self.tokens[mask].cpu().contiguous()
        if self.gates is not None:
            tensors["gates"] = self.gates[mask].cpu().contiguous()
        header = {
            "moe_rl_trace": str(FORMAT if self.keep or self.gates is not None else 1),
            "layout": json.dumps(asdict(self.layout)),
            "weight_version": json.dumps(self.weight_version),
        } | ({"keep": json.dumps(self.keep)} if self.keep else {})
        save_file(tensors, str(path), metadata=header)
        usual_mode(Path(path))

    @staticmethod
    def load(path: str | Path) -> RoutingTrace:
        """Read what `save` wrote. Raises RoutingError for a missing, foreign, corrupted or newer file."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise RoutingError(f"no trace file at {path}.")
        try:
            with safe_open(str(path), "pt") as file:
                header = file.metadata() or {}
                if "moe_rl_trace" not in header:
                    raise RoutingError(f"{path} is a safetensors file, but not a routing trace of moe_rl.")
                if int(header["moe_rl_trace"]) > FORMAT:
                    raise RoutingError(
                        f"{path} has trace format {header['moe_rl_trace']}; this version reads up to {FORMAT}: "
                        "upgrade moe_rl."
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            raw = json.loads(header["layout"])
            layout = Layout(tuple(Site(**site) for site in raw["sites"]), raw["architecture"])
            mask = tensors["attention_mask"]
            experts = _unpacked(tensors["experts"].to(layout.dtype), mask, layout.unknown)
            tokens = _unpacked(tensors["tokens"].to(torch.int32), mask) if "tokens" in tensors else None
            gates = _unpacked(tensors["gates"], mask) if "gates" in tensors else None
            keep = json.loads(header.get("keep", "0.0"))
            check_ids(experts, layout)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError, OSError) as error:
            if isinstance(error, RoutingError) and "trace" in str(error):
                raise
            raise RoutingError(f"{path} is not a readable routing trace ({error}); record it again.") from error
        return RoutingTrace(experts, mask, layout, tokens, json.loads(header["weight_version"]), keep, gates)

    @staticmethod
    def load_beside(path: str | Path) -> dict[str, Tensor]:
        """What a file holds beside its trace, padded with zeros; empty for a trace saved alone."""
        from safetensors import safe_open

        with safe_open(str(path), "pt") as file:
            mask = file.get_tensor("attention_mask")
            return {key.removeprefix("beside."): _unpacked(file.get_tensor(key), mask)
                    for key in file.keys() if key.startswith("beside.")}  # noqa: SIM118


def _unpacked(packed: Tensor, mask: Bool[Tensor, "batch time"], fill: int = 0) -> Tensor:
    """What stands at the tokens of `mask`, row by row, as [batch, time, …]; `fill` at padding."""
    whole = packed.new_full((*mask.shape, *packed.shape[1:]), fill)
    whole[mask] = packed
    return whole
