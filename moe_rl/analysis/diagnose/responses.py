"""A file of rollouts, read in a stream: of every line its form is checked, and a random sample of them is kept.

One JSON object per line and response; `docs/diagnose.md` lists the keys.
"""

from __future__ import annotations

import difflib
import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Integer
from numpy.typing import NDArray

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.integrations.vllm.payloads import NO_ROUTE, reported_routes
from moe_rl.models.tokens import plain_tokens
from moe_rl.routing.trace import Layout
from moe_rl.storage.terminal import visible
from moe_rl.tasks.json_lines import objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = ('{"tokens": [ids], "prompt_length": n, "logprobs": […]}, {"prompt_tokens": [ids], "response_tokens": [ids], '
         '"logprobs": […]} or {"prompt": "…", "response": "…", "logprobs": […]}')
ROUTES = ("routes", "routed_experts")
OPTIONAL = ("prompt_length", "logprobs", *ROUTES, "routes_start", "routes_dtype", "gates", "temperature", "top_p",
            "top_k", "min_p", "weight_version", "cached_tokens")
"""Keys whose misspelling would be read as their absence."""
LOWEST, ABOVE_ONE = -1e6, 1e-4
"""Between these is a log-probability; the second is rounding."""
LONGEST = 200
"""Characters of a value that an error shows."""


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
    """The engine's, in nats; NaN at tokens that are not its own (what an environment wrote)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Most tokens that sampling kept; 0: all."""
    min_p: float = 0.0
    version: str | None = None
    """Which weights sampled it, in the words of the engine, what would act on a terminal written out."""
    cached: int | None = None
    """Prompt tokens that came from a prefix cache."""
    ids: Integer[NDArray, "rows layers k"] | None = None
    """Reported experts of every input but the last token, with the layers and the k that the engine reports; -1 where
    it says that there is none."""
    gates: Float[NDArray, "rows layers k"] | None = None
    """Reported combine weights, slot by slot."""


