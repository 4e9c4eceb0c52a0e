"""`diagnose`: rollouts and the model that the trainer believes sampled them → why their log-probs differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from torch import nn

from moe_rl.analysis.diagnose.ladder import STATED, Ladder, Rung, Scores, force_each_site, partly, remaining
from moe_rl.analysis.diagnose.places import MOST, Example, Place, describe_start, example_of, places
from moe_rl.analysis.diagnose.responses import Rollouts, as_reported, usable
from moe_rl.analysis.diagnose.signatures import Finding, Reported, findings
from moe_rl.analysis.diagnose.suspects import Suspect, evaluating, runnable, suspects_of
from moe_rl.analysis.folders import describe
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.load import load, load_tokenizer, no_progress_bars, placement
from moe_rl.routing.sites import layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOTHING = 1e-9
"""KL per token, in nats, below which log-probs agree: √(2 · 10⁻⁹) is 4.5 · 10⁻⁵ nats, four printed digits."""
FLOORS = 4.0
"""Times the noise floor that is still noise."""
ROUNDINGS, DISTANCES = 4.0, 3.0
"""Times the KL, and the mean |log r|, of rounding that an honest engine in another dtype may show."""
SPARED = 100.0
"""Times the noise by which rounding moves a response, for one without a gap to say that there is no rounding."""
LITTLE, CLOSE = 0.1, 0.4
"""What may be left of the KL, with its interval, and of the mean |log r| by what explains a gap."""
WORTH = 0.5
"""What is left of the KL under a pair that is worth a row of the table."""
QUANTISED, CHANCE, NEARER = ("router_int8", "router_fp8"), 1e-3, 0.2
"""Routers that are named where rounding hides them, the chance that as many tokens come nearer by accident, and by how
much the share that does must be larger than the share that goes away, lest another small change has to do with them."""
TOKENS = 8
"""Fewer of the engine's own name nothing: of some hundred things tried, one fits a few numbers by accident."""
APART = 1.5
"""Explanations whose KL is within this factor of the best fit equally well."""
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
        return _Case(ladder, Gap(ladder, *ladder.noise())).decide(read.count, tokenizer, dict(also or {}))


