"""Every comparison with GRPO under the one rule of `rule.py`: the figure and the table of the index.

    python studies/overview.py

Only a study that declares this rule is decided by it. For all others the outcome is exploratory: their own rules were
declared, and stand in the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lag_natural_verdicts
import numpy as np
import pandas as pd
from exploratory import ENDPOINTS, PUBLISHED, slots_changed, values
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from per_seed import stored
from ratio_gradient import MOVED, SIGMAS, moved
from ratio_gradient import NONE as QUIET
from router_noise_low import NONE, ROUTERS
from rule import Outcome, outcomes
from volatility_dial import noise

from moe_rl.objectives import methods_page
from moe_rl.results import plots
from moe_rl.results.summary import noises_of

PRIMARY, SECONDARY = ENDPOINTS[2], ENDPOINTS[1]
MARGIN = 0.02
NAMES = {PRIMARY: "held-out match, sampled", SECONDARY: "held-out match, greedy"}
KINDS = {"replay": "grpo-replay", "GSPO": "gspo", "another method": "r3"}
"""Kind of a method → the arm whose colour and symbol it has."""


@dataclass(frozen=True)
class Place:
    """Runs in which methods are compared with GRPO: one row of the figure."""

    band: str
    label: str
    study: str
    cell: str = "base"
    replay: str = "grpo-replay"
    others: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, str]:
        """Arm → kind; not every arm was run everywhere."""
        return dict.fromkeys(self.others, "another method") or {self.replay: "replay", "gspo": "GSPO"}


WEIGHTS = {s: noise("weights", s) for s in (0, 0.4, 1, 2)}
ALONE = {"ratio": "ratio alone", "gradient": "gradient alone", "both": "more seeds"}
"""Part that has the noise → its words."""
OLD = Place("no noise", "rollouts 1 and 2 steps old, mean", "lag_natural")
"""Decided by the study's own declaration of the rule, over its seven comparisons."""
PLACES = (
    Place("no noise", "rate 2e-4", "volatility_dial", WEIGHTS[0]),
    Place("no noise", "rate 2e-4, other seeds", "router_noise_low", NONE),
    Place("no noise", "rate 2e-4, more seeds", "ratio_gradient", QUIET),
    Place("no noise", "rate 4e-4", "confirmation"),
    OLD,
    *(Place("no noise", f"rollouts {lag} step{'s' * (lag > 1)} old", "lag", f"lag={lag}") for lag in (1, 2, 4, 8)),
    Place("no noise", "conversations", "many_turns"),
    Place("no noise", "another engine, rate 3e-4", "engine_mismatch", replay="grpo-r3"),
    Place("no noise", "another engine, rate 2e-4", "stabilisers", "mismatch", replay="r3"),
    *(Place("noise in routers", f"σ = {s:g}", "router_noise_low", cell) for s, cell in ROUTERS.items()),
    Place("noise in routers", "σ = 0.4, other seeds", "volatility_dial", WEIGHTS[0.4]),
    *(Place("noise in routers", f"σ = {s:g}", "volatility_dial", WEIGHTS[s]) for s in (1, 2)),
    Place("noise in routers", "σ = 2, other seeds", "stabilisers", "dial"),
    *(Place("noise in routers", f"σ = {s:g}, {ALONE[part]}", "ratio_gradient", moved(part, s))
      for s in SIGMAS for part in MOVED),
    Place("noise in routers", "σ = 2, ratio alone", "volatility_controls", "applied_to=ratio"),
    Place("noise in routers", "σ = 2, gradient alone", "volatility_controls", "applied_to=gradient"),
    Place("noise elsewhere", "all weights but the routers", "volatility_controls", "beside"),
    Place("noise elsewhere", "all experts always active", "volatility_controls", "twin"),
    *(Place("other methods, σ = 2", name, "stabilisers", "dial", others=(name.lower(),))
      for name in ("GMPO", "RSPO", "CISPO", "SAPO", "MiniRL")),
    Place("other methods, σ = 2", "GRPO, ratio bounded where A < 0", "open_side", others=("grpo-bounded",)),
)


@dataclass(frozen=True)
class Row:
    """A place and what the rule says of each of its arms."""

    place: Place
    found: dict[str, Outcome]
    kl: float
    slots: float | None


def main() -> None:
    plots.save(draw(rows()), Path(__file__).parent / "figures", "overview")


@cache
def rows() -> tuple[Row, ...]:
    """Every place; Holm over the comparisons of one study that are shown here, or over those that its rule declares."""
    found: dict[Place, dict[str, Outcome]] = {place: {} for place in PLACES}
    declared = lag_natural_verdicts.planned(stored(OLD.study))
    found[OLD] = {arm: declared[f"{arm} − grpo"] for arm in OLD.kinds}
    for study in dict.fromkeys(place.study for place in PLACES if place != OLD):
        pairs = {(place, arm): tuple([table[name].dropna().to_dict() for table in tables_of(study, place.cell)]
                                     for name in (arm, "grpo"))
                 for place in PLACES if place.study == study
                 for arm in place.kinds if arm in tables_of(study, place.cell)[0]}
        family = outcomes({f"{place.label}: {arm} − grpo": pair for (place, arm), pair in pairs.items()}, MARGIN)
        for (place, arm), outcome in zip(pairs, family, strict=True):
            found[place][arm] = outcome
    kl, slots = zip(*(doses(OLD.study, f"lag={lag}") for lag in lag_natural_verdicts.COUNTED), strict=True)
    of = {OLD: (float(np.mean(kl)), float(np.mean(slots)))}
    return tuple(Row(place, found[place], *of.get(place) or doses(place.study, place.cell)) for place in PLACES)


