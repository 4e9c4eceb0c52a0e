"""A guessing game: a number between two others, found in as many turns as it takes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_rl.errors import ConfigError
from moe_rl.tasks.base import Transcript
from moe_rl.types import Prompt

LOWEST, HIGHEST = 10, 99


@dataclass(frozen=True, kw_only=True)
class Guessing:
    """`23-38:` asks for a number from 23 to 38; to a wrong one the answer is `+` (higher) or `-` (lower), to what is no
    number of two digits `?`. Found within `turns` guesses it earns 1; halving the range always finds it if 2^turns is
    more than `width`.
    """

    width: int = 16
    """How many numbers a range has at most; 2 … 90."""
    turns: int = 5
    """Most guesses."""

    def __post_init__(self) -> None:
        if not 2 <= self.width <= HIGHEST - LOWEST + 1 or self.turns < 1:
            raise ConfigError(f"guessing: width={self.width} must be from 2 to 90, and turns={self.turns} at least 1")

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` random ranges, of 2 to `width` numbers, and a number in each; a larger count begins with the same."""
        rng, found = random.Random(seed), []
        for _ in range(count):
            width = rng.randint(2, self.width)
            low = rng.randint(LOWEST, HIGHEST - width + 1)
            entry = {"low": low, "high": low + width - 1, "number": rng.randrange(low, low + width)}
            found.append(Prompt(text=f"{low}-{entry['high']}:", entry=entry))
        return found

    def start(self, prompt: Prompt) -> Game:
        """A game about the number that the prompt does not say."""
        return Game(prompt.entry["number"], self.turns)

    def demonstration(self, prompt: Prompt) -> list[str]:
        """The range halved up to a random guess, within `turns`."""
        low, high, game = prompt.entry["low"], prompt.entry["high"], self.start(prompt)
        transcript, left = [], random.Random(f"{prompt.text}{prompt.entry['number']}").randint(1, self.turns)
        while True:
            transcript.append(str(guess := (low + high) // 2))
            said, left = game.reply(transcript), left - 1
            if said is None or not left:
                return transcript
            low, high = (guess + 1, high) if said == "+" else (low, guess - 1)
            transcript.append(said)


@dataclass(frozen=True)
class Game:
    """Knows the number."""

    number: int
    turns: int

    def reply(self, transcript: Transcript) -> str | None:
        """`+`, `-` or `?`; None where it is found, and after the last guess."""
        guess = transcript[-1]
        if guess == str(self.number) or (len(transcript) + 1) // 2 >= self.turns:
            return None
        return "?" if len(guess) != 2 or not guess.isdecimal() or not guess.isascii() else \
            "+" if int(guess) < self.number else "-"

    def rewards(self, transcript: Transcript) -> float:
        """1 where the last guess is the number."""
        return float(transcript[-1] == str(self.number))
