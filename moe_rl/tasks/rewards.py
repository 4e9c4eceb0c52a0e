"""Reward functions of one's own, called as TRL calls them: by keyword, for all completions of a step at once."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import signal
import threading
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Any

from moe_rl.errors import ConfigError
from moe_rl.registry import import_callable

if TYPE_CHECKING:
    from moe_rl.types import Prompt

Scores = list[float | None]
TIMEOUTS = "reward_timeouts"
OURS, LEFT_OUT = {"prompts", "completions", "trainer_state"}, {"prompt", "completion", "completion_ids"}
"""Keywords that no key of a line may have, and keys that TRL does not hand on."""
ROUNDING, LATE = 1e-6, -math.inf


class Reward(float):
    """A reward in [0, 1] with its columns: what each function gave, None where it gave nothing."""

    parts: Mapping[str, float | None] = {}

    @property
    def scored(self) -> bool:
        """Whether any function gave it a number."""
        return any(value is not None for name, value in self.parts.items() if name != TIMEOUTS)


def columns_of(rewards: Iterable[float]) -> dict[str, float]:
    """The columns of rewards together: means over what was scored, and how often a limit was exceeded."""
    by_column: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in getattr(reward, "parts", {}).items():
            by_column.setdefault(name, []).extend([] if value is None else [value])
    return {n: math.fsum(values) / (1 if n == TIMEOUTS else len(values)) for n, values in by_column.items() if values}


class Functions:
    """The functions `names`, `pkg.module:name` each, and the weights of their sum, by default 1. `span`, the range of
    the sum, is mapped to [0, 1]. `timeout`: seconds of a call, in a process of its own. `keys`: those of the data.
    Raises ConfigError, before any is called, for a function that cannot be called with them."""

    def __init__(self, names: Sequence[str], weights: Any, span: Any, timeout: float | None, keys: Collection[str]):
        columns = [f"reward_{name.rpartition(':')[2]}" for name in names]
        weights = [1.0] * len(names) if weights is None else weights
        if len({*columns, "reward_std", TIMEOUTS}) < len(names) + 2:
            raise ConfigError(f"rewards={[*names]}: give functions of different names, none of them std or timeouts")
        if len(weights) != len(names) or not all(map(math.isfinite, weights)):
            raise ConfigError(f"reward_weights={[*weights]}: give {len(names)} finite weights, one for each function")
        if len(span) != 2 or not -math.inf < span[0] < span[1] < math.inf:
            raise ConfigError(f"reward_range={[*span]}: give two finite numbers, the lower end first")
        for name in names:
            _check(name, keys)
        calls = (Limited(name, timeout) if timeout else partial(_call, name) for name in names)
        self.names, self.span, self.timeout, self.keys = names, span, timeout, {*keys} - LEFT_OUT
        self.parts = [*zip(columns, weights, calls, strict=True)]

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str], ids: Sequence[Any]) -> list[Reward]:
        """The rewards. Raises ConfigError for a function that gives anything but numbers and None, or a sum outside of
        `span`. A completion that none scores gets 0, with a warning."""

        def messages(role: str, texts: Sequence[str]) -> list[Any]:
            pairs = zip(prompts, texts, strict=True)
            return [[{"role": role, "content": text}] if prompt.chat else text for prompt, text in pairs]

        keywords = {key: [prompt.entry.get(key) for prompt in prompts] for key in self.keys}
        keywords |= {"prompts": messages("user", [prompt.text for prompt in prompts]), "completion_ids": [*ids]}
        keywords["completions"] = messages("assistant", completions)
        scores = {column: call(**keywords) for column, _, call in self.parts}
        rewards, (low, high) = [], self.span
        for i, text in enumerate(completions):
            parts = {column: None if returned[i] == LATE else returned[i] for column, returned in scores.items()}
            weighed = [weight * value for column, weight, _ in self.parts if (value := parts[column]) is not None]
            total = math.fsum(weighed) if weighed else low
            if not low - ROUNDING <= total <= high + ROUNDING:
                raise ConfigError(
                    f"{', '.join(self.names)} gave {total:g} for {text[:80]!r}, prompt {prompts[i].text[:80]!r}. "
                    f"Set task.reward_range, now {[low, high]}, to the range of all sums. The highest is right."
                )
            late = {TIMEOUTS: float(sum(returned[i] == LATE for returned in scores.values()))} if self.timeout else {}
            rewards.append(Reward(min(max((total - low) / (high - low), 0.0), 1.0)))
            rewards[i].parts = parts | late
        if none := sum(not r.scored for r in rewards):
            warnings.warn(f"no function scored {none} of {len(rewards)} completions: their reward is 0", stacklevel=2)
        return rewards


class Limited:
    """A function in a process of its own, which a call beyond the limit ends; the next call starts another. What was
    asked in that call is repeated one by one, and LATE is what exceeds the limit again."""

    pool: Any = None

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds

    def __call__(self, **keywords: Any) -> Scores:
        if self.pool is None:
            self.pool = get_context("spawn").Pool(1)
            self.group = self.pool.apply(_begin, (self.name,))
        answer = self.pool.apply_async(_call, (self.name,), keywords)
        answer.wait(self.seconds)
        if answer.ready():
            return answer.get()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)  # what the function started, too
        self.pool.terminate()
        self.pool = None
        count = len(keywords["completions"])
        each = [{key: values[i : i + 1] for key, values in keywords.items()} for i in range(count)]
        return [LATE] if count == 1 else [self(**row)[0] for row in each]


def _begin(name: str) -> int:
    """Import the function in a new process: it and what it starts are one group, which ends with the parent."""

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os.killpg(0, signal.SIGKILL)

    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    import_callable("reward", name)
    return os.getpid()


def _call(name: str, **keywords: Any) -> Scores:
    """What a function gives. Raises ConfigError for anything but as many numbers or None as there are completions."""
    function, count = import_callable("reward", name), len(keywords["completions"])
    state = "trainer_state" in inspect.signature(function).parameters
    scores = function(**keywords, **({"trainer_state": None} if state else {}))
    scores = asyncio.run(scores) if inspect.iscoroutine(scores) else scores
    if isinstance(scores, str | Mapping | Set) or not isinstance(scores, Iterable) or len(scores := [*scores]) != count:
        raise ConfigError(
            f"{name} returned {scores!r:.160}. Return a list of {count}, one number or None per completion."
        )
    values = [None if score is None else as_number(score) for score in scores]
    for score, value, completion in zip(scores, values, keywords["completions"], strict=True):
        if value is not None and not math.isfinite(value):
            raise ConfigError(
                f"{name} returned {score!r:.80} for {completion!r:.160}. Return a finite number, or None."
            )
    return values


def as_number(score: Any) -> float:
    """A reward as a float; NaN for what is no number."""
    try:
        return math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _check(name: str, keys: Collection[str]) -> None:
    """Raise ConfigError for anything but a function that takes the keywords, each of which is there once."""
    if taken := OURS & {*keys}:
        raise ConfigError(f"the data has the key {min(taken)!r}, which is a keyword of every reward. Rename the key.")
    parameters = inspect.signature(import_callable("reward", name)).parameters.values()
    names, kinds = {*keys, *OURS, "completion_ids"} - {"prompt", "completion"}, {p.kind for p in parameters}
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not needed <= names or inspect.Parameter.POSITIONAL_ONLY in kinds or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"the reward {name} must take **kwargs and, by keyword, only {', '.join(sorted(names))}, as for TRL. Write "
            f"def {name.rpartition(':')[2]}(completions, answer, **kwargs), which returns a list."
        )
