"""What studies that compare arms are asked beyond the tables of `moe-rl plot`; printed by `answers.py`."""

from __future__ import annotations

from collections.abc import Mapping

import lag_verdicts
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from per_seed import RESULTS, differences, slopes, stored
from why_gspo_losses import SHRINK

from moe_rl.metrics.rounding import number
from moe_rl.results import plots
from moe_rl.results.stats import geometric, holm, interval
from moe_rl.results.summary import MAIN, against, collapsed, half_lost_points, metric, per_run, settings_of
from moe_rl.storage.frames import Frames
from moe_rl.study.declaration import read_declaration


# ---------------------------------------------------------------------- reward against learning rate
def learning_rates() -> None:
    """Each arm at its own best learning rate, chosen on the other seeds; and reward at equal functional step."""
    frames = stored("learning_rates")
    comparisons = read_declaration(RESULTS / "learning_rates", trust=True)["comparisons"]
    table = against(frames, "optimizer.lr", MAIN)
    curves = {arm: rows.pivot(index="seed", columns="x", values="value") for arm, rows in table.groupby("arm")}
    best = {arm: {seed: curve.drop(index=seed).mean().idxmax() for seed in curve.index}
            for arm, curve in curves.items()}
    tuned = pd.DataFrame({arm: {seed: curves[arm].loc[seed, x] for seed, x in chosen.items()}
                          for arm, chosen in best.items()})
    print("Learning rate, in 1e-4, at which half of the best reward is lost; ratios at 98.3 %:")
    for one in half_lost_points(frames, "optimizer.lr", MAIN, comparisons):
        for arm, rate in one.points.items():
            print(f"  {arm}: {1e4 * rate.mean:.1f} [{1e4 * rate.low:.1f}, {1e4 * rate.high:.1f}]")
        for pair, moved in one.shifts.items():
            print(f"  {' / '.join(pair)}: {moved.ratio}")
    print("Reward at the learning rate that is best on the other seeds:")
    for arm, chosen in best.items():
        print(f"  {arm}: {interval(tuned[arm])} at {', '.join(f'{x:g}' for x in chosen.values())}")
    for a, b in comparisons:
        print(f"  {a} − {b}: {differences(tuned, a, b)}")
    print("Exploratory: reward at equal functional step (mean square natural log-ratio, first half), over their range:")
    matched = at_equal_step(frames, table)
    for a, b in comparisons:
        print(f"  {a} − {b}: {differences(matched, a, b)}")


def at_equal_step(frames: Frames, table: pd.DataFrame) -> pd.DataFrame:
    """Per seed and arm, the reward averaged over the range of functional steps that all arms of the seed cover.

    The functional step is the mean of D² over the tokens of the detailed steps of a run's first half, D the natural
    log-ratio to the old policy at tokens about to be trained on: to second order twice the KL, though few tokens carry
    it. Linear in its log between learning rates, as far as it rises with them. NaN where the ranges share nothing.
    """
    early = frames["updates"][frames["updates"]["step"] <= frames["steps"]["step"].max() / 2]
    sums = early.groupby(["arm", "factors", "seed"])[["attribution_sum_dd", "attribution_n"]].sum()
    moved = (sums["attribution_sum_dd"] / sums["attribution_n"]).rename("moved").reset_index()
    moved["x"] = moved["factors"].map(lambda cell: settings_of(cell)["optimizer.lr"])
    both = table.merge(moved[["arm", "seed", "x", "moved"]], on=["arm", "seed", "x"]).sort_values("x")
    rising = both[both["moved"] >= both.groupby(["arm", "seed"])["moved"].cummax()]
    found: dict[str, dict[int, float]] = {}
    for seed, mine in rising.groupby("seed"):
        ends = mine.groupby("arm")["moved"].agg(["min", "max"])
        grid = np.linspace(np.log(ends["min"].max()), np.log(ends["max"].min()), 50)
        for arm, rows in mine.groupby("arm"):
            value = np.interp(grid, np.log(rows["moved"]), rows["value"]).mean() if grid[0] < grid[-1] else np.nan
            found.setdefault(arm, {})[seed] = float(value)
    return pd.DataFrame(found)


