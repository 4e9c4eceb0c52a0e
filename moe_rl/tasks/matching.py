"""When a completion matches a reference answer: as text, or as mathematics."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown

Match = Callable[[str, str, str], bool]
"""match(question, answer, completion): whether the completion is right."""

PIECE = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\?[A-Za-z]+|[<>!]=|[^\s\w]")
THOUSANDS = re.compile(r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?![\d,)\]])(?!\\\})")
"""Not in brackets, where (1,200) is a pair and [0,100] an interval."""
NO_PIECE = frozenset("{}()[]$*|") | {r"\cdot", r"\times", r"\left", r"\right"}
"""What groups, and signs of multiplication, which may be left out."""
FRACTION = re.compile(r"(?<![\w./])(\d{1,99})/(\d{1,99})(?![\w./])|"
                      r"\\[dt]?frac\{(\d{1,99})\}\{(\d{1,99})\}|\\[dt]?frac(\d)(\d)(?!\d)")
EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
SEVERAL = re.compile(r"\s*[A-Za-z]\w*\s*=[^=]+?(?:(?:,|;|\bor\b|\band\b)\s*[A-Za-z]\w*\s*=[^=]+?)+")
"""Values of several letters, as `x=1, y=2`: all of them are the answer."""
ANSWER = re.compile(r"\banswer\b(?:\s+is)?\s*:?", re.IGNORECASE)
LONG = 200
"""Letters of an answer which a parser would chew on for seconds, beyond some that grow with the right answer."""
SPELT = ((re.compile(r"\\([$%])"), r"\1"), (re.compile(r"\{,\}"), ","),
         (re.compile(r"\\!|(?<=\d)\\,(?=\d{3}(?!\d))"), ""))
"""What LaTeX writes otherwise: signs, and the marks of thousands in 1{,}200, 1,\\!200 and 1\\,200."""
STYLE = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*(?=\{)")
CHOICE = re.compile(r"\(([A-Za-z]+)\)")
DRESS = ("$", r"\(", r"\)", r"\[", r"\]", "**", "`", ".", ",", ";", ":", r"\ ")


def exact(question: str, answer: str, completion: str) -> bool:
    """The answer and nothing else, but for white space around it."""
    return completion.strip() == answer.strip()


def mathematical(question: str, answer: str, completion: str) -> bool:
    """Whether the completion's final answer has the value of the answer, and is as worked out as it.

    Final is the last \\boxed{…}, else what follows the last ####, else the last line: there what follows the word
    "answer", and what follows the last equals sign, unless the answer gives several letters their values. The value is
    math-verify's. A final answer is refused where it is more than one value, made of more numbers, letters and
    operations than the answer (`3+9` for `12`; a reduced fraction is one number), a product of sums where the answer is
    none, or written as in the question while the answer is not. A word must equal the answer.
    """
    several = SEVERAL.fullmatch(final(answer, several=True)) is not None
    wanted, found = final(answer, several), final(completion, several)
    if not wanted or not found:
        return False
    if found == wanted or wanted.isalpha():
        return found == wanted
    if len(found) > LONG + 4 * len(wanted):
        return False
    if pieces(found) > pieces(wanted) or ("%" in found) != ("%" in wanted) or _within(found, question):
        return False
    return _equal(wanted, found)


MATCHES: dict[str, Match] = {"exact": exact, "math": mathematical}


def matcher(name: str) -> Match:
    """The function that a task's option `match` names. Raises ConfigError where there is none, or no package."""
    if name not in MATCHES:
        unknown("match", name, MATCHES)
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("match=math needs the package math-verify: pip install 'moe_rl[math]'.")
    return MATCHES[name]


def same_answers(match: str, answer: str, completions: Sequence[str]) -> list[int | None]:
    """The place of the first completion that gives the same answer, of each; None for one that gives none.

    With `exact` that is the same text but for white space around it. With `math` it is the same final answer, or one of
    equal value, whatever the right one is: `answer` says only whether equations are kept whole, as `final` needs it.
    """
    several = match == "math" and SEVERAL.fullmatch(final(answer, several=True)) is not None
    answers = [final(text, several) if match == "math" else text.strip() for text in completions]
    first: dict[str, int | None] = {"": None} if match == "math" else {}
    for i, found in enumerate(answers):
        if found not in first:
            alike = (first[other] for other in first if match == "math" and other and _same_value(other, found))
            first[found] = next(alike, i)
    return [first[found] for found in answers]


