"""The command `moe-rl`: a file per family of verbs, each verb in one place (see `verbs`)."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
import textwrap
from collections.abc import Sequence

from moe_rl.cli import checkpoints, methods, new, running, runs, tables
from moe_rl.cli.verbs import Verb
from moe_rl.errors import MoeRlError
from moe_rl.registry import STUDY

VERBS = [found for family in (running, new, methods, tables, runs, checkpoints) for found in vars(family).values()
         if isinstance(found, Verb)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a run failed (or `diff` found a difference), 2 something to mend, 130 interrupted."""
    options = parsed(arguments)
    try:
        return options.action(options)
    except MoeRlError as error:
        print(f"moe-rl: {error}", file=sys.stderr, flush=True)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in STUDY:
            raise
        print(f"moe-rl needs {error.name}: pip install 'moe_rl[study]'", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("moe-rl: interrupted; the same command goes on from the last commits", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written, a full disk; without a file it is a bug of ours
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = "" if error.filename is None else f"{error.filename}: "  # who writes by pyarrow hears no name
        print(f"moe-rl: {where}{os.strerror(error.errno or 0)}", file=sys.stderr, flush=True)
        return 2


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments as the verb's action takes them. What its verb does not take ends the program with the usage of
    that verb, and what is there."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        known = [flag for flag in options.parser._option_string_actions if flag.startswith("--")]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=2)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        options.parser.error(f"{' '.join(unknown)} is nothing that it takes.{hint} Its options are {', '.join(known)}.")
    return options


def parser() -> argparse.ArgumentParser:
    """The command line. What it parses has the `action` of its verb, and its `parser`."""
    top = argparse.ArgumentParser(prog="moe-rl", usage="moe-rl COMMAND …", allow_abbrev=False, formatter_class=Narrow,
                                  description="A microscope for Mixture-of-Experts routing during RL.",
                                  epilog="moe-rl COMMAND --help has options and examples of each.")
    commands = top.add_subparsers(required=True, metavar="COMMAND", title="commands", prog="moe-rl")
    for verb in VERBS:
        p = commands.add_parser(verb.name, usage=f"moe-rl {verb.usage}", help=verb.help, description=verb.help,
                                epilog=verb.examples, allow_abbrev=False, formatter_class=Narrow)
        p.set_defaults(action=verb.action, parser=p)
        for flags, settings in verb.arguments:
            p.add_argument(*flags, **settings)
    return top


class Narrow(argparse.RawDescriptionHelpFormatter):
    """Help that leaves most of a line to what an option does, and no line of examples longer than the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=20)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(short for line in text.splitlines() for short in _cut(line, width))


def _cut(line: str, width: int) -> list[str]:
    """A line of examples, `  command   what it does`, or of text, in lines of at most `width`."""
    command, _, said = line.strip().partition("   ")
    if len(line) <= width:
        return [line]
    if not line.startswith("  "):
        return textwrap.wrap(line, width)
    explained = textwrap.wrap(said.strip(), width - 6)
    words = textwrap.wrap(command, width - 8, break_long_words=False, break_on_hyphens=False)
    return [*"  {}".format(" \\\n      ".join(words)).splitlines(), *(f"      {part}" for part in explained)]
