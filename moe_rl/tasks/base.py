"""What a task is, and how the rest of the package asks one for prompts and rewards."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass
from operator import length_hint
from typing import Protocol, runtime_checkable

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, Part, check_options, import_callable, unknown
from moe_rl.seeds import HELD_OUT, derive
from moe_rl.types import Prompt

CHOICES = ("running_sums", "corrected_sums", "guessing", "reasoning_gym:<dataset>", "jsonl:<file>", "mixture",
           "<package.module>:<Class>")
TASKS = {
    "running_sums": ("moe_rl.tasks.running_sums:RunningSums", None),
    "corrected_sums": ("moe_rl.tasks.corrected_sums:CorrectedSums", None),
    "guessing": ("moe_rl.tasks.guessing:Guessing", None),
    "reasoning_gym": ("moe_rl.tasks.reasoning_gym:ReasoningGym", "dataset"),
    "jsonl": ("moe_rl.tasks.jsonl:JsonlTask", "file"),
    "mixture": ("moe_rl.tasks.mixture:Mixture", None),
}
"""Where each lives, and which of its options the part of the name after the colon is."""

STOPPING = 64
"""Prompts that say when a cold start ends: few, since a finite task has few to spare; the rate is good to about 3 %."""

EQUAL = 1e-6
"""Rewards of a group that lie this close together are equal up to rounding (rewards are in [0, 1])."""


@runtime_checkable
class Task(Protocol):
    """Prompts and verifiable rewards. Any class with these two methods is a task; it need not inherit from this one.

    A finite task says with `__len__` how many different prompts it has (one that may be, with `__length_hint__`), so
    that what is held out can be weighed against what is left to train on.
    """

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, always the same ones for the same `seed`."""

    def reward(self, prompt: Prompt, completion: str) -> float:
        """How good the completion is, in [0, 1]; 1 says that it is right, less may be partial credit."""


Transcript = Sequence[str]
"""What was said after the prompt, in turn, as text: the policy's first turn, the reply to it, and so on; the last is of
the policy."""


@runtime_checkable
class Conversation(Protocol):
    """One conversation about one prompt. Equal transcripts must get equal replies and rewards, or a run that was
    interrupted would not end as if it had not been: what is random is drawn from the prompt."""

    def reply(self, transcript: Transcript) -> str | None:
        """What follows, or None where the conversation is over."""

    def rewards(self, transcript: Transcript) -> float | Sequence[float]:
        """When it is over, or was cut off: one number per turn of the policy, or one that the last of them earns. Their
        sum is the reward of the whole, in [0, 1]; 1 says that it is right."""


