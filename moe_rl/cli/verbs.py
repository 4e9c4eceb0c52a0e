"""What a command takes, its examples and its action, in one place; `moe_rl.cli.COMMANDS` has its name and its summary.

    @verb(argument("folder", type=Path), MIX_CODE, examples="  moe-rl plot runs/x")
    def plot(options): …

Help is printed without importing anything that reads tables: actions import what they need when they are called.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Action = Callable[[argparse.Namespace], int]
"""From the parsed options to the exit code."""
Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Flags and settings, as `ArgumentParser.add_argument` takes them."""


class Verb(NamedTuple):
    """What a command takes and does. `examples` end its help: indented lines, then what else there is to say."""

    arguments: tuple[Argument, ...]
    examples: str
    action: Action

    def __call__(self, options: argparse.Namespace) -> int:
        return self.action(options)

    @property
    def options(self) -> list[str]:
        """Its long options, `--help` first."""
        return ["--help", *(flag for flags, _ in self.arguments for flag in flags if flag.startswith("--"))]

    def parse(self, name: str, summary: str, words: Sequence[str]) -> argparse.Namespace:
        """The options that `words` give. Ends the program with the usage where the command does not take them, and
        with the help where they ask for it."""
        narrow = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=20)
        parser = argparse.ArgumentParser(f"moe-rl {name}", usage=f"moe-rl {name} [options] {self._required()}".rstrip(),
                                         description=summary, epilog=f"examples:\n{self.examples.strip(chr(10))}",
                                         allow_abbrev=False, formatter_class=narrow)
        for flags, settings in self.arguments:
            parser.add_argument(*flags, **settings)
        options, unknown = parser.parse_known_args(words)
        if unknown:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self.options[1:], n=2)
            hint = f": did you mean {' or '.join(close)}?" if close else "."
            parser.error(f"unknown argument {' '.join(unknown)}{hint} The options are {', '.join(self.options)}.")
        return options

    def _required(self) -> str:
        """What the usage shows beside the options: `FOLDER --out OUT`."""
        shown = []
        for flags, settings in self.arguments:
            if not flags[0].startswith("-"):
                metavar = str(settings.get("metavar", flags[0]))
                shown.append({"?": f"[{metavar}]", "+": f"{metavar} …"}.get(str(settings.get("nargs")), metavar))
            elif settings.get("required"):
                shown.append(f"{flags[0]} {flags[0].lstrip('-').upper()}")
        return " ".join(shown)


def argument(*flags: str, **settings: Any) -> Argument:
    """One argument or option of a command, as `ArgumentParser.add_argument` takes it."""
    return flags, settings


def verb(*arguments: Argument, examples: str) -> Callable[[Action], Verb]:
    """Makes an action a `Verb`."""
    return lambda action: Verb(arguments, examples, action)


MIX_CODE = argument("--mix-code", action="store_true", help="pool runs of different code, data or settings")
UNFINISHED = argument("--unfinished", action="store_true", help="include unfinished runs, up to their last checkpoint")
JOBS = argument("--jobs", type=int, help="runs at a time, one thread each (default: all cores)")
DEVICE = argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
DTYPE = argument("--dtype", default="float32", help="dtype of the weights (default: float32)")
TRUST_CODE = argument("--trust-remote-code", action="store_true", help="run code that the checkpoint contains")
