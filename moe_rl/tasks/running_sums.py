"""The built-in task: running sums. Verifiable, of any length, and hard exactly as far as one chooses."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from pydantic import Field, PositiveInt

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, check_values
from moe_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class RunningSums:
    """Digits and an equals sign; the answer is the running sums modulo `modulus`, as many tokens as there are digits.

    Example with modulus 10: `372=` → `302`, since 3, 3+7 = 10 ≡ 0, 0+2 = 2.
    """

    digits: PositiveInt = 12
    """Digits of a question, the most when `min_digits` is given."""
    modulus: Annotated[int, Field(ge=2, le=10)] = 10
    """2 … 10; digits are drawn uniformly from 0 … modulus-1."""
    min_digits: PositiveInt | None = None
    """Fewest digits of a question, lengths being uniform between the two; None makes every question equally long."""
    partial: bool = False
    """False: 1 for the exact answer, else 0. True: the share of right digits."""

    def __post_init__(self) -> None:
        check_values(Component(type(self).__name__, **vars(self)), type(self))
        if self._fewest > self.digits:
            raise ConfigError(f"running_sums: min_digits={self.min_digits} is above digits={self.digits}. Lower it.")

    @property
    def _fewest(self) -> int:
        return self.digits if self.min_digits is None else self.min_digits

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` random questions; a larger count begins with the same ones."""
        rng = random.Random(seed)
        return [self.prompt(self._digits(rng)) for _ in range(count)]

    def prompt(self, digits: list[int]) -> Prompt:
        """The question made of these digits, with its answer."""
        sums = (str(s % self.modulus) for s in accumulate(digits))
        return Prompt(text="".join(map(str, digits)) + "=", answer="".join(sums), entry={"digits": digits})

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for the exact answer, else 0; with `partial`, right digits / the longer of the two lengths."""
        answer = prompt.answer or ""
        if not self.partial:
            return float(completion == answer)
        right = sum(a == c for a, c in zip(answer, completion, strict=False))
        return right / max(len(answer), len(completion))

    def _digits(self, rng: random.Random) -> list[int]:
        length = rng.randint(self._fewest, self.digits)
        return [rng.randrange(self.modulus) for _ in range(length)]
