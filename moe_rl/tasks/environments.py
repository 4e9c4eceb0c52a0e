"""Completions of a task, or conversations with an environment, and the rewards of each turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from moe_rl.errors import ConfigError, MoeRlError, RunError
from moe_rl.tasks.base import AnyTask, Conversation, Environment, Transcript, checked_reward, shortened
from moe_rl.types import Prompt, Rollout, Sampling


def compute_reward(task: AnyTask, rollout: Rollout) -> float:
    """The reward of a completion, or of a conversation of `sample_rollouts`."""
    if isinstance(task, Environment):
        return math.fsum(turn.reward for turn in rollout.turns)
    return checked_reward(task, rollout.prompt, rollout.text)


def sample_rollouts(
    generate: Callable[..., list[Rollout]],
    task: AnyTask,
    prompts: list[Prompt],
    group_size: int,
    *,
    key: tuple[int, ...],
    sampling: Sampling,
) -> list[Rollout]:
    """Completions of the prompts, or conversations, whose turns have their rewards, drawn by an engine's `generate`.

    Raises RunError, which names prompt and transcript, where an environment breaks, and ConfigError for a reply or a
    reward that cannot be one.
    """
    if not isinstance(task, Environment):
        return generate(prompts, group_size, key=key, sampling=sampling)
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    started: dict[int, Conversation] = {}
    transcripts: list[list[str]] = [[] for _ in asked]

    def call(row: int, method: str) -> Any:
        transcript = tuple(transcripts[row])
        try:
            if row not in started:
                started[row] = task.start(asked[row])
            return getattr(started[row], method)(transcript)
        except MoeRlError:
            raise
        except Exception as error:
            raise RunError(
                f"{type(task).__name__}: {method} failed ({error!r}) for the prompt {asked[row].text[:80]!r} after "
                f"{shortened(transcript)}. Correct it; the run then continues from its last checkpoint.") from error

    def reply(row: int, text: str) -> str | None:
        transcripts[row].append(text)
        said = call(row, "reply")
        if said is not None and not isinstance(said, str):
            raise ConfigError(f"{type(task).__name__}: reply returned {said!r} for the prompt "
                              f"{asked[row].text[:80]!r}. Return text, or None to end the rollout.")
        transcripts[row].extend(() if said is None else (said,))
        return said

    rollouts = generate(prompts, group_size, key=key, sampling=sampling, reply=reply)
    for row, rollout in enumerate(rollouts):
        turns = rollout.turns
        transcripts[row] = [text for turn in turns[:-1] for text in (turn.text, turn.reply)] + [turns[-1].text]
        rewards = _check_rewards(task, rollout, call(row, "rewards"), tuple(transcripts[row]))
        rewarded = tuple(replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True))
        rollouts[row] = replace(rollout, turns=rewarded)
    return rollouts


def _check_rewards(task: Environment, rollout: Rollout, given: Any, transcript: Transcript) -> list[float]:
    """One finite number per turn. Raises ConfigError for anything else, and for a sum outside of [0, 1]."""
    def refuse(why: str) -> NoReturn:
        raise ConfigError(f"{type(task).__name__}: rewards returned {given!r} for the {len(rollout.turns)} turns of "
                          f"{shortened(transcript)}, prompt {rollout.prompt.text[:80]!r}. Return {why}.")

    try:
        rewards = [float(x) for x in given] if hasattr(given, "__iter__") else [float(given)]
    except (TypeError, ValueError):
        refuse("numbers")
    if hasattr(given, "__iter__") and len(rewards) != len(rollout.turns):
        refuse("one number, or one for each turn")
    if not all(map(math.isfinite, rewards)) or not 0 <= math.fsum(rewards) <= 1:
        refuse("numbers whose sum is in [0, 1]")
    return [0.0] * (len(rollout.turns) - len(rewards)) + rewards
