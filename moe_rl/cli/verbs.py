"""What a verb of the command line is. Each has what it takes, its examples and its action in one place.

    @verb("plot", "Draw a study's figures.", argument("folder", type=Path), MIX_CODE, examples="moe-rl plot runs/x")
    def plot(options): …

Help is printed without importing anything that reads tables: actions import what they need when they are called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Action = Callable[[argparse.Namespace], int]
"""From the parsed options to the exit code."""
Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Flags and settings, as `ArgumentParser.add_argument` takes them."""


@dataclass(frozen=True)
class Verb:
    """One command: `moe-rl NAME …`."""

    name: str
    help: str
    arguments: tuple[Argument, ...]
    examples: str
    action: Action

    @property
    def usage(self) -> str:
        """How it is called, in a line: `plot [options] FOLDER`."""
        shown: list[str] = []
        for flags, settings in self.arguments:
            if not flags[0].startswith("-"):
                name = str(settings.get("metavar", flags[0]))
                shown.append({"?": f"[{name}]", "+": f"{name} …"}.get(str(settings.get("nargs")), name))
            elif settings.get("required"):
                shown.append(f"{flags[0]} {flags[0].lstrip('-').upper()}")
        return " ".join([self.name, "[options]", *shown])


def argument(*flags: str, **settings: Any) -> Argument:
    """One argument or option of a verb, said as to argparse."""
    return flags, settings


def verb(name: str, help: str, *arguments: Argument, examples: str) -> Callable[[Action], Verb]:
    """Makes an action a verb. `examples` end its help: indented lines, then what else there is to say."""
    return lambda action: Verb(name, help, arguments, "examples:\n" + examples.removeprefix("\n"), action)


MIX_CODE = argument("--mix-code", action="store_true", help="pool runs of different code, data or settings")
UNFINISHED = argument("--unfinished", action="store_true", help="include the last commits of unfinished runs")
JOBS = argument("--jobs", type=int, help="runs at a time, one thread each (default: all cores)")
DEVICE = argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
DTYPE = argument("--dtype", default="float32", help="of the weights (default: float32)")
TRUST_CODE = argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings along")
