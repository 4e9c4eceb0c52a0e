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

from moe_rl.cli.verbs import JOBS, MIX_CODE, SET, SETTINGS, argument, verb
from moe_rl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

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
    argument("--launcher", default="local", metavar="NAME", help="slurm, or a file with its settings: docs/studies.md"),
    argument("--task", help="reasoning_gym:…, jsonl:FILE, module:Class (docs/tasks.md)"),
    argument("--arms", metavar="A,B", help="run only these arms of the study"),
    argument("--arm", action="append", default=[], metavar="ARM", help="run this arm instead; the first: baseline"),
    argument("--condition", action="append", default=[], metavar="NAME", help="run only this condition of the study"),
    SET,
    SETTINGS,
    argument("--policy", metavar="NAME", help="hf, or on several processes fsdp or 'megatron(ep=2)'"),
    argument("--trainer", metavar="NAME", help="verl: train with verl's PPO trainer (docs/your_trainer.md)"),
    argument("--track", action="append", default=[], metavar="NAME", help="tensorboard or wandb, or NAME=FOLDER"),
    MIX_CODE,
    examples="""
  moe-rl run routing_replay --dry-run     print cost and warnings
  moe-rl run routing_replay --seeds 8     also continues a stopped study
  moe-rl run routing_replay --arms gspo_short   one arm; the others can follow
  moe-rl run routing_replay --condition lag=0   fresh rollouts alone
  moe-rl run my_study.py --out trial --arm gspo --arm "sapo(tau_neg=1.05)+name=mine"
  moe-rl run my_study.py --steps 200      also extends finished runs
  torchrun --nproc-per-node 2 -m moe_rl run my_study.py --policy fsdp
  torchrun --nproc-per-node 2 -m moe_rl run my_study.py --policy megatron
Defaults are the study's settings. --arm, --condition and --set may be repeated; a setting
is optimizer.lr=1e-4, and in a file of --settings optimizer.lr = 1e-4.""",
)
def run(options: argparse.Namespace) -> int:
    """Plan, check, run, summarise, draw."""
    from rich.console import Console

    from moe_rl import ranks
    from moe_rl.results import printed
    from moe_rl.storage.terminal import say
    from moe_rl.study.declaration import QUICK_STEPS, load_study_file, name_namesake, write_declaration
    from moe_rl.study.rehearsal import require_writable
    from moe_rl.study.workers import at_a_time, beside, preflight, unfinished

    cluster, options.settings = _launcher(options)
    study, options.settings = _other_trainer(load_study_file(options.study), options)
    console = Console(quiet=ranks.rank() > 0)
    options.track = [_with_folder(tracker) for tracker in options.track]
    declared = _with_settings(study, options)
    declared = declared.quick_form() if options.quick else declared
    own_arms = declared.own_arms(options.arms)
    study = declared.with_arms(options.arm, own_arms).with_conditions(options.condition)
    steps = QUICK_STEPS if options.quick and options.steps is None else options.steps
    planned = study.runs(options.out, _seeds(options.seeds, study.seeds), steps)
    jobs = at_a_time(options.jobs, planned)
    printed.check(study)
    if ranks.launched():
        ranks.join(study.base.model.device)
    arms = dict.fromkeys(p.config.arm for p in planned)
    cautions = [f"{text}. Give the arm another name." for text in map(name_namesake, arms) if text]
    ranks.from_rank_0(lambda: require_writable(options.out / study.name))
    cautions += ranks.from_rank_0(lambda: preflight(study, planned, elsewhere=options.dry_run or cluster is not None))
    if options.dry_run:
        printed.print_plan(console, study, planned, jobs if cluster is None else options.jobs or len(planned))
    cautions += ranks.from_rank_0(lambda: _previewed(console, study, planned))
    for caution in cautions:
        say(console, ("warning", "yellow"), f" {caution}", wrap=True)
    ranks.from_rank_0(lambda: unfinished(planned, options.mix_code))  # refuses before anything is written
    if options.dry_run:
        if command := beside(study, "command"):  # of another trainer
            _print_commands(console, {p.path: command(p.config, p.path) for p in planned})
        return 0
    written, keep = declared if {*study.arms} <= {*declared.arms} else study, bool(own_arms or options.arm)
    if changed := ranks.from_rank_0(lambda: write_declaration(written, options.out, keep=keep)):
        text = f" {options.out / study.name} contains runs of an earlier version of the study, with another "
        say(console, ("warning", "yellow"), text + ", ".join(changed), wrap=True)
    return _carried_out(console, study, planned, jobs, cluster, options)


