"""Files of traces: safetensors, ids of real tokens only, with checksums.

Bytes: tokens × MoE layers × k of ids up to 255 experts, twice that beyond; 4 per token of its id; 1 per position of the
padded batch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from moe_rl.errors import RoutingError
from moe_rl.routing.moe_layers import Layout, MoeLayer

FORMAT = "3"
PACKED = ("experts", "tokens", "gates")
"""Fields of which a file holds the rows of real tokens alone."""


# ---------------------------------------------------------------------- writing
def write_fields(fields: Mapping[str, Any], path: str | Path, beside: Mapping[str, Tensor] | None) -> None:
    """Write the fields of a trace; see `RoutingTrace.save`."""
    from safetensors.torch import save_file

    mask = fields["attention_mask"]
    tensors = {f"beside.{name}": x[mask] for name, x in (beside or {}).items()} | {"attention_mask": mask}
    tensors |= {name: fields[name][mask] for name in PACKED if fields[name] is not None}
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    header = {"moe_rl_trace": FORMAT, "layout": json.dumps(asdict(fields["layout"]))}
    header |= {name: json.dumps(fields[name]) for name in ("weight_version", "keep")}
    header["sums"] = json.dumps({name: _sum(name, x) for name, x in tensors.items()})
    save_file(tensors, path, metadata=header | {"sum": _header_sum(header)})


def _sum(name: str, x: Tensor) -> int:
    form = f"{name} {x.dtype} {list(x.shape)}".encode()
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(form))


def _header_sum(header: Mapping[str, str]) -> str:
    return str(zlib.crc32(json.dumps(sorted((k, v) for k, v in header.items() if k != "sum")).encode()))


# ---------------------------------------------------------------------- reading
def read_fields(path: str | Path) -> dict[str, Any]:
    """The fields of a trace; see `RoutingTrace.load`."""
    with _opened(path) as (header, tensors):
        raw = json.loads(header["layout"])
        layout = Layout(tuple(MoeLayer(**x) for x in raw.get("moe_layers") or raw["sites"]), raw["architecture"])
        mask = tensors["attention_mask"]
        fills = {"experts": layout.unknown}
        fields: dict[str, Any] = {
            name: unpacked(tensors[name], mask, fills.get(name, 0)) for name in PACKED if name in tensors
        }
        if fields["experts"].dtype != layout.dtype:  # 256 experts took a byte in earlier releases
            raise RoutingError(f"its ids have dtype {fields['experts'].dtype}, not {layout.dtype}")
        layout.check_ids(fields["experts"])
        if "gates" in fields:
            layout.check_gates(fields["gates"], fields["experts"][..., 0] != layout.unknown)
        fields |= {name: json.loads(header[name]) for name in ("weight_version", "keep")}
        return fields | {"attention_mask": mask, "layout": layout}


def read_beside(path: str | Path) -> dict[str, Tensor]:
    """See `RoutingTrace.load_beside`."""
    with _opened(path) as (_, tensors):
        mask = tensors["attention_mask"]
        names = [name for name in tensors if name.startswith("beside.")]
        return {name.removeprefix("beside."): unpacked(tensors[name], mask) for name in names}


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[dict[str, str], dict[str, Tensor]]]:
    """Header and tensors of a file. Raises RoutingError, with its name, for what is no trace, for another format, and
    for a byte that differs from what was written."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise RoutingError(f"no trace file at {path}.")
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            if header.get("moe_rl_trace") != FORMAT:
                raise RoutingError(f"it has trace format {header.get('moe_rl_trace')}, but this version reads {FORMAT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        sums = {name: _sum(name, x) for name, x in tensors.items()}
        if header.get("sum") != _header_sum(header) or json.loads(header["sums"]) != sums:
            raise RoutingError("it has another checksum than when it was written")
        yield header, tensors
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RoutingError(f"{path} is not a readable routing trace ({error}). Record it again.") from error


def unpacked(packed: Tensor, mask: Bool[Tensor, "batch time"], fill: int = 0) -> Tensor:
    """Rows of the tokens of `mask`, one after another, as [batch, time, …]; `fill` at padding."""
    padded = packed.new_full((*mask.shape, *packed.shape[1:]), fill)
    padded[mask] = packed
    return padded
