"""Verbs that carry out runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moe_rl.cli.verbs import JOBS, MIX_CODE, argument, verb
from moe_rl.errors import ConfigError

if TYPE_CHECKING:
    from moe_rl.study.workers import Failure


@verb(
    "run",
    "Run a study, or go on with it; ends with a summary table and figures.",
    argument("study", help="a Python file with `study = Study(...)`, or a module"),
    argument("--dry-run", action="store_true", help="print runs, cost and warnings, and start nothing"),
    argument("--seeds", help="which seeds: a list 0,1,2 or a number N for 0 … N-1 (default: the study's)"),
    argument("--steps", type=int, help="length of every run (default: the study's)"),
    argument("--quick", action="store_true",
             help="one seed and three steps of every run, as <study>-quick: minutes, to see that all of it works"),
    argument("--out", type=Path, default=Path("runs"), help="where runs live (default: runs)"),
    JOBS,
    argument("--task", help="another task: reasoning_gym:spell_backward, jsonl:pairs.jsonl, pkg.module:Class"),
    argument("--arm", action="append", default=[], metavar="ARM", dest="arms",
             help="instead of the study's arms: one of them by name, or any other, see `moe-rl methods`, e.g. "
                  "'sapo(tau_neg=1.05)+old_policy'; may be repeated"),
    argument("--policy", choices=("hf", "megatron"), help="training engine (default: the study's)"),
    argument("--tp", type=int, help="tensor parallel size, for --policy megatron under torchrun"),
    argument("--pp", type=int, help="pipeline parallel size, for --policy megatron under torchrun"),
    argument("--ep", type=int, help="expert parallel size, for --policy megatron under torchrun"),
    argument("--etp", type=int, help="expert-tensor parallel size, for --policy megatron under torchrun"),
    argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
             help="another setting, dotted, e.g. optimizer.lr=1e-4; may be repeated"),
    MIX_CODE,
    examples="""
  moe-rl run studies/routing_replay.py --dry-run          what would run, what it costs, what would make it void
  moe-rl run studies/routing_replay.py                    all arms and seeds; the same command goes on after a kill
  moe-rl run studies/routing_replay.py --seeds 8          seeds 0 to 7; finished runs are skipped
  moe-rl run studies/routing_replay.py --steps 200        extends finished runs from their last checkpoint
  moe-rl run studies/routing_replay.py --out trial --seeds 0 --steps 20 \\
      --task reasoning_gym:spell_backward --set max_new_tokens=24 --set optimizer.lr=1e-4
  moe-rl run studies/routing_replay.py --out trial --arm gspo --arm "sapo(tau_neg=1.05)+old_policy"
                                                          its own gspo against another method
  torchrun --nproc-per-node 2 -m moe_rl run studies/routing_replay.py --policy megatron --ep 2
                                                          on Megatron-core, all processes together on run after run
  moe-rl run my_study.py                                  your own study, from any folder""",
)
def run(options: argparse.Namespace) -> int:
    """Plan, check, run, summarise, draw."""
    from rich.console import Console

    from moe_rl import ranks
    from moe_rl.results import printed
    from moe_rl.runs.terminal import say
    from moe_rl.study.declaration import QUICK_STEPS, Study, load_study_file, parse_settings, write_declaration
    from moe_rl.study.workers import at_a_time, preflight, run_study, unfinished

    jobs, console = at_a_time(options.jobs), Console(quiet=ranks.rank() > 0)
    study = load_study_file(options.study)
    base = study.base
    if options.task:
        base = base.replace(task=options.task)
    changes = parse_settings(base, options.settings) | _layout(options)
    study = Study(**{**vars(study), "base": base.replace(**changes)}).with_arms(options.arms)
    study = study.quick_form() if options.quick else study
    steps = QUICK_STEPS if options.quick and options.steps is None else options.steps
    planned = study.runs(options.out, _seeds(options.seeds), steps)
    printed.check(study)
    if ranks.launched():
        ranks.join(study.base.model.device)
    cautions = ranks.from_rank_0(lambda: preflight(study, planned))
    if options.dry_run:
        printed.print_plan(console, study, planned, jobs)
    for caution in cautions:
        say(console, ("warning", "yellow"), f" {caution}", wrap=True)
    if options.dry_run:
        return 0
    ranks.from_rank_0(lambda: unfinished(planned, options.mix_code))  # what refuses, refuses before anything is written
    if changed := ranks.from_rank_0(lambda: write_declaration(study, options.out)):
        say(console, ("warning", "yellow"), f" {options.out / study.name} held runs of a declaration with another "
            f"{', '.join(changed)}: from now on the new one is shown. Two studies need two names.", wrap=True)
    failures = run_study(study, planned, cache=options.out / ".cache", jobs=jobs, mix_code=options.mix_code,
                         console=console)
    if ranks.launched():
        ranks.leave()
    code = _failed(failures)
    if ranks.rank() == 0 and len(failures) < len(planned):
        printed.print_study(console, options.out / study.name, mix_code=options.mix_code,
                           only=[p.path for p in planned])
    return code


@verb(
    "rerun",
    "Runs made again from the configuration in their own rows, and compared.",
    argument("folder", type=Path, help="a study's tables, or the path of an arm, a cell or a run in them"),
    argument("--out", type=Path, default=Path("again"), help="where the new runs live (default: again)"),
    argument("--steps", type=int, help="run and compare the first steps alone (default: all of a row's)"),
    JOBS,
    argument("--trust", action="store_true",
             help="run code from outside this package that rows name: tasks, losses, sources, a trainer"),
    examples="""
  moe-rl rerun studies/results/routing_replay/gspo/base/seed=0 --out again
  moe-rl rerun studies/results/routing_replay --out again     every run of the study
  moe-rl rerun studies/results/routing_replay/gspo/base/seed=0 --steps 3
                                                              its first three steps, in seconds
  moe-rl rerun studies/results/why_gspo --out again --trust   with the losses of studies/, which its rows name""",
)
def rerun(options: argparse.Namespace) -> int:
    """Runs made again from their rows, and whether they end alike."""
    from rich.console import Console

    from moe_rl.study.rerun import rerun as run_again

    return _failed(run_again(options.folder, options.out, jobs=options.jobs, console=Console(), steps=options.steps,
                             trusted=lambda code: options.trust or _confirmed(code)))


def _failed(failures: list[Failure]) -> int:
    """Say what failed, each message once; the exit code."""
    from moe_rl.results import printed

    for message, paths in printed.by_message(failures).items():
        print(f"moe-rl: {message}\n  in {', '.join(map(str, paths))}", file=sys.stderr)
    return 0 if not failures else 2 if all(f.expected for f in failures) else 1


def _confirmed(code: list[str]) -> bool:
    """Ask whoever sits at a terminal; nobody else can say yes."""
    if not sys.stdin.isatty():
        return False
    print("the rows name code from outside moe_rl, which would run here:", *code, sep="\n  ")
    return input("run it? [y/N] ").strip().lower() in ("y", "yes")


def _layout(options: argparse.Namespace) -> dict[str, object]:
    """Settings that --policy, --tp, --pp, --ep and --etp stand for; data parallelism gets the processes left over."""
    from moe_rl import ranks

    sizes = {size: getattr(options, size) for size in ("tp", "pp", "ep", "etp")}
    given = {f"parallel.{size}": n for size, n in sizes.items() if n is not None}
    if options.policy:
        given["policy"] = options.policy
    if options.policy == "megatron":
        given["parallel.dp"] = max(1, ranks.world() // ((options.tp or 1) * (options.pp or 1)))
    return given


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
