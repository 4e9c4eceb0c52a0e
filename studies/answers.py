"""What the declared rules ask beyond the tables of `moe-rl plot`: numbers for README.md, and five figures.

    python studies/answers.py [study …]

reads `results/` and prints; without names, every study that is there. Intervals are over seeds unless a line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import early_warning
import flip_effects_verdicts
import numpy as np
import pandas as pd
import stabilisers_verdicts
import volatility_controls_verdicts
import volatility_dial_verdicts
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from why_gspo_losses import SHRINK

from moe_rl.metrics.attribution import AttributionSums
from moe_rl.results import plots
from moe_rl.results.factors import against, settings_of
from moe_rl.results.stats import Interval, geometric, interval
from moe_rl.results.summary import MAIN, metric, per_run
from moe_rl.runs.frames import Frames, load_study
from moe_rl.study.declaration import read_declaration

RESULTS = Path(__file__).parent / "results"


def differences(values: pd.DataFrame, a: str, b: str, confidence: float = 0.95) -> Interval:
    """a − b over the seeds (rows) both columns have."""
    return interval((values[a] - values[b]).dropna(), confidence)


def own_table(study: str, name: str) -> pd.DataFrame:
    """A table that the study's own trainer wrote, in float64."""
    table = pd.read_parquet(RESULTS / study / f"{name}.parquet")
    return table.astype({c: "float64" for c in table.select_dtypes("float32")})


def slopes(values: pd.DataFrame, x: Sequence[float]) -> np.ndarray:
    """Least-squares slope of every row over x."""
    return np.polyfit(np.asarray(x, dtype=float), values.to_numpy(dtype=float).T, 1)[0]


def draw_rows(ax: Axes, values: Mapping[str, pd.Series]) -> Interval:
    """A row per cell or arm: the values of its seeds, their mean and interval. The first, the reference, has its own
    colour. Returns the last interval, for its method and n."""
    for i, seeds in enumerate(values.values()):
        found, colour = interval(seeds), plots.COLOURS[min(i, 1)]
        ax.plot(seeds, np.full(len(seeds), i), ".", color=colour, alpha=0.4, markersize=5)
        whisker = [[found.mean - found.low], [found.high - found.mean]]
        ax.errorbar(found.mean, i, xerr=whisker, fmt="o", color=colour, capsize=3, linewidth=1.4, markersize=5)
    ax.set(yticks=range(len(values)), yticklabels=values)
    ax.invert_yaxis()
    return found


# ---------------------------------------------------------------------- reward against learning rate
def learning_rates() -> None:
    """Each arm at its own best learning rate, chosen on the other seeds; and reward at equal functional step."""
    folder = RESULTS / "learning_rates"
    frames, contrasts = load_study(folder), read_declaration(folder)["contrasts"]
    table = against(frames, "optimizer.lr", MAIN)
    curves = {arm: rows.pivot(index="seed", columns="x", values="value") for arm, rows in table.groupby("arm")}
    best = {arm: {seed: curve.drop(index=seed).mean().idxmax() for seed in curve.index}
            for arm, curve in curves.items()}
    tuned = pd.DataFrame({arm: {seed: curves[arm].loc[seed, x] for seed, x in chosen.items()}
                          for arm, chosen in best.items()})
    print("Reward at the learning rate that is best on the other seeds:")
    for arm, chosen in best.items():
        print(f"  {arm}: {interval(tuned[arm])} at {', '.join(f'{x:g}' for x in chosen.values())}")
    for a, b in contrasts:
        print(f"  {a} − {b}: {differences(tuned, a, b)}")
    print("Exploratory: reward at equal functional step (mean square natural log-ratio, first half), over their range:")
    matched = at_equal_step(frames, table)
    for a, b in contrasts:
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


