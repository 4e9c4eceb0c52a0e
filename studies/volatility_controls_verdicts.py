"""What the declared rule of volatility_controls says, from its tables and those of volatility_dial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from per_seed import stored
from volatility_controls import BESIDE_SIGMA, CONTRASTS, SIGMA, TWIN_SIGMA, study
from volatility_dial import noise
from volatility_dial_verdicts import ENDPOINTS, decide

from moe_rl.results import plots
from moe_rl.results.stats import interval, paired
from moe_rl.results.summary import metric, per_run
from moe_rl.storage.frames import Frames

FOLDER = Path(__file__).parent / "results" / study.name
HARM = (("applied_to=ratio", "none"), ("applied_to=gradient", "none"), ("twin", "twin-still"))
"""GRPO in a cell minus GRPO in another."""
FIRST_RATIO = 1e-4
"""How far from 1 a ratio of wrong replay's first mini-batch may be."""
ARMS = tuple(arm.name for arm in study.arms)
SHOWN = ("entropy", "token_ess", "token_kl_k3")


def main() -> None:
    frames, router_noise = stored(study.name), stored("volatility_dial")
    tables = {name: by_cell(frames, router_noise, name) for name in (*ENDPOINTS, *SHOWN)}
    matching(tables["token_kl_k3"])
    print(machinery(frames))
    print("Contrasts:")
    compare(tables, {f"{a} − {b}, {cell}": ((cell, a), ("dosed" if cell == "wrong-replay" else cell, b))
                     for cell, a, b in CONTRASTS})
    print("Harm:")
    compare(tables, {f"grpo, {there} − {here}": ((there, "grpo"), (here, "grpo")) for there, here in HARM})
    plots.save(draw(tables), FOLDER / "figures", study.name)
    for name, table in tables.items():
        means = "; ".join(f"{cell} " + ", ".join(f"{arm} {values.mean():.3g}" for arm, values in by.items())
                          for cell, by in table.items())
        print(f"{name}: {means}")


def by_cell(frames: Frames, router_noise: Frames, name: str) -> dict[str, dict[str, pd.Series]]:
    """Cell → arm → values by seed; `none` and `dosed` are volatility_dial's at σ = 0 and at SIGMA."""
    places = {"none": router_noise.cell(noise("weights", 0)), "dosed": router_noise.cell(noise("weights", SIGMA)),
              **{cell: frames.cell(cell) for cell in study.cells}}
    found = {}
    for cell, rows in places.items():
        values = per_run(rows, metric(name))
        found[cell] = {arm: values[arm] for arm in values.index.get_level_values(0).unique()}
    return found


def machinery(frames: Frames) -> str:
    """Whether in the first mini-batches under wrong replay both sides of the ratio used the same routes: else the cell
    says nothing. A step that did not measure it, or was not a number, does not hold."""
    first = frames.cell("wrong-replay")["steps"].query("step > 0")["first_update_log_ratio_max"]
    off = np.expm1(first.max(skipna=False) if len(first) else np.nan)
    verdict = "holds" if off <= FIRST_RATIO else "FAILS: what the cell wrong-replay says is void"
    return (f"Machinery: in first mini-batches under wrong replay ratios are 1 within {off:.2g}, and must be within "
            f"{FIRST_RATIO:g}: {verdict}")


def matching(kl: dict[str, dict[str, pd.Series]]) -> None:
    """Whether the doses of the twin and beside move the policy as far as the MoE's does."""
    target = kl["dosed"]["grpo"].mean()
    for cell, sigma in (("twin", TWIN_SIGMA), ("beside", BESIDE_SIGMA)):
        mean = kl[cell]["grpo"].mean()
        verdict = "matched" if abs(mean / target - 1) <= 0.25 else "NOT matched"
        print(f"KL k3 of GRPO, {cell} at σ = {sigma:g}: {interval(kl[cell]['grpo'])} against {target:.3g}: {verdict}")


@plots.styled
def draw(tables: dict[str, dict]) -> Figure:
    """Every difference of the rule within seeds, by endpoint: what the doses cost GRPO, and what the cures add."""
    pairs = {f"harm: {there}": ((there, "grpo"), (here, "grpo")) for there, here in HARM}
    pairs |= {f"{a}: {cell}": ((cell, a), ("dosed" if cell == "wrong-replay" else cell, b)) for cell, a, b in CONTRASTS}
    colours = dict.fromkeys(pairs, plots.GREY)
    colours |= {name: plots.colour_of(a, ARMS) for name in pairs for a in ARMS[1:] if name.startswith(f"{a}:")}
    figure, axes = plots.new_figure(len(ENDPOINTS), "What harms, and what do the cures act on?", width=14)
    for ax, endpoint in zip(axes, ENDPOINTS, strict=True):
        values = {name: tables[endpoint][c][a] - tables[endpoint][d][b] for name, ((c, a), (d, b)) in pairs.items()}
        note = plots.rows_of(ax, values, colours)
        ax.axvline(0, color="black", linewidth=1)
        ax.set(title=metric(endpoint).name, xlabel="minus GRPO, within seeds; harm: minus GRPO without a dose")
        ax.grid(axis="y", visible=False)
    return plots.finish(figure, axes, note, legend=False)


def compare(tables: dict[str, dict], pairs: dict[str, tuple[tuple[str, str], tuple[str, str]]]) -> None:
    """The declared rule over some differences, each of (cell, arm) minus (cell, arm), paired by seed."""
    decide(list(pairs), {name: [paired(*(tables[name][cell][arm].to_dict() for cell, arm in pair))
                                for pair in pairs.values()] for name in ENDPOINTS})
