"""The protocols of tasks, and how the rest of the package gets prompts and rewards from one."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Sized
from dataclasses import dataclass
from operator import length_hint
from typing import Any, Protocol, runtime_checkable

from moe_rl.errors import ConfigError, MoeRlError
from moe_rl.registry import Component, Part, check_options, check_values, import_callable, unknown
from moe_rl.seeds import HELD_OUT, derive
from moe_rl.tasks.rewards import Reward, as_number
from moe_rl.types import Prompt

TASKS = {
    "running_sums": ("moe_rl.tasks.running_sums:RunningSums", None),
    "corrected_sums": ("moe_rl.tasks.corrected_sums:CorrectedSums", None),
    "reasoning_gym": ("moe_rl.tasks.reasoning_gym:ReasoningGym", "dataset"),
    "jsonl": ("moe_rl.tasks.jsonl:JsonlTask", "file"),
    "mixture": ("moe_rl.tasks.mixture:Mixture", None),
}
"""The class of each task, and the option that follows the colon of its name."""
CHOICES = (
    *(f"{name}:<{option}>" if option else name for name, (_, option) in TASKS.items()),
    "<package.module>:<Class>",
)

STOPPING = 64
"""Prompts on which a cold start measures its success: to about 3 %."""

EQUAL = 1e-6
"""Rewards of a group that differ by at most this are equal up to rounding (rewards are in [0, 1])."""
RIGHT = 1 - EQUAL
"""The least reward of a right completion."""


@runtime_checkable
class Task(Protocol):
    """Prompts and verifiable rewards. Any class with these two methods is a task. A finite task has a `__len__` (or a
    `__length_hint__`): the number of its different prompts."""

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, always the same ones for the same `seed`."""

    def reward(self, prompt: Prompt, completion: str) -> float:
        """In [0, 1]: 1 for a right completion, less for partial credit."""


Transcript = Sequence[str]
"""The texts after the prompt: the policy's first turn, the reply to it, and so on; the last is of the policy."""


@runtime_checkable
class Conversation(Protocol):
    """One conversation about one prompt. Equal transcripts must get equal replies and rewards, so that a run can be
    resumed: draw random numbers from the prompt."""

    def reply(self, transcript: Transcript) -> str | None:
        """The next reply, or None at the end of the conversation."""

    def rewards(self, transcript: Transcript) -> float | Sequence[float]:
        """At the end, or where it was cut off: one number per turn of the policy, or one for the last turn. Their sum
        is in [0, 1]; 1 is right."""


