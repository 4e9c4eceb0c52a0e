"""Arithmetic with one correction turn: running sums, and a checker that says which digit is wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rl.errors import ConfigError
from moe_rl.tasks.base import Transcript
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class CorrectedSums(RunningSums):
    """Running sums, answered once or twice: to a wrong answer the checker says where it is wrong, and asks again.

    Example with modulus 10: `372=`, the policy `312`, the checker `2?` (the second digit), the policy `302`. A missing
    or superfluous digit is wrong, too. Right at once earns 1, right after the correction `late`.
    """

    late: float = 0.5
    """0 … 1."""
    spoiled: float = 0.5
    """The share of demonstrations that show the second turn, after an answer of which one digit is wrong."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("late", "spoiled"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"corrected_sums: {name}={getattr(self, name)} must be a share, from 0 to 1")
        if self.partial:
            raise ConfigError("corrected_sums: partial would reward an answer twice. Use late.")

    def start(self, prompt: Prompt) -> Checker:
        """A checker that knows the answer."""
        return Checker(prompt.answer or "", self.late)

    def demonstration(self, prompt: Prompt) -> list[str]:
        """The answer or, of a share of the prompts, a wrong one, the checker's words, and the answer."""
        answer, rng = prompt.answer or "", random.Random(prompt.text)
        if rng.random() >= self.spoiled:
            return [answer]
        at = rng.randrange(len(answer))
        digit = str((int(answer[at]) + rng.randrange(1, self.modulus)) % self.modulus)
        wrong = answer[:at] + digit + answer[at + 1 :]
        return [wrong, Checker(answer, self.late).reply([wrong]) or "", answer]


@dataclass(frozen=True)
class Checker:
    """Says once where an answer is wrong."""

    answer: str
    late: float

    def reply(self, transcript: Transcript) -> str | None:
        """`<n>?`, n the place of the first wrong digit, from 1; None after a right answer, and after the second."""
        given = transcript[-1]
        if given == self.answer or len(transcript) > 1:
            return None
        right = (a == b for a, b in zip(given, self.answer, strict=False))
        return f"{next((i for i, same in enumerate(right) if not same), min(len(given), len(self.answer))) + 1}?"

    def rewards(self, transcript: Transcript) -> list[float]:
        """Of each turn: 1 where the first is right, `late` where the second is, else 0."""
        return [worth * (text == self.answer) for text, worth in zip(transcript[::2], (1.0, self.late), strict=False)]
