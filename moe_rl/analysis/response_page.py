"""One response as a web page: its tokens coloured by how many layers changed, underlined by how far log-probs are
apart, and the experts before and after, of any two of its traces.

The page is one file: it opens from disk, loads nothing, and its content security policy lets only its own script run.
Text that models wrote reaches it as escaped JSON and becomes text nodes, never markup.

A file may carry gates beside its ids — `trace.save(path, {"gates": gates})`, with the gates of `record_routing(model,
scores=True)`, or `moe-rl checkpoint compare --traces` —, `"response"`, the mask of response tokens, and `"logprobs"`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.tokens import spell
from moe_rl.results.rollouts import write_page
from moe_rl.routing.ids import signed
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Response:
    """One row of a trace file, without padding."""

    layout: Layout
    experts: Int64[Tensor, "token moe_layer k"]
    """-1 where unknown."""
    tokens: Int64[Tensor, " token"] | None
    gates: Float[Tensor, "token moe_layer k"] | None
    response: Bool[Tensor, " token"]
    """True at response tokens; everywhere if the file does not say."""
    logprobs: Float[Tensor, " token"] | None = None
    """Of each token, given those before it, in nats; NaN where there is none."""
    versions: tuple[str | None, ...] = (None,)
    """Of the weights that routed."""


def write_response_page(
    traces: Sequence[Path], out: Path, *, row: int | None = None, tokenizer: str | PreTrainedTokenizerBase | None = None
) -> int:
    """Write the page of one row of two or more trace files, by default the one that changed most between the first two,
    which the page opens with; returns the row.

    `tokenizer` spells the tokens: one, or a checkpoint that has one. Without it `tokenizer/` in the folder of the
    traces or above is taken, and else ids are shown. Raises RoutingError for files that are no traces or not of the
    same tokens and architecture, ConfigError for a row or tokenizer that is not there.
    """
    if len(traces) < 2:
        raise ConfigError(f"{', '.join(map(str, traces)) or 'nothing'}: give two traces or more of the same tokens")
    sides = [_rows(path) for path in traces]
    for path, other in zip(traces[1:], sides[1:], strict=True):
        if len(sides[0]) != len(other):
            raise RoutingError(
                f"{traces[0]} contains {len(sides[0])} responses, but {path} contains {len(other)}. "
                "Give traces of the same tokens."
            )
        for i, (a, b) in enumerate(zip(sides[0], other, strict=True)):
            _check(a, b, f"row {i} of {traces[0]} and {path}")
    if not sides[0]:
        raise RoutingError(f"{traces[0]} contains no response")
    if row is None:
        row = max(range(len(sides[0])), key=lambda i: _changed(sides[0][i], sides[1][i]))
    if not 0 <= row < len(sides[0]):
        raise ConfigError(f"--row {row}: the traces have rows 0 to {len(sides[0]) - 1}")
    shown = [side[row] for side in sides]
    data = _data(shown, row, traces, _tokenizer(tokenizer, traces[0]))
    write_page("moe_rl.analysis", "response_page.html", f"routes of response {row}: {traces[0].name}", data, out)
    return row


def _rows(path: Path) -> list[Response]:
    trace, beside = RoutingTrace.load(path), RoutingTrace.load_beside(path)
    response, logprobs = beside.get("response"), beside.get("logprobs")
    gates = beside.get("gates", trace.gates)
    rows = []
    for b, mask in enumerate(trace.attention_mask):
        rows.append(
            Response(
                layout=trace.layout,
                experts=signed(trace.experts[b][mask]),
                tokens=None if trace.tokens is None else trace.tokens[b][mask].long(),
                gates=None if gates is None else gates[b][mask].float(),
                response=mask[mask] if response is None else response[b][mask].bool(),
                logprobs=None if logprobs is None else logprobs[b][mask].float(),
                versions=(trace.weight_version,),
            )
        )
    return rows


def _check(a: Response, b: Response, where: str) -> None:
    a.layout.require(b.layout, "the second trace")
    same = a.tokens is None or b.tokens is None or torch.equal(a.tokens, b.tokens)
    if len(a.experts) != len(b.experts) or not same:
        raise RoutingError(f"{where} are of different tokens, so their routing cannot be compared")


def _changed(a: Response, b: Response) -> float:
    """Share of known (token, MoE layer) pairs with another set."""
    known = (a.experts[..., 0] >= 0) & (b.experts[..., 0] >= 0)
    other = (a.experts.sort(-1).values != b.experts.sort(-1).values).any(-1) & known
    return other.sum().item() / max(1, known.sum().item())


def _tokenizer(name: str | PreTrainedTokenizerBase | None, trace: Path) -> PreTrainedTokenizerBase | None:
    from moe_rl.models.load import load_tokenizer

    if name is not None:
        return load_tokenizer(name) if isinstance(name, str) else name
    beside = (folder / "tokenizer" for folder in (trace.parent, trace.parent.parent))
    return next((load_tokenizer(str(folder)) for folder in beside if folder.is_dir()), None)


def _data(
    sides: Sequence[Response], row: int, paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """What the page's script reads: ids of a byte each or two, all ones where unknown, gates in half precision."""
    a = sides[0]
    tokens = next((side.tokens for side in sides if side.tokens is not None), None)
    ids = None if tokens is None else tokens.tolist()
    if ids is None:
        texts = [f"[{t}] " for t in range(len(a.experts))]
    elif tokenizer is None:
        texts = [f"{token} " for token in ids]
    else:
        texts = spell(ids, tokenizer)
    return {
        "names": [
            str(path) + f" (weights {', '.join(map(str, side.versions))})" * any(side.versions)
            for path, side in zip(paths, sides, strict=True)
        ],
        "row": row,
        "k": a.layout.top_k,
        "moe_layers": [{"name": s.name, "layer": s.decoder_layer, "k": s.top_k} for s in a.layout.moe_layers],
        "tokens": texts,
        "ids": ids,
        "response": a.response.tolist(),
        "wide": a.layout.dtype != torch.uint8,
        "experts": [_packed(side.experts.to(a.layout.dtype)) for side in sides],
        "gates": [None if side.gates is None else _packed(side.gates.half()) for side in sides],
        "logprobs": [None if side.logprobs is None else _packed(side.logprobs) for side in sides],
    }


def _packed(values: Tensor) -> str:
    """The values in C order, little-endian, as base64."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
