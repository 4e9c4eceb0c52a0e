"""Routes as inference engines report them → `RoutingTrace`: vLLM (three generations), SGLang, and what prime-rl and
NeMo-RL make of both.

Inference engines report ids [rows, layers, k]: row p holds the experts that were used when token p was the *input*, so
N tokens make N - 1 rows. Layers are counted absolutely, dense ones included and filled with zeros, or the dense ones
are left out. A row that says "no route" (-1 throughout, or 255 or 65535 where that is no id) becomes unknown. A row
that cannot be a route — all zero where k > 1, an id out of range, an expert twice — is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.errors import RoutingError
from moe_rl.routing.ids import blocks
from moe_rl.routing.sites import ALL_ZERO, MISSING, OUTSIDE, ROUTE, TWICE
from moe_rl.routing.trace import Layout, RoutingTrace

DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")
"""What a raw buffer may hold, little-endian."""
DATA_KEYS, DTYPE_KEYS = ("data", "routed_experts"), ("dtype", "routed_experts_dtype")
START_KEYS = ("start", "routed_experts_start_len")
NPY = b"\x93NUMPY"
NO_ROUTE = (-1, 255, 65535)
"""-1, also as unsigned dtypes carry it."""
NORMAL = 1 << 23
"""The bits of the smallest normal float32; ids are smaller."""


class RoutesRefused(UserWarning):
    """Rows of a payload were not routes and became unknown; the message counts them."""


def decode_routes(
    payload: Any,
    *,
    layout: Layout,
    tokens: Sequence[int],
    start: int = 0,
    dtype: str | None = None,
    num_layers: int | None = None,
    invalid: str = "raise",
    gates: Any = None,
) -> RoutingTrace:
    """The routes of one response, batch 1 and time N - 1, for the N `tokens` of prompt and completion.

    `payload` is what the engine handed over:

        vLLM      an array, tensor or nested list; the base64 of a .npy file; (prompt_rows, completion_rows)
        SGLang    the base64 of a flat buffer, whose `dtype` defaults to int32; or the whole `meta_info`
        prime-rl  {"data": base64, "shape": …, "dtype": …, "start": …}; with combine weights, either int32 and 2k wide,
                  or "format_version": 1 and "weights": {"data": base64, "dtype": "float32"} beside them
        NeMo-RL   "nrlre1:<dtype>:SxLxK:<base64>", ids alone

    `start` is the token that the first row belongs to, and those before it are unknown: rows must number N - 1 - start,
    or N - 1 or N from a server that ignored it (of N rows the last has no meaning and is dropped). `num_layers` is the
    model's number of decoder layers; without it, they are taken to end with the last layer that routes. Where a flat
    buffer fits more than one shape, all layers go before routing layers only, and N - 1 rows before N.

    `invalid="unknown"` turns rows that cannot be routes into unknown ones, with a `RoutesRefused` warning that counts
    them; `trace.coverage` is the share of known rows. Order within a row is kept, as the engine reports it (vLLM's is
    unsorted). Combine weights in the payload, or apart as `gates` (an array, nested lists, {"data": base64, "dtype":
    "float32"}, of the shape of the ids), become the trace's, which replay forces too. RoutingError: what does not fit.
    """
    require_policy(invalid)
    ids, start, weights = _reported(payload, layout, len(tokens), start, dtype, num_layers, False, gates)
    ids = _sites(ids, layout, num_layers)
    inputs = torch.from_numpy(np.fromiter(tokens, np.int64, len(tokens)))[None, :-1]
    trace = checked_trace(ids[None], layout, invalid, inputs, start)
    if weights is None:
        return trace
    layers = [site.decoder_layer for site in layout.sites]
    here = weights if weights.shape[1] != _layer_counts(layout, num_layers)[0] else weights[:, layers]
    return _with_weights(trace, here[None])


# ---------------------------------------------------------------------- payload → array
def reported_routes(
    payload: Any,
    *,
    layout: Layout,
    tokens: Sequence[int],
    start: int = 0,
    dtype: str | None = None,
    num_layers: int | None = None,
    any_k: bool = False,
    gates: Any = None,
) -> tuple[Integer[NDArray, "rows layers k"], Float[NDArray, "rows layers k"] | None]:
    """What `decode_routes` reads, before it is looked at: int64 ids of N - 1 rows, -1 before `start`, with the layers
    that the engine reports and as it numbers them, and their combine weights, if there are any. With `any_k` a payload
    that tells its shape may have another k than the model. Raises RoutingError for what has the shape of no routes of
    this model and these tokens."""
    ids, start, weights = _reported(payload, layout, len(tokens), start, dtype, num_layers, any_k, gates)
    return np.concatenate([np.full((start, *ids.shape[1:]), -1), ids.astype(np.int64)]), weights


def _reported(
    payload: Any, layout: Layout, tokens: int, start: int, dtype: str | None, num_layers: int | None, any_k: bool,
    gates: Any,
) -> tuple[Integer[NDArray, "rows layers k"], int, Float[NDArray, "all_rows layers k"] | None]:
    """Ids of the rows from a token on, as the engine has them, which token that is, and weights of all N - 1 rows."""
    if len({site.decoder_layer for site in layout.sites}) < len(layout.sites):
        raise RoutingError("the model has several MoE layers in one decoder layer, but engines report one per layer")
    array, start = _read(payload, start, dtype)
    if tokens < 2 or not 0 <= start < tokens:
        raise RoutingError(f"{tokens} tokens from start {start} have no routing rows. There is one row per input "
                           "token, so one less than tokens.")
    packed = _is_packed(array, layout.top_k)
    k = array.shape[2] if packed or any_k and array.ndim == 3 else layout.top_k
    array, start = _shaped(array, layout, tokens, start, num_layers, k)
    array = array[: tokens - 1 - start]
    beside = payload.get("weights") if isinstance(payload, Mapping) else None
    if packed + (gates is not None) + (beside is not None) > 1:
        raise RoutingError("gate weights were given twice: packed with the ids, and separately. Give them once.")
    if packed:
        array, weights = _unpacked_weights(array)
        return array, start, np.concatenate([np.zeros((start, *weights.shape[1:]), np.float32), weights])
    if gates is None and beside is None:
        return array, start, None
    return array, start, _reported_weights(beside if gates is None else gates, (tokens - 1, *array.shape[1:]), start)


def _read(payload: Any, start: int, dtype: str | None) -> tuple[NDArray, int]:
    """The numbers of a payload, flat if their shape is not told, and the start that goes with them."""
    if payload is None:
        raise RoutingError("the engine reported no routing (None). Start it with routing switched on; a preempted "
                           "request has none either.")
    if isinstance(payload, tuple) and len(payload) == 2:
        parts = [_read(part, 0, dtype)[0] for part in payload]
        if any(part.ndim != 3 or part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise RoutingError(f"prompt and completion routing have shapes {[p.shape for p in parts]}; expected [rows, "
                               "layers, k] twice, with equal layers and k")
        return np.concatenate(parts), start
    if isinstance(payload, Mapping):
        return _read_mapping(payload, start, dtype)
    if isinstance(payload, str) and payload.startswith("nrlre1:"):
        _, dtype, shape, payload = (payload.split(":", 3) + ["", "", ""])[:4]
        return _reshape(_read(payload, start, dtype)[0], shape.split("x")), start
    if isinstance(payload, str | bytes | bytearray):
        return _from_buffer(payload, "int32" if dtype is None else dtype), start
    return integers(payload), start


def _read_mapping(payload: Mapping[str, Any], start: int, dtype: str | None) -> tuple[NDArray, int]:
    data = _first(payload, DATA_KEYS)
    if data is None:
        raise RoutingError(f"a payload with the keys {sorted(map(str, payload))} has no routing; expected one of "
                           f"{', '.join(DATA_KEYS)}")
    if str(version := payload.get("format_version")) not in ("None", "1"):
        raise RoutingError(f"the payload has format_version {version!r}; expected version 1")
    echoed = _first(payload, START_KEYS)
    if echoed is not None and not isinstance(echoed, int):
        raise RoutingError(f"the payload starts at {echoed!r}; expected the number of a token")
    told = _first(payload, DTYPE_KEYS)
    array, start = _read(data, start if echoed is None else echoed, dtype if told is None else str(told))
    return (array if payload.get("shape") is None else _reshape(array, payload["shape"])), start


def _from_buffer(payload: str | bytes | bytearray, dtype: str) -> NDArray:
    """A .npy file or a flat little-endian buffer; text is its base64."""
    raw = bytes(payload) if isinstance(payload, bytes | bytearray) else None
    if raw is None:
        try:
            raw = binascii.a2b_base64(payload, strict_mode=True)  # base64.b64decode would copy the text first
        except ValueError as error:
            raise RoutingError(f"routing is neither base64 nor another known text ({error}): "
                               f"{payload[:40]!r}") from error
    if raw.startswith(NPY):
        return _from_npy(raw)
    if dtype not in DTYPES:
        raise RoutingError(f"routing has the dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    width = np.dtype(dtype).itemsize
    if not raw or len(raw) % width:
        raise RoutingError(f"a buffer of {len(raw)} bytes cannot be divided into {dtype} ids. Is it of another dtype?")
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))


def _from_npy(raw: bytes) -> NDArray:
    """A .npy file whose header says of what size it is: NumPy's own reader makes room for what a broken one says."""
    file = io.BytesIO(raw)
    try:
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = readers[np.lib.format.read_magic(file)](file)
        if dtype.hasobject or dtype.itemsize * math.prod(shape) != len(raw) - file.tell() or min(shape, default=0) < 0:
            raise ValueError(f"{len(raw) - file.tell()} bytes are not {shape} of {dtype}")
        flat = np.frombuffer(raw, dtype, offset=file.tell()) if len(raw) > file.tell() else np.empty(0, dtype)
        return integers(flat.reshape(shape, order="F" if fortran else "C"))
    except RoutingError:
        raise
    except Exception as error:  # a broken header can fail anywhere in NumPy's reader
        raise RoutingError(f"routing looks like a .npy file but cannot be read as one ({error})") from error


