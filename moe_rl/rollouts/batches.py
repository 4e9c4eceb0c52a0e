"""Prompts to rewarded batches: what every step trains on, sampled in that step, or before, and queued.

A batch has the number of the step that trains on it, with prompts and noise of its own. It is begun `lag` steps
earlier, under the weights of that time, and waits: no older weights are kept, and an engine that shares the policy's
module serves as well as any other. Step s samples with the weights after step s - 1, so without lag a batch is as old
as the weights that train on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import NonNegativeInt, PositiveInt

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.tokens import encode_prompts
from moe_rl.registry import checked
from moe_rl.rollouts.engine import RolloutEngine, before_stop, completion_text, sampling_of
from moe_rl.rollouts.turns import splice_routes
from moe_rl.routing.moe_layers import Layout, MoeLayer
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import LAG, NOISE, PROMPTS, derive
from moe_rl.tasks.base import EQUAL, AnyTask, Environment, draw, load_task
from moe_rl.tasks.environments import compute_rewards, sample_rollouts
from moe_rl.tasks.rewards import columns_of
from moe_rl.types import KeptTokens, Prompt, Rollout, Rollouts, Turn

FILE = "batches.pt"
"""Of a checkpoint, where batches wait."""
Row = dict[str, float]
Text = Callable[[Sequence[int]], str]


# ---------------------------------------------------------------------- sampled, rewarded, padded
@dataclass(frozen=True, kw_only=True)
class Collector:
    """Rewarded rollouts of a run's task, under the weights that its engine has: what every batch source samples with.
    Prompts and noise follow from the run's seed and a position: the number of the step that trains on a batch and, for
    more of it, further numbers. With several ranks rank 0 alone has an engine and a tokenizer."""

    run: RunConfig
    task: AnyTask
    engine: RolloutEngine
    tokenizer: Any
    ends: Collection[int] = ()
    """Token ids that end a completion."""
    held_out: list[Prompt]
    """Encoded prompts of the evaluation; never trained on."""

    def draw_prompts(self, count: int, *position: int) -> list[Prompt]:
        """Encoded prompts that the evaluation does not have."""
        excluding = {prompt.text for prompt in self.held_out}
        prompts = draw(self.task, count, derive(self.run.seed, PROMPTS, *position), excluding)
        return encode_prompts(prompts, self.tokenizer)

    def sample(
        self,
        prompts: list[Prompt],
        group_size: int,
        position: tuple[int, ...],
        *,
        step: int | None = None,
        most: int | None = None,
    ) -> list[Rollout]:
        """Completions of at most `most` tokens. With `step`, they say that the weights before it drew them."""
        sampling = sampling_of(self.run)
        sampling = sampling if most is None else replace(sampling, max_new_tokens=most)
        rollouts = sample_rollouts(
            self.engine.generate,
            self.task,
            prompts,
            group_size,
            key=(self.run.seed, NOISE, *position),
            sampling=sampling,
        )
        if step is None:
            return rollouts
        return [
            replace(
                r,
                sampled_at=torch.full((len(r.tokens),), step - 1),
                routes=r.routes and replace(r.routes, weight_version=f"step {step - 1}"),
            )
            for r in rollouts
        ]

    def rewards(self, rollouts: list[Rollout]) -> list[float]:
        """The reward of every completion."""
        return compute_rewards(self.task, rollouts)

    def batch(self, rollouts: list[Rollout], rewards: list[float]) -> Rollouts:
        """Padded, groups of `group_size` after each other."""
        groups = [i // self.run.group_size for i in range(len(rollouts))]
        return collate(rollouts, groups, rewards, self.tokenizer.pad_token_id)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Token ids of a completion as text, without the token that ends it."""
        return completion_text(tokens, self.ends, self.tokenizer)


