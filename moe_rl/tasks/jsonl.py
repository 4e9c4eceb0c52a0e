"""A file of question/answer pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.tasks.json_lines import objects
from moe_rl.tasks.matching import matcher, same_answers
from moe_rl.types import Prompt


class JsonlTask:
    """One JSON object per line with the keys `question` and `answer`; further keys stay in `Prompt.entry`.

    `match` says when a completion is right: `exact`, when it is the answer; `math`, when its final answer has the
    answer's value (see `tasks.matching`). A file is finite: its lines are drawn in seeded passes, each once per pass.
    """

    def __init__(self, file: str, *, match: str = "exact") -> None:
        self._right, self._match = matcher(match), match
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"task 'jsonl:{file}': file not found (searched at {path.absolute()})")
        found = [(where, _prompt(entry, where)) for where, _, entry in objects(path)]
        first: dict[str, tuple[str, Prompt]] = {}
        for where, prompt in found:
            there, known = first.setdefault(prompt.text, (where, prompt))
            if known.answer != prompt.answer:
                raise ConfigError(f"{where}: the question {prompt.text[:80]!r} has the answer {prompt.answer!r} here, "
                                  f"but {known.answer!r} at {there}. Remove one, or change the question.")
        self.lines = [prompt for _, prompt in found]
        if not self.lines:
            raise ConfigError(f'{path} contains no question. Write lines such as '
                              '{"question": "1+1=", "answer": "2"}.')

    def __len__(self) -> int:
        """How many different questions there are."""
        return len({prompt.text for prompt in self.lines})

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` lines in a seeded order, starting over with a new order when all have been used."""
        passes = self._passes(random.Random(seed))
        return [next(passes) for _ in range(count)]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 when the completion is right, else 0."""
        return float(self._right(prompt.text, prompt.answer or "", completion))

    def votes(self, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
        """See `tasks.base.votes_of`; with `math`, final answers of one value are the same."""
        return same_answers(self._match, prompt.answer or "", completions)

    def _passes(self, rng: random.Random) -> Iterator[Prompt]:
        while True:
            yield from rng.sample(self.lines, len(self.lines))


def _prompt(entry: Mapping[str, Any], where: str) -> Prompt:
    for key in ("question", "answer"):
        if key not in entry or entry[key] is None or str(entry[key]).strip() == "":
            raise ConfigError(f"{where}: no key {key!r}; the keys are {', '.join(map(repr, entry)) or 'none'}")
        if not isinstance(entry[key], str | int | float) or isinstance(entry[key], bool) or entry[key] != entry[key]:
            raise ConfigError(f"{where}: {key!r} is {json.dumps(entry[key])[:80]}. Write text or a number.")
    return Prompt(text=str(entry["question"]), answer=str(entry["answer"]), entry=entry)

