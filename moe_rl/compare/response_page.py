"""One response as a web page: its tokens coloured by how many layers changed, and the experts before and after.

The page is one file: it opens from disk, loads nothing, and its content security policy lets only its own script run.
Text that models wrote reaches it as escaped JSON and becomes text nodes, never markup.

Traces hold ids only. A file may carry gates beside them — `trace.save(path, {"gates": gates})`, with the gates of
`record_routing(model, scores=True)`, or `moe-rl volatility --traces` — and `"response"`, the mask of response tokens.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.tokens import spell
from moe_rl.results.rollouts import write_page
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Response:
    """One row of a trace file, without padding."""

    layout: Layout
    experts: Int64[Tensor, "token site k"]
    """-1 where unknown."""
    tokens: Int64[Tensor, " token"] | None
    gates: Float[Tensor, "token site k"] | None
    response: Bool[Tensor, " token"]
    """True at response tokens; everywhere if the file does not say."""


def write_response_page(before: Path, after: Path, out: Path, *, row: int | None = None,
                        tokenizer: str | None = None) -> int:
    """Write the page of one row of two trace files, by default the one that changed most; returns the row.

    `tokenizer` is a checkpoint that spells the tokens; without it, `tokenizer/` in the folder of the traces or above is
    taken, and else ids are shown. Raises RoutingError for files that are no traces or not of the same tokens and
    architecture, ConfigError for a row or tokenizer that is not there.
    """
    sides = [_rows(path) for path in (before, after)]
    if len(sides[0]) != len(sides[1]):
        raise RoutingError(f"{before} holds {len(sides[0])} responses, {after} {len(sides[1])}; they need to be traces "
                           "of the same tokens.")
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        _check(a, b, f"row {i} of {before} and {after}")
    if row is None:
        row = max(range(len(sides[0])), key=lambda i: _changed(sides[0][i], sides[1][i]))
    if not 0 <= row < len(sides[0]):
        raise ConfigError(f"--row {row}: the traces hold rows 0 to {len(sides[0]) - 1}.")
    a, b = sides[0][row], sides[1][row]
    spelling = _tokenizer(tokenizer, before)
    data = _data(a, b, row, (before, after), spelling)
    write_page("moe_rl.compare", "response_page.html", f"routes of response {row}: {before.name}", data, out)
    return row


def _rows(path: Path) -> list[Response]:
    trace, beside = RoutingTrace.load(path), RoutingTrace.load_beside(path)
    ids, gates, response = trace.ids(), beside.get("gates"), beside.get("response")
    found = []
    for b, mask in enumerate(trace.attention_mask):
        found.append(Response(
            layout=trace.layout,
            experts=ids[b][mask],
            tokens=None if trace.tokens is None else trace.tokens[b][mask].long(),
            gates=None if gates is None else gates[b][mask].float(),
            response=mask[mask] if response is None else response[b][mask].bool(),
        ))
    return found


def _check(a: Response, b: Response, where: str) -> None:
    a.layout.require(b.layout, "the second trace")
    same = a.tokens is None or b.tokens is None or torch.equal(a.tokens, b.tokens)
    if len(a.experts) != len(b.experts) or not same:
        raise RoutingError(f"{where} are routes of different tokens, so they cannot be compared.")


def _changed(a: Response, b: Response) -> float:
    """Share of known (token, site) pairs with another set."""
    known = (a.experts[..., 0] >= 0) & (b.experts[..., 0] >= 0)
    other = (a.experts.sort(-1).values != b.experts.sort(-1).values).any(-1) & known
    return other.sum().item() / max(1, known.sum().item())


def _tokenizer(name: str | None, trace: Path) -> PreTrainedTokenizerBase | None:
    from moe_rl.models.checkpoints import load_tokenizer

    if name is not None:
        return load_tokenizer(name)
    beside = (folder / "tokenizer" for folder in (trace.parent, trace.parent.parent))
    return next((load_tokenizer(str(folder)) for folder in beside if folder.is_dir()), None)


def _data(
    a: Response, b: Response, row: int, paths: tuple[Path, Path], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """What the page's script reads."""
    tokens = a.tokens if a.tokens is not None else b.tokens
    ids = None if tokens is None else tokens.tolist()
    if ids is None:
        texts = [f"[{t}] " for t in range(len(a.experts))]
    elif tokenizer is None:
        texts = [f"{token} " for token in ids]
    else:
        texts = spell(ids, tokenizer)
    return {
        "names": [str(path) for path in paths],
        "row": row,
        "k": a.layout.top_k,
        "sites": [{"name": s.name, "layer": s.decoder_layer, "k": s.top_k} for s in a.layout.sites],
        "tokens": texts,
        "ids": ids,
        "response": a.response.tolist(),
        "experts": [_packed(side.experts.short()) for side in (a, b)],
        "gates": [None if side.gates is None else _packed(side.gates) for side in (a, b)],
    }


def _packed(values: Tensor) -> str:
    """The values in C order, little-endian, as base64."""
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
