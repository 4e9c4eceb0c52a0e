"""Verbs that carry out runs."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_rl.cli.verbs import JOBS, MIX_CODE, argument, verb
from moe_rl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from moe_rl.config import RunConfig
    from moe_rl.study.declaration import Planned, Study
    from moe_rl.study.workers import Failure

TRAINERS = {"verl": "moe_rl.integrations.verl.study:execute"}
"""What `--trainer` knows: what carries out a run, as `Study.trainer` has it."""


@verb(
    argument("study", help="a file with `study = Study(…)`, a module, or routing_replay"),
    argument("--dry-run", action="store_true", help="print runs, cost and an example prompt; start nothing"),
    argument("--quick", action="store_true", help="test the study: one seed, three steps, as <study>-quick"),
    argument("--seeds", help="number of seeds, or a list: 8 is 0 to 7, and '7,' is only 7"),
    argument("--steps", type=int, metavar="N", help="length of every run"),
    argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of the runs (default: runs)"),
    JOBS,
    argument("--launcher", default="local", metavar="NAME",
             help="slurm, or a file with its settings: docs/studies.md"),
    argument("--task", help="reasoning_gym:…, jsonl:FILE, module:Class (docs/tasks.md)"),
    argument("--arms", metavar="A,B", help="run only these arms of the study"),
    argument("--arm", action="append", default=[], metavar="ARM",
             help="run this arm instead; without comparisons of the study, the first one is "
                  "the baseline"),
    argument("--set", action="append", default=[], metavar="K=V", dest="settings",
             help="change a setting, e.g. optimizer.lr=1e-4: docs/settings.md"),
    argument("--policy", metavar="NAME", help="hf, or on several processes fsdp or 'megatron(ep=2)'"),
    argument("--trainer", metavar="NAME", help="verl: train with verl's PPO trainer (docs/your_trainer.md)"),
    argument("--track", action="append", default=[], metavar="NAME",
             help="tensorboard or wandb, or NAME=FOLDER (docs/studies.md)"),
    MIX_CODE,
    examples="""
  moe-rl run routing_replay --dry-run     print cost and warnings
  moe-rl run routing_replay --seeds 8     also continues a stopped study
  moe-rl run routing_replay --arms gspo   one arm; the others can follow
  moe-rl run my_study.py --out trial --arm gspo --arm "sapo(tau_neg=1.05)"
  moe-rl run my_study.py --steps 200      also extends finished runs
  torchrun --nproc-per-node 2 -m moe_rl run my_study.py --policy fsdp
  torchrun --nproc-per-node 2 -m moe_rl run my_study.py --policy megatron