# ---------------------------------------------------------------------- clipping, and other engines
def clip_fraction() -> None:
    """How many times as many tokens GSPO clips, seed by seed: of those with an advantage, and of all as in Fig. 2."""
    frames = stored("clip_fraction")
    for column, of in (("clip_tokens", "tokens with an advantage"), ("clip_tokens_all", "all tokens")):
        values = per_run(frames, metric(column)).unstack(0)
        for a, b in (("gspo", "grpo"), ("gspo-wide", "grpo-narrow")):
            times = values[a] / values[b]
            print(f"  of {of}: {a} {interval(values[a])}, {b} {interval(values[b])}; "
                  f"times, seed by seed {', '.join(f'{x:.1f}' for x in times)}; difference {differences(values, a, b)}")
    rewards = per_run(frames, MAIN).unstack(0)
    for a, b in (("gspo", "grpo"), ("gspo-middle", "grpo-middle"), ("gspo-wide", "grpo-narrow")):
        print(f"  reward: {a} − {b} {differences(rewards, a, b)}")


def engine_mismatch() -> None:
    """What R3 removes of the KL, seed by seed; R3 against R2; and what mismatch costs."""
    frames, matched = stored("engine_mismatch"), stored("engine_match")
    steps = frames["steps"][frames["steps"]["arm"] == "grpo"]
    print("GRPO, mean over a run's detailed steps, percent of routers and tokens, nats:")
    for name, times in (("engine_any_change_rate", 100), ("engine_any_layer_change", 100), ("engine_kl_k3", 1)):
        print(f"  {name}: {interval(times * steps.groupby('seed')[name].mean())}")
    kl = steps.groupby("seed")[["engine_kl_k3_natural", "engine_kl_k3_replayed", "noise_floor_kl_k3"]].mean()
    share = 100 * (1 - kl["engine_kl_k3_replayed"] / kl["engine_kl_k3_natural"])
    print(f"  replay of the engine's routes removes of the KL, percent: {_listed(share, '.0f')} by seed; at least 90 "
          f"on {(share >= 90).sum()} of {len(share)}; noise floor at most {kl['noise_floor_kl_k3'].max():.0e}")
    rewards, quiet = (per_run(study, MAIN).unstack(0) for study in (frames, matched))
    print(f"  grpo-r3 − grpo-r2, not declared: {differences(rewards, 'grpo-r3', 'grpo-r2')}")
    for arm in ("grpo", "gspo"):
        print(f"  {arm}, with mismatch − without (engine_match): {interval((rewards[arm] - quiet[arm]).dropna())}")


def engine_vllm() -> None:
    """What replay of vLLM's routes removes of the KL, of a run and step by step."""
    steps = stored("engine_vllm")["steps"].sort_values("step")
    for arm, rows in steps.dropna(subset=["engine_kl_k3_natural"]).groupby("arm"):
        there, left = rows["engine_kl_k3_natural"], rows["engine_kl_k3_replayed"]
        whole = number(100 * (1 - left.sum() / there.sum()), ".0f")
        print(f"  {arm}: removed of a run's KL {whole} percent; of single steps "
              f"{_listed(100 * (1 - left / there), '.1f')}; the largest holds {100 * there.max() / there.sum():.0f} "
              "percent of the run's")
    for name, times in (("engine_any_change_rate", 100), ("engine_any_layer_change", 100), ("engine_kl_k3", 1)):
        means = times * steps.groupby("arm")[name].mean()
        print(f"  {name} (percent; nats): " + ", ".join(f"{arm} {x:.2g}" for arm, x in means.items()))


def _listed(values: pd.Series, form: str) -> str:
    return ", ".join(number(x, form) for x in values)


# ---------------------------------------------------------------------- updates per batch, doses, controls
def staleness() -> None:
    """The machinery check at N = 1, and the slopes over log2 N."""
    frames = stored("staleness")
    part_at(frames.cell("N=1"), "grpo-replay")
    part_at(frames.cell("N=1"), "gspo")
    table = against(frames, "N", MAIN)
    curves = {arm: rows.pivot(index="seed", columns="x", values="value") for arm, rows in table.groupby("arm")}
    for arm, curve in curves.items():
        print(f"  {arm}: " + ", ".join(f"N={n:g} {interval(curve[n])}" for n in curve))
    print("Slope over log2 N, 97.5 %:")
    for arm in ("grpo-replay", "gspo"):
        gap = curves[arm] - curves["grpo"]
        print(f"  {arm} − grpo: {interval(slopes(gap, np.log2(gap.columns)), 0.975)}")


