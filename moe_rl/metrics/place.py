"""Where token ratios stand among those of the study `volatility_dial`, which assigned routing volatility as a dose.

The yardstick, `volatility_dial.json`, is made from that study's tables (`studies/volatility_dial_yardstick.py`). Slots
are no axis: a slot of one model is not a slot of another. A dose is read off between two of the study's on √KL and
√(−ln ESS), which are both the standard deviation of log r where that is Gaussian; nothing is read off outside of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from moe_rl.errors import ConfigError
from moe_rl.metrics.rounding import number

NATURAL, REPLAYED, SEQUENCE = "grpo", "grpo-replay", "gspo"
"""Arms of the study: with ratios of natural routes, of replayed ones, and of natural ones clipped by sequence."""
QUANTITIES = {"token_ess": ("token ESS", lambda x: math.sqrt(-math.log(x)) if x else math.inf),
              "token_kl_k3": ("KL (nats)", math.sqrt)}
"""Columns: what they are called, and the scale on which a dose is read off."""
ALIKE = 1.25
"""Up to this factor in tokens an ESS is compared: of four times the tokens it was little more than half, at σ = 1."""
CAUTION = ("That was a 0.7 M-parameter model (2 of 16 experts in 6 layers), one task and 8 updates a step: what ratios "
           "that spread as far do elsewhere is not known, nor that routes spread them.")


@dataclass(frozen=True)
class Reading:
    """One quantity beside the neighbouring doses, (σ, what it was there): two, or one where it is outside of all."""

    quantity: str
    value: float
    beside: tuple[tuple[float, float], ...]
    sigma: float | None
    """Interpolated; None outside."""

    @property
    def dose(self) -> str:
        """In a word."""
        end = self.beside[0][0]
        return f"{self.sigma:.2f}" if self.sigma is not None else f"beyond {end:g}" if end else "quieter"

    def __str__(self) -> str:
        low, *high = (f"σ = {sigma:g} ({there:.2g})" for sigma, there in self.beside)
        where = "beyond" if self.beside[0][0] else "quieter than"
        return f"{QUANTITIES[self.quantity][0]} {self.value:.2g} is " + (
            f"between {low} and {high[0]}, near {self.dose}" if high else f"{where} {low}")


@dataclass(frozen=True)
class Place:
    """Where ratios of the last mini-batch of a step, or of a whole step, stand beside an arm; `str` says all of it."""

    arm: str
    span: str
    readings: tuple[Reading, ...]

    def __str__(self) -> str:
        return described({"replayed" if self.arm == REPLAYED else "natural": self})

    @property
    def sigmas(self) -> set[float]:
        """The study's doses beside which it is."""
        return {sigma for reading in self.readings for sigma, _ in reading.beside}


@cache
def yardstick() -> dict[str, Any]:
    """`tokens` of an ESS by span; `rows` by dose σ and arm; `effects` by dose, endpoint and contrast."""
    return json.loads(resources.files("moe_rl.metrics").joinpath("volatility_dial.json").read_text(encoding="utf-8"))


def place(token_ess: float = math.nan, kl: float = math.nan, *, arm: str = NATURAL, span: str = "last",
          tokens: float | None = None) -> Place | None:
    """Place a token ESS (a share) and a KL to π_old (k3, nats per token) beside those of an `arm` of the study.

    `span`: both are of the "last" mini-batch of a step, or of all mini-batches of a "step". An ESS falls with the
    tokens it is over: it must be of about `yardstick()["tokens"][span]`, as `ratios.grouped_ess` makes it, and is left
    out where `tokens` is another number. NaN: not given. None where nothing can be placed, as of ratios that are not
    finite. Raises ConfigError for what cannot be an ESS or a KL, and for an unknown arm or span.
    """
    size, there = yardstick()["tokens"].get(span), [row for row in yardstick()["rows"] if row["arm"] == arm]
    if not there or not size:
        raise ConfigError(f"arm={arm!r}, span={span!r}: choose {NATURAL}, {REPLAYED} or {SEQUENCE}; last or step")
    if token_ess < 0 or token_ess > 1 + 1e-9 or kl < -1e-9:  # beyond rounding
        raise ConfigError(f"token_ess={token_ess}, kl={kl}: an ESS is a share, and a KL (k3) is 0 at least")
    alike = tokens is None or size / ALIKE <= tokens <= size * ALIKE
    given = {"token_ess": min(float(token_ess), 1.0) if alike else math.nan, "token_kl_k3": max(float(kl), 0.0)}
    found = tuple(_reading(name, value, [(row["sigma"], row[span][name][0]) for row in there])
                  for name, value in given.items() if not math.isnan(value))
    return Place(arm, span, found) if found else None


def _reading(quantity: str, value: float, there: list[tuple[float, float]]) -> Reading:
    at, *marks = map(QUANTITIES[quantity][1], (value, *(x for _, x in there)))
    if at < marks[0] or at > marks[-1]:
        return Reading(quantity, value, (there[0 if at < marks[0] else -1],), None)
    i = min(int(np.searchsorted(marks, at, side="right")), len(marks) - 1)
    return Reading(quantity, value, tuple(there[i - 1 : i + 1]), float(np.interp(at, marks, [s for s, _ in there])))


def described(places: Mapping[str, Place]) -> str:
    """Sentences: where ratios stand, by what they are of ("natural", …), what cures added there, and a caution."""
    where = ". ".join(f"{name.capitalize()}: {'; '.join(map(str, one.readings))}" for name, one in places.items())
    return f"{where}. {added(sigma for found in places.values() for sigma in found.sigmas)} {CAUTION}"


def added(sigmas: Iterable[float]) -> str:
    """What replay and GSPO gained over GRPO at some of the study's doses, in a sentence; nothing at no dose."""
    at, by = sorted(set(sigmas)), dict[str, list[str]]()
    for row in (row for row in yardstick()["effects"] if row["sigma"] in at):
        mean, low, high = (number(x, "+.2f") for x in row["effect"])
        by.setdefault(f"{row['contrast']} in {row['endpoint']}", []).append(f"{mean} [{low}, {high}]")
    said = "; ".join(f"{name}, {' … '.join(found)}" for name, found in by.items())
    return f"In volatility_dial, at σ = {' … '.join(f'{sigma:g}' for sigma in at)}: {said}." if at else ""
