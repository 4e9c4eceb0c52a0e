"""What the trainer takes its batches from: drawn in the step that trains on them, or before, and queued.

A batch has the number of the step that trains on it, with prompts and noise of its own. It is begun `lag` steps
earlier, under the weights of that time, and waits: no older weights are kept, and an engine that shares the policy's
module serves as well as any other. Step s samples with the weights after step s - 1, so without lag a batch is as old
as the weights that train on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.registry import checked
from moe_rl.rollouts.request import before_stop
from moe_rl.rollouts.sampling import Sampling
from moe_rl.rollouts.turns import spliced
from moe_rl.routing.layout import Layout, Site
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import LAG, derive
from moe_rl.tasks.base import EQUAL, Environment, load_task
from moe_rl.types import Batch, KeptTokens, Prompt, Rollout, Turn

FILE = "batches.pt"
"""Of a checkpoint, where batches wait."""
Row = dict[str, float]
Text = Callable[[Sequence[int]], str]


@runtime_checkable
class BatchSource(Protocol):
    """Between engine and trainer. With several ranks only rank 0's is asked. A component is a function
    `source(*, option=…)` that makes one."""

    row: Row
    """What the row of `steps` shall say of how the last batch was drawn."""

    def next(self, sampling: Sampling, step: int) -> Batch:
        """The batch that this step trains on, rewarded; called at every step in turn, before its first update."""

    def save(self, folder: Path) -> None:
        """Write everything that resuming needs."""

    def load(self, sampling: Sampling, folder: Path) -> None:
        """Read what `save` wrote."""


def _check(run: RunConfig, *, lag: int = 0, mode: str = "fixed", partial_tokens: int | None = None, refills: int = 0
           ) -> None:  # fmt: skip
    for name, value in (("lag", lag), ("refills", refills)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"batches.{name}={value!r} must be a whole number, at least 0.")
    if mode not in ("fixed", "random"):
        raise ConfigError(f"batches.mode={mode!r}: choose fixed or random.")
    if partial_tokens is None:
        return
    if not (lag and 1 <= partial_tokens < run.max_new_tokens):
        raise ConfigError(f"batches.partial_tokens={partial_tokens} has no effect with batches.lag={lag} and "
                          f"max_new_tokens={run.max_new_tokens}: a response that waits for no step, or needs no "
                          "second one, is drawn at once; set a lag, and 1 or more, but fewer tokens per step, or leave "
                          "it out.")
    if isinstance(load_task(run.task), Environment):
        raise ConfigError(f"batches.partial_tokens={partial_tokens}: the task answers back, and its turns are drawn as "
                          "a whole; leave it out. A lag of whole conversations works.")


def fresh() -> Queue:
    """The batch source `fresh`: every batch is drawn in the step that trains on it."""
    return Queue()


@checked(_check)
def lagged(*, lag: int, mode: str = "fixed", partial_tokens: int | None = None, refills: int = 0) -> Queue:
    """The batch source `lagged`. `lag`: steps between the weights that sample a batch and those that begin to train on
    it; in the first steps, the weights that the run begins with sample. `mode`: `fixed`, or `random`: a batch's lag is
    drawn from 0 … `lag`, alike in all arms of a seed. `partial_tokens`: tokens that a response draws per step, so that
    its parts are of several weights (default: each is drawn at once). `refills`: as in `dynamic`."""
    return Queue(lag, mode, partial_tokens, refills)


@checked(_check)
def dynamic(*, refills: int) -> Queue:
    """The batch source `dynamic`, dynamic sampling: how often groups whose rewards are all equal are exchanged for
    those of new prompts before a batch is trained on. What it cost is in the columns `drawn_*`."""
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
        self.ready: dict[int, tuple[Batch, Row]] = {}
        self.row: Row = {}

    def next(self, sampling: Sampling, step: int) -> Batch:
        """See `BatchSource.next`. Raises RunError where a batch was to be begun in a step that was left out."""
        run = sampling.run
        for number in range(step, step + self.lag + 1):
            begins = max(1, number - self.lag_of(run.seed, number))
            if begins > step or number in self.ready:
                continue
            if begins == step:
                prompts = sampling.draw_prompts(run.prompts_per_step, number)
                most = self._at_most(run.max_new_tokens, number == step)
                rollouts = sampling.sample(prompts, run.group_size, (number,), step=step, most=most)
            elif number in self.begun:
                rollouts = self._continue(sampling, number, step, self.begun.pop(number))
            else:
                raise RunError(f"in step {step} the batch of step {number}, to be begun in step {begins}, is not "
                               f"there: a source is asked at every step in turn, and resumes with {FILE} of its "
                               "checkpoint")
            if number == step or all(self._complete(run, rollout) for rollout in rollouts):
                rewards, row = sampling.rewards(rollouts), Row()
                if self.refills:
                    rollouts, rewards, row = self._exchange(sampling, number, step, rollouts, rewards)
                self.ready[number] = sampling.batch(rollouts, rewards), row
            else:
                self.begun[number] = rollouts
        batch, self.row = self.ready.pop(step)
        return batch

    def save(self, folder: Path) -> None:
        """Write what waits, if anything does; prompts are drawn again."""
        if self.begun or self.ready:
            begun = {n: [replace(r, prompt=Prompt("")) for r in rollouts] for n, rollouts in self.begun.items()}
            torch.save({"begun": begun, "ready": self.ready}, folder / FILE)

    def load(self, sampling: Sampling, folder: Path) -> None:
        """Read what `save` wrote."""
        self.begun, self.ready = {}, {}
        if not (folder / FILE).exists():
            return
        with torch.serialization.safe_globals([Batch, Rollout, Turn, Prompt, KeptTokens, RoutingTrace, Layout, Site]):
            found = torch.load(folder / FILE, weights_only=True)
        self.ready, run = found["ready"], sampling.run
        for number, rollouts in found["begun"].items():
            prompts = sampling.draw_prompts(run.prompts_per_step, number)
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

    def _continue(self, sampling: Sampling, number: int, step: int, rollouts: list[Rollout]) -> list[Rollout]:
        """The same rollouts; those that are not complete, which have the same length, have drawn on."""
        run = sampling.run
        waiting = [i for i, rollout in enumerate(rollouts) if not self._complete(run, rollout)]
        so_far = max(len(rollouts[i].tokens) for i in waiting)
        prefixes = [replace(r.prompt, tokens=r.prompt.tokens + r.tokens) for r in (rollouts[i] for i in waiting)]
        most = self._at_most(run.max_new_tokens - so_far, number == step)
        found = sampling.sample(prefixes, 1, (number, 0, so_far), step=step, most=most)
        more = dict(zip(waiting, found, strict=True))
        if sampling.decode is None:
            raise ConfigError("partial_tokens joins pieces of a response, whose text must be read as a whole: give the "
                              "trainer's Sampling a `decode`")
        return [joined(r, more[i], sampling.decode, run.stop) if i in more else r for i, r in enumerate(rollouts)]

    def _exchange(
        self, sampling: Sampling, number: int, step: int, rollouts: list[Rollout], rewards: list[float]
    ) -> tuple[list[Rollout], list[float], Row]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal, up to `EQUAL`,
        give way to those of new prompts, as many as are missing, `refills` times at most; what is missing then stays as
        it was drawn. Groups with signal come first, in the order in which they were drawn."""
        size, wanted = sampling.run.group_size, sampling.run.prompts_per_step
        found = _groups(rollouts, rewards, size)
        for refill in range(1, self.refills + 1):
            if not (missing := wanted - sum(not _silent(group) for group in found)):
                break
            prompts = sampling.draw_prompts(missing, number, refill, 0)
            more = sampling.sample(prompts, size, (number, refill, 0), step=step)
            found += _groups(more, sampling.rewards(more), size)
        everything = [pair for group in found for pair in group]
        row = {
            "sampled_groups": len(found),
            "sampled_zero_variance_groups": sum(map(_silent, found)),
            "sampled_tokens": sum(rollout.own_tokens for rollout, _ in everything),
            "sampled_reward": sum(reward for _, reward in everything) / len(everything),
        }
        kept = [pair for group in sorted(found, key=_silent)[:wanted] for pair in group]
        return [rollout for rollout, _ in kept], [reward for _, reward in kept], row