class Rollouts:
    """The lines of a file, or objects of the same keys: all are checked, `limit` are kept, drawn at random from `seed`.
    Memory does not grow with the file. Raises ConfigError for the first line
    that cannot be used, with what is wrong with it."""

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
        draw, kept = random.Random(seed), {}
        for where, line, entry in _entries(source):
            self.count += 1
            slot = self.count - 1 if self.count <= limit else draw.randrange(self.count)
            response = self._read(entry, where, line)
            if slot < limit:  # only of these are routes worth decoding
                kept[slot] = self._with_routes(response, entry)
        if not kept:
            raise ConfigError(f"{source} is empty. Write one JSON object per response: {FORMS}.")
        self.responses = sorted(kept.values(), key=lambda r: (len(r.tokens), r.line))
        """Those kept, ordered by length."""

    # ------------------------------------------------------------------ one line
    def _read(self, entry: Mapping[str, Any], where: str, line: int) -> Response:
        if meant := _misspelt(tuple(entry)):
            raise ConfigError(f"{where}: the key {_short(meant[0])} is unknown: did you mean {meant[1]!r}? Rename it.")
        values = entry.get("logprobs")
        if values == []:
            raise ConfigError(f"{where}: the response has no tokens. Remove the line.")
        if {"input", "output", "score"} <= set(entry) and values is None:
            raise ConfigError(f"{where}: verl's rollout_data_dir contains no log-probs of the engine. In verl, use "
                              "the metric routing/engine_kl_k3. To read the responses, run `moe-rl runs import LOG "
                              "--rollouts FOLDER`.")
        if not isinstance(values, list):
            raise ConfigError(f'{where}: no list "logprobs"; the keys are {_keys(entry)}. Expected {FORMS}.')
        tokens, prompt = self._tokens(entry, where, len(values))
        if len(values) != len(tokens) - prompt:
            raise ConfigError(f"{where}: {len(values)} log-probs for a response of {len(tokens) - prompt} tokens "
                              f"({len(tokens)} with the prompt). Write token ids, and one log-prob for each; null "
                              "marks tokens that the engine did not sample.")
        if prompt < 1:
            raise ConfigError(f"{where}: the prompt has no token, so nothing predicts the first token of the response. "
                              "Remove the line.")
        odd = [x for x in values if not (x is None or _number(x) and LOWEST < x <= ABOVE_ONE)]
        if odd:
            raise ConfigError(f"{where}: {_short(odd[0])} is not a log-probability ({len(odd)} of {len(values)} are "
                              "not). Write finite numbers of at most 0, in nats, or null for tokens that the engine "
                              "did not sample.")
        if all(x is None for x in values):
            raise ConfigError(f"{where}: every log-prob is null. Remove the line.")
        cached, version = entry.get("cached_tokens"), entry.get("weight_version")
        if cached is not None and not (_integer(cached) and 0 <= cached <= len(tokens)):
            raise ConfigError(f"{where}: cached_tokens is {_short(cached)}; expected a number from 0 to {len(tokens)}")
        return Response(
            where, line, tokens, prompt, np.array([math.nan if x is None else x for x in values], dtype=np.float64),
            _setting(entry, "temperature", where, 1.0, 0.0, 1e6), _setting(entry, "top_p", where, 1.0, 0.0, 1.0),
            int(_setting(entry, "top_k", where, 0, -2, 2**31)), _setting(entry, "min_p", where, 0.0, -1e-9, 1.0),
            None if version is None else visible(_short(version, str)), cached)

    def _tokens(self, entry: Mapping[str, Any], where: str, count: int) -> tuple[tuple[int, ...], int]:
        """Token ids of prompt and response, and how many are the prompt's."""
        tokens: Any
        prompt: Any
        if "tokens" in entry:
            tokens, prompt = entry["tokens"], entry.get("prompt_length")
            if not _integer(prompt):
                raise ConfigError(f'{where}: "tokens" needs "prompt_length", the number of tokens of the prompt, not '
                                  f'{_short(prompt)}')
        elif "response_tokens" in entry:
            head, body = entry.get("prompt_tokens"), entry["response_tokens"]
            if not (isinstance(head, list) and isinstance(body, list)):
                raise ConfigError(f"{where}: prompt_tokens and response_tokens must both be lists of ids")
            tokens, prompt = head + body, len(head)
        elif isinstance(entry.get("prompt"), str) and isinstance(entry.get("response"), str):
            tokens, prompt = self._encoded(entry["prompt"], entry["response"], where, count)
        else:
            raise ConfigError(f"{where}: neither token ids nor text; the keys are {_keys(entry)}. Expected {FORMS}.")
        if not isinstance(tokens, list) or not all(map(_integer, tokens)):
            raise ConfigError(f"{where}: tokens must be a list of ids")
        if odd := [t for t in tokens if not 0 <= t < self.vocabulary]:
            raise ConfigError(f"{where}: token id {_short(odd[0])}, but the ids of the model run from 0 to "
                              f"{self.vocabulary - 1}. Are these rollouts of another model?")
        return tuple(tokens), prompt

    def _encoded(self, prompt: str, response: str, where: str, count: int) -> tuple[list[int], int]:
        """Text as the tokenizer cuts it; where exactly its end token is missing, with it."""
        if self.tokenizer is None:
            raise ConfigError(f"{where}: text, but the checkpoint has no tokenizer. Write token ids.")
        head = plain_tokens(prompt, self.tokenizer)
        body = self.tokenizer.encode(response, add_special_tokens=False)
        if len(body) + 1 == count and self.tokenizer.eos_token_id is not None:
            body = [*body, self.tokenizer.eos_token_id]
        return head + body, len(head)

    # ------------------------------------------------------------------ its routes
    def _with_routes(self, response: Response, entry: Mapping[str, Any]) -> Response:
        payload = next((entry[key] for key in ROUTES if entry.get(key) is not None), None)
        if payload is None:
            return response
        start, dtype = entry.get("routes_start"), entry.get("routes_dtype")
        if not (start is None or _integer(start)):
            raise ConfigError(f"{response.where}: routes_start is {_short(start)}; expected the number of the first "
                              "token with routing")
        if not (dtype is None or isinstance(dtype, str)):
            raise ConfigError(f"{response.where}: routes_dtype is {_short(dtype)}; expected a name such as uint8")
        try:
            ids, gates = reported_routes(payload, layout=self.layout, tokens=response.tokens, any_k=True,
                                         num_layers=self.num_layers, start=start or 0, dtype=dtype,
                                         gates=entry.get("gates"))
        except (RoutingError, TypeError, SyntaxError, RecursionError) as error:  # numpy parses the name of a dtype
            raise ConfigError(f"{response.where}: {error}") from error
        ids = self._within(ids, response.where)
        return replace(response, ids=ids, gates=gates)

    def _within(self, ids: NDArray, where: str) -> NDArray:
        """In the narrowest dtype, -1 where the engine says "no route". Refuses ids that no expert has."""
        most = max(site.num_experts for site in self.layout.sites)
        marks = [mark for mark in NO_ROUTE if not 0 <= mark < most]
        ids[np.isin(ids[..., 0], marks) & (ids == ids[..., :1]).all(-1)] = -1
        here = ids[:, match_layers(ids.shape[1], self.layout)]
        limits = np.array([site.num_experts for site in self.layout.sites])[:, None]
        wrong = ((here < -1) | (here >= limits)).any(-1)
        if wrong.any():
            t, s = np.argwhere(wrong)[0].tolist()
            raise ConfigError(f"{where}: token {t} has experts {here[t, s].tolist()} in layer "
                              f"{self.layout.sites[s].decoder_layer}, but ids run from 0 to {int(limits[s, 0]) - 1} "
                              f"({int(wrong.sum())} of {wrong.size} rows do not fit). "
                              + ("Are they counted from 1?" if (here <= limits).all() and here.max() > 0
                                 and here[here >= 0].min() == 1
                                 else "Are they of another model, or of another dtype?"))
        return ids.astype(np.int16 if most > 128 else np.int8)


