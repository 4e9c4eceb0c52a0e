"""The task of `lengths`: running sums that go on, so that one policy writes responses of any length."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class ContinuedSums:
    """Digits and an equals sign; every token of the answer is the one before it plus the one `digits` + 1 before it,
    modulo 10, the equals sign being 0: first the running sums of the digits, then those of what was answered.

    Example with 3 digits and 9 tokens: `372=` → `302` `258` `038`. What a token needs is as far away in a long response
    as in a short one.
    """

    digits: int = 12
    tokens: int = 120
    """Of the answer."""

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` random questions; a larger count begins with the same ones."""
        rng = random.Random(seed)
        return [self.prompt([rng.randrange(10) for _ in range(self.digits)]) for _ in range(count)]

    def prompt(self, digits: list[int]) -> Prompt:
        """The question made of these digits, with its answer."""
        text = [*digits, 0]
        while len(text) <= self.digits + self.tokens:
            text.append((text[-1] + text[-1 - self.digits]) % 10)
        answer = "".join(map(str, text[self.digits + 1 :]))
        return Prompt(text="".join(map(str, digits)) + "=", answer=answer, entry={"digits": digits})

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The share of right tokens."""
        answer = prompt.answer or ""
        right = sum(a == c for a, c in zip(answer, completion, strict=False))
        return right / max(len(answer), len(completion))
