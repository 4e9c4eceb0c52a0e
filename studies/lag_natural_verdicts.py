"""What the declared rule of lag_natural says, from its tables."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from lag_natural import HALF, LAGS, MARGIN, study
from matplotlib.figure import Figure
from per_seed import stored
from rule import NOTHING, Outcome, outcomes, unfinished

from moe_rl.errors import RunError
from moe_rl.results import plots
from moe_rl.results.stats import interval
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
ENDPOINTS = (study.endpoint, *study.further_endpoints)
HALF_RATE = "grpo, half the rate"
PAIRS = (*study.comparisons[:-1], (HALF_RATE, "grpo"), study.comparisons[-1])
COUNTED = [lag for lag in LAGS if lag]
LIVE, REPLAYED = 0.90, 0.95
"""The gate: the most token ESS of live ratios, the least of replayed ones."""


def main() -> None:
    frames = stored(study.name)
    print("\n".join(verdict(frames)))
    for name in (*ENDPOINTS, "token_ess", "expert_change_rate", "token_kl_k3", "clip_tokens"):
        for lag, table in by_lag(frames, name).items():
            print(f"lag {lag}, {name}: " + "; ".join(f"{arm} {interval(table[arm].dropna())}" for arm in table))
    plots.save(draw(frames), FOLDER / "figures", study.name)


def verdict(frames: Frames) -> list[str]:
    """The gate, the outcome of every planned comparison, and whether weight or clip makes GSPO's effect."""
    ess, passed = gate(frames)
    lines = [f"gate: {'passed' if passed else 'failed'} (token ESS at lag {max(LAGS)}: GRPO {ess['grpo']:.3f}, at most "
             f"{LIVE}; GRPO + R2 {ess['grpo-replay']:.3f}, at least {REPLAYED})"]
    found = planned(frames)
    lines += unfinished(found.values(), len(study.seeds))
    lines += [str(one) + (f": {words} about replay" if words == NOTHING else "") for one, words in judged(frames)]
    signs = {arm: found[f"{arm} − grpo"].sign > 0 for arm in ("sequence-token", "token-sequence")}
    made = {(True, False): "the weight", (False, True): "the clip", (True, True): "both"}.get(tuple(signs.values()))
    return [*lines, f"of GSPO's parts, what helps by itself: {made or 'undecided'}"]


def planned(frames: Frames) -> dict[str, Outcome]:
    """The outcomes of the planned comparisons by name, on the mean of lags 1 and 2."""
    values = [mean_of_lags(frames, name) for name in ENDPOINTS]
    pairs = {f"{a} − {b}": tuple([table[arm].dropna().to_dict() for table in values] for arm in (a, b))
             for a, b in PAIRS}
    return {one.name: one for one in outcomes(pairs, MARGIN)}


def judged(frames: Frames) -> list[tuple[Outcome, str]]:
    """The planned comparisons with the rule's words."""
    _, passed = gate(frames)
    return [(one, one.said.partition(":")[0] if passed or "grpo-replay" not in name else NOTHING)
            for name, one in planned(frames).items()]


def gate(frames: Frames) -> tuple[pd.Series, bool]:
    """Token ESS by arm at the largest lag, and whether replay restores the ratios there."""
    ess = by_lag(frames, "token_ess")[max(LAGS)].mean()
    return ess, ess["grpo"] <= LIVE and ess["grpo-replay"] >= REPLAYED


def mean_of_lags(frames: Frames, name: str) -> pd.DataFrame:
    """Seed × arm, the mean of lags 1 and 2; NaN where a seed has not run at both."""
    by = by_lag(frames, name)
    return sum(by[lag] for lag in COUNTED) / len(COUNTED)


def by_lag(frames: Frames, name: str) -> dict[int, pd.DataFrame]:
    """Lag → seed × arm, GRPO at half the rate as an arm. Raises RunError where runs of the rule are missing."""
    found = {}
    for lag in LAGS:
        cells = [f"lag={lag}", f"{HALF}lag={lag}"]
        if missing := [cell for cell in cells if cell not in frames.cells]:
            raise RunError(f"the rule needs runs of {' and '.join(missing)}, which are not there")
        main, half = (per_run(frames.cell(cell), metric(name)).unstack(0) for cell in cells)
        found[lag] = main.assign(**{HALF_RATE: half["grpo"]})
        if missing := {arm for pair in PAIRS for arm in pair} - set(found[lag]):
            raise RunError(f"the rule needs runs of {', '.join(sorted(missing))} at lag {lag}, which are not there")
    return found


@plots.styled
def draw(frames: Frames) -> Figure:
    """Every planned difference, both endpoints side by side, and the token ESS of GRPO and replay by lag."""
    figure, axes = plots.new_figure(3, "Ratios that spread by themselves: who is helped?", width=16)
    arms = [arm.name for arm in study.arms]
    colours = {f"{a} − {b}": plots.colour_of(a, arms) if a in arms else plots.GREY for a, b in PAIRS}
    for ax, endpoint in zip(axes, ENDPOINTS, strict=False):
        table = mean_of_lags(frames, endpoint)
        note = plots.rows_of(ax, {f"{a} − {b}": (table[a] - table[b]).dropna() for a, b in PAIRS}, colours)
        ax.axvspan(-MARGIN, MARGIN, color=plots.GREY, alpha=0.15)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="difference, mean of lags 1 and 2; shaded: the margin")
        ax.grid(axis="y", visible=False)
    ess = by_lag(frames, "token_ess")
    for arm in ("grpo", "grpo-replay", "gspo"):
        bands = [interval(ess[lag][arm].dropna()) for lag in LAGS]
        mean = [band.mean for band in bands]
        whisker = [[band.mean - band.low for band in bands], [band.high - band.mean for band in bands]]
        axes[-1].errorbar(LAGS, mean, whisker, fmt=f"{plots.symbol_of(arm)}-", capsize=3, label=arm,
                          color=plots.colour_of(arm, arms))
    axes[-1].set(title="token ESS of the step", xlabel="lag, steps", ylabel="share", xticks=LAGS)
    axes[-1].legend()
    return plots.finish(figure, axes, f"steps 26–50; {note}", legend=False)
