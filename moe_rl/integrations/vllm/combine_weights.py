"""Combine weights as engines and trainers report them beside expert ids."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.errors import RoutingError
from moe_rl.routing.trace import RoutingTrace

NORMAL = 1 << 23
"""The bits of the smallest normal float32; ids are smaller."""


def is_packed(array: NDArray, k: int) -> bool:
    """Whether ids [rows, layers, 2k] are those of prime-rl's Total Router Recall (pull request 3523): k ids, then the
    bits of k float32 weights, all as int32."""
    return array.ndim == 3 and array.shape[2] == 2 * k and array.size > 0 and int(array[..., k:].max()) >= NORMAL


def unpacked_weights(array: Integer[NDArray, "rows layers two_k"]) -> tuple[NDArray, NDArray]:
    """Ids and weights of what `is_packed`; 0 where an id is -1. Raises RoutingError for what is no weight."""
    ids, bits = np.split(array, 2, axis=2)
    if (bits != bits.astype(np.int32)).any():
        raise RoutingError("the second half of the ids holds combine weights, but some are no bits of a float32.")
    weights = np.where(ids < 0, np.float32(0), bits.astype(np.int32).view(np.float32))  # -1 is the bits of a NaN
    if not np.isfinite(weights).all():
        raise RoutingError("the second half of the ids holds combine weights some NaN or infinite; expected finite.")
    return ids, weights


def reported_weights(payload: Any, shape: Sequence[int], start: int = 0) -> Float[NDArray, "rows layers k"]:
    """Weights of a payload of their own, of ids of this `shape`: an array, nested lists, or {"data": base64, "dtype":
    "float32"}. Rows may begin at `start`, those before it then weigh 0; a row more, of the last token, is dropped.
    Raises RoutingError for whatever does not fit."""
    rows, inner = shape[0], tuple(shape[1:])
    try:
        if isinstance(payload, Mapping):
            dtype = np.dtype(str(payload.get("dtype", "float32"))).newbyteorder("<")
            if dtype.kind != "f":
                raise ValueError(f"they are {dtype}")
            values = np.frombuffer(base64.b64decode(payload["data"], validate=True), dtype)
            values = values.reshape(values.size // max(1, inner[0] * inner[1]), *inner).astype(np.float32)
        else:
            values = np.asarray(payload.cpu() if isinstance(payload, torch.Tensor) else payload, dtype=np.float32)
        if values.shape[1:] != inner or len(values) not in (rows - start, rows, rows + 1):
            raise ValueError(f"they have shape {values.shape}")
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise RoutingError(f"gates do not fit the ids ({error}); expected a weight for each, {list(shape)}.") from error
    if not np.isfinite(values).all():
        raise RoutingError("gates hold NaN or infinite weights.")
    return np.concatenate([np.zeros((max(0, rows - len(values)), *inner), np.float32), values[:rows]])


def with_weights(trace: RoutingTrace, weights: Float[NDArray, "batch time site k"]) -> RoutingTrace:
    """The trace with these combine weights, which replay then forces with its ids; 0 where nothing is known."""
    slots = trace.experts != trace.layout.unknown
    gates = torch.from_numpy(np.ascontiguousarray(weights))
    trace.layout.check_gates(gates, trace.known)
    return replace(trace, gates=gates.where(slots, 0))
