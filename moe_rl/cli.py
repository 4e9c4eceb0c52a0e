"""The command `moe-rl`: what each of its commands does. What they take is in `arguments`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_rl import ranks, report
from moe_rl.arguments import parser
from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.study import QUICK_STEPS, Planned, Study, load_study_file, parse_settings, write_declaration


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a run failed (or `diff` found a difference), 2 something to mend, 130 interrupted."""
    options = parser().parse_args(arguments)
    actions = {"run": run, "plot": plot, "report": write_report, "collect": collect, "rerun": rerun, "list": list_runs,
               "show": show, "diff": diff, "export": export, "volatility": volatility, "view": view}
    try:
        return actions[options.command](options)
    except MoeRlError as error:
        print(f"moe-rl: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("moe-rl: interrupted; the same command goes on from the last commits", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written, a full disk; without a file it is a bug of ours
        if error.filename is None:
            raise
        print(f"moe-rl: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        return 2


def run(options: argparse.Namespace) -> int:
    """Plan, check, run, summarise, draw."""
    from moe_rl.workers import preflight, run_study

    console = Console(quiet=ranks.rank() > 0)
    study = load_study_file(options.study)
    base = study.base
    if options.task:  # the options in the study file are those of its own task
        base = base.replace(task=options.task, task_options={})
    changes = parse_settings(base, options.settings) | _layout(options)
    study = Study(**{**vars(study), "base": base.replace(**changes)})
    study = study.quick_form() if options.quick else study
    steps = QUICK_STEPS if options.quick and options.steps is None else options.steps
    planned = study.runs(options.out, _seeds(options.seeds), steps)
    report.check(study)
    if ranks.launched():
        ranks.join(study.base.model.device)
    cautions = ranks.once(lambda: preflight(study, planned))
    if options.dry_run:
        report.print_plan(console, study, planned, options.jobs)
    for caution in cautions:
        console.print(f"[yellow]warning[/] {caution}", highlight=False)
    if options.dry_run:
        return 0
    if ranks.launched():
        return _run_on_ranks(options, study, planned, console)
    write_declaration(study, options.out)
    failures = run_study(study, planned, cache=options.out / ".cache", jobs=options.jobs, mix_code=options.mix_code,
                         console=console)
    code = _failed(failures)
    if len(failures) < len(planned):
        report.print_study(console, options.out / study.name, mix_code=options.mix_code,
                           only=[p.path for p in planned])
    return code


def _failed(failures: list[report.Failure]) -> int:
    """Say what failed, each message once; the exit code."""
    for message, paths in report.by_message(failures).items():
        print(f"moe-rl: {message}\n  in {', '.join(map(str, paths))}", file=sys.stderr)
    return 0 if not failures else 2 if all(f.expected for f in failures) else 1


def _run_on_ranks(options: argparse.Namespace, study: Study, planned: list[Planned], console: Console) -> int:
    """All ranks carry out the runs; rank 0 writes and reports."""
    from moe_rl import study_on_ranks

    ranks.once(lambda: write_declaration(study, options.out))
    study_on_ranks.run_study(study, planned, cache=options.out / ".cache", mix_code=options.mix_code, console=console)
    ranks.leave()
    if ranks.rank() == 0:
        report.print_study(console, options.out / study.name, mix_code=options.mix_code,
                           only=[p.path for p in planned])
    return 0


def plot(options: argparse.Namespace) -> int:
    """Summary and figures of a study that has run."""
    report.print_study(Console(), options.folder, mix_code=options.mix_code, unfinished=options.unfinished,
                       cells=options.cells)
    return 0


def write_report(options: argparse.Namespace) -> int:
    """Write the page of a study."""
    from moe_rl.page import write_page

    out = options.out or options.folder / "report.html"
    write_page(options.folder, out, mix_code=options.mix_code)
    print(f"{out}: open it in any browser, or print it")
    return 0


def collect(options: argparse.Namespace) -> int:
    """Write the compact tables, and say how large they are."""
    from moe_rl.collect import collect as write_tables

    written = write_tables(options.folder, options.out, also=options.also, mix_code=options.mix_code)
    for file, size in written.items():
        print(f"{file}: {size / 1024:.0f} KB")
    print(f"{sum(written.values()) / 1024:.0f} KB in all")
    return 0


def rerun(options: argparse.Namespace) -> int:
    """Runs made again from their rows, and whether they end alike."""
    from moe_rl.rerun import rerun as run_again

    return _failed(run_again(options.folder, options.out, jobs=options.jobs, console=Console()))


def list_runs(options: argparse.Namespace) -> int:
    """A line per run. A folder of runs needs neither pandas nor torch."""
    from moe_rl.runs import run_folders, state
    from moe_rl.workers import duration

    found = [(path, state(path)) for path in run_folders(options.folder)] or _collected_runs(options.folder)
    if not found:
        raise ConfigError(f"there is no run below {options.folder}; give the folder that holds them")
    rows = [("run", "state", "step", "reward", "changed", "left")]
    for path, now in found:
        age = f"{duration(time.time() - now['updated'])} ago" if "updated" in now else ""
        left = duration(now["seconds_left"]) if now.get("seconds_left") else ""
        reward = f"{now['reward']:.3f}" if now.get("reward") is not None else ""
        reached = f", finished to {now['finished']}" if "finished" in now else ""
        rows.append((str(path), now["state"] + reached, f"{now['step']}/{now['steps']}", reward, age, left))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _collected_runs(folder: Path) -> list[tuple[Path, dict[str, object]]]:
    from moe_rl.frames import collected

    frames = collected(folder)
    return [] if frames is None else [(folder / run.path, {"state": run.state, "step": run.step, "steps": run.steps})
                                      for run in frames.runs.itertuples()]


def show(options: argparse.Namespace) -> int:
    """The manifest, the state, and the last row of every table."""
    from moe_rl.columns import TABLES
    from moe_rl.frames import NESTED, collected, read_table
    from moe_rl.runs import read_manifest, state

    manifest, frames = read_manifest(options.run), None
    if manifest is not None:
        print(json.dumps(manifest, indent=2))
        print(json.dumps({"progress": state(options.run)}, indent=2))
    else:
        frames = collected(options.run)
        if frames is None or len(frames.runs) != 1:
            raise ConfigError(f"{options.run} is not a run: it has no manifest.json (see `moe-rl list`)")
        row = frames.runs.iloc[0].to_dict()
        print(json.dumps(row | {k: json.loads(row[k]) for k in NESTED if k in row}, indent=2, default=str))
    for name in TABLES:
        frame = read_table(options.run, name) if frames is None else frames[name]
        print(f"\n{name}: {len(frame)} rows, {len(frame.columns)} columns")
        if len(frame):
            print(frame.iloc[-1].dropna().to_string())
    return 0


def diff(options: argparse.Namespace) -> int:
    """Settings that differ, then the first row that does."""
    from moe_rl.frames import diff as first_difference
    from moe_rl.frames import settings_that_differ

    for path in (options.a, options.b):
        if not (path / "manifest.json").exists():
            raise ConfigError(f"{path} is not a run: it has no manifest.json (see `moe-rl list`)")
    for key, (a, b) in settings_that_differ(options.a, options.b).items():
        print(f"{key}: {a!r} | {b!r}")
    found = first_difference(options.a, options.b)
    if found is None:
        print("every row is equal (seconds_* and memory_* are not compared)")
        return 0
    where = ", ".join(f"{k} {v}" for k, v in found.row.items())
    if found.column is None:
        print(f"{found.table}: {where} exists only in {options.a if found.a else options.b}")
    else:
        print(f"{found.table}: {where}: {found.column} = {found.a!r} | {found.b!r}")
    return 1


def export(options: argparse.Namespace) -> int:
    """CSV files, floats with all their digits."""
    from moe_rl.frames import load_study

    frames = load_study(options.folder, unfinished=options.unfinished, mix_code=options.mix_code)
    options.to.mkdir(parents=True, exist_ok=True)
    for name, frame in {"runs": frames.runs, **frames.tables}.items():
        file = options.to / f"{name}.csv"
        frame.to_csv(file, index=False)
        print(f"{file}: {len(frame)} rows")
    for text in frames.left_out:
        print(f"left out: {text}", file=sys.stderr)
    return 0


def _layout(options: argparse.Namespace) -> dict[str, object]:
    """Settings that --policy, --tp, --pp, --ep and --etp stand for; data parallelism gets the processes left over."""
    sizes = {size: getattr(options, size) for size in ("tp", "pp", "ep", "etp")}
    given = {f"parallel.{size}": n for size, n in sizes.items() if n is not None}
    if options.policy:
        given["policy"] = options.policy
    if options.policy == "megatron":
        given["parallel.dp"] = max(1, ranks.world() // ((options.tp or 1) * (options.pp or 1)))
    return given


def volatility(options: argparse.Namespace) -> int:
    """Compare two checkpoints; tables and figures into `--out`."""
    from moe_rl.volatility.measure import Comparison, measure_volatility
    from moe_rl.volatility.report import print_report

    comparison = Comparison(options.before, options.after, options.data, options.dtype, options.max_tokens,
                            options.batch_tokens)
    frames = measure_volatility(comparison, options.out, device=options.device, keep_traces=options.traces,
                                trust_remote_code=options.trust_remote_code)
    print_report(Console(), frames, options.out)
    return 0


def view(options: argparse.Namespace) -> int:
    """Write the page."""
    from moe_rl.view import write_page

    row = write_page(options.before, options.after, options.out, row=options.row, tokenizer=options.tokenizer)
    print(f"{options.out}: response {row}; open it in any browser")
    return 0


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text}: give a number N or a list such as 0,1,2") from error
    if min(numbers) < 0:
        raise ConfigError(f"--seeds {text}: seeds are not negative; give a number N or a list such as 0,1,2")
    return numbers if "," in text else list(range(max(numbers[0], 1)))  # --seeds 0 can only mean the seed 0
