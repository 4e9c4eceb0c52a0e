"""Several tasks as one: each prompt is of one of them, drawn alike, and its own task rewards it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from operator import length_hint
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, Part
from moe_rl.seeds import derive
from moe_rl.tasks.base import Environment, Task, load_task, votes_of
from moe_rl.types import Prompt


class Mixture:
    """`tasks` in equal shares, e.g. `Component("mixture", tasks=("running_sums", "reasoning_gym:spell_backward"))`; one
    with options may be a Component or its JSON."""

    def __init__(self, tasks: Sequence[Part | Mapping[str, Any]]) -> None:
        if isinstance(tasks, str) or len(tasks) < 2:
            raise ConfigError(f"mixture: tasks={tasks!r} must be a list of two tasks or more")
        self.tasks: list[Task] = []
        for name in tasks:
            task = load_task(Component.of(name))
            if isinstance(task, Environment):
                raise ConfigError(f"mixture: {name} has several turns, and a mixture cannot contain it. Remove it.")
            self.tasks.append(task)

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts; which task each is of comes from `seed`, too. Raises ConfigError for a task that gives fewer
        than it is asked for."""
        rng = random.Random(derive(seed % 2**32, seed >> 32, 0))
        kinds = [rng.randrange(len(self.tasks)) for _ in range(count)]
        drawn = [task.prompts(n, seed) if (n := kinds.count(kind)) else [] for kind, task in enumerate(self.tasks)]
        for kind, (task, found) in enumerate(zip(self.tasks, drawn, strict=True)):
            if len(found) < (n := kinds.count(kind)):
                raise ConfigError(f"mixture: {type(task).__name__}.prompts({n}, {seed}) returned {len(found)} prompts. "
                                  f"Return {n}, with repetitions if necessary.")
        left = [iter(found) for found in drawn]
        of_each = [next(left[kind]) for kind in kinds]
        return [dataclasses.replace(prompt, entry={"task": kind, "prompt": prompt})
                for kind, prompt in zip(kinds, of_each, strict=True)]

    def __length_hint__(self) -> int:
        """How many different prompts there are as long as none of its tasks has run out of them: what is held out comes
        in equal shares, too, and must leave each task something to train on."""
        finite = [size for task in self.tasks if (size := length_hint(task, -1)) >= 0]
        return len(self.tasks) * min(finite) if finite else NotImplemented

    def reward(self, prompt: Prompt, completion: str) -> float:
        """What the prompt's own task gives."""
        return self.tasks[prompt.entry["task"]].reward(prompt.entry["prompt"], completion)

    def votes(self, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
        """Which completions give the same answer, as the prompt's own task sees it: `votes_of`."""
        return votes_of(self.tasks[prompt.entry["task"]], prompt.entry["prompt"], completions)
