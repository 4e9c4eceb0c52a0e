"""What the declared rule of stabilisers says, from its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats
from matplotlib.figure import Figure
from per_seed import stored
from stabilisers import EIGHT, NAMED, study
from volatility_dial_verdicts import after_start, decide, effects

from moe_rl.objectives.methods_page import head, row
from moe_rl.results import plots
from moe_rl.results.stats import holm, interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
ENDPOINTS = (study.endpoint, *study.further_endpoints)
CONDITIONS = {"quiet": ("quiet", "quiet-further"), "dial": ("dial", "dial-further"), "mismatch": ("mismatch",)}
OTHERS = tuple(arm.name for arm in NAMED if arm.name != "grpo")
COST = {"seconds": ("seconds_score", "seconds_update"), "memory": ("memory_peak_mb",)}
TITLES = {"quiet": "Which method helps where training is quiet?", "dial": "Which helps under volatility, σ = 2?",
          "mismatch": "Which helps against another engine?"}
SHOWN = ("entropy", "token_ess", "token_kl_k3", "clip_tokens")
RESAMPLES = 9999


def main() -> None:
    frames = stored(study.name)
    print(machinery(frames))
    for cell in (cell for planned in CONDITIONS.values() for cell in planned if cell not in frames.cells):
        print(f"{cell}: not run")
    there = {condition: [cell for cell in planned if cell in frames.cells]
             for condition, planned in CONDITIONS.items()}
    tables = {condition: {name: by_arm(frames, cells, name) for name in ENDPOINTS}
              for condition, cells in there.items() if cells}
    for condition, of_endpoints in tables.items():
        print(f"{condition}:")
        if condition != "mismatch":
            decide([f"{arm} − grpo" for arm in OTHERS],
                   {name: [paired(table[arm].to_dict(), table["grpo"].to_dict()) for arm in OTHERS]
                    for name, table in of_endpoints.items()})
        for name, table in of_endpoints.items():
            ranking(name, table)
            if condition == "dial":
                gap = table - tables["quiet"][name]
                print("  dial − quiet: " + ", ".join(f"{arm} {interval(gap[arm].dropna())}" for arm in gap))
        if condition != "mismatch":
            print("  greedy exact match, second half − cold start: " + ", ".join(
                f"{arm} {after_start(frames, arm, there[condition][0])}" for arm in ("grpo", *OTHERS)))
        for name in SHOWN:
            means = by_arm(frames, there[condition], name).mean()
            print(f"  {name}: " + ", ".join(f"{arm} {mean:.3g}" for arm, mean in means.items()))
        costs(frames, there[condition])
        if len(of_endpoints[study.endpoint].columns) > 2:
            plots.save(draw(of_endpoints, TITLES[condition]), FOLDER / "figures", f"{study.name}_{condition}")


def table(frames: Frames) -> str:
    """Markdown: the named methods minus GRPO in both endpoints, Holm over all of them in each condition; and what the
    rule says."""
    titles = [title for name in ENDPOINTS for title in (f"{name} [95 % CI]", "p")]
    lines = [*head("difference", "condition", "n", *titles, "rule")]
    for condition in ("dial", "quiet"):
        tests = {name: [paired(of[arm].to_dict(), of["grpo"].to_dict()) for arm in OTHERS]
                 for name in ENDPOINTS for of in (by_arm(frames, CONDITIONS[condition], name),)}
        adjusted = {name: holm([one.p for one in of]) for name, of in tests.items()}
        for at, (arm, (words, _)) in enumerate(effects(OTHERS, tests).items()):
            cells = [cell for name in ENDPOINTS
                     for cell in (str(tests[name][at].difference), f"{adjusted[name][at]:.2g}")]
            lines.append(row(f"{arm} − grpo", condition, str(tests[study.endpoint][at].n), *cells, words))
    note = (f"p: permuted signs of the seeds' differences, after Holm over the {len(OTHERS)} methods of a condition "
            "and endpoint.")
    return "\n".join([*lines, "", note]) + "\n"


def ranking(name: str, table: pd.DataFrame) -> None:
    """Every arm at one endpoint, in the order of its mean rank."""
    print(f"  {name}, over the seeds that an arm has; rank over {len(EIGHT)} seeds:")
    for arm, rank in ranks(table.loc[list(EIGHT)]).items():
        gap = interval((table[arm] - table["grpo"]).dropna())
        print(f"    {arm}: {interval(table[arm].dropna())}, − grpo {gap}, better than a run of grpo "
              f"{improvement(table[arm].dropna(), table['grpo'])}, rank {rank}")


def by_arm(frames: Frames, cells: Sequence[str], name: str) -> pd.DataFrame:
    """Seed × arm, of all cells of a condition."""
    return pd.concat([per_run(frames.cell(cell), metric(name)).unstack(0) for cell in cells], axis=1)


@plots.styled
def draw(tables: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Every arm minus GRPO of the same seeds, by endpoint; the named arms first, in the order of the first endpoint."""
    means = tables[study.endpoint].mean().drop("grpo")
    arms = sorted(means.index, key=lambda arm: (arm not in OTHERS, -means[arm]))
    colours = {arm: plots.colour_of(arm, ("grpo", *OTHERS)) if arm in OTHERS else plots.GREY for arm in arms}
    figure, axes = plots.new_figure(len(tables), title, width=14)
    figure.set_figheight(2 + 0.3 * len(arms))
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        note = plots.rows_of(ax, {arm: (table[arm] - table["grpo"]).dropna() for arm in arms}, colours)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(name).name, xlabel="minus GRPO, within seeds")
        ax.grid(axis="y", visible=False)
    return plots.finish(figure, axes, note, legend=False)