def collate(rollouts: list[Rollout], prompt_index: list[int], rewards: list[float], pad_token: int) -> Rollouts:
    """Right-pad rollouts into one batch.

    Routes, what sampling kept, and the steps of the weights are there when every rollout carries them. What an
    environment said in a conversation is no part of the response. The batch lives on the CPU.
    """
    lengths = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    shape = (len(rollouts), max(lengths))
    tokens = torch.full(shape, pad_token, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.bool)
    response_mask = torch.zeros(shape, dtype=torch.bool)
    logprobs, turn_rewards = torch.zeros(shape), torch.zeros(shape)
    turn = torch.zeros(shape, dtype=torch.long)
    sampled_at = torch.zeros(shape, dtype=torch.long)
    for b, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        start = len(rollout.prompt.tokens)
        tokens[b, :length] = torch.tensor(rollout.prompt.tokens + rollout.tokens)
        attention_mask[b, :length] = True
        response_mask[b, start:length] = not rollout.turns
        for number, one_turn in enumerate(rollout.turns, start=1):
            response_mask[b, start + one_turn.start : start + one_turn.end] = True
            turn[b, start + one_turn.start : start + one_turn.end] = number
            turn_rewards[b, start + one_turn.end - 1] = one_turn.reward
        logprobs[b, start:length] = rollout.logprobs
        if rollout.sampled_at is not None:
            sampled_at[b, start:length] = rollout.sampled_at
    routes = [r.routes for r in rollouts if r.routes is not None]
    sets = [r.kept_tokens for r in rollouts if r.kept_tokens is not None]
    prompts = torch.tensor([len(r.prompt.tokens) for r in rollouts])
    written = attention_mask & (torch.arange(shape[1]) >= prompts[:, None])
    routed, conversed = len(routes) == len(rollouts), any(r.turns for r in rollouts)
    return Rollouts(
        tokens=tokens,
        attention_mask=attention_mask,
        response_mask=response_mask,
        prompt_index=torch.tensor(prompt_index),
        rollout_logprobs=logprobs,
        rewards=torch.tensor(rewards, dtype=torch.float32),
        finished=torch.tensor([r.finished for r in rollouts]),
        turn=turn if conversed else None,
        turn_rewards=turn_rewards if conversed else None,
        rollout_routes=RoutingTrace.cat(routes, tokens, attention_mask, mixed=True) if routed else None,
        kept_tokens=KeptTokens.stack(sets, written) if len(sets) == len(rollouts) else None,
        sampled_at=sampled_at if all(r.sampled_at is not None for r in rollouts) else None,
    )


# ---------------------------------------------------------------------- sources of batches
@runtime_checkable
class BatchSource(Protocol):
    """Between engine and trainer. With several ranks rank 0 alone uses it. A component is a function
    `source(*, option=…)` that makes one."""

    row: Row
    """What the row of `steps` shall say of how the last batch was drawn."""

    def next(self, collector: Collector, step: int) -> Rollouts:
        """The batch that this step trains on, rewarded; called at every step in turn, before its first update."""

    def save(self, folder: Path) -> None:
        """Write everything that resuming needs."""

    def load(self, collector: Collector, folder: Path) -> None:
        """Read what `save` wrote."""


def _check(run: RunConfig, *, lag: int = 0, partial_tokens: int | None = None, **_: Any) -> None:
    if partial_tokens is None:
        return
    if not (lag and partial_tokens < run.max_new_tokens):
        raise ConfigError(
            f"batches.partial_tokens={partial_tokens} has no effect with batches.lag={lag} and "
            f"max_new_tokens={run.max_new_tokens}. Use a lag of 1 or more and 1 to "
            f"{run.max_new_tokens - 1} tokens, or leave it out."
        )
    if isinstance(load_task(run.task), Environment):
        raise ConfigError(
            f"batches.partial_tokens={partial_tokens} cannot split multi-turn rollouts. Leave it out; "
            "batches.lag works."
        )


def fresh() -> Queue:
    """The batch source `fresh`: every batch is drawn in the step that trains on it."""
    return Queue()


@checked(_check)
def lagged(
    *,
    lag: NonNegativeInt,
    mode: Literal["fixed", "random"] = "fixed",
    partial_tokens: PositiveInt | None = None,
    refills: NonNegativeInt = 0,
) -> Queue:
    """The batch source `lagged`. `lag`: steps between the weights that sample a batch and those that begin to train on
    it; in the first steps, the weights that the run begins with sample. `mode`: `fixed`, or `random`: a batch's lag is
    drawn from 0 … `lag`, alike in all arms of a seed. `partial_tokens`: tokens that a response draws per step, so that
    its parts are of several weights (default: each is drawn at once). `refills`: as in `dynamic`."""
    return Queue(lag, mode, partial_tokens, refills)