def integers(payload: Any) -> NDArray:
    """Nested lists, tensors and arrays as an array of integers, in their own dtype."""
    try:
        array = payload.cpu().numpy() if isinstance(payload, torch.Tensor) else np.asarray(payload)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise RoutingError(f"routing is not an array of ids ({error}); expected [rows, layers, k]") from error
    if array.dtype.kind not in "iu":
        raise RoutingError(f"routing has dtype {array.dtype}; expected integer ids [rows, layers, k]")
    return array


def _reshape(array: NDArray, shape: Any) -> NDArray:
    try:
        sizes = [int(size) for size in shape]
        if len(sizes) != 3 or min(sizes) < 1:
            raise ValueError("not three positive sizes")
        return array.reshape(sizes)
    except (ValueError, TypeError, OverflowError) as error:
        raise RoutingError(f"{array.size} ids do not fit their shape {shape!r} ({error}); expected [rows, layers, "
                           "k]") from error


# ---------------------------------------------------------------------- array → rows of this response and this model
def _shaped(
    array: NDArray, layout: Layout, n: int, start: int, num_layers: int | None, k: int
) -> tuple[Integer[NDArray, "rows layers k"], int]:
    """The array as [rows, layers, k], rows from `start` or, where a server ignored it, from 0; and which of the two."""
    counts = list(dict.fromkeys(_layer_counts(layout, num_layers)))
    rows = ((n - 1 - start, start), (n - 1, 0), (n, 0))
    if array.ndim == 3:
        fits = [(r, s) for r, s in rows if array.shape[0] == r]
        if fits and array.shape[1] in counts and array.shape[2] == k:
            return array, fits[0][1]
        has = f"routes have shape {array.shape}"
    else:
        flat = [(r, c, s) for c in counts for r, s in rows if array.ndim == 1 and array.size == r * c * k]
        if flat:
            return array.reshape(flat[0][0], flat[0][1], k), flat[0][2]
        has = f"{array.size} ids came" + (f" in shape {array.shape}" if array.ndim > 1 else "")
    raise RoutingError(
        f"{has}; expected [{n - 1 - start} rows, {' or '.join(map(str, counts))} layers, {k}] for {n} tokens from "
        f"start {start}. Check tokens, start, dtype, num_layers and the model."
    )


