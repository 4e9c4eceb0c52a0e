"""What the declared rule of volatility_dial says, from its tables: printed by `answers.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from per_seed import differences, slopes, stored
from volatility_dial import SIGMAS, noise, study

from moe_rl.errors import RunError
from moe_rl.results import plots
from moe_rl.results.stats import Interval, Paired, holm, interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
ENDPOINTS = (study.endpoint, *study.further_endpoints)
FORMS = {"weights": "gates and sets move", "choice": "sets alone move"}
FURTHER = ("entropy", "token_ess", "token_kl_k3", "expert_change_rate")
ARMS = [arm.name for arm in study.arms]
NAMES = [" − ".join(pair) for pair in study.comparisons]
WITHIN = 0.02
"""Differences of reward that count as none."""


def main() -> None:
    frames = stored(study.name)
    machinery(frames)
    values = {name: by_dose(frames, name) for name in (*ENDPOINTS, *FURTHER)}
    for form in FORMS:
        harm(values, form)
        comparisons(values, form)
    for form in FORMS:
        at_small_doses(values[study.endpoint], form)
        levels(values, form)
    plots.save(draw(values, frames["steps"]), FOLDER / "figures", study.name)


def by_dose(frames: Frames, name: str) -> dict[tuple[str, float], pd.DataFrame]:
    """(form, σ) → seed × arm. Both forms share σ = 0, and replay's choice, which no dose moves, its runs there."""
    quiet = per_run(frames.cell(noise("weights", 0)), metric(name)).unstack(0)
    found = {("weights", 0.0): quiet, ("choice", 0.0): quiet}
    for form in FORMS:
        for sigma in SIGMAS:
            here = per_run(frames.cell(noise(form, sigma)), metric(name)).unstack(0)
            found[form, sigma] = here if "grpo-replay" in here else here.assign(**{"grpo-replay": quiet["grpo-replay"]})
    return found


def verdict(frames: Frames) -> list[str]:
    """What the rule says: void or not, harm, effects, equivalence at the smallest dose."""
    values = {name: by_dose(frames, name) for name in ENDPOINTS}
    if any(arm not in values[study.endpoint][form, s] for form in FORMS for s in SIGMAS for arm in ARMS):
        raise RunError(f"the rule needs runs of {', '.join(ARMS)} at every dose of both forms")
    lines = [] if same_runs(frames)[0] else ["void: replay under the form choice is not replay without a dial"]
    gained = {arm: after_start(frames, arm) for arm in ARMS}
    lines += [f"void: {arm} does not end above its cold start, gained {gain}" for arm, gain in gained.items()
              if gain.mean <= 0]
    for form in FORMS:
        tests = [paired(*(values[n][form, s]["grpo"].to_dict() for s in (max(SIGMAS), 0.0))) for n in ENDPOINTS]
        signs = {int(np.sign(t.difference.mean)) if t.p <= 0.05 else 0 for t in tests}
        says = "harms" if signs == {-1} else "helps" if signs == {1} else "is not shown to harm"
        lines.append(f"{form}: volatility {says} GRPO at σ = {max(SIGMAS):g} (reward {tests[0].difference})")
        lines += [f"{form}: {name}, {said}" for name, (said, _) in effects(NAMES, tests_at(values, form)).items()]
        lines += [f"{form}, σ = {min(SIGMAS):g}: {a} − {b} {said}" for (a, b), (said, _) in
                  equivalence(values[study.endpoint], form).items()]
    return lines


def machinery(frames: Frames) -> None:
    """The two conditions without which the study is void."""
    same, compared = same_runs(frames)
    print(f"Replay under the form choice is replay without a dial, bit for bit ({', '.join(compared)}): {same}")
    steps = frames.cell(noise("weights", 0))["steps"]
    start = steps[steps["step"] == 0].pivot(index="seed", columns="arm", values="eval_exact_greedy")
    end = per_run(frames.cell(noise("weights", 0)), metric(ENDPOINTS[1])).unstack(0)
    for arm in ARMS:
        print(f"  greedy exact match, σ = 0, {arm}: {interval(start[arm])} → {interval(end[arm])}, "
              f"gained {after_start(frames, arm)}")


