"""What the declared rule of ratio_gradient says, from its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from exploratory import print_doses
from matplotlib.figure import Figure
from per_seed import differences, seed_by_arm, stored
from ratio_gradient import MARGIN, MOVED, NONE, SIGMAS, matched, moved, study
from rule import NOTHING, VOID, Outcome, against_zero, outcomes, unfinished
from volatility_dial_verdicts import void

from moe_rl.results import plots
from moe_rl.results.stats import interval
from moe_rl.results.summary import Metric, mean, metric, per_run
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
ENDPOINTS = (study.endpoint, *study.further_endpoints)
ARMS = [arm.name for arm in study.arms]
MATCHED = matched.name
INTERACTION, PROTECTION = "grpo, harm of both − of ratio − of gradient", "harm of the ratio, grpo − gspo"
CLOSED, GAP = f"gspo − {MATCHED}, ratio moved", "gspo − grpo, ratio moved"
SPECIFIC = "harm of the ratio − of the gradient, grpo − gspo"
MEANS = {
    INTERACTION: {1: "both together harm less than the sum", -1: "both together harm more than the sum",
                  0: "the two harms add up"},
    PROTECTION: {1: "GSPO is harmed more", -1: "GSPO is harmed less", 0: "GSPO protects from nothing"},
    CLOSED: {1: "it does not close GSPO's gap", -1: "it is better than GSPO", 0: "it closes GSPO's gap"},
}
"""What an effect above or below 0, and no difference that matters (0), stand for."""
SHARES = (2 / 3, 3 / 2)
"""The gate: clipped tokens of clip-matched GRPO without noise, as a multiple of GSPO's."""


def main() -> None:
    frames = stored(study.name)
    print("\n".join(verdict(frames)))
    for endpoint in ENDPOINTS:
        none = seed_by_arm(frames, NONE, endpoint, ARMS)
        print(f"{endpoint}, no noise: {gains(none)}")
        for sigmas in (SIGMAS, *((sigma,) for sigma in SIGMAS)):
            where = f"{endpoint}, σ = {' and '.join(f'{s:g}' for s in sigmas)}"
            for name, values in contrasts(frames, endpoint, sigmas).items():
                print(f"{where}: {name} {interval(values.dropna()).printed('.3f')}")
            for part in MOVED:
                harm = harms(frames, endpoint, part, sigmas)
                print(f"{where}, harm of {part}: {by_arm(harm)}")
                print(f"{where}, {part} moved: {gains(harm + none)}")
        ratio, gradient, both = (harms(frames, endpoint, part, SIGMAS) for part in MOVED)
        for what, table in {"ratio": both - ratio, "gradient": both - gradient,
                            "ratio − of gradient": both - ratio - gradient}.items():
            print(f"{endpoint}, harm of both − of {what}: {by_arm(table)}")
    print_doses({cell: frames.cell(cell) for cell in study.cells})
    for cell in study.cells:
        print(f"KL k3, median over seeds, {cell}: " + ", ".join(
            f"{arm} {value:.4f}" for arm, value in seed_by_arm(frames, cell, "token_kl_k3", ARMS).median().items()))
        for name in ("token_ess", "clip_tokens"):
            print(f"{name}, {cell}: " + ", ".join(
                f"{arm} {value:.3f}" for arm, value in seed_by_arm(frames, cell, name, ARMS).mean().items()))
    print_without_one(frames)
    plots.save(draw(frames), FOLDER / "figures", study.name)


def print_without_one(frames: Frames) -> None:
    """For how many seeds the rule says another thing if that seed is left out."""
    found = [contrasts(frames, endpoint) for endpoint in ENDPOINTS]
    for names in (MEANS, [GAP]):
        whole, left = without([], found, names), [without([seed], found, names) for seed in study.seeds]
        for one, *others in zip(whole, *left, strict=True):
            changed = sum((other.sign, other.said) != (one.sign, one.said) for other in others)
            print(f"Exploratory, {one.name}: without one of {changed} of the {len(others)} seeds the rule says another "
                  f"thing; 90 % interval beyond {MARGIN:g} without one of {sum(not o.equivalent for o in others)}")


def by_arm(table: pd.DataFrame) -> str:
    """The mean of every arm with its interval, from values by seed and arm."""
    return "; ".join(f"{arm} {interval(table[arm].dropna()).printed('.3f')}" for arm in ARMS)


def gains(table: pd.DataFrame) -> str:
    """Every arm − GRPO, from values by seed and arm."""
    return "; ".join(f"{arm} − grpo {differences(table, arm, 'grpo').printed('.3f')}" for arm in ARMS[1:])


def verdict(frames: Frames) -> list[str]:
    """The gates and the outcomes of the three planned comparisons, with what each of them means."""
    if reason := void(frames, NONE):
        return [reason]
    found, (gap,) = judged(frames), compared(frames, [GAP])
    return [*unfinished((one for one, _ in found), len(study.seeds)), f"gate: {gap}",
            f"gate: without noise {MATCHED} clips {times_clipped(frames):.2f} times GSPO's share of tokens, between "
            f"{SHARES[0]:.2f} and {SHARES[1]:.2f} is asked for", *(f"{one}: {words}" for one, words in found)]


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """The planned comparisons with what each of them means."""
    interaction, protection, closed = found = compared(frames, MEANS)
    if void(frames, NONE):
        return [(one, VOID) for one in found]
    return [*((one, meaning(one)) for one in (interaction, protection)), (closed, of_the_gap(frames, closed))]