def machinery(frames: Frames) -> str:
    """The condition on GRPO where it is quiet."""
    gain = after_start(frames, "grpo", "quiet")
    return (f"Machinery: GRPO where it is quiet gains {gain} of greedy exact match over its cold start"
            + ("" if gain.mean > 0 else "; it must end above: void"))


def improvement(values: pd.Series, baseline: pd.Series) -> str:
    """P(a run > a run of the baseline), ties a half, over the baseline's runs of the same seeds; percentile bootstrap
    that draws seeds (Agarwal et al. 2021, arXiv 2108.13264)."""
    a, b = values.to_numpy(), baseline[values.index].to_numpy()
    above = (a[:, None] > b) + 0.5 * (a[:, None] == b)
    drawn = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    times = (drawn[:, :, None] == np.arange(len(a))).sum(1)  # that a resample has each seed
    low, high = np.quantile(((times @ above) * times).sum(1) / len(a) ** 2, (0.025, 0.975))
    return f"{above.mean():.2f} [{low:.2f}, {high:.2f}]"


def ranks(table: pd.DataFrame) -> dict[str, str]:
    """Mean rank of every arm over seeds, 1 the highest, ties shared, with a percentile bootstrap over seeds; best
    first."""
    by_seed = scipy.stats.rankdata(-table.to_numpy(), axis=1)
    drawn = np.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))
    low, high = np.quantile(by_seed[drawn].mean(1), (0.025, 0.975), axis=0)
    mean = by_seed.mean(0)
    return {str(table.columns[i]): f"{mean[i]:.1f} [{low[i]:.1f}, {high[i]:.1f}]" for i in mean.argsort(kind="stable")}


def costs(frames: Frames, cells: Sequence[str]) -> None:
    """Medians over steps, as ratios to GRPO's of the same seed, geometric mean over seeds."""
    steps = pd.concat([frames.cell(cell)["steps"] for cell in cells])
    for name, columns in COST.items():
        per = steps.assign(x=steps[list(columns)].sum(axis=1, min_count=1)).groupby(["seed", "arm"])["x"].median()
        table = per.unstack()
        ratios = np.exp(np.log(table.div(table["grpo"], axis=0)).mean())
        print(f"  {name}, times grpo: " + ", ".join(f"{arm} {ratio:.2f}" for arm, ratio in ratios.items()))
