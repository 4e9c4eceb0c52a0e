"""`diagnose`: who broke the log-probs. Rollouts and the model that the trainer believes sampled them → a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_rl.analysis.diagnose.example import Example, example_of
from moe_rl.analysis.diagnose.ladder import Ladder, Rung, alone, as_reported, partly, remaining, usable
from moe_rl.analysis.diagnose.places import MOST, Place, begins, places
from moe_rl.analysis.diagnose.reported import Reported
from moe_rl.analysis.diagnose.responses import Rollouts
from moe_rl.analysis.diagnose.scopes import evaluating, runnable
from moe_rl.analysis.diagnose.signatures import Finding, findings
from moe_rl.analysis.diagnose.suspects import suspects_of
from moe_rl.analysis.diagnose.verdict import FLOORS, LITTLE, ROUNDINGS, TOKENS, Explanation, Gap
from moe_rl.routing.sites import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNEXPLAINED = "unexplained"
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
    reason."""
    verdict: str
    """In a sentence or two."""
    fault: bool
    """Whether something is to be mended. A gap that rounding, a dtype or another kernel makes is none."""
    equally: tuple[str, ...]
    """Other causes that fit equally well."""
    evidence: tuple[str, ...]
    """Sentences, each with its numbers."""
    notes: tuple[str, ...]
    """What else is worth knowing: missing routes, skipped rungs."""
    rungs: tuple[Rung, ...]
    """The ladder: natural first, then the noise floor, forced routes, and every suspect, the best first."""
    left: Mapping[str, tuple[float, float, float]]
    """By rung: what is left of the natural KL, with its 95 % interval; empty where there is no gap."""
    places: tuple[Place, ...]
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
    responses: int = 128,
    batch_tokens: int = 4096,
    seed: int = 0,
) -> Diagnosis:
    """Why the log-probs in `rollouts` are not those of `model`, a Hugging Face MoE in the trainer's dtype.

    `rollouts` is a JSONL file, or dictionaries with its keys (`docs/diagnose.md`); `responses` of them, drawn at random
    from `seed`, are looked at (of a file that was read before, those that were kept). `tokenizer` cuts text and knows
    special tokens. `also` names other checkpoints of the same architecture that the engine may have had, all of it or
    parts. The model is as before afterwards. Raises ConfigError for rollouts that cannot be used, RoutingError for a
    model without routers.
    """
    layout = layout_of(model)
    config: Any = model.config
    config = config.get_text_config()
    read = rollouts if isinstance(rollouts, Rollouts) else Rollouts(
        rollouts, layout, vocabulary=config.vocab_size, tokenizer=tokenizer, num_layers=config.num_hidden_layers,
        limit=responses, seed=seed)
    with evaluating(model), runnable(model):
        ladder = Ladder(model, read.responses, batch_tokens)
        return _Case(ladder, Gap(ladder, *ladder.noise())).closed(read.count, tokenizer, dict(also or {}))


