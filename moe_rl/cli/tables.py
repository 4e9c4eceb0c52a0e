"""Verbs that read the tables of a study."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from moe_rl.cli.verbs import MIX_CODE, UNFINISHED, argument, verb
from moe_rl.errors import ConfigError
from moe_rl.registry import split_list

TRUST = argument(
    "--trust",
    action="store_true",
    help="run figures, metrics and a decision rule from outside moe_rl that the folder names",
)


@verb(
    argument("folder", type=Path, help="the study's folder, e.g. runs/routing_replay"),
    UNFINISHED,
    argument("--all", action="store_true", help="all tables, and the figures of each condition"),
    argument("--figures", metavar="A,B", help="these figures of each condition, declared or not"),
    argument("--arms", metavar="A,B", help="these arms; each keeps its colour and marker"),
    argument("--format", metavar="F", help="pdf, png or svg, or several with commas (default: png,svg; on paper pdf)"),
    argument("--width", metavar="INCHES", help="lay out anew for a page of this width (default on paper: 3.25)"),
    argument(
        "--style", metavar="STYLE", default="screen", help="screen or paper: small type, no title; prints a caption"
    ),
    MIX_CODE,
    TRUST,
    examples="""
  moe-rl plot runs/routing_replay                writes figures/
  moe-rl plot studies/routing_replay     the same, from committed tables
  moe-rl plot runs/routing_replay --unfinished   also unfinished runs
  moe-rl plot runs/my_sweep --all                all tables
  moe-rl plot runs/x --style paper --width 6.75 --figures learning,ratios
                                PDF files for a page of two columns""",
)
def plot(options: argparse.Namespace) -> int:
    """Summary and figures of a study that has run."""
    from rich.console import Console

    from moe_rl.results import plots, printed

    paper = _among("style", options.style, ("screen", "paper")) == ["paper"]
    formats = _among("format", options.format or ("pdf" if paper else "png,svg"), plots.FORMATS)
    width = 3.25 * paper
    if options.width is not None:
        width = _between("--width", options.width, 2, 20, "the width of the page in inches", "3.25")
    _make_importable(options)
    with plots.using(plots.Look(width, paper)):
        printed.print_study(
            Console(),
            options.folder,
            mix_code=options.mix_code,
            unfinished=options.unfinished,
            everything=options.all,
            trust=options.trust,
            arms=split_list(options.arms),
            names=split_list(options.figures),
            formats=formats,
        )
    return 0


def _among(kind: str, text: str, known: Iterable[str]) -> list[str]:
    """The parts of a list. Raises ConfigError for one that is not known."""
    from moe_rl.registry import unknown

    for part in (parts := split_list(text) or [text]):
        if part not in known:
            unknown(kind, part, known)
    return parts


def _between(flag: str, text: str, low: float, high: float, what: str, example: str) -> float:
    """A number. Raises ConfigError for one that is out of range, or none."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= high:
        raise ConfigError(f"{flag} {text}: give {what}, from {low} to {high}, such as {example}")
    return value


@verb(
    argument("folder", type=Path, help="folder of the study's runs or collected tables"),
    argument("--out", type=Path, help="page to write (default: report.html in the folder)"),
    argument("--all", action="store_true", help="all tables, and the figures of each condition"),
    MIX_CODE,
    TRUST,
    examples="""
  moe-rl report runs/routing_replay              writes report.html
  moe-rl report studies/routing_replay --out page.html
  moe-rl report studies/many_turns --trust
                                with its decision rule""",
)
def report(options: argparse.Namespace) -> int:
    """Write the page of a study."""
    from moe_rl.results.study_page import card_file, write_study_page
    from moe_rl.storage.links import replaced

    _make_importable(options)
    out = options.out or replaced(options.folder / "report.html")
    write_study_page(options.folder, out, mix_code=options.mix_code, trust=options.trust, everything=options.all)
    print(f"{out}: open it in a browser, or print it\n{card_file(out)}: settings and results, as Markdown")
    return 0


