"""Rungs: forwards of the responses, each under one condition, and how far the engine's log-probs are from each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Integer
from numpy.typing import NDArray
from torch import nn

from moe_rl.analysis.diagnose.responses import Response, layers_of
from moe_rl.analysis.diagnose.scopes import in_dtype
from moe_rl.analysis.diagnose.scoring import (
    STATED,
    Routes,
    Scores,
    at_temperature,
    hands_out_gates,
    promising,
    readings_of,
    score,
)
from moe_rl.analysis.diagnose.suspects import Suspect
from moe_rl.errors import ConfigError, MoeRlError, RoutingError
from moe_rl.metrics.rounding import rounding
from moe_rl.results.stats import Interval, interval
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import Layout

RESAMPLES, ROUNDS = 999, 3
"""Of the bootstrap; and of readings at further temperatures, the last of which is right to a hundredth."""
LARGEST = 60.0
"""Log-ratios are cut here, e^60, so that one token cannot make a sum infinite."""


@dataclass(frozen=True, eq=False)
class Rung:
    """How far the engine's log-probs are from one forward; a value per response, tokens of a response averaged."""

    name: str
    kl: Float[NDArray, " response"]
    """k3 = r − 1 − log r per token in nats, r = p(this forward) / p(engine): estimates KL(engine ‖ forward)."""
    distance: Float[NDArray, " response"]
    """Mean |log r|."""
    beyond_2: Float[NDArray, " response"]
    """Share of tokens with max(r, 1/r) > 2."""
    flips: Float[NDArray, " response"]
    """Share of tokens whose most likely token is another than under the natural forward."""
    nearer: Float[NDArray, " response"]
    """Share of tokens that are nearer to the engine's than in the natural forward, less the share of those further."""

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def interval(self) -> Interval:
        """Of the KL, over responses."""
        return interval(self.kl)


def distances(log_ratio: Float[NDArray, " token"]) -> tuple[NDArray, NDArray, NDArray]:
    """Of every token k3, |log r|, and whether r or 1/r is above 2: what the fields of a rung are means of."""
    log_ratio = np.clip(log_ratio, -LARGEST, LARGEST)
    return np.expm1(log_ratio) - log_ratio, np.abs(log_ratio), np.abs(log_ratio) > np.log(2)


def remaining(rung: Rung, base: Rung) -> tuple[float, float, float]:
    """What is left of the KL of `base`, as a ratio of means, with the bounds of its 95 % interval over responses (both
    resampled together); of one response, and where nothing is gained, the ratio alone."""
    a, b = rung.kl, base.kl
    ratio = float(a.sum() / b.sum()) if b.sum() > 0 else 1.0
    if len(a) < 2 or np.ptp(a) == np.ptp(b) == 0 or ratio > 0.9:
        return ratio, ratio, ratio
    tiny = b.mean() * 1e-12  # a resample of responses that all agree has no ratio
    found = scipy.stats.bootstrap((a, b), lambda x, y, axis: x.mean(axis) / (y.mean(axis) + tiny), paired=True,
                                  n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0))
    return ratio, float(found.confidence_interval.low), float(found.confidence_interval.high)


