"""The command that makes a small checkpoint from nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_rl.cli.verbs import argument, verb


@verb(
    argument("folder", type=Path, metavar="FOLDER", help="where the checkpoint goes"),
    argument("--task", action="append", default=[], metavar="TASK",
             help="task to learn (default: running_sums); repeat it for a mixture"),
    argument("--model", default="qwen3_moe-tiny", help="a preset (default: qwen3_moe-tiny)"),
    argument("--seed", type=int, default=0, help="seed of weights and examples (default: 0)"),
    argument("--set", action="append", default=[], metavar="K=V", dest="settings",
             help="change a setting, e.g. load_balance=0.02: docs/settings.md"),
    examples="""
  moe-rl checkpoint pretrain base --task running_sums \\
      --task reasoning_gym:spell_backward
  moe-rl checkpoint pretrain fine --model qwen3_moe-fine --set max_steps=2000
  moe-rl run my_study.py --set model.name=base --set cold_start.target=0
The same command continues an interrupted training. Exit code 1: the steps ended
before it converged.""",
)
def pretrain(options: argparse.Namespace) -> int:
    """Train, measure, save."""
    from moe_rl.config import ModelConfig, Pretraining, parse_settings
    from moe_rl.models.supervised import pretrain as train
    from moe_rl.registry import Component

    tasks = tuple(options.task)
    task = Component("mixture", tasks=tasks) if len(tasks) > 1 else Component(*tasks or ("running_sums",))
    settings = Pretraining(task=task, model=ModelConfig(name=options.model), seed=options.seed)
    settings = settings.replace(**parse_settings(settings, options.settings))
    rows, goals = train(settings, options.folder)
    missed = [goal for goal, met in goals.items() if not met]
    print(f"{options.folder}: {rows[-1]['step']} steps" + (f"; not {' and not '.join(missed)}" if missed else ""))
    return bool(missed)
