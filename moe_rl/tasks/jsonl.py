"""A file of question/answer pairs, scored by math-verify."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.tasks.json_lines import objects
from moe_rl.types import Prompt


class JsonlTask:
    """One JSON object per line with the keys `question` and `answer`; further keys stay in `Prompt.entry`.

    A completion is right when it equals the answer as a string, or when math-verify finds the two mathematically
    equal (`1/2` and `0.5`). What math-verify cannot parse, such as a word, counts by string equality alone. A file is
    finite: its lines are drawn in seeded passes, each line once per pass.
    """

    def __init__(self, file: str) -> None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"task 'jsonl:{file}': there is no such file (looked at {path.absolute()}).")
        self._all = [_prompt(entry, where) for where, _, entry in objects(path)]
        if not self._all:
            raise ConfigError(f'{path} holds no question; write lines such as {{"question": "1+1=", "answer": "2"}}.')

    def __len__(self) -> int:
        return len(self._all)

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` lines in a seeded order, starting over with a new order when all have been used."""
        passes = self._passes(random.Random(seed))
        return [next(passes) for _ in range(count)]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 when the completion is right, else 0."""
        answer = prompt.answer or ""
        return float(completion.strip() == answer.strip() or _equal(answer, completion))

    def _passes(self, rng: random.Random) -> Iterator[Prompt]:
        while True:
            yield from rng.sample(self._all, len(self._all))


def _prompt(entry: Mapping[str, Any], where: str) -> Prompt:
    for key in ("question", "answer"):
        if key not in entry or entry[key] is None or str(entry[key]).strip() == "":
            raise ConfigError(f"{where}: no {key!r}; the keys found are {', '.join(map(repr, entry)) or 'none'}.")
    return Prompt(text=str(entry["question"]), answer=str(entry["answer"]), entry=entry)


def _equal(answer: str, completion: str) -> bool:
    from math_verify import verify

    gold, found = _parse(answer), _parse(completion)
    return bool(gold and found) and verify(gold, found, timeout_seconds=_timeout())


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=_timeout())


def _timeout() -> int | None:
    """Seconds. math-verify interrupts itself with SIGALRM, which only a main thread may set; elsewhere it must run
    unguarded."""
    return 5 if threading.current_thread() is threading.main_thread() else None
