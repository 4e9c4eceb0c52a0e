"""The rules by which studies decide a planned comparison: `Rule`, with a primary endpoint, a secondary one and a
margin; and `Both`, an earlier one.

A study declares its contrasts as linear forms over (condition, arm), and its gates:

    old = Condition("lag=2")
    RULE = Rule(endpoint="sampled exact match, second half", secondary="greedy exact match, second half",
                gates=(Gains(old["grpo"]),), families={"lag 2": {"GSPO − GRPO": old["gspo_short"] - old["grpo"]}})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from moe_rl.errors import RunError
from moe_rl.metrics.rounding import number
from moe_rl.objectives.methods_page import head, row
from moe_rl.results.stats import Interval, Paired, holm, paired, student
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

LEVEL = 0.05
VOID, NOTHING = "void", "nothing is concluded"
"""The words of a comparison where the gate of a study, or of that comparison, is not passed."""
BySeed = Mapping[int, float]


@dataclass(frozen=True)
class Outcome:
    """What the rule says of one comparison, first minus second, over the seeds that both have."""

    name: str
    primary: Paired
    """In the primary endpoint, 95 % interval."""
    adjusted: float
    """Its p-value, after Holm over all comparisons of the family."""
    secondary: Paired
    narrow: Interval
    """90 % interval in the primary endpoint, for equivalence: two one-sided t-tests at 5 %."""
    margin: float

    @property
    def sign(self) -> int:
        """1 or −1 for an effect, 0 for anything else."""
        here = _sign(self.primary, self.adjusted)
        return 0 if _sign(self.secondary, self.secondary.p) == -here else here

    @property
    def equivalent(self) -> bool:
        """Whether the 90 % interval lies within the margin."""
        return -self.margin <= self.narrow.low and self.narrow.high <= self.margin

    @property
    def said(self) -> str:
        """`an effect`, `no difference that matters`, `opposed` (the endpoints contradict each other) or `undecided`."""
        if self.sign:
            return "an effect"
        if self.equivalent:
            return "no difference that matters"
        return "opposed" if _sign(self.primary, self.adjusted) else "undecided"

    def worded(self, said: str) -> str:
        """The outcome in these words, with its numbers."""
        return (
            f"{self.name}: {said} ({self.primary.difference.printed('.3f')}, 90 % {self.within}, n = "
            f"{self.primary.n}, Holm p {self.adjusted:.2g}; secondary {self.secondary.difference.printed('.3f')})"
        )

    @property
    def within(self) -> str:
        """The 90 % interval, printed."""
        return f"[{number(self.narrow.low, '.3f')}, {number(self.narrow.high, '.3f')}]"


def outcomes(pairs: Mapping[str, tuple[Sequence[BySeed], Sequence[BySeed]]], margin: float) -> list[Outcome]:
    """The outcome of each comparison of a family, by name: two sides, each with its values by seed in the primary and
    in the secondary endpoint."""
    tests = {name: [paired(a, b) for a, b in zip(*sides, strict=True)] for name, sides in pairs.items()}
    adjusted = holm([first.p for first, _ in tests.values()])
    found = []
    for (name, (first, second)), p in zip(tests.items(), adjusted, strict=True):
        a, b = (side[0] for side in pairs[name])
        narrow = student([a[seed] - b[seed] for seed in sorted(set(a) & set(b))], 0.9)
        found.append(Outcome(name, first, p, second, narrow, margin))
    return found


def against_zero(differences: Sequence[BySeed]) -> tuple[Sequence[BySeed], Sequence[BySeed]]:
    """The two sides of a comparison whose differences by seed are known, in the primary and the secondary endpoint."""
    return differences, [dict.fromkeys(one, 0.0) for one in differences]


def _sign(test: Paired, p: float) -> int:
    """Of a difference that is decided at 5 %."""
    return 0 if p > LEVEL else 1 if test.difference.mean > 0 else -1


# ---------------------------------------------------------------------- contrasts as declared
@dataclass(frozen=True)
class Form:
    """A linear form over the values of (condition, arm) of one seed."""

    weights: Mapping[tuple[str, str], float]

    def __add__(self, other: Form) -> Form:
        pairs = dict.fromkeys((*self.weights, *other.weights))
        return Form({pair: self.weights.get(pair, 0.0) + other.weights.get(pair, 0.0) for pair in pairs})

    def __mul__(self, factor: float) -> Form:
        return Form({pair: factor * weight for pair, weight in self.weights.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Form:
        return self * (1 / divisor)

    def __neg__(self) -> Form:
        return self * -1.0

    def __sub__(self, other: Form) -> Form:
        return self + -other

    def by_seed(self, frames: Frames, name: str) -> BySeed:
        """`values` as a mapping."""
        return self.values(frames, name).to_dict()

    def values(self, frames: Frames, name: str) -> pd.Series:
        """The form of a metric on every seed that has all its runs. Raises RunError where no seed has."""
        columns = [
            weight * values_of(frames, condition, name).get(arm, pd.Series(dtype=float))
            for (condition, arm), weight in self.weights.items()
        ]
        values = pd.concat(columns, axis=1).dropna().sum(axis=1)
        if values.empty:
            pairs = ", ".join(f"{arm} in {condition}" for condition, arm in self.weights)
            raise RunError(f"no seed has a value of {name!r} for all of {pairs}")
        return values


@dataclass(frozen=True)
class Condition:
    """A condition of a study: `Condition("lag=2")["gspo_short"]` is the value of an arm there."""

    name: str

    def __getitem__(self, arm: str) -> Form:
        return Form({(self.name, arm): 1.0})


def values_of(frames: Frames, condition: str, name: str) -> pd.DataFrame:
    """A metric of one condition, or a column of `runs`, seed × arm; empty where it was not run."""
    if condition not in frames.conditions:
        return pd.DataFrame()
    here = frames.condition(condition)
    if name in here.runs:
        return here.runs.pivot(index="seed", columns="arm", values=name)
    return per_run(here, metric(name)).unstack(0)


def median_kl(frames: Frames, condition: str) -> float:
    """GRPO's KL to the policy at the start of the step (k3, second half, noise included, nats per token); the median
    over seeds, as k3 has a heavy tail."""
    return float(values_of(frames, condition, "token_kl_k3")["grpo"].median())


def slots_changed(frames: Frames, condition: str) -> float:
    """Of GRPO: the share of expert slots of the network that gives the gradient that differ from π_old's when the last
    update of a step begins, mean over steps and seeds."""
    return float(values_of(frames, condition, "fresh_expert_change_rate")["grpo"].mean())


def joined(frames: Frames, other: Frames, conditions: Mapping[str, str]) -> Frames:
    """The rows of a study, and those of some conditions of another one: name there → name here."""

    def renamed(table: pd.DataFrame) -> pd.DataFrame:
        rows = table[table["condition"].isin(conditions)]
        return rows.assign(condition=rows["condition"].map(conditions))

    runs, steps = (
        pd.concat([a, renamed(b)]) for a, b in ((frames.runs, other.runs), (frames["steps"], other["steps"]))
    )
    return Frames(runs, {"steps": steps})


@dataclass(frozen=True)
class Gains:
    """The gate that an arm ends above its start, before RL, in the secondary endpoint (mean over seeds)."""

    form: Form

    def judge(self, frames: Frames, rule: Rule) -> tuple[bool, str]:
        """Whether it is passed, and in words."""
        ((condition, arm),) = self.form.weights
        steps = frames.condition(condition)["steps"].query("step == 0 and arm == @arm").set_index("seed")
        start, end = steps[metric(rule.secondary).column].to_dict(), self.form.by_seed(frames, rule.secondary)
        gain = student([end[seed] - start[seed] for seed in sorted(end)])
        passed = gain.mean > 0
        return passed, f"gate {'passed' if passed else 'failed'}: {arm} in {condition} above its start by {gain}"


@dataclass(frozen=True)
class Within:
    """The gate that a form of a metric lies in a range (mean over seeds)."""

    form: Form
    metric: str
    low: float
    high: float

    def judge(self, frames: Frames, rule: Rule) -> tuple[bool, str]:
        """Whether it is passed, and in words."""
        value = student([*self.form.by_seed(frames, self.metric).values()])
        passed = self.low <= value.mean <= self.high
        return passed, (
            f"gate {'passed' if passed else 'failed'}: {self.metric} of "
            f"{', '.join(f'{arm} in {condition}' for condition, arm in self.form.weights)} is {value}, "
            f"from {self.low:g} to {self.high:g} is asked"
        )


@dataclass(frozen=True)
class Rule:
    """What a study declares before its runs. Holm's correction covers the contrasts of one family."""

    endpoint: str
    secondary: str
    families: Mapping[str, Mapping[str, Form]]
    gates: tuple[Gains | Within, ...] = ()
    margin: float = 0.02
    bootstrap: bool = False
    """Whether 95 % intervals are bootstraps, as in the studies up to ratio_gradient. No decision depends on them."""

    def outcomes(self, frames: Frames) -> dict[str, list[Outcome]]:
        """The outcome of every contrast, by family. No decision depends on a random generator."""
        judged = {}
        for family, forms in self.families.items():
            values = {
                name: [form.by_seed(frames, endpoint) for endpoint in (self.endpoint, self.secondary)]
                for name, form in forms.items()
            }
            found = outcomes({name: against_zero(both) for name, both in values.items()}, self.margin)
            judged[family] = (
                found
                if self.bootstrap
                else [
                    replace(one, primary=_by_student(one.primary, first), secondary=_by_student(one.secondary, second))
                    for one, (first, second) in zip(found, values.values(), strict=True)
                ]
            )
        return judged

    def passed(self, frames: Frames) -> bool:
        """Whether all gates are passed."""
        return all(gate.judge(frames, self)[0] for gate in self.gates)

    def judged(self, frames: Frames) -> list[tuple[Outcome, str]]:
        """The contrasts of all families with the rule's words; void where a gate is failed."""
        passed = self.passed(frames)
        every = [one for family in self.outcomes(frames).values() for one in family]
        return [(one, one.said if passed else VOID) for one in every]


