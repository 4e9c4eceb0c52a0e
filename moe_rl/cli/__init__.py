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
    "run": ("moe_rl.cli.running:run", "Run a study, or go on with it; ends with tables and figures."),
    "rerun": ("moe_rl.cli.running:rerun", "Run stored runs again from their own settings, and compare them."),
    "cancel": ("moe_rl.cli.running:cancel", "Take the runs below a folder out of the cluster's queue."),
    "work": ("moe_rl.cli.running:work", "One run of a plan, in this process: what a scheduler calls."),
    "new": ("moe_rl.cli.new:new", "A folder with a study of your own, ready to run, and its tests."),
    "methods": ("moe_rl.cli.methods:methods", "Every method by name: setting and source; one of them in full."),
    "plot": ("moe_rl.cli.tables:plot", "Draw a study's figures and print its summary, from tables alone."),
    "report": ("moe_rl.cli.tables:report", "A study as one web page: tables, figures, settings, cost."),
    "runs list": ("moe_rl.cli.runs:list_runs", "Every run below a folder: state, age, time left."),
    "runs show": ("moe_rl.cli.runs:show", "One run: its manifest and its last rows."),
    "runs read": ("moe_rl.cli.runs:read", "The rollouts of a run: responses, rewards, what was clipped."),
    "runs diff": ("moe_rl.cli.runs:diff", "Where two runs first differ, and which of their settings differ."),
    "runs collect": ("moe_rl.cli.tables:collect", "The tables of a finished study as a few small files, to commit."),
    "runs export": ("moe_rl.cli.tables:export", "The tables of all runs below a folder as CSV, or to a tracker."),
    "runs import": ("moe_rl.integrations.verl.commands:import_run", "A run of verl, from its log, as a run folder."),
    "checkpoint compare": ("moe_rl.analysis.commands:compare",
                           "How far routing moved between checkpoints, on your own texts."),
    "checkpoint evaluate": ("moe_rl.analysis.commands:evaluate",
                            "avg@k, pass@k, maj@k on your own problems, with intervals."),
    "checkpoint view": ("moe_rl.analysis.commands:view",
                        "A web page of one response: where traces of its routing differ."),
    "checkpoint pretrain": ("moe_rl.cli.pretrain:pretrain",
                            "A small MoE from nothing, until routers and loss have settled."),
    "diagnose": ("moe_rl.analysis.commands:diagnose", "Why the engine's log-probs and the trainer's disagree."),
}
"""By name, the `module:attribute` of a `Verb`, and its line in the list of commands."""
GROUPS = {
    "": "A microscope for Mixture-of-Experts routing during RL.",
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
        print(f"moe-rl: {error.filename}: {os.strerror(error.errno or 0)}", file=sys.stderr, flush=True)
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
                      f"{call} COMMAND --help has options and examples of each."])


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