@runtime_checkable
class Environment(Protocol):
    """A task of several turns. Any class with these two methods is one.

    With a method `demonstration(prompt) -> Transcript` a cold start imitates the last turn of that transcript;
    without, it imitates `Prompt.answer` as the first turn.
    """

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, always the same ones for the same `seed`."""

    def start(self, prompt: Prompt) -> Conversation:
        """A conversation about the prompt; those of a batch run at the same time."""


AnyTask = Task | Environment


def load_task(use: Part) -> AnyTask:
    """The task that `use` names, one of CHOICES or a user's own class, built with its options. Raises ConfigError for
    another name, and for a class that is no task, before it is called."""
    use = Component.of(use)
    name, _, argument = use.name.partition(":")
    parameter = None
    if name in TASKS:
        module, parameter = TASKS[name]
        if bool(parameter) != bool(argument):
            raise ConfigError(
                f"task {use.name!r} is incomplete: write {next(c for c in CHOICES if c.startswith(name))}"
            )
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
    named = {parameter: argument} if parameter else {}
    check_options("task", use, cls, named)
    check_values(use, cls)
    return cls(**use.options, **named)


def ask(task: AnyTask, count: int, seed: int) -> list[Prompt]:
    """`task.prompts(count, seed)`. Raises ConfigError for anything but prompts, and where it fails for `count` prompts
    but not for one."""
    try:
        prompts = list(task.prompts(count, seed))
    except Exception as error:
        if isinstance(error, MoeRlError) or count == 1:
            raise
        ask(task, 1, seed)
        raise ConfigError(
            f"{type(task).__name__}.prompts({count}, {seed}) failed ({type(error).__name__}: {error}), but one prompt "
            f"works. Return {count} prompts, and repeat some if there are fewer."
        ) from error
    if wrong := [p for p in prompts if not isinstance(p, Prompt)]:
        raise ConfigError(
            f"{type(task).__name__}.prompts({count}, {seed}) must return moe_rl.types.Prompt objects, not "
            f"{wrong[0]!r:.60}"
        )
    return prompts


def draw(task: AnyTask, count: int, seed: int, excluding: Collection[str] = ()) -> list[Prompt]:
    """The first `count` prompts of `task` under `seed` whose text is not in `excluding`. Texts may repeat.

    The task makes up to 64 times as many prompts. Raises ConfigError where these are not enough.
    """
    if count < 1:
        raise ConfigError(f"{count} prompts were requested. Request at least 1.")
    excluded = frozenset(excluding)
    factor = 1
    while True:
        prompts = ask(task, count * factor, seed)
        if not prompts:
            raise ConfigError(f"{type(task).__name__}.prompts({count * factor}, {seed}) returned no prompts")
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
    """None: unknown, or unlimited."""
    evaluation: int
    """Held out: never trained on."""
    stopping: int
    """Of the others, those that decide when the cold start ends; reinforcement learning trains on them, too. 0: no cold
    start."""

    def __str__(self) -> str:
        apart = f"{self.evaluation} held out (eval_prompts)"
        apart += f", {self.stopping} to end the supervised warm-up" * bool(self.stopping)
        if self.different is None:
            return f"prompts without a known number: {apart}, all others to train on"
        rest = self.different - self.evaluation
        trained = f"{rest - self.stopping} to train it on, " * bool(self.stopping)
        return f"{self.different} different prompts: {apart}, {trained}{rest} for reinforcement learning"


def split_of(task: AnyTask, evaluation: int, cold_start: bool = True) -> Split:
    """The split with `evaluation` prompts held out. At most half of the others decide when the cold start ends. Raises
    ConfigError where more than half would be held out."""
    if (different := length_hint(task, -1)) < 0:
        return Split(None, evaluation, STOPPING * cold_start)
    if 2 * evaluation > different:
        raise ConfigError(
            f"the task has {different} different prompts, and eval_prompts={evaluation} would hold out more than half. "
            f"Use eval_prompts={max(1, different // 5)}, or add data."
        )
    return Split(different, evaluation, max(1, min(STOPPING, (different - evaluation) // 2)) * cold_start)


def held_out(task: AnyTask, count: int) -> list[Prompt]:
    """The evaluation prompts: the same for every seed, arm and cold start, none of which trains on them. Of a task with
    a `__len__`, each once: intervals are over problems."""
    seed, asked = derive(HELD_OUT, 0, 0), count
    prompts = draw(task, count, seed)
    if not isinstance(task, Sized) or count > len(task):
        return prompts
    while len(different := once(prompts)) < count:
        if asked > 1024 * count:
            raise ConfigError(
                f"{type(task).__name__} has a length of {len(task)}, but only {len(different)} of {len(prompts)} "
                "prompts are different. Correct its __len__."
            )
        prompts = draw(task, asked := 2 * asked, seed)
    return different[:count]


def once(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every text, in their order."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    return [*first.values()]


def votes_of(task: AnyTask, prompt: Prompt, completions: Sequence[str]) -> list[int | None]:
    """For each completion the place, from 0, of the first one with the same answer; None for one without an answer. A
    task may have its own `votes(prompt, completions)`; else equal texts are equal answers, white space around them
    aside. Raises ConfigError unless `votes` returns an int or None for each completion."""
    if (own := getattr(task, "votes", None)) is not None:
        votes = list(own(prompt, completions))
        if len(votes) != len(completions) or not all(vote is None or isinstance(vote, int) for vote in votes):
            raise ConfigError(
                f"{type(task).__name__}.votes returned {votes!r} for {len(completions)} completions. Return one int or "
                "None for each."
            )
        return votes
    first: dict[str, int] = {}
    return [first.setdefault(text.strip(), i) for i, text in enumerate(completions)]


def rewards_of(
    task: Task, prompts: Sequence[Prompt], completions: Sequence[str], ids: Sequence[Any] | None = None
) -> list[float]:
    """The reward of every completion: `task.reward(...)` or, of a task that has a `score(prompts, completions, ids)`,
    what that gives to all of them. `ids`: their tokens. Raises ConfigError unless each is a number in [0, 1]."""
    score = getattr(task, "score", None)
    pairs = [*zip(prompts, completions, strict=True)]
    values = score(prompts, completions, ids or [None] * len(pairs)) if score else [task.reward(*p) for p in pairs]
    return [_checked(task, reward, *pair) for reward, pair in zip(values, pairs, strict=True)]


def _checked(task: Task, reward: Any, prompt: Prompt, completion: str) -> float:
    value = as_number(reward)
    if not 0.0 <= value <= 1.0:
        raise ConfigError(
            f"{type(task).__name__}.reward returned {reward!r} for {completion[:80]!r}, prompt {prompt.text[:80]!r}. "
            "Use numbers in [0, 1]."
        )
    return reward if isinstance(reward, Reward) else value


def shortened(transcript: Transcript) -> str:
    """A transcript for an error, without the middle of a long one."""
    text = repr(list(transcript))
    return text if len(text) <= 300 else f"{text[:140]} … {text[-140:]}"
