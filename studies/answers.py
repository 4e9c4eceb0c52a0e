"""What the declared rules ask beyond the tables of `moe-rl plot`: numbers for the studies' pages, and five figures.

    python studies/answers.py [study …]

reads `results/` and prints; without names, every study that is there. Intervals are over seeds unless a line says so.
`pages.py` keeps what is printed in the page of each study.
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
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy.stats import t
from why_gspo_losses import SHRINK

from moe_rl.metrics.attribution import AttributionSums
from moe_rl.results import plots
from moe_rl.results.factors import against, half_lost_points, settings_of
from moe_rl.results.stats import Interval, geometric, interval
from moe_rl.results.summary import MAIN, collapsed, metric, per_run
from moe_rl.results.verdict import verdict_of
from moe_rl.runs.frames import Frames, load_study
from moe_rl.study.declaration import read_declaration

RESULTS = Path(__file__).parent / "results"
RATES = ("#9ECAE1", "#4292C6", "#084594")
"""Colours of learning rates, of one arm: shades of its own."""
CLAIMED = {"slot_change": (1, 12), "rr": (2, 1 / 12)}
"""Log-log slopes that ratio_variance expects, and how far from the mean they are drawn."""


def differences(values: pd.DataFrame, a: str, b: str, confidence: float = 0.95) -> Interval:
    """a − b over the seeds (rows) both columns have."""
    return interval((values[a] - values[b]).dropna(), confidence)


def student(values: pd.Series, confidence: float = 0.95) -> Interval:
    """Mean ± t(n−1) · sd / √n, also where `interval` would resample."""
    half = t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return Interval(values.mean(), values.mean() - half, values.mean() + half, len(values), "Student t")


def own_table(study: str, name: str) -> pd.DataFrame:
    """A table that the study's own trainer wrote, in float64."""
    table = pd.read_parquet(RESULTS / study / f"{name}.parquet")
    return table.astype({c: "float64" for c in table.select_dtypes("float32")})


def slopes(values: pd.DataFrame, x: Sequence[float]) -> np.ndarray:
    """Least-squares slope of every row over x."""
    return np.polyfit(np.asarray(x, dtype=float), values.to_numpy(dtype=float).T, 1)[0]


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
    print("Learning rate, in 1e-4, at which half of the best reward is lost; ratios at 98.3 %:")
    for one in half_lost_points(frames, "optimizer.lr", MAIN, contrasts):
        for arm, rate in one.points.items():
            print(f"  {arm}: {1e4 * rate.mean:.1f} [{1e4 * rate.low:.1f}, {1e4 * rate.high:.1f}]")
        for pair, moved in one.shifts.items():
            print(f"  {' / '.join(pair)}: {moved.ratio}")
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


# ---------------------------------------------------------------------- clipping, and other engines
def clip_fraction() -> None:
    """How many times as many tokens GSPO clips, seed by seed: of those with an advantage, and of all as in Fig. 2."""
    frames = load_study(RESULTS / "clip_fraction")
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
    frames, matched = load_study(RESULTS / "engine_mismatch"), load_study(RESULTS / "engine_match")
    steps = frames["steps"][frames["steps"]["arm"] == "grpo"]
    print("GRPO, mean over a run's detailed steps, percent of routers and tokens, nats:")
    for name, times in (("engine_set_change", 100), ("engine_any_layer_change", 100), ("engine_kl_k3", 1)):
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
    steps = load_study(RESULTS / "engine_vllm")["steps"].sort_values("step")
    for arm, rows in steps.dropna(subset=["engine_kl_k3_natural"]).groupby("arm"):
        there, left = rows["engine_kl_k3_natural"], rows["engine_kl_k3_replayed"]
        print(f"  {arm}: removed of a run's KL {100 * (1 - left.sum() / there.sum()):.0f} percent; of single steps "
              f"{_listed(100 * (1 - left / there), '.1f')}; the largest holds {100 * there.max() / there.sum():.0f} "
              "percent of the run's")
    for name, times in (("engine_set_change", 100), ("engine_any_layer_change", 100), ("engine_kl_k3", 1)):
        means = times * steps.groupby("arm")[name].mean()
        print(f"  {name} (percent; nats): " + ", ".join(f"{arm} {x:.2g}" for arm, x in means.items()))


def _listed(values: pd.Series, form: str) -> str:
    return ", ".join(f"{x:{form}}" for x in values)


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
    colours = {cell: plots.COLOURS[0] if cell == "base" else plots.GREY for cell in frames.cells}
    for ax, (name, title) in zip(axes, names.items(), strict=True):
        values = {cell: per_run(frames.cell(cell), metric(name)) for cell in frames.cells}
        note = plots.rows_of(ax, values, colours, scale="logit")
        ax.axvline(0.1, color=plots.GREY, linewidth=1.2, linestyle=":")
        ax.set(title=title, xlim=(0, None))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
    for ax in axes[1:]:
        ax.set_yticklabels([])
    return plots.finish(figure, axes, f"steps 21–40; {note}; dotted line: 10 %", legend=False)


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
    for arm in values.columns.drop("grpo"):
        print(f"  {arm} − grpo: {differences(values, arm, 'grpo')}")
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
    plots.save(draw_why_gspo(rewards, frames), RESULTS / "why_gspo" / "figures", "why_gspo")