def same_runs(frames: Frames) -> tuple[bool, list[str]]:
    """Whether replay under the form choice at the largest dose is replay without a dial, bit for bit, and in what."""
    still, moved = (frames.cell(noise(*cell))["steps"].query("arm == 'grpo-replay'").sort_values(["seed", "step"])
                    for cell in (("weights", 0), ("choice", max(SIGMAS))))
    compared = [c for c in ("reward", "eval_exact_greedy", "entropy", "token_log_ratio_var", "grad_norm") if c in still]
    same = all(np.array_equal(still[c], moved[c], equal_nan=True) for c in compared)
    return same, compared


def after_start(frames: Frames, arm: str, cell: str = noise("weights", 0)) -> Interval:
    """How much greedy exact match an arm gains without a dose, from the cold start to the evaluations that count."""
    still = frames.cell(cell)
    steps = still["steps"]
    start = steps[steps["step"] == 0].pivot(index="seed", columns="arm", values="eval_exact_greedy")
    return interval((per_run(still, metric(ENDPOINTS[1])).unstack(0)[arm] - start[arm]).dropna())


def void(frames: Frames, cell: str) -> str | None:
    """Why a study says nothing: GRPO without noise, in this cell, does not gain greedy exact match."""
    gain = after_start(frames, "grpo", cell)
    return None if gain.mean > 0 else f"void: GRPO without noise does not end above its cold start, gained {gain}"


def harm(values: dict[str, dict], form: str) -> None:
    """GRPO at the largest dose against GRPO at none."""
    print(f"{form} ({FORMS[form]}): GRPO at σ = {max(SIGMAS):g} − GRPO at σ = 0")
    for name in ENDPOINTS:
        test = paired(*(values[name][form, sigma]["grpo"].to_dict() for sigma in (max(SIGMAS), 0.0)))
        print(f"  {name}: {test.difference}, p {test.p:.2g} (n = {test.n})")


def comparisons(values: dict[str, dict], form: str) -> None:
    """The declared contrasts at the largest dose."""
    print(f"{form}, σ = {max(SIGMAS):g}:")
    decide(NAMES, tests_at(values, form))


def tests_at(values: dict[str, dict], form: str) -> dict[str, list[Paired]]:
    """Of each endpoint the tests of the declared contrasts at the largest dose."""
    tables = {name: values[name][form, max(SIGMAS)] for name in ENDPOINTS}
    return {name: [paired(table[a].to_dict(), table[b].to_dict()) for a, b in study.comparisons]
            for name, table in tables.items()}


def decide(names: Sequence[str], tests: Mapping[str, Sequence[Paired]]) -> None:
    """Print some contrasts, with Holm over them, and what they come to."""
    for endpoint, found in tests.items():
        for name, test, p in zip(names, found, holm([t.p for t in found]), strict=True):
            print(f"  {endpoint}: {name} {test.difference}, p {test.p:.2g}, Holm {p:.3g} (n = {test.n})")
    for name, (said, signs) in effects(names, tests).items():
        print(f"  {name}: {said} (signs decided {signs})")


def effects(names: Sequence[str], tests: Mapping[str, Sequence[Paired]]) -> dict[str, tuple[str, list[int]]]:
    """Holm over some contrasts, each endpoint by itself: an effect is what all endpoints decide with one sign; and the
    signs that each decides."""
    signs: dict[str, list[int]] = {name: [] for name in names}
    for found in tests.values():
        for name, test, p in zip(names, found, holm([t.p for t in found]), strict=True):
            signs[name].append(int(np.sign(test.difference.mean)) if p <= 0.05 else 0)
    return {name: ("an effect" if abs(sum(s)) == len(s) else "no effect by the rule", s) for name, s in signs.items()}


def equivalence(rewards: dict[tuple[str, float], pd.DataFrame],
                form: str) -> dict[tuple[str, str], tuple[str, Interval]]:
    """Whether a contrast at the smallest dose is small, with its 90 % interval."""
    table = rewards[form, min(SIGMAS)]
    return {(a, b): equivalent(table, a, b) for a, b in study.comparisons}