def part_at(frames: Frames, arm: str) -> None:
    """Print the first step at which the rewards of an arm and of GRPO are not equal, per seed."""
    rewards = frames["steps"].pivot(index=["seed", "step"], columns="arm", values="reward").drop(index=0, level="step")
    differ = rewards[rewards["grpo"] != rewards[arm]].reset_index().groupby("seed")["step"].min()
    parts = [f"seed {seed} at step {differ[seed]}" if seed in differ else f"seed {seed} never"
             for seed in rewards.index.unique("seed")]
    print(f"  rewards of {arm} and grpo part: {', '.join(parts)}")


def lag() -> None:
    """Levels by lag, and the differences from GRPO at the largest in both endpoints."""
    frames = stored("lag")
    for name in (*lag_verdicts.ENDPOINTS, "token_ess", "token_kl_k3", "expert_change_rate", "grad_cosine"):
        values = lag_verdicts.by_lag(frames, name)
        print(f"{name}{'' if ',' in name else ', second half'}; lags {', '.join(map(str, values))}:")
        for arm in lag_verdicts.ARMS:
            print(f"  {arm}: " + "; ".join(str(interval(table[arm])) for table in values.values()))
        if name in lag_verdicts.ENDPOINTS:
            gaps = lag_verdicts.cures(values)
            for (pair, test), p in zip(gaps.items(), holm([test.p for test in gaps.values()]), strict=True):
                print(f"  {pair}, lag {max(values)}: {test.difference}, p {test.p:.2g}, Holm p {p:.2g}")


def many_turns() -> None:
    """How many conversations had a second turn, and how many tokens all came to."""
    steps = stored("many_turns")["steps"]
    later = steps[steps["step"] > steps["step"].max() / 2]
    for arm, rows in steps.groupby("arm"):
        turns = 100 * (rows.groupby("step")["turns"].mean() - 1)
        tokens = later[later["arm"] == arm].groupby("seed")["response_tokens"].mean()
        print(f"  {arm}: with a second turn, percent, first and last step {turns[1]:.0f}, {turns.iloc[-1]:.0f}; tokens "
              f"per conversation, second half, {interval(tokens)}")


def placebos() -> None:
    """Reward by the share that is replayed."""
    values = per_run(stored("placebos"), MAIN).unstack(0)
    for arm in values:
        print(f"  {arm}: {interval(values[arm])}")
    for arm in values.columns.drop("grpo"):
        print(f"  {arm} − grpo: {differences(values, arm, 'grpo')}")
    doses = values[["grpo", "replay-25", "replay-50", "replay-75", "grpo-replay"]]
    print(f"Slope over the dose from 0 to 1: {interval(slopes(doses, (0, 0.25, 0.5, 0.75, 1)))}")


def why_gspo() -> None:
    """Weight × clip, and how near the rivals came to what they imitate, in seeds that `why_replay` has, too."""
    frames, replays = stored("why_gspo"), stored("why_replay")
    rewards = per_run(frames, MAIN).unstack(0)
    for arm in rewards:
        print(f"  {arm}: {interval(rewards[arm])}, − grpo {differences(rewards, arm, 'grpo')}")
    later = frames["updates"][frames["updates"]["update"] > 1].groupby(["arm", "seed"])["clip_tokens"].mean().unstack(0)
    print("Clipped or dropped, tokens with an advantage, second to eighth mini-batch of all steps: "
          + ", ".join(f"{arm} {interval(later[arm])}" for arm in ("grpo", "gspo", "random-mask")))
    variance = metric("token_log_ratio_var")
    ours, theirs = (per_run(study, variance).unstack(0) for study in (frames, replays))
    print("Variance of the log-ratios that the loss sees, times GRPO's: "
          f"shrunk {geometric(SHRINK**2 * ours['shrunk'] / ours['grpo'])}, "
          f"replay, in why_replay, {geometric(theirs['grpo-replay'] / theirs['grpo'])}")
    plots.save(draw_why_gspo(rewards, frames), RESULTS / "why_gspo" / "figures", "why_gspo")


