"""The command line `moe-rl`: a table of commands. Their modules are imported when they are called (see `verbs`)."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.storage.terminal import harmless

COMMANDS = {
    "new": ("moe_rl.cli.new:new", "Create a folder with your own study, ready to run, and tests."),
    "run": ("moe_rl.cli.running:run", "Run a study, or continue it; print tables and draw figures."),
    "watch": ("moe_rl.cli.tables:watch", "Write a study's page again and again while it trains."),
    "report": ("moe_rl.cli.tables:report", "Write a study as one web page: tables, figures, settings, cost."),
    "plot": ("moe_rl.cli.tables:plot", "Print a study's tables and draw its figures."),
    "diagnose": ("moe_rl.analysis.commands:diagnose", "Find out why engine and trainer disagree on log-probs."),
    "list": ("moe_rl.cli.listing:list_names", "List tasks, models, settings, columns, methods or figures."),
    "methods": ("moe_rl.cli.listing:methods", "List all methods with their sources, or explain one of them."),
    "runs list": ("moe_rl.cli.runs:list_runs", "List the runs below a folder: state, age, time left."),
    "runs show": ("moe_rl.cli.runs:show", "Print a run's manifest and its last rows."),
    "runs read": ("moe_rl.cli.runs:read", "Print rollouts of a run: responses, rewards, clipped tokens."),
    "runs diff": ("moe_rl.cli.runs:diff", "Find where two runs first differ, and which settings differ."),
    "runs repeat": ("moe_rl.cli.running:rerun", "Run stored runs again with their settings, and compare results."),
    "runs cancel": ("moe_rl.cli.running:cancel", "Remove the runs below a folder from the cluster's queue."),
    "runs collect": ("moe_rl.cli.tables:collect", "Write the tables of a finished study as a few small files."),
    "runs export": ("moe_rl.cli.tables:export", "Export the tables of runs as CSV, or to a tracker."),
    "runs import": ("moe_rl.integrations.verl.commands:import_run", "Import a run of verl from its log."),
    "checkpoint compare": (
        "moe_rl.analysis.commands:compare",
        "Measure how routing changed between checkpoints, on your texts.",
    ),
    "checkpoint evaluate": ("moe_rl.analysis.commands:evaluate", "Measure avg@k, pass@k and maj@k on your problems."),
    "checkpoint view": ("moe_rl.analysis.commands:view", "Write a web page that compares the routing of one response."),
    "work": ("moe_rl.cli.running:work", "Carry out one run of a plan, as a scheduler does."),
}
"""By name, the `module:attribute` of a `Verb`, and its line in the list of commands."""
MOVED = {"rerun": "runs repeat", "cancel": "runs cancel"}
"""Names of before 0.2, which work until 0.3."""
GROUPS = {
    "runs": "Stored runs: list, show, read, diff, repeat, cancel, collect, export, import.",
    "checkpoint": "Model checkpoints: compare, evaluate, view.",
}
"""First words that others follow."""
HIDDEN = {"work"}
"""Commands that the list of commands leaves out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a run failed (or `runs diff` found a difference), 2 wrong input, 130 interrupted. A
    character that the terminal's encoding lacks is printed as `?`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        words = [*(sys.argv[1:] if arguments is None else arguments)]
        if words and (now := MOVED.get(words[0])):
            print(f"moe-rl: {words[0]} is called {now} now. The old name works until 0.3.", file=sys.stderr)
            words[:1] = now.split()
        options, others = parser_of(words).parse_known_args(words)
        if others:
            from moe_rl.registry import unknown

            arguments = options.action.arguments if hasattr(options, "action") else ()
            flags = [flag for names, _ in arguments for flag in names if flag.startswith("-")]
            if others[0].startswith("-") and others[0] not in flags:
                unknown("option", others[0], ["--help", *flags])
            raise ConfigError(f"{others[0]!r} is one argument too many. Add --help to see what the command takes.")
        return options.action(options)
    except MoeRlError as error:
        print(f"moe-rl: {harmless(str(error))}", file=sys.stderr, flush=True)
        return 2
    except ModuleNotFoundError as error:
        from moe_rl.registry import STUDY

        if error.name not in STUDY:
            raise
        print(f"moe-rl needs {error.name}: pip install 'moe_rl[study]'", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("moe-rl: interrupted. The same command continues from the last checkpoints.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written; without a file it is a bug of ours
        if error.filename is None:
            raise
        print(f"moe-rl: {harmless(str(error.filename))}: {os.strerror(error.errno or 0)}", file=sys.stderr, flush=True)
        return 2


def parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands. Of the command in `words` alone the module is imported, and the arguments are known.

    Raises ConfigError where the part of the package that has the command is not installed."""
    parser = argparse.ArgumentParser("moe-rl", description="Measure and control Mixture-of-Experts routing during RL.")
    asked = any(word.startswith("--v") for word in words)  # also abbreviated; else nothing is looked up
    installed = importlib.metadata.distributions(name="moe_rl") if asked else ()
    version = next((package.version for package in installed), "(not installed)")
    parser.add_argument("--version", action="version", version=f"moe-rl {version}", help="print the version")
    below = {"": parser.add_subparsers(metavar="COMMAND", required=True)}
    form = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=20)
    for name, (_, summary) in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in below:
            added = below[""].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            below[group] = added.add_subparsers(metavar="COMMAND", required=True)
        shown: dict[str, Any] = {} if name in HIDDEN else {"help": summary}
        added = below[group].add_parser(word, description=summary, allow_abbrev=False, formatter_class=form, **shown)
        if [*words[: len(name.split())]] == name.split():
            from moe_rl.registry import import_component

            command: Any = import_component("command", name, COMMANDS[name][0])
            command.fill(added)
    return parser