def _layer_counts(layout: Layout, num_layers: int | None) -> tuple[int, int]:
    """Layers that an engine may report: all, or those that route."""
    least = max(site.decoder_layer for site in layout.sites) + 1
    if num_layers is not None and num_layers < least:
        raise RoutingError(f"num_layers={num_layers}, but the model has a router in layer {least - 1}")
    return num_layers or least, len(layout.sites)


def _sites(
    array: Integer[NDArray, "rows layers k"], layout: Layout, num_layers: int | None
) -> Integer[NDArray, "rows site k"]:
    """The layers that route, in the order of the layout. Dense ones must be empty, or the numbering is another one."""
    if array.shape[1] != _layer_counts(layout, num_layers)[0]:
        return array
    layers = [site.decoder_layer for site in layout.sites]
    dense = np.delete(array, layers, axis=1)
    filled = ~np.isin(dense, (0, *NO_ROUTE)).all((0, 2))
    if filled.any():
        where = np.delete(np.arange(array.shape[1]), layers)[filled].tolist()
        raise RoutingError(f"layers {where} have routing, but the MoE layers of the model are {layers}. Count all "
                           "decoder layers from 0, with zeros where dense.")
    if layers == list(range(layers[0], layers[-1] + 1)):
        return array[:, layers[0] : layers[-1] + 1]  # no copy
    return array[:, layers]


