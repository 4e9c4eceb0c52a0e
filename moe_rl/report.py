"""What the command prints: the plan of a study, its summary table, and where its figures are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_rl import runs
from moe_rl.errors import RunError
from moe_rl.study import Planned, Study
from moe_rl.workers import Failure, duration

DECLARATION = "study.json"
"""Beside a study's runs: what its tables alone do not say — the order of its arms, its figures, its caution."""


def check_figures(names: Sequence[str]) -> None:
    """Raise ConfigError for a figure that does not exist."""
    from moe_rl import plots

    for name in names:
        plots.draw(name)


def write_declaration(study: Study, out: Path) -> None:
    """Write `study.json`."""
    keys = ("name", "question", "hypothesis", "figures", "decision_rule", "differs_from_paper", "caution")
    content = {k: getattr(study, k) for k in keys} | {"arms": [asdict(arm) for arm in study.arms]}
    (out / study.name).mkdir(parents=True, exist_ok=True)
    runs.write_json(out / study.name / DECLARATION, content)


def print_plan(console: Console, study: Study, planned: Sequence[Planned], jobs: int | None) -> None:
    """What `--dry-run` says: question, runs and their states, cost."""
    console.print(f"[bold]{study.name}[/]: {study.question}\n{study.hypothesis}\n", highlight=False)
    todo = 0
    for p in planned:
        runs.check(p.path, p.config.to_dict(), p.config.hash)
        now = runs.state(p.path, p.config.steps)
        todo += 0 if now["state"] in runs.ENDED else p.config.steps - now["step"]
        console.print(f"{p.path}  {now['state']} {now['step']}/{p.config.steps}", highlight=False, soft_wrap=True)
    jobs = min(jobs or os.cpu_count() or 1, len(planned))
    cost = f"{len(planned)} runs, {todo} steps to go"
    if study.seconds_per_step:
        seconds = todo * study.seconds_per_step
        cost += (f", about {study.seconds_per_step:g} s each: {duration(seconds)} of one core, "
                 f"{duration(seconds / jobs)} with {jobs} at a time")
    console.print(f"\ncost: {cost}. {study.cost}", highlight=False)


def print_study(console: Console, folder: Path, *, mix_code: bool = False, unfinished: bool = False,
                only: Sequence[Path] | None = None) -> None:
    """The summary of every combination of factors, and its figures. `only` restricts it to some runs."""
    from moe_rl.frames import load_study

    declared = _declaration(folder)
    frames = load_study(folder, unfinished=unfinished, mix_code=mix_code)
    if only is not None:
        frames = frames.select(only)
    for text in frames.left_out:
        console.print(f"[yellow]left out[/] {text}", highlight=False, soft_wrap=True)
    cells = list(frames.runs["factors"].unique())
    for cell in cells:
        part = frames.cell(cell)
        known = [arm["name"] for arm in declared["arms"]] or sorted(part.runs["arm"].unique())
        arms = [arm for arm in known if (part.runs["arm"] == arm).any()]
        print_summary(console, part, arms, f"{declared['name']}" + (f", {cell}" if cell != "base" else ""))
        where = folder / "figures" / ("" if cell == "base" else cell)
        draw_figures(console, part, known, declared["figures"], where)
    if declared["caution"]:
        console.print(f"[bold]Caution[/]: {declared['caution']}", highlight=False)


def print_summary(console: Console, frames: Any, arms: Sequence[str], title: str) -> None:
    """Metric × arm with intervals, then the arms compared; every number with its method and n."""
    import pandas as pd

    from moe_rl.summary import MAIN, compare, summarise

    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("mean over seeds, interval", no_wrap=True)
    cells, methods = summarise(frames, arms), {}
    for arm in arms:
        n = int((frames.runs["arm"] == arm).sum())
        table.add_column(f"{arm}\nn = {n} seed{'s' * (n > 1)}", justify="right")
    for name, row in cells.iterrows():
        table.add_row(str(name), *("–" if pd.isna(value) else escape(str(value)) for value in row))
        methods |= {value.method + (" (rate)" if name == cells.index[-1] else ""): None for value in row.dropna()}
    console.print(table)
    console.print(f"Intervals: {'; '.join(methods)}. Means are over the second half of training, except at the end.\n",
                  highlight=False)
    pairs = compare(frames, arms)
    if not pairs:
        return
    table = Table(title=f"{MAIN.name}: arms compared within seeds", title_justify="left", title_style="bold")
    for column in ("difference", "mean, interval", "n", "p", "p, Holm", "smallest p"):
        table.add_column(column, justify="left" if column == "difference" else "right", no_wrap=True)
    for b, a, result, p in pairs:
        table.add_row(f"{b} − {a}", escape(str(result.difference)), str(result.n), f"{result.p:.3g}", f"{p:.3g}",
                      f"{result.p_smallest:.3g}")
    console.print(table)
    console.print(f"Intervals: {pairs[0][2].difference.method} of the differences. p: two-sided, {pairs[0][2].method}; "
                  "the smallest p is what this n can reach at all.\n", highlight=False)


def draw_figures(console: Console, frames: Any, arms: Sequence[str], names: Sequence[str], folder: Path) -> None:
    """Draw and save; a figure whose columns nobody measured is named and left out."""
    from moe_rl import plots

    for name in names:
        try:
            paths = plots.save(plots.draw(name)(frames, arms), folder, name)
        except RunError as error:
            console.print(f"[yellow]no figure {name}[/]: {error}", highlight=False)
        else:
            console.print(f"figure {' '.join(map(str, paths))}", highlight=False, soft_wrap=True)


def by_message(failures: Sequence[Failure]) -> dict[str, list[Path]]:
    """Failures with one message together: nine runs of an unknown task are one mistake."""
    found: dict[str, list[Path]] = {}
    for failure in failures:
        text = failure.message if failure.expected else failure.message.strip().splitlines()[-1]
        found.setdefault(text, []).append(failure.path)
    return found


def _declaration(folder: Path) -> dict[str, Any]:
    declared = runs.read_json(folder / DECLARATION, ("arms", "figures"))
    if declared is None:
        raise RunError(f"{folder} is not the folder of a study: it has no {DECLARATION} (e.g. runs/routing_replay)")
    return declared