def final(text: str, several: bool = False) -> str:
    """The final answer in a text, without dollar signs, punctuation, a font or brackets of a word around it; empty
    where there is none. With `several` equations are kept whole."""
    if r"\boxed" in text:
        text = _braced(text.rpartition(r"\boxed")[2])
    elif "####" in text:
        text = text.rpartition("####")[2]
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        text = ANSWER.split(lines[-1])[-1] if lines else ""
    return _undressed(text if several else EQUALS.split(text)[-1])


def pieces(text: str) -> int:
    """Numbers, letters or words, and operations in an expression. A reduced fraction of integers is one number;
    brackets and signs of multiplication do not count."""
    def whole(fraction: re.Match[str]) -> str:
        above, below = (int(n) for n in fraction.groups() if n is not None)
        return " 1 " if below > 1 and math.gcd(above, below) == 1 else fraction[0]

    return sum(piece not in NO_PIECE for piece in PIECE.findall(FRACTION.sub(whole, _ungrouped(text))))


def _ungrouped(text: str) -> str:
    """Numbers without the commas of thousands."""
    return THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def _braced(text: str) -> str:
    """What is in the braces at the beginning; empty where they do not end."""
    depth = 0
    for i, letter in enumerate(text := text.lstrip()):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:i] if i else ""
    return ""


def _undressed(text: str) -> str:
    while True:
        for spelt, meant in SPELT:
            text = spelt.sub(meant, text)
        for mark in DRESS * 2:  # a point may stand within dollar signs or after them
            text = text.strip().removesuffix(mark)
            text = text if mark == "." else text.strip().removeprefix(mark)  # .5 is a number
        text = CHOICE.sub(r"\1", text.strip()) if CHOICE.fullmatch(text.strip()) else text.strip()
        inside = _braced(rest) if (style := STYLE.match(text)) and (rest := text[style.end():]) else ""
        if not style or rest != f"{{{inside}}}":
            return text
        text = inside


def _within(found: str, question: str) -> bool:
    """Whether the question writes this, not as a part of a longer number or word."""
    written = r"\s*".join(map(re.escape, re.sub(r"\s", "", found)))
    return re.search(rf"(?<![\w.]){written}(?!\w|\.\d)", question.replace("$", "")) is not None


def _equal(wanted: str, found: str) -> bool:
    from math_verify import verify

    gold, got = _parsed(wanted), _parsed(found)
    if not gold or not got or _products(got[0]) > _products(gold[0]):
        return False
    return verify(gold, got, timeout_seconds=_timeout())


def _same_value(a: str, b: str) -> bool:
    """Of two answers, neither of which is the right one; long ones and words are what they are written as."""
    from math_verify import verify

    if max(len(a), len(b)) > LONG or a.isalpha() or b.isalpha() or ("%" in a) != ("%" in b):
        return False
    parsed = _parsed(a), _parsed(b)
    return all(parsed) and bool(verify(*parsed, timeout_seconds=_timeout()))


def _products(tree: Any) -> int:
    """Products and powers of sums: what is still to be expanded."""
    from sympy import Add, Basic, Mul, Pow, preorder_traversal

    nodes = preorder_traversal(tree) if isinstance(tree, Basic) else ()
    return sum(isinstance(n, Mul | Pow) and any(isinstance(a, Add) for a in n.args) for n in nodes)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Any]:
    """By math-verify, the text as a whole: on its own it would take what it understands from anywhere in it."""
    from math_verify import LatexExtractionConfig, parse

    whole = [LatexExtractionConfig()]
    return parse(f"\\boxed{{{_ungrouped(text)}}}", whole, fallback_mode="no_fallback", parsing_timeout=_timeout())


def _timeout() -> int | None:
    """Seconds, many, since a busy machine must not change a reward. math-verify interrupts itself with SIGALRM, which
    only a main thread may set; elsewhere it must run unguarded."""
    return 30 if threading.current_thread() is threading.main_thread() else None
