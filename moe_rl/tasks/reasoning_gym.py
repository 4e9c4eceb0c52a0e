"""Any dataset of the `reasoning-gym` package by its name, scored by its own scorer."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
import sys
from collections.abc import Mapping
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown
from moe_rl.seeds import derive
from moe_rl.types import Prompt

LITERAL = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""Datasets whose scorers evaluate a completion as Python, to read lists."""
SYMBOLIC = {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
"""Datasets with unknowns whose scorers have sympy read a completion, which evaluates it as Python, too."""
FORMULAS = {"countdown", "puzzle24", *SYMBOLIC}
"""The same, with or without unknowns."""
POWER = r"(?:\*\*|\^)"
HUGE = re.compile(rf"\d{{10}}|{POWER}\s*[-+]?\s*(?:\d{{4}}|[\w.]+\s*{POWER}|\([^+]*{POWER})|[A-Z]\s*\(")
"""Numbers and powers that would take all memory or time, and calls of sympy's one-letter functions."""
WORD = re.compile(r"[^\W\d]\w*")


class ReasoningGym:
    """One reasoning-gym dataset; `options` are settings of its configuration, e.g. `max_word_len=5`.

    Many of its scorers give partial credit to wrong answers: only a reward of 1 says that an answer is right. Some
    datasets have no reference answer (`Prompt.answer` is None); a cold start cannot imitate those.

    A completion is data, and runs no code: scorers that would evaluate it as Python read literals and formulas only.
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
        if dataset in SYMBOLIC:
            _check_texts(dataset, options)
        if dataset in LITERAL:  # lists and numbers are read as before, and anything else is no answer
            vars(sys.modules[DATASETS[dataset][0].__module__])["eval"] = ast.literal_eval
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
        if self.dataset in FORMULAS and not is_formula(completion):
            return 0.0
        score = float(self._scorer.score_answer(completion.strip(), dict(prompt.entry)))
        return score if score == 1 or abs(score - 1) > 1e-6 else 1 - 1e-5

    def _create(self, size: int, seed: int) -> Any:
        from reasoning_gym import create_dataset

        try:
            return create_dataset(self.dataset, size=size, seed=seed, **self.options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning_gym:{self.dataset} does not accept the options {self.options!r}: "
                              f"{error}") from error


def is_formula(text: str) -> bool:
    """Whether a text has only numbers, operators, brackets, unknowns and sympy's elementary functions, so that reading
    it as Python calls nothing else. Huge numbers and powers of powers are none."""
    import sympy

    def known(word: str) -> bool:
        found = getattr(sympy, word, None)
        return (word in ("abs", "ln", "pi", "sqrt") or isinstance(found, type) and issubclass(found, sympy.Function)
                and found.__module__.startswith("sympy.functions.elementary")
                or found is None and not hasattr(builtins, word) and not keyword.iskeyword(word) and "__" not in word)

    return (re.fullmatch(r"[\w\s()+\-*/^.,=]{0,2000}", text, re.ASCII) is not None
            and not re.search(r"\.\s*[A-Za-z_]", text) and HUGE.search(text) is None
            and all(len(word) == 1 or known(word) for word in WORD.findall(text)))


def _check_texts(dataset: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for names of unknowns that are none: the scorer would evaluate them."""
    for name, value in options.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and re.fullmatch(r"[A-Za-z]\w*|[-+]", text, re.ASCII) is None:
                raise ConfigError(f"reasoning_gym:{dataset}: {name} must contain letters, or the operators + and -, "
                                  f"not {text!r}")