@cache
def tables_of(study: str, cell: str) -> list[pd.DataFrame]:
    """Seed × arm, in the primary and in the secondary endpoint."""
    return [values(stored(study).cell(cell), name) for name in (PRIMARY, SECONDARY)]


@cache
def doses(study: str, cell: str) -> tuple[float, float | None]:
    """Of GRPO, noise included: the KL to π_old (k3, second half, nats per token; median over seeds, as k3 has a heavy
    tail), and the share of expert slots that differ from π_old's at the end of a step. None where noise was injected
    and the slots of the network that gives the ratios were not kept."""
    frames = stored(study).cell(cell)
    noises = [one for one in noises_of(frames) if one.get("scale")]
    slots = slots_changed(frames) if noises else values(frames, "expert_change_rate")["grpo"]
    kept = len(slots) and not (noises and noises[0].get("applied_to") == "ratio")
    return float(values(frames, "token_kl_k3")["grpo"].median()), float(slots.mean()) if kept else None


def each() -> Iterator[tuple[Row, str, Outcome]]:
    """Every comparison."""
    for row in rows():
        for arm, outcome in row.found.items():
            yield row, arm, outcome


def table() -> str:
    """Markdown: every comparison, both endpoints, and what the rule says."""
    lines = [*methods_page.head("where", "study", "arm − GRPO", "n", "held-out match, sampled [95 % CI]",
                                "Holm p", "held-out match, greedy [95 % CI]", "rule")]
    for at, arm, one in each():
        first, second = (test.difference.printed(".3f") for test in (one.primary, one.secondary))
        lines.append(methods_page.row(
            f"{at.place.band}: {at.place.label}", at.place.study, arm, str(one.primary.n), first,
            f"{one.adjusted:.2g}", second,
            {1: "helps", -1: "harms"}.get(one.sign, one.said.partition(":")[0])))
    return "\n".join(lines) + "\n"


@plots.styled
def draw(found: Sequence[Row]) -> Figure:
    """A forest of all comparisons in both endpoints, beside the dose that GRPO met."""
    title = "What replay and GSPO gain over GRPO, by condition"
    figure, axes = plots.new_figure(3, title, width=15, sharey=True)
    figure.set_figheight(0.25 * len(found) + 2.2)
    for ax, endpoint in zip(axes, (PRIMARY, SECONDARY), strict=False):
        forest(ax, found, endpoint)
    strip(axes[-1], found)
    names = [f"{row.place.label}  (n = {next(iter(row.found.values())).primary.n})" for row in found]
    axes[0].set(yticks=range(len(found)), yticklabels=names, ylim=(len(found) - 0.4, -0.8))
    for i, row in enumerate(found):
        if i == 0 or found[i - 1].place.band != row.place.band:
            for ax in axes:
                ax.axhline(i - 0.5, color=plots.GREY, linewidth=0.8)
            axes[0].text(0.01, i - 0.48, row.place.band, transform=axes[0].get_yaxis_transform(), fontsize=8,
                         color=plots.GREY, va="top")
    note = ("mean and 95 % interval over n seeds; filled: helps or harms by the one rule (exploratory for studies that "
            "declared another); shaded: differences below .02")
    return plots.finish(figure, axes, note, legend=False)


def forest(ax: Axes, found: Sequence[Row], endpoint: str) -> None:
    """One endpoint: an interval per comparison, filled where the rule finds an effect."""
    for i, row in enumerate(found):
        for at, (arm, one) in enumerate(row.found.items()):
            test, arm_of = one.primary if endpoint == PRIMARY else one.secondary, KINDS[row.place.kinds[arm]]
            colour = plots.colour_of(arm_of, [arm_of, "grpo"])
            y, d = i + 0.3 * (at - (len(row.found) - 1) / 2), test.difference
            ax.plot([d.low, d.high], [y, y], color=colour, linewidth=1.4)
            ax.plot(d.mean, y, plots.symbol_of(arm_of), color=colour, markersize=6,
                    markerfacecolor=colour if one.sign else "white")
    for kind, arm in KINDS.items():
        ax.plot([], [], plots.symbol_of(arm), color=plots.colour_of(arm, [arm, "grpo"]), label=kind)
    ax.axvspan(-MARGIN, MARGIN, color=plots.GREY, alpha=0.15)
    ax.axvline(0, color="black", linewidth=1)
    ax.set(title=NAMES[endpoint], xlabel="difference from GRPO")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right", fontsize=8)


def strip(ax: Axes, found: Sequence[Row]) -> None:
    """The KL of GRPO at each place, the share of slots as a word, and published values as lines."""
    for i, row in enumerate(found):
        if row.place.others:
            continue
        ax.plot(row.kl, i, "o", color="black", markersize=5)
        if row.slots is not None:
            ax.text(row.kl, i - 0.12, f"   {100 * row.slots:.1f} %", fontsize=8, va="center")
    for name, kl in PUBLISHED.items():
        ax.axvline(kl, color=plots.GREY, linestyle="--", linewidth=1)
        ax.text(kl, len(found) - 0.5, f"{name} ", rotation=90, fontsize=8, color=plots.GREY, va="bottom", ha="right")
    ax.set(xscale="log", xlim=(1e-3, 4), title="KL of GRPO, median over seeds",
           xlabel="KL to the old policy, nats per token\n%: expert slots changed by a step")
    ax.grid(axis="y", visible=False)


if __name__ == "__main__":
    main()
