"""What a task is, and how the rest of the package asks one for prompts and rewards."""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

from moe_rl.errors import ConfigError
from moe_rl.seeds import HELD_OUT, derive
from moe_rl.types import Prompt

CHOICES = ("running_sums", "reasoning_gym:<dataset>", "jsonl:<file>", "<package.module>:<Class>")


@runtime_checkable
class Task(Protocol):
    """Prompts and verifiable rewards. Any class with these two methods is a task; it need not inherit from this one."""

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, always the same ones for the same `seed`."""

    def reward(self, prompt: Prompt, completion: str) -> float:
        """How good the completion is, in [0, 1]; 1 says that it is right, less may be partial credit."""


def load_task(spec: str, options: Mapping[str, Any]) -> Task:
    """The task that `spec` names, built with `options`.

    `spec` is one of `running_sums`, `reasoning_gym:<dataset>`, `jsonl:<file>`, or `<package.module>:<Class>` for a
    user's own class, which is called with `options` as keyword arguments; the working directory is importable for it.
    Raises ConfigError, which lists the choices, for anything else.
    """
    name, colon, argument = spec.partition(":")
    if name == "running_sums" and not colon:
        from moe_rl.tasks.running_sums import RunningSums

        return construct(RunningSums, options, spec)
    if name == "reasoning_gym" and argument:
        from moe_rl.tasks.reasoning_gym import ReasoningGym

        return ReasoningGym(argument, options)
    if name == "jsonl" and argument:
        from moe_rl.tasks.jsonl import JsonlTask

        return construct(JsonlTask, {"file": argument, **options}, spec)
    module_path = all(part.isidentifier() for part in name.split("."))
    if argument.isidentifier() and module_path and name not in ("running_sums", "reasoning_gym", "jsonl"):
        return construct(_imported_class(name, argument, spec), options, spec)
    close = difflib.get_close_matches(name, ["running_sums", "reasoning_gym", "jsonl"], n=1)
    hint = f" Did you mean {next(c for c in CHOICES if c.startswith(close[0]))}?" if close else ""
    raise ConfigError(f"no task is called {spec!r}.{hint} A task is one of: {', '.join(CHOICES)}.")


def draw(task: Task, count: int, seed: int, excluding: Collection[str] = ()) -> list[Prompt]:
    """The first `count` prompts of `task` under `seed` whose text is not in `excluding`.

    A task that repeats itself, as a finite one must, is asked for up to 64 times as many before this gives up with a
    ConfigError. Texts may repeat among the prompts returned; only `excluding` is kept out.
    """
    if count < 1:
        raise ConfigError(f"{count} prompts were asked for; a step or an evaluation needs at least 1.")
    excluded = frozenset(excluding)
    factor = 1
    while True:
        prompts = task.prompts(count * factor, seed)
        if not prompts:
            raise ConfigError(f"{type(task).__name__}.prompts({count * factor}, {seed}) returned no prompts at all.")
        if not all(isinstance(p, Prompt) for p in prompts):
            kind = type(prompts[0]).__name__
            raise ConfigError(f"{type(task).__name__}.prompts must return moe_rl.types.Prompt objects, not {kind}.")
        fresh = [p for p in prompts if p.text not in excluded]
        if len(fresh) >= count:
            return fresh[:count]
        if factor == 64 or (not excluded and len(prompts) < count * factor):
            break
        factor *= 2
    raise ConfigError(
        f"{type(task).__name__} has too few prompts: {count} were asked for, but of {len(prompts)} drawn "
        f"({len({p.text for p in prompts})} different) only {len(fresh)} are not among the {len(excluded)} held out "
        "for another purpose. Ask for fewer evaluation prompts, or give the task more data."
    )


def held_out(task: Task, count: int) -> list[Prompt]:
    """The evaluation prompts: the same for every seed, arm and cold start, none of which may train on them."""
    return draw(task, count, derive(HELD_OUT))


def checked_reward(task: Task, prompt: Prompt, completion: str) -> float:
    """`task.reward(...)` as a float; ConfigError when it is no number in [0, 1], which would void the advantages."""
    reward = task.reward(prompt, completion)
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ConfigError(
            f"{type(task).__name__}.reward returned {reward!r} for the completion {completion[:80]!r} of the prompt "
            f"{prompt.text[:80]!r}; a reward must be a number in [0, 1], since advantages and rates are made of it."
        )
    return value


def construct(cls: type, options: Mapping[str, Any], spec: str) -> Task:
    """`cls(**options)`, with a wrong option or a class that is no task reported as ConfigError.

    A class is looked at before it is called: a configuration could name any, and building `subprocess.Popen` runs it.
    """
    if not all(callable(getattr(cls, name, None)) for name in ("prompts", "reward")):
        raise ConfigError(
            f"{spec!r} is no task: it needs the methods prompts(count, seed) and reward(prompt, completion)."
        )
    try:
        return cls(**options)
    except TypeError as error:
        raise ConfigError(f"task {spec!r} cannot be built with the options {dict(options)!r}: {error}") from error


def unknown(kind: str, name: str, choices: Iterable[str]) -> NoReturn:
    """Raise a ConfigError that names what was asked for, the closest matches and all choices."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"no {kind} is called {name!r}.{hint} There are: {', '.join(choices)}.")


def _imported_class(module_name: str, class_name: str, spec: str) -> type:
    if str(Path.cwd()) not in sys.path:  # stays there: the module may import its neighbours later
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module exists, and one of its own imports fails
        raise ConfigError(
            f"task {spec!r}: there is no module {error.name!r} in {Path.cwd()} or among the installed packages. "
            f"A task is one of: {', '.join(CHOICES)}."
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        unknown(f"class of {module.__file__}", class_name, classes)
    return found