# ---------------------------------------------------------------------- expert volatility
def expert_volatility() -> None:
    """Every definition in the base cell, and the endpoint's trends as ratios to it."""
    frames = load_study(RESULTS / "expert_volatility")
    base = frames.cell("base")
    updates = base["updates"][base["updates"]["step"] > 20]
    print("Base cell, steps 21–40, response tokens:")
    for name in ("slot_change", "set_change", "any_layer_change", "layers_changed", "jaccard_distance"):
        one = updates.groupby("seed")[name].mean()
        print(f"  {name}: one update {interval(one)}, one step {interval(per_run(base, metric(name)))}")
    for update in (2, 8):
        fresh = updates[updates["update"] == update]
        print(f"  slot_change, tokens not yet trained on, before update {update}: "
              f"{interval(fresh.groupby('seed')['fresh_slot_change'].mean())}")
    for name in ("noise_floor_slot_change", "noise_floor_set_change"):
        print(f"  {name}: {interval(per_run(base, metric(name)))}")
    total = own_table("expert_volatility", "cumulative")
    for of, rows in total[total["factors"] == "base"].groupby("responses_of"):
        shares = [f"{name} {interval(rows[name])}" for name in ("slot_change", "set_change", "any_layer_change")]
        print(f"  from the cold start to step 40, responses of the {of}: {', '.join(shares)}")
    print("Slots changed in one step; as times the base, paired by seed (geometric mean); from cold start to end:")
    reference = per_run(base, metric("slot_change")).xs("grpo")
    for cell in frames.cells:
        values = per_run(frames.cell(cell), metric("slot_change")).xs("grpo")
        sets = per_run(frames.cell(cell), metric("set_change")).xs("grpo")
        tokens = per_run(frames.cell(cell), metric("any_layer_change")).xs("grpo")
        times = geometric(values / reference) if cell != "base" else "1"
        end = total[(total["factors"] == cell) & (total["responses_of"] == "end")]["slot_change"]
        print(f"  {cell}: {interval(values)}, times {times}; sets {sets.mean():.3f}, tokens {tokens.mean():.3f}; "
              f"cumulative {interval(end)}")
    sites = base["layers"][base["layers"]["step"] > 20].groupby("site")["slot_change"].mean()
    print("  per site, base: " + ", ".join(f"{share:.3f}" for share in sites))
    plots.save(draw_expert_volatility(frames), RESULTS / "expert_volatility" / "figures", "expert_volatility")


@plots.styled
def draw_expert_volatility(frames: Frames) -> Figure:
    """Routes changed in one step under three definitions, cell by cell."""
    names = {"slot_change": "expert slots, 1 − |S ∩ S′| / k", "set_change": "routers, S ≠ S′",
             "any_layer_change": "tokens with a change at any layer"}
    figure, axes = plots.new_figure(3, "How many routes change in one step?", width=13)
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        found = draw_rows(ax, {cell: per_run(frames.cell(cell), metric(name)) for cell in frames.cells})
        ax.axvline(0.1, color="#666666", linewidth=1.2, linestyle=":")
        ax.set(title=title, xlim=(0, None))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
    for ax in axes[1:]:
        ax.set_yticklabels([])
    note = f"mean over n = {found.n} seeds, steps 21–40; whisker: {found.method}; dots: each seed; dotted line: 10 %"
    return plots.finish(figure, axes, note, legend=False)


# ---------------------------------------------------------------------- updates per batch, doses, controls
def staleness() -> None:
    """The machinery check at N = 1, and the slopes over log2 N."""
    frames = load_study(RESULTS / "staleness")
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


def placebos() -> None:
    """Reward by the share that is replayed."""
    values = per_run(load_study(RESULTS / "placebos"), MAIN).unstack(0)
    for arm in values:
        print(f"  {arm}: {interval(values[arm])}")
    doses = values[["grpo", "replay-25", "replay-50", "replay-75", "grpo-replay"]]
    print(f"Slope over the dose from 0 to 1: {interval(slopes(doses, (0, 0.25, 0.5, 0.75, 1)))}")


