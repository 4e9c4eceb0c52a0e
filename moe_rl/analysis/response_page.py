"""One response as a web page: its tokens coloured by how many layers changed, underlined by how far log-probs are
apart, and the experts before and after, of any two of its traces.

The page is one file: it opens from disk, loads nothing, and its content security policy lets only its own script run.
Text that models wrote reaches it as escaped JSON and becomes text nodes, never markup.

A file may carry gates beside its ids — `trace.save(path, {"gates": gates})`, with the gates of `record_routing(model,
scores=True)`, or `moe-rl checkpoint compare --traces` —, `"response"`, the mask of response tokens, and `"logprobs"`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.tokens import spell
from moe_rl.results.rollouts import write_page
from moe_rl.routing.ids import signed
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Row = Mapping[str, Any]
"""One response of a trace file, without padding: `experts` [token, MoE layer, k], -1 where unknown, and, None where the
file does not say, `tokens`, `gates`, `response` and `logprobs`."""


def write_response_page(
    traces: Sequence[Path], out: Path, *, row: int | None = None, tokenizer: str | None = None
) -> int:
    """Write the page of one row of two or more trace files, by default the one that changed most between the first two,
    which the page opens with; returns the row.

    `tokenizer` is a checkpoint whose tokenizer spells the tokens. Without it `tokenizer/` in the folder of the
    traces or above is taken, and else ids are shown. Raises RoutingError for files that are no traces or not of the
    same tokens and architecture, ConfigError for a row or tokenizer that is not there.
    """
    if len(traces) < 2:
        raise ConfigError(f"{', '.join(map(str, traces)) or 'nothing'}: give two traces or more of the same tokens")
    files = [RoutingTrace.load(path) for path in traces]
    sides = [_rows(trace, RoutingTrace.load_beside(path)) for trace, path in zip(files, traces, strict=True)]
    for path, trace, other in zip(traces[1:], files[1:], sides[1:], strict=True):
        files[0].layout.require(trace.layout, str(path))
        if len(sides[0]) != len(other):
            raise RoutingError(
                f"{traces[0]} contains {len(sides[0])} responses, but {path} contains {len(other)}. "
                "Give traces of the same tokens."
            )
        for i, (a, b) in enumerate(zip(sides[0], other, strict=True)):
            same = a["tokens"] is None or b["tokens"] is None or torch.equal(a["tokens"], b["tokens"])
            if len(a["experts"]) != len(b["experts"]) or not same:
                raise RoutingError(
                    f"row {i} of {traces[0]} and {path} are of different tokens, so their routing cannot be compared"
                )
    if not sides[0]:
        raise RoutingError(f"{traces[0]} contains no response")
    if row is None:
        row = max(range(len(sides[0])), key=lambda i: _changed(sides[0][i], sides[1][i]))
    if not 0 <= row < len(sides[0]):
        raise ConfigError(f"--row {row}: the traces have rows 0 to {len(sides[0]) - 1}")
    versions = (f" (weights {trace.weight_version})" if trace.weight_version else "" for trace in files)
    names = [f"{path}{version}" for path, version in zip(traces, versions, strict=True)]
    shown = _data([side[row] for side in sides], files[0].layout, _tokenizer(tokenizer, traces[0]))
    title = f"routes of response {row}: {traces[0].name}"
    write_page("moe_rl.analysis", "response_page.html", title, shown | {"names": names, "row": row}, out)
    return row


def _rows(trace: RoutingTrace, beside: Mapping[str, Tensor]) -> list[Row]:
    stored = {"gates": trace.gates} | dict(beside) | {"tokens": trace.tokens, "experts": signed(trace.experts)}
    parts = {name: stored.get(name) for name in ("experts", "tokens", "gates", "response", "logprobs")}
    return [
        {name: None if x is None else x[b][mask] for name, x in parts.items()}
        for b, mask in enumerate(trace.attention_mask)
    ]


def _changed(a: Row, b: Row) -> float:
    """Share of known (token, MoE layer) pairs with another set."""
    known = (a["experts"][..., 0] >= 0) & (b["experts"][..., 0] >= 0)
    other = (a["experts"].sort(-1).values != b["experts"].sort(-1).values).any(-1) & known
    return other.sum().item() / max(1, known.sum().item())


def _tokenizer(name: str | None, trace: Path) -> PreTrainedTokenizerBase | None:
    from moe_rl.models.load import load_tokenizer

    beside = (folder / "tokenizer" for folder in (trace.parent, trace.parent.parent))
    name = name or next((str(folder) for folder in beside if folder.is_dir()), None)
    return load_tokenizer(name) if name else None


def _data(sides: Sequence[Row], layout: Layout, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What the page's script reads: ids of a byte each or two, all ones where unknown, gates in half precision."""
    tokens, response = next((x for side in sides if (x := side["tokens"]) is not None), None), sides[0]["response"]
    ids = None if tokens is None else tokens.tolist()
    if ids is None:
        texts = [f"[{t}] " for t in range(len(sides[0]["experts"]))]
    elif tokenizer is None:
        texts = [f"{token} " for token in ids]
    else:
        texts = spell(ids, tokenizer)
    return {
        "k": layout.top_k,
        "moe_layers": [{"name": s.name, "layer": s.decoder_layer, "k": s.top_k} for s in layout.moe_layers],
        "tokens": texts,
        "ids": ids,
        "response": [True] * len(texts) if response is None else response.bool().tolist(),
        "wide": layout.dtype != torch.uint8,
        "experts": [_packed(side["experts"], layout.dtype) for side in sides],
        "gates": [_packed(side["gates"], torch.float16) for side in sides],
        "logprobs": [_packed(side["logprobs"], torch.float32) for side in sides],
    }


def _packed(values: Tensor | None, dtype: torch.dtype) -> str | None:
    """The values in C order, little-endian, as base64."""
    return None if values is None else base64.b64encode(values.to(dtype).contiguous().numpy().tobytes()).decode()