Defaults are the study's settings. --arm and --set may be repeated.""",
)
def run(options: argparse.Namespace) -> int:
    """Plan, check, run, summarise, draw."""
    from rich.console import Console

    from moe_rl import ranks
    from moe_rl.config import parse_settings
    from moe_rl.results import printed
    from moe_rl.storage.terminal import say
    from moe_rl.study.declaration import QUICK_STEPS, load_study_file, write_declaration
    from moe_rl.study.workers import at_a_time, preflight, run_study, unfinished

    cluster, options.settings = _launcher(options)
    study, options.settings = _other_trainer(load_study_file(options.study), options)
    jobs, console = at_a_time(options.jobs), Console(quiet=ranks.rank() > 0)
    options.track = [_with_folder(tracker) for tracker in options.track]
    changes: dict[str, Any] = {"task": options.task} if options.task else {}
    changes |= {"policy": options.policy} if options.policy else {}
    changes |= parse_settings(study.base.replace(**changes), options.settings)
    cautions = _changed_setting(study, changes)
    study = study.with_settings(changes)
    whole = study = study.quick_form() if options.quick else study
    chosen = [*study.own_arms(options.arms), *options.arm]
    study = study.with_arms(chosen)
    steps = QUICK_STEPS if options.quick and options.steps is None else options.steps
    planned = study.runs(options.out, _seeds(options.seeds, study.seeds), steps)
    printed.check(study)
    if ranks.launched():
        ranks.join(study.base.model.device)
    cautions += ranks.from_rank_0(lambda: preflight(study, planned))
    if options.dry_run:
        printed.print_plan(console, study, planned, jobs if cluster is None else options.jobs or len(planned))
    cautions += ranks.from_rank_0(lambda: _previewed(console, study, planned, options.dry_run))
    if options.dry_run:
        _print_commands(console, study, planned)
    for caution in cautions:
        say(console, ("warning", "yellow"), f" {caution}", wrap=True)
    ranks.from_rank_0(lambda: unfinished(planned, options.mix_code))  # what refuses, refuses before anything is written
    if options.dry_run:
        if cluster is not None:
            words = _slurm("arguments")(study.name, Path("…"), cluster, len(planned), options.jobs)
            say(console, f"sbatch {shlex.join(words)}")
        return 0
    if changed := ranks.from_rank_0(lambda: write_declaration(
            whole if {*study.arms} <= {*whole.arms} else study, options.out, keep=bool(chosen))):
        say(console, ("warning", "yellow"), f" {options.out / study.name} contains runs of an earlier version of the "
            f"study (changed: {', '.join(changed)}). The new version is used; to keep both, give the study another "
            "name.", wrap=True)
    if cluster is not None:
        return _submitted(console, study, planned, cluster, options)
    failures = run_study(study, planned, cache=options.out / ".cache", jobs=jobs, trackers=options.track,
                         mix_code=options.mix_code, console=console)
    if ranks.launched():
        ranks.leave()
    code = _failed(failures)
    if ranks.rank() == 0 and len(failures) < len(planned):
        printed.print_study(console, options.out / study.name, mix_code=options.mix_code,
                           only=[p.path for p in planned], trust=True)  # the study file itself is code
    return code


@verb(
    argument("folder", type=Path, help="a study's tables, or an arm, a condition or a run in them"),
    argument("--out", type=Path, default=Path("again"), help="folder of the new runs (default: again)"),
    argument("--steps", type=int, help="run and compare only the first steps (default: all steps)"),
    JOBS,
    argument("--trust", action="store_true",
             help="run the code from outside moe_rl that the rows name"),
    examples="""
  moe-rl rerun studies/results/routing_replay --out again   every run
  moe-rl rerun studies/results/routing_replay/gspo/base/seed=0 --out again
  moe-rl rerun studies/results/routing_replay/gspo/base/seed=0 --steps 3
                                only three steps: seconds
  moe-rl rerun studies/results/why_gspo --out again --trust
                                its rows use losses of studies/""",
)
def rerun(options: argparse.Namespace) -> int:
    """Runs made again from their rows, and whether they end alike."""
    from rich.console import Console

    from moe_rl.study.rerun import rerun as run_again

    return _failed(run_again(options.folder, options.out, jobs=options.jobs, console=Console(), steps=options.steps,
                             trusted=lambda code: options.trust or _confirmed(code)))


@verb(
    argument("folder", type=Path, help="folder of a study, an arm or a run"),
    examples="""
  moe-rl cancel runs/routing_replay         all its runs
  moe-rl cancel runs/routing_replay/gspo    the runs of one arm
Checkpoints are kept: `moe-rl run STUDY --launcher slurm` continues the runs.""",
)
def cancel(options: argparse.Namespace) -> int:
    """Cancel tasks, and say which."""
    tasks = _slurm("cancel")(options.folder)
    if not tasks:
        raise ConfigError(f"no run below {options.folder} is in the queue of a cluster. See `moe-rl runs list`.")
    print(f"{len(tasks)} cancelled: {', '.join(tasks)}")
    return 0