@plots.styled
def draw_why_gspo(rewards: pd.DataFrame, frames: Frames) -> Figure:
    """Reward of every arm, GRPO first, then the best first; and what each adds to GRPO's, within seeds."""
    arms = list(frames.runs["arm"].unique())
    declared = [arm["name"] for arm in read_declaration(RESULTS / "why_gspo", trust=True)["arms"]]
    order = ["grpo", *rewards[arms].drop(columns="grpo").mean().sort_values(ascending=False).index]
    colours, void = {arm: plots.colour_of(arm, declared) for arm in order}, [arm for arm, _ in collapsed(frames)]
    figure, axes = plots.new_figure(2, "Weights or clipping?", width=11)
    note = plots.rows_of(axes[0], {arm: rewards[arm] for arm in order}, colours, scale="logit", void=void)
    plots.cold_start(axes[0], frames["steps"], "reward", upright=True)
    axes[0].set(title="Reward", xlabel="mean reward, second half", xlim=(0, 1))
    gaps = {arm: rewards[arm] - rewards["grpo"] for arm in order[1:]}
    plots.rows_of(axes[1], gaps, colours, void=void)
    axes[1].axvline(0, color="black", linewidth=1)
    axes[1].set(title="Minus GRPO, within seeds", xlabel="difference in reward")
    note = f"rows: weight-clip, and rivals; steps 31–60; {note}; dashed: the cold start"
    return plots.finish(figure, axes, note, legend=False)


def controls() -> None:
    """The machinery check of no-choice, and both contrasts cell by cell."""
    frames = stored("controls")
    part_at(frames.cell("no-choice"), "grpo-replay")
    cells = sorted(frames.cells, key=lambda cell: cell != "moe")
    rewards = {cell: per_run(frames.cell(cell), MAIN).unstack(0) for cell in cells}
    for cell, values in rewards.items():
        print(f"  {cell}: grpo {interval(values['grpo'])}, replay − grpo {differences(values, 'grpo-replay', 'grpo')}, "
              f"gspo − grpo {differences(values, 'gspo', 'grpo')}")
    steps = frames.cell("moe")["steps"]
    early = steps[steps["step"].between(1, 3)].groupby(["arm", "step"])["reward"].mean().unstack()
    print("Without warm-up, reward of steps 1 to 3: "
          + "; ".join(f"{arm} {_listed(row, '.2f')}" for arm, row in early.iterrows()))
    for arm in ("grpo", "gspo"):
        print(f"  warm-up adds to {arm} {interval(rewards['warm-up'][arm] - rewards['moe'][arm])}")
    slots = {
        cell: per_run(frames.cell(cell), metric("expert_change_rate")).unstack(0) for cell in ("moe", "frozen-router")
    }
    for arm in ("grpo", "grpo-replay", "gspo"):
        print(f"  slots changed per step, percent, {arm}: live router {interval(100 * slots['moe'][arm])}, frozen "
              f"{interval(100 * slots['frozen-router'][arm])}, frozen − live "
              f"{interval(100 * (slots['frozen-router'][arm] - slots['moe'][arm]))}")
    plots.save(draw_controls(rewards, frames), RESULTS / "controls" / "figures", "controls")


@plots.styled
def draw_controls(rewards: Mapping[str, pd.DataFrame], frames: Frames) -> Figure:
    """Reward of GRPO and what replay and GSPO add to it, cell by cell; where all runs collapsed, that."""
    figure, axes = plots.new_figure(3, "Is it routing at all?", width=13)
    arms, lost = [arm["name"] for arm in read_declaration(RESULTS / "controls", trust=True)["arms"]], collapsed(frames)
    void = {arm: [cell for cell in rewards if {(arm, cell), ("grpo", cell)} <= lost] for arm in arms}
    titles = {"grpo": "GRPO", "grpo-replay": "GRPO + replay − GRPO", "gspo": "GSPO − GRPO"}
    for ax, (arm, title) in zip(axes, titles.items(), strict=True):
        level = arm == "grpo"
        values = {cell: v[arm] if level else v[arm] - v["grpo"] for cell, v in rewards.items()}
        note = plots.rows_of(ax, values, dict.fromkeys(rewards, plots.colour_of(arm, arms)), void=void[arm],
                             scale="logit" if level else "linear")
        ax.set(title=title, xlabel="mean reward, second half" if level else "difference in reward, paired by seed")
        if level:
            before = plots.before_training(frames["steps"], "reward").groupby(level=0).mean()
            ax.plot(before[list(rewards)], range(len(rewards)), "|", color=plots.GREY, markersize=12)
            ax.set_xlim(0, 1)
        else:
            ax.axvline(0, color="black", linewidth=1)
            ax.set_yticklabels([])
    return plots.finish(figure, axes, f"steps 31–60; {note}; |: the cold start; ×: every run collapsed",
                        legend=False)
