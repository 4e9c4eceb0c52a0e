"""`diagnose`: rollouts and the model that the trainer believes sampled them → why their log-probs differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_rl.analysis.diagnose.explanations import (
    DTYPES,
    FLOORS,
    LEAD,
    NOTHING,
    QUIET,
    ROUNDINGS,
    TOKENS,
    Explanation,
    Gap,
)
from moe_rl.analysis.diagnose.hypotheses import (
    Hypothesis,
    list_hypotheses,
    make_runnable,
    set_to_eval,
    take_weights,
)
from moe_rl.analysis.diagnose.locations import (
    MOST,
    Example,
    Location,
    choose_example,
    describe_largest,
    describe_start,
    locate_gap,
)
from moe_rl.analysis.diagnose.remedies import list_remedies
from moe_rl.analysis.diagnose.responses import Rollouts, has_routes, select_ids
from moe_rl.analysis.diagnose.route_faults import RIGHT, Fault, Reported, find_faults
from moe_rl.analysis.diagnose.scoring import Fit, Scorer, compute_left, force_each_site, mask_ids
from moe_rl.analysis.folders import describe
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.load import load, load_tokenizer, no_progress_bars, placement
from moe_rl.routing.sites import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LITTLE = 0.1
"""Times the gap of a group of responses that another group may have, to be without one."""
BY_THE_GAP = ("overwritten_layer", "stale_prefix", "gates_raw", "gates_renormalised", "gates_scaled", "stale_routes")
"""Faults of routes that a gap without a reason may make: the engine's model is another one there."""
UNEXPLAINED, FEW_TOKENS = "unexplained", "few_tokens"
FEW = 8
"""Responses on which single layers are forced."""
CLEARLY = 0.9
"""Share of the agreement that rounding leaves, below which a layer uses other experts."""
FORCED = 10.0
"""Times the noise up to which log-probs that agree may move when the engine's own routes are forced."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the numbers behind it."""

    causes: tuple[str, ...]
    """Short names, the first cause first; () where there is no gap, ("unexplained",) where there is one without a
    reason, ("few_tokens",) where the tokens are too few to tell."""
    verdict: str
    """In a sentence or two."""
    fault: bool
    """Whether something is to be mended. A gap that rounding, a dtype or another kernel makes is none."""
    equally: tuple[str, ...]
    """Other causes that fit equally well."""
    evidence: tuple[str, ...]
    """Sentences, each with its numbers."""
    remedies: tuple[str, ...]
    """What to do, a text per cause."""
    notes: tuple[str, ...]
    """What else is worth knowing: missing routes, skipped forwards."""
    fits: tuple[Fit, ...]
    """One per forward: natural first, then the noise floor, forced routes, and every hypothesis, the best first."""
    left: Mapping[str, tuple[float, float, float]]
    """By forward its score, what is left of the natural mean |log r|, with its 95 % interval; empty without a gap."""
    locations: tuple[Location, ...]
    """Where the gap is."""
    responses: int
    """Looked at."""
    of: int
    """In the file."""
    tokens: int
    """Of the responses looked at, those with a log-prob."""
    example: Example | None = None
    """The response furthest apart, token by token, where there is a gap and routes were reported."""


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

    `rollouts` is a JSONL file, or dictionaries with its keys (`docs/diagnose.md`); `responses` of them, drawn at random
    from `seed`, are looked at (of a file that was read before, those that were kept). `tokenizer` cuts text and knows
    special tokens. `also` names other checkpoints of the same architecture that the engine may have had, all of it or
    parts. `engine_dtype` is what the engine computes in, where that is known: rounding of another dtype is then no
    reason for a gap. The model is as before afterwards. Raises ConfigError for rollouts that cannot be used,
    RoutingError for a model without routers.
    """
    if engine_dtype not in (None, *DTYPES):
        raise ConfigError(f"--engine-dtype {engine_dtype!r} is unknown. Use {', '.join(DTYPES)}.")
    layout = layout_of(model)
    config: Any = model.config
    config = config.get_text_config()
    read = rollouts if isinstance(rollouts, Rollouts) else Rollouts(
        rollouts, layout, vocabulary=config.vocab_size, tokenizer=tokenizer, num_layers=config.num_hidden_layers,
        limit=responses, seed=seed)
    with set_to_eval(model), make_runnable(model):
        scorer = Scorer(model, read.responses, batch_tokens)
        gap = Gap(scorer, *scorer.measure_noise(), engine_dtype)
        return _Case(scorer, gap).decide(read.count, tokenizer, dict(also or {}))


def diagnose_checkpoint(
    rollouts: str,
    checkpoint: str,
    *,
    also: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    router_dtype: str | None = None,
    engine_dtype: str | None = None,
    responses: int = 128,
    batch_tokens: int = 4096,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """`diagnose` of a file, against a Hugging Face checkpoint in the trainer's dtype and those in `also`. Raises
    ConfigError, before weights are read, for a file that cannot be used and for checkpoints that are no versions of one
    model."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # else up to 1 GB of compiled bfloat16 products
    if batch_tokens < 1:
        raise ConfigError(f"--batch-tokens {batch_tokens} must be at least 1")
    if router_dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--router-dtype {router_dtype!r} is unknown. Use float32 or bfloat16.")
    settings = [ModelConfig(name=name, device=device, dtype=dtype, router_dtype=router_dtype)
                for name in (checkpoint, *also)]
    placement(settings[0])
    (layout, sizes), *others = [describe(s.name, trust_remote_code) for s in settings]
    for name, (other, _) in zip(also, others, strict=True):
        try:
            layout.require(other, f"--also {name}")
        except RoutingError as error:
            raise ConfigError(f"--also {name} is not a version of {checkpoint}: {error}") from error
    read = Rollouts(rollouts, layout, vocabulary=sizes.vocab_size, num_layers=sizes.num_hidden_layers, limit=responses,
                    tokenizer=load_tokenizer(checkpoint, trust_remote_code))
    with no_progress_bars():
        loaded, *older = [load(s, seed=0, trust_remote_code=trust_remote_code) for s in settings]
    return diagnose(read, loaded.model, tokenizer=loaded.tokenizer, batch_tokens=batch_tokens,
                    engine_dtype=engine_dtype,
                    also={name: other.model for name, other in zip(also, older, strict=True)})