@dataclass
class _Case:
    """One diagnosis on its way."""

    ladder: Ladder
    gap: Gap
    forced: dict[str, Rung] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    sets: list[Place] = field(default_factory=list)

    def closed(self, of: int, tokenizer: Any, also: dict[str, nn.Module]) -> Diagnosis:
        ladder, gap = self.ladder, self.gap
        self._force()
        if not gap.agrees:
            gap.attempt(suspects_of(ladder.model, ladder.responses, tokenizer, also))
        found = [] if gap.agrees else gap.explanations()
        findings = self._routes(found[0] if found else None)
        causes, says, fault = self._verdict(found, findings)
        where = list(places(ladder))
        if self.forced and not (gap.agrees and self._harmless()):
            where += [*self.sets, *(Place("layer", str(ladder.layout.sites[s].decoder_layer), kl, 0)
                                    for s, kl in alone(ladder, FEW))]
        if not gap.agrees:
            self.evidence.append(begins(ladder, gap.noise))
        rungs = [ladder.base, gap.floor, gap.rounding, *self.forced.values(),
                 *(e.rung for e in sorted(gap.tried, key=lambda e: e.rung.mean))]
        left = {} if gap.agrees else {r.name: remaining(r, ladder.base) for r in self.forced.values()} | {
            e.rung.name: e.left for e in gap.tried}
        equally = [c for c in dict.fromkeys("+".join(e.causes) for e in found) if c != "+".join(found[0].causes)]
        if equally:
            says += f" As good an explanation: {'; or '.join(e.says for e in found if e.causes != found[0].causes)}."
        return Diagnosis(causes, says, fault, tuple(equally), tuple(self.evidence), (*self.notes, *ladder.skipped),
                         tuple(rungs), left, tuple(where), len(ladder.responses), of, int(ladder.own.sum()),
                         None if gap.agrees else example_of(ladder, tokenizer))

    # ------------------------------------------------------------------ forced routes
    def _force(self) -> None:
        """The rungs of replay: all ids, those of prompt or response alone, combine weights too."""
        ladder = self.ladder
        without = sum(not usable(r, ladder.layout) for r in ladder.responses)
        if without:
            self.notes.append(f"{without} of {len(ladder.responses)} responses carry no routes of this model's top-"
                              f"{ladder.layout.top_k}: a replay has nothing to replay there.")
        if not ladder.routed:
            return
        tried = [("ids forced", as_reported, False), ("ids of the prompt forced", partly(prompt=True), False),
                 ("ids of the response forced", partly(prompt=False), False)]
        if all(r.gates is not None for r in ladder.responses if usable(r, ladder.layout)):
            tried.append(("ids and combine weights forced", as_reported, True))
        for name, routes, gates in tried:
            if (rung := ladder.forced(name, routes, gates)) is not None:
                self.forced[name] = rung

    def _harmless(self) -> bool:
        """Whether forced routes leave log-probs that agree where they are, and others within rounding. A trainer in
        less than float32 picks other experts at ties by itself, and so may an honest engine."""
        gap, ties = self.gap, next(self.ladder.model.parameters()).dtype != torch.float32
        return all((gap.agrees and r.mean <= FORCED * gap.noise) or ((ties or not gap.agrees) and gap.rounded(r))
                   for r in self.forced.values())

    # ------------------------------------------------------------------ reported routes
    def _routes(self, best: Explanation | None) -> list[Finding]:
        """What is wrong with the reported routes, held against those of what explains the gap."""
        ladder = self.ladder
        found = self._other_k()
        if not ladder.routed:
            return found
        scores = ladder.natural
        if best is not None and best.suspects and all(s.tokens is None for s in best.suspects):
            under = ladder.under(best.suspects, keep_routes=True, keep_gates=bool(ladder.natural.gates))
            scores = under if under is not None and under.routes[0].shape == ladder.natural.routes[0].shape else scores
        reported = Reported(ladder.responses, scores.routes, scores.gates, ladder.layout, ladder.expected)
        if not reported.pairs:
            return found
        whose = "" if scores is ladder.natural else " under what explains the gap"
        if math.isnan(reported.agreement):
            self.notes.append("Of the reported routes next to none is known: there is nothing to compare or to replay.")
            return [*found, *findings(reported)]
        self.evidence.append(f"{100 * reported.agreement:.3g} % of the reported sets of experts are those that the "
                             f"checkpoint picks itself{whose}; "
                             f"between its float32 and its bfloat16 {100 * ladder.expected:.3g} %.")
        self.sets = [Place("sets", str(site.decoder_layer), float(1 - own), 0)
                     for site, own in zip(ladder.layout.sites, reported.by_site(), strict=True)]
        apart = [p.name for p in self.sets if p.value > 1 - CLEARLY * ladder.expected]
        if apart:
            self.evidence.append(f"The first layer that uses other experts, by more than rounding, is {apart[0]} "
                                 f"({len(apart)} of {len(self.sets)} do).")
        for finding in findings(reported):
            found.append(finding)
            repaired = finding.repaired and scores is ladder.natural and ladder.forced(
                f"ids forced, {finding.cause} mended", self._mended(finding))
            if repaired:
                self.forced[repaired.name] = repaired
        return found

    def _mended(self, finding: Finding) -> Any:
        assert finding.repaired is not None
        return lambda r, layout: finding.repaired(r, layout) if usable(r, layout) else as_reported(r, layout)

    def _other_k(self) -> list[Finding]:
        k = self.ladder.layout.top_k
        others = {r.ids.shape[2] for r in self.ladder.responses if r.ids is not None} - {k}
        return [Finding("top_k", f"the engine reports {' or '.join(map(str, sorted(others)))} experts per token, the "
                        f"model uses {k}", f"routes have {sorted(others)} slots")] if others else []

    # ------------------------------------------------------------------ the sentence
    def _verdict(self, found: Sequence[Explanation], findings: Sequence[Finding]) -> tuple[tuple[str, ...], str, bool]:
        gap, base = self.gap, self.ladder.base
        faults = [f for f in findings if f.fault]
        for f in findings:
            self.evidence.append(f"{f.says[0].upper()}{f.says[1:]}: {f.evidence}.")
        size = f"KL {base.mean:.2g} nats per token"
        routes = "; ".join(f.says for f in faults)
        if found:
            best = found[0]
            self._explain(best)
            causes = (*best.causes, *(f.cause for f in faults if f.cause not in best.causes))
            causes = causes if best.fault else (*causes[len(best.causes):], *best.causes)
            also = f" Its routes are wrong too: {routes}." if any(f.cause not in best.causes for f in faults) else ""
            says = f"{_sentence(best.says)} ({size}, {best.rung.mean:.2g} when the trainer does the same).{also}"
            return causes, says, best.fault or bool(faults)
        quiet = gap.agrees or gap.small
        if faults:
            engine = "The engine's log-probs are those of the checkpoint" + ("" if gap.agrees else " up to rounding")
            start = f"{engine}, but the routes it reports are not those it used" if quiet else \
                f"There is a gap ({size}) that nothing tried explains, and the reported routes are wrong"
            causes = tuple(f.cause for f in faults)
            return causes if quiet else (*causes, UNEXPLAINED), f"{start}: {routes}.", True
        if not gap.agrees and (routed := self._by_routes()) is not None:
            self._explain(routed)
            return routed.causes, (f"{_sentence(routed.says)}, for a reason that is none of those tried: with what it "
                                   f"reports forced, the gap goes ({size}, {routed.rung.mean:.2g} forced)."), True
        if quiet and self.forced and not self._harmless():
            worst = max(self.forced.values(), key=lambda r: r.mean)
            return (UNEXPLAINED,), (f"The engine's log-probs are those of the checkpoint ({size}), but replaying what "
                                    f"it reports moves them ({worst.name}: KL {worst.mean:.2g}), in no way that is "
                                    "known: its routes are not those it used."), True
        if gap.agrees:
            return (), (f"No gap: {size}, and log-probs agree up to {gap.noise:.2g}: {FLOORS:g} times the noise floor "
                        f"of {gap.floor.mean:.2g}, at least {gap.least:.2g}."), False
        if quiet:
            return ("rounding",), (f"The gap is what rounding makes ({size}; the checkpoint in float32 and in bfloat16 "
                                   f"differ by {gap.rounding.mean:.2g}). Nothing to mend."), False
        return self._unexplained(size)

    def _by_routes(self) -> Explanation | None:
        """Whether the gap goes where what the engine reports of its routers is forced."""
        for name, cause, words in (("ids forced", "routing", "the engine chooses other experts"),
                                   ("ids and combine weights forced", "combine_weights",
                                    "the engine weighs its experts otherwise")):
            if (rung := self.forced.get(name)) is not None:
                found = Explanation((cause,), words, rung, remaining(rung, self.ladder.base), True)
                if self.gap.enough(found):
                    return found
        return None

    def _unexplained(self, size: str) -> tuple[tuple[str, ...], str, bool]:
        """A gap that nothing takes away: whether only some of the responses have it."""
        for kind, cause, words in (("weight version", "weight_version", "other weights sampled some of the responses"),
                                   ("prefix", "stale_cache", "responses after a cached prefix have the gap: its "
                                    "entries are of other weights or positions")):
            groups = sorted((p for p in places(self.ladder, None) if p.kind == kind), key=lambda p: p.value)
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
            return (UNEXPLAINED,), (f"There is a gap ({size}), but of tokens there are {int(self.ladder.own.sum())}, "
                                    f"too few to tell one reason from another: {TOKENS} are needed."), True
        best = min(self.gap.tried, key=lambda e: e.left[0], default=None)
        near = f" The nearest, {best.rung.name}, leaves {100 * best.left[0]:.3g} % of it." if best else ""
        return (UNEXPLAINED,), (f"There is a gap ({size}) that nothing tried explains: other weights, perhaps (--also "
                                f"names a checkpoint to try), or something this ladder does not know.{near}"), True

    def _explain(self, e: Explanation) -> None:
        ratio, low, high = e.left
        self.evidence.append(
            f"With {e.rung.name or e.says} the KL goes from {self.ladder.base.mean:.2g} to {e.rung.mean:.2g} nats per "
            f"token: {100 * ratio:.2g} % of it is left [{100 * low:.2g}, {100 * high:.2g}]; noise floor "
            f"{self.gap.floor.mean:.2g}, rounding {self.gap.rounding.mean:.2g}"
            + (f"; in {e.responses} of {int((self.ladder.base.kl > self.gap.noise).sum())} responses with a gap."
               if e.responses else ".")
            + (f" Of the tokens of a response it brings {50 + 50 * e.rung.nearer.mean():.0f} % nearer to the engine's, "
               "where another router than the engine's takes more away than it brings." if self.gap.nearer(e) else ""))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
