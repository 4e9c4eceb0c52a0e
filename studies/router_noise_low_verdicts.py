"""What the declared rule of router_noise_low says, from its tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from exploratory import PUBLISHED, SLOTS, slots_changed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from per_seed import seed_by_arm, slopes, stored
from router_noise_low import MARGIN, NONE, OTHERS, ROUTERS, study
from rule import LEVEL, NOTHING, VOID, Outcome, against_zero, outcomes, unfinished
from volatility_dial_verdicts import void

from moe_rl.results import plots
from moe_rl.results.stats import Interval, holm, interval, paired
from moe_rl.results.summary import metric
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
ENDPOINTS = (study.endpoint, *study.further_endpoints)
ARMS = [arm.name for arm in study.arms]
SCALES = sorted(ROUTERS, reverse=True)
"""Of the noise in the routers, in the order of the fixed sequence."""
CHANGES = {"in routers": (ROUTERS, None), "beside": (OTHERS, None), "in routers − beside": (ROUTERS, OTHERS)}
"""Differences of two places, as `changes` takes them."""
MATCHED = 0.25
"""The gate: by what share KL beside the routers may differ from that in them."""
SLOTS_PUBLISHED = {"PR2, a step": 0.033, "GSPO, an update": 0.10}
"""Published shares of expert slots that change: arXiv 2606.00395, from its distribution of changed slots (12.7 of the
384 slots of a token); and arXiv 2507.18071, section 5.3."""


def main() -> None:
    frames = stored(study.name)
    print("\n".join(verdict(frames)))
    for scale, (inside, beside) in medians(frames).items():
        places = {"in routers": ROUTERS[scale], "beside": OTHERS[scale]}
        print(f"σ = {scale:g}, KL k3 of GRPO, median over seeds: in routers {inside:.4f}, beside {beside:.4f} "
              f"({100 * (beside / inside - 1):+.0f} %); "
              + ", ".join(f"{place} {flips(frames, cell)}" for place, cell in places.items()))
    for scale, cell in ({0: NONE} | ROUTERS).items():
        own = seed_by_arm(frames, cell, "token_kl_k3", ARMS).median()
        print(f"σ = {scale:g} in routers, KL k3, median: " + ", ".join(f"{arm} {own[arm]:.4f}" for arm in ARMS))
    print("published KL: " + ", ".join(f"{name} {value:g}" for name, value in PUBLISHED.items()))
    print(f"no noise: KL k3 of GRPO, median {kl_of(frames, NONE):.4f}; {flips(frames, NONE)}")
    for endpoint in ENDPOINTS:
        found = {what: changes(frames, endpoint, *places) for what, places in CHANGES.items()}
        for arm in ARMS:
            print(f"{arm}, {endpoint}: " + "; ".join(
                f"σ = {s:g} " + ", ".join(f"{what} {interval(of[arm][s].dropna()).printed('.3f')}"
                                          for what, of in found.items())
                for s in SCALES))
        for s, cell in ({0: NONE} | ROUTERS).items():
            table = seed_by_arm(frames, cell, endpoint, ARMS)
            gains = ((arm, interval((table[arm] - table["grpo"]).dropna()).printed(".3f")) for arm in ARMS[1:])
            print(f"at σ = {s:g} in routers, {endpoint}: " + "; ".join(f"{arm} − grpo {gain}" for arm, gain in gains))
    print_without_one(frames)
    plots.save(draw(frames), FOLDER / "figures", study.name)


def print_without_one(frames: Frames) -> None:
    """For how many seeds a decision falls if that seed is left out; m is 4, as no arm is harmed at all scales."""
    for scale in SCALES:
        inside, beside = (seed_by_arm(frames, place[scale], "token_kl_k3", ["grpo"])["grpo"]
                          for place in (ROUTERS, OTHERS))
        failed = sum(abs(beside.drop(s).median() / inside.drop(s).median() - 1) > MATCHED for s in inside.index)
        print(f"Exploratory, σ = {scale:g}: without one of {failed} of the {len(inside)} seeds the gate of KL fails")
    tables = changes(frames, ENDPOINTS[0], ROUTERS)
    for arm, chain in harms(frames).items():
        gaps = tables[arm]
        for scale, one in zip(SCALES, chain, strict=True):
            left = {seed: gaps[scale].drop(seed).dropna() for seed in gaps.index}
            if one.sign < 0:
                p = {s: len(ARMS) * paired(gap.to_dict(), dict.fromkeys(gap.index, 0.0)).p for s, gap in left.items()}
                print(f"Exploratory, {one.name}: without one of {sum(x > LEVEL for x in p.values())} of the {len(p)} "
                      f"seeds the harm is not decided; without the Xeon's, {min(p)}, Holm p {p[min(p)]:.2g}")
            elif one.equivalent:
                beyond = sum(max(-i.low, i.high) > MARGIN for i in (interval(gap, 0.9) for gap in left.values()))
                print(f"Exploratory, {one.name}: without one of {beyond} of the {len(left)} seeds the 90 % interval "
                      "would end outside the margin")


def verdict(frames: Frames) -> list[str]:
    """The gates, every arm's lowest decided noise, and whether its harm is specific to routing."""
    if reason := void(frames, NONE):
        return [reason]
    kl, found = medians(frames), harms(frames)
    lines = unfinished([one for chain in found.values() for one in chain], len(study.seeds))
    for arm, chain in found.items():
        decided = [scale for scale, one in zip(SCALES, chain, strict=True) if one.sign < 0]
        lowest = f"σ = {decided[-1]:g}, KL {kl[decided[-1]][0]:.3f}" if decided else "none"
        lines.append(f"{arm}: lowest decided noise {lowest}")
    if apart := unmatched(frames):
        lines.append(f"routing: {NOTHING}, KL is not matched at σ = " + ", ".join(f"{s:g}" for s in apart))
    return lines + [one.worded(words) for one, words in judged(frames)]


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """What the rule says of every harm, and of every slope."""
    found, apart = harms(frames), unmatched(frames)
    if void(frames, NONE):
        return [(one, VOID) for one in (*itertools.chain(*found.values()), *specificity(frames).values())]
    return [*((one, "harm" if one.sign < 0 else _otherwise(one)) for chain in found.values() for one in chain),
            *((one, NOTHING if apart else where(one, found[arm][0].sign < 0))
              for arm, one in specificity(frames).items())]


