"""What a command takes, its examples and its action, in one place; `moe_rl.cli.COMMANDS` has its name and its summary.

    @verb(argument("folder", type=Path), MIX_CODE, examples="  moe-rl plot runs/x")
    def plot(options): …

Help is printed without importing anything that reads tables: actions import what they need when they are called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
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

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the arguments, the examples and the action."""
        for flags, settings in self.arguments:
            parser.add_argument(*flags, **settings)
        parser.epilog = f"examples:\n{self.examples.strip(chr(10))}"
        parser.set_defaults(action=self)


def argument(*flags: str, **settings: Any) -> Argument:
    """One argument or option of a command, as `ArgumentParser.add_argument` takes it."""
    return flags, settings


def verb(*arguments: Argument, examples: str) -> Callable[[Action], Verb]:
    """Makes an action a `Verb`."""
    return lambda action: Verb(arguments, examples, action)


MIX_CODE = argument("--mix-code", action="store_true", help="pool runs of different code, data or settings")
UNFINISHED = argument("--unfinished", action="store_true", help="include unfinished runs, up to their last checkpoint")
SET = argument(
    "--set", action="append", default=[], metavar="K=V", dest="settings", help="change a setting: docs/settings.md"
)
SETTINGS = argument("--settings", type=Path, metavar="FILE", dest="file", help="TOML file of settings; --set wins")
JOBS = argument("--jobs", type=int, help="runs at a time, one thread each (default: one per core or GPU)")
DEVICE = argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
DTYPE = argument("--dtype", default="float32", help="dtype of the weights (default: float32)")
TRUST_CODE = argument("--trust-remote-code", action="store_true", help="run code that the checkpoint contains")
