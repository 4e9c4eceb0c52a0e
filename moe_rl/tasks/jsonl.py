"""A file of question/answer pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from moe_rl.errors import ConfigError
from moe_rl.registry import lookup
from moe_rl.tasks.json_lines import objects
from moe_rl.tasks.matching import matcher, same_answers
from moe_rl.types import Prompt


class JsonlTask:
    """One JSON object per line with the keys `question` and `answer`; further keys stay in `Prompt.entry`.

    A completion is right, by `match`, if it is the answer (`exact`), or if an expression in it has the answer's value
    (`math`, see `tasks.matching`). `reward`, in the place of `match`, names a function of your own, `pkg.module:name`,
    of prompt and completion. Lines are drawn in seeded passes, each once per pass.
    """

    def __init__(self, file: str, *, match: Literal["exact", "math"] = "exact", reward: str | None = None) -> None:
        self._right, self._match = matcher(match), match
        if reward is not None and match != "exact":
            raise ConfigError(f"task 'jsonl:{file}': reward={reward!r} replaces match={match!r}. Set one of the two.")
        self._own, self.reward_name = reward and lookup("reward", reward, {}), reward or "JsonlTask.reward"
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"task 'jsonl:{file}': file not found (searched at {path.absolute()})")
        self.lines: list[Prompt] = []
        first: dict[str, tuple[str, Prompt]] = {}
        for where, _, entry in objects(path):
            self.lines.append(prompt := _prompt(entry, where))
            before, known = first.setdefault(prompt.text, (where, prompt))
            if known.answer != prompt.answer:
                raise ConfigError(
                    f"{where}: the question {prompt.text[:80]!r} has the answer {prompt.answer!r}, but "
                    f"{known.answer!r} at {before}. Remove one."
                )
        if not self.lines:
            raise ConfigError(f'{path} contains no line such as {{"question": "1+1=", "answer": "2"}}')

    def __len__(self) -> int:
        """The number of different questions."""
        return len({prompt.text for prompt in self.lines})

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` lines in a seeded order, starting over with a new order when all have been used."""
        rng = random.Random(seed)
        prompts: list[Prompt] = []
        while len(prompts) < count:
            prompts += rng.sample(self.lines, len(self.lines))
        return prompts[:count]

    def reward(self, prompt: Prompt, completion: str) -> Any:
        """1 when the completion is right, else 0; or what the option `reward` gives."""
        if self._own:
            return self._own(prompt, completion)
        return float(self._right(prompt.answer or "", completion))

    def votes(self, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
        """See `tasks.base.votes_of`; with `math`, expressions of one value are the same."""
        return same_answers(self._match, completions)


def _prompt(entry: Mapping[str, Any], where: str) -> Prompt:
    for key in ("question", "answer"):
        value = entry.get(key)
        if (
            not isinstance(value, str | int | float)
            or isinstance(value, bool)
            or value != value
            or not str(value).strip()
        ):
            raise ConfigError(f"{where}: {key!r} is {json.dumps(value)[:80]}. Write text or a number.")
    return Prompt(text=str(entry["question"]), answer=str(entry["answer"]), entry=entry)