def hash_sets(ids: Integer[NDArray, "rows layer k"]) -> Integer[NDArray, "rows layer"]:
    """One number per set, whatever its order, as int32; -1 where there is no route. Sets of equal numbers are equal but
    for a chance of about 2^-31."""
    table = np.random.default_rng(0).integers(1, 2**31, size=int(max(ids.max(initial=0), 0)) + 1)
    used = ids >= 0
    found = np.where(used, table[np.where(used, ids, 0)], 0).sum(-1) % 2**31
    return np.where(used[..., 0], found, -1).astype(np.int32)


def has_routes(response: Response, layout: Layout) -> bool:
    """Whether it has routes of the model's own k."""
    return response.ids is not None and response.ids.shape[2] == layout.top_k


def select_ids(response: Response, layout: Layout) -> Integer[NDArray, "rows site k"]:
    """The ids of the sites, as the engine numbers its layers; all -1 for a response without routes of this k."""
    if not has_routes(response, layout):
        return np.full((len(response.tokens) - 1, len(layout.sites), layout.top_k), -1)
    assert response.ids is not None
    return response.ids[:, match_layers(response.ids.shape[1], layout)]


def count_turns(logprobs: Float[NDArray, " response"]) -> Integer[NDArray, " response"]:
    """The turn of each token, from 1; one begins where the engine goes on after tokens that are not its own."""
    own = np.isfinite(logprobs)
    return 1 + np.cumsum(np.r_[False, own[1:] & ~own[:-1] & (np.cumsum(own)[:-1] > 0)])


# ---------------------------------------------------------------------- small parts
def match_layers(reported: int, layout: Layout) -> list[int]:
    """Which of so many reported layers is which site: all layers, or those that route."""
    sites = layout.sites
    return list(range(reported)) if reported == len(sites) else [site.decoder_layer for site in sites]


def _entries(source: Any) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
    if not isinstance(source, str | Path):
        for n, entry in enumerate(source, start=1):
            yield f"rollout {n}", n, entry
        return
    file = Path(source).expanduser()
    if not file.is_file():
        what = "is a folder; give one JSONL file" if file.is_dir() else "there is no such file"
        raise ConfigError(f"{file}: {what} (looked at {file.absolute()}).")
    yield from objects(file)


def _setting(entry: Mapping[str, Any], name: str, where: str, default: float, above: float, most: float) -> float:
    value = entry.get(name)
    if value is None:
        return default
    if not _number(value) or not above < value <= most:
        raise ConfigError(f"{where}: {name} is {_short(value)}; expected a number above {above:g}, and at most "
                          f"{most:g}")
    return float(value)


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _keys(entry: Mapping[str, Any]) -> str:
    return _short(", ".join(map(repr, entry)) or "none", str)


@functools.lru_cache(maxsize=64)
def _misspelt(keys: tuple[str, ...]) -> tuple[str, str] | None:
    """The first key that is nearly one of OPTIONAL that is absent, and that one."""
    absent = [key for key in OPTIONAL if key not in keys]
    near = {key: difflib.get_close_matches(key, absent, n=1, cutoff=0.85) for key in keys if key not in OPTIONAL}
    return next(((key, found[0]) for key, found in near.items() if found), None)


def _short(value: Any, write: Callable[[Any], str] = repr) -> str:
    """A value as an error shows it: its beginning, where it is long."""
    text = write(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