@dataclass
class Ladder:
    """The responses, the model, and the forwards run so far."""

    model: nn.Module
    responses: Sequence[Response]
    batch_tokens: int = 4096
    skipped: list[str] = field(default_factory=list)
    """Rungs that this model cannot run, and why."""

    expected: float = 1.0
    """Share of sets of experts that rounding leaves, once `noise` has measured it."""

    def __post_init__(self) -> None:
        self.layout: Layout = layout_of(self.model)
        self.engine = np.concatenate([r.logprobs for r in self.responses])
        self.owner = np.repeat(np.arange(len(self.responses)), [len(r.logprobs) for r in self.responses])
        self.own: Bool[NDArray, " token"] = np.isfinite(self.engine)
        self.counts = np.bincount(self.owner[self.own], minlength=len(self.responses))
        self.readings: Mapping[str, str] = readings_of(self.responses)
        self.natural = score(
            self.model, self.responses, (STATED, *self.readings), batch_tokens=self.batch_tokens, keep_routes=True,
            keep_gates=any(r.gates is not None for r in self.responses) and hands_out_gates(self.model))
        if not np.isfinite(self.natural.logprobs[STATED]).all():
            raise ConfigError("the checkpoint's own log-probs of these tokens are not finite, so there is nothing to "
                              "compare with: are its weights whole, and is the dtype wide enough?")
        self.base = self.rung("natural", self.natural.logprobs[STATED])
        self._read_between()

    def _read_between(self) -> None:
        """Read log-probs at the temperature between those that all are tried at, or beyond them, that explains most of
        the gap, where one promises to."""
        stated = {r.temperature for r in self.responses}
        read = {float(name[2:]): x for name, x in self.natural.logprobs.items() if name.startswith("T=")}
        read |= {t: self.natural.logprobs[STATED] for t in stated if len(stated) == 1}
        gaps = {t: self.rung("", x).mean for t, x in read.items()}
        for _ in range(ROUNDS):
            names = {f"T={t:g}": t for t in promising(gaps, self.base.mean / 2)}
            if not names:
                break
            found = score(self.model, self.responses, list(names), batch_tokens=self.batch_tokens).logprobs
            read |= {t: found[name] for name, t in names.items()}
            gaps |= {t: self.rung("", read[t]).mean for t in names.values()}
        best = min(gaps, key=gaps.__getitem__)
        if best not in stated and f"T={best:g}" not in self.readings:
            self.readings = {**self.readings, f"T={best:g}": at_temperature(best, stated)}
            self.natural.logprobs[f"T={best:g}"] = read[best]

    # ------------------------------------------------------------------ from scores to a rung
    def rung(self, name: str, logprobs: Float[NDArray, " token"], best: NDArray | None = None,
             against: NDArray | None = None) -> Rung:
        """Of the log-probs of all response tokens, compared with the engine's or with those of `against`."""
        found = distances(logprobs - (self.engine if against is None else against))
        flips = np.zeros(len(logprobs)) if best is None else best != self.natural.best
        nearer = np.sign(np.abs(self.natural.logprobs[STATED] - self.engine) - np.abs(logprobs - self.engine))
        return Rung(name, *(self.per_response(x) for x in (*found, flips, nearer)))

    def per_response(self, values: NDArray) -> NDArray:
        """Means over the engine's own tokens of each response."""
        return np.bincount(self.owner[self.own], values[self.own], len(self.responses)) / self.counts

    def shifted(self, by: int) -> Rung:
        """The engine's log-prob of a token beside the natural one of the token `by` later, where a response has both; a
        response that has no such pair is taken as it is."""
        index = np.arange(len(self.engine)) + by
        inside = (index >= 0) & (index < len(self.engine)) & self.own
        index = index.clip(0, len(self.engine) - 1)
        inside &= self.owner[index] == self.owner
        inside |= (np.bincount(self.owner[inside], minlength=len(self.counts))[self.owner] == 0) & self.own
        pairs = np.bincount(self.owner[inside], minlength=len(self.counts))
        natural = self.natural.logprobs[STATED]
        moved = np.where(self.owner[index] == self.owner, natural[index], natural)

        def mean(values: NDArray) -> NDArray:
            return np.bincount(self.owner[inside], values[inside], len(pairs)) / pairs

        kl, distance, beyond_2 = map(mean, distances(moved - self.engine))
        return Rung(f"log-probs {by:+d} token", kl, distance, beyond_2, *np.zeros((2, len(pairs))))

    # ------------------------------------------------------------------ forwards
    def under(self, suspects: Iterable[Suspect], keep_routes: bool = False, keep_gates: bool = False) -> Scores | None:
        """Scores where all of these hold; None, with the reason noted, where the model cannot do so."""
        responses, shift = list(self.responses), 0
        suspects = list(suspects)
        try:
            with ExitStack() as stack:
                model = self.model
                for suspect in suspects:
                    model = stack.enter_context(suspect.model(model))
                    shift += suspect.shift
                    responses = [suspect.tokens(r) for r in responses] if suspect.tokens else responses
                return score(model, responses, (STATED, *self.readings), batch_tokens=self.batch_tokens, shift=shift,
                             keep_routes=keep_routes, keep_gates=keep_gates)
        except Exception as error:  # a family's code, with settings that it never had, may raise anything
            why = "" if isinstance(error, MoeRlError) else f"{type(error).__name__}: "
            self.skipped.append(f"{' and '.join(s.rung for s in suspects)}: {why}{error}")
            return None

    def forced(self, name: str, routes: Routes, gates: bool = False) -> Rung | None:
        """With ids forced, and on request the reported combine weights."""
        try:
            found = score(self.model, self.responses, batch_tokens=self.batch_tokens, routes=routes, gates=gates)
        except RoutingError as error:
            self.skipped.append(f"{name}: {error}")
            return None
        return self.rung(name, found.logprobs[STATED], found.best)

    def noise(self) -> tuple[Rung, Rung]:
        """The model against itself: each response alone and padded, rows in another order and company; and rounding,
        against a copy in the other of float32 and bfloat16, as an honest engine may differ."""
        natural = self.natural.logprobs[STATED]
        alone = score(self.model, self.responses, batch_tokens=1, extra=3).logprobs[STATED]
        fewer = max(1, self.batch_tokens // 3)
        backwards = score(self.model, self.responses[::-1], batch_tokens=fewer).logprobs[STATED]
        parts = np.split(backwards, np.cumsum([len(r.logprobs) for r in self.responses[::-1]])[:-1])
        floors = [self.rung("noise floor", x, against=natural) for x in (alone, np.concatenate(parts[::-1]))]
        other = torch.bfloat16 if next(self.model.parameters()).dtype == torch.float32 else torch.float32
        with in_dtype(other)(self.model) as twin:
            found = score(twin, self.responses, batch_tokens=self.batch_tokens, keep_routes=True)
        self.expected = agreement(found.routes, self.natural.routes)
        return max(floors, key=lambda r: r.mean), self.rung("rounding", found.logprobs[STATED], against=natural)

    @property
    def rounded(self) -> float:
        """How far another order of summation may move a log-prob of these tokens, in nats, as a root mean square."""
        config: Any = self.model.config
        eps = torch.finfo(next(self.model.parameters()).dtype).eps
        magnitude = np.sqrt(np.mean(self.natural.logprobs[STATED][self.own] ** 2))
        return rounding(eps, config.get_text_config().num_hidden_layers, float(magnitude))

    # ------------------------------------------------------------------ where routes are known
    @property
    def routed(self) -> bool:
        """Whether some response has routes of the model's own k, so that they can be forced."""
        return any(usable(r, self.layout) for r in self.responses)


def agreement(a: Sequence[NDArray], b: Sequence[NDArray]) -> float:
    """Share of (token, site) pairs at which both chose the same experts, in whatever order."""
    return float(np.mean(np.concatenate([(keys(x) == keys(y)).ravel() for x, y in zip(a, b, strict=True)])))


def keys(ids: Integer[NDArray, "rows layer k"]) -> Integer[NDArray, "rows layer"]:
    """One number per set, whatever its order, as int32; -1 where there is no route. Sets of equal numbers are equal but
    for a chance of about 2^-31."""
    table = np.random.default_rng(0).integers(1, 2**31, size=int(max(ids.max(initial=0), 0)) + 1)
    used = ids >= 0
    found = np.where(used, table[np.where(used, ids, 0)], 0).sum(-1) % 2**31
    return np.where(used[..., 0], found, -1).astype(np.int32)


def usable(response: Response, layout: Layout) -> bool:
    """Whether it has routes of the model's own k."""
    return response.ids is not None and response.ids.shape[2] == layout.top_k


def as_reported(response: Response, layout: Layout) -> Integer[NDArray, "rows site k"]:
    """The ids of the sites, as the engine numbers its layers; all -1 for a response without routes of this k."""
    if not usable(response, layout):
        return np.full((len(response.tokens) - 1, len(layout.sites), layout.top_k), -1)
    assert response.ids is not None
    return response.ids[:, layers_of(response.ids.shape[1], layout)]


def partly(prompt: bool | None = None, sites: Sequence[int] | None = None) -> Routes:
    """The reported ids at some places only: rows that decide the prompt, or the response; some sites."""

    def routes(response: Response, layout: Layout) -> NDArray:
        ids = as_reported(response, layout).copy()
        if prompt is not None:
            free = slice(response.prompt - 1, None) if prompt else slice(0, response.prompt - 1)
            ids[free] = -1
        if sites is not None:
            ids[:, [s for s in range(ids.shape[1]) if s not in sites]] = -1
        return ids

    return routes


def alone(ladder: Ladder, at: int) -> Iterator[tuple[int, float]]:
    """Per site, the KL where the reported ids of this site alone are forced, on the first `at` responses with a gap."""
    worst = np.argsort(-ladder.base.kl, kind="stable")[:at]
    few = Ladder(ladder.model, [ladder.responses[i] for i in sorted(worst)], ladder.batch_tokens)
    for s in range(len(ladder.layout.sites)):
        rung = few.forced(f"site {s}", partly(sites=[s]))
        if rung is not None:
            yield s, rung.mean
