"""Files of traces: safetensors, ids of real tokens only, with checksums; read whole, or mapped and read in part.

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
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from moe_rl.errors import RoutingError, raise_os_errors
from moe_rl.routing.sites import Layout, Site

FORMAT = 3
ALL = slice(None)
LARGEST, PER_BYTE = 1 << 30, 256
"""A file may unpack to so many bytes, or to so many times its own."""


# ---------------------------------------------------------------------- writing
def write_fields(fields: Mapping[str, Any], path: str | Path, beside: Mapping[str, Tensor] | None) -> None:
    """Write the fields of a trace; see `RoutingTrace.save`. Raises RoutingError for a weight version that is no text,
    which could not be read."""
    from safetensors.torch import save_file

    layout, mask, experts = fields["layout"], fields["attention_mask"], fields["experts"]
    if odd := [v for v in (fields["weight_version"], *fields["versions"]) if not isinstance(v, str | None)]:
        raise RoutingError(f"a weight version has type {type(odd[0]).__name__}: {odd[0]!r}. Use a text.")
    tensors = {f"beside.{name}": x[mask] for name, x in (beside or {}).items()}
    tensors |= {"attention_mask": mask, "experts": experts[mask]}
    tensors |= {name: fields[name][mask] for name in ("tokens", "gates") if fields[name] is not None}
    if _needs_known_bits(layout):
        known = (experts[..., 0] != layout.unknown)[mask].cpu().numpy()
        tensors |= {"experts": tensors["experts"].clamp(min=0).to(torch.uint8),
                    "known": torch.from_numpy(np.packbits(known, axis=1))}
    if fields["version_index"] is not None:
        values, counts = fields["version_index"][mask].unique_consecutive(return_counts=True)
        tensors["segments"] = torch.stack([counts.cumsum(0) - counts, values.long()], 1)
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    header = {"moe_rl_trace": str(FORMAT), "layout": json.dumps(asdict(layout))}
    header |= {name: json.dumps(fields[name]) for name in ("weight_version", "versions", "keep")}
    header["sums"] = json.dumps({name: _sum(name, x) for name, x in tensors.items()})
    with raise_os_errors(Path(path)):
        save_file(tensors, path, metadata=header | {"sum": _header_sum(header)})


def _needs_known_bits(layout: Layout) -> bool:
    """Whether ids fit a byte, but leave no value of it for an unknown row."""
    return max(site.num_experts for site in layout.sites) == 256


def _sum(name: str, x: Tensor) -> int:
    what = f"{name} {x.dtype} {list(x.shape)}".encode()
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(what))


def _header_sum(header: Mapping[str, str]) -> str:
    return str(zlib.crc32(json.dumps(sorted((k, v) for k, v in header.items() if k != "sum")).encode()))


# ---------------------------------------------------------------------- reading
def read_fields(path: str | Path, rows: slice, columns: slice, sites: slice) -> dict[str, Any]:
    """The fields of a trace; see `RoutingTrace.load`."""
    if any(part.step not in (None, 1) for part in (rows, columns, sites)):
        raise RoutingError(f"rows={rows}, columns={columns}, sites={sites}: slices with a step are not supported")
    with _opened(path) as file:
        return file.fields(rows, columns, sites)


def read_beside(path: str | Path) -> dict[str, Tensor]:
    """See `RoutingTrace.load_beside`."""
    with _opened(path) as file:
        mask, packed = file.tensor("attention_mask", (torch.bool,)), {}
        for name in (n for n in file.names if n.startswith("beside.")):
            packed[name.removeprefix("beside.")] = found = file.whole(name)
            file.check_size(mask.numel() * math.prod(found.shape[1:]) * found.itemsize)
        return {name: unpacked(found, mask) for name, found in packed.items()}


@contextmanager
def _opened(path: str | Path) -> Iterator[TraceFile]:
    """The file, while it is read. Raises RoutingError, with its name, whatever is wrong with it."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise RoutingError(f"no trace file at {path}.")
    try:
        with safe_open(str(path), "pt") as opened:
            yield TraceFile(path, opened)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IndexError, OSError, OverflowError,
            RecursionError, AttributeError) as error:
        if isinstance(error, RoutingError) and str(path) in str(error):
            raise
        raise RoutingError(f"{path} is not a readable routing trace ({error}). Record it again.") from error


