"""What the command prints: the plan of a study, its tables, and where its figures are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.errors import ConfigError, RunError
from moe_rl.objectives.methods import spell_out
from moe_rl.storage import folder as runs
from moe_rl.storage.links import replaced
from moe_rl.storage.terminal import duration, harmless, say
from moe_rl.study.declaration import Planned, Study, load_verdict, read_declaration
from moe_rl.study.workers import Failure

if TYPE_CHECKING:
    from moe_rl.results.tables import Shown
    from moe_rl.storage.frames import Frames


def check(study: Study) -> None:
    """Raise ConfigError for a figure, a factor, a metric or a verdict that does not exist."""
    from moe_rl.results import figures
    from moe_rl.results.summary import factor_of, metric
    from moe_rl.storage.frames import settings_of

    for name in (study.endpoint, *study.further_endpoints, *study.metrics):
        metric(name)
    if study.verdict:
        load_verdict(study.verdict, study.name, study.file)
    conditions = {planned.path.parts[-2] for planned in study.quick_form().runs(Path())}
    known = {key for condition in conditions for key in settings_of(condition)}
    for name in study.figures:
        figures.draw(name, study.endpoint)
        if (factor := factor_of(name)) and factor not in known:
            raise ConfigError(
                f"figure {name!r} needs the factor {factor}, but the study's factors are "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def print_plan(console: Console, study: Study, planned: Sequence[Planned], jobs: int) -> None:
    """What `--dry-run` says: question, runs and their states, cost."""
    jobs, todo, warm_ups = min(jobs, len(planned)), 0, set()
    say(
        console,
        (study.name, "bold"),
        f": {study.question}\n{study.hypothesis and 'Hypothesis: '}{study.hypothesis}\n",
        wrap=True,
    )
    for arm in {p.config.arm.name: p.config.arm for p in planned}.values():
        say(console, (f"arm {arm.name}", "bold"), f": {spell_out(arm)}")
    for p in planned:
        runs.check(p.path, p.config.to_dict(), p.config.hash)
        now = runs.state(p.path, p.config.steps)
        if now["state"] not in runs.ENDED:
            todo += p.config.steps - now["step"]
            if p.config.cold_start.target and not now["step"]:
                warm_ups.add(str((p.config.cold_start, p.config.model, p.config.task)))
        say(console, f"{p.path}  {now['state']} {now['step']}/{p.config.steps}")
    cost = f"{len(planned)} runs, {todo} steps to go"
    if study.seconds_per_step:
        seconds, once = todo * study.seconds_per_step, len(warm_ups) * study.seconds_of_warm_up
        cost += (
            f", about {study.seconds_per_step:g} s each by the study's own estimate: {duration(seconds + once)} of one "
            f"core, {duration(seconds / jobs + once)} with {jobs} at a time, {once:g} s of it for supervised warm-up"
        )
    say(console, f"\ncost: {cost}. {study.cost}", wrap=True)


def print_study(
    console: Console,
    folder: Path,
    *,
    mix_code: bool = False,
    unfinished: bool = False,
    everything: bool = False,
    only: Sequence[Path] | None = None,
    trust: bool = False,
    study_file: Path | None = None,
    arms: Sequence[str] = (),
    names: Sequence[str] = (),
    formats: Sequence[str] = ("png", "svg"),
) -> None:
    """One table of a study, its verdict and its figures; with `everything`, all tables, and the figures of every
    condition. `only` restricts it to some runs, `arms` to theirs; `names` are those of other figures than the declared
    ones. Code that the folder names is run only with `trust`: see `read_declaration`. `study_file` is the study's file,
    where it is known. Raises ConfigError for an arm or a figure that does not exist."""
    from moe_rl.results import figures
    from moe_rl.results.summary import verdict_of
    from moe_rl.results.tables import cautions, short_table, study_tables, untrained, without_effect
    from moe_rl.storage.frames import load_study

    declared = read_declaration(folder, trust)
    declared["file"] = str(study_file) if study_file else declared["file"]
    frames = load_study(folder, unfinished=unfinished, mix_code=mix_code)
    if only is not None:
        frames = frames.select(only)
    if arms:
        frames = frames.of_arms(arms, [arm["name"] for arm in declared["arms"]])
    for name in names:
        figures.draw(name, declared["endpoint"])
    for text in frames.left_out:
        say(console, ("left out", "yellow"), f" {text}")
    known = {arm["name"] for arm in declared["arms"]} or set(frames.runs["arm"])
    for arm, part in frames.runs.groupby("arm", sort=False):
        if arm not in known:
            say(
                console,
                ("not declared", "yellow"),
                f" {arm}: {len(part)} finished runs of this arm are in no table and no figure",
            )
    for table in study_tables(frames, declared, every=True) if everything else [short_table(frames, declared)]:
        print_table(console, table)
    for i, sentence in enumerate(verdict_of(frames, declared)):
        say(console, ("Verdict by the declared rule: " if not i else "  ", "bold"), sentence, wrap=True)
    if declared["untrusted"]:
        say(console, ("left out", "yellow"), f" {declared['untrusted']}", wrap=True)
    declared["figures"] = names or declared["figures"]
    draw_figures(console, frames, declared, folder / "figures", every=everything or bool(names), formats=formats)
    if not everything:
        say(console, f"every table: moe-rl plot {folder} --all\na page: moe-rl report {folder}")
    for warning in filter(None, (untrained(frames), without_effect(frames, declared))):
        say(console, ("Warning", "bold yellow"), f": {warning}", wrap=True)
    if caution := cautions(frames, declared):
        say(console, ("Caution", "bold"), f": {caution}", wrap=True)


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


def draw_figures(
    console: Console, frames: Frames, declared: dict, folder: Path, *, every: bool, formats: Sequence[str]
) -> None:
    """Draw and save: once what spans all conditions; the rest if there is only one, or with `every`. On paper, whose
    figures have no note, print a caption.

    A figure whose columns nobody measured is named and left out.
    """
    from moe_rl.results import figures, plots

    for name, condition, figure in figures.draw_planned(frames, declared, every=every):
        where = replaced(folder if condition in (None, "base") else folder / condition, folder.parent)
        if isinstance(figure, RunError):
            say(console, (f"no figure {name}", "yellow"), f": {figure}", wrap=True)
            continue
        files = plots.save(figure, where, figures.file_name(name), formats)
        say(console, f"figure {files[0]}" + f" (and {', '.join(f.suffix for f in files[1:])})" * (len(files) > 1))
        if plots.LOOK.get().paper:
            say(console, f"caption: {figures.title_of(name)} {figure.get_label()}", wrap=True)


def by_message(failures: Sequence[Failure]) -> dict[str, list[Path]]:
    """Failures with one message together: nine runs of an unknown task are one mistake."""
    paths: dict[str, list[Path]] = {}
    for failure in failures:
        text = failure.message if failure.expected else failure.message.strip().splitlines()[-1]
        paths.setdefault(text, []).append(failure.path)
    return paths
