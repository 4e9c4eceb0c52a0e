"""What the declared rule of lengths says, from its tables, and its figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
from lengths import study
from matplotlib.figure import Figure
from per_seed import RESULTS, own_table, slopes

from moe_rl.results import plots
from moe_rl.results.stats import Interval, geometric, interval

LENGTHS = (13, 40, 120)
EQUAL = ("responses", "tokens")
CELLS = [*((n, equal) for equal in EQUAL for n in LENGTHS[:-1]), (LENGTHS[-1], "both")]
KEYS = ["seed", "length", "equal"]
OBJECTIVES = ("grpo", "gspo", "token-none", "sequence-none", "fresh")
QUESTIONS = {
    "what GRPO's ratios add": ("grpo", "fresh", "more", "less"),
    "GSPO's advantage": ("grpo", "gspo", "larger", "smaller"),
}
"""(variance, over which other one, what a slope above 0 says of longer responses, and one below)."""


def main() -> None:
    """What the rule says, and every number beside it."""
    gradients, ratios = own_table("lengths", "lengths"), own_table("lengths", "ratios")
    print(f"First update, largest distance from GRPO's gradient, in its norm: {gradients['apart'].max():.1e}")
    share = ratios["response_tokens"] / ratios["length"]
    print(f"Responses have {share.min():.3f} to {share.max():.3f} of their length")
    for equal in EQUAL:
        print(f"Equal {equal} per update, by length:")
        spreads(at(ratios, equal))
        table = at(gradients, equal)
        for name in OBJECTIVES:
            line(f"{name}: variance", table[table["compared"] == name], "variance", geometric)
        for a, b in (("grpo", "gspo"), ("grpo", "fresh"), ("gspo", "fresh"), ("token-none", "sequence-none"),
                     ("token-none", "fresh"), ("sequence-none", "fresh")):
            logs = logs_of(table, a, b)
            print(f"  {a} / {b}, variance: " + ", ".join(f"{n} {geometric(np.exp(logs[n]))}" for n in LENGTHS)
                  + f"; slope of its log {slope(logs)}")
    plots.save(draw(gradients, ratios), RESULTS / "lengths" / "figures", "lengths")
    print("\n".join(f"Verdict: {sentence}" for sentence in verdict(gradients, ratios)))


def verdict(gradients: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    """The questions, or why the study is void. Of the declared ones T·Var(log s)/Var(log w) is void: it takes responses
    that end early for tokens that move together."""
    if lines := void(gradients, ratios):
        return lines
    spread = np.log(at(ratios, "responses").pivot(index="seed", columns="length", values="token_var"))
    lines = [_said("variance of token log-ratios, equal responses", slope(spread), "larger", "smaller"),
             "T·Var(log s)/Var(log w): void, it is above 1 of independent tokens where responses end early"]
    for equal in EQUAL:
        lines += [_said(f"{name}, equal {equal}", slope(logs_of(at(gradients, equal), a, b)), above, below)
                  for name, (a, b, above, below) in QUESTIONS.items()]
    return lines


def void(gradients: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    """What makes the study void: missing rows, objectives that part before the first update, short responses."""
    cells = [(seed, *cell) for seed in study.seeds for cell in CELLS]
    wanted = {"ratios": set(cells), "gradients": {(*cell, name) for cell in cells for name in OBJECTIVES}}
    found = {"ratios": set(ratios.dropna()[KEYS].itertuples(index=False, name=None)),
             "gradients": set(gradients.dropna()[[*KEYS, "compared"]].itertuples(index=False, name=None))}
    lines = [f"void: {name} lack {len(rows - found[name])} of {len(rows)} rows" for name, rows in wanted.items()
             if rows != found[name]]
    if (apart := gradients["apart"].max()) > 1e-3:
        lines.append(f"void: an objective is {apart:.1e} of a norm apart from GRPO where every ratio is 1")
    if (fewest := ratios["response_tokens"] / ratios["length"]).min() < 0.9:
        lines.append(f"void: responses have {fewest.min():.4f} of their length, less than .9, in "
                     f"{(fewest < 0.9).sum()} of {len(fewest)} cells of all seeds")
    return lines


def at(table: pd.DataFrame, equal: str) -> pd.DataFrame:
    """The rows of the three lengths at equal responses, or at equal tokens, per update."""
    return table[table["equal"].isin([equal, "both"])]


def logs_of(table: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """By seed and length, the log of the variance of one objective over that of another."""
    logs = np.log(table.pivot(index="seed", columns=["compared", "length"], values="variance").astype(float))
    return logs[a] - logs[b]


def slope(logs: pd.DataFrame) -> Interval:
    """Of a log over the log of the length, over seeds."""
    return interval(slopes(logs[list(LENGTHS)], np.log(LENGTHS)))


def _said(what: str, found: Interval, above: str, below: str) -> str:
    word = (f"{above} with length, reproduced" if found.low > 0 else f"{below} with length, reversed" if found.high < 0
            else f"undetermined at n = {found.n}")
    return f"{what}: {word} (slope over log length {found})"


def spreads(ratios: pd.DataFrame) -> None:
    """How ratios spread: a quantity per line, by length."""
    ratios = ratios.assign(times=ratios["length"] * ratios["sequence_var"] / ratios["token_var"])
    for name, title in {
        "token_var": "Var(log w), tokens", "sequence_var": "Var(log s), sequences",
        "times": "T·Var(log s)/Var(log w), early ends included",
        "token_kurtosis": "kurtosis of log w",
    }.items():  # fmt: skip
        line(title, ratios, name, geometric)
    for name, title in {
        "token_ess": "token ESS of 208 tokens", "sequence_ess": "sequence ESS of 16 responses",
        "product_ess": "ESS of 16 products, without 1/|y|", "right": "share of right tokens",
        "without": "responses without an advantage",
    }.items():  # fmt: skip
        line(title, ratios, name, interval)


def line(title: str, rows: pd.DataFrame, name: str, mean) -> None:
    """A quantity by length; its slope where it is above 0."""
    table = rows.pivot(index="seed", columns="length", values=name).dropna()
    found = ", ".join(f"{n} {mean(table[n])}" for n in LENGTHS)
    print(f"  {title}: {found}" + (f"; slope of its log {slope(np.log(table))}" if mean is geometric else ""))


@plots.styled
def draw(gradients: pd.DataFrame, ratios: pd.DataFrame) -> Figure:
    """Variance of ratios, of gradients, and GSPO's advantage, over the length of responses."""
    figure, axes = plots.new_figure(3, "What longer responses do to ratios and to gradients", width=14)
    colours = {"GRPO": "grpo", "GSPO": "gspo", "ratios of 1": "fresh"}
    found = []
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlim=(10, 160), xlabel="response tokens", xticks=LENGTHS)
        ax.set_xticklabels(LENGTHS)
        ax.minorticks_off()
    for i, (equal, style) in enumerate(zip(EQUAL, ("-", "--"), strict=True)):
        table, aside = at(gradients, equal), 0.03 * i
        for name, title in (("token_var", "tokens"), ("sequence_var", "sequences")):
            found.append(plots.over(axes[0], at(ratios, equal).assign(value=lambda x, n=name: x[n]), "length",
                                    plots.COLOURS[name == "sequence_var"], f"{title}, equal {equal}", shift=aside,
                                    linestyle=style))
        for label, name in colours.items():
            rows = table[table["compared"] == name].assign(value=lambda x: x["variance"])
            found.append(plots.over(axes[1], rows, "length", plots.COLOURS[2 + [*colours].index(label)],
                                    f"{label}, equal {equal}", shift=aside, linestyle=style))
        times = np.exp(logs_of(table, "grpo", "gspo")).rename_axis(columns="length").stack().rename("value")
        found.append(plots.over(axes[2], times.reset_index(), "length", plots.COLOURS[5],
                                f"GRPO / GSPO, equal {equal}", shift=aside, linestyle=style))
    axes[0].set(title="Variance of log-ratios (nats²)")
    axes[1].set(title="Variance of mini-batch gradients")
    axes[2].set(title="GSPO's advantage in variance")
    axes[2].axhline(1, color="black", linewidth=1)
    for ax in axes:
        ax.legend(fontsize=7)
    return plots.finish(figure, axes, plots.note_of([b for b in found if b], "whisker", "dots"), legend=False)