def unmatched(frames: Frames) -> list[float]:
    """The scales at which KL beside the routers is too far from that in them."""
    return [s for s, (inside, beside) in medians(frames).items() if abs(beside / inside - 1) > MATCHED]


def where(slope: Outcome, harmed: bool) -> str:
    """What a slope of (in routers − beside) means, of an arm that the largest noise in the routers harms or not."""
    if slope.sign < 0 and harmed:
        return "the harm is specific to routing"
    return "noise beside the routers harms more" if slope.sign > 0 else _otherwise(slope)


def _otherwise(one: Outcome) -> str:
    """The words of the rule where nothing else holds."""
    return "no difference that matters" if one.equivalent else "undecided"


# ---------------------------------------------------------------------- from which size on
def harms(frames: Frames) -> dict[str, list[Outcome]]:
    """Arm → the outcome at every scale, from the highest down. What the sequence does not reach has p = 1."""
    tables = [changes(frames, name, ROUTERS) for name in ENDPOINTS]
    found = {}
    for arm in ARMS:
        found[arm] = outcomes({
            f"{arm}, σ = {scale:g} − no noise": against_zero([of[arm][scale].dropna().to_dict() for of in tables])
            for scale in SCALES}, MARGIN)
    return in_sequence(found)


def in_sequence(found: Mapping[str, Sequence[Outcome]]) -> dict[str, list[Outcome]]:
    """The same outcomes with p-values adjusted by the fixed sequence of every arm, and Holm over arms: an arm that is
    harmed at all scales passes its share on."""
    largest = [max(map(p_of_harm, chain)) for chain in found.values()]
    whole = sum(p <= LEVEL for p in holm(largest))
    arms, adjusted = max(len(found) - whole, 1), {}
    for arm, chain in found.items():
        adjusted[arm], tested = [], True
        for one in chain:
            now = replace(one, adjusted=min(1.0, arms * one.primary.p) if tested else 1.0)
            adjusted[arm].append(now)
            tested = tested and now.sign < 0
    return adjusted


def p_of_harm(one: Outcome) -> float:
    """The p-value of a difference below 0 that the secondary endpoint does not oppose; 1 for any other."""
    return one.primary.p if replace(one, adjusted=0.0).sign < 0 else 1.0


# ---------------------------------------------------------------------- is it the routing
def specificity(frames: Frames) -> dict[str, Outcome]:
    """Per arm: the slope of (noise in routers − noise beside them) over log10 KL, by seed, against 0."""
    x, tables = log_kl(frames), [changes(frames, name, ROUTERS, OTHERS) for name in ENDPOINTS]
    pairs = {f"{arm}, slope of in routers − beside": against_zero([slopes_by_seed(of[arm], x) for of in tables])
             for arm in ARMS}
    return dict(zip(ARMS, outcomes(pairs, MARGIN), strict=True))


def slopes_by_seed(table: pd.DataFrame, x: Sequence[float]) -> dict[int, float]:
    """The least-squares slope of every seed that has all scales."""
    whole = table.dropna()
    return dict(zip(whole.index, slopes(whole, x), strict=True))


def log_kl(frames: Frames) -> list[float]:
    """log10 of the KL of every scale, mean of both places."""
    return [float(np.log10(both).mean()) for both in medians(frames).values()]


def medians(frames: Frames) -> dict[float, tuple[float, float]]:
    """Scale → GRPO's KL with noise in the routers, and beside them."""
    return {s: (kl_of(frames, ROUTERS[s]), kl_of(frames, OTHERS[s])) for s in SCALES}


