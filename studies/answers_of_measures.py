"""What studies of volatility, of ratios and of gradients are asked; printed by `answers.py`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from per_seed import RESULTS, differences, own_table, stored

from moe_rl.metrics.attribution import AttributionSums
from moe_rl.metrics.rounding import number
from moe_rl.results import plots
from moe_rl.results.stats import geometric, interval
from moe_rl.results.summary import metric, per_run, settings_of
from moe_rl.storage.frames import Frames

RATES = ("#9ECAE1", "#4292C6", "#084594")
"""Colours of learning rates, of one arm: shades of its own."""
CLAIMED = {"expert_change_rate": (1, 12), "rr": (2, 1 / 12)}
"""Log-log slopes that ratio_variance expects, and how far from the mean they are drawn."""


# ---------------------------------------------------------------------- expert volatility
def expert_volatility() -> None:
    """Every definition in the base cell, and the endpoint's trends as ratios to it."""
    frames = stored("expert_volatility")
    base = frames.cell("base")
    updates = base["updates"][base["updates"]["step"] > 20]
    print("Base cell, steps 21–40, response tokens:")
    for name in ("expert_change_rate", "any_change_rate", "any_layer_change", "layers_changed", "jaccard_distance"):
        one = updates.groupby("seed")[name].mean()
        print(f"  {name}: one update {interval(one)}, one step {interval(per_run(base, metric(name)))}")
    for update in (2, 8):
        fresh = updates[updates["update"] == update]
        print(f"  expert_change_rate, tokens not yet trained on, before update {update}: "
              f"{interval(fresh.groupby('seed')['fresh_expert_change_rate'].mean())}")
    for name in ("noise_floor_expert_change_rate", "noise_floor_any_change_rate"):
        print(f"  {name}: {interval(per_run(base, metric(name)))}")
    total = own_table("expert_volatility", "cumulative")
    for of, rows in total[total["factors"] == "base"].groupby("responses_of"):
        shares = [
            f"{name} {interval(rows[name])}" for name in ("expert_change_rate", "any_change_rate", "any_layer_change")
        ]
        print(f"  from the cold start to step 40, responses of the {of}: {', '.join(shares)}")
    print("Slots changed in one step; as times the base, paired by seed (geometric mean); from cold start to end:")
    reference = per_run(base, metric("expert_change_rate")).xs("grpo")
    for cell in frames.cells:
        values = per_run(frames.cell(cell), metric("expert_change_rate")).xs("grpo")
        sets = per_run(frames.cell(cell), metric("any_change_rate")).xs("grpo")
        tokens = per_run(frames.cell(cell), metric("any_layer_change")).xs("grpo")
        times = geometric(values / reference) if cell != "base" else "1"
        end = total[(total["factors"] == cell) & (total["responses_of"] == "end")]["expert_change_rate"]
        print(f"  {cell}: {interval(values)}, times {times}; sets {sets.mean():.3f}, tokens {tokens.mean():.3f}; "
              f"cumulative {interval(end)}")
    sites = base["layers"][base["layers"]["step"] > 20].groupby("site")["expert_change_rate"].mean()
    print("  per site, base: " + ", ".join(f"{share:.3f}" for share in sites))
    plots.save(draw_expert_volatility(frames), RESULTS / "expert_volatility" / "figures", "expert_volatility")


@plots.styled
def draw_expert_volatility(frames: Frames) -> Figure:
    """Routes changed in one step under three definitions, cell by cell."""
    names = {"expert_change_rate": "expert slots, 1 − |S ∩ S′| / k", "any_change_rate": "routers, S ≠ S′",
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
    print(table.to_string(index=False, float_format=lambda x: number(x, ".4f")))
    for row in table[table["update"] == table["update"].max()].to_dict("records"):
        shares = [what + " {} [{}, {}]".format(*(number(row[f"{name}_{x}"], ".2f") for x in ("removed", "low", "high")))
                  for name, what in (("variance", "mean square"), ("kl", "KL"))]
        print(f"  removed at the last mini-batch, learning rate {row['rate']:g}: {', '.join(shares)}")
    names = {"expert_change_rate": "expert slots changed", "rr": "mean R², replayed", "jj": "mean J², route changes",
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
        low, high = (number(x, ".2f") for x in np.quantile(resampled, (0.025, 0.975)))
        result |= {f"{name}_removed": found.mean, f"{name}_low": found.low, f"{name}_high": found.high,
                   f"{name}_pooled": 1 - total[left] / total[whole], f"{name}_by_prompt": f"[{low}, {high}]"}
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
    for i, name in enumerate(("expert_change_rate", "jj", "rr")):
        mean = scaling[scaling[name] > 0].groupby("alpha")[name].mean()
        style = {"color": plots.COLOURS[i + 7]}
        axes[2].plot(mean.index, mean, marker="o", label=names[name], **style)
        if name in CLAIMED:
            slope, aside = CLAIMED[name]
            slope_guide(axes[2], slope, mean.index, aside * mean.iloc[-1], above=aside > 1)
        for _, run in scaling.groupby(["seed", "factors"]):
            axes[2].plot(run["alpha"], run[name].where(run[name] > 0), alpha=0.3, linewidth=0.8, **style)
    axes[2].set(title="Between θ and θ + α·u", xlabel="α (1: one step of eight updates)", xscale="log", yscale="log")
    axes[2].legend(loc="lower right")
    note = (f"mean over n = {scaling['seed'].nunique()} seeds; whiskers: 95% Student t interval; "
            f"at least {int(table['tokens'].min()):,} tokens a point; thin lines: each run")
    return plots.finish(figure, axes, note, legend=False)


def slope_guide(ax: Axes, slope: float, x: pd.Index, y: float, *, above: bool) -> None:
    """On log–log axes, a line of that slope over `x`, through `y` at its end, its name above or below it."""
    at = x.to_numpy(dtype=float)
    line = y * (at / at[-1]) ** slope
    ax.plot(at, line, color="black", linewidth=1.2, linestyle=(0, (4, 3)), zorder=5, gid=f"slope {slope:g}")
    middle = len(at) // 2
    ax.annotate(f"slope {slope:g}", (at[middle], line[middle]), fontsize=9, xytext=(-4, 6) if above else (4, -12),
                textcoords="offset points", ha="right" if above else "left", zorder=5)


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
