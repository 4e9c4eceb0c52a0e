"""Megatron-LM's router trace (`--moe-routing-trace-path`) → `RoutingTrace`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.errors import RoutingError
from moe_rl.integrations.vllm.payloads import checked_trace, integers, require_policy
from moe_rl.routing.trace import Layout, RoutingTrace

Forward = dict[int, tuple[int, NDArray]]
"""Layer → (line of the file, ids [tokens, k])."""


def read_megatron_trace(
    path: str | Path, layout: Layout, *, batch: int = 1, invalid: str = "raise"
) -> Iterator[RoutingTrace]:
    """Every forward in a `router_trace_rank<n>.jsonl` of Megatron-LM, one trace after another, with bounded memory.

    The file has no tokens and no lengths: rows are [time × batch], sequence-major, and `batch` is the number of
    sequences of a forward. Records of `block` "mtp" are skipped. Layers may be numbered absolutely, from 1
    (`layer_number`), or by position among the routing layers (`record_indices`). A layer that comes again starts the
    next forward. `invalid` as in `decode_routes`. Raises RoutingError, with the line, for anything else. Traces of a
    boolean routing map are in ascending order: Megatron has lost the order of selection.
    """
    require_policy(invalid)
    empty = True
    for forward in _forwards(Path(path)):
        empty = False
        moe_layers = _moe_layers(forward, layout, path)
        rows = len(moe_layers[0])
        if rows % batch or any(len(moe_layer) != rows for moe_layer in moe_layers):
            raise RoutingError(
                f"{path}: layers have {[len(s) for s in moe_layers]} rows; expected a multiple of batch={batch}"
            )
        k = layout.top_k
        ids = np.stack(
            [np.pad(moe_layer, ((0, 0), (0, k - moe_layer.shape[1])), constant_values=-1) for moe_layer in moe_layers],
            1,
        )
        yield checked_trace(ids.reshape(-1, batch, *ids.shape[1:]).swapaxes(0, 1), layout, invalid, None)
    if empty:
        raise RoutingError(f"{path} contains no decoder record. Expected one JSON object per (step, block, layer).")


def _forwards(path: Path) -> Iterator[Forward]:
    """Each forward in turn: a layer that comes again, or another step, starts the next."""
    forward: Forward = {}
    step = None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = _record(line, f"{path}, line {n}")
            if record["block"] != "decoder":
                continue
            if forward and (record["layer"] in forward or record["step"] != step):
                yield forward
                forward = {}
            step = record["step"]
            forward[record["layer"]] = n, record["top_indices"]
    if forward:
        yield forward


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        record["top_indices"] = integers(record["top_indices"])
        if not isinstance(record["layer"], int) or not {"block", "step"} <= record.keys():
            raise ValueError("no layer, block or step")
        if record["top_indices"].shape != (record["num_tokens"], record["topk"]):
            raise ValueError(f"indices have shape {record['top_indices'].shape}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RoutingError(
            f"{where} is not a record of a router trace ({error!r}). Expected step, block, layer, num_tokens, topk and "
            "top_indices [num_tokens, topk]."
        ) from error
    return record


def _moe_layers(forward: Forward, layout: Layout, path: str | Path) -> list[NDArray]:
    """The ids of each MoE layer, whichever way the layers are numbered."""
    layers = [moe_layer.decoder_layer for moe_layer in layout.moe_layers]
    for numbering in (layers, [layer + 1 for layer in layers], list(range(len(layers)))):
        if set(numbering) == set(forward):
            break
    else:
        line = min(n for n, _ in forward.values())
        raise RoutingError(
            f"{path}, forward from line {line}: layers {sorted(forward)}, but the MoE layers are "
            f"{layers}. Give the trace of all pipeline stages, and check that it is complete."
        )
    moe_layers = [forward[number][1] for number in numbering]
    for (n, ids), moe_layer in zip((forward[number] for number in numbering), layout.moe_layers, strict=True):
        if ids.shape[1] != moe_layer.top_k:
            raise RoutingError(
                f"{path}, line {n}: {ids.shape[1]} experts per token, but {moe_layer.name} uses {moe_layer.top_k}"
            )
    return moe_layers
