"""Files of traces: safetensors, ids of real tokens only, with sums; whole, or mapped and read in part.

Bytes: tokens × sites × k of ids up to 256 experts, twice that beyond; at exactly 256, where a byte has no value left
for an unknown row, also a bit per token and site; 4 per token of its id; 1 per position of the padded batch.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from moe_rl.errors import RoutingError, raise_os_errors
from moe_rl.routing.layout import Layout, Site
from moe_rl.routing.trace_checks import check_gates, check_ids, check_layout

if TYPE_CHECKING:
    from moe_rl.routing.trace import RoutingTrace

FORMAT = 3
"""1 and 2 have no sums, and one weight version; they are read, and no longer written."""
ALL = slice(None)
LARGEST, PER_BYTE = 1 << 30, 256
"""A file may unpack to so many bytes, or to so many times its own."""
NUMPY = {"U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16", "F32": "float32",
         "BOOL": "bool"}


# ---------------------------------------------------------------------- writing
def save(trace: RoutingTrace, path: str | Path, beside: Mapping[str, Tensor] | None) -> None:
    """See `RoutingTrace.save`. Raises RoutingError for a weight version that is no text, which could not be read."""
    from safetensors.torch import save_file

    if odd := [name for name in (trace.weight_version, *trace.versions) if not isinstance(name, str | None)]:
        raise RoutingError(f"a weight version is of type {type(odd[0]).__name__}, {odd[0]!r}: name it in text.")
    mask = trace.attention_mask
    tensors = {f"beside.{name}": x[mask] for name, x in (beside or {}).items()}
    tensors |= {"attention_mask": mask, "experts": trace.experts[mask]}
    tensors |= {name: x[mask] for name in ("tokens", "gates") if (x := getattr(trace, name)) is not None}
    if _a_byte_without_a_mark(trace.layout):
        known = trace.known[mask].cpu().numpy()
        tensors |= {"experts": tensors["experts"].clamp(min=0).to(torch.uint8),
                    "known": torch.from_numpy(np.packbits(known, axis=1))}
    if trace.version_index is not None:
        values, counts = trace.version_index[mask].unique_consecutive(return_counts=True)
        tensors["segments"] = torch.stack([counts.cumsum(0) - counts, values.long()], 1)
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    header = {
        "moe_rl_trace": str(FORMAT),
        "layout": json.dumps(asdict(trace.layout)),
        "weight_version": json.dumps(trace.weight_version),
        "versions": json.dumps(trace.versions),
        "keep": json.dumps(trace.keep),
        "sums": json.dumps({name: _sum(name, x) for name, x in tensors.items()}),
    }
    with raise_os_errors(Path(path)):
        save_file(tensors, path, metadata=header | {"sum": _header_sum(header)})


def _a_byte_without_a_mark(layout: Layout) -> bool:
    return max(site.num_experts for site in layout.sites) == 256


def _sum(name: str, x: Tensor) -> int:
    what = f"{name} {x.dtype} {list(x.shape)}".encode()
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(what))


def _header_sum(header: Mapping[str, str]) -> str:
    return str(zlib.crc32(json.dumps(sorted((k, v) for k, v in header.items() if k != "sum")).encode()))


# ---------------------------------------------------------------------- reading
def load(path: str | Path, rows: slice = ALL, columns: slice = ALL, sites: slice = ALL) -> dict[str, Any]:
    """The fields of a trace; see `RoutingTrace.load`."""
    if any(part.step not in (None, 1) for part in (rows, columns, sites)):
        raise RoutingError(f"rows={rows}, columns={columns}, sites={sites}: parts of a file are read without a step.")
    with _opened(path) as file:
        return file.fields(rows, columns, sites)


def load_beside(path: str | Path) -> dict[str, Tensor]:
    """See `RoutingTrace.load_beside`."""
    with _opened(path) as file:
        mask = file.tensor("attention_mask", (torch.bool,))
        return {name.removeprefix("beside."): unpacked(file.whole(name), mask)
                for name in file.names if name.startswith("beside.")}


@contextmanager
def _opened(path: str | Path) -> Iterator[TraceFile]:
    """The file, while it is read. Raises RoutingError, with its name, whatever is wrong with it."""
    from safetensors import SafetensorError

    if not Path(path).is_file():
        raise RoutingError(f"no trace file at {path}.")
    try:
        with TraceFile(path) as file:
            yield file
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError, OSError, OverflowError,
            RecursionError, AttributeError) as error:
        if isinstance(error, RoutingError) and str(path) in str(error):
            raise
        raise RoutingError(f"{path} is not a readable routing trace ({error}); record it again.") from error


class TraceFile:
    """An open file, of which tensors are read and held against their sums."""

    def __init__(self, path: str | Path):
        from safetensors import safe_open

        self.path, self.opened = path, safe_open(str(path), "pt")

    def __enter__(self) -> TraceFile:
        self.opened.__enter__()
        self.names = set(self.opened.keys())
        self.header: dict[str, str] = self.opened.metadata() or {}
        if "moe_rl_trace" not in self.header:
            raise RoutingError(f"{self.path} is a safetensors file, but not a routing trace of moe_rl.")
        if (version := int(self.header["moe_rl_trace"])) > FORMAT:
            raise RoutingError(f"{self.path} has trace format {version}; this version reads up to {FORMAT}: upgrade "
                               "moe_rl.")
        summed = version > 2 or "sum" in self.header
        if version < 1 or summed and self.header["sum"] != _header_sum(self.header):
            raise RoutingError("its header is not the one that was written")
        self.sums: dict[str, int] = json.loads(self.header["sums"]) if summed else {}
        if summed and set(self.sums) != self.names:
            raise RoutingError(f"it holds {sorted(self.names)}, but was written with {sorted(self.sums)}")
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)

    def tensor(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None,
               part: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor of one of these dtypes and, where it is told, of this shape; whole and summed, or in part."""
        found = self.opened.get_slice(name)
        dtype = getattr(torch, NUMPY.get(found.get_dtype(), found.get_dtype()), None)
        if dtype not in dtypes or shape not in (None, tuple(found.get_shape())):
            raise RoutingError(f"{name} is {found.get_dtype()} {found.get_shape()}; expected {dtypes} {shape}")
        return self.whole(name) if part is None else found[part]

    def whole(self, name: str) -> Tensor:
        """A tensor of any form, summed."""
        whole = self.opened.get_tensor(name)
        if self.sums and self.sums[name] != _sum(name, whole):
            raise RoutingError(f"{name} does not have the sum it was written with")
        return whole

    def fields(self, rows: slice, columns: slice, sites: slice) -> dict[str, Any]:
        """Those of a trace, of some rows, columns and sites."""
        raw = json.loads(self.header["layout"])
        layout = Layout(tuple(Site(**site) for site in raw["sites"]), raw["architecture"])
        check_layout(layout)
        mask = self.tensor("attention_mask", (torch.bool,))
        chosen = _spans(mask, rows, columns)
        n, whole = int(mask.sum()), all(part == ALL for part in (rows, columns, sites))
        inner, shape = mask[rows, columns], (n, len(layout.sites), layout.top_k)
        part = Layout(layout.sites[sites], layout.architecture)
        if not part.sites:
            raise RoutingError(f"sites={sites}: there are {len(layout.sites)}")
        gated = "gates" in self.names
        size = inner.numel() * len(part.sites) * layout.top_k * (layout.dtype.itemsize + 4 * gated)
        if size > max(LARGEST, PER_BYTE * Path(self.path).stat().st_size):
            raise RoutingError(f"{self.path} would unpack to {size:,} bytes, {inner.numel():,} padded positions of "
                               f"{n:,} tokens: load it in parts, by rows, columns or sites.")

        def read(name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], *more: slice) -> Tensor:
            if whole:
                return self.tensor(name, dtypes, shape)
            pieces = [self.tensor(name, dtypes, shape, (span, *more)) for span in chosen]
            return torch.cat(pieces) if pieces else self.tensor(name, dtypes, shape, (slice(0, 0), *more))

        narrow = _a_byte_without_a_mark(layout) and "known" in self.names
        experts = read("experts", (torch.uint8 if narrow else layout.dtype,), shape, sites).to(layout.dtype)
        if narrow:
            bits = read("known", (torch.uint8,), (n, -(-len(layout.sites) // 8))).numpy()
            known = np.unpackbits(bits, axis=1, count=len(layout.sites)).astype(bool)[:, sites]
            used = torch.arange(layout.top_k) < torch.tensor([[site.top_k] for site in part.sites])
            experts = experts.masked_fill(~(torch.from_numpy(known)[..., None] & used), layout.unknown)
        experts = unpacked(experts, inner, layout.unknown)
        if (part.dtype, part.top_k) != (layout.dtype, layout.top_k):
            unknown = (experts == layout.unknown)[..., : part.top_k]
            experts = experts[..., : part.top_k].to(part.dtype).masked_fill(unknown, part.unknown)
        check_ids(experts, part)
        for s, site in enumerate(part.sites):
            if bool((experts[:, :, s, site.top_k :] != part.unknown).any()):
                raise RoutingError(f"{site.name} uses {site.top_k} slots, but others hold ids too")
        tokens = unpacked(read("tokens", (torch.int32,), (n,)), inner) if "tokens" in self.names else None
        gates = None
        if gated:
            gates = read("gates", (torch.float32, torch.float16), shape, sites)
            gates = unpacked(gates, inner)[..., : part.top_k]
            check_gates(gates, experts[..., 0] != part.unknown, part)
        keep = json.loads(self.header.get("keep", "0.0"))
        if not (isinstance(keep, float | int) and math.isfinite(keep) and keep >= 0):
            raise RoutingError(f"keep is {keep!r}")
        named = json.loads(self.header["weight_version"]), tuple(json.loads(self.header.get("versions", "[]")))
        if not all(name is None or isinstance(name, str) for name in (named[0], *named[1])):
            raise RoutingError(f"the weight versions are {named}")
        index = None
        if named[1]:
            runs = self.tensor("segments", (torch.int64,))
            index = unpacked(_index(runs, n, len(named[1])), mask, -1)[rows, columns]
        return {"experts": experts, "attention_mask": inner, "layout": part, "tokens": tokens, "keep": keep,
                "gates": gates, "weight_version": named[0], "versions": named[1], "version_index": index}


def _spans(mask: Bool[Tensor, "batch time"], rows: slice, columns: slice) -> list[slice]:
    """Where the tokens of a part are among the packed ones, as few pieces as there can be."""
    if mask.dim() != 2:
        raise RoutingError(f"the padding has shape {tuple(mask.shape)}, expected [batch, time]")
    at = (mask.flatten().cumsum(0) - 1).view_as(mask)[rows, columns][mask[rows, columns]]
    breaks = ((at[1:] - at[:-1]) != 1).nonzero()[:, 0] + 1
    edges = [0, *breaks.tolist(), len(at)]
    return [slice(int(at[a]), int(at[b - 1]) + 1) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]


def _index(runs: Tensor, n: int, versions: int) -> Tensor:
    """Run lengths as the version of every token."""
    starts, values = runs.unbind(1)
    ends = torch.cat([starts[1:], starts.new_tensor([n])])
    if len(starts) == 0 and n or bool((starts[:1] != 0).any()) or bool((ends <= starts).any()) \
            or bool(((values < -1) | (values >= versions)).any()):
        raise RoutingError(f"the segments {runs.tolist()[:4]} … do not cover {n} tokens of {versions} versions")
    return values.short().repeat_interleave(ends - starts)


def unpacked(packed: Tensor, mask: Bool[Tensor, "batch time"], fill: int = 0) -> Tensor:
    """What stands at the tokens of `mask`, row by row, as [batch, time, …]; `fill` at padding."""
    whole = packed.new_full((*mask.shape, *packed.shape[1:]), fill)
    whole[mask] = packed
    return whole