class TraceFile:
    """An open file, whose tensors are read and compared with their checksums."""

    def __init__(self, path: str | Path, opened: Any):
        self.path, self.opened, self.names = path, opened, set(opened.keys())
        self.header: dict[str, str] = opened.metadata() or {}
        if "moe_rl_trace" not in self.header:
            raise RoutingError(f"{path} is a safetensors file, but not a routing trace of moe_rl.")
        version = int(self.header["moe_rl_trace"])
        if version > FORMAT:
            raise RoutingError(f"{path} has trace format {version}, but this version reads {FORMAT}. Upgrade moe_rl.")
        if version in (1, 2):
            raise RoutingError(f"{path} has trace format {version} of an earlier version. Read it with moe_rl 0.1.0.")
        if version < 1 or self.header["sum"] != _header_sum(self.header):
            raise RoutingError("its header was changed")
        self.sums: dict[str, int] = json.loads(self.header["sums"])
        if set(self.sums) != self.names:
            raise RoutingError(f"it contains {sorted(self.names)}, but was written with {sorted(self.sums)}")

    def check_size(self, size: int) -> None:
        """Raise RoutingError for more bytes than a file of this size may unpack to."""
        if size > max(LARGEST, PER_BYTE * Path(self.path).stat().st_size):
            raise RoutingError(f"{self.path} needs {size:,} bytes, since most of its positions are padding. Load it "
                               "in parts, by rows, columns or sites.")

    def tensor(self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None,
               part: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor of one of these dtypes and, where it is given, of this shape: whole and checked, or a part."""
        stored = self.opened.get_slice(name)
        found = self.whole(name) if part is None else stored[part]
        if found.dtype not in dtypes or shape not in (None, tuple(stored.get_shape())):
            raise RoutingError(f"{name} is {found.dtype} {stored.get_shape()}; expected {dtypes} {shape}")
        return found

    def whole(self, name: str) -> Tensor:
        """A tensor of any form, checked."""
        whole = self.opened.get_tensor(name)
        if self.sums[name] != _sum(name, whole):
            raise RoutingError(f"{name} has another checksum than when it was written")
        return whole

    def fields(self, rows: slice, columns: slice, sites: slice) -> dict[str, Any]:
        """The fields of a trace, of some rows, columns and sites."""
        raw = json.loads(self.header["layout"])
        layout = Layout(tuple(Site(**site) for site in raw["sites"]), raw["architecture"])
        layout.check()
        part = Layout(layout.sites[sites], layout.architecture)
        if not part.sites:
            raise RoutingError(f"sites={sites}: the trace has {len(layout.sites)} MoE layers")
        mask = self.tensor("attention_mask", (torch.bool,))
        inner, n, shape = mask[rows, columns], int(mask.sum()), (len(layout.sites), layout.top_k)
        chosen = None if rows == columns == sites == ALL else _spans(mask, rows, columns)
        size = inner.numel() * len(part.sites) * layout.top_k * (layout.dtype.itemsize + 4 * ("gates" in self.names))
        self.check_size(size)

        def read(name: str, dtypes: tuple[torch.dtype, ...], *shape: int, of: tuple[slice, ...] = ()) -> Tensor:
            """A tensor with one row per token: the rows of the chosen tokens."""
            if chosen is None:
                return self.tensor(name, dtypes, (n, *shape))
            pieces = [self.tensor(name, dtypes, (n, *shape), (span, *of)) for span in chosen]
            return torch.cat(pieces)

        if _needs_known_bits(layout) and "known" in self.names:
            bits = read("known", (torch.uint8,), -(-len(layout.sites) // 8)).numpy()
            known = np.unpackbits(bits, axis=1, count=len(layout.sites)).astype(bool)[:, sites]
            used = torch.arange(layout.top_k) < torch.tensor([[site.top_k] for site in part.sites])
            experts = read("experts", (torch.uint8,), *shape, of=(sites,)).to(layout.dtype)
            experts = experts.masked_fill(~(torch.from_numpy(known)[..., None] & used), layout.unknown)
        else:
            experts = read("experts", (layout.dtype,), *shape, of=(sites,))
        experts = _as_stored_by(part, unpacked(experts, inner, layout.unknown), layout)
        gates = None
        if "gates" in self.names:
            gates = unpacked(read("gates", (torch.float32, torch.float16), *shape, of=(sites,)), inner)
            gates = gates[..., : part.top_k]
            part.check_gates(gates, experts[..., 0] != part.unknown)
        tokens = unpacked(read("tokens", (torch.int32,)), inner) if "tokens" in self.names else None
        return {"experts": experts, "attention_mask": inner, "layout": part, "tokens": tokens, "gates": gates,
                "keep": self._keep(), **self._versions(mask, rows, columns)}

    def _keep(self) -> float:
        keep = json.loads(self.header["keep"])
        if not (isinstance(keep, float | int) and math.isfinite(keep) and keep >= 0):
            raise RoutingError(f"keep is {keep!r}")
        return keep

    def _versions(self, mask: Bool[Tensor, "batch time"], rows: slice, columns: slice) -> dict[str, Any]:
        """The weight versions, and which one routed each token: stored as the first token of each run of tokens."""
        one, several = json.loads(self.header["weight_version"]), tuple(json.loads(self.header["versions"]))
        if not all(name is None or isinstance(name, str) for name in (one, *several)):
            raise RoutingError(f"the weight versions are {(one, several)}")
        index = None
        if several:
            starts, values = self.tensor("segments", (torch.int64,)).unbind(1)
            n = int(mask.sum())
            ends = torch.cat([starts[1:], starts.new_tensor([n])])
            if len(starts) == 0 and n or bool((starts[:1] != 0).any()) or bool((ends <= starts).any()) \
                    or bool(((values < -1) | (values >= len(several))).any()):
                raise RoutingError(f"the segments {values.tolist()[:4]} … from {starts.tolist()[:4]} … do not cover "
                                   f"{n} tokens of {len(several)} versions")
            index = unpacked(values.short().repeat_interleave(ends - starts), mask, -1)[rows, columns]
        return {"weight_version": one, "versions": several, "version_index": index}


def _as_stored_by(part: Layout, experts: Tensor, whole: Layout) -> Tensor:
    """Ids of a file with the layout `whole`, in the width and dtype of the layout of a part; checked."""
    if (part.dtype, part.top_k) != (whole.dtype, whole.top_k):
        experts = experts[..., : part.top_k]
        experts = experts.to(part.dtype).masked_fill(experts == whole.unknown, part.unknown)
    part.check_ids(experts)
    for s, site in enumerate(part.sites):
        if bool((experts[:, :, s, site.top_k :] != part.unknown).any()):
            raise RoutingError(f"{site.name} uses {site.top_k} slots, but other slots contain ids too")
    return experts


def _spans(mask: Bool[Tensor, "batch time"], rows: slice, columns: slice) -> list[slice]:
    """Where the tokens of a part are among the packed ones, as few pieces as there can be, at least one."""
    at = (mask.flatten().cumsum(0) - 1).view_as(mask)[rows, columns][mask[rows, columns]]
    breaks = ((at[1:] - at[:-1]) != 1).nonzero()[:, 0] + 1
    edges = [0, *breaks.tolist(), len(at)]
    spans = [slice(int(at[a]), int(at[b - 1]) + 1) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a]
    return spans or [slice(0, 0)]


def unpacked(packed: Tensor, mask: Bool[Tensor, "batch time"], fill: int = 0) -> Tensor:
    """What stands at the tokens of `mask`, row by row, as [batch, time, …]; `fill` at padding."""
    whole = packed.new_full((*mask.shape, *packed.shape[1:]), fill)
    whole[mask] = packed
    return whole
