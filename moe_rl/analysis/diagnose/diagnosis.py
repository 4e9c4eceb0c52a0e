"""`diagnose`: rollouts and the model that the trainer believes sampled them → why their log-probs differ."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from moe_rl.analysis.diagnose.causes import describe as say
from moe_rl.analysis.diagnose.causes import list_remedies
from moe_rl.analysis.diagnose.decide import DTYPES, Decision, Evidence, Fit, brings_nearer, compute_left, decide
from moe_rl.analysis.diagnose.forwards import STATED, Scorer, Scores, mask_ids, measure_agreement
from moe_rl.analysis.diagnose.hypotheses import Hypothesis, list_hypotheses
from moe_rl.analysis.diagnose.locations import Location, describe_gap, locate_gap
from moe_rl.analysis.diagnose.responses import Rollouts, has_routes, select_ids
from moe_rl.analysis.diagnose.routes import RIGHT, Fault, Reported, find_faults
from moe_rl.analysis.diagnose.scopes import make_runnable, take_weights
from moe_rl.analysis.folders import describe
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.load import load, load_tokenizer, no_progress_bars, placement
from moe_rl.routing.moe_layers import layout_of
from moe_rl.routing.observe import evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LITTLE = 0.1
"""Times the gap of a group of responses that another group has at most, to be without one."""
BY_THE_GAP = {"overwritten_layer", "stale_prefix", "gates_raw", "gates_renormalised", "gates_scaled", "stale_routes"}
"""Faults of routes that an unexplained gap may make: the engine's model is another one there."""
LEADS = 8
"""Hypotheses that are tried in another dtype, too, where rounding is not evident."""
LEAD = 0.7
"""Share of the mean |log r| that a hypothesis leaves at most to be mentioned."""
FORCED = 10.0
"""Times the noise up to which log-probs that agree may move when the engine's own routes are forced."""
WORSE, OTHERS = 1.25, 3.0
"""Times the mean |log r| of rounding, or of the gap, that replayed routes leave at most; and times the share of sets
that rounding changes that an honest engine has at most. To both, what few tokens need is added."""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, and the numbers behind it."""

    causes: tuple[str, ...]
    """Short names, the first cause first; () where there is no gap, ("unexplained",) where there is one without a
    reason, ("few_tokens",) where the tokens are too few."""
    verdict: str
    """In a sentence or two."""
    fault: bool
    """Whether something is to be mended. A gap that rounding, a dtype or another kernel makes is none."""
    equally: tuple[str, ...]
    """Other causes that fit equally well."""
    evidence: tuple[str, ...]
    """Sentences, each with its numbers."""
    notes: tuple[str, ...]
    """Missing routes, skipped forwards."""
    fits: tuple[Fit, ...]
    """One per forward: unconstrained first, then the noise floor, rounding, forced routes, and every hypothesis, the
    best first."""
    left: Mapping[str, tuple[float, float, float]]
    """By forward its score, what is left of the unconstrained mean |log r|, with its 95 % interval; empty without a
    gap."""
    locations: tuple[Location, ...]
    """Where the gap is."""
    responses: int
    """In the sample."""
    of: int
    """In the file."""
    tokens: int
    """Of the responses of the sample, those with a log-prob."""

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, a text per cause."""
        return list_remedies(self.causes)


def diagnose(
    rollouts: str | Path | Iterable[Mapping[str, Any]] | Rollouts,
    model: nn.Module,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    also: Mapping[str, nn.Module] | None = None,
    engine_dtype: str | None = None,
    responses: int = 128,
    batch_tokens: int = 4096,
    seed: int = 0,
) -> Diagnosis:
    """Why the log-probs in `rollouts` are not those of `model`, a Hugging Face MoE in the trainer's dtype.

    `rollouts` is a JSONL file, or dictionaries with its keys (`docs/diagnose.md`); a sample of `responses` of them is
    drawn from `seed`. `tokenizer` splits text and knows special tokens. `also` names other checkpoints of the same
    architecture that the engine may have had, all of it or parts. `engine_dtype` is the dtype of the engine, where that
    is known: rounding of another dtype then explains no gap. The model is unchanged afterwards. Raises ConfigError for
    rollouts that cannot be used, RoutingError for a model without routers.
    """
    if engine_dtype not in (None, *DTYPES):
        raise ConfigError(f"--engine-dtype {engine_dtype!r} is unknown. Use {', '.join(DTYPES)}.")
    if not isinstance(rollouts, Rollouts):
        config: Any = model.config
        sizes = {"vocabulary": config.get_text_config().vocab_size}
        sizes["num_layers"] = config.get_text_config().num_hidden_layers
        rollouts = Rollouts(rollouts, layout_of(model), **sizes, tokenizer=tokenizer, limit=responses, seed=seed)
    with evaluation_mode(model), make_runnable(model):
        scorer = Scorer(model, rollouts.responses, batch_tokens)
        return _Builder(scorer, tokenizer, dict(also or {}), engine_dtype).build(rollouts.count)