def diagnose_checkpoint(
    rollouts: str,
    checkpoint: str,
    *,
    also: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    router_dtype: str | None = None,
    responses: int = 128,
    batch_tokens: int = 4096,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """`diagnose` of a file, against a Hugging Face checkpoint in the trainer's dtype and those in `also`. Raises
    ConfigError, before weights are read, for a file that cannot be used and for checkpoints that are no versions of one
    model."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # else up to 1 GB of compiled bfloat16 products
    if batch_tokens < 1:
        raise ConfigError(f"--batch-tokens {batch_tokens}: a forward needs at least 1.")
    if router_dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--router-dtype {router_dtype!r} is none; use float32 or bfloat16.")
    settings = [ModelConfig(name=name, device=device, dtype=dtype, router_dtype=router_dtype)
                for name in (checkpoint, *also)]
    placement(settings[0])
    (layout, sizes), *others = [describe(s.name, trust_remote_code) for s in settings]
    for name, (other, _) in zip(also, others, strict=True):
        try:
            layout.require(other, f"--also {name}")
        except RoutingError as error:
            raise ConfigError(f"--also {name} is no version of {checkpoint}: {error}") from error
    read = Rollouts(rollouts, layout, vocabulary=sizes.vocab_size, num_layers=sizes.num_hidden_layers, limit=responses,
                    tokenizer=load_tokenizer(checkpoint, trust_remote_code))
    with no_progress_bars():
        loaded, *older = [load(s, seed=0, trust_remote_code=trust_remote_code) for s in settings]
    return diagnose(read, loaded.model, tokenizer=loaded.tokenizer, batch_tokens=batch_tokens,
                    also={name: other.model for name, other in zip(also, older, strict=True)})


@dataclass
class _Case:
    """One diagnosis on its way."""

    ladder: Ladder
    gap: Gap
    forced: dict[str, Rung] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    sets: list[Place] = field(default_factory=list)

    def decide(self, of: int, tokenizer: Any, also: dict[str, nn.Module]) -> Diagnosis:
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
                                    for s, kl in force_each_site(ladder, FEW))]
        if not gap.agrees:
            self.evidence.append(describe_start(ladder, gap.noise))
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


# ---------------------------------------------------------------------- from rungs to explanations
@dataclass(frozen=True)
class Explanation:
    """One thing, or two together, that the engine may do otherwise."""

    causes: tuple[str, ...]
    says: str
    rung: Rung
    left: tuple[float, float, float]
    """Of the natural KL, with its 95 % interval."""
    fault: bool
    suspects: tuple[Suspect, ...] = ()
    """What changes the model or its inputs; readings of log-probs are none."""
    responses: int = 0
    """Of how many responses with a gap it takes the gap away."""


@dataclass
class Gap:
    """The engine's gap and everything that was tried on it."""

    ladder: Ladder
    floor: Rung
    rounding: Rung
    tried: list[Explanation] = field(default_factory=list)

    @property
    def least(self) -> float:
        """KL up to which log-probs agree whatever the noise floor is: that was measured in two orders of summation, and
        the engine's is a third."""
        return max(NOTHING, self.ladder.rounded**2 / 2)

    @property
    def noise(self) -> float:
        """KL up to which log-probs agree."""
        return max(self.least, FLOORS * self.floor.mean)

    @property
    def agrees(self) -> bool:
        return self.ladder.base.mean <= self.noise

    def rounded(self, rung: Rung) -> bool:
        """Whether a gap is no larger than rounding makes it. Few tokens with heavy tails make a mean of KL an accident;
        the mean |log r| is none, so the larger gap has to be larger in both, unless its KL is out of all proportion."""
        kl = rung.mean / max(self.rounding.mean, NOTHING / ROUNDINGS)
        distance = rung.distance.mean() / max(self.rounding.distance.mean(), 1e-12)
        return bool(kl <= ROUNDINGS or (kl <= 25 * ROUNDINGS and distance <= DISTANCES))

    @property
    def small(self) -> bool:
        """Whether the engine's gap is one of rounding: no larger on average, and not a larger one of a few responses,
        while most of those that rounding would have moved are as the checkpoint has them."""
        base, rounding = self.ladder.base, self.rounding
        moved, gap = rounding.kl > SPARED * self.noise, base.kl > self.noise
        few = moved.any() and gap.any() and gap[moved].mean() <= 0.5
        larger = few and (base.kl[gap].mean() > ROUNDINGS * rounding.mean
                          and base.distance[gap].mean() > DISTANCES * rounding.distance.mean())
        return self.rounded(base) and not larger

    # ------------------------------------------------------------------ trying
    def attempt(self, suspects: Sequence[Suspect]) -> None:
        """Try every suspect alone, each under every reading of the log-probs too; then pairs, if none is enough."""
        natural = self.ladder.natural
        self._take((), natural)
        for by in (1, -1):
            self._add(("logprob_shift",), f"the engine's log-probs are off by one: that of token t is token t{by:+d}'s",
                      self.ladder.shifted(by), True)
        for suspect in suspects:
            if (found := self.ladder.under([suspect])) is not None:
                self._take((suspect,), found)
        if not self.few and not self.small and not self.explanations():
            best = sorted((e for e in self.tried if len(e.suspects) == 1 and e.left[0] < 0.7), key=lambda e: e.left[0])
            leading = list(dict.fromkeys(e.suspects[0] for e in best))[:2]
            done = set()
            for first in leading:
                for second in suspects:
                    if first.place != second.place and (pair := frozenset({first.rung, second.rung})) not in done:
                        done.add(pair)
                        if (found := self.ladder.under([first, second])) is not None:
                            self._take((first, second), found)

    def _take(self, suspects: tuple[Suspect, ...], scores: Scores) -> None:
        for reading, logprobs in scores.logprobs.items():
            if not suspects and reading == STATED:
                continue
            parts = [(s.cause, s.rung, s.says, s.fault) for s in suspects]
            if reading != STATED:
                kept = reading == "kept set"
                parts.append(("kept_set" if kept else "temperature",
                              "log-probs over the kept set" if kept else f"log-probs at {reading}",
                              self.ladder.readings[reading], True))
            parts.sort(key=lambda part: not part[3])  # what is to be mended comes first
            causes, rungs, says, faults = zip(*parts, strict=True)
            rung = self.ladder.rung(" + ".join(rungs), logprobs, scores.best)
            self._add(causes, "; and ".join(says), rung, any(faults), suspects)

    def _add(self, causes: tuple[str, ...], says: str, rung: Rung, fault: bool,
             suspects: tuple[Suspect, ...] = ()) -> None:
        base = self.ladder.base
        # Where only some responses have the fault, the others are as they are.
        helped = rung.kl < base.kl
        mixed = replace(rung, **{name: np.where(helped, getattr(rung, name), getattr(base, name))
                                 for name in ("kl", "distance", "beyond_2", "flips")})
        whole = rung.mean <= mixed.mean * APART or helped.all()
        kept = rung if whole else mixed
        left = remaining(kept, base)
        if len(causes) == 1 or left[0] < WORTH:
            helped &= base.kl > self.noise
            self.tried.append(Explanation(causes, says, kept, left, fault, suspects, int(helped.sum())))

    # ------------------------------------------------------------------ deciding
    @property
    def few(self) -> bool:
        """Whether too few tokens were looked at to tell one reason from another."""
        return int(self.ladder.own.sum()) < TOKENS

    def explanations(self) -> list[Explanation]:
        """What explains the gap, the best first, then what fits equally well; nothing where tokens are few. A pair only
        where it is needed: either of its parts alone leaves much more."""
        if self.few:
            return []
        enough = [e for e in self.tried if self.enough(e)]
        single = [e for e in enough if len(e.causes) == 1]
        found = single or [e for e in enough if self._needs_both(e)] or [e for e in self.tried if self.nearer(e)]
        if not found:
            return []
        found.sort(key=lambda e: (max(e.rung.mean, self.noise), len(e.suspects), e.rung.mean))
        limit = APART * max(found[0].rung.mean, self.noise)
        return [e for e in found if e.rung.mean <= limit]

    def enough(self, e: Explanation) -> bool:
        """Whether an explanation takes the gap away: all but little of it, in KL and in distance; or a gap whose KL is
        beyond what rounding makes, down to that or to the noise floor. Any other has to go nearly whole."""
        base, rung, rounding = self.ladder.base, e.rung, self.rounding
        distance = float(rung.distance.mean() / base.distance.mean())
        if base.mean <= max(ROUNDINGS * rounding.mean, NOTHING):
            return e.left[2] <= LITTLE / 5 and distance <= CLOSE / 2
        if e.left[2] <= LITTLE and distance <= CLOSE:
            return True
        quiet = rung.mean <= 2 * rounding.mean and rung.distance.mean() <= 2 * rounding.distance.mean()
        return bool(e.left[2] <= 1 / 3 and (quiet or rung.mean <= self.noise))

    def nearer(self, e: Explanation) -> bool:
        """Whether a quantised router is what rounding hides: what it leaves is rounding, and it brings more tokens of a
        response nearer to the engine's than it takes away. A router that is not the engine's moves them at random,
        most of them away from where they only were rounded to."""
        votes = e.rung.nearer
        if e.causes[1:] or e.causes[0] not in QUANTISED or votes.mean() < NEARER or not self.rounded(e.rung):
            return False
        return bool(np.ptp(votes) and scipy.stats.ttest_1samp(votes, 0, alternative="greater").pvalue < CHANCE)

    def _needs_both(self, e: Explanation) -> bool:
        alone = [x.rung.mean for x in self.tried if len(x.causes) < len(e.causes) and set(x.causes) <= set(e.causes)]
        return min(alone, default=np.inf) > 3 * max(e.rung.mean, self.noise)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
