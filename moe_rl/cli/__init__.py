"""The command line `moe-rl`: a table of commands. Their modules are imported when they are called (see `verbs`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe_rl.cli.verbs import Verb
from moe_rl.errors import ConfigError, MoeRlError, name_full_disk
from moe_rl.storage.terminal import harmless

COMMANDS = {
    "run": ("moe_rl.cli.running:run", "Run a study, or continue it; print tables and draw figures."),
    "rerun": ("moe_rl.cli.running:rerun", "Run stored runs again with their settings, and compare results."),
    "cancel": ("moe_rl.cli.running:cancel", "Remove the runs below a folder from the cluster's queue."),
    "work": ("moe_rl.cli.running:work", "Carry out one run of a plan, as a scheduler does."),
    "new": ("moe_rl.cli.new:new", "Create a folder with your own study, ready to run, and tests."),
    "methods": ("moe_rl.cli.methods:methods", "List all methods with their sources, or explain one of them."),
    "plot": ("moe_rl.cli.tables:plot", "Print a study's tables and draw its figures."),
    "report": ("moe_rl.cli.tables:report", "Write a study as one web page: tables, figures, settings, cost."),
    "runs list": ("moe_rl.cli.runs:list_runs", "List the runs below a folder: state, age, time left."),
    "runs show": ("moe_rl.cli.runs:show", "Print a run's manifest and its last rows."),
    "runs read": ("moe_rl.cli.runs:read", "Print rollouts of a run: responses, rewards, clipped tokens."),
    "runs diff": ("moe_rl.cli.runs:diff", "Find where two runs first differ, and which settings differ."),
    "runs collect": ("moe_rl.cli.tables:collect", "Write the tables of a finished study as a few small files."),
    "runs export": ("moe_rl.cli.tables:export", "Export the tables of runs as CSV, or to a tracker."),
    "runs import": ("moe_rl.integrations.verl.commands:import_run", "Import a run of verl from its log."),
    "checkpoint compare": ("moe_rl.analysis.commands:compare",
                           "Measure how routing changed between checkpoints, on your texts."),
    "checkpoint evaluate": ("moe_rl.analysis.commands:evaluate",
                            "Measure avg@k, pass@k and maj@k on your problems."),
    "checkpoint view": ("moe_rl.analysis.commands:view",
                        "Write a web page that compares the routing of one response."),
    "checkpoint pretrain": ("moe_rl.cli.pretrain:pretrain",
                            "Train a small MoE from random weights until it has converged."),
    "diagnose": ("moe_rl.analysis.commands:diagnose", "Find out why engine and trainer disagree on log-probs."),
}
"""By name, the `module:attribute` of a `Verb`, and its line in the list of commands."""
GROUPS = {
    "": "Measure and control Mixture-of-Experts routing during RL.",
    "runs": "Stored runs: list, show, read, diff, collect, export, import.",
    "checkpoint": "Model checkpoints: compare, evaluate, view, pretrain.",
}
"""First words that others follow."""
HIDDEN = {"work"}
"""Commands that the list of commands leaves out."""
RENAMED = {"volatility": "checkpoint compare"}
"""Earlier names of commands that are not the last word of today's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a run failed (or `runs diff` found a difference), 2 something to mend, 130
    interrupted."""
    try:
        if arguments is None and "COMP_LINE" in os.environ:  # a shell asks: complete -o default -C moe-rl moe-rl
            print(*completions(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]), sep="\n")
            return 0
        words = [*(sys.argv[1:] if arguments is None else arguments)]
        if (name := command_of(words)) in GROUPS:
            asked = bool({"-h", "--help"} & {*words})
            print(overview(name), file=sys.stdout if asked else sys.stderr)
            return 0 if asked else 2
        options = parsed(words)
        with name_full_disk(Path(getattr(options, "out", None) or getattr(options, "folder", None) or "")):
            return verb_of(name)(options)
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


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options of the command that `words` call. Ends the program with the usage where it does not take them."""
    name = command_of(words)
    return verb_of(name).parse(name, COMMANDS[name][1], words[len(name.split()):])


def verb_of(name: str) -> Verb:
    """A command by name. Raises ConfigError where the part of the package that has it is not installed."""
    from moe_rl.registry import import_component

    found: Any = import_component("command", name, COMMANDS[name][0])
    return found


def command_of(words: Sequence[str]) -> str:
    """The command that `words` begin with; a group, or "", where they end or ask for help before its name is complete.
    Raises ConfigError, which names the nearest, where there is no such command."""
    group = ""
    for word in words:
        if word in ("-h", "--help"):
            break
        name = f"{group} {word}".strip()
        if " " not in word and name in COMMANDS:
            return name
        if name not in GROUPS:
            _unknown(group, word)
        group = name
    return group


def overview(group: str = "") -> str:
    """The list of commands, or of those of a group, a line each."""
    rows = [f"  {word:<12}{summary}" for word, summary in _below(group).items()]
    call = f"moe-rl {group}".strip()
    return "\n".join([f"usage: {call} COMMAND …", "", GROUPS[group], "", "commands:", *rows, "",
                      f"{call} COMMAND --help prints the options and examples of a command."])


def completions(line: str) -> list[str]:
    """What may follow the last word of a line in a shell: commands, or a command's options where it begins with `-`."""
    *words, last = line.split(" ")[1:] or [""]
    try:
        name = command_of(words)
        known = [*_below(name)] if name in GROUPS else verb_of(name).options if last.startswith("-") else []
    except MoeRlError:
        return []
    return [word for word in known if word.startswith(last)]


def _below(group: str) -> dict[str, str]:
    """The next word after that of a group, and what the list of commands has of it."""
    named = {name: summary for name, (_, summary) in COMMANDS.items() if name not in HIDDEN} | GROUPS
    split = {name: name.rpartition(" ") for name in named}
    return {last: named[name] for name, (above, _, last) in split.items() if name and above == group}


def _unknown(group: str, word: str) -> NoReturn:
    from moe_rl.registry import unknown

    if now := RENAMED.get(word) or next((name for name in COMMANDS if name.endswith(f" {word}")), None):
        raise ConfigError(f"{f'moe-rl {group}'.strip()} {word} is now `moe-rl {now}`")
    unknown(f"command of moe-rl {group}".strip(), word, _below(group))