def kl_of(frames: Frames, cell: str) -> float:
    """GRPO's KL to π_old (k3, second half, noise included), median over seeds, since k3 has a heavy tail."""
    return float(seed_by_arm(frames, cell, "token_kl_k3", ["grpo"])["grpo"].median())


def flips(frames: Frames, cell: str) -> str:
    """The expert slots of a token that the end of a step has changed, of GRPO."""
    found = slots_changed(frames.cell(cell))
    return f"{SLOTS * found.mean():.2f} of {SLOTS} slots of a token changed" if len(found) else "slots were not kept"


def changes(frames: Frames, name: str, place: Mapping[float, str],
            minus: Mapping[float, str] | None = None) -> dict[str, pd.DataFrame]:
    """Arm → seed × scale: with noise at a place − with noise at another one or, without that, no noise."""
    gaps = {s: seed_by_arm(frames, place[s], name, ARMS) - seed_by_arm(frames, minus[s] if minus else NONE, name, ARMS)
            for s in SCALES}
    return {arm: pd.DataFrame({s: gap[arm] for s, gap in gaps.items()}) for arm in ARMS}


# ---------------------------------------------------------------------- the figure
@plots.styled
def draw(frames: Frames) -> Figure:
    """Harm over measured KL at both places, in both endpoints; their difference; and expert slots over KL."""
    figure, axes = plots.new_figure(4, "From which KL on does noise harm, and is it the routing?", width=15)
    kl = {s: float(np.sqrt(np.prod(both))) for s, both in medians(frames).items()}
    for ax, endpoint in zip(axes, ENDPOINTS, strict=False):
        for place, style in (("in routers", "-"), ("beside", ":")):
            for arm, table in changes(frames, endpoint, *CHANGES[place]).items():
                whiskers(ax, table, kl, arm, f"{arm}, {place}", style)
        ax.set(title=metric(endpoint).name, ylabel="with noise − without")
    for arm, table in changes(frames, ENDPOINTS[0], ROUTERS, OTHERS).items():
        found = whiskers(axes[2], table, kl, arm, "", "-")
    axes[2].set(title="Is it the routing?", ylabel="noise in routers − beside, sampled match")
    for ax in axes[:3]:
        ax.axhspan(-MARGIN, MARGIN, color=plots.GREY, alpha=0.15)
        ax.axhline(0, color="black", linewidth=1)
        mark_published(ax)
    slots(axes[3], frames)
    for ax in axes:
        ax.set(xscale="log", xlabel="KL of GRPO to the old policy, nats per token")
    note = (f"mean over seeds, steps 31–60; whisker: {found.method}, n = {found.n}; shaded: differences below "
            f"{MARGIN:g}; dashed: published values (IcePop's is a discrepancy, whose unit we do not know)")
    return plots.finish(figure, axes, note)


def whiskers(ax: Axes, table: pd.DataFrame, kl: Mapping[float, float], arm: str, label: str, style: str) -> Interval:
    """Means with intervals over KL, arms beside each other; returns the last interval."""
    found = [interval(table[s].dropna()) for s in SCALES]
    mean, low, high = (np.array([getattr(one, part) for one in found]) for part in ("mean", "low", "high"))
    x = np.array([kl[s] for s in SCALES]) * 1.04 ** (ARMS.index(arm) - (len(ARMS) - 1) / 2)
    colour = plots.colour_of(arm, ARMS)
    ax.errorbar(x, mean, [mean - low, high - mean], fmt=f"{plots.symbol_of(arm)}{style}", color=colour, capsize=2,
                linewidth=1.3, markersize=5, markerfacecolor="white" if style == ":" else colour, label=label or None)
    return found[-1]


def slots(ax: Axes, frames: Frames) -> None:
    """Share of expert slots that a step changes, over KL, at both places and without noise."""
    colour = plots.colour_of("grpo", ARMS)
    for place, cells in (("in routers", [NONE, *ROUTERS.values()]), ("beside", [*OTHERS.values()])):
        points = [(kl_of(frames, cell), slots_changed(frames.cell(cell)).mean()) for cell in cells]
        ax.plot(*zip(*points, strict=True), "o", color=colour, markerfacecolor="white" if place == "beside" else colour)
    for name, share in SLOTS_PUBLISHED.items():
        ax.axhline(share, color=plots.GREY, linestyle="--", linewidth=1)
        ax.annotate(name, (0.99, share), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    ax.set(title="Expert slots changed by a step of GRPO", ylabel="share")


def mark_published(ax: Axes) -> None:
    """Published KL per token as lines."""
    for name, value in PUBLISHED.items():
        ax.axvline(value, color=plots.GREY, linestyle="--", linewidth=1)
        ax.annotate(name, (value, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, ha="right",
                    va="bottom", color=plots.GREY)