@checked(_check)
def dynamic(*, refills: NonNegativeInt) -> Queue:
    """The batch source `dynamic`, dynamic sampling: how often groups whose rewards are all equal are exchanged for
    those of new prompts before a batch is trained on. What it cost is in the columns `sampled_*`."""
    return Queue(refills=refills)


class Queue:
    """Batches that wait for their step, for `lag` steps or, with the mode `random`, for 0 to `lag`, drawn per batch.

    With `partial_tokens` every response draws so many tokens per step, from the step in which its batch is begun to the
    one that trains on it, which draws what is left; each part is drawn under the weights of its time, from the prefix
    read anew. Routes of a token are those of the forward that drew it. A batch whose responses are complete is rewarded
    at once and, with `refills`, groups without signal are exchanged then.
    """

    def __init__(self, lag: int = 0, mode: str = "fixed", partial_tokens: int | None = None, refills: int = 0):
        self.lag, self.mode, self.partial_tokens, self.refills = lag, mode, partial_tokens, refills
        self.begun: dict[int, list[Rollout]] = {}
        """Batches of which some response is not complete, by the step that trains on them."""
        self.ready: dict[int, tuple[Rollouts, Row]] = {}
        self.row: Row = {}

    def next(self, collector: Collector, step: int) -> Rollouts:
        """See `BatchSource.next`. Raises RunError where a batch was to be begun in a step that was left out."""
        run = collector.run
        for number in range(step, step + self.lag + 1):
            begins = max(1, number - self.lag_of(run.seed, number))
            if begins > step or number in self.ready:
                continue
            if begins == step:
                prompts = collector.draw_prompts(run.prompts_per_step, number)
                most = self._at_most(run.max_new_tokens, number == step)
                rollouts = collector.sample(prompts, run.group_size, (number,), step=step, most=most)
            elif number in self.begun:
                rollouts = self._continue(collector, number, step, self.begun.pop(number))
            else:
                raise RunError(
                    f"the batch of step {number} is missing in step {step}; it was due to start in step "
                    f"{begins}. Draw a batch at every step in order, and resume with {FILE} of the "
                    "checkpoint."
                )
            if number == step or all(self._complete(run, rollout) for rollout in rollouts):
                rewards, row = collector.rewards(rollouts), Row()
                if self.refills:
                    rollouts, rewards, row = self._exchange(collector, number, step, rollouts, rewards)
                self.ready[number] = collector.batch(rollouts, rewards), row | columns_of(rewards)
            else:
                self.begun[number] = rollouts
        batch, self.row = self.ready.pop(step)
        return batch

    def save(self, folder: Path) -> None:
        """Write the batches that wait, if there are any; prompts are drawn again."""
        if self.begun or self.ready:
            begun = {n: [replace(r, prompt=Prompt("")) for r in rollouts] for n, rollouts in self.begun.items()}
            torch.save({"begun": begun, "ready": self.ready}, folder / FILE)

    def load(self, collector: Collector, folder: Path) -> None:
        """Read what `save` wrote."""
        self.begun, self.ready = {}, {}
        if not (folder / FILE).exists():
            return
        with torch.serialization.safe_globals(
            [Rollouts, Rollout, Turn, Prompt, KeptTokens, RoutingTrace, Layout, MoeLayer]
        ):
            state = torch.load(folder / FILE, weights_only=True)
        self.ready, run = state["ready"], collector.run
        for number, rollouts in state["begun"].items():
            prompts = collector.draw_prompts(run.prompts_per_step, number)
            self.begun[number] = [replace(r, prompt=prompts[i // run.group_size]) for i, r in enumerate(rollouts)]

    def lag_of(self, seed: int, number: int) -> int:
        """How many steps before the one that trains on it a batch is begun; fewer at the start of a run."""
        return self.lag if self.mode == "fixed" else derive(seed, LAG, number) % (self.lag + 1)

    # ------------------------------------------------------------------ how
    def _at_most(self, left: int, due: bool) -> int:
        """Tokens that a response may draw in a step, of those that are left to it; all where its batch is due."""
        return left if due or self.partial_tokens is None else min(self.partial_tokens, left)

    def _complete(self, run: RunConfig, rollout: Rollout) -> bool:
        """Whether nothing is left to be drawn: without parts even of a conversation that was cut off before its last
        token, where a reply left no room."""
        return self.partial_tokens is None or rollout.finished or len(rollout.tokens) == run.max_new_tokens

    def _continue(self, collector: Collector, number: int, step: int, rollouts: list[Rollout]) -> list[Rollout]:
        """The same rollouts; those that are not complete, which have the same length, have drawn on."""
        run = collector.run
        waiting = [i for i, rollout in enumerate(rollouts) if not self._complete(run, rollout)]
        so_far = max(len(rollouts[i].tokens) for i in waiting)
        prefixes = [replace(r.prompt, tokens=r.prompt.tokens + r.tokens) for r in (rollouts[i] for i in waiting)]
        most = self._at_most(run.max_new_tokens - so_far, number == step)
        parts = collector.sample(prefixes, 1, (number, 0, so_far), step=step, most=most)
        more = dict(zip(waiting, parts, strict=True))
        return [
            join_responses(r, more[i], collector.text_of, run.stop) if i in more else r for i, r in enumerate(rollouts)
        ]

    def _exchange(
        self, collector: Collector, number: int, step: int, rollouts: list[Rollout], rewards: list[float]
    ) -> tuple[list[Rollout], list[float], Row]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal, up to `EQUAL`,
        give way to those of new prompts, as many as are missing, `refills` times at most; what is missing then stays as
        it was drawn. Groups with signal come first, in the order in which they were drawn."""
        size, wanted = collector.run.group_size, collector.run.prompts_per_step
        groups = _split_into_groups(rollouts, rewards, size)
        for refill in range(1, self.refills + 1):
            if not (missing := wanted - sum(not _has_zero_variance(group) for group in groups)):
                break
            prompts = collector.draw_prompts(missing, number, refill, 0)
            more = collector.sample(prompts, size, (number, refill, 0), step=step)
            groups += _split_into_groups(more, collector.rewards(more), size)
        pairs = [pair for group in groups for pair in group]
        row = {
            "sampled_groups": len(groups),
            "sampled_zero_variance_groups": sum(map(_has_zero_variance, groups)),
            "sampled_tokens": sum(rollout.own_tokens for rollout, _ in pairs),
            "sampled_reward": sum(reward for _, reward in pairs) / len(pairs),
        }
        chosen = [pair for group in sorted(groups, key=_has_zero_variance)[:wanted] for pair in group]
        return [rollout for rollout, _ in chosen], [reward for _, reward in chosen], row


def _split_into_groups(rollouts: list[Rollout], rewards: list[float], size: int) -> list[list[tuple[Rollout, float]]]:
    pairs = list(zip(rollouts, rewards, strict=True))
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _has_zero_variance(group: list[tuple[Rollout, float]]) -> bool:
    """Whether all rewards are equal."""
    rewards = [reward for _, reward in group]
    return max(rewards) - min(rewards) <= EQUAL


def join_responses(first: Rollout, then: Rollout, text_of: Text, stop: tuple[str, ...] = ()) -> Rollout:
    """One response of two parts; `then` was drawn with all of `first` as its prompt.

    `text_of` reads a completion's ids without its end token. A stop string that lies across the seam, which no engine
    could see, ends the response there: what was drawn after it is left out.
    """
    tokens, end = first.tokens + then.tokens, None
    if any(s in text_of(tokens) for s in stop):
        ends = range(len(first.tokens) + 1, len(tokens) + 1)
        end = next(n for n in ends if any(s in text_of(tokens[:n]) for s in stop))
    tokens = tokens[:end]
    parts = (first.sampled_at, then.sampled_at)
    return replace(
        first,
        tokens=tokens,
        logprobs=torch.cat([first.logprobs, then.logprobs])[:end],
        text=before_stop(text_of(tokens), stop),
        finished=then.finished or end is not None,
        routes=splice_routes(first, then, tokens),
        kept_tokens=first.kept_tokens.joined(then.kept_tokens, end) if first.kept_tokens and then.kept_tokens else None,
        sampled_at=torch.cat([part for part in parts if part is not None])[:end],
    )