@dataclass
class _Case:
    """One diagnosis on its way."""

    scorer: Scorer
    gap: Gap
    forced: dict[str, Fit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    sets: list[Location] = field(default_factory=list)

    def decide(self, of: int, tokenizer: Any, also: dict[str, nn.Module]) -> Diagnosis:
        scorer, gap = self.scorer, self.gap
        self._force_routes()
        if not gap.agrees:
            gap.try_all(list_hypotheses(scorer.model, scorer.responses, tokenizer, also))
        found = [] if gap.agrees else gap.find_explanations()
        findings = self._find_faults(found[0] if found else None)
        if not findings and not any(e.fault for e in found) and scorer.routed:
            findings = self._find_stale_routes(also)
        causes, says, fault = self._conclude(found, findings)
        where = list(locate_gap(scorer))
        if self.forced and not (gap.agrees and self._is_harmless()):
            where += [*self.sets, *(Location("layer", str(scorer.layout.sites[s].decoder_layer), kl, 0)
                                    for s, kl in force_each_site(scorer, FEW))]
        if not gap.agrees and not found:
            self.evidence += [describe_start(scorer, gap.noise), describe_largest(where)]
        fits = [scorer.base, gap.floor, gap.rounding, *self.forced.values(),
                *(e.fit for e in sorted(gap.tried, key=lambda e: (max(e.fit.mean, gap.noise), len(e.hypotheses))))]
        left = {} if gap.agrees else {r.name: compute_left(r, scorer.base) for r in self.forced.values()} | {
            e.fit.name: e.left for e in gap.tried}
        equally = [c for c in dict.fromkeys("+".join(e.causes) for e in found) if c != "+".join(found[0].causes)]
        if equally:
            says += f" As good an explanation: {'; or '.join(e.says for e in found if e.causes != found[0].causes)}."
        return Diagnosis(causes, says, fault, tuple(equally), tuple(self.evidence), list_remedies(causes),
                         (*self.notes, *scorer.skipped), tuple(fits), left, tuple(where), len(scorer.responses), of,
                         int(scorer.own.sum()), None if gap.agrees else choose_example(scorer, tokenizer))

    # ------------------------------------------------------------------ forced routes
    def _force_routes(self) -> None:
        """The forwards under replay: all ids, those of prompt or response alone, combine weights too."""
        scorer = self.scorer
        without = sum(not has_routes(r, scorer.layout) for r in scorer.responses)
        if without:
            self.notes.append(f"{without} of {len(scorer.responses)} responses have no routes with "
                              f"{scorer.layout.top_k} experts per token, so the engine's routing was not tested there.")
        if not scorer.routed:
            return
        tried = [("ids forced", select_ids, False), ("ids of the prompt forced", mask_ids(prompt=True), False),
                 ("ids of the response forced", mask_ids(prompt=False), False)]
        if all(r.gates is not None for r in scorer.responses if has_routes(r, scorer.layout)):
            tried.append(("ids and combine weights forced", select_ids, True))
        for name, routes, gates in tried:
            if (fit := scorer.force(name, routes, gates)) is not None:
                self.forced[name] = fit

    def _is_harmless(self) -> bool:
        """Whether forced routes leave log-probs that agree where they are, and others within rounding. A trainer in
        less than float32 picks other experts at ties by itself, and so may an honest engine."""
        gap, ties = self.gap, next(self.scorer.model.parameters()).dtype != torch.float32
        return all((gap.agrees and r.mean <= FORCED * gap.noise) or ((ties or not gap.agrees) and gap.is_rounding(r))
                   for r in self.forced.values())

    # ------------------------------------------------------------------ reported routes
    def _find_faults(self, best: Explanation | None) -> list[Fault]:
        """What is wrong with the reported routes, held against those of what explains the gap."""
        scorer = self.scorer
        found = self._find_other_k()
        if not scorer.routed:
            return found
        scores = scorer.natural
        if best is not None and best.hypotheses and all(s.tokens is None for s in best.hypotheses):
            under = scorer.score_under(best.hypotheses, keep_routes=True, keep_gates=bool(scorer.natural.gates))
            scores = under if under is not None and under.routes[0].shape == scorer.natural.routes[0].shape else scores
        reported = Reported(scorer.responses, scores.routes, scores.gates, scorer.layout, scorer.expected)
        if not reported.pairs:
            return found
        whose = "" if scores is scorer.natural else " under what explains the gap"
        if math.isnan(reported.agreement):
            self.notes.append("Of the reported routes next to none is known: there is nothing to compare or to replay.")
            return [*found, *find_faults(reported)]
        self.evidence.append(f"{100 * reported.agreement:.3g} % of the reported sets of experts are those that the "
                             f"checkpoint picks itself{whose}; "
                             f"between its float32 and its bfloat16 {100 * scorer.expected:.3g} %.")
        self.sets = [Location("sets", str(site.decoder_layer), float(1 - own), 0)
                     for site, own in zip(scorer.layout.sites, reported.measure_by_site(), strict=True)]
        apart = [p.name for p in self.sets if p.value > 1 - CLEARLY * scorer.expected]
        if apart:
            self.evidence.append(f"The first layer that uses other experts, by more than rounding, is {apart[0]} "
                                 f"({len(apart)} of {len(self.sets)} do).")
        for finding in find_faults(reported):
            found.append(finding)
            repaired = finding.repair and scores is scorer.natural and scorer.force(
                f"ids forced, {finding.cause} mended", self._repaired_ids(finding))
            if repaired:
                self.forced[repaired.name] = repaired
        return found

    def _find_stale_routes(self, also: dict[str, nn.Module]) -> list[Fault]:
        """Routes that are those of another checkpoint, and not of this one."""
        scorer = self.scorer
        own = Reported(scorer.responses, scorer.natural.routes, [], scorer.layout, scorer.expected)
        for name, other in also.items():
            scores = scorer.score_under([Hypothesis("", name, "", take_weights(other, lambda n: True))],
                                        keep_routes=True)
            if scores is None or not own.pairs:
                continue
            theirs = Reported(scorer.responses, scores.routes, [], scorer.layout, scorer.expected).agreement
            if theirs >= RIGHT * scorer.expected and theirs > own.agreement + (1 - own.agreement) / 2:
                return [Fault("stale_routes", f"the engine reports the routes of {name}",
                              f"{100 * theirs:.3g} % of the sets are those of {name}, {100 * own.agreement:.3g} % "
                              "those of the checkpoint")]
        return []

    def _repaired_ids(self, finding: Fault) -> Any:
        assert finding.repair is not None
        return lambda r, layout: finding.repair(r, layout) if has_routes(r, layout) else select_ids(r, layout)

    def _find_other_k(self) -> list[Fault]:
        k = self.scorer.layout.top_k
        others = {r.ids.shape[2] for r in self.scorer.responses if r.ids is not None} - {k}
        return [Fault("top_k", f"the engine reports {' or '.join(map(str, sorted(others)))} experts per token, the "
                      f"model uses {k}", f"routes have {sorted(others)} slots")] if others else []

    # ------------------------------------------------------------------ the sentence
    def _conclude(self, found: Sequence[Explanation], findings: Sequence[Fault]) -> tuple[tuple[str, ...], str, bool]:
        gap, base = self.gap, self.scorer.base
        quiet = gap.agrees or gap.small
        faults = [f for f in findings if f.fault and (quiet or found or f.cause not in BY_THE_GAP)]
        for f in findings:
            self.evidence.append(f"{f.says[0].upper()}{f.says[1:]}: {f.evidence}.")
        size = f"KL {base.mean:.2g} nats per token"
        routes = "; ".join(f.says for f in faults)
        if found:
            best = found[0]
            self._add_evidence(best)
            others = tuple(f.cause for f in faults if f.cause not in best.causes)
            causes = (*(c for c in best.causes if c not in QUIET), *others) if best.fault else (*others, *best.causes)
            also = f" Its routes are wrong too: {routes}." if any(f.cause not in best.causes for f in faults) else ""
            says = f"{_sentence(best.says)} ({size}, {best.fit.mean:.2g} when the trainer does the same).{also}"
            return causes, says, best.fault or bool(faults)
        if faults:
            engine = "The engine's log-probs are those of the checkpoint" + ("" if gap.agrees else " up to rounding")
            start = f"{engine}, but the routes it reports are not those it used" if quiet else \
                f"There is a gap ({size}) that nothing tried explains, and the reported routes are wrong"
            causes = tuple(f.cause for f in faults)
            return causes if quiet else (*causes, UNEXPLAINED), f"{start}: {routes}.", True
        if not gap.agrees and (routed := self._explain_by_routes()) is not None and (
                not quiet or routed.fit.mean <= gap.noise):  # forced routes leave rounding, where there is some
            self._add_evidence(routed)
            return routed.causes, (f"{_sentence(routed.says)}, for a reason that is none of those tried: with what it "
                                   f"reports forced, the gap goes ({size}, {routed.fit.mean:.2g} forced)."), True
        if quiet and self.forced and not self._is_harmless():
            worst = max(self.forced.values(), key=lambda r: r.mean)
            return (UNEXPLAINED,), (f"The engine's log-probs are those of the checkpoint ({size}), but replaying what "
                                    f"it reports moves them ({worst.name}: KL {worst.mean:.2g}), in no way that is "
                                    "known: its routes are not those it used."), True
        if gap.agrees:
            return (), (f"No gap: {size}, and up to {gap.noise:.2g} log-probs agree (the largest of {gap.least:.2g} "
                        f"and {FLOORS:g} times the noise floor of {gap.floor.mean:.2g})."), False
        if quiet:
            says = (f"The gap is what rounding makes ({size}; the checkpoint in float32 and in bfloat16 differ by "
                    f"{gap.rounding.mean:.2g}).")
            return ("rounding",), says + (
                " Nothing to mend." if gap.shrinks else " No dtype tried brings the tokens nearer to the engine's: a "
                "fault of this size may hide in it. --engine-dtype names the engine's dtype."), False
        return self._explain_by_group(size)

    def _explain_by_routes(self) -> Explanation | None:
        """Whether the gap goes where what the engine reports of its routers is forced."""
        for name, cause, words in (("ids forced", "routing", "the engine chooses other experts"),
                                   ("ids and combine weights forced", "combine_weights",
                                    "the engine weighs its experts otherwise")):
            if (fit := self.forced.get(name)) is not None:
                found = Explanation((cause,), words, fit, compute_left(fit, self.scorer.base), True)
                if self.gap.explains(found):
                    return found
        return None

    def _explain_by_group(self, size: str) -> tuple[tuple[str, ...], str, bool]:
        """A gap that nothing takes away: whether only some of the responses have it."""
        for kind, cause, words in (("weight version", "weight_version", "other weights sampled some of the responses"),
                                   ("prefix", "stale_cache", "responses after a cached prefix have the gap: its "
                                    "entries are of other weights or positions")):
            groups = sorted((p for p in locate_gap(self.scorer, None) if p.kind == kind), key=lambda p: p.value)
            shown = groups if len(groups) <= MOST else [*groups[: MOST // 2], *groups[-MOST // 2 :]]
            if len(groups) < 2 or groups[-1].name == "fresh":
                continue
            low, high = groups[0], groups[-1]
            without = max(self.gap.noise, ROUNDINGS * self.gap.rounding.mean)  # a group has no gap, not a small one
            if low.value <= min(without, max(self.gap.noise, LITTLE * high.value)) and high.value > without:
                self.evidence.append(f"By {kind}: {', '.join(f'{p.name} {p.value:.2g}' for p in shown)}.")
                return (cause,), (f"{_sentence(words)} ({kind} {high.name}: KL {high.value:.2g}; {low.name}: "
                                  f"{low.value:.2g})."), True
        if self.gap.few:
            return (FEW_TOKENS,), (f"There is a gap ({size}), but the responses looked at have "
                                   f"{int(self.scorer.own.sum())} tokens of the engine: {TOKENS} are needed to tell "
                                   "one reason from another."), True
        best = min(self.gap.tried, key=lambda e: e.left[0], default=None)
        near = f" The nearest, {best.fit.name}, leaves {100 * best.left[0]:.3g} % of the mean |log r|." \
            if best and best.left[0] < LEAD else ""
        times = self.scorer.base.mean / max(self.gap.rounding.mean, NOTHING)
        return (UNEXPLAINED,), (f"There is a gap of {times:.2g} times the rounding ({size}) that nothing tried "
                                "explains: other weights, perhaps (--also names a checkpoint to try), or something "
                                f"that is not among the tests.{near}"), True

    def _add_evidence(self, e: Explanation) -> None:
        ratio, low, high = e.left
        self.evidence.append(
            f"With {e.fit.name or e.says} the KL goes from {self.scorer.base.mean:.2g} to {e.fit.mean:.2g} nats per "
            f"token, and {100 * ratio:.2g} % [{100 * low:.2g}, {100 * high:.2g}] of the mean |log r| is left; noise "
            f"floor {self.gap.floor.mean:.2g}, rounding {self.gap.rounding.mean:.2g}"
            + (f"; in {e.responses} of {int((self.scorer.base.kl > self.gap.noise).sum())} responses with a gap."
               if e.responses else ".")
            + (f" Of the tokens of a response it brings {50 + 50 * e.fit.nearer.mean():.0f} % nearer to the engine's, "
               "where another router than the engine's takes more away than it brings."
               if self.gap.moves_nearer(e) else ""))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
