"""The verb that shows the methods."""

from __future__ import annotations

import argparse

from moe_rl.cli.verbs import argument, verb


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
    from moe_rl.objectives.methods_page import describe, list_methods
    from moe_rl.storage.terminal import table

    print(*(describe(options.name) if options.name else table(list_methods())), sep="\n")
    return 0