def _by_student(test: Paired, values: BySeed) -> Paired:
    return replace(test, difference=student([*values.values()]))


@dataclass(frozen=True)
class Both:
    """An earlier rule: an effect is what all endpoints decide with one sign. Holm's correction covers the contrasts of
    one family, each endpoint by itself."""

    endpoints: tuple[str, ...]
    families: Mapping[str, Mapping[str, Form]]

    def rows(self, frames: Frames) -> Iterator[list[str]]:
        """Per contrast: its name, its family, n, the difference and its p-value in every endpoint, and the words."""
        for family, forms in self.families.items():
            found = []
            for name in self.endpoints:
                values = [form.by_seed(frames, name) for form in forms.values()]
                tests = [paired(one, dict.fromkeys(one, 0.0)) for one in values]
                found.append(list(zip(tests, holm([test.p for test in tests]), strict=True)))
            for name, of_one in zip(forms, zip(*found, strict=True), strict=True):
                signs = {_sign(test, p) for test, p in of_one}
                numbers = [cell for test, p in of_one for cell in (str(test.difference), f"{p:.2g}")]
                words = "an effect" if signs in ({1}, {-1}) else "no effect by the rule"
                yield [name, family, str(of_one[0][0].n), *numbers, words]

    def verdict(self, frames: Frames) -> list[str]:
        """The outcomes in words."""
        return [
            f"{family}: {name}: {words} ({first}, n = {n}, Holm p {p}; {second}, Holm p {other})"
            for name, family, n, first, p, second, other, words in self.rows(frames)
        ]