def why_gspo() -> None:
    """Weight × clip, and how near the rivals came to what they imitate, in seeds that `why_replay` has, too."""
    frames, replays = load_study(RESULTS / "why_gspo"), load_study(RESULTS / "why_replay")
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
    plots.save(draw_why_gspo(rewards), RESULTS / "why_gspo" / "figures", "why_gspo")


@plots.styled
def draw_why_gspo(rewards: pd.DataFrame) -> Figure:
    """Reward of every arm, GRPO first, then the best first."""
    others = rewards.drop(columns="grpo").mean().sort_values(ascending=False).index
    figure, (ax,) = plots.new_figure(1, "Weights or clipping?", width=8)
    found = draw_rows(ax, {arm: rewards[arm] for arm in ("grpo", *others)})
    ax.set(xlabel="mean reward, second half", xlim=(0, 1))
    note = f"rows: weight-clip, and rivals; mean over n = {found.n} seeds, steps 31–60; whisker: {found.method}; " \
           "dots: each seed"
    return plots.finish(figure, [ax], note, legend=False)


def controls() -> None:
    """The machinery check of no-choice, and both contrasts cell by cell."""
    frames = load_study(RESULTS / "controls")
    part_at(frames.cell("no-choice"), "grpo-replay")
    cells = sorted(frames.cells, key=lambda cell: cell != "moe")
    rewards = {cell: per_run(frames.cell(cell), MAIN).unstack(0) for cell in cells}
    for cell, values in rewards.items():
        print(f"  {cell}: grpo {interval(values['grpo'])}, replay − grpo {differences(values, 'grpo-replay', 'grpo')}, "
              f"gspo − grpo {differences(values, 'gspo', 'grpo')}")
    plots.save(draw_controls(rewards), RESULTS / "controls" / "figures", "controls")


@plots.styled
def draw_controls(rewards: Mapping[str, pd.DataFrame]) -> Figure:
    """Reward of GRPO and what replay and GSPO add to it, cell by cell."""
    figure, axes = plots.new_figure(3, "Is it routing at all?", width=13)
    draw_rows(axes[0], {cell: values["grpo"] for cell, values in rewards.items()})
    axes[0].set(title="GRPO", xlabel="mean reward, second half", xlim=(0, 1))
    for ax, arm, name in zip(axes[1:], ("grpo-replay", "gspo"), ("GRPO + replay", "GSPO"), strict=True):
        found = draw_rows(ax, {cell: values[arm] - values["grpo"] for cell, values in rewards.items()})
        ax.axvline(0, color="#666666", linewidth=1.2, linestyle=":")
        ax.set(title=f"{name} − GRPO", xlabel="difference in reward, paired by seed")
        ax.set_yticklabels([])
    note = f"mean over n = {found.n} seeds, steps 31–60; whisker: {found.method}; dots: each seed"
    return plots.finish(figure, axes, note, legend=False)


# ---------------------------------------------------------------------- ratio variance
def ratio_variance() -> None:
    """Removed variance and KL, the tokens that carry most of it, and the scaling law."""
    prompts, scaling = own_table("ratio_variance", "prompts"), own_table("ratio_variance", "scaling")
    found = []
    for (cell, update), rows in prompts.groupby(["factors", "update"]):
        shares = AttributionSums(int(rows["n"].sum()), *(rows[c].sum() for c in ("d", "r", "dd", "rr", "jj", "rj")))
        top = rows["largest"].nlargest(round(rows["n"].sum() / 1000)).sum() / rows["dd"].sum()
        found.append({"rate": settings_of(cell)["optimizer.lr"], "update": update, "tokens": rows["n"].sum(),
                      "changed": rows["changed"].sum() / rows["n"].sum(), "top": top, **shares.shares(),
                      **removed(rows)})
    table = pd.DataFrame(found)
    print(table.round(4).to_string(index=False))
    names = {"slot_change": "expert slots changed", "rr": "mean R², replayed", "jj": "mean J², route changes",
             "dd": "mean D², natural", "kl_natural": "KL, natural", "kl_replayed": "KL, replayed"}
    print("Log-log slopes over α:")
    for name, title in names.items():
        per_seed = scaling[scaling[name] > 0].groupby(["seed", "factors"])[["alpha", name]].apply(
            lambda rows: np.polyfit(*np.log(rows.to_numpy().T), 1)[0]).groupby("seed").mean()
        pooled = [np.polyfit(*np.log(mean.reset_index().to_numpy().T), 1)[0]
                  for _, rows in scaling.groupby("seed") for mean in [rows.groupby("alpha")[name].mean()]]
        print(f"  {title}: {interval(per_seed)}; of the mean over a seed's runs {interval(pooled)}")
    plots.save(draw_ratio_variance(table, scaling, names), RESULTS / "ratio_variance" / "figures", "ratio_variance")


