"""What the declared rule of flip_effects says, from its tables; what the law would mean elsewhere; and a figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from flip_effects import WITHIN, study
from matplotlib.figure import Figure

from moe_rl.results import plots
from moe_rl.results.stats import geometric, interval

FOLDER = Path(__file__).parent / "results" / study.name
KEYS = ["factors", "seed", "alpha"]
FEWEST = 10
"""Swaps in a bin that a slope looks at."""
BEYOND = 100
"""A spread of logit differences that no router has."""
LAYERS, TOP_K, JUMP = 48, 8, 0.24
"""Of the published model; and by how much of its norm a flip moves a block's output, as measured on OLMoE-1B-7B (64
experts, top-8) and Qwen1.5-MoE by "How Torn Is a Trained MoE?" (Z. Zhang, 2026)."""


def main() -> None:
    effects, law, moves, single = (table(name) for name in ("effects", "law", "moves", "single"))
    noise = single[["noise_self_replay", "noise_other_rows"]].max()
    print("Largest change of a log-prob without a swap: self-replay {:.2g}, in other rows {:.2g}".format(*noise))
    stuck = law[(law["alpha"] == 1) & (law["sigma"] > BEYOND)].groupby("factors").size()
    print("Sites at which no spread of margins flips as many slots as the step did: "
          + (", ".join(f"{n} of {cell}" for cell, n in stuck.items()) or "none"))
    one_flip(law, moves)
    slopes(effects)
    elasticities(table("flips"))
    runs = predictions(law, moves)
    for alpha, rows in runs.groupby("alpha"):
        print(f"Law, α = {alpha:g}: mean J², predicted / measured from margins, and with the other cells' c")
        for cell, here in rows.groupby("factors", sort=False):
            print(f"  {cell}: 10³ J² {geometric(1e3 * here['jj'])}; {said(here['predicted'] / here['jj'])}; "
                  f"{said(here['transported'] / here['jj'])}")
    whole = runs[runs["alpha"] == 1]
    additivity(single, whole)
    extrapolation(law, whole)
    plots.save(draw(effects, whole), FOLDER / "figures", study.name)


def table(name: str) -> pd.DataFrame:
    """A table that the trainer wrote, in float64, cells in the order of the declaration."""
    found = pd.read_parquet(FOLDER / f"{name}.parquet")
    found = found.astype({c: "float64" for c in found.select_dtypes("float32")})
    order = [cell for cell in study.cells if cell in set(found["factors"])]
    return found.sort_values("factors", key=lambda cells: cells.map(order.index), kind="stable")


def said(ratios: pd.Series) -> str:
    """A geometric mean over seeds with its interval, and what the rule says of it."""
    found = geometric(ratios)
    if found.low >= 1 / WITHIN and found.high <= WITHIN:
        verdict = "holds"
    elif found.high < 1 / WITHIN or found.low > WITHIN:
        verdict = "fails"
    else:
        verdict = "holds at the mean" if 1 / WITHIN <= found.mean <= WITHIN else "fails at the mean"
    return f"{found} {verdict}"


# ---------------------------------------------------------------------- what one flip does
def per_flip(law: pd.DataFrame) -> pd.DataFrame:
    """A row per run and α: means over the flips of a step, sites weighed by how many they have."""
    means = ["gate", "distance2", "x2", "moved2", "jump2", "block2", "own2", "total2"]
    sums = law[means].mul(law["slots"], axis=0).assign(slots=law["slots"], pairs=law["pairs"], in_response=law["slots"]
                                                       * law["in_response"])
    found = sums.groupby([law[k] for k in KEYS], sort=False).sum()
    found[means] = found[means].div(found["slots"], axis=0)
    found["own2"] *= found["slots"] / found["in_response"]  # it is 0 where the token is the prompt's
    return found.assign(flips=found["slots"] / law.groupby(KEYS, sort=False)["tokens"].first()).reset_index()


def one_flip(law: pd.DataFrame, moves: pd.DataFrame) -> None:
    """Sizes of a flip at flipping margins, cell by cell, and what u does."""
    print("A flip of a step: gate moved; relative distance of the experts; x; of its block's output; own token, nats "
          "(roots of mean squares but for the gate); Σ δ² over the response / δ² of the own token. The step: flips per "
          "response token; 10³ mean square of log-ratios and the share that replay removes")
    flips, whole = per_flip(law), moves[moves["alpha"] == 1]
    for cell, here in flips[flips["alpha"] == 1].groupby("factors", sort=False):
        roots = ", ".join(str(interval(np.sqrt(here[c]))) for c in ("distance2", "x2", "jump2", "own2"))
        step = whole[whole["factors"] == cell]
        print(f"  {cell}: {interval(here['gate'])}, {roots}; {geometric(here['total2'] / here['own2'])}; "
              f"{interval(here['flips'])}; {geometric(1e3 * step['dd'])}, {interval(1 - step['rr'] / step['dd'])}")


def slopes(effects: pd.DataFrame) -> None:
    """Slope of log mean δ² over log x, by kind; c by site; and what random swaps do at equal displacement."""
    kinds = {"runner-up": effects[effects["kind"] != "random"], "random": effects[effects["kind"] == "random"]}
    for kind, rows in kinds.items():
        found = {cell: here.groupby("seed")[list(here)].apply(log_slope)
                 for cell, here in rows.groupby("factors", sort=False)}
        per_cell = [f"{cell} {interval(of) if of.notna().all() else 'too few swaps'}" for cell, of in found.items()]
        print(f"Log-log slope of mean δ² over x, sites apart, {kind}: {'; '.join(per_cell)}; all "
              f"{interval([rows[rows['seed'] == s].groupby('factors').apply(log_slope).mean() for s in seeds(rows)])}")
    print("c = Σ δ² / Σ (relative displacement)², nats²: runner-up, near; random; their ratio; by site, near")
    for cell, here in effects.groupby("factors", sort=False):
        by_kind = here.groupby(["seed", "kind"])[["total2", "moved2"]].sum()
        c = (by_kind["total2"] / by_kind["moved2"]).unstack()
        near = here[here["kind"] == "near"].groupby(["site", "seed"])[["total2", "moved2"]].sum()
        sites = np.exp(np.log(near["total2"] / near["moved2"]).groupby("site").mean())
        print(f"  {cell}: {geometric(c['near'])}; {geometric(c['random'])}; {geometric(c['random'] / c['near'])}; "
              + ", ".join(f"{x:.2g}" for x in sites))


def elasticities(flips: pd.DataFrame) -> None:
    """By how many per cent |δ| of the own token grows with one per cent of what it may depend on, all at once."""
    found = [powers(rows) for _, rows in flips[flips["kind"] != "random"].groupby("seed")]
    named = {name: interval([of[name] for of in found]) for name in found[0]}
    print("Exploratory, log |δ| of the own token, least squares with an intercept per cell, runner-up swaps: "
          + ", ".join(f"{name} {value}" for name, value in named.items()))


def powers(flips: pd.DataFrame) -> dict[str, float]:
    """Least squares of log |δ| of the own token over the logs of gate, distance and 1 − p of that token, over the
    margin and over the depth, 0 to 1; an intercept per cell. Swaps at prompt tokens and without effect are left out."""
    kept = flips[(flips["in_response"] > 0) & (flips["own"] != 0)]
    depth = kept["site"] / kept.groupby("factors")["site"].transform("max")
    x = pd.DataFrame({"gate": np.log(kept["gate"]), "distance": np.log(kept["distance"]),
                      "1 − p": np.log(-np.expm1(kept["logprob"].clip(upper=-1e-6))), "margin": kept["margin"],
                      "depth": depth})
    y = np.log(kept["own"].abs())
    x, y = (v - v.groupby(kept["factors"]).transform("mean") for v in (x, y))
    return dict(zip(x, np.linalg.lstsq(x.to_numpy(), y.to_numpy(), rcond=None)[0].tolist(), strict=True))


def seeds(rows: pd.DataFrame) -> list[int]:
    return sorted(rows["seed"].unique())


def log_slope(rows: pd.DataFrame) -> float:
    """Least squares of log(Σ δ² / n) over log √(Σ x² / n), bins weighed by n, an intercept per site. NaN where no site
    has two bins of enough swaps."""
    bins = rows.groupby(["site", "bin"])[["n", "total2", "x2"]].sum().reset_index()
    bins = bins[(bins["n"] >= FEWEST) & (bins["total2"] > 0)]
    x, y = np.log(bins["x2"] / bins["n"]) / 2, np.log(bins["total2"] / bins["n"])
    mean = {name: (v * bins["n"]).groupby(bins["site"]).sum() / bins["n"].groupby(bins["site"]).sum()
            for name, v in (("x", x), ("y", y))}
    x, y = (v - bins["site"].map(mean[name]) for name, v in (("x", x), ("y", y)))
    spread = (bins["n"] * x * x).sum()
    return float((bins["n"] * x * y).sum() / spread) if spread else np.nan


# ---------------------------------------------------------------------- the law
def predictions(law: pd.DataFrame, moves: pd.DataFrame) -> pd.DataFrame:
    """A row per run and α with the measured mean J² per response token and two predictions: `predicted`, flips × E[δ²]
    of the run's own swaps, and `transported`, flips × E[x²] × c, summed over thirds of the depth, c of each the
    geometric mean of the other cells' (and of their seeds)."""
    runs = per_flip(law).merge(moves[[*KEYS, "dd", "rr", "jj"]], on=KEYS)
    parts = by_third(law)
    others = {(alpha, cell): known.drop(cell, level="factors").groupby("third").mean()
              for alpha, known in np.log(parts["c"]).groupby("alpha") for cell in known.index.unique("factors")}
    parts["transported"] = [x * np.exp(others[alpha, cell].get(third, np.nan))
                            for (cell, _, alpha, third), x in parts["x2"].items()]
    return runs.assign(predicted=runs["flips"] * runs["total2"]).merge(
        parts.groupby(KEYS)["transported"].sum(min_count=1).reset_index(), on=KEYS)


