"""Fits: forwards of the responses, each under one condition, and how far the engine's log-probs are from each.

A forward is read at several temperatures at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_rl.analysis.diagnose.hypotheses import Hypothesis, cast_to
from moe_rl.analysis.diagnose.responses import Response, count_turns, has_routes, hash_sets, match_layers, select_ids
from moe_rl.errors import ConfigError, MoeRlError, RoutingError
from moe_rl.metrics.rounding import rounding
from moe_rl.models.vocabulary import kept
from moe_rl.results.stats import Interval, interval
from moe_rl.routing.hooks import record_routing, replay_routing
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import Layout, RoutingTrace

STATED = "as stated"
"""The reading that the file asks for: its own temperature, over the whole vocabulary."""
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
LOGITS, AT_ONCE = 2**26, 2**24
"""Most logits of one forward of several responses, and most that are read at once."""
Routes = Callable[[Response, Layout], NDArray]
"""Ids [rows, site, k] to be forced on a response, -1 where free."""
Positions = Callable[[Response], NDArray]
"""Of every token of a response."""
ROUNDS = 3
"""Of readings at further temperatures, the last of which is right to a hundredth."""
LARGEST = 60.0
"""Log-ratios are cut here, e^60, so that one token cannot make a sum infinite."""


@dataclass(frozen=True, eq=False)
class Fit:
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
    squares: Float[NDArray, " response"] | float = field(default=0.0, kw_only=True)
    products: Float[NDArray, " response"] | float = field(default=0.0, kw_only=True)
    """Sums over tokens of |log r|², and of |log r| times that of the natural forward, by the square of their number."""
    peak: Float[NDArray, " response"] | float = field(default=0.0, kw_only=True)
    """|log r| of the token that has the largest in the natural forward, by the number of tokens."""

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def interval(self) -> Interval:
        """Of the KL, over responses."""
        return interval(self.kl)


def compute_distances(log_ratio: Float[NDArray, " token"]) -> tuple[NDArray, NDArray, NDArray]:
    """Of every token k3, |log r|, and whether r or 1/r is above 2: what the fields of a fit are means of."""
    log_ratio = np.clip(log_ratio, -LARGEST, LARGEST)
    return np.expm1(log_ratio) - log_ratio, np.abs(log_ratio), np.abs(log_ratio) > np.log(2)


def compute_left(fit: Fit, base: Fit) -> tuple[float, float, float]:
    """What is left of the mean |log r| of `base`, as a ratio R of means, with its 95 % interval: R ± 1.96 √Σ e² / Σ b,
    e = a − R b, of the a and b of responses, or of tokens, whichever is wider (delta method)."""
    a, b = fit.distance, base.distance
    if not b.sum() > 0:
        return 1.0, 1.0, 1.0
    ratio = float(a.sum() / b.sum())
    tokens = np.sum(fit.squares - 2 * ratio * fit.products + ratio**2 * base.squares)
    error = 1.96 * float(np.sqrt(max(np.sum((a - ratio * b) ** 2), tokens)) / b.sum())
    return ratio, max(0.0, ratio - error), ratio + error


@dataclass
class Scorer:
    """The responses, the model, and the forwards run so far."""

    model: nn.Module
    responses: Sequence[Response]
    batch_tokens: int = 4096
    skipped: list[str] = field(default_factory=list)
    """Forwards that this model cannot run, and why."""

    expected: float = 1.0
    """Share of sets of experts that rounding leaves, once `noise` has measured it."""

    def __post_init__(self) -> None:
        self.layout: Layout = layout_of(self.model)
        self.engine = np.concatenate([r.logprobs for r in self.responses])
        self.owner = np.repeat(np.arange(len(self.responses)), [len(r.logprobs) for r in self.responses])
        self.own: Bool[NDArray, " token"] = np.isfinite(self.engine)
        self.counts = np.bincount(self.owner[self.own], minlength=len(self.responses))
        self.readings: Mapping[str, str] = list_readings(self.responses)
        self.natural = score(
            self.model, self.responses, (STATED, *self.readings), batch_tokens=self.batch_tokens, keep_routes=True,
            keep_gates=any(r.gates is not None for r in self.responses) and hands_out_gates(self.model))
        if not np.isfinite(self.natural.logprobs[STATED]).all():
            raise ConfigError("the checkpoint's log-probs of these tokens are not finite. Check that its weights are "
                              "complete, or use a wider --dtype.")
        self.base = self.compare("natural", self.natural.logprobs[STATED])
        self._read_between()

    def _read_between(self) -> None:
        """Read log-probs at the temperature between those that all are tried at, or beyond them, that explains most of
        the gap, where one promises to."""
        stated = {r.temperature for r in self.responses}
        read = {float(name[2:]): x for name, x in self.natural.logprobs.items() if name.startswith("T=")}
        read |= {t: self.natural.logprobs[STATED] for t in stated if len(stated) == 1}
        gaps = {t: self.compare("", x).mean for t, x in read.items()}
        for _ in range(ROUNDS):
            names = {f"T={t:g}": t for t in choose_temperatures(gaps, self.base.mean / 2)}
            if not names:
                break
            found = score(self.model, self.responses, list(names), batch_tokens=self.batch_tokens).logprobs
            read |= {t: found[name] for name, t in names.items()}
            gaps |= {t: self.compare("", read[t]).mean for t in names.values()}
        best = min(gaps, key=gaps.__getitem__)
        if best not in stated and f"T={best:g}" not in self.readings:
            self.readings = {**self.readings, f"T={best:g}": describe_temperature(best, stated)}
            self.natural.logprobs[f"T={best:g}"] = read[best]

    # ------------------------------------------------------------------ from scores to a fit
    def compare(self, name: str, logprobs: Float[NDArray, " token"], best: NDArray | None = None,
                against: NDArray | None = None) -> Fit:
        """Of the log-probs of all response tokens, compared with the engine's or with those of `against`."""
        found = compute_distances(logprobs - (self.engine if against is None else against))
        flips = np.zeros(len(logprobs)) if best is None else best != self.natural.best
        natural = compute_distances(self.natural.logprobs[STATED] - self.engine)[1]
        nearer = np.sign(natural - found[1])
        squares, products = (self.average_by_response(found[1] * x) / self.counts for x in (found[1], natural))
        return Fit(name, *(self.average_by_response(x) for x in (*found, flips, nearer)),
                   squares=squares, products=products, peak=found[1][self.peaks] / self.counts)

    @cached_property
    def peaks(self) -> Int64[NDArray, " response"]:
        """Of each response the token with the largest natural gap."""
        gap = np.where(self.own, np.abs(self.natural.logprobs[STATED] - self.engine), -1)
        return np.lexsort((gap, self.owner))[np.cumsum([len(r.logprobs) for r in self.responses]) - 1]

    def average_by_response(self, values: NDArray) -> NDArray:
        """Means over the engine's own tokens of each response."""
        return np.bincount(self.owner[self.own], values[self.own], len(self.responses)) / self.counts

    def compare_shifted(self, by: int) -> Fit:
        """The engine's log-prob of a token beside the natural one of the token `by` later."""
        return self._compare_beside(f"log-probs {by:+d} token", np.arange(len(self.engine)) + by)

    def compare_turns(self, by: int) -> Fit:
        """The engine's log-probs of a turn beside the natural ones `by` turns later, after the last turn the first."""
        index, start = np.full(len(self.engine), -1), 0
        for r in self.responses:
            turn = np.where(np.isfinite(r.logprobs), count_turns(r.logprobs), 0)
            places = [start + np.flatnonzero(turn == k) for k in range(1, int(turn.max()) + 1)]
            for here, there in zip(places, [*places[by:], *places[:by]], strict=True):
                both = min(len(here), len(there))
                index[here[:both]] = there[:both]
            start += len(turn)
        return self._compare_beside(f"log-probs {by:+d} turn", index)

    def _compare_beside(self, name: str, index: NDArray) -> Fit:
        """The engine's log-prob of a token beside the natural one at `index`, where that is of the same response; a
        response that has no such pair is taken as it is."""
        inside = (index >= 0) & (index < len(self.engine)) & self.own
        index = index.clip(0, len(self.engine) - 1)
        inside &= self.owner[index] == self.owner
        alone = (np.bincount(self.owner[inside], minlength=len(self.counts))[self.owner] == 0) & self.own
        natural = self.natural.logprobs[STATED]
        apart = np.where(alone, natural, natural[index]) - self.engine
        inside |= alone
        pairs = np.bincount(self.owner[inside], minlength=len(self.counts))

        def mean(values: NDArray) -> NDArray:
            return np.bincount(self.owner[inside], values[inside], len(pairs)) / pairs

        kl, distance, beyond_2 = map(mean, compute_distances(apart))
        return Fit(name, kl, distance, beyond_2, *np.zeros((2, len(pairs))), squares=mean(np.abs(apart) ** 2) / pairs,
                   peak=np.abs(apart * inside)[self.peaks] / pairs)

    def compare_readings(self) -> Iterator[tuple[str, str, Fit]]:
        """What else the engine may call a log-prob of its natural forward: cause, sentence, fit."""
        natural = self.natural.logprobs[STATED]
        for by in (1, -1):
            yield ("logprob_shift", f"the engine's log-probs are off by one: that of token t is token t{by:+d}'s",
                   self.compare_shifted(by))
        turns = max(int(count_turns(r.logprobs).max()) for r in self.responses)
        for by in (1, -1)[: turns - 1]:  # of two turns the next is the one before
            yield ("response_mask", "the engine's log-probs are beside another turn: its mask of responses is off by "
                   f"{by:+d}", self.compare_turns(by))
        blank = (self.engine == 0) & (natural < -np.log(2))
        if blank.any() and (self.engine[self.own] != 0).any():
            yield ("response_mask", "the engine's log-probs are 0 where it sampled nothing: its mask of responses "
                   "takes in tokens of an environment, or a grammar forced them",
                   self.compare("zeros where nothing was sampled", np.where(blank, 0.0, natural)))
        for base in (2, 10):
            yield ("log_base", f"the engine's log-probs are to base {base}, not natural",
                   self.compare(f"log-probs to base {base}", natural / np.log(base)))
        greedy = score(self.model, self.responses, ("greedy",), batch_tokens=self.batch_tokens).logprobs["greedy"]
        yield ("greedy", "the engine reports the log-prob of the most likely token, not of the sampled one",
               self.compare("log-probs of the most likely token", greedy))
        found, starts = natural.copy(), np.cumsum([0, *(len(r.logprobs) for r in self.responses)])
        for i, r in enumerate(self.responses):
            here, own = slice(starts[i], starts[i + 1]), np.isfinite(r.logprobs)
            others = [natural[starts[j] : starts[j + 1]] for j, o in enumerate(self.responses)
                      if len(o.logprobs) == len(r.logprobs) and own.sum() >= 4]
            best = min(others, key=lambda x: float(np.abs(x - r.logprobs)[own].sum()), default=found[here])
            found[here] = best
        yield ("others_logprobs", "the engine reports log-probs of another response of the file",
               self.compare("log-probs of another response", found))

    # ------------------------------------------------------------------ forwards
    def score_under(self, hypotheses: Sequence[Hypothesis], keep_routes: bool = False,
                    keep_gates: bool = False) -> Scores | None:
        """Scores where all of these hold; None, with the reason noted, where the model cannot do so."""
        responses, positions = list(self.responses), None
        try:
            with ExitStack() as stack:
                model = self.model
                for hypothesis in sorted(hypotheses, key=lambda h: h.cause == "dtype"):  # a copy, of what is changed
                    model = stack.enter_context(hypothesis.model(model))
                    positions = hypothesis.positions or positions
                    responses = [hypothesis.tokens(r) for r in responses] if hypothesis.tokens else responses
                found = score(model, responses, (STATED, *self.readings), batch_tokens=self.batch_tokens,
                              positions=positions, keep_routes=keep_routes, keep_gates=keep_gates)
            if np.isfinite(found.logprobs[STATED]).all():
                return found
            raise ConfigError("log-probs are not finite")
        except Exception as error:  # a family's code, with settings that it never had, may raise anything
            why = "" if isinstance(error, MoeRlError) else f"this model cannot run so, {type(error).__name__}: "
            self.skipped.append(f"not tried: {' and '.join(s.name for s in hypotheses)} ({why}{error})")
            return None

    def force(self, name: str, routes: Routes, gates: bool = False) -> Fit | None:
        """With ids forced, and on request the reported combine weights."""
        try:
            found = score(self.model, self.responses, batch_tokens=self.batch_tokens, routes=routes, gates=gates)
        except RoutingError as error:
            self.skipped.append(f"not tried: {name} ({error})")
            return None
        return self.compare(name, found.logprobs[STATED], found.best)

    def measure_noise(self) -> tuple[Fit, Fit]:
        """The model against itself: each response alone and padded, rows in another order and company; and rounding,
        against a copy in the other of float32 and bfloat16, as an honest engine may differ."""
        natural = self.natural.logprobs[STATED]
        alone = score(self.model, self.responses, batch_tokens=1, extra=3)
        fewer = max(1, self.batch_tokens // 3)
        backwards = score(self.model, self.responses[::-1], batch_tokens=fewer)
        ends = np.cumsum([len(r.logprobs) for r in self.responses[::-1]])[:-1]
        forwards = [np.concatenate(np.split(x, ends)[::-1]) for x in (backwards.logprobs[STATED], backwards.best)]
        floors = [self.compare("noise floor", x, best, against=natural)
                  for x, best in ((alone.logprobs[STATED], alone.best), forwards)]
        other = torch.bfloat16 if next(self.model.parameters()).dtype == torch.float32 else torch.float32
        with cast_to(other)(self.model) as twin:
            found = score(twin, self.responses, batch_tokens=self.batch_tokens, keep_routes=True)
        self.expected = measure_agreement(found.routes, self.natural.routes)
        rounded = self.compare("rounding", found.logprobs[STATED], found.best, against=natural)
        return max(floors, key=lambda r: r.mean), rounded

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
        return any(has_routes(r, self.layout) for r in self.responses)


def measure_agreement(a: Sequence[NDArray], b: Sequence[NDArray]) -> float:
    """Share of (token, site) pairs at which both chose the same experts, in whatever order."""
    return float(np.mean(np.concatenate([(hash_sets(x) == hash_sets(y)).ravel() for x, y in zip(a, b, strict=True)])))


def mask_ids(prompt: bool | None = None, sites: Sequence[int] | None = None) -> Routes:
    """The reported ids at some places only: rows that decide the prompt, or the response; some sites."""

    def routes(response: Response, layout: Layout) -> NDArray:
        ids = select_ids(response, layout).copy()
        if prompt is not None:
            free = slice(response.prompt - 1, None) if prompt else slice(0, response.prompt - 1)
            ids[free] = -1
        if sites is not None:
            ids[:, [s for s in range(ids.shape[1]) if s not in sites]] = -1
        return ids

    return routes


def force_each_site(scorer: Scorer, at: int) -> Iterator[tuple[int, float]]:
    """Per site, the KL where the reported ids of this site alone are forced, on the first `at` responses with a gap."""
    worst = np.argsort(-scorer.base.kl, kind="stable")[:at]
    few = Scorer(scorer.model, [scorer.responses[i] for i in sorted(worst)], scorer.batch_tokens)
    for s in range(len(scorer.layout.sites)):
        fit = few.force(f"site {s}", mask_ids(sites=[s]))
        if fit is not None:
            yield s, fit.mean


# ---------------------------------------------------------------------- one forward
@dataclass(frozen=True)
class Rows:
    """Some responses, right-padded."""

    responses: tuple[Response, ...]
    tokens: Int64[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    response: Bool[Tensor, "batch time"]

    @staticmethod
    def of(responses: Sequence[Response], extra: int = 0) -> Rows:
        """With `extra` columns of padding more than they need."""
        lengths = torch.tensor([len(r.tokens) for r in responses])
        tokens = torch.zeros(len(responses), int(lengths.max()) + extra, dtype=torch.long)
        for row, r in zip(tokens, responses, strict=True):
            row[: len(r.tokens)] = torch.tensor(r.tokens)
        at = torch.arange(tokens.shape[1])
        mask = at < lengths[:, None]
        return Rows(tuple(responses), tokens, mask, mask & (at >= torch.tensor([r.prompt for r in responses])[:, None]))


@dataclass
class Scores:
    """What one forward says of the tokens of all responses, those of the prompt left out, response after response."""

    logprobs: dict[str, Float[NDArray, " token"]]
    """By reading."""
    best: NDArray
    """The most likely token at each place."""
    routes: list[NDArray]
    """Per response the experts used [rows, site, k], -1 where none; empty where they were not asked for."""
    gates: list[NDArray]
    """Their combine weights, where asked for."""


def cut_batches(responses: Sequence[Response], batch_tokens: int, vocabulary: int) -> Iterator[list[Response]]:
    """The responses in their order, cut so that a forward holds at most `batch_tokens` tokens, padding included, and
    no more logits than memory is likely to have; one response is never cut."""
    rows: list[Response] = []
    most, longest = min(batch_tokens, LOGITS // vocabulary), 0
    for response in responses:
        longest = max(longest, len(response.tokens))
        if rows and (len(rows) + 1) * longest > most:
            yield rows
            rows, longest = [], len(response.tokens)
        rows.append(response)
    if rows:
        yield rows


@torch.no_grad()
def score(
    model: nn.Module,
    responses: Sequence[Response],
    readings: Sequence[str] = (STATED,),
    *,
    batch_tokens: int = 4096,
    routes: Routes | None = None,
    gates: bool = False,
    positions: Positions | None = None,
    extra: int = 0,
    keep_routes: bool = False,
    keep_gates: bool = False,
) -> Scores:
    """Scores of the responses under `model`, in their order.

    `routes` forces ids, with `gates` the reported combine weights too; `positions` gives other positions;
    `extra` pads. Raises RoutingError where the model cannot do so.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    found: dict[str, list[NDArray]] = {name: [] for name in readings}
    best, used, weights = [], [], []
    for part in cut_batches(responses, batch_tokens, vocabulary):
        rows = Rows.of(part, extra)
        trace = None if routes is None else make_trace(model, rows, routes, gates)
        logits, seen, scored = _forward(model, rows, trace, positions, keep_routes, keep_gates)
        first = rows.tokens.shape[1] - logits.shape[1]
        at = rows.response[:, first:]
        logits = logits[at.to(logits.device)]
        chosen, owner = (x.to(logits.device) for x in (rows.tokens[:, first:][at], at.nonzero()[:, 0]))
        for own, token, of in zip(*(x.split(max(1, AT_ONCE // vocabulary)) for x in (logits, chosen, owner)),
                                  strict=True):
            best.append(own.argmax(-1).cpu().numpy())
            for name in readings:
                found[name].append(read_logprobs(own.float(), token, of, part, name).double().cpu().numpy())
        used += seen
        weights += scored
    return Scores({name: np.concatenate(x) for name, x in found.items()}, np.concatenate(best), used, weights)


def _forward(
    model: nn.Module, rows: Rows, trace: RoutingTrace | None, positions: Positions | None, keep: bool, scored: bool
) -> tuple[Tensor, list[NDArray], list[NDArray]]:
    """Logits from the first place at which a response has a token; on request the experts used and their weights."""
    device = next(model.parameters()).device
    inputs, followed = rows.tokens[:, :-1].to(device), rows.mask[:, 1:].to(device)
    settings = {}
    if positions:  # with a mask, since transformers takes a jump of positions for a packed sequence
        moved = torch.arange(inputs.shape[1]).repeat(len(inputs), 1)
        for row, r in zip(moved, rows.responses, strict=True):
            row[: len(r.tokens) - 1] = torch.from_numpy(positions(r)[:-1])
        settings = {"position_ids": moved.to(device), "attention_mask": rows.mask[:, :-1].long().to(device)}
    first = max(1, int(rows.response.any(0).long().argmax()))
    kept = rows.tokens.shape[1] - first
    with replay_routing(model, trace, part=True):
        if not keep:
            return model(input_ids=inputs, use_cache=False, logits_to_keep=kept, **settings).logits, [], []
        with record_routing(model, scores=scored) as recording:
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=kept, **settings).logits
    ids = recording.trace(inputs, followed).ids().cpu().numpy()
    gates = recording.scores(len(inputs)).gates.cpu().numpy() if scored else None
    rows_of = [len(r.tokens) - 1 for r in rows.responses]
    narrow = np.int8 if ids.max(initial=0) < 128 else np.int16
    return (logits, [ids[b, :n].astype(narrow) for b, n in enumerate(rows_of)],
            [] if gates is None else [gates[b, :n].astype(np.float32) for b, n in enumerate(rows_of)])


def hands_out_gates(model: nn.Module) -> bool:
    """Whether the routers of this model say what their combine weights are."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.no_grad(), record_routing(model, scores=True):
            model(input_ids=tokens, use_cache=False)
    except RoutingError:
        return False
    return True


def make_trace(model: nn.Module, rows: Rows, routes: Routes, gates: bool) -> RoutingTrace:
    """The ids to be forced on these rows; what cannot be a route (all zero, an expert twice) is free."""
    layout = layout_of(model)
    device = next(model.parameters()).device
    time = rows.tokens.shape[1] - 1
    ids = torch.full((len(rows.responses), time, len(layout.sites), layout.top_k), -1)
    weights = torch.zeros(ids.shape) if gates else None
    for b, r in enumerate(rows.responses):
        forced = torch.from_numpy(routes(r, layout).astype(np.int64))
        ids[b, : len(forced)] = forced.masked_fill(~find_possible(forced, layout)[..., None], -1)
        if weights is not None and r.gates is not None:
            weights[b, : len(forced)] = torch.from_numpy(r.gates[:, match_layers(r.gates.shape[1], layout)])
    trace = RoutingTrace.from_ids(ids.to(device), layout, attention_mask=rows.mask[:, 1:].to(device))
    return trace if weights is None else replace(trace, gates=weights.to(device))


def find_possible(ids: Tensor, layout: Layout) -> Tensor:
    """Rows [..., site] of ids that a router can have picked: in range and distinct."""
    found = []
    for s, site in enumerate(layout.sites):
        row = ids[..., s, : site.top_k].sort(-1).values
        found.append((row[..., 0] >= 0) & (row[..., -1] < site.num_experts) & (row[..., 1:] != row[..., :-1]).all(-1))
    return torch.stack(found, -1)


def read_logprobs(
    logits: Float[Tensor, "token vocabulary"],
    chosen: Int64[Tensor, " token"],
    owner: Int64[Tensor, " token"],
    responses: Sequence[Response],
    reading: str,
) -> Float[Tensor, " token"]:
    """log p of the chosen tokens. A reading is STATED, "greedy" (of the most likely tokens instead), "T=0.7",
    "T inverted", "T twice", or "kept set": renormalised
    over what top-k, top-p and min-p keep, at the stated temperature (the whole vocabulary where neither is stated)."""
    stated = torch.tensor([r.temperature for r in responses], device=logits.device)[owner][:, None]
    if reading == "greedy":
        return (logits / stated).log_softmax(-1).amax(-1)
    temperature = {"T inverted": 1 / stated, "T twice": stated**2}.get(reading, stated)
    if reading.startswith("T="):
        temperature = torch.full_like(stated, float(reading[2:]))
    log_p = (logits / temperature).log_softmax(-1)
    found = log_p.gather(-1, chosen[:, None])[:, 0]
    if reading != "kept set":
        return found
    top_p, top_k, min_p = (torch.tensor(x, device=logits.device)[owner][:, None] for x in zip(
        *((r.top_p, float(r.top_k), r.min_p) for r in responses), strict=True))
    keep = kept(log_p, top_p=top_p, top_k=top_k, min_p=min_p)
    return found - log_p.masked_fill(~keep, -torch.inf).logsumexp(-1)


def list_readings(responses: Sequence[Response]) -> Mapping[str, str]:
    """Readings that differ from what the file states, and what each would mean."""
    stated = {r.temperature for r in responses}
    others = {f"T={t:g}": describe_temperature(t, stated) for t in TEMPERATURES if stated != {t}}
    if stated != {1.0}:
        others["T=1"] = ("the engine's log-probs are those before the temperature: it samples at "
                         f"{_listed(stated)} but reports log-probs at 1")
        others |= {"T inverted": "the engine multiplies logits by the temperature where it should divide",
                   "T twice": "the engine divides logits by the temperature twice"}
    if any(r.top_p < 1 or r.top_k > 0 or r.min_p > 0 for r in responses):
        others["kept set"] = ("the engine's log-probs are renormalised over what top-p, top-k or min-p keep; those "
                              "of the trainer are over the whole vocabulary")
    return others


def describe_temperature(value: float, stated: set[float]) -> str:
    """What it means that log-probs are at this temperature."""
    return f"the engine's log-probs are at temperature {value:g}, where the file has {_listed(stated)} (default 1)"


def choose_temperatures(gaps: Mapping[float, float], most: float) -> list[float]:
    """Temperatures still to be tried, from the gaps that some leave: around the lowest point of the parabola in 1/T,
    what a gap of temperatures is to second order, through the best of them and its neighbours. None where more than
    `most` would be left there."""
    order = sorted(gaps)
    best = order.index(min(gaps, key=gaps.__getitem__))
    near = order[max(0, best - 1) :][:3] if best < len(order) - 1 else order[-3:]
    a, b, c = np.polyfit([1 / t for t in near], [gaps[t] for t in near], 2)
    if a <= 0 or c - b * b / (4 * a) > most:
        return []
    middle = float(1 / np.clip(-b / (2 * a), 0.1, 10))
    around = {round(middle + more / 100, 2) for more in (-2, -1, 0, 1, 2)}
    return sorted(around - gaps.keys())


def _listed(values: set[float]) -> str:
    return ", ".join(f"{v:g}" for v in sorted(values))