def removed(rows: pd.DataFrame, resamples: int = 2000) -> dict[str, float]:
    """1 − Σ R² / Σ D² and 1 − Σ KL replayed / Σ KL natural: the mean of the seeds' own shares with its Student t
    interval (`low`, `high`), the share of all tokens pooled, and its 95 % bootstrap by prompt, seeds fixed."""
    rng, columns = np.random.default_rng(0), ["dd", "rr", "kl_natural", "kl_replayed"]
    drawn = np.zeros((resamples, len(columns)))
    for _, prompts in rows.groupby("seed"):
        n = len(prompts)
        drawn += rng.multinomial(n, np.full(n, 1 / n), size=resamples) @ prompts[columns].to_numpy()
    total, seeds, result = rows[columns].sum(), rows.groupby("seed")[columns].sum(), {}
    for name, (whole, left) in {"variance": ("dd", "rr"), "kl": ("kl_natural", "kl_replayed")}.items():
        found = interval(1 - seeds[left] / seeds[whole])
        resampled = 1 - drawn[:, columns.index(left)] / drawn[:, columns.index(whole)]
        low, high = np.quantile(resampled, (0.025, 0.975))
        result |= {f"{name}_removed": found.mean, f"{name}_low": found.low, f"{name}_high": found.high,
                   f"{name}_pooled": 1 - total[left] / total[whole], f"{name}_by_prompt": f"[{low:.2f}, {high:.2f}]"}
    return result


@plots.styled
def draw_ratio_variance(table: pd.DataFrame, scaling: pd.DataFrame, names: dict[str, str]) -> Figure:
    """What replay removes by mini-batch, and how flips and drift grow with the step."""
    figure, axes = plots.new_figure(3, "What do changed routes do to importance ratios?", width=15)
    for ax, name, title in zip(axes, ("variance", "kl"), ("Mean square of log r", "Exact KL per token"), strict=False):
        for i, (rate, rows) in enumerate(table.groupby("rate")):
            share, low, high = (rows[c] for c in (f"{name}_removed", f"{name}_low", f"{name}_high"))
            ax.errorbar(rows["update"] + 0.12 * (i - 1), share, [share - low, high - share], color=plots.COLOURS[i],
                        marker="o", capsize=3, linewidth=1.4, label=f"learning rate {rate:g}")
        ax.axhline(0, color="black", linewidth=1)
        ax.set(title=f"{title}: share that replay removes", xlabel="mini-batch index (the first is 0)", ylim=(None, 1))
    axes[0].set_ylabel("1 − replayed / natural")
    axes[0].legend(loc="lower right")
    for i, name in enumerate(("slot_change", "jj", "rr")):
        mean = scaling[scaling[name] > 0].groupby("alpha")[name].mean()
        style = {"color": plots.COLOURS[i + 3]}
        axes[2].plot(mean.index, mean, marker="o", label=names[name], **style)
        for _, run in scaling.groupby(["seed", "factors"]):
            axes[2].plot(run["alpha"], run[name].where(run[name] > 0), alpha=0.3, linewidth=0.8, **style)
    axes[2].set(title="Between θ and θ + α·u", xlabel="α (1: one step of eight updates)", xscale="log", yscale="log")
    axes[2].legend(loc="lower right")
    note = (f"mean over n = {scaling['seed'].nunique()} seeds; whiskers: 95% Student t interval; "
            f"at least {int(table['tokens'].min()):,} tokens a point; thin lines: each run")
    return plots.finish(figure, axes, note, legend=False)


