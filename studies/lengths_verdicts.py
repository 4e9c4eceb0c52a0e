"""What the declared rule of lengths says, from its tables, and its figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from per_seed import RESULTS, own_table, slopes

from moe_rl.results import plots
from moe_rl.results.stats import Interval, geometric, interval

LENGTHS = (13, 40, 120)
EQUAL = ("responses", "tokens")
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
    """The questions, or why the study is void."""
    lines = [f"void: an objective is {apart:.1e} of a norm apart from GRPO where every ratio is 1"
             for apart in [gradients["apart"].max()] if not apart <= 1e-3]
    if (fewest := ratios["response_tokens"] / ratios["length"]).min() < 0.9:
        lines.append(f"void: responses have {fewest.min():.4f} of their length, less than .9, in "
                     f"{(fewest < 0.9).sum()} of {len(fewest)} cells of all seeds")
    if lines:
        return lines
    here = at(ratios, "responses").pivot(index="seed", columns="length", values=["token_var", "sequence_var"])
    for name, values in {"variance of token log-ratios": here["token_var"],
                         "T·Var(log s)/Var(log w)": here["sequence_var"] / here["token_var"] * LENGTHS}.items():
        lines.append(_said(f"{name}, equal responses", slope(np.log(values)), "larger", "smaller"))
    for equal in EQUAL:
        lines += [_said(f"{name}, equal {equal}", slope(logs_of(at(gradients, equal), a, b)), above, below)
                  for name, (a, b, above, below) in QUESTIONS.items()]
    return lines


def at(table: pd.DataFrame, equal: str) -> pd.DataFrame:
    """The rows of the three lengths at equal responses, or at equal tokens, per update."""
    return table[table["equal"].isin([equal, "both"])]


def logs_of(table: pd.DataFrame, a: str, b: str) -> pd.DataFrame:
    """By seed and length, the log of the variance of one objective over that of another."""
    logs = np.log(table.pivot(index="seed", columns=["compared", "length"], values="variance").astype(float))
    return (logs[a] - logs[b]).dropna()


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
        "token_var": "Var(log w), tokens", "sequence_var": "Var(log s), sequences", "times": "T·Var(log s)/Var(log w)",
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
