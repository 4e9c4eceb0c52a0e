"""What `in_two_trainers` prints: expert change and ratios by update, in both trainers; and their figure."""

from __future__ import annotations

from matplotlib.figure import Figure
from per_seed import RESULTS, stored

from moe_rl.metrics.rounding import number
from moe_rl.results import plots
from moe_rl.storage.frames import Frames

NAME = "in_two_trainers"
TRAINERS = {"trainer=ours": "ours", "trainer=verl": "verl", "trainer=ours,split=prompts": "ours, whole groups"}
"""Cells, and whose runs are in them: the third cuts a step into mini-batches as verl does."""
LINES = {"trainer=ours": "-", "trainer=verl": "--", "trainer=ours,split=prompts": ":"}
COLUMNS = {"expert_change_rate": "Experts changed by one update", "token_ess": "ESS of token ratios"}
LOGGED = {"expert_change_rate": "step_expert_change_rate", "own_token_ess": "token_ess", "own_pull": "pull"}
"""Columns of steps, and the names below actor/routing/ in verl's log."""


def main() -> None:
    """A row per arm, trainer and quantity: the mean over the steps of the declared seed, update by update."""
    frames = stored(NAME)
    updates = frames["updates"][frames["updates"]["seed"] == 0]
    for column in (*COLUMNS, "token_log_ratio_var"):
        print(f"\n{column}, updates 1 to 4: means over all 20 steps; over the last 10")
        for (arm, cell), rows in updates.groupby(["arm", "factors"], sort=False):
            parts = (rows, rows[rows["step"] > 10])
            print(f"  {arm}, {TRAINERS[cell]}: " + "; ".join(
                ", ".join(number(x, ".4f") for x in part.groupby("update")[column].mean()) for part in parts))
    print("\ngradient norm; expert change of a whole step; seed by seed, means over the steps")
    steps = frames["steps"][frames["steps"]["step"] > 0]
    for (arm, cell), rows in steps.groupby(["arm", "factors"], sort=False):
        means = rows.groupby("seed")[["grad_norm", "expert_change_rate"]].mean()
        print(f"  {arm}, {TRAINERS[cell]}: {', '.join(number(x, '.2f') for x in means['grad_norm'])}; "
              f"{', '.join(number(x, '.4f') for x in means['expert_change_rate'])}")
    for name, figure in (("two_trainers", draw(frames)), ("verl_log", draw_log(frames))):
        plots.save(figure, RESULTS / NAME / "figures", name)


@plots.styled
def draw(frames: Frames) -> Figure:
    """Both quantities by update, mean over the steps: colours are arms, lines are trainers."""
    figure, axes = plots.new_figure(2, "Do verl and our trainer measure the same?", width=11)
    arms = [*frames["updates"]["arm"].unique()]
    for ax, (column, title) in zip(axes, COLUMNS.items(), strict=True):
        for cell, line in LINES.items():
            rows = frames.cell(cell)["updates"]
            means = rows[rows["seed"] == 0].groupby(["arm", "seed", "update"], as_index=False)[column].mean()
            for arm in means["arm"].unique():
                plots.curves(ax, means, column, "update", [arm], order=arms, marker="o", linestyle=line,
                             face=None if line == "-" else "white", label=f"{arm}, {TRAINERS[cell]}")
        ax.set(title=title, xlabel="update of a step")
    return plots.finish(figure, axes, "one seed; means over 20 steps; solid: our trainer, dashed: verl, dotted: our "
                        "trainer with verl's split into mini-batches")


@plots.styled
def draw_log(frames: Frames) -> Figure:
    """What verl logs of routing, step by step."""
    figure, axes = plots.new_figure(3, "Routing in verl's own log", width=13)
    steps = frames.cell("trainer=verl")["steps"]
    arms = [*steps["arm"].unique()]
    for ax, (column, title) in zip(axes, LOGGED.items(), strict=True):
        plots.curves(ax, steps.dropna(subset=[column]), column, "step", arms, order=arms)
        ax.set(title=f"actor/routing/{title}", xlabel="step")
    return plots.finish(figure, axes, "one run each; pull is there under replay alone")