def _print_commands(console: Console, commands: Mapping[Path, str]) -> None:
    """The command of the first run, and for each other run the words that it has instead, or does not have."""
    from moe_rl.storage.terminal import say

    paths, (first, *others) = [*commands], [shlex.split(text) for text in commands.values()]
    say(console, ("command", "bold"), f" {shlex.join(first)}")
    for path, words in zip(paths[1:], others, strict=True):
        own = [word for word in words if word not in first]
        keys = {word.partition("=")[0] for word in words}
        without = [word for word in first if word.partition("=")[0] not in keys]
        lacks = f", without {shlex.join(without)}" if without else ""
        say(console, ("the same", "bold"), f" for {path}, with {shlex.join(own)}{lacks}")


def _carried_out(
    console: Console, study: Study, planned: Sequence[Planned], jobs: int, cluster: Any, options: argparse.Namespace
) -> int:
    """Submit the runs to a cluster, or carry them out and print the study; the exit code."""
    from moe_rl import ranks
    from moe_rl.results import printed
    from moe_rl.storage.terminal import say
    from moe_rl.study.workers import run_study

    how: dict[str, Any] = {"cache": options.out / ".cache", "trackers": options.track, "mix_code": options.mix_code}
    if cluster is not None:
        ids, queued = _slurm("submit")(study, planned, cluster, jobs=options.jobs, **how)
        submitted = f"submitted as job {' and '.join(ids)}" if ids else "nothing to submit"
        say(console, f"{study.name}: {submitted}" + f"; {queued} runs are already in the queue" * bool(queued))
        return 0
    failures = run_study(study, planned, jobs=jobs, console=console, **how)
    if ranks.launched():
        ranks.leave()
    code = _failed(failures)
    if ranks.rank() == 0 and len(failures) < len(planned):
        paths, folder = [p.path for p in planned], options.out / study.name
        printed.print_study(  # the study file itself is code, so it is trusted
            console, folder, mix_code=options.mix_code, only=paths, trust=True, study_file=study.file
        )
    return code


@verb(
    argument("folder", type=Path, help="a study's tables, or an arm, a condition or a run in them"),
    argument("--out", type=Path, default=Path("again"), help="folder of the new runs (default: again)"),
    argument("--steps", type=int, help="run and compare only the first steps (default: all steps)"),
    JOBS,
    argument("--trust", action="store_true", help="run the code from outside moe_rl that the rows name"),
    examples="""
  moe-rl runs repeat studies/routing_replay --out again   every run
  moe-rl runs repeat studies/routing_replay/gspo/lag=0/seed=0 --out again
  moe-rl runs repeat studies/routing_replay/gspo/lag=0/seed=0 --steps 3
                                only three steps: seconds
  moe-rl runs repeat studies/many_turns --out again --trust
                                its rows use losses of studies/""",
)
def rerun(options: argparse.Namespace) -> int:
    """Runs made again from their rows, and whether they end alike."""
    from rich.console import Console

    from moe_rl.study.rerun import rerun as run_again

    return _failed(
        run_again(
            options.folder, options.out, jobs=options.jobs, console=Console(), steps=options.steps, trust=options.trust
        )
    )


