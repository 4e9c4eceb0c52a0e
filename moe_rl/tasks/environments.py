"""Completions of a task, or conversations with an environment, and the rewards of their turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moe_rl.errors import ConfigError, MoeRlError, RunError
from moe_rl.tasks.base import AnyTask, Conversation, Environment, Transcript, rewards_of, shortened
from moe_rl.types import Prompt, Rollout, Sampling


def compute_rewards(task: AnyTask, rollouts: Sequence[Rollout]) -> list[float]:
    """The rewards of completions, or of conversations of `sample_rollouts`."""
    if isinstance(task, Environment):
        return [math.fsum(turn.reward for turn in rollout.turns) for rollout in rollouts]
    return rewards_of(
        task, [r.prompt for r in rollouts], [r.text for r in rollouts], [list(r.tokens) for r in rollouts]
    )


def sample_rollouts(
    generate: Callable[..., list[Rollout]],
    task: AnyTask,
    prompts: list[Prompt],
    group_size: int,
    *,
    key: tuple[int, ...],
    sampling: Sampling,
) -> list[Rollout]:
    """Completions of the prompts, or conversations with rewards, sampled by an engine's `generate`.

    Raises RunError, with prompt and transcript, where an environment breaks, and ConfigError for impossible replies and
    rewards.
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
                f"{shortened(transcript)}. Correct it; the run then continues from its last checkpoint."
            ) from error

    def reply(row: int, text: str) -> str | None:
        transcripts[row].append(text)
        answer = call(row, "reply")
        if answer is not None and not isinstance(answer, str):
            raise ConfigError(f"{type(task).__name__}: reply returned {answer!r}. Return text, or None at the end.")
        transcripts[row].extend(() if answer is None else (answer,))
        return answer

    rollouts = generate(prompts, group_size, key=key, sampling=sampling, reply=reply)
    for row, rollout in enumerate(rollouts):
        turns = rollout.turns
        transcripts[row] = [text for turn in turns[:-1] for text in (turn.text, turn.reply)] + [turns[-1].text]
        rewards = _check_rewards(task, rollout, call(row, "rewards"), transcripts[row])
        rewarded = tuple(replace(turn, reward=reward) for turn, reward in zip(turns, rewards, strict=True))
        rollouts[row] = replace(rollout, turns=rewarded)
    return rollouts


def _check_rewards(task: Environment, rollout: Rollout, returned: Any, transcript: Transcript) -> list[float]:
    """One number per turn. Raises ConfigError for anything else, and for a sum outside of [0, 1]."""
    several = hasattr(returned, "__iter__")
    try:
        rewards = [float(x) for x in returned] if several else [float(returned)]
    except (TypeError, ValueError):
        rewards = [math.nan]
    finite = all(map(math.isfinite, rewards))
    if not finite or several and len(rewards) != len(rollout.turns) or not 0 <= math.fsum(rewards) <= 1:
        raise ConfigError(
            f"{type(task).__name__}: rewards returned {returned!r} for the {len(rollout.turns)} turns of "
            f"{shortened(transcript)}, prompt {rollout.prompt.text[:80]!r}. Return one number, or one for each turn, "
            "whose sum is in [0, 1]."
        )
    return [0.0] * (len(rollout.turns) - len(rewards)) + rewards
