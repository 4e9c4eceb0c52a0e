"""A sample of the responses of a rollout file, with their routes decoded. `docs/diagnose.md` lists the keys."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.analysis.checkpoints.texts import encode_line
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.integrations.vllm.payloads import NO_ROUTE, reported_routes
from moe_rl.routing.trace import Layout
from moe_rl.storage.terminal import visible
from moe_rl.tasks.rollout_lines import RolloutLine, read_rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Response:
    """One response as the engine reported it."""

    where: str
    """File and line."""
    line: int
    tokens: tuple[int, ...]
    """Prompt and response."""
    prompt: int
    """Tokens of the prompt."""
    logprobs: Float[NDArray, " response"]
    """The engine's, in nats; NaN at tokens that an environment wrote."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Most tokens that sampling kept; 0: all."""
    min_p: float = 0.0
    version: str | None = None
    """Weights that sampled the response, as the engine calls them; control characters are escaped."""
    cached: int | None = None
    """Prompt tokens that came from a prefix cache."""
    ids: Integer[NDArray, "rows layers k"] | None = None
    """Reported experts of every input but the last token, with the layers and the k that the engine reports; -1 where
    the engine reports none."""
    gates: Float[NDArray, "rows layers k"] | None = None
    """Reported combine weights, slot by slot."""
    from_text: bool = False
    """Whether the tokens are the tokenizer's split of a text, not ids of the file."""


class Rollouts:
    """The lines of a file, or objects of the same keys: all are checked, `limit` of them are drawn at random from
    `seed`. Memory does not grow with the file. Raises ConfigError for the first line that cannot be used."""

    def __init__(
        self,
        source: str | Path | Iterable[Mapping[str, Any]],
        layout: Layout,
        *,
        vocabulary: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_layers: int | None = None,
        limit: int = 128,
        seed: int = 0,
    ):
        self.layout, self.vocabulary, self.tokenizer, self.num_layers = layout, vocabulary, tokenizer, num_layers
        self.count = 0
        if limit < 1:
            raise ConfigError(f"--responses {limit} must be at least one")
        if isinstance(source, str | Path):
            source = Path(source).expanduser()
            if not source.is_file():
                raise ConfigError(f"{source} is no file (looked at {source.absolute()}).")
        draw, sample = random.Random(seed), {}
        for where, number, line in read_rollouts(source, unknown_keys=False):
            self.count += 1
            slot = self.count - 1 if self.count <= limit else draw.randrange(self.count)
            response = self._read(line, where, number)
            if slot < limit:  # the routes of the others are not decoded
                sample[slot] = self._with_routes(response, line)
        self.responses = sorted(sample.values(), key=lambda r: (len(r.tokens), r.line))
        """The sample, ordered by length."""

    def _read(self, line: RolloutLine, where: str, number: int) -> Response:
        values, from_text = line.logprobs, line.tokens is None
        if values is None:
            raise ConfigError(f"{where}: logprobs are missing. Write one for each token of the response.")
        tokens, prompt = encode_line(line, where, self.tokenizer)
        end = getattr(self.tokenizer, "eos_token_id", None)
        if from_text and len(tokens) - prompt + 1 == len(values) and end is not None:
            tokens = [*tokens, end]
        if len(values) != len(tokens) - prompt:
            raise ConfigError(f"{where}: {len(values)} log-probs for a response of {len(tokens) - prompt} tokens")
        if prompt < 1 or all(x is None for x in values):
            lack = "the prompt has no token" if prompt < 1 else "no token has a log-prob"
            raise ConfigError(f"{where}: {lack}. Remove the line.")
        if max(tokens) >= self.vocabulary:
            raise ConfigError(f"{where}: token id {max(tokens)}, but the model has {self.vocabulary} tokens")
        version = line.weight_version
        return Response(
            where,
            number,
            tuple(tokens),
            prompt,
            np.array([math.nan if x is None else x for x in values]),
            line.temperature,
            line.top_p,
            line.top_k,
            line.min_p,
            None if version is None else visible(str(version)[:200]),
            line.cached_tokens,
            from_text=from_text,
        )

    def _with_routes(self, response: Response, line: RolloutLine) -> Response:
        if line.routes is None:
            return response
        try:
            ids, gates = reported_routes(
                line.routes,
                layout=self.layout,
                tokens=response.tokens,
                any_k=True,
                num_layers=self.num_layers,
                start=line.routes_start or 0,
                dtype=line.routes_dtype,
                gates=line.gates,
            )
        except (RoutingError, TypeError, SyntaxError, RecursionError) as error:  # numpy parses the name of a dtype
            raise ConfigError(f"{response.where}: {error}") from error
        return replace(response, ids=self._narrow(ids.astype(np.int64), response.where), gates=gates)

    def _narrow(self, ids: NDArray, where: str) -> NDArray:
        """In the narrowest dtype, -1 where the engine marks a missing route. Refuses ids that no expert has."""
        limits = np.array([moe_layer.num_experts for moe_layer in self.layout.moe_layers])
        marks = [mark for mark in NO_ROUTE if not 0 <= mark < limits.max()]
        ids[np.isin(ids[..., 0], marks) & (ids == ids[..., :1]).all(-1)] = -1
        here = ids[:, match_layers(ids.shape[1], self.layout)]
        wrong = ((here < -1) | (here >= limits[:, None])).any(-1)
        if wrong.any():
            t, s = np.argwhere(wrong)[0].tolist()
            raise ConfigError(
                f"{where}: token {t} has experts {here[t, s].tolist()} in layer "
                f"{self.layout.moe_layers[s].decoder_layer}, but ids run from 0 to {limits[s] - 1}. "
                "Are they counted from 1, or of another model or dtype?"
            )
        return ids.astype(np.int16 if limits.max() > 128 else np.int8)


def hash_sets(ids: Integer[NDArray, "rows layer k"]) -> Integer[NDArray, "rows layer"]:
    """One number per set, whatever its order, as int32; -1 where there is no route. Sets of equal numbers are equal but
    for a chance of about 2^-31."""
    table = np.random.default_rng(0).integers(1, 2**31, size=int(max(ids.max(initial=0), 0)) + 1)
    used = ids >= 0
    keys = np.where(used, table[np.where(used, ids, 0)], 0).sum(-1) % 2**31
    return np.where(used[..., 0], keys, -1).astype(np.int32)


def has_routes(response: Response, layout: Layout) -> bool:
    """Whether it has routes of the model's own k."""
    return response.ids is not None and response.ids.shape[2] == layout.top_k


def select_ids(response: Response, layout: Layout) -> Integer[NDArray, "rows moe_layer k"]:
    """The ids of the MoE layers, as the engine numbers its layers; all -1 for a response without routes of this k."""
    if response.ids is None or not has_routes(response, layout):
        return np.full((len(response.tokens) - 1, len(layout.moe_layers), layout.top_k), -1)
    return response.ids[:, match_layers(response.ids.shape[1], layout)]


def count_turns(logprobs: Float[NDArray, " response"]) -> Integer[NDArray, " response"]:
    """The turn of each token, from 1; one begins where the engine goes on after tokens that are not its own."""
    own = np.isfinite(logprobs)
    return 1 + np.cumsum(np.r_[False, own[1:] & ~own[:-1] & (np.cumsum(own)[:-1] > 0)])


def match_layers(reported: int, layout: Layout) -> list[int]:
    """Which of so many reported layers is which MoE layer: all layers, or those that route."""
    moe_layers = layout.moe_layers
    return (
        list(range(reported)) if reported == len(moe_layers) else [moe_layer.decoder_layer for moe_layer in moe_layers]
    )