def checked_trace(
    ids: Integer[NDArray, "batch rows site k"], layout: Layout, invalid: str, tokens: torch.Tensor | None,
    start: int = 0,
) -> RoutingTrace:
    """[batch, rows, site, k] ids of tokens from `start` on as a trace: missing rows unknown, impossible ones refused
    or, on request, unknown."""
    batch, rows, sites, k = ids.shape
    experts = torch.full((batch, start + rows, sites, k), layout.unknown, dtype=layout.dtype)
    kinds, faulty = torch.empty(batch, rows, sites, dtype=torch.uint8), False
    for at in blocks(batch, rows, sites):
        part = torch.from_numpy(_comparable(ids[at]))
        found = kinds[at] = layout.kinds_of_rows(part, NO_ROUTE)
        known = experts[:, start:][at]
        known.copy_(part)
        if bool(found.any()):
            known[found != ROUTE] = layout.unknown
            faulty |= bool((found < MISSING)[found != ROUTE].any())
    for s, site in enumerate(layout.sites):
        experts[:, :, s, site.top_k :] = layout.unknown
    if faulty:
        _refuse(ids, kinds, layout, invalid, start)
    return RoutingTrace.from_ids(experts, layout, tokens=tokens, check=False)


def _comparable(ids: Integer[NDArray, "*axes"]) -> Integer[NDArray, "*axes"]:
    """A copy in a dtype that PyTorch compares, in which what no expert can have stays so."""
    if ids.dtype == np.uint8 or np.can_cast(ids.dtype, np.int32):
        return ids.astype(np.uint8 if ids.dtype == np.uint8 else np.int32)
    return ids.astype(np.int64).clip(-2, NO_ROUTE[-1] + 1).astype(np.int32)


