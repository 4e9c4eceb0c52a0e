"""The command `moe-rl`: a file per family of verbs, each verb in one place (see `verbs`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from moe_rl.cli import checkpoints, methods, running, runs, tables
from moe_rl.cli.verbs import Verb
from moe_rl.errors import MoeRlError

VERBS = [found for family in (running, methods, tables, runs, checkpoints) for found in vars(family).values()
         if isinstance(found, Verb)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a run failed (or `diff` found a difference), 2 something to mend, 130 interrupted."""
    options = parser().parse_args(arguments)
    try:
        return options.action(options)
    except MoeRlError as error:
        print(f"moe-rl: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("moe-rl: interrupted; the same command goes on from the last commits", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a folder that cannot be written, a full disk; without a file it is a bug of ours
        if error.filename is None:
            raise
        print(f"moe-rl: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        return 2


def parser() -> argparse.ArgumentParser:
    """The command line. What it parses has the `action` of its verb."""
    top = argparse.ArgumentParser(prog="moe-rl", description="A microscope for Mixture-of-Experts routing during RL.")
    commands = top.add_subparsers(required=True, metavar="|".join(verb.name for verb in VERBS))
    for verb in VERBS:
        p = commands.add_parser(verb.name, help=verb.help, description=verb.help, epilog=verb.examples,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
        p.set_defaults(action=verb.action)
        for flags, settings in verb.arguments:
            p.add_argument(*flags, **settings)
    return top