def equivalent(rewards: pd.DataFrame, a: str, b: str) -> tuple[str, Interval]:
    """Whether a − b, over seeds (rows), is small, with its 90 % interval."""
    gap = differences(rewards, a, b, 0.9)
    equal = gap.low >= -WITHIN and gap.high <= WITHIN
    return f"{'equivalent' if equal else 'not shown to be equivalent'} within ±{WITHIN:g}", gap


def at_small_doses(rewards: dict[tuple[str, float], pd.DataFrame], form: str) -> None:
    """Equivalence at the smallest dose, and slopes over all."""
    for (a, b), (said, gap) in equivalence(rewards, form).items():
        print(f"{form}, σ = {min(SIGMAS):g}: {a} − {b} {gap} (90 %), {said}")
    sigmas = (0.0, *SIGMAS)
    for arm in ARMS:
        print(f"{form}, slope of reward over σ, {arm}: {slope({s: rewards[form, s][arm] for s in sigmas})}")
    for a, b in study.comparisons:
        gaps = {s: rewards[form, s][a] - rewards[form, s][b] for s in sigmas}
        print(f"{form}, slope of {a} − {b} over σ: {slope(gaps)}")


def slope(by_sigma: dict[float, pd.Series]) -> Interval:
    """Least squares per seed, per unit of σ."""
    table = pd.DataFrame(by_sigma).dropna()
    return interval(slopes(table, table.columns))


def levels(values: dict[str, dict], form: str) -> None:
    """Every quantity by dose and arm, means over seeds."""
    for name, by in values.items():
        rows = [f"σ = {s:g} " + " / ".join(f"{by[form, s][arm].mean():.3g}" for arm in ARMS) for s in (0.0, *SIGMAS)]
        print(f"{form}, {name}, {' / '.join(ARMS)}: {'; '.join(rows)}")


@plots.styled
def draw(values: dict[str, dict], steps: pd.DataFrame) -> Figure:
    """Level of GRPO and what replay and GSPO add to it, over the dose, paired by seed; a row of panels per form."""
    figure, axes = plots.new_figure(2 * len(FORMS), "Volatility as an assigned dose", width=17)
    for (form, what), (left, right) in zip(FORMS.items(), (axes[:2], axes[2:]), strict=True):
        by = values[study.endpoint]
        for arm in ARMS:
            whiskers(left, {s: by[form, s][arm] for s in drawn(form, arm)}, arm)
        for a, b in study.comparisons:
            found = whiskers(right, {s: by[form, s][a] - by[form, s][b] for s in drawn(form, a)}, a, seeds=True)
        right.axhline(0, color="black", linewidth=1)
        plots.cold_start(left, steps, "reward")
        left.set(title=f"{form}: {what}", xlabel="router noise σ, standard deviations of router weights",
                 ylabel="reward")
        right.set(title=f"{form}: minus GRPO", xlabel="router noise σ", ylabel="difference in reward")
    axes[0].legend(loc="center left")
    note = f"mean over n = {found.n} seeds, steps 26–50; whisker: {found.method}; dots: each seed; noise is injected"
    return plots.finish(figure, axes, note, legend=False)


def drawn(form: str, arm: str) -> tuple[float, ...]:
    """The doses at which an arm has run: replay in the form choice at none and at the largest alone."""
    return (0.0, max(SIGMAS)) if (form, arm) == ("choice", "grpo-replay") else (0.0, *SIGMAS)


def whiskers(ax: Axes, by_sigma: dict[float, pd.Series], arm: str, seeds: bool = False) -> Interval:
    """Means with intervals over σ, and every seed where asked."""
    colour, shift = plots.colour_of(arm, ARMS), 0.03 * (ARMS.index(arm) - 1)
    found = {sigma: interval(series.dropna()) for sigma, series in by_sigma.items()}
    x = np.array(list(found)) + shift
    mean, low, high = (np.array([getattr(i, part) for i in found.values()]) for part in ("mean", "low", "high"))
    style = {"fmt": f"{plots.symbol_of(arm)}-", "capsize": 3, "linewidth": 1.4, "markersize": 5}
    ax.errorbar(x, mean, [mean - low, high - mean], color=colour, label=arm, **style)
    if seeds:
        for at, series in zip(x, by_sigma.values(), strict=True):
            ax.plot(np.full(len(series), at), series, ".", color=colour, alpha=0.4, markersize=4)
    return next(iter(found.values()))
