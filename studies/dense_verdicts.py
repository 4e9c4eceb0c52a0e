"""What the declared rule of dense says, from its tables and those of learning_rates."""

from __future__ import annotations

import pandas as pd
from answers_of_arms import at_equal_step
from dense import AGAIN, RATES, cell
from matplotlib.figure import Figure
from per_seed import RESULTS, differences, stored

from moe_rl.errors import RunError
from moe_rl.metrics.rounding import number
from moe_rl.results import plots
from moe_rl.results.stats import interval
from moe_rl.results.summary import MAIN, HalfLost, Metric, against, half_lost_points, metric, outcomes, per_run
from moe_rl.storage.frames import Frames

FACTOR = "optimizer.lr"
STORED, REPEATED = "MoE", "MoE, two rates again"
"""The MoE as learning_rates has it, and with what was run again in place of what was stored."""
MODELS = (STORED, "dense", REPEATED)
PAIRS = (("dense", STORED), ("dense", REPEATED))
GREEDY = metric("greedy exact match, end")


def main() -> None:
    """Every number beside the verdict, and the figure."""
    frames = models(stored("dense"))
    rewards = against(frames, FACTOR, MAIN)
    for name, table in (("Reward, second half", rewards), ("Greedy exact match at the end",
                                                           against(frames, FACTOR, GREEDY))):
        print(f"{name}:")
        for model in MODELS:
            rows = table[table["arm"] == model]
            print(f"  {model}: " + "; ".join(f"{rate:g} {interval(at['value'])}" for rate, at in rows.groupby("x")))
    print("Collapses of 4, lasting + recovered:")
    fates = outcomes(frames).groupby(["arm", "factors"], sort=False)["fate"]
    for model in MODELS:
        print(f"  {model}: " + "; ".join(
            f"{rate:g} {(of == 'lasting').sum()} + {(of == 'recovered').sum()}"
            for rate in RATES for of in [fates.get_group((model, place(rate)))]))
    for model in MODELS[:2]:
        low = frames.cell(place(RATES[0]))
        print(f"Greedy exact match at {RATES[0]:g}, {model}: {start_and_end(low, model)}")
    again = rewards.pivot(index=["x", "seed"], columns="arm", values="value")
    for rate in AGAIN:
        print(f"Reward of the MoE at {rate:g}, again − stored: {differences(again.loc[rate], REPEATED, STORED)}")
    found = half_lost(frames)
    print("Learning rate, in 1e-4, at which half of the best reward is lost:")
    for model, rate in found.points.items():
        print(f"  {model}: {1e4 * rate.mean:.1f} [{1e4 * rate.low:.1f}, {1e4 * rate.high:.1f}], "
              f"{found.censored[model]} censored")
    matched = at_equal_step(frames, rewards)
    print("Exploratory: reward at equal functional step (mean square natural log-ratio, first half), over their range:")
    for a, b in PAIRS:
        print(f"  {a} − {b}: {differences(matched, a, b)}")
    plots.save(draw(frames), RESULTS / "dense" / "figures", "dense")


def verdict(frames: Frames) -> list[str]:
    """Void or not, and dense / MoE both ways."""
    both, lines = models(frames), []
    routes = frames["steps"][frames["steps"]["factors"].str.startswith("model=dense")]
    if (moved := routes[["expert_change_rate", "replay_gap_std"]].abs().max()).max() > 0:
        lines.append(f"void: routes of the dense model change (slots {moved.iloc[0]:.1e}, gap {moved.iloc[1]:.1e})")
    gained = per_run(frames.cell(cell("dense", RATES[0])), metric("greedy exact match, gained since the start"))
    if not (gain := interval(gained)).mean > 0:
        lines.append(f"void: the dense model does not end above its cold start, gained {gain}")
    shifts = half_lost(both).shifts
    if missing := [b for a, b in PAIRS if (a, b) not in shifts]:
        raise RunError(f"the rule needs curves of the dense model and of {', '.join(missing)}, which are not there")
    sides = {(s.ratio.low > 1) - (s.ratio.high < 1) for s in shifts.values()}
    n = min(s.ratio.n for s in shifts.values())
    says = {1: "reproduced", -1: "reversed"}.get(sides.pop() if len(sides) == 1 else 0, f"undetermined at n = {n}")
    ratios = "; ".join(f"{a} / {b} {s.ratio}, {s.censored} of {s.ratio.n} censored" for (a, b), s in shifts.items())
    return [*lines, f"the dense model is stable up to a higher learning rate: {says} ({ratios})"]


def place(rate: float) -> str:
    """The combination of factors of a learning rate, as learning_rates names it."""
    return f"{FACTOR}={rate:g}"


def models(frames: Frames) -> Frames:
    """The runs of MODELS, models as arms, at RATES: those of this study, and GRPO's of learning_rates."""
    known = stored("learning_rates")
    parts = []
    for rate in RATES:
        old = known.cell(place(rate))
        new = frames.cell(cell("moe", rate)) if rate in AGAIN else old
        for model, rows in zip(MODELS, (old, frames.cell(cell("dense", rate)), new), strict=True):
            parts.append([t[t["arm"] == "grpo"].assign(arm=model, factors=place(rate))
                          for t in (rows.runs, *(rows[name] for name in frames.tables))])
    runs, *tables = (pd.concat([t for t in of if len(t)] or of[:1], ignore_index=True)
                     for of in zip(*parts, strict=True))
    return Frames(runs, dict(zip(frames.tables, tables, strict=True)))


def half_lost(both: Frames) -> HalfLost:
    """Where models lose half of their best, with each ratio's interval at 95 %: a verdict needs both."""
    one, other = (half_lost_points(both, FACTOR, MAIN, [pair])[0] for pair in PAIRS)
    return HalfLost(one.others, one.points, one.censored, {**one.shifts, **other.shifts})


def start_and_end(low: Frames, model: str) -> str:
    """Greedy exact match before the first step and after the last, and what was gained."""
    steps = low["steps"][low["steps"]["arm"] == model].dropna(subset=["eval_exact_greedy"]).sort_values("step")
    ends = steps.groupby("seed")["eval_exact_greedy"].agg(["first", "last"])
    first, last = (number(ends[x].mean(), ".3f") for x in ("first", "last"))
    return f"{first} → {last}, gained {interval(ends['last'] - ends['first'])}"


@plots.styled
def draw(frames: Frames) -> Figure:
    """Reward and greedy exact match over the learning rate."""
    figure, axes = plots.new_figure(2, "Is a dense model stable at higher learning rates than an MoE?", width=12)
    panels: tuple[tuple[Metric, str], ...] = ((MAIN, "Training reward, steps 51–100"),
                                              (GREEDY, "Held-out exact match, greedy, end"))
    for ax, (one, title) in zip(axes, panels, strict=True):
        ax.set_xscale("log")
        table = against(frames, FACTOR, one)
        table = table[(table["arm"] != REPEATED) | table["x"].isin(AGAIN)]
        note = plots.curves(ax, table, "value", "x", MODELS, marker="o", scale="logit")
        ax.set(title=title, xlabel="learning rate", ylim=(-0.02, 1.02))
        ax.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        ax.minorticks_off()
    axes[0].set_ylabel("mean over prompts")
    return plots.finish(figure, axes, note)
