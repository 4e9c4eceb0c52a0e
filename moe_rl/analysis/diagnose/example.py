"""The response whose log-probs are furthest apart, token by token: traces of the engine, of the trainer natural and
replayed, and the page of `moe-rl view` of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.analysis.diagnose.ladder import Ladder, as_reported, usable
from moe_rl.analysis.diagnose.responses import Response
from moe_rl.analysis.diagnose.scoring import STATED, possible, score
from moe_rl.analysis.response_page import write_response_page
from moe_rl.errors import RoutingError
from moe_rl.routing.trace import Layout, RoutingTrace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Example:
    """One response, as several saw it."""

    layout: Layout
    response: Response
    sides: Mapping[str, tuple[NDArray, NDArray]]
    """By who saw it: ids of the inputs, [rows, site, k], and log-probs of the response's tokens."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Spells the tokens."""


def example_of(ladder: Ladder, tokenizer: PreTrainedTokenizerBase | None) -> Example | None:
    """Of the responses that carry routes of the model's k, the one that the natural forward is furthest from."""
    routed = [b for b, response in enumerate(ladder.responses) if usable(response, ladder.layout)]
    if not routed:
        return None
    b = max(routed, key=lambda b: ladder.base.distance[b])
    response, natural = ladder.responses[b], ladder.natural
    sides = {"engine": (as_reported(response, ladder.layout), response.logprobs),
             "natural": (natural.routes[b], natural.logprobs[STATED][ladder.owner == b])}
    try:
        forced = score(ladder.model, [response], routes=as_reported, keep_routes=True)
        sides["replayed"] = forced.routes[0], forced.logprobs[STATED]
    except RoutingError:  # the ladder has said that nothing can be forced, and why
        pass
    return Example(ladder.layout, response, sides, tokenizer)


def write_example(example: Example, out: Path) -> Path:
    """Write the page beside `out`, and its traces into a folder; returns the page."""
    folder, page = out.with_name(f"{out.stem}-traces"), out.with_name(f"{out.stem}-response.html")
    folder.mkdir(parents=True, exist_ok=True)
    response, files = example.response, []
    tokens = torch.tensor(response.tokens)[None]
    at = torch.arange(len(response.tokens)) >= len(response.tokens) - len(response.logprobs)
    for name, (rows, logprobs) in example.sides.items():
        ids = torch.full((1, tokens.shape[1], len(example.layout.sites), example.layout.top_k), -1)
        ids[0, : len(rows)] = torch.from_numpy(rows.astype(np.int64))
        ids[~possible(ids, example.layout)] = -1
        wide = torch.full((1, tokens.shape[1]), torch.nan)
        wide[0, at] = torch.from_numpy(np.asarray(logprobs, dtype=np.float32))
        version = response.version if name == "engine" else None
        trace = RoutingTrace.from_ids(ids, example.layout, tokens=tokens, weight_version=version)
        files.append(folder / f"{name}.safetensors")
        trace.save(files[-1], {"logprobs": wide, "response": at[None]})
    write_response_page(files, page, tokenizer=example.tokenizer)
    return page