def _refuse(ids: NDArray, kinds: torch.Tensor, layout: Layout, invalid: str, start: int) -> None:
    """Raise for rows that cannot be routes or, where they may be unknown, warn of them."""
    refused: dict[str, int] = {}
    for s, site in enumerate(layout.sites):
        reasons = {
            ALL_ZERO: f"all zero, where k = {site.top_k}",
            OUTSIDE: f"with an id outside 0 … {site.num_experts - 1}",
            TWICE: "with an expert twice",
        }
        for kind, reason in reasons.items():
            hit = kinds[:, :, s] == kind
            count = int(hit.sum())
            if invalid == "raise" and count:
                b, t = hit.nonzero()[0].tolist()
                raise RoutingError(
                    f'{site.name} (layer {site.decoder_layer}): {count} of {len(ids) * (start + ids.shape[1])} rows '
                    f'are {reason}; the first is row {b}, token {start + t}: {ids[b, t, s, :site.top_k].tolist()}. '
                    f'Expected {site.top_k} different experts, or all -1; invalid="unknown" accepts other rows as '
                    'missing.'
                )
            refused[reason] = refused.get(reason, 0) + count
    counts = ", ".join(f"{count} {reason}" for reason, count in refused.items() if count)
    warnings.warn(f"{sum(refused.values())} rows are not routing and count as missing: {counts}", RoutesRefused,
                  stacklevel=4)


# ---------------------------------------------------------------------- combine weights
def _is_packed(array: NDArray, k: int) -> bool:
    """Whether ids [rows, layers, 2k] are those of prime-rl's Total Router Recall (pull request 3523): k ids, then the
    bits of k float32 weights, all as int32."""
    return array.ndim == 3 and array.shape[2] == 2 * k and array.size > 0 and int(array[..., k:].max()) >= NORMAL


def _unpacked_weights(array: Integer[NDArray, "rows layers two_k"]) -> tuple[NDArray, NDArray]:
    """Ids and weights of what `_is_packed`; 0 where an id is -1. Raises RoutingError for what is no weight."""
    ids, bits = np.split(array.astype(np.int64), 2, axis=2)
    if (bits != bits.astype(np.int32)).any():
        raise RoutingError("the second half of the ids should be gate weights, but some are not the bits of a float32")
    weights = np.where(ids < 0, np.float32(0), bits.astype(np.int32).view(np.float32))  # -1 is the bits of a NaN
    if not np.isfinite(weights).all():
        raise RoutingError("the second half of the ids contains gate weights that are NaN or infinite; expected finite "
                           "ones")
    return ids, weights


def _reported_weights(payload: Any, shape: Sequence[int], start: int = 0) -> Float[NDArray, "rows layers k"]:
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
        raise RoutingError(f"gates do not fit the ids ({error}); expected one weight per id, {list(shape)}") from error
    if not np.isfinite(values).all():
        raise RoutingError("gates contain NaN or infinite weights")
    return np.concatenate([np.zeros((max(0, rows - len(values)), *inner), np.float32), values[:rows]])


def _with_weights(trace: RoutingTrace, weights: Float[NDArray, "batch time site k"]) -> RoutingTrace:
    """The trace with these combine weights, which replay then forces with its ids; 0 where nothing is known."""
    slots = trace.experts != trace.layout.unknown
    gates = torch.from_numpy(np.ascontiguousarray(weights))
    trace.layout.check_gates(gates, trace.known)
    return replace(trace, gates=gates.where(slots, 0))


# ---------------------------------------------------------------------- small parts
def _first(payload: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((payload[key] for key in keys if payload.get(key) is not None), None)


def require_policy(invalid: str) -> None:
    if invalid not in ("raise", "unknown"):
        raise RoutingError(f'invalid={invalid!r}; expected "raise" or "unknown".')
