"""What the declared rule of irreversible says, from its tables, and a figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats
from irreversible import study
from irreversible_trainer import LAST, STARTS, STEPS, VARIANTS
from matplotlib.figure import Figure
from per_seed import RESULTS, own_table, stored

from moe_rl.metrics.convergence import FRACTION
from moe_rl.results import plots
from moe_rl.results.stats import Interval, interval, rate
from moe_rl.results.summary import outcomes
from moe_rl.storage.frames import Frames

PAPER = ("unchanged", "narrower clip", "wider clip", "longer generation", "other queries")
ALIKE = tuple(name for name in VARIANTS if name not in ("longer generation", "other queries"))
"""Variants whose first step samples the same responses."""
FEWEST, ALPHA = 5, 0.05
WITHIN = 1e-6


def main() -> None:
    """What the rule says, and every variant beside it."""
    frames, rows = stored(study.name), own_table(study.name, "recoveries")
    fates = outcomes(frames)
    print(f"Runs that collapsed: {collapsed_of(frames)}; {(fates['fate'] == 'recovered').sum()} came back by "
          f"themselves within {study.base.steps} steps")
    found = per_start(rows)
    for name, values in found.items():
        print(f"  {name}: {', '.join(f'{x:.3g}' for x in values)}; mean {values.mean():.3g}")
    apart = rows.groupby(["seed", "start"])["apart"].max()
    print(f"Largest difference from the run's own next rewards when a state was taken up: {apart.max():.1g}, checked "
          f"for {apart.notna().sum()} of {len(apart)} states")
    print(f"Largest difference of first rewards between variants: {first_apart(rows):.1g}")
    above = found["first reward from before"] >= FRACTION * found["best EMA10 before it"]
    print(f"States before the onset whose first rewards are above the threshold: {above.sum()} of {len(above)}")
    last = rows[rows["step"] > STEPS - LAST]
    for start in STARTS:
        print(f"From {start}, last {LAST} of {STEPS} steps:")
        for name in VARIANTS:
            own = last[(last["start"] == start) & (last["variant"] == name)].groupby("seed")
            means = {said: mean_of(own[column].mean()) for column, said in (
                ("held_out", "held-out reward"), ("reward", "reward of its own queries"),
                ("zero_variance_groups", "groups without signal"), ("clip_tokens", "tokens clipped"),
                ("response_tokens", "tokens a response"))}
            k, n = recovered(rows, start, name)
            print(f"  {name}: {k} of {n} recover {bounds(k, n)}; "
                  + ", ".join(f"{said} {found}" for said, found in means.items()))
    print("\n".join(f"Verdict: {line}" for line in verdict(frames, rows)))
    plots.save(draw(rows), RESULTS / study.name / "figures", study.name)


def verdict(frames: Frames, rows: pd.DataFrame) -> list[str]:
    """Void or not, the claim from both starts, and every variant."""
    lines = [f"void: {what} differ by {apart:.1g}" for what, apart in (
        ("rewards of a run and of its kept state", rows["apart"].max()),
        ("first rewards of variants that sample alike", first_apart(rows))) if not apart <= WITHIN]
    lines.append(f"{collapsed_of(frames)} collapsed in time")
    for start in STARTS:
        counts = {name: recovered(rows, start, name) for name in VARIANTS}
        lines.append(f"from {start}: {claim([counts[name] for name in PAPER])}")
        lines += [f"from {start}, {name}: {decided(k, n)} ({k} of {n} recover {bounds(k, n)})"
                  for name, (k, n) in counts.items()]
    return lines


def claim(counts: list[tuple[int, int]]) -> str:
    """What the rule says of the claim, of the (recovered, all) of the paper's variants."""
    if all(decided(k, n) == "irreversible" for k, n in counts):
        return "no resuming helps, reproduced"
    if any(decided(k, n, ALPHA / len(counts)) == "reversible" for k, n in counts):
        return "resuming helps, contradicted"
    return f"undetermined at n = {max(n for _, n in counts)}"


def decided(k: int, n: int, alpha: float = ALPHA) -> str:
    """Whether a half recovering is rejected from below or from above."""
    if n >= FEWEST and scipy.stats.binom.cdf(k, n, 0.5) <= alpha:
        return "irreversible"
    if n >= FEWEST and scipy.stats.binom.sf(k - 1, n, 0.5) <= alpha:
        return "reversible"
    return f"undetermined at n = {n}"


def recovered(rows: pd.DataFrame, start: str, name: str) -> tuple[int, int]:
    """How many seeds recover, of how many."""
    own = rows[(rows["start"] == start) & (rows["variant"] == name) & (rows["step"] > STEPS - LAST)].groupby("seed")
    yes = own["held_out"].mean() >= FRACTION * own["best"].first()
    return int(yes.sum()), len(yes)


def collapsed_of(frames: Frames) -> str:
    """How many runs collapsed by the end of training, of how many."""
    fates = outcomes(frames)["fate"]
    return f"{(fates != 'stable').sum()} of {len(fates)}"


def first_apart(rows: pd.DataFrame) -> float:
    """Largest difference between the first rewards of variants that sample alike from one state."""
    first = rows[(rows["step"] == 1) & rows["variant"].isin(ALIKE)].groupby(["seed", "start"])["reward"]
    return float((first.max() - first.min()).max())


def per_start(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """By seed: the onset, the best average before it, where each start lies, and what its weights earn."""
    begun = rows[(rows["variant"] == "unchanged") & (rows["step"] == 1)]
    by_seed = {start: begun[begun["start"] == start].set_index("seed") for start in STARTS}
    one = by_seed[STARTS[0]]
    return {"onset": one["onset"], "best EMA10 before it": one["best"],
            **{f"start {start}": table["checkpoint"] for start, table in by_seed.items()},
            **{f"first reward from {start}": table["reward"] for start, table in by_seed.items()}}


def bounds(k: int, n: int) -> str:
    """The exact interval of a share."""
    return "[" + ", ".join(f"{x:.2f}" for x in (rate(k, n).low, rate(k, n).high)) + "]"


def mean_of(values: pd.Series) -> Interval:
    return interval(values.dropna().to_numpy(dtype=float))


@plots.styled
def draw(rows: pd.DataFrame) -> Figure:
    """Reward over the steps of a restart, a panel per variant, both starts in each."""
    figure, axes = plots.new_figure(len(VARIANTS), "Resuming GRPO after a collapse", width=14, sharey=True)
    half = FRACTION * rows.groupby("seed")["best"].first().mean()
    for ax, name in zip(axes, VARIANTS, strict=True):
        own = rows[rows["variant"] == name].assign(arm=lambda table: "from " + table["start"])
        note = plots.curves(ax, own, "reward", "step", [f"from {start}" for start in STARTS], scale="linear")
        ax.axhline(half, color=plots.GREY, linewidth=1, linestyle="--", label="half of the best, mean over seeds")
        k = [recovered(rows, start, name) for start in STARTS]
        ax.set(title=f"{name}: " + " and ".join(f"{a}/{b}" for a, b in k), xlabel="steps since the restart",
               ylabel="reward of its own queries", ylim=(-0.02, 1.02), xticks=np.arange(0, STEPS + 1, LAST))
    return plots.finish(figure, axes, note + "; in titles, how many recover on held-out prompts, from "
                        + " and ".join(STARTS))