@plots.styled
def draw_why_gspo(rewards: pd.DataFrame, frames: Frames) -> Figure:
    """Reward of every arm, GRPO first, then the best first; and what each adds to GRPO's, within seeds."""
    arms = list(frames.runs["arm"].unique())
    declared = [arm["name"] for arm in read_declaration(RESULTS / "why_gspo")["arms"]]
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
    frames = load_study(RESULTS / "controls")
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
    slots = {cell: per_run(frames.cell(cell), metric("slot_change")).unstack(0) for cell in ("moe", "frozen-router")}
    for arm in ("grpo", "grpo-replay", "gspo"):
        print(f"  slots changed per step, percent, {arm}: live router {interval(100 * slots['moe'][arm])}, frozen "
              f"{interval(100 * slots['frozen-router'][arm])}, frozen − live "
              f"{interval(100 * (slots['frozen-router'][arm] - slots['moe'][arm]))}")
    plots.save(draw_controls(rewards, frames), RESULTS / "controls" / "figures", "controls")


@plots.styled
def draw_controls(rewards: Mapping[str, pd.DataFrame], frames: Frames) -> Figure:
    """Reward of GRPO and what replay and GSPO add to it, cell by cell; where all runs collapsed, that."""
    figure, axes = plots.new_figure(3, "Is it routing at all?", width=13)
    arms, lost = [arm["name"] for arm in read_declaration(RESULTS / "controls")["arms"]], collapsed(frames)
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
    for row in table[table["update"] == table["update"].max()].to_dict("records"):
        shares = [f"{what} {row[f'{name}_removed']:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"
                  for name, what in (("variance", "mean square"), ("kl", "KL"))]
        print(f"  removed at the last mini-batch, learning rate {row['rate']:g}: {', '.join(shares)}")
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
            ax.errorbar(rows["update"] + 0.12 * (i - 1), share, [share - low, high - share], color=RATES[i],
                        marker="o", capsize=3, linewidth=1.4, label=f"learning rate {rate:g}")
        ax.axhline(0, color="black", linewidth=1)
        ax.set(title=f"{title}: share that replay removes", xlabel="mini-batch index (the first is 0)", ylim=(None, 1))
    axes[0].set_ylabel("1 − replayed / natural")
    axes[0].legend(loc="lower right")
    for i, name in enumerate(("slot_change", "jj", "rr")):
        mean = scaling[scaling[name] > 0].groupby("alpha")[name].mean()
        style = {"color": plots.COLOURS[i + 7]}
        axes[2].plot(mean.index, mean, marker="o", label=names[name], **style)
        if name in CLAIMED:
            slope, aside = CLAIMED[name]
            plots.slope_guide(axes[2], slope, mean.index, aside * mean.iloc[-1], above=aside > 1)
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
    print("variance, geometric mean of both stops and of the seeds:")
    for update in (1, 8):
        here = table[(table["update"] == update) & ~table["seed"].isin(void)]
        logs = np.log(here.pivot(index=["seed", "step"], columns="compared", values="variance"))
        logs = logs.groupby("seed").mean()
        times = {arm: geometric(np.exp(logs[arm] - logs["grpo"]), 0.975) for arm in ("grpo-replay", "gspo")}
        print(f"  j = {update}: " + ", ".join(f"{arm} {geometric(np.exp(logs[arm]))}" for arm in logs) + "; "
              + ", ".join(f"{arm} / grpo {x}" for arm, x in times.items()))
    ends = means.pivot(index="seed", columns=["compared", "update"], values="cosine")["grpo"]
    print(f"GRPO's cosine, j = 8 − j = 1: {interval(ends[8] - ends[1])}; largest variance of one stop "
          f"{table['variance'].max():.0f}")
    for stop, rows in table[table["update"] == 8].groupby("step"):
        one = rows.pivot(index="seed", columns="compared", values="cosine")
        print(f"cosine at j = 8, stop at step {stop}: gspo − grpo {differences(one, 'gspo', 'grpo', 0.975)}")
    plots.save(draw_gradient_quality(means), RESULTS / "gradient_quality" / "figures", "gradient_quality")


@plots.styled
def draw_gradient_quality(means: pd.DataFrame) -> Figure:
    """Cosine, bias and variance of the arms' gradients by mini-batch index."""
    arms = ["grpo", "grpo-replay", "gspo", "gspo-replay"]
    panels = {"cosine": "Cosine of one mini-batch", "bias": "Bias², relative", "variance": "Variance, relative"}
    figure, axes = plots.new_figure(3, "How good are gradients on stale mini-batches, against 4,096 fresh responses?")
    for ax, (name, title) in zip(axes, panels.items(), strict=True):
        note = plots.curves(ax, means.rename(columns={"compared": "arm"}), name, "update", arms, marker="o",
                            scale="linear" if name == "cosine" else "log")
        ax.set(title=title, xlabel="mini-batch index j")
    return plots.finish(figure, axes, note)


ANSWERS: dict[str, Sequence[Callable[[], None]]] = {
    "volatility_dial": (volatility_dial_verdicts.main,),
    "volatility_controls": (volatility_controls_verdicts.main,),
    "stabilisers": (stabilisers_verdicts.main,),
    "clip_fraction": (clip_fraction,),
    "engine_mismatch": (engine_mismatch,),
    "engine_vllm": (engine_vllm,),
    "learning_rates": (learning_rates,),
    "early_warning": (early_warning.main,),
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
READS = {"early_warning": "learning_rates"}
"""Whose tables an analysis without runs of its own reads."""


def print_verdict(name: str) -> None:
    """What the rule of a study says, by the function that its declaration names."""
    frames, declared = load_study(RESULTS / name), read_declaration(RESULTS / name)
    for sentence in verdict_of(frames, declared):
        print(f"Verdict: {sentence}")


def main(names: Sequence[str]) -> None:
    for name, answers in ANSWERS.items():
        if (name in names or not names) and (RESULTS / READS.get(name, name)).exists():
            print(f"\n# {name}")
            for answer in answers:
                answer()
            print_verdict(name)


if __name__ == "__main__":
    main(sys.argv[1:])