def judged_by(rules: Mapping[str, Rule]) -> Callable[[Frames], list[tuple[Outcome, str]]]:
    """The contrasts of several rules with their words; those of a rule are void where a gate of its own is failed."""
    return lambda frames: [pair for rule in rules.values() for pair in rule.judged(frames)]


def spoken(judged: Callable[[Frames], Iterable[tuple[Outcome, str]]], *rules: Rule) -> Callable[[Frames], list[str]]:
    """The verdict of a study: the gates of its rules, and its planned comparisons with the rule's words."""

    def verdict(frames: Frames) -> list[str]:
        gates = [gate.judge(frames, rule)[1] for rule in rules for gate in rule.gates]
        return [*dict.fromkeys(gates), *(one.worded(words) for one, words in judged(frames))]

    return verdict


# ---------------------------------------------------------------------- tables
NAMES = {
    "sampled exact match, second half": "held-out match, sampled",
    "greedy exact match, second half": "held-out match, greedy",
}


def table_of(judged: Iterable[tuple[Outcome, str]], corrected: str, endpoints: Iterable[str]) -> str:
    """Markdown: a row per outcome with both endpoints, by these names, and the words of `Rule`. `corrected` says how
    p-values are adjusted."""
    first, second = (f"{name} [95 % CI]" for name in endpoints)
    lines = [*head("difference", "n", first, "90 % CI", "p", second, "rule")]
    for one, words in judged:
        first, second = (test.difference.printed(".3f") for test in (one.primary, one.secondary))
        lines.append(row(one.name, str(one.primary.n), first, one.within, f"{one.adjusted:.2g}", second, words))
    return "\n".join([*lines, "", f"p: permuted signs of the seeds' differences, after {corrected}."]) + "\n"


def table_of_both(rule: Both, frames: Frames, corrected: str) -> str:
    """Likewise of `Both`, with p-values of every endpoint."""
    titles = [title for name in rule.endpoints for title in (f"{name} [95 % CI]", "p")]
    lines = [*head("difference", "condition", "n", *titles, "rule"), *(row(*cells) for cells in rule.rows(frames))]
    note = f"p: permuted signs of the seeds' differences, after Holm over {corrected}."
    return "\n".join([*lines, "", note]) + "\n"