def diagnose_checkpoint(
    rollouts: str,
    checkpoint: str,
    *,
    also: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    router_dtype: str | None = None,
    trust_remote_code: bool = False,
    responses: int = 128,
    **settings: Any,
) -> Diagnosis:
    """`diagnose` of a file, against a Hugging Face checkpoint in the trainer's dtype and those in `also`. Raises
    ConfigError, before weights are read, for a file that cannot be used and for checkpoints that are no versions of one
    model."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # else up to 1 GB of compiled bfloat16 products
    kind = ModelConfig(device=device, dtype=dtype, router_dtype=router_dtype)
    placement(kind)
    (layout, sizes), *others = [describe(name, trust_remote_code) for name in (checkpoint, *also)]
    for name, (other, _) in zip(also, others, strict=True):
        try:
            layout.require(other, f"--also {name}")
        except RoutingError as error:
            raise ConfigError(f"--also {name} is not a version of {checkpoint}: {error}") from error
    read = Rollouts(
        rollouts,
        layout,
        vocabulary=sizes.vocab_size,
        num_layers=sizes.num_hidden_layers,
        limit=responses,
        tokenizer=load_tokenizer(checkpoint, trust_remote_code),
    )
    with no_progress_bars():
        loaded, *older = [load(kind.replace(name=name), 0, trust_remote_code) for name in (checkpoint, *also)]
    versions = {name: other.model for name, other in zip(also, older, strict=True)}
    return diagnose(read, loaded.model, tokenizer=loaded.tokenizer, also=versions, **settings)


@dataclass
class _Builder:
    """Runs the forwards, collects the evidence, and builds the diagnosis."""

    scorer: Scorer
    tokenizer: Any
    also: dict[str, nn.Module]
    engine_dtype: str | None
    forced: dict[str, Fit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Sentences of evidence."""

    def build(self, of: int) -> Diagnosis:
        scorer = self.scorer
        self.floor, noise = scorer.measure_floor()
        self._round()
        self.evidence = Evidence(scorer.base, self.rounding, noise, (), scorer.dtype, self.engine_dtype)
        self._force_routes()
        decision = self._try_all()
        faults = self._find_route_faults(decision)
        causes, verdict, fault = self._conclude(decision, faults)
        gap, base, best = decision.kind != "agrees", scorer.base, decision.best
        where = (*locate_gap(scorer), *(self._locate_sets() if self.forced and (gap or fault) else ()))
        if "unexplained" in causes and gap:
            self.texts += describe_gap(scorer, noise, where)
        if "unexplained" in causes and (split := sum(r.from_text for r in scorer.responses)):
            self.notes.append(f"{split} responses are text. The engine may have sampled another split: write its ids.")
        tried = sorted(self.evidence.tried, key=lambda fit: (max(fit.mean, noise), len(fit.causes)))
        return Diagnosis(
            causes,
            verdict,
            fault,
            tuple(dict.fromkeys("+".join(fit.causes) for fit in best[1:] if fit.causes != best[0].causes)),
            tuple(self.texts),
            (*self.notes, *scorer.skipped),
            (base, self.floor, self.rounding, *self.forced.values(), *tried),
            {fit.name: compute_left(fit, base) for fit in (*self.forced.values(), *tried)} if gap else {},
            where,
            len(scorer.responses),
            of,
            int(scorer.own.sum()),
        )

    # ------------------------------------------------------------------ forwards
    def _round(self) -> None:
        """The model in other dtypes: what rounding makes of its log-probs and routes, and how far the engine is from
        each dtype that it may have."""
        scorer = self.scorer
        usual = "bfloat16" if scorer.dtype == "float32" else "float32"
        self.dtypes: list[Fit] = []
        for dtype in (d for d in DTYPES if d != scorer.dtype and (d == usual or self.engine_dtype in (None, d))):
            name, detail = f"all in {dtype}", f"{dtype}, the trainer in {scorer.dtype}"
            model = Hypothesis("dtype", name, detail=detail)
            if (scores := scorer.score_under(model, dtype, (*scorer.readings,))) is None:
                if dtype == usual:
                    raise ConfigError(f"the rounding of this model cannot be measured: {scorer.skipped[-1]}")
                continue
            if dtype == usual:
                self.rounding = scorer.compare_with_unconstrained("rounding", scores.logprobs[STATED])
                self.expected = measure_agreement(scores.routes, scorer.unconstrained.routes)
            if self.engine_dtype in (None, dtype):
                fit = scorer.compare(name, scores.logprobs[STATED], causes=("dtype",), detail=detail)
                self.dtypes += [replace(fit, source=(model, dtype)), *scorer.compare_temperatures(scores, name)]

    def _try_all(self) -> Decision:
        """Readings of the log-probs and dtypes first, then every hypothesis, those of a forward per layer where nothing
        explains the gap, and the nearest in other dtypes, too; where rounding is evident all of them in its dtype."""
        scorer = self.scorer
        if decide(self.evidence).kind == "agrees":
            return decide(self.evidence)
        self._add(self.dtypes)
        evident = decide(self.evidence).evident
        dtypes = [fit.source[1] for fit in sorted(self.evidence.dtypes, key=lambda fit: fit.distance)]
        hypotheses = list_hypotheses(scorer.model, scorer.responses, self.tokenizer, self.also)
        self._add(scorer.compare_readings())
        self._add(self._try((h for h in hypotheses if not h.late), None))
        if decide(self.evidence).kind == "unexplained":
            self._add(self._try((h for h in hypotheses if h.late), None))
        near = {fit.source[0]: fit.distance for fit in self.evidence.tried if fit.source and fit.source[1] is None}
        leads = sorted(near, key=lambda h: near[h])
        for dtype in dtypes[: 1 if evident else None]:
            if min(fit.mean for fit in self.evidence.tried) > FORCED * self.evidence.noise:
                self._add(self._try(leads if evident else leads[:LEADS], dtype))
        return decide(self.evidence)

    def _try(self, hypotheses: Iterable[Hypothesis], dtype: str | None) -> Iterator[Fit]:
        for h in hypotheses:
            if h.cause == "router_bf16" and dtype == "bfloat16":  # which has them so
                continue
            if (scores := self.scorer.score_under(h, dtype)) is not None:
                name, causes = (f"{h.name} + all in {dtype}", (h.cause, "dtype")) if dtype else (h.name, (h.cause,))
                fit = self.scorer.compare(name, scores.logprobs[STATED], causes=causes, detail=h.detail)
                yield replace(fit, source=(h, dtype))

    def _add(self, fits: Iterable[Fit]) -> None:
        self.evidence = replace(self.evidence, tried=(*self.evidence.tried, *map(self._mix, fits)))

    def _mix(self, fit: Fit) -> Fit:
        """Where a fault of some responses is tried, the others are as they are, in the same dtype: the fit of those
        that it helps, and that without the fault of the others, where this leaves much less."""
        if not fit.fault or ("dtype" in fit.causes and fit.source is None):
            return fit
        dtype = fit.source and fit.source[1]
        other = next((x for x in self.evidence.dtypes if x.source[1] == dtype), self.scorer.base)
        helped = (fit.kl < other.kl)[fit.owner]
        mixed = replace(fit, log_ratio=np.where(helped, fit.log_ratio, other.log_ratio))
        return mixed if fit.mean > 1.5 * mixed.mean else fit

    def _force_routes(self) -> None:
        """Forwards under replay: all ids, those of prompt or response alone, combine weights, too."""
        scorer = self.scorer
        routed = [r for r in scorer.responses if has_routes(r, scorer.layout)]
        if missing := len(scorer.responses) - len(routed):
            self.notes.append(
                f"{missing} of {len(scorer.responses)} responses have no routes of {scorer.layout.top_k} experts."
            )
        forwards = [
            ("ids forced", select_ids, False),
            ("ids of the prompt forced", mask_ids(prompt=True), False),
            ("ids of the response forced", mask_ids(prompt=False), False),
        ]
        if all(r.gates is not None for r in routed):
            forwards.append(("ids and combine weights forced", select_ids, True))
        for name, routes, gates in forwards if routed else ():
            if (fit := scorer.force(name, routes, gates)) is not None:
                self.forced[name] = fit

    # ------------------------------------------------------------------ routes
    def _find_route_faults(self, decision: Decision) -> list[Fault]:
        """What is wrong with the reported routes, compared with those of the forward that explains the gap, if one
        does."""
        scorer = self.scorer
        k, others = scorer.layout.top_k, {r.ids.shape[2] for r in scorer.responses if r.ids is not None}
        detail = f"{' or '.join(map(str, sorted(others - {k})))} experts per token in its routes, the trainer {k}"
        faults = [Fault("top_k", f"routes have {sorted(others)} slots", detail)] if others - {k} else []
        self.reported = self._report(scorer.unconstrained)
        if not self.reported.pairs:
            return faults
        explained = self._score_again(decision.best[0]) if decision.best else None
        if explained is not None and explained.routes[0].shape == scorer.unconstrained.routes[0].shape:
            self.reported = self._report(explained)
        if np.isnan(self.reported.agreement):
            self.notes.append("Next to none of the reported routes is known: there is nothing to compare or to replay.")
        else:
            self.texts.append(
                f"{100 * self.reported.agreement:.3g} % of the reported sets of experts are the checkpoint's own; "
                f"between two dtypes {100 * self.expected.mean():.3g} % are the same."
            )
        faults += find_faults(self.reported)
        if not any(f.fault for f in faults) and not any(fit.fault for fit in decision.best):
            faults += self._find_stale_routes()
        return faults

    def _report(self, scores: Scores) -> Reported:
        expected = float(self.expected.mean())
        return Reported(self.scorer.responses, scores.routes, scores.gates, self.scorer.layout, expected)

    def _score_again(self, fit: Fit) -> Scores | None:
        """A forward once more, for its routes."""
        if fit.source is None or fit.source[0].tokens or fit.source[0].positions:
            return None
        hypothesis, dtype = fit.source
        return self.scorer.score_under(hypothesis, dtype, keep_gates=self.scorer.has_gates)

    def _find_stale_routes(self) -> Iterator[Fault]:
        """Routes that are those of another checkpoint, and not of this one."""
        own = self.reported.agreement
        for name, other in self.also.items():
            scores = self.scorer.score_under(Hypothesis("", name, take_weights(other, lambda n: True)))
            theirs = self._report(scores).agreement if scores is not None else 0.0
            if theirs >= RIGHT * self.expected.mean() and theirs > own + (1 - own) / 2:
                yield Fault(
                    "stale_routes", f"{100 * theirs:.3g} % of the sets, {100 * own:.3g} % the checkpoint's", name
                )

    def _are_routes_wrong(self, decision: Decision) -> bool:
        """Whether replayed routes leave more than they would of an honest engine, or are more often others than
        rounding makes them."""
        if not self.forced:
            return False
        base, noise = self.scorer.base, self.evidence.noise
        limit = WORSE * (1 + 4 / np.sqrt(len(base.size))) * max(base.distance, self.rounding.distance)
        exact = decision.kind == "agrees" and self.scorer.dtype == "float32"
        if any(fit.mean > FORCED * noise if exact else fit.distance > limit for fit in self.forced.values()):
            return True
        own, rows = self.reported.measure_by_moe_layer(), sum(len(p.ids) for p in self.reported.pairs)
        allowed = OTHERS * (1 - self.expected) + 0.02 + 4 * np.sqrt((1 - self.expected) / rows) + 4 / rows
        return bool((1 - own > allowed).any())

    def _locate_sets(self) -> Iterator[Location]:
        if self.reported.pairs:
            for moe_layer, own in zip(self.scorer.layout.moe_layers, self.reported.measure_by_moe_layer(), strict=True):
                yield Location("sets", str(moe_layer.decoder_layer), float(1 - own))

    # ------------------------------------------------------------------ the verdict
    def _conclude(self, decision: Decision, faults: Sequence[Fault]) -> tuple[tuple[str, ...], str, bool]:
        """The causes, the verdict, and whether something is to be mended."""
        base, best, kind = self.scorer.base, decision.best, decision.kind
        size = f"KL {base.mean:.2g} nats per token"
        self.texts += [f"{f.text}: {f.evidence}." for f in faults]
        is_open = kind in ("unexplained", "few_tokens")
        wrong = [f for f in faults if f.fault and not (is_open and f.cause in BY_THE_GAP)]
        wrong = [f for f in wrong if not best or f.cause not in best[0].causes]
        named, routes = tuple(f.cause for f in wrong), "; ".join(f.text for f in wrong)
        if not wrong and not is_open and not any(f.fault for f in best) and self._are_routes_wrong(decision):
            named, routes = ("unexplained",), "The reported routes are not those that the engine used, in no known way"
        if kind == "explained":
            causes, verdict = self._explain(best, size)
            causes = (*(c for c in causes if c != "dtype"), *named) if best[0].fault else (*named, *causes)
            return causes, f"{verdict} {routes}." if routes else verdict, best[0].fault or bool(named)
        if named:
            start = "Nothing explains the gap" if is_open else "The log-probs are those of the checkpoint"
            causes = (*named, "unexplained") if is_open else named
            return causes, f"{start} ({size}), and the reported routes are wrong. {routes}.", True
        if kind == "agrees":
            return (), f"No gap: {size}; up to {self.evidence.noise:.2g} log-probs agree.", False
        if routed := self._explain_by_routes(decision):
            return (routed,), f"{say(routed)}: what it reports, forced, takes the gap away ({size}).", True
        if kind == "rounding":
            hint = "Nothing to mend." if decision.evident else "A fault of this size may hide in it."
            return (kind,), f"{say(kind)} ({size}; between two dtypes {self.rounding.mean:.2g}). {hint}", False
        if by_group := self._explain_by_group():
            cause, detail = by_group
            return (cause,), f"{say(cause, detail)}.", True
        if kind == "few_tokens":
            return (kind,), f"There is a gap ({size}), but {self.scorer.own.sum()} are {say(kind).lower()}.", True
        times = base.mean / max(self.rounding.mean, 1e-12)
        nearest = min(self.evidence.tried, key=lambda fit: fit.distance, default=None)
        left = compute_left(nearest, base)[0] if nearest else 1.0
        near = f" The nearest, {nearest.name}, leaves {100 * left:.3g} %." if nearest and left < LEAD else ""
        return (kind,), f"There is a gap of {times:.2g} times the rounding ({size}) that nothing explains.{near}", True

    def _explain(self, best: Sequence[Fit], size: str) -> tuple[tuple[str, ...], str]:
        fit = best[0]
        ratio, low, high = compute_left(fit, self.scorer.base)
        self.texts.append(
            f"With {fit.name} the KL is {fit.mean:.2g} nats per token, and {100 * ratio:.2g} % [{100 * low:.2g}, "
            f"{100 * high:.2g}] of the mean |log r| is left; noise {self.floor.mean:.2g}, rounding "
            f"{self.rounding.mean:.2g}."
        )
        verdict = f"{say(fit.causes[0], fit.detail)} ({size}, {fit.mean:.2g} when the trainer does the same)."
        others = [say(x.causes[0], x.detail) for x in best[1:] if x.causes != fit.causes]
        return fit.causes, verdict + (f" As good an explanation: {'; '.join(others)}." if others else "")

    def _explain_by_routes(self, decision: Decision) -> str | None:
        """The cause, where the gap goes if what the engine reports of its routers is forced; at most tokens, where it
        is of the size of rounding."""
        for name, cause in (("ids forced", "routing"), ("ids and combine weights forced", "combine_weights")):
            if (fit := self.forced.get(name)) is None:
                continue
            alone = replace(self.evidence, tried=(*self.evidence.dtypes, replace(fit, causes=(cause,))))
            explains = any(x.causes == (cause,) for x in decide(alone).best)
            nearer = brings_nearer(fit, self.scorer.base, np.sqrt(2 * self.evidence.noise))
            if explains and (decision.kind != "rounding" or nearer):
                return cause
        return None

    def _explain_by_group(self) -> tuple[str, str] | None:
        """The cause and its detail, where only some of the responses have a gap that nothing takes away."""
        noise = self.evidence.noise
        for group, cause in (("weight version", "weight_version"), ("prefix", "stale_cache")):
            groups = sorted((x for x in locate_gap(self.scorer, None) if x.kind == group), key=lambda x: x.value)
            if len(groups) < 2 or groups[-1].name == "fresh":
                continue
            low, high = groups[0], groups[-1]
            without = max(noise, 4 * self.rounding.mean)  # a group has no gap, not a small one
            if low.value <= min(without, max(noise, LITTLE * high.value)) and high.value > without:
                which = f"{group} {high.name}: KL {high.value:.2g}; {low.name}: {low.value:.2g}"
                return cause, f"other weights in some responses ({which})" if cause == "weight_version" else which
        return None
