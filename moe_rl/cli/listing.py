"""The verbs that list what there is to choose from."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from moe_rl.cli.verbs import argument, verb

LISTS = ("tasks", "models", "settings", "columns", "methods", "figures")
WIDTH = 100


@verb(
    argument("what", choices=LISTS, metavar="WHAT", help=", ".join(LISTS)),
    examples="""
  moe-rl list settings      with their defaults
  moe-rl list columns       of every table
Runs are listed by `moe-rl runs list`.""",
)
def list_names(options: argparse.Namespace) -> int:
    """A name and what it is, in lines of at most WIDTH columns."""
    rows = [(name, " ".join((text or "").partition("\n\n")[0].split())) for name, text in _names(options.what)]
    width = min(36, 2 + max(len(name) for name, _ in rows))
    for name, text in rows:
        print(textwrap.fill(f"{name:<{width - 1}} {text}", WIDTH, subsequent_indent=" " * width))
    return 0


def _names(what: str) -> Iterator[tuple[str, str | None]]:
    if what == "tasks":
        from moe_rl.registry import import_component
        from moe_rl.tasks.base import CHOICES, TASKS

        docs = [import_component("task", name, path).__doc__ for name, (path, _) in TASKS.items()]
        yield from zip(CHOICES, [*docs, "Your own: docs/tasks.md."], strict=True)
    elif what == "models":
        from moe_rl.config import SHIPPED
        from moe_rl.models.load import PRESETS

        yield from (
            (name, f"{PRESETS[name][0]}, untrained" if name in PRESETS else "trained") for name in (*PRESETS, *SHIPPED)
        )
        yield "<folder or name>", "a checkpoint, on this machine or on the Hugging Face hub"
    elif what == "settings":
        from moe_rl.config import RunConfig, fields_of, plain

        for name, field in fields_of(RunConfig):
            default = "" if field.is_required() else f"{plain(field.get_default())!r}; "
            yield name, f"{default}{field.description or ''}"
    elif what == "columns":
        from moe_rl.storage.columns import DICTIONARY

        yield from ((c.name, f"{c.formula} [{c.unit}; {c.tables}]") for group in DICTIONARY.values() for c in group)
    elif what == "methods":
        from moe_rl.objectives.methods_page import distinct_presets, table

        yield from ((m.name, f"{m.arm}; {m.source}") for m in (*table.methods().values(), *distinct_presets()))
    else:
        from moe_rl.results.figures import ACROSS, FIGURES

        yield from ((name, figure.__doc__) for name, figure in FIGURES.items())
        yield f"{ACROSS}<factor>[:<metric>]", "the endpoint, or another metric, over a factor"


@verb(
    argument("name", nargs="?", metavar="ARM", help="method, default of a framework, or any arm as text"),
    examples="""
  moe-rl methods                      all methods
  moe-rl methods sapo                 its components, equations and source
  moe-rl methods trl:gspo             TRL's default
  moe-rl methods "gspo+rollout+kl(coef=0.001)"   any arm""",
)
def methods(options: argparse.Namespace) -> int:
    """Print them."""
    from moe_rl.objectives.methods_page import describe

    if not options.name:
        return list_names(argparse.Namespace(what="methods"))
    print(*describe(options.name), sep="\n")
    return 0
