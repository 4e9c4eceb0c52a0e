"""Any dataset of the `reasoning-gym` package by its name, scored by its own scorer."""

from __future__ import annotations

import inspect
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown
from moe_rl.seeds import derive
from moe_rl.types import Prompt


class ReasoningGym:
    """One reasoning-gym dataset; `options` are settings of its configuration, e.g. `max_word_len=5`.

    Many of its scorers give partial credit to wrong answers: only a reward of 1 says that an answer is right. Some
    datasets have no reference answer (`Prompt.answer` is None); a cold start cannot imitate those.
    """

    def __init__(self, dataset: str, **options: Any) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(f"task 'reasoning_gym:{dataset}' needs the package reasoning-gym: pip install "
                              "reasoning-gym") from error
        if dataset not in DATASETS:
            unknown("reasoning-gym dataset", dataset, DATASETS)
        known = inspect.signature(DATASETS[dataset][1]).parameters
        for name in options:
            if name not in known:
                unknown(f"option of reasoning_gym:{dataset}", name, set(known) - {"seed", "size"})
        reserved = {"seed", "size"} & set(options)
        if reserved:
            raise ConfigError(f"reasoning_gym:{dataset}: {', '.join(sorted(reserved))} cannot be an option, because "
                              "the run sets it")
        self.dataset = dataset
        self.options = options
        self._scorer = self._create(1, 0)

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` entries. The package seeds entry i with seed + i, so that neighbouring seeds would give nearly the
        same entries; ours are therefore spread first, over 31 bits since some datasets take no more."""
        return [
            Prompt(text=e["question"], answer=None if e["answer"] is None else str(e["answer"]), entry=e)
            for e in self._create(count, derive(seed % 2**32, seed >> 32, 0) >> 32)
        ]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The dataset's own score of the completion without surrounding white space.

        Scorers that add up partial credit can come within rounding of 1 for a wrong answer (`spell_backward` does when
        the right one has something appended); such a score becomes 1 − 1e-5, so that it does not count as right.
        """
        score = float(self._scorer.score_answer(completion.strip(), dict(prompt.entry)))
        return score if score == 1 or abs(score - 1) > 1e-6 else 1 - 1e-5

    def _create(self, size: int, seed: int) -> Any:
        from reasoning_gym import create_dataset

        try:
            return create_dataset(self.dataset, size=size, seed=seed, **self.options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning_gym:{self.dataset} does not accept the options {self.options!r}: "
                              f"{error}") from error
