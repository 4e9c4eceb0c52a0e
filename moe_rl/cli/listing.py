"""The verbs that list what there is to choose from."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable

from moe_rl.cli.verbs import argument, verb

LISTS = ("tasks", "models", "settings", "columns", "methods", "figures")
WIDTH = 100


@verb(
    argument("what", choices=LISTS, metavar="WHAT", help=", ".join(LISTS)),
    examples="""
  moe-rl list settings      with their defaults
Runs are listed by `moe-rl runs list`.""",
)
def list_names(options: argparse.Namespace) -> int:
    """A name and what it is, in lines of at most WIDTH columns."""
    rows = [(name, " ".join((text or "").partition("\n\n")[0].split())) for name, text in _names(options.what)]
    width = min(36, 2 + max(len(name) for name, _ in rows))
    for name, text in rows:
        print(textwrap.fill(f"{name:<{width - 1}} {text}", WIDTH, subsequent_indent=" " * width))
    return 0


def _names(what: str) -> Iterable[tuple[str, str | None]]:
    if what == "tasks":
        from moe_rl.registry import import_component
        from moe_rl.tasks.base import CHOICES, TASKS

        docs = [import_component("task", name, path).__doc__ for name, (path, _) in TASKS.items()]
        return zip(CHOICES, [*docs, "Your own: docs/tasks.md."], strict=True)
    if what == "models":
        from moe_rl.config import SHIPPED
        from moe_rl.models.load import PRESETS

        presets = [(name, f"untrained: {_size(name)}") for name in PRESETS]
        return [*presets, *((name, "trained") for name in [*SHIPPED, "<checkpoint>"])]
    if what == "settings":
        from moe_rl.config import RunConfig, fields_of, plain

        return (
            (name, f"{'required' if f.is_required() else repr(plain(f.get_default()))}; {f.description or ''}")
            for name, f in fields_of(RunConfig)
        )
    if what == "columns":
        from moe_rl.storage.columns import DICTIONARY

        return ((c.name, f"{c.formula} [{c.unit}; {c.tables}]") for group in DICTIONARY.values() for c in group)
    if what == "methods":
        from moe_rl.objectives.methods_page import distinct_presets, table

        every = (*table.methods().values(), *distinct_presets())
        return ((m.name, f"{table.spell_out(table.arm(m.name)).replace('+', ' + ')}; {m.source}") for m in every)
    from moe_rl.results.figures import ACROSS, FIGURES

    across = (f"{ACROSS}<factor>[:<metric>]", "the endpoint, or another metric, over a factor")
    return [*((name, figure.__doc__) for name, figure in FIGURES.items()), across]


def _size(preset: str) -> str:
    from moe_rl.config import ModelConfig
    from moe_rl.models.load import skeleton
    from moe_rl.routing.moe_layers import layout_of

    model = skeleton(ModelConfig(name=preset))
    layout, parameters = layout_of(model), sum(weight.numel() for weight in model.parameters())
    experts = layout.moe_layers[0].num_experts
    return f"{parameters / 1e6:.1f} M parameters, {len(layout.moe_layers)} MoE layers, top-{layout.top_k} of {experts}"


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
