"""Routes as inference engines report them → `RoutingTrace`: vLLM's, SGLang's, prime-rl's, and plain arrays.

Engines report ids [rows, layers, k]. Row p holds the experts that were used when token p was the *input*, so N tokens
make N - 1 rows. Layers are all decoder layers, dense ones filled with zeros, or those that route alone. A row without a
route (-1 throughout, or 255 or 65535 where that is no id) becomes unknown. A row that cannot be a route is refused: all
zero where k > 1, an id out of range, an expert twice, a dummy.
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
from jaxtyping import Bool, Float, Integer, Shaped
from numpy.typing import NDArray

from moe_rl.errors import RoutingError
from moe_rl.routing.ids import blocks
from moe_rl.routing.moe_layers import ALL_ZERO, MISSING, OUTSIDE, ROUTE, TWICE, MoeLayer
from moe_rl.routing.trace import Layout, RoutingTrace

DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")
"""What a raw buffer may hold, little-endian."""
BY_SIZE = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
"""The dtype of a buffer whose payload states its shape alone; prime-rl leaves out `uint8`."""
NO_ROUTE = (-1, 255, 65535)
"""-1, also as unsigned dtypes have it."""
NORMAL = 1 << 23
"""The bits of the smallest normal float32; ids are smaller."""
DUMMY = MISSING + 1
"""The kind of a row that stands for no route."""


class RoutesRefused(UserWarning):
    """Rows of a payload were not routes and became unknown; the message counts them."""


def decode_routes(
    payload: Any, *, layout: Layout, tokens: Sequence[int], invalid: str = "raise", **form: Any
) -> RoutingTrace:
    """The routes of one response, batch 1 and time N - 1, for the N `tokens` of prompt and completion.

    `payload` is what the engine reported:

        vLLM      an array, tensor or nested list; the base64 of a .npy file
        SGLang    the base64 of a flat buffer, int32 unless `dtype` differs; or the whole `meta_info`
        prime-rl  {"data": base64, "shape": …, "dtype": …, "start": …}; with combine weights, either int32 and 2k wide,
                  or "weights": {"data": base64, "dtype": "float32"} beside the ids

    `form`, as of `reported_routes`: `start` is the token of the first row; tokens before it are unknown. There must be
    N - 1 - start rows, or N - 1 or N from a server that ignored `start` (the last of N rows has no meaning and is
    dropped). `num_layers` is the number of decoder layers; by default the last one routes. A flat buffer that fits
    several shapes has all layers before routing layers alone, and N - 1 rows before N.

    Dummies are rows with equal ids, in equal order, in every layer. A run of equal ones is refused if its probability
    is below 1e-12, were all sets of experts alike in each layer and for each different token of the run: in 3 layers
    with 2 of 8 experts, 0 … k−1 at 3 tokens. One row suffices in a real model. No row is refused in a model with one
    MoE layer, or if all experts are used.

    `invalid="unknown"` makes invalid rows, and rows missing at the end, unknown, with a `RoutesRefused` warning that
    counts them; `trace.coverage` is the share of known rows. The order within a row stays. Combine weights in the
    payload, or in `gates` (an array, nested lists or {"data": base64, "dtype": "float32"}, of the shape of the ids),
    become the trace's, and replay forces them too. Raises RoutingError for what does not fit.
    """
    if invalid not in ("raise", "unknown"):
        raise RoutingError(f'invalid={invalid!r}; expected "raise" or "unknown".')
    ids, weights = reported_routes(payload, layout=layout, tokens=tokens, short=invalid == "unknown", **form)
    num_layers = form.get("num_layers")
    ids = _moe_layers(ids, layout, num_layers)
    inputs = torch.from_numpy(np.fromiter(tokens, np.int64, len(tokens)))[None, :-1]
    trace = _checked_trace(ids[None], layout, invalid, inputs)
    if weights is None:
        return trace
    layers = [moe_layer.decoder_layer for moe_layer in layout.moe_layers]
    here = weights if weights.shape[1] != _layer_counts(layout, num_layers)[0] else weights[:, layers]
    gates = torch.from_numpy(np.ascontiguousarray(here[None]))
    layout.check_gates(gates, trace.known)
    return replace(trace, gates=gates.where(trace.experts != layout.unknown, 0))


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
    short: bool = False,
) -> tuple[Integer[NDArray, "rows layers k"], Float[NDArray, "rows layers k"] | None]:
    """What `decode_routes` reads, unchecked: ids of N - 1 rows, -1 before `start`, in the engine's own layers, and
    their combine weights, if any. With `any_k` the payload may have another k than the model, with `short` rows may be
    missing at the end. Raises RoutingError for a shape that no routes of this model and these tokens have."""
    if len({moe_layer.decoder_layer for moe_layer in layout.moe_layers}) < len(layout.moe_layers):
        raise RoutingError("the model has several MoE layers in one decoder layer, but engines report one per layer")
    array, start = _read(payload, start, dtype)
    if len(tokens) < 2 or not 0 <= start < len(tokens):
        raise RoutingError(f"{len(tokens)} tokens from start {start} have no routing rows: N tokens have N - 1.")
    k, packed = layout.top_k, _is_packed(array, layout.top_k)
    k = array.shape[2] if packed or any_k and array.ndim == 3 else k
    array, start = _shaped(array, layout, len(tokens), start, num_layers, k, short)
    if start:
        array = np.concatenate([np.full((start, *array.shape[1:]), -1), array.astype(np.int64)])
    array = array[: len(tokens) - 1]
    weights = [gates, payload.get("weights") if isinstance(payload, Mapping) else None]
    if packed:
        array, bits = np.split(array.astype(np.int64), 2, axis=2)
        weights.append(np.where(array < 0, np.float32(0), bits.astype(np.int32).view(np.float32)))
    if len(weights := [x for x in weights if x is not None]) > 1:
        raise RoutingError("gate weights were given twice. Give them once, with the ids or as gates.")
    gates = weights[0] if weights else None
    return array, None if gates is None else _reported_weights(gates, array.shape, start)


def _read(payload: Any, start: int, dtype: str | None) -> tuple[NDArray, int]:
    """The numbers of a payload, flat if it has no shape, and the token of the first row."""
    shape = None
    if isinstance(payload, Mapping):
        start = _first(payload, start, "start", "routed_experts_start_len")
        dtype = _first(payload, dtype, "dtype", "routed_experts_dtype")
        shape, payload = payload.get("shape"), _first(payload, None, "data", "routed_experts")
    if payload is None:
        raise RoutingError("the engine reported no routing. Switch it on; a preempted request has none either.")
    if isinstance(start, bool) or not isinstance(start, int):
        raise RoutingError(f"the payload starts at {start!r}, which is no token's number")
    try:
        sizes = None if shape is None else [int(size) for size in shape]
        if sizes is not None and (len(sizes) != 3 or min(sizes) < 1):
            raise ValueError("three positive sizes are needed")
        is_buffer = isinstance(payload, str | bytes | bytearray)
        array = _from_buffer(payload, dtype, sizes) if is_buffer else _integers(payload)
        return (array if sizes is None else array.reshape(sizes)), start
    except (ValueError, TypeError, OverflowError) as error:
        raise RoutingError(f"routing does not fit the shape {shape!r}: {error}. Expected [rows, layers, k].") from error


def _first(payload: Mapping[str, Any], default: Any, *keys: str) -> Any:
    return next((payload[key] for key in keys if payload.get(key) is not None), default)


def _from_buffer(payload: str | bytes | bytearray, dtype: Any, sizes: Sequence[int] | None) -> NDArray:
    """A .npy file or a flat little-endian buffer; text is its base64."""
    try:  # base64.b64decode would copy the text first
        raw = binascii.a2b_base64(payload, strict_mode=True) if isinstance(payload, str) else payload
    except ValueError as error:
        raise RoutingError(f"routing is not base64 ({error}): {payload[:40]!r}") from error
    if raw.startswith(b"\x93NUMPY"):
        return _from_npy(raw)
    if dtype is None:
        dtype = "int32" if sizes is None else BY_SIZE.get(len(raw) // math.prod(sizes))
    if dtype not in DTYPES:
        raise RoutingError(f"routing has the dtype {dtype!r}. Expected {', '.join(DTYPES)}.")
    kind = np.dtype(dtype).newbyteorder("<")
    if not raw or len(raw) % kind.itemsize:
        raise RoutingError(f"a buffer of {len(raw)} bytes cannot be divided into {dtype} ids. Is it of another dtype?")
    return np.frombuffer(raw, kind)


def _from_npy(raw: bytes | bytearray) -> NDArray:
    file = io.BytesIO(raw)
    try:
        array = np.load(file, allow_pickle=False)
        if file.read(1):
            raise ValueError("there is more behind its array")
    except Exception as error:  # a broken header can fail anywhere in NumPy's reader
        raise RoutingError(f"routing looks like a .npy file but cannot be read as one ({error})") from error
    return _integers(array)


def _integers(payload: Any) -> NDArray:
    """Nested lists, tensors and arrays as an array of integers, in their own dtype."""
    try:
        array = payload.cpu().numpy() if isinstance(payload, torch.Tensor) else np.asarray(payload)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise RoutingError(f"routing is not an array of ids ({error}); expected [rows, layers, k]") from error
    if array.dtype.kind not in "iu":
        raise RoutingError(f"routing has dtype {array.dtype}; expected integer ids [rows, layers, k]")
    return array


# ---------------------------------------------------------------------- array → rows of this response and this model
def _shaped(
    array: NDArray, layout: Layout, n: int, start: int, num_layers: int | None, k: int, short: bool
) -> tuple[Integer[NDArray, "rows layers k"], int]:
    """The array as [rows, layers, k], and the token of its first row: `start`, or 0 where a server ignored it. With
    `short`, rows may be missing at the end, and are -1."""
    counts = list(dict.fromkeys(_layer_counts(layout, num_layers)))
    rows = ((n - 1 - start, start), (n - 1, 0), (n, 0))
    shape = array.shape
    if array.ndim == 1:
        flat = [c for c in counts for r, _ in rows if array.size == r * c * k]
        flat = counts if short and len(counts) == 1 and not array.size % (counts[0] * k) else flat
        array = array.reshape(-1, flat[0], k) if flat else array
    if array.ndim == 3 and array.shape[1] in counts and array.shape[2] == k:
        if fits := [s for r, s in rows if len(array) == r]:
            return array, fits[0]
        if short and (missing := n - 1 - start - len(array)) > 0:
            warnings.warn(f"the last {missing} of {n - 1} rows of routing are missing", RoutesRefused, stacklevel=5)
            return np.concatenate([array, np.full((missing, *array.shape[1:]), -1)]), start
    raise RoutingError(
        f"routes have shape {shape}; expected [{n - 1 - start} rows, {' or '.join(map(str, counts))} layers, {k}] for "
        f"{n} tokens from start {start}. Check tokens, start, dtype, num_layers and the model."
    )


def _layer_counts(layout: Layout, num_layers: int | None) -> tuple[int, int]:
    """Layers that an engine may report: all, or those that route."""
    least = max(moe_layer.decoder_layer for moe_layer in layout.moe_layers) + 1
    if num_layers is not None and num_layers < least:
        raise RoutingError(f"num_layers={num_layers}, but the model has a router in layer {least - 1}")
    return num_layers or least, len(layout.moe_layers)


def _moe_layers(
    array: Integer[NDArray, "rows layers k"], layout: Layout, num_layers: int | None
) -> Integer[NDArray, "rows moe_layer k"]:
    """The layers that route, in the order of the layout. Dense ones must be empty, or the numbering is another one."""
    if array.shape[1] != _layer_counts(layout, num_layers)[0]:
        return array
    layers = [moe_layer.decoder_layer for moe_layer in layout.moe_layers]
    dense = np.delete(array, layers, axis=1)
    if not np.isin(dense, (0, *NO_ROUTE)).all():
        raise RoutingError(
            f"layers without a router have routing: the MoE layers are {layers}. Count all decoder layers from 0, with "
            "zeros where dense."
        )
    if layers == list(range(layers[0], layers[-1] + 1)):
        return array[:, layers[0] : layers[-1] + 1]  # no copy
    return array[:, layers]


def _checked_trace(
    ids: Integer[NDArray, "1 rows moe_layer k"], layout: Layout, invalid: str, tokens: Integer[torch.Tensor, "1 rows"]
) -> RoutingTrace:
    """Ids as a trace: missing rows unknown, impossible ones refused or, on request, unknown."""
    experts = torch.full(ids.shape, layout.unknown, dtype=layout.dtype)
    kinds, faulty = torch.empty(ids.shape[:3], dtype=torch.uint8), False
    for at in blocks(*ids.shape[:3]):
        part = torch.from_numpy(ids[at].astype(np.int64).clip(-2, NO_ROUTE[-1] + 1))  # others stay out of range
        of_part = kinds[at] = layout.kinds_of_rows(part, NO_ROUTE)
        known = experts[at]
        known.copy_(part)
        if bool(of_part.any()):
            known[of_part != ROUTE] = layout.unknown
            faulty |= bool((of_part < MISSING)[of_part != ROUTE].any())
    dummies = torch.from_numpy(_find_dummies(ids[0], kinds[0].numpy(), layout.moe_layers, tokens[0].numpy()))
    kinds[0, dummies], experts[0, dummies] = DUMMY, layout.unknown
    for s, moe_layer in enumerate(layout.moe_layers):
        experts[:, :, s, moe_layer.top_k :] = layout.unknown
    if faulty or bool(dummies.any()):
        _refuse(ids[0], kinds[0], layout, invalid)
    return RoutingTrace.from_ids(experts, layout, tokens=tokens, check=False)


def _find_dummies(
    ids: Integer[NDArray, "rows moe_layer k"],
    kinds: Integer[NDArray, "rows moe_layer"],
    moe_layers: Sequence[MoeLayer],
    tokens: Shaped[NDArray, " rows"],
) -> Bool[NDArray, " rows"]:
    """Rows in runs of equal ones that are the same in all layers, and that chance cannot make; see `decode_routes`."""
    k, experts = (
        min(moe_layer.top_k for moe_layer in moe_layers),
        min(moe_layer.num_experts for moe_layer in moe_layers),
    )
    same = (ids[:, 0, 0] == ids[:, -1, 0]) & (len(moe_layers) > 1)
    same[same] = (ids[same][..., :k] == ids[same][:, :1, :k]).all((1, 2)) & (kinds[same] == ROUTE).all(-1)
    if not same.any():
        return same
    begins = np.flatnonzero(np.r_[True, (ids[1:, 0, :k] != ids[:-1, 0, :k]).any(-1) | (same[1:] != same[:-1])])
    dummies = np.zeros_like(same)
    for begin, end in zip(begins, [*begins[1:], len(same)], strict=True):
        if end > begin and same[begin]:
            free = 0 if (ids[begin, 0, :k] == np.arange(k)).all() else 1  # any ids would do, but 0 … k−1 are expected
            choices = len(moe_layers) * len(np.unique(tokens[begin:end])) - free
            dummies[begin:end] = choices * math.log(math.comb(experts, k)) > -math.log(1e-12)
    return dummies


def _refuse(ids: NDArray, kinds: torch.Tensor, layout: Layout, invalid: str) -> None:
    """Raise for rows that cannot be routes or, where they may be unknown, warn of them."""
    reasons = {ALL_ZERO: "all zero", OUTSIDE: "out of range", TWICE: "an expert twice", DUMMY: "dummies"}
    counts = {reason: int((kinds == kind).sum()) for kind, reason in reasons.items()}
    text = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    if invalid == "raise":
        t, s = torch.isin(kinds, torch.tensor([*reasons])).nonzero()[0].tolist()
        moe_layer = layout.moe_layers[s]
        raise RoutingError(
            f"{sum(counts.values())} of {kinds.numel()} rows cannot be routes ({text}), first {moe_layer.name}, "
            f"token {t}: {ids[t, s, : moe_layer.top_k].tolist()}. Set "
            'invalid="unknown" to let such rows route freely.'
        )
    warnings.warn(f"rows that cannot be routes are unknown: {text}", RoutesRefused, stacklevel=4)


# ---------------------------------------------------------------------- combine weights
def _is_packed(array: NDArray, k: int) -> bool:
    """Whether ids [rows, layers, 2k] are those of prime-rl's Total Router Recall (pull request 3523): k ids, then the
    bits of k float32 weights, all as int32."""
    return array.ndim == 3 and array.shape[2] == 2 * k and array.size > 0 and int(array[..., k:].max()) >= NORMAL


def _reported_weights(payload: Any, shape: Sequence[int], start: int) -> Float[NDArray, "rows layers k"]:
    """Weights of ids of this `shape`: an array, nested lists, or {"data": base64, "dtype": "float32"}. Rows may begin
    at `start`; rows before it weigh 0. A row for the last token is dropped. Raises RoutingError for what does not
    fit."""
    rows, inner = shape[0], tuple(shape[1:])
    try:
        if isinstance(payload, Mapping):
            dtype = np.dtype(str(payload.get("dtype", "float32"))).newbyteorder("<")
            if dtype.kind != "f":
                raise ValueError(f"they are {dtype}")
            payload = np.frombuffer(base64.b64decode(payload["data"], validate=True), dtype).reshape(-1, *inner)
        values = np.asarray(payload.cpu() if isinstance(payload, torch.Tensor) else payload, dtype=np.float32)
        if values.shape[1:] != inner or len(values) not in (rows - start, rows, rows + 1):
            raise ValueError(f"they have shape {values.shape}")
        if not np.isfinite(values).all():
            raise ValueError("NaN or infinite")
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise RoutingError(f"gates do not fit the ids ({error}); expected one weight per id, {list(shape)}") from error
    return np.concatenate([np.zeros((max(0, rows - len(values)), *inner), np.float32), values[:rows]])