@runtime_checkable
class Environment(Protocol):
    """A task of several turns. Any class with these two methods is one; a `Task` is the case of one turn.

    With a method `demonstration(prompt) -> Transcript` a cold start can imitate the last turn of that transcript, all
    that is before it being given; without, it imitates `Prompt.answer` as the first turn.
    """

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, always the same ones for the same `seed`."""

    def start(self, prompt: Prompt) -> Conversation:
        """A conversation about it; those of a batch are under way at the same time."""


AnyTask = Task | Environment


def load_task(use: Part) -> AnyTask:
    """The task that `use` names, built with its options.

    It is one of CHOICES, some of which are environments of several turns; `<package.module>:<Class>` is a user's own
    class, and the working directory is importable for it. Raises ConfigError, which lists the choices, for anything
    else, and for a class that is no task before it is called.
    """
    use = Component.of(use)
    name, _, argument = use.name.partition(":")
    parameter = None
    if name in TASKS:
        module, parameter = TASKS[name]
        if bool(parameter) != bool(argument):
            raise ConfigError(f"task {use.name!r} is incomplete: write "
                              f"{next(c for c in CHOICES if c.startswith(name))}")
        cls = import_callable("task", module)
    elif use.own:
        cls = import_callable("task", use.name)
    else:
        unknown("task", name, CHOICES)
    prompts, *rewarded = (callable(getattr(cls, method, None)) for method in ("prompts", "reward", "start"))
    if not isinstance(cls, type) or not prompts or not any(rewarded):
        raise ConfigError(
            f"{use.name!r} is not a task. Write a class with prompts(count, seed) and reward(prompt, completion), or "
            "start(prompt) for several turns."
        )
    said = {parameter: argument} if parameter else {}
    check_options("task", use, cls, said)
    options = {**use.options, **said}
    try:
        return cls(**options)
    except TypeError as error:
        raise ConfigError(f"task {use.name!r} does not accept the options {options!r}: {error}") from error


def draw(task: AnyTask, count: int, seed: int, excluding: Collection[str] = ()) -> list[Prompt]:
    """The first `count` prompts of `task` under `seed` whose text is not in `excluding`.

    A task that repeats itself, as a finite one must, is asked for up to 64 times as many before this gives up with a
    ConfigError. Texts may repeat among the prompts returned; only `excluding` is kept out.
    """
    if count < 1:
        raise ConfigError(f"{count} prompts were requested. Request at least 1.")
    excluded = frozenset(excluding)
    factor = 1
    while True:
        prompts = task.prompts(count * factor, seed)
        if not prompts:
            raise ConfigError(f"{type(task).__name__}.prompts({count * factor}, {seed}) returned no prompts")
        if not all(isinstance(p, Prompt) for p in prompts):
            kind = type(prompts[0]).__name__
            raise ConfigError(f"{type(task).__name__}.prompts must return moe_rl.types.Prompt objects, not {kind}")
        fresh = [p for p in prompts if p.text not in excluded]
        if len(fresh) >= count:
            return fresh[:count]
        if factor == 64 or (not excluded and len(prompts) < count * factor):
            break
        factor *= 2
    raise ConfigError(
        f"{type(task).__name__} has too few prompts: {count} are needed, but {len(fresh)} of "
        f"{len({p.text for p in prompts})} different ones are not held out. Lower eval_prompts, or add data."
    )


@dataclass(frozen=True)
class Split:
    """How the different prompts of a task are shared out."""

    different: int | None
    """None: the task does not say, or they have no end."""
    evaluation: int
    """Held out: never trained on."""
    stopping: int
    """Of the others, those that say when the cold start ends; reinforcement learning trains on them, too."""

    def __str__(self) -> str:
        apart = f"{self.evaluation} held out (eval_prompts), {self.stopping} to end the supervised warm-up"
        if self.different is None:
            return f"prompts without a known number: {apart}, all others to train on"
        rest = self.different - self.evaluation
        return (f"{self.different} different prompts: {apart}, {rest - self.stopping} to train it on, {rest} for "
                "reinforcement learning")


def split_of(task: AnyTask, evaluation: int) -> Split:
    """How many prompts are for what, `evaluation` of them held out. Raises ConfigError where more than half would be.

    At most half of what is not held out says when the cold start ends.
    """
    if (different := length_hint(task, -1)) < 0:
        return Split(None, evaluation, STOPPING)
    if 2 * evaluation > different:
        raise ConfigError(
            f"the task has {different} different prompts, and eval_prompts={evaluation} would hold out "
            f"{('all' if evaluation >= different else 'more than half')}. Use eval_prompts={max(1, different // 5)}, "
            "or add data.")
    return Split(different, evaluation, max(1, min(STOPPING, (different - evaluation) // 2)))


def held_out(task: AnyTask, count: int) -> list[Prompt]:
    """The evaluation prompts: the same for every seed, arm and cold start, none of which may train on them. Of a task
    that says with `__len__` how many different ones it has, each once: intervals are over problems."""
    seed, asked = derive(HELD_OUT, 0, 0), count
    found = draw(task, count, seed)
    if not isinstance(task, Sized) or count > len(task):
        return found
    while len(different := once(found)) < count:
        if asked > 1024 * count:
            raise ConfigError(f"{type(task).__name__} has a length of {len(task)}, but only {len(different)} of "
                              f"{len(found)} prompts are different, and {count} must be held out. Correct its __len__.")
        found = draw(task, asked := 2 * asked, seed)
    return different[:count]


def once(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every text, in their order."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    return [*first.values()]


def votes_of(task: AnyTask, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
    """Which completions of a prompt give the same answer: of each the place of the first that does, from 0, or None
    where it gives none. A task says so with a method `votes(prompt, completions)`; else equal texts are equal answers,
    but for white space around them. Raises ConfigError unless `votes` gives one per completion, an int or None."""
    if (own := getattr(task, "votes", None)) is not None:
        votes = list(own(prompt, completions))
        if len(votes) != len(completions) or not all(vote is None or isinstance(vote, int) for vote in votes):
            raise ConfigError(f"{type(task).__name__}.votes returned {votes!r} for {len(completions)} completions of "
                              f"the prompt {prompt.text[:80]!r}. Return one int or None for each.")
        return votes
    first: dict[str, int] = {}
    return [first.setdefault(text.strip(), i) for i, text in enumerate(completions)]


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
            f"{prompt.text[:80]!r}. Return a number in [0, 1]."
        )
    return value


def shortened(transcript: Transcript) -> str:
    """A transcript for an error, its middle left out where it is long."""
    text = repr(list(transcript))
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]}"
