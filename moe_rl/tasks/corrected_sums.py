"""Running sums with one correction turn: a checker names the wrong digit."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rl.errors import ConfigError
from moe_rl.registry import Share
from moe_rl.tasks.base import Transcript
from moe_rl.tasks.running_sums import RunningSums
from moe_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class CorrectedSums(RunningSums):
    """Running sums, answered once or twice: after a wrong answer the checker names the first wrong digit.

    Example with modulus 10: `372=`, the policy `312`, the checker `2?` (the second digit), the policy `302`. A missing
    or superfluous digit is wrong, too. A right first answer earns 1, a right second one `late`.
    """

    late: Share = 0.5
    spoiled: Share = 0.5
    """The share of demonstrations that show the second turn, after an answer with one wrong digit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial:
            raise ConfigError("corrected_sums: partial would reward an answer twice. Use late.")

    def start(self, prompt: Prompt) -> Checker:
        """A checker that knows the answer."""
        return Checker(prompt.answer or "", self.late)

    def demonstration(self, prompt: Prompt) -> list[str]:
        """The answer or, for the `spoiled` share of prompts, a wrong one, the checker's reply, and the answer."""
        answer, rng = prompt.answer or "", random.Random(prompt.text)
        if rng.random() >= self.spoiled:
            return [answer]
        at = rng.randrange(len(answer))
        digit = str((int(answer[at]) + rng.randrange(1, self.modulus)) % self.modulus)
        wrong = answer[:at] + digit + answer[at + 1 :]
        return [wrong, Checker(answer, self.late).reply([wrong]) or "", answer]


@dataclass(frozen=True)
class Checker:
    """Names once the first wrong digit of an answer."""

    answer: str
    late: float

    def reply(self, transcript: Transcript) -> str | None:
        """`<n>?`, n the place of the first wrong digit, from 1; None after a right answer, and after the second."""
        text = transcript[-1]
        if text == self.answer or len(transcript) > 1:
            return None
        right = (a == b for a, b in zip(text, self.answer, strict=False))
        return f"{next((i for i, same in enumerate(right) if not same), min(len(text), len(self.answer))) + 1}?"

    def rewards(self, transcript: Transcript) -> list[float]:
        """Per turn: 1 for a right first one, `late` for a right second one, else 0."""
        return [worth * (text == self.answer) for text, worth in zip(transcript[::2], (1.0, self.late), strict=False)]