# ---------------------------------------------------------------------- gradient quality
def gradient_quality() -> None:
    """The cosine of one mini-batch at j = 8, and all measures by j."""
    table = own_table("gradient_quality", "gradients")
    print(f"Attenuation by noise in the reference: at least {table['attenuation'].min():.2f} (below .7 is void)")
    for name in ("cosine", "bias", "variance"):
        first = table[table["update"] == 1].pivot(index=["seed", "step"], columns="compared", values=name)
        print(f"j = 1: largest difference of {name} between arms {np.ptp(first.to_numpy(), axis=1).max():.1e}")
    void = table.loc[~(table["attenuation"] >= 0.7), "seed"]
    stops = table[~table["seed"].isin(void)].groupby(["seed", "update", "compared"])
    means = stops[["cosine", "bias", "variance"]].agg(lambda both: both.mean(skipna=False)).reset_index()
    for name in ("cosine", "bias", "variance"):  # a mini-batch that is clipped whole has no cosine
        print(f"{name}, mean of both stops:")
        for update in (1, 2, 4, 8):
            rows = means[means["update"] == update].pivot(index="seed", columns="compared", values=name)
            gaps = [f"{a} − grpo {differences(rows, a, 'grpo', 0.975)}" for a in ("grpo-replay", "gspo")]
            print(f"  j = {update}: " + ", ".join(f"{a} {interval(rows[a])}" for a in rows) + "; " + ", ".join(gaps)
                  + f" (n = {len(rows.dropna())})")
    plots.save(draw_gradient_quality(means), RESULTS / "gradient_quality" / "figures", "gradient_quality")


@plots.styled
def draw_gradient_quality(means: pd.DataFrame) -> Figure:
    """Cosine, bias and variance of the arms' gradients by mini-batch index."""
    arms = ["grpo", "grpo-replay", "gspo", "gspo-replay"]
    panels = {"cosine": "Cosine of one mini-batch", "bias": "Bias², relative", "variance": "Variance, relative"}
    figure, axes = plots.new_figure(3, "How good are gradients on stale mini-batches, against 4,096 fresh responses?")
    for ax, (name, title) in zip(axes, panels.items(), strict=True):
        note = plots.curves(ax, means.rename(columns={"compared": "arm"}), name, "update", arms, marker="o")
        ax.set(title=title, xlabel="mini-batch index j")
    return plots.finish(figure, axes, note)


ANSWERS: dict[str, Sequence[Callable[[], None]]] = {
    "volatility_dial": (volatility_dial_verdicts.main,),
    "volatility_controls": (volatility_controls_verdicts.main,),
    "stabilisers": (stabilisers_verdicts.main,),
    "learning_rates": (learning_rates, early_warning.main),
    "expert_volatility": (expert_volatility,),
    "ratio_variance": (ratio_variance,),
    "staleness": (staleness,),
    "why_gspo": (why_gspo,),
    "placebos": (placebos,),
    "controls": (controls,),
    "gradient_quality": (gradient_quality,),
    "flip_effects": (flip_effects_verdicts.main,),
}
"""What is made from the tables of each study."""


def main(names: Sequence[str]) -> None:
    for name, answers in ANSWERS.items():
        if (name in names or not names) and (RESULTS / name).exists():
            print(f"\n# {name}")
            for answer in answers:
                answer()


if __name__ == "__main__":
    main(sys.argv[1:])