@verb(
    argument("folder", type=Path, help="folder of the study's runs, finished or not"),
    argument("--out", type=Path, help="page to write (default: report.html in the folder)"),
    argument("--every", metavar="SECONDS", default="5", help="between two pages (default: 5)"),
    argument("--once", action="store_true", help="write one page and end, as cron needs it"),
    MIX_CODE,
    TRUST,
    examples="""
  moe-rl watch runs/routing_replay               until Ctrl-C
  moe-rl watch runs/routing_replay --once --out /var/www/study.html
Figures and tables change with each checkpoint (--set save_every=N).""",
)
def watch(options: argparse.Namespace) -> int:
    """Write the page of a study again and again."""
    from moe_rl.results.study_page import Live
    from moe_rl.storage.links import replaced

    every = _between("--every", options.every, 1, 3600, "the seconds between two pages", "5")
    _make_importable(options)
    out = options.out or replaced(options.folder / "report.html")
    begun = options.folder.is_file() or any(options.folder.glob("*/study.json"))  # of several: refused
    if not options.once and not begun and not (options.folder / "study.json").exists():
        print(f"waiting for {options.folder / 'study.json'}; Ctrl-C ends", flush=True)
        while not (options.folder / "study.json").exists():
            time.sleep(0.5)
    live = Live(options.folder, out, mix_code=options.mix_code, trust=options.trust)
    try:
        live.write(60 if options.once else every)
        print(f"{out}: open it in a browser" + "; Ctrl-C ends" * (not options.once), flush=True)
        while not options.once:
            began = time.monotonic()
            live.write(every)
            time.sleep(max(every, 4 * (time.monotonic() - began)))  # at most a fifth of a core, which runs need
    except KeyboardInterrupt:
        live.write(0)
    return 0


@verb(
    argument("folder", type=Path, help="the study's folder, e.g. runs/routing_replay"),
    argument("--out", type=Path, required=True, help="folder to write"),
    argument(
        "--also", action="append", default=[], metavar="PATTERN", help="add columns, e.g. 'margin_*'; may be repeated"
    ),
    MIX_CODE,
    examples="""
  moe-rl runs collect runs/routing_replay --out studies/routing_replay
  moe-rl runs collect runs/my_study --out results/my_study --also 'margin_*'
plot, report, runs repeat, runs show and runs export also read the new folder.""",
)
def collect(options: argparse.Namespace) -> int:
    """Write the compact tables, and say how large they are."""
    from moe_rl.storage.terminal import harmless
    from moe_rl.study.collect import collect as write_tables

    written = write_tables(options.folder, options.out, also=options.also, mix_code=options.mix_code)
    for file, size in written.items():
        print(harmless(f"{file}: {size / 1024:.0f} KB"))
    print(f"{sum(written.values()) / 1024:.0f} KB in all")
    return 0


@verb(
    argument("folder", type=Path, help="any folder above runs"),
    argument(
        "--to",
        default="csv",
        metavar="TO",
        help="CSV folder (default: csv), or tensorboard, wandb or pkg.module:Class, optionally with =FOLDER",
    ),
    UNFINISHED,
    MIX_CODE,
    examples="""
  moe-rl runs export runs/routing_replay --to csv
                                csv/steps.csv, updates.csv, layers.csv, runs.csv
  moe-rl runs export runs/routing_replay --to tensorboard
                                read: tensorboard --logdir tensorboard
  WANDB_MODE=offline moe-rl runs export runs/x --to wandb=logs/wandb
A tracker gets every number once. Unfinished runs are sent up to their last
checkpoint.""",
)
def export(options: argparse.Namespace) -> int:
    """CSV files, floats with all their digits; or points."""
    from moe_rl.registry import Component, import_component
    from moe_rl.storage.frames import load_study
    from moe_rl.storage.links import replaced
    from moe_rl.storage.terminal import harmless

    name = options.to.partition("=")[0]
    if name in ("tensorboard", "wandb") or Component(name).own:  # anything else can only be a folder
        export_points = import_component("tracker", name, "moe_rl.integrations.trackers:export")
        for line in export_points(options.folder, options.to):
            print(harmless(line), flush=True)
        return 0
    frames = load_study(options.folder, unfinished=options.unfinished, mix_code=options.mix_code)
    folder = Path(options.to)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("runs", *frames.tables):
        file, frame = replaced(folder / f"{name}.csv"), frames.to_pandas(name)
        frame.to_csv(file, index=False)
        print(f"{file}: {len(frame)} rows")
    for text in frames.left_out:
        print(f"left out: {harmless(text)}", file=sys.stderr)
    return 0


def _make_importable(options: argparse.Namespace) -> None:
    """Where it is trusted, the code that a study names, which may lie beside its tables."""
    from moe_rl.study.declaration import outside_names, read_declaration
    from moe_rl.study.rerun import make_importable

    if options.trust:
        make_importable(outside_names(read_declaration(options.folder, trust=True)), options.folder)