@verb(
    argument("plan", help="plan.json of `moe-rl run STUDY --launcher slurm`, or - for stdin"),
    argument("number", type=int, help="number of the run in the plan, from 0"),
    argument("--stop", type=Path, metavar="FILE", help="save the next step and exit once this file exists"),
    examples="""
  moe-rl work runs/my_study/.jobs/1/plan.json 0
Exit code: 0 the run ended, 75 it was stopped (call it again), 2 wrong input.
SIGTERM and SIGUSR1 work like --stop.""",
)
def work(options: argparse.Namespace) -> int:
    """The worker process of a study, on any machine. It runs the code that its plan names."""
    from moe_rl.study.workers import work as carried_out

    return carried_out(options.plan, options.number, options.stop)


def _launcher(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """The cluster that runs are for, if any, and the settings that are the study's."""
    from moe_rl import ranks

    its = [text for text in options.settings if text.startswith("launcher.")]
    cluster = _slurm("launcher")(options.launcher, its) if its or options.launcher != "local" else None
    if cluster is not None:
        if ranks.launched():
            raise ConfigError("--launcher slurm does not work under torchrun. Leave torchrun out, and give the "
                              "processes of a run with --set launcher.ranks=N.")
        ranks.plan_for(cluster.ranks)
    return cluster, [text for text in options.settings if text not in its]


def _print_commands(console: Console, study: Study, planned: Sequence[Planned]) -> None:
    """What another trainer would be called with for each run, where the study has one that says it."""
    from moe_rl.storage.terminal import say
    from moe_rl.study.workers import beside

    if command := beside(study, "command"):
        for p in planned:
            say(console, ("command", "bold"), f" {command(p.config, p.path)}")


def _other_trainer(study: Study, options: argparse.Namespace) -> tuple[Study, list[str]]:
    """The study with the trainer that was asked for and its settings, which begin with its name; and all others."""
    from moe_rl.registry import Component, import_component, unknown

    name, settings = options.trainer, options.settings
    if name is None:
        return study, settings
    if name not in TRAINERS:
        unknown("trainer", name, TRAINERS, "a trainer of your own is Study(trainer='pkg.module:function')")
    import_component("trainer", name, TRAINERS[name])
    options.jobs = options.jobs or 1  # one run of it takes the whole machine, or cluster
    its = tuple(text.removeprefix(f"{name}.") for text in settings if text.startswith(f"{name}."))
    trainer = str(Component(TRAINERS[name], **({"settings": its} if its else {})))
    return dataclasses.replace(study, trainer=trainer), [t for t in settings if not t.startswith(f"{name}.")]


def _slurm(name: str) -> Callable[..., Any]:
    from moe_rl.registry import import_component

    return import_component("launcher", "slurm", f"moe_rl.integrations.slurm:{name}")


def _with_folder(tracker: str) -> str:
    """`NAME=FOLDER`, by an absolute path. Raises ConfigError where there is no such tracker."""
    from moe_rl.registry import import_component

    _, folder = import_component("tracker", tracker, "moe_rl.integrations.trackers:find_tracker")(tracker)
    return f"{tracker.partition('=')[0]}={folder.absolute()}"


def _submitted(console: Console, study: Study, planned: Sequence[Planned], cluster: Any,
               options: argparse.Namespace) -> int:
    from moe_rl.storage.terminal import say

    ids, queued = _slurm("submit")(study, planned, cluster, cache=options.out / ".cache", jobs=options.jobs,
                                   trackers=options.track, mix_code=options.mix_code)
    folder = options.out / study.name
    what = f"submitted as job {' and '.join(ids)}" if ids else "nothing to submit"
    say(console, f"{study.name}: {what}" + f"; {queued} runs are already in the queue" * bool(queued))
    say(console, f"moe-rl runs list {folder}     states of the runs\n"
                 f"moe-rl cancel {folder}   remove them from the queue\n"
                 f"moe-rl plot {folder}     tables and figures of the finished runs")
    return 0


def _changed_setting(study: Study, changes: Mapping[str, Any]) -> list[str]:
    """A caution where `changes` ask for another task or model, and leave settings that were chosen for the old one."""
    run = study.base.replace(**changes)
    left = [name for name in ("optimizer.lr", "max_new_tokens", "cold_start.target") if name not in changes]
    if not left or (run.task, _architecture(run)) == (study.base.task, _architecture(study.base)):
        return []
    return [f"the settings of {study.name} were chosen for {study.base.task} on {study.base.model.name}. Check "
            f"{', '.join(left)}, and set them with --set."]


def _architecture(run: RunConfig) -> tuple[Any, ...]:
    return run.model.name, run.model.overrides


def _previewed(console: Console, study: Study, planned: Sequence[Planned], dry: bool) -> list[str]:
    """Print what runs ask and are given for it; what speaks against it. Without a check beside the trainer it is not
    known what its runs are made of, and a dry run says so."""
    from moe_rl.storage import folder as runs
    from moe_rl.storage.terminal import say
    from moe_rl.study.declaration import TRAINER
    from moe_rl.study.rehearsal import previews
    from moe_rl.study.workers import checked_by

    if checked_by(study) is None:
        return [f"the trainer {study.trainer} has no function `check` beside it, so task, settings and components are "
                "not tried before its runs start."] if dry else []
    found = previews(p.config for p in planned)
    paces = [pace for p in planned if (pace := runs.state(p.path).get("seconds_per_step"))]
    measured = f"{statistics.median(paces):.2g} s a step, measured on {len(paces)} of these runs" if paces else ""
    unknown = "" if study.seconds_per_step else "unknown before the first steps"
    for one in found:
        for name, text in (*one.lines, *[("time", measured or unknown)] * bool(measured or unknown)):
            say(console, (f"{name:<8}", "bold"), f" {text}", wrap=True)
    if study.trainer == TRAINER:  # it cannot be measured afterwards
        rare = ", ".join(dict.fromkeys(str(p.config.measure.detail_every) for p in planned))
        say(console, ("measured", "bold"), f" every {rare} steps only: changes per update and layer, attribution, "
            "noise floor (measure.detail_every)", wrap=True)
    return list(dict.fromkeys(caution for one in found for caution in one.cautions))


def _failed(failures: list[Failure]) -> int:
    """Say what failed, each message once; the exit code."""
    from moe_rl.results import printed
    from moe_rl.storage.terminal import harmless

    for message, paths in printed.by_message(failures).items():
        print(f"moe-rl: {harmless(message)}\n  in {harmless(', '.join(map(str, paths)))}", file=sys.stderr)
    return 0 if not failures else 2 if all(f.expected for f in failures) else 1


def _confirmed(code: list[str]) -> bool:
    """Ask whoever sits at a terminal; nobody else can say yes."""
    if not sys.stdin.isatty():
        return False
    print("the rows name code from outside moe_rl, or another trainer's options, which this command would run:", *code,
          sep="\n  ")
    return input("run it? [y/N] ").strip().lower() in ("y", "yes")


def _seeds(text: str | None, declared: Sequence[int]) -> list[int] | None:
    """A list, or 0 … N−1; not where N is one of a study's own seeds and those begin elsewhere, as 403 of 400 to 403."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text} is not a number N or a list such as 0,1,2") from error
    if min(numbers) < 0:
        raise ConfigError(f"--seeds {text}: seeds must not be negative. Give a number N, or a list such as 0,1,2.")
    if "," not in text and 0 not in declared and numbers[0] in declared:
        raise ConfigError(f"--seeds {text} means seeds 0 to {numbers[0] - 1}, but the study declares the seed {text}. "
                          f"For that seed write --seeds {text}, with the comma.")
    return numbers if "," in text else list(range(max(numbers[0], 1)))  # --seeds 0 can only mean the seed 0
