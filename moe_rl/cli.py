"""The command `moe-rl`: run | plot | list | show | diff | export | volatility | view."""

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
from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.study import Planned, Study, load_study_file, parse_settings

EXAMPLES = {
    "run": """examples:
  moe-rl run studies/routing_replay.py --dry-run          what would run, what it costs, what would make it void
  moe-rl run studies/routing_replay.py                    all arms and seeds; the same command goes on after a kill
  moe-rl run studies/routing_replay.py --seeds 8          seeds 0 to 7; finished runs are skipped
  moe-rl run studies/routing_replay.py --steps 200        extends finished runs from their last checkpoint
  moe-rl run studies/routing_replay.py --out trial --seeds 0 --steps 20 \\
      --task reasoning_gym:spell_backward --set max_new_tokens=24 --set optimizer.lr=1e-4
  torchrun --nproc-per-node 2 -m moe_rl run studies/routing_replay.py --policy megatron --ep 2
                                                          on Megatron-core, all processes together on run after run
  moe-rl run my_study.py                                  your own study, from any folder""",
    "plot": """examples:
  moe-rl plot runs/routing_replay                         PNG and SVG into runs/routing_replay/figures
  moe-rl plot runs/routing_replay --unfinished            with what running and interrupted runs have so far""",
    "list": """examples:
  moe-rl list                                             every run below runs/
  moe-rl list runs/routing_replay/gspo                    one arm""",
    "show": """examples:
  moe-rl show runs/routing_replay/gspo/base/seed=0        configuration, versions and the last rows""",
    "diff": """examples:
  moe-rl diff runs/routing_replay/gspo/base/seed=0 again/routing_replay/gspo/base/seed=0
exit code: 0 when every value is equal (seconds_* and memory_* are ignored), 1 when the runs part""",
    "volatility": """examples:
  moe-rl volatility sft/ rl-step-500/ --data responses.jsonl
  moe-rl volatility sft/ rl-step-500/ --data responses.jsonl --out moved --traces --device cuda --dtype bfloat16
a line of the file: {"prompt": "2+2=", "response": "4"}, {"messages": [{"role": "user", "content": "2+2="}, …]}
or {"text": "…"}. Every metric comes with its noise floor; the same command goes on after a kill.""",
    "view": """examples:
  moe-rl view volatility/traces/before/000000.safetensors volatility/traces/after/000000.safetensors
  moe-rl view before.safetensors after.safetensors --row 3 --tokenizer sft/ --out flips.html
trace files come from `moe-rl volatility --traces`, or from RoutingTrace.save(path, {"gates": gates}).""",
    "export": """examples:
  moe-rl export runs/routing_replay --to csv              csv/steps.csv, updates.csv, layers.csv, runs.csv""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a run failed (or `diff` found a difference), 2 something to mend, 130 interrupted."""
    options = parser().parse_args(arguments)
    try:
        return options.action(options)
    except MoeRlError as error:
        print(f"moe-rl: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("moe-rl: interrupted; the same command goes on from the last commits", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="moe-rl", description="A microscope for Mixture-of-Experts routing during RL.")
    commands = top.add_subparsers(required=True, metavar="run|plot|list|show|diff|export|volatility|view")

    def command(name: str, action: object, help: str) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=help, description=help, epilog=EXAMPLES[name],
                                formatter_class=argparse.RawDescriptionHelpFormatter)
        p.set_defaults(action=action)
        return p

    p = command("run", run, "Run a study, or go on with it; ends with a summary table and figures.")
    p.add_argument("study", help="a Python file with `study = Study(...)`, or a module")
    p.add_argument("--dry-run", action="store_true", help="print runs, cost and warnings, and start nothing")
    p.add_argument("--seeds", help="which seeds: a list 0,1,2 or a number N for 0 … N-1 (default: the study's)")
    p.add_argument("--steps", type=int, help="length of every run (default: the study's)")
    p.add_argument("--out", type=Path, default=Path("runs"), help="where runs live (default: runs)")
    p.add_argument("--jobs", type=int, help="runs at a time, one thread each (default: all cores)")
    p.add_argument("--task", help="another task: reasoning_gym:spell_backward, jsonl:pairs.jsonl, pkg.module:Class")
    p.add_argument("--policy", choices=("hf", "megatron"), help="training engine (default: the study's)")
    for size, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert-tensor")):
        p.add_argument(f"--{size}", type=int, help=f"{what} parallel size, for --policy megatron under torchrun")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                   help="another setting, dotted, e.g. optimizer.lr=1e-4; may be repeated")
    _pooling(p)
    p = command("plot", plot, "Draw a study's figures and print its summary, from tables alone.")
    p.add_argument("folder", type=Path, help="the study's folder, e.g. runs/routing_replay")
    p.add_argument("--unfinished", action="store_true", help="include the last commits of unfinished runs")
    _pooling(p)
    p = command("list", list_runs, "Every run below a folder: state, age, time left.")
    p.add_argument("folder", type=Path, nargs="?", default=Path("runs"))
    p = command("show", show, "One run: its manifest and its last rows.")
    p.add_argument("run", type=Path)
    p = command("diff", diff, "The first row in which two runs part, and the settings in which they differ.")
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p = command("export", export, "The tables of all runs below a folder as CSV.")
    p.add_argument("folder", type=Path)
    p.add_argument("--to", type=Path, default=Path("csv"), help="folder to write (default: csv)")
    p.add_argument("--unfinished", action="store_true", help="include the last commits of unfinished runs")
    _pooling(p)
    p = command("volatility", volatility, "How far routing moved between two checkpoints, on your own texts.")
    p.add_argument("before", help="a Hugging Face checkpoint: a folder, or a name on the hub")
    p.add_argument("after", help="another of the same architecture and tokenizer")
    p.add_argument("--data", required=True, help="JSONL: prompt and response, chat messages, or text per line")
    p.add_argument("--out", type=Path, default=Path("volatility"), help="folder to write (default: volatility)")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
    p.add_argument("--dtype", default="float32", help="of the weights (default: float32)")
    p.add_argument("--max-tokens", type=int, default=2048, help="longer texts are cut, and counted (default: 2048)")
    p.add_argument("--batch-tokens", type=int, default=4096, help="tokens in one forward (default: 4096)")
    p.add_argument("--traces", action="store_true", help="keep the routes of both, for `moe-rl view`")
    p.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings along")
    p = command("view", view, "A web page of one response: where its routes differ between two trace files.")
    p.add_argument("before", type=Path, help="a trace file")
    p.add_argument("after", type=Path, help="a trace file of the same tokens")
    p.add_argument("--row", type=int, help="which response of the files, from 0 (default: the one that changed most)")
    p.add_argument("--tokenizer", help="checkpoint whose tokenizer spells the tokens (default: beside the traces)")
    p.add_argument("--out", type=Path, default=Path("view.html"), help="page to write (default: view.html)")
    return top


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
    planned = study.runs(options.out, _seeds(options.seeds), options.steps)
    report.check_figures(study.figures)
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
    report.write_declaration(study, options.out)
    failures = run_study(study, planned, cache=options.out / ".cache", jobs=options.jobs, mix_code=options.mix_code,
                         console=console)
    for message, paths in report.by_message(failures).items():
        print(f"moe-rl: {message}\n  in {', '.join(map(str, paths))}", file=sys.stderr)
    if len(failures) < len(planned):
        report.print_study(console, options.out / study.name, mix_code=options.mix_code,
                           only=[p.path for p in planned])
    return 0 if not failures else 2 if all(f.expected for f in failures) else 1


