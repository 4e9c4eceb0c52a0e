"""What the command prints: the plan of a study, its tables, and where its figures are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.errors import ConfigError, RunError
from moe_rl.registry import lookup
from moe_rl.storage import folder as runs
from moe_rl.storage.terminal import duration, harmless, say
from moe_rl.study.declaration import Planned, Study, read_declaration
from moe_rl.study.workers import Failure

if TYPE_CHECKING:
    from moe_rl.results.tables import Shown
    from moe_rl.storage.frames import Frames


def check(study: Study) -> None:
    """Raise ConfigError for a figure, a factor, a metric or a verdict that does not exist."""
    from moe_rl.results import figures
    from moe_rl.results.summary import factor_of, metric, settings_of

    for name in (study.endpoint, *study.further_endpoints, *study.metrics):
        metric(name)
    if study.verdict:
        lookup("verdict", study.verdict, {})
    cells = {planned.path.parts[-2] for planned in study.quick_form().runs(Path())}
    known = {key for cell in cells for key in settings_of(cell)}
    for name in study.figures:
        figures.draw(name, study.endpoint)
        if (factor := factor_of(name)) and factor not in known:
            raise ConfigError(f"figure {name!r} needs the factor {factor}, but the study's factors are "
                              f"{', '.join(sorted(known)) or 'none'}")


def print_plan(console: Console, study: Study, planned: Sequence[Planned], jobs: int) -> None:
    """What `--dry-run` says: question, runs and their states, cost."""
    jobs, todo = min(jobs, len(planned)), 0
    say(console, (study.name, "bold"), f": {study.question}\n{study.hypothesis and 'Hypothesis: '}{study.hypothesis}\n",
        wrap=True)
    for p in planned:
        runs.check(p.path, p.config.to_dict(), p.config.hash)
        now = runs.state(p.path, p.config.steps)
        todo += 0 if now["state"] in runs.ENDED else p.config.steps - now["step"]
        say(console, f"{p.path}  {now['state']} {now['step']}/{p.config.steps}")
    cost = f"{len(planned)} runs, {todo} steps to go"
    if study.seconds_per_step:
        seconds = todo * study.seconds_per_step
        cost += (f", about {study.seconds_per_step:g} s each by the study's own estimate: {duration(seconds)} of one "
                 f"core, {duration(seconds / jobs)} with {jobs} at a time")
    say(console, f"\ncost: {cost}. {study.cost}", wrap=True)


def print_study(console: Console, folder: Path, *, mix_code: bool = False, unfinished: bool = False,
                everything: bool = False, only: Sequence[Path] | None = None, trust: bool = False) -> None:
    """One table of a study, its verdict and its figures; with `everything`, all tables, and the figures of every
    combination of factors. `only` restricts it to some runs. Code that the folder names is run only with `trust`: see
    `read_declaration`."""
    from moe_rl.results.summary import verdict_of
    from moe_rl.results.tables import short_table, study_tables, untrained
    from moe_rl.storage.frames import load_study

    declared = read_declaration(folder, trust)
    frames = load_study(folder, unfinished=unfinished, mix_code=mix_code)
    if only is not None:
        frames = frames.select(only)
    for text in frames.left_out:
        say(console, ("left out", "yellow"), f" {text}")
    names = {arm["name"] for arm in declared["arms"]} or set(frames.runs["arm"])
    for arm, part in frames.runs.groupby("arm", sort=False):
        if arm not in names:
            say(console, ("not declared", "yellow"), f" {arm}: {len(part)} finished runs of this arm are in no table "
                                                     "and no figure")
    for table in [short_table(frames, declared), *(study_tables(frames, declared, cells=True) if everything else ())]:
        print_table(console, table)
    for i, sentence in enumerate(verdict_of(frames, declared)):
        say(console, ("Verdict by the declared rule: " if not i else "  ", "bold"), sentence, wrap=True)
    if declared["untrusted"]:
        say(console, ("left out", "yellow"), f" {declared['untrusted']}", wrap=True)
    draw_figures(console, frames, declared, folder / "figures", every=everything)
    if not everything:
        say(console, f"every table: moe-rl plot {folder} --all\na page: moe-rl report {folder}")
    if said := untrained(frames):
        say(console, ("Warning", "bold yellow"), f": {said}", wrap=True)
    if declared["caution"]:
        say(console, ("Caution", "bold"), f": {declared['caution']}", wrap=True)


def print_table(console: Console, shown: Shown) -> None:
    """One table and the note below it."""
    table = Table(title=Text(harmless(shown.title), style="bold"), title_justify="left")
    for i, column in enumerate(shown.header):
        # Where it is narrow, cells are wrapped, never cut.
        table.add_column(Text(harmless(column)), justify="right" if i else "left", overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    console.print(table)
    say(console, f"{shown.note}\n", wrap=True)


def draw_figures(console: Console, frames: Frames, declared: dict, folder: Path, *, every: bool) -> None:
    """Draw and save: once what spans all combinations of factors; the rest if there is only one, or with `every`.

    A figure whose columns nobody measured is named and left out.
    """
    from moe_rl.results import figures, plots

    for name, cell, figure in figures.draw_planned(frames, declared, every=every):
        where = folder if cell in (None, "base") else folder / cell
        if isinstance(figure, RunError):
            say(console, (f"no figure {name}", "yellow"), f": {figure}", wrap=True)
        else:
            say(console, f"figure {plots.save(figure, where, figures.file_name(name))[0]} (and .svg)")


def by_message(failures: Sequence[Failure]) -> dict[str, list[Path]]:
    """Failures with one message together: nine runs of an unknown task are one mistake."""
    found: dict[str, list[Path]] = {}
    for failure in failures:
        text = failure.message if failure.expected else failure.message.strip().splitlines()[-1]
        found.setdefault(text, []).append(failure.path)
    return found
