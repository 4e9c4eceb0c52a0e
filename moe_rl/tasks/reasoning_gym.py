"""Any dataset of the `reasoning-gym` package by its name, scored by its own scorer."""

from __future__ import annotations

import inspect
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown
from moe_rl.seeds import derive
from moe_rl.types import Prompt

EVALUATED = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
"""Datasets whose scorers evaluate a completion as Python, themselves or through sympy."""


class ReasoningGym:
    """One reasoning-gym dataset; `options` are settings of its configuration, e.g. `max_word_len=5`.

    Many scorers give partial credit: only a reward of 1 is right. Some datasets have no reference answer
    (`Prompt.answer` is None), so a cold start cannot imitate them. Datasets whose scorers would run a completion as
    Python are refused.
    """

    def __init__(self, dataset: str, **options: Any) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ConfigError(
                f"task 'reasoning_gym:{dataset}' needs the package reasoning-gym: pip install reasoning-gym"
            ) from error
        if dataset in EVALUATED:
            raise ConfigError(f"reasoning_gym:{dataset}: its scorer would run a model's answer as Python code")
        if dataset not in DATASETS:
            unknown("reasoning-gym dataset", dataset, DATASETS)
        known = {*inspect.signature(DATASETS[dataset][1]).parameters} - {"seed", "size"}
        for name in options.keys() - known:
            unknown(f"option of reasoning_gym:{dataset}", name, known)
        self.dataset, self.options = dataset, options
        self._scorer = self._create(1, 0)

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` entries. The package seeds entry i with seed + i, so seeds are spread first, over 31 bits."""
        return [
            Prompt(text=e["question"], answer=None if e["answer"] is None else str(e["answer"]), entry=e)
            for e in self._create(count, derive(seed % 2**32, seed >> 32, 0) >> 32)
        ]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The dataset's own score of the completion without surrounding white space. A sum of partial credit that is 1
        up to rounding becomes 1 − 1e-5, since it is of a wrong answer (`spell_backward`)."""
        score = float(self._scorer.score_answer(completion.strip(), dict(prompt.entry)))
        return score if score == 1 or abs(score - 1) > 1e-6 else 1 - 1e-5

    def _create(self, size: int, seed: int) -> Any:
        from reasoning_gym import create_dataset

        return create_dataset(self.dataset, size=size, seed=seed, **self.options)