def _groups(rollouts: list[Rollout], rewards: list[float], size: int) -> list[list[tuple[Rollout, float]]]:
    pairs = list(zip(rollouts, rewards, strict=True))
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _silent(group: list[tuple[Rollout, float]]) -> bool:
    """Whether all rewards are equal."""
    rewards = [reward for _, reward in group]
    return max(rewards) - min(rewards) <= EQUAL


def joined(first: Rollout, then: Rollout, text_of: Text, stop: tuple[str, ...] = ()) -> Rollout:
    """One response of two parts; `then` was drawn with all of `first` as its prompt.

    `text_of` reads a completion's ids without its end token. A stop string that lies across the seam, which no engine
    could see, ends the response there: what was drawn after it is left out.
    """
    tokens, seam = first.tokens + then.tokens, len(first.tokens)
    ends = range(seam + 1, len(tokens) + 1) if stop else ()

    def stopped(end: int) -> bool:
        return any(s in text_of(tokens[:end]) for s in stop)

    end = ends[bisect_left(ends, True, key=stopped)] if ends and stopped(ends[-1]) else None
    tokens = tokens[:end]
    parts = (first.sampled_at, then.sampled_at)
    return replace(
        first,
        tokens=tokens,
        logprobs=torch.cat([first.logprobs, then.logprobs])[:end],
        text=before_stop(text_of(tokens), stop),
        finished=then.finished or end is not None,
        routes=spliced(first, then, tokens),
        kept=first.kept.joined(then.kept, end) if first.kept and then.kept else None,
        sampled_at=torch.cat([part for part in parts if part is not None])[:end],
    )
