"""A file of question/answer pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from moe_rl.errors import ConfigError
from moe_rl.registry import Positive
from moe_rl.tasks.json_lines import objects
from moe_rl.tasks.matching import matcher, same_answers
from moe_rl.tasks.published import PUBLISHED, entries
from moe_rl.tasks.rewards import Functions
from moe_rl.types import Prompt


class JsonlTask:
    """One JSON object per line with the keys `question` and `answer`; further keys stay in `Prompt.entry`.

    A completion is right, by `match`, if it is the answer (`exact`), or if an expression in it has the answer's value
    (`math`, see `tasks.matching`). `reward`, in the place of `match`, names a function of your own, `pkg.module:name`,
    and `rewards` several; the other options are theirs: `tasks.rewards`. With `benchmark` the file has the columns of a
    published one, or is its name. Lines are drawn in seeded passes, each once per pass.
    """

    def __init__(
        self,
        file: str,
        *,
        match: Literal["exact", "math", "integer"] = "exact",
        benchmark: str | None = None,
        reward: str | None = None,
        rewards: Sequence[str] = (),
        reward_weights: Sequence[float] | None = None,
        reward_range: Sequence[float] = (0.0, 1.0),
        reward_timeout: Positive | None = None,
    ) -> None:
        options, calls = (rewards, reward_weights, reward_range, reward_timeout), [*rewards, *filter(None, [reward])]
        if calls and match != "exact" or reward and rewards or not calls and options != ((), None, (0.0, 1.0), None):
            raise ConfigError(
                f"task 'jsonl:{file}': match={match!r}, reward={reward!r}, rewards={rewards!r}. Set one of the three. "
                "Weights, a range and a time limit need reward or rewards."
            )
        path = Path(file).expanduser()
        if file != benchmark and not path.is_file():
            raise ConfigError(f"task 'jsonl:{file}': file not found (searched at {path.absolute()})")
        if benchmark:
            rows = entries(benchmark, None if file == benchmark else path)
        else:
            rows = ((where, entry) for where, _, entry in objects(path))
        self.match: str = PUBLISHED[benchmark][0] if benchmark in PUBLISHED and match == "exact" else match
        self._right = matcher(self.match)
        self.lines: list[Prompt] = []
        first: dict[str, tuple[str, Prompt]] = {}
        for where, entry in rows:
            self.lines.append(prompt := _prompt(entry, where))
            before, known = first.setdefault(prompt.text, (where, prompt))
            if known.answer != prompt.answer:
                raise ConfigError(
                    f"{where}: the question {prompt.text[:80]!r} has the answer {prompt.answer!r}, but "
                    f"{known.answer!r} at {before}. Remove one."
                )
        if not self.lines:
            raise ConfigError(f'{path} contains no line such as {{"question": "1+1=", "answer": "2"}}')
        keys = dict.fromkeys(key for prompt in self.lines for key in prompt.entry)
        self._own = Functions(calls, *options[1:], keys) if calls else None

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

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 when the completion is right, else 0; or what `score` gives."""
        return self.score([prompt], [completion], [None])[0]

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str], ids: Sequence[Any]) -> Sequence[float]:
        """See `tasks.base.rewards_of`."""
        if self._own:
            return self._own(prompts, completions, ids)
        return [float(self._right(p.answer or "", text)) for p, text in zip(prompts, completions, strict=True)]

    def votes(self, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
        """See `tasks.base.votes_of`; with `math`, expressions of one value are the same, and equal integers."""
        return same_answers(self.match, completions)


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