def by_third(law: pd.DataFrame) -> pd.DataFrame:
    """Flips, Σ δ² and Σ x² of all flips per response token, and c = Σ δ² / Σ x², by run, α and third of the depth."""
    depth = law.groupby(KEYS)["site"].transform("max") + 1
    sums = pd.DataFrame({name: law["slots"] * law[name] / law["tokens"] for name in ("total2", "x2")})
    sums["flips"] = law["slots"] / law["tokens"]
    found = sums.groupby([*(law[k] for k in KEYS), (3 * law["site"] // depth).astype(int).rename("third")]).sum()
    return found.assign(c=(found["total2"] / found["x2"]).where(found["total2"] > 0))


def additivity(single: pd.DataFrame, whole: pd.DataFrame) -> None:
    """Whether single flips at θ + u add up to J of the same tokens, and are as large as margins make expected: as they
    are, and relative to J², of which these few responses may have more or less than the whole sample."""
    print("Flips of the step one by one, at θ + u: Σ δ² / Σ J²; Σ over tokens of (Σ δ)² / Σ J²; correlation of Σ δ "
          "and J; mean δ² of such a flip / E[δ²] from margins; the same, each relative to the J² of its own responses")
    whole = whole[["factors", "seed", "total2", "predicted", "jj"]]
    for cell, here in single.merge(whole).groupby("factors", sort=False):
        squares, summed = here["flips_squares"] / here["j_squares"], here["sum_squares"] / here["j_squares"]
        correlation = here["product"] / np.sqrt(here["sum_squares"] * here["j_squares"])
        print(f"  {cell}: {geometric(squares)}; {geometric(summed)}; {interval(correlation)}; "
              f"{geometric(here['flips_squares'] / here['flips'] / here['total2'])}; "
              f"{geometric(squares / (here['predicted'] / here['jj']))} ({here['flips'].sum():.0f} flips)")


def extrapolation(law: pd.DataFrame, runs: pd.DataFrame) -> None:
    """EXTRAPOLATION: the law at the published shape, with a flip's jump taken from trained models and from the
    fine-grained cell.

    Assumed: our c of each third of the depth (few response tokens, one task, all cells alike), flips that are
    independent, as many and of an equal jump in every layer, δ² that grows with x² (it was found to grow faster, so
    that smaller x would do less); and a stream to which attention and MoE
    blocks add orthogonal steps of equal norm, so that (block / stream)² of layer l is 1 / 2l.
    """
    parts = by_third(law[law["alpha"] == 1])
    c = np.exp(np.log(parts["c"]).groupby(["seed", "third"]).mean().unstack())
    layers = np.arange(LAYERS)
    per_jump = geometric((c.to_numpy()[:, 3 * layers // LAYERS] / (2 * (layers + 1))).mean(1))
    jumps = {f"a trained model's jump {JUMP:g}": JUMP**2}
    fine = runs[runs["factors"].str.contains("k=8")]
    if len(fine):
        jumps[f"the fine-grained cell's jump {np.sqrt(fine['jump2'].mean()):.2g}"] = fine["jump2"].mean()
    print(f"EXTRAPOLATION to {LAYERS} layers, top-{TOP_K}; c by third of the depth: "
          + ", ".join(str(geometric(c[third])) for third in c))
    for name, jump2 in jumps.items():
        for what, flips in {"10 % of slots": 0.1 * LAYERS * TOP_K, "10 % of routers, a slot each": 0.1 * LAYERS,
                            "3.3 % of slots": 0.033 * LAYERS * TOP_K}.items():
            mean, low, high = (flips * jump2 * x for x in (per_jump.mean, per_jump.low, per_jump.high))
            print(f"  {what}, {flips:.1f} flips per token, {name}: mean J² {mean:.2g} [{low:.2g}, {high:.2g}], "
                  f"root {np.sqrt(mean):.2g}")


# ---------------------------------------------------------------------- the figure
@plots.styled
def draw(effects: pd.DataFrame, whole: pd.DataFrame) -> Figure:
    """Effect of a swap over gate moved × distance, and what the law predicts against what is measured, cell by cell."""
    figure, axes = plots.new_figure(2, "What does one flip do?", width=12)
    cells = list(whole["factors"].unique())
    runner_up = effects[effects["kind"] != "random"]
    for i, cell in enumerate(cells):
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        bins = runner_up[runner_up["factors"] == cell].groupby("bin")[["n", "x2", "total2"]].sum()
        bins = bins[bins["n"] >= FEWEST]
        axes[0].plot(np.sqrt(bins["x2"] / bins["n"]), bins["total2"] / bins["n"], "o-", color=colour, label=cell,
                     linewidth=1.2, markersize=4)
        here = whole[whole["factors"] == cell]
        axes[1].plot(here["jj"], here["predicted"], "o", color=colour, markersize=5)
        axes[1].plot(here["jj"], here["transported"], "x", color=colour, markersize=5)
    ends = np.array(axes[0].get_xlim()).clip(min=1e-3)
    axes[0].plot(ends, (whole["total2"] / whole["x2"]).median() * ends**2, ":", color="#666666", label="slope 2")
    axes[0].set(title="One swap, weakest chosen expert → runner-up", xscale="log", yscale="log",
                xlabel="x = gate moved × relative distance of the experts", ylabel="mean Σ δ² over the response, nats²")
    axes[0].legend(loc="upper left")
    both = np.log10(whole[["jj", "predicted", "transported"]])
    span = 10.0 ** np.array([np.floor(both.min().min()), np.ceil(both.max().max())])
    axes[1].plot(span, span, color="black", linewidth=1)
    axes[1].fill_between(span, span / WITHIN, span * WITHIN, color="#666666", alpha=0.15, linewidth=0)
    axes[1].set(title="J² of a step: dots from margins, crosses with other cells' c", xscale="log", yscale="log",
                xlabel="measured mean J² per token, nats²", ylabel="predicted")
    note = f"n = {whole['seed'].nunique()} seeds, each drawn on the right; band: within a factor {WITHIN:g}"
    return plots.finish(figure, axes, note, legend=False)
