"""Whether a completion matches a reference answer: as text, or as mathematics."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from itertools import accumulate
from typing import Any

from moe_rl.errors import ConfigError

Match = Callable[[str, str], bool]
"""match(answer, completion): whether the completion is right."""


def exact(answer: str, completion: str) -> bool:
    """Whether it is the answer, white space around it aside."""
    return completion.strip() == answer.strip()


def mathematical(answer: str, completion: str) -> bool:
    """Whether it is the answer, or math-verify reads an expression of the answer's value in it.

    The answer is its last \\boxed{…}, else the text after its last ####, else all of it. Any expression of equal value
    is right, even that of the question.
    """
    return exact(answer, completion) or verified(answer, completion)


def verified(answer: str, completion: str) -> bool:
    """What math-verify alone finds."""
    return _equal(answer if r"\boxed" in answer else f"\\boxed{{{answer.rpartition('####')[2].strip()}}}", completion)


def integer(answer: str, completion: str) -> bool:
    """Whether its last \\boxed{…} is the answer's number or, without a box, what follows its last ####, else all of it,
    ends in that number."""
    return last_number(completion) == last_number(answer) != ""


NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)"
TEXT, ASIDE = r"\\text\s*\{([^{}]*)\}", r"\\[,!;: ]|\\?[$%]|\s|(?<=\d)\.$"


def last_number(text: str) -> str:
    """That number, in one form; "" without one, and where a box has anything beside it but units in \\text."""
    before, box, after = text.rpartition("\\boxed{")
    if box:
        depths = accumulate(({"{": 1, "}": -1}.get(letter, 0) for letter in after), initial=1)
        inside = after[: next((i - 1 for i, depth in enumerate(depths) if depth == 0), 0)]
        inside = re.sub(TEXT, lambda found: re.sub("[A-Za-z]", "", found[1]), inside)
        number = re.fullmatch(NUMBER, re.sub(ASIDE, "", inside.replace("{,}", ",").replace("−", "-")))
        return _in_one_form(number[0]) if number else ""
    numbers = re.findall(NUMBER, text.rpartition("####")[2].replace("−", "-"))
    return _in_one_form(numbers[-1]) if numbers else ""


def _in_one_form(number: str) -> str:
    """Exactly, however many digits it has."""
    number = number.replace(",", "")
    return f"{Decimal(number).normalize(Context(prec=len(number))):f}"


MATCHES: dict[str, Match] = {"exact": exact, "math": mathematical, "integer": integer}


def matcher(name: str) -> Match:
    """The function that a task's option `match` names. Raises ConfigError where its package is not installed."""
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("match=math needs the package math-verify: pip install 'moe_rl[math]'.")
    return MATCHES[name]


def same_answers(match: str, completions: Sequence[str]) -> list[int | None]:
    """For each completion the place of the first one with the same answer: the same text or, with `math`, an expression
    of equal value. None for an empty text with `math`, and without a number with `integer`."""
    texts = [last_number(text) if match == "integer" else text.strip() for text in completions]
    first: dict[str, int | None] = {} if match == "exact" else {"": None}
    for i, text in enumerate(texts):
        if text not in first:
            alike = (place for other, place in first.items() if match == "math" and other and _equal(other, text))
            first[text] = next(alike, i)
    return [first[text] for text in texts]


def _equal(gold: str, target: str) -> bool:
    """Whether math-verify finds expressions of the same value in both texts."""
    from math_verify import verify

    return bool(verify(_parsed(gold), _parsed(target), timeout_seconds=_timeout()))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """The expressions that math-verify finds in a text."""
    from math_verify import parse

    return parse(text, parsing_timeout=_timeout())


def _timeout() -> int | None:
    """Many seconds: a busy machine must not change a reward. math-verify uses SIGALRM, which only a main thread may
    set."""
    return 30 if threading.current_thread() is threading.main_thread() else None
