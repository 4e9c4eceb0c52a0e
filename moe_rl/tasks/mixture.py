"""Several tasks as one: each prompt is of one of them, drawn in equal shares, and its own task rewards it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from operator import length_hint
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, Part
from moe_rl.seeds import derive
from moe_rl.tasks.base import Environment, Task, ask, load_task, rewards_of, votes_of
from moe_rl.types import Prompt


class Mixture:
    """`tasks` in equal shares: `Component("mixture", tasks=("running_sums", "reasoning_gym:spell_backward"))`."""

    def __init__(self, tasks: Sequence[Part | Mapping[str, Any]]) -> None:
        if isinstance(tasks, str) or len(tasks) < 2:
            raise ConfigError(f"mixture: tasks={tasks!r} must be a list of two tasks or more")
        self.tasks: list[Task] = []
        for name in tasks:
            task = load_task(Component.of(name))
            if isinstance(task, Environment):
                raise ConfigError(f"mixture: {name} has several turns. Remove it.")
            self.tasks.append(task)

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, whose tasks are drawn from `seed`, too. Raises ConfigError for a task that returns fewer
        prompts than requested."""
        rng = random.Random(derive(seed % 2**32, seed >> 32, 0))
        kinds = [rng.randrange(len(self.tasks)) for _ in range(count)]
        drawn = []
        for kind, task in enumerate(self.tasks):
            n = kinds.count(kind)
            prompts = ask(task, n, seed) if n else []
            if len(prompts) < n:
                raise ConfigError(f"mixture: {type(task).__name__} returned {len(prompts)} prompts, not {n}")
            drawn.append(iter(prompts))
        of_each = [next(drawn[kind]) for kind in kinds]
        return [
            dataclasses.replace(prompt, entry={"task": kind, "prompt": prompt})
            for kind, prompt in zip(kinds, of_each, strict=True)
        ]

    def __length_hint__(self) -> int:
        """The number of different prompts until one of the tasks runs out."""
        finite = [size for task in self.tasks if (size := length_hint(task, -1)) >= 0]
        return len(self.tasks) * min(finite) if finite else NotImplemented

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The reward by the prompt's own task."""
        return self.score([prompt], [completion], [None])[0]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str], ids: Sequence[Any]) -> list[float]:
        """`rewards_of` by each prompt's own task, one after the other."""
        own = [dataclasses.replace(prompt.entry["prompt"], chat=prompt.chat) for prompt in prompts]
        rows = zip(prompts, own, completions, ids, strict=True)
        return [rewards_of(self.tasks[p.entry["task"]], [q], [text], [row])[0] for p, q, text, row in rows]

    def votes(self, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
        """`votes_of` by the prompt's own task."""
        return votes_of(self.tasks[prompt.entry["task"]], prompt.entry["prompt"], completions)
