"""Environments that an untrained model can already be better or worse at."""

from __future__ import annotations

import random
import zlib

from tests.even_task import EvenCharacters


def even(text: str) -> float:
    return sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))


class OneTurn(EvenCharacters):
    """The same task as an environment that never answers back."""

    def start(self, prompt):
        return self

    def reply(self, transcript):
        return None

    def rewards(self, transcript):
        return even(transcript[0])


class Talking(EvenCharacters):
    """Asks for up to `turns` turns, by lot of what was said; `calls` counts, and `broken` may raise before a reply."""

    turns = 3
    calls = 0

    @staticmethod
    def broken(calls: int) -> None:
        """For tests to replace."""

    def start(self, prompt):
        return self

    def reply(self, transcript):
        Talking.calls += 1
        Talking.broken(Talking.calls)
        draw = random.Random(zlib.crc32(repr(transcript).encode()))
        if len(transcript) >= 2 * self.turns - 1 or draw.random() < 0.2:
            return None
        return "".join(draw.choices("abcdef", k=draw.randint(0, 4)))

    def rewards(self, transcript):
        return [even(text) / self.turns for text in transcript[::2]]