@verb(
    argument("folder", type=Path, help="folder of a study, an arm or a run"),
    examples="""
  moe-rl runs cancel runs/routing_replay         all its runs
  moe-rl runs cancel runs/routing_replay/gspo_short   the runs of one arm
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
    argument("plan", help="plan.json of `moe-rl run STUDY --launcher slurm`"),
    argument("number", type=int, help="number of the run in the plan, from 0"),
    argument("--stop", type=Path, metavar="FILE", help="save the next step and exit once this file exists"),
    examples="""
  moe-rl work runs/my_study/.jobs/1/plan.json 0
Exit code: 0 the run ended, 75 it was stopped (call it again), 2 wrong input.
SIGTERM and SIGUSR1 work like --stop.""",
)
def work(options: argparse.Namespace) -> int:
    """The worker process of a study, on any machine. It runs the code that its plan names."""
    return _slurm("work")(options.plan, options.number, options.stop)


def _launcher(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """The cluster that runs are for, if any, and the settings that are the study's."""
    from moe_rl import ranks

    its = [text for text in options.settings if text.startswith("launcher.")]
    cluster = _slurm("launcher")(options.launcher, its) if its or options.launcher != "local" else None
    if cluster is not None:
        if ranks.launched():
            raise ConfigError("--launcher slurm does not work under torchrun. Use --set launcher.ranks=N instead.")
        ranks.plan_for(cluster.ranks)
    return cluster, [text for text in options.settings if text not in its]


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


def _with_settings(study: Study, options: argparse.Namespace) -> Study:
    """The study with --task, --policy, --settings and --set."""
    from moe_rl.config import parse_settings

    changes: dict[str, Any] = {"task": options.task} if options.task else {}
    changes |= {"policy": options.policy} if options.policy else {}
    fixed = {**changes, **parse_settings(study.base.replace(**changes), [], options.file), **changes}
    changes = fixed | parse_settings(study.base.replace(**fixed), options.settings)
    return study.with_settings(changes, options.condition)


def _previewed(console: Console, study: Study, planned: Sequence[Planned]) -> list[str]:
    """Print what the runs ask; returns cautions. Without a check beside the trainer nothing is known of the runs."""
    from moe_rl.storage import folder as runs
    from moe_rl.storage.terminal import say
    from moe_rl.study.rehearsal import preview
    from moe_rl.study.workers import beside

    if beside(study, "check") is None:
        return []
    other_trainer = beside(study, "command") is not None
    names = ("task", "model", "max_new_tokens", "eval_prompts", "prompts_per_step")
    different = {str([*(getattr(p.config, name) for name in names), p.config.cold_start.target]): p for p in planned}
    previews = [preview(p.config) for p in different.values()]
    for lines in dict.fromkeys(tuple(lines) for lines, _ in previews):
        for name, text in lines:
            if other_trainer and name in ("memory", "step"):  # those of ours
                continue
            say(console, (f"{name:<8}", "bold"), f" {text}", wrap=True)
    paces = [pace for p in planned if (pace := runs.state(p.path).get("seconds_per_step"))]
    if paces:
        text = f" {statistics.median(paces):.2g} s a step, measured on {len(paces)} of these runs"
        say(console, ("time", "bold"), text, wrap=True)
    return list(dict.fromkeys(caution for _, cautions in previews for caution in cautions))


def _failed(failures: list[Failure]) -> int:
    """Say what failed, each message once; the exit code."""
    from moe_rl.results import printed
    from moe_rl.storage.terminal import harmless

    for message, paths in printed.by_message(failures).items():
        print(f"moe-rl: {harmless(message)}\n  in {harmless(', '.join(map(str, paths)))}", file=sys.stderr)
    return 0 if not failures else 2 if all(f.expected for f in failures) else 1


def _seeds(text: str | None, declared: Sequence[int]) -> list[int] | None:
    """A list, or 0 … N−1; not where N is one of a study's own seeds and those begin elsewhere, as 403 of 400 to 403."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r} is not a number N, for seeds 0 to N-1, or a list such as 0,1,2") from error
    if min(numbers) < 0 or "," not in text and numbers[0] > 10_000:
        raise ConfigError(f"--seeds {text}: seeds must not be negative, nor N above 10,000. Give N, or a list 0,1.")
    if "," not in text and 0 not in declared and numbers[0] in declared:
        raise ConfigError(
            f"--seeds {text} means seeds 0 to {numbers[0] - 1}, but the study declares the seed {text}. "
            f"For that seed write --seeds {text}, with the comma."
        )
    return numbers if "," in text else list(range(max(numbers[0], 1)))  # --seeds 0 can only mean the seed 0