def _run_on_ranks(options: argparse.Namespace, study: Study, planned: list[Planned], console: Console) -> int:
    """All ranks carry out the runs; rank 0 writes and reports."""
    from moe_rl import study_on_ranks

    ranks.once(lambda: report.write_declaration(study, options.out))
    study_on_ranks.run_study(study, planned, cache=options.out / ".cache", mix_code=options.mix_code, console=console)
    ranks.leave()
    if ranks.rank() == 0:
        report.print_study(console, options.out / study.name, mix_code=options.mix_code,
                           only=[p.path for p in planned])
    return 0


def plot(options: argparse.Namespace) -> int:
    """Summary and figures of a study that has run."""
    report.print_study(Console(), options.folder, mix_code=options.mix_code, unfinished=options.unfinished)
    return 0


def list_runs(options: argparse.Namespace) -> int:
    """A line per run. Imports neither pandas nor torch."""
    from moe_rl.runs import run_folders, state
    from moe_rl.workers import duration

    found = [(path, state(path)) for path in run_folders(options.folder)]
    if not found:
        raise ConfigError(f"there is no run below {options.folder}; give the folder that holds them")
    rows = [("run", "state", "step", "reward", "changed", "left")]
    for path, now in found:
        age = f"{duration(time.time() - now['updated'])} ago" if "updated" in now else ""
        left = duration(now["seconds_left"]) if now.get("seconds_left") else ""
        reward = f"{now['reward']:.3f}" if now.get("reward") is not None else ""
        rows.append((str(path), now["state"], f"{now['step']}/{now['steps']}", reward, age, left))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def show(options: argparse.Namespace) -> int:
    """The manifest, the state, and the last row of every table."""
    from moe_rl.frames import read_table
    from moe_rl.runs import TABLES, read_manifest, state

    manifest = read_manifest(options.run)
    if manifest is None:
        raise ConfigError(f"{options.run} is not a run: it has no manifest.json (see `moe-rl list`)")
    print(json.dumps(manifest, indent=2))
    print(json.dumps({"progress": state(options.run)}, indent=2))
    for name in TABLES:
        frame = read_table(options.run, name)
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
    for name in ("runs", "steps", "updates", "layers"):
        file = options.to / f"{name}.csv"
        getattr(frames, name).to_csv(file, index=False)
        print(f"{file}: {len(getattr(frames, name))} rows")
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


def _pooling(p: argparse.ArgumentParser) -> None:
    p.add_argument("--mix-code", action="store_true", help="pool runs written by different versions of the code")


def _seeds(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text}: give a number N or a list such as 0,1,2") from error
    return numbers if "," in text else list(range(max(numbers[0], 1)))  # --seeds 0 can only mean the seed 0