def meaning(one: Outcome) -> str:
    """What an outcome stands for; `undecided` where it is opposed or undecided."""
    return MEANS[one.name][one.sign] if one.sign or one.said == "no difference that matters" else "undecided"


def of_the_gap(frames: Frames, one: Outcome) -> str:
    """What the third comparison means, where its gates are passed."""
    (gap,) = compared(frames, [GAP])
    if gap.sign <= 0:
        return f"{NOTHING}, GSPO has no gap to GRPO"
    if not SHARES[0] <= times_clipped(frames) <= SHARES[1]:
        return f"{NOTHING}, clipped shares are not matched"
    return MEANS[CLOSED][0] if one.equivalent else meaning(one)


def compared(frames: Frames, names: Iterable[str]) -> list[Outcome]:
    """Contrasts against 0, Holm over them, on the mean of both σ."""
    return without([], [contrasts(frames, endpoint) for endpoint in ENDPOINTS], names)


def without(seeds: list[int], found: Sequence[Mapping[str, pd.Series]], names: Iterable[str]) -> list[Outcome]:
    """The outcomes of contrasts, given by seed in each endpoint, if these seeds are left out."""
    return outcomes({name: against_zero([one[name].drop(seeds, errors="ignore").dropna().to_dict() for one in found])
                     for name in names}, MARGIN)


def contrasts(frames: Frames, endpoint: str, sigmas: tuple[float, ...] = SIGMAS) -> dict[str, pd.Series]:
    """Every contrast by seed, mean of some σ. The last two are a gate and exploratory."""
    ratio, gradient, both = (harms(frames, endpoint, part, sigmas) for part in MOVED)
    level = ratio + seed_by_arm(frames, NONE, endpoint, ARMS)
    spared = ratio["grpo"] - ratio["gspo"]
    return {
        INTERACTION: both["grpo"] - ratio["grpo"] - gradient["grpo"],
        PROTECTION: spared,
        CLOSED: level["gspo"] - level[MATCHED],
        GAP: level["gspo"] - level["grpo"],
        SPECIFIC: spared - (gradient["grpo"] - gradient["gspo"]),
    }


def harms(frames: Frames, endpoint: str, part: str, sigmas: tuple[float, ...]) -> pd.DataFrame:
    """Seed × arm: with noise applied to a part − without noise, mean of some σ."""
    none = seed_by_arm(frames, NONE, endpoint, ARMS)
    return sum(seed_by_arm(frames, moved(part, sigma), endpoint, ARMS) - none for sigma in sigmas) / len(sigmas)


def times_clipped(frames: Frames) -> float:
    """Clip-matched GRPO's share of clipped tokens, as a multiple of GSPO's: without noise, mean of all steps and
    seeds."""
    of_run = per_run(frames.cell(NONE), Metric("clipped tokens, run", "clip_tokens", mean))
    of_arm = of_run.groupby(level=0).mean()
    return of_arm[MATCHED] / of_arm["gspo"]


@plots.styled
def draw(frames: Frames) -> Figure:
    """The contrasts of the rule in both endpoints, and the harm of every part to every arm."""
    figure, axes = plots.new_figure(3, "A moved ratio, a moved gradient, and both", width=17)
    for ax, endpoint in zip(axes, ENDPOINTS, strict=False):
        values = {name: found.dropna() for name, found in contrasts(frames, endpoint).items()}
        colours = {name: "black" if name in MEANS else plots.GREY for name in values}
        note = plots.rows_of(ax, values, colours)
        ax.axvspan(-MARGIN, MARGIN, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference within seeds, mean of both σ")
        ax.grid(axis="y", visible=False)
        ax.locator_params(axis="x", nbins=5)
    for at, arm in enumerate(ARMS):
        bands = [interval(harms(frames, ENDPOINTS[0], part, SIGMAS)[arm].dropna()) for part in MOVED]
        middle, low, high = (np.array([getattr(one, part) for one in bands]) for part in ("mean", "low", "high"))
        x = np.arange(len(MOVED)) + 0.12 * (at - (len(ARMS) - 1) / 2)
        axes[-1].errorbar(x, middle, [middle - low, high - middle], fmt=plots.symbol_of(arm), capsize=3, label=arm,
                          color=plots.colour_of(arm, ARMS))
    axes[-1].axhline(0, color="black", linewidth=1)
    axes[-1].set(title="Harm by part", ylabel="with noise − without, sampled match", xticks=range(len(MOVED)),
                 xticklabels=[f"{part} moved" for part in MOVED])
    axes[-1].legend(fontsize=8)
    return plots.finish(figure, axes, f"steps 31–60; black: planned; shaded: differences below {MARGIN:g}; {note}",
                        legend=False)
