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
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.truncation import KeptTokens
from moe_rl.rollouts.collate import collate
from moe_rl.rollouts.request import before_stop, sampling_of
from moe_rl.rollouts.turns import spliced
from moe_rl.routing.layout import Layout, Site
from moe_rl.routing.trace import RoutingTrace
from moe_rl.seeds import LAG, NOISE, PROMPTS, derive
from moe_rl.tasks.base import EQUAL, draw
from moe_rl.tasks.environments import drawn, earned
from moe_rl.types import Batch, Prompt, Rollout, Turn

if TYPE_CHECKING:
    from moe_rl.trainer import Parts

FILE = "batches.pt"
"""Of a checkpoint, where batches wait."""
Row = dict[str, float]
Text = Callable[[Sequence[int]], str]


@runtime_checkable
class BatchSource(Protocol):
    """Between engine and trainer. With several ranks only rank 0's is asked."""

    row: Row
    """What the row of `steps` shall say of how the last batch was drawn."""

    def next(self, run: RunConfig, parts: Parts, step: int) -> Batch:
        """The batch that this step trains on, rewarded; called at every step in turn, before its first update."""

    def save(self, folder: Path) -> None:
        """Write everything that resuming needs."""

    def load(self, run: RunConfig, parts: Parts, folder: Path) -> None:
        """Read what `save` wrote."""


class Queue:
    """Batches that wait for their step, for `lag` steps or, with `lag_mode="random"`, for 0 to `lag`, drawn per batch.

    With `partial_tokens` every response draws so many tokens per step, from the step in which its batch is begun to the
    one that trains on it, which draws what is left; each part is drawn under the weights of its time, from the prefix
    read anew. Routes of a token are those of the forward that drew it. A batch whose responses are complete is rewarded
    at once and, with `refills`, groups without signal are exchanged then.
    """

    def __init__(self) -> None:
        self.begun: dict[int, list[Rollout]] = {}
        """Batches of which some response is not complete, by the step that trains on them."""
        self.ready: dict[int, tuple[Batch, Row]] = {}
        self.row: Row = {}

    def next(self, run: RunConfig, parts: Parts, step: int) -> Batch:
        """See `BatchSource.next`. Raises RunError where a batch was to be begun in a step that was left out."""
        for number in range(step, step + run.lag + 1):
            begins = max(1, number - lag_of(run, number))
            if begins > step or number in self.ready:
                continue
            if begins == step:
                rollouts = _begun(run, parts, number, step)
            elif number in self.begun:
                rollouts = _continued(run, parts, number, step, self.begun.pop(number))
            else:
                raise RunError(f"in step {step} the batch of step {number}, to be begun in step {begins}, is not "
                               f"there: a source is asked at every step in turn, and resumes with {FILE} of its "
                               "checkpoint")
            if number == step or all(_complete(run, rollout) for rollout in rollouts):
                self.ready[number] = _rewarded(run, parts, number, step, rollouts)
            else:
                self.begun[number] = rollouts
        batch, self.row = self.ready.pop(step)
        return batch

    def save(self, folder: Path) -> None:
        """Write what waits, if anything does; prompts are drawn again."""
        if self.begun or self.ready:
            begun = {n: [replace(r, prompt=Prompt("")) for r in rollouts] for n, rollouts in self.begun.items()}
            torch.save({"begun": begun, "ready": self.ready}, folder / FILE)

    def load(self, run: RunConfig, parts: Parts, folder: Path) -> None:
        """Read what `save` wrote."""
        self.begun, self.ready = {}, {}
        if not (folder / FILE).exists():
            return
        with torch.serialization.safe_globals([Batch, Rollout, Turn, Prompt, KeptTokens, RoutingTrace, Layout, Site]):
            found = torch.load(folder / FILE, weights_only=True)
        self.ready = found["ready"]
        for number, rollouts in found["begun"].items():
            prompts = _prompts(run, parts, run.prompts_per_step, number)
            self.begun[number] = [replace(r, prompt=prompts[i // run.group_size]) for i, r in enumerate(rollouts)]


def lag_of(run: RunConfig, number: int) -> int:
    """How many steps before the one that trains on it a batch is begun; fewer at the start of a run."""
    return run.lag if run.lag_mode == "fixed" else derive(run.seed, LAG, number) % (run.lag + 1)


def fresh(run: RunConfig, parts: Parts, number: int) -> Batch:
    """A batch of the current weights, with prompts and noise of a number, rewarded: no queue, nothing exchanged."""
    prompts = _prompts(run, parts, run.prompts_per_step, number)
    key = (run.seed, NOISE, number)
    rollouts = drawn(parts.engine.generate, parts.task, prompts, run.group_size, key=key, sampling=sampling_of(run))
    return _batch(run, parts, rollouts, _rewards(parts, rollouts))


# ---------------------------------------------------------------------- drawing
def _prompts(run: RunConfig, parts: Parts, count: int, *position: int) -> list[Prompt]:
    excluding = {prompt.text for prompt in parts.held_out}
    return parts.encode(draw(parts.task, count, derive(run.seed, PROMPTS, *position), excluding))


def _drawn(run: RunConfig, parts: Parts, prompts: list[Prompt], group_size: int, position: tuple[int, ...],
           most: int, step: int) -> list[Rollout]:
    """Up to `most` tokens of every completion, which say which weights drew them."""
    sampling = replace(sampling_of(run), max_new_tokens=most)
    rollouts = drawn(parts.engine.generate, parts.task, prompts, group_size, key=(run.seed, NOISE, *position),
                     sampling=sampling)
    return [replace(r, sampled_at=torch.full((len(r.tokens),), step - 1),
                    routes=r.routes and replace(r.routes, weight_version=f"step {step - 1}")) for r in rollouts]


def _at_most(run: RunConfig, left: int, due: bool) -> int:
    """Tokens that a response may draw in a step, of those that are left to it; all where its batch is due."""
    return left if due or run.partial_tokens is None else min(run.partial_tokens, left)


def _begun(run: RunConfig, parts: Parts, number: int, step: int) -> list[Rollout]:
    prompts = _prompts(run, parts, run.prompts_per_step, number)
    most = _at_most(run, run.max_new_tokens, number == step)
    return _drawn(run, parts, prompts, run.group_size, (number,), most, step)


def _complete(run: RunConfig, rollout: Rollout) -> bool:
    """Whether nothing is left to be drawn: without parts even of a conversation that was cut off before its last token,
    where a reply left no room."""
    return run.partial_tokens is None or rollout.finished or len(rollout.tokens) == run.max_new_tokens


def _continued(run: RunConfig, parts: Parts, number: int, step: int, rollouts: list[Rollout]) -> list[Rollout]:
    """The same rollouts; those that are not complete, which have the same length, have drawn on."""
    waiting = [i for i, rollout in enumerate(rollouts) if not _complete(run, rollout)]
    so_far = max(len(rollouts[i].tokens) for i in waiting)
    prefixes = [replace(r.prompt, tokens=r.prompt.tokens + r.tokens) for r in (rollouts[i] for i in waiting)]
    most = _at_most(run, run.max_new_tokens - so_far, number == step)
    more = dict(zip(waiting, _drawn(run, parts, prefixes, 1, (number, 0, so_far), most, step), strict=True))
    if parts.decode is None:
        raise ConfigError("partial_tokens joins pieces of a response, whose text must be read as a whole: give the "
                          "trainer's Parts a `decode`")
    return [joined(r, more[i], parts.decode, run.stop) if i in more else r for i, r in enumerate(rollouts)]


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


# ---------------------------------------------------------------------- what was drawn, as a batch
def _rewards(parts: Parts, rollouts: list[Rollout]) -> list[float]:
    return [earned(parts.task, rollout) for rollout in rollouts]


def _rewarded(run: RunConfig, parts: Parts, number: int, step: int, rollouts: list[Rollout]) -> tuple[Batch, Row]:
    """A batch whose responses are complete, after its refills, and what these cost."""
    rewards, row = _rewards(parts, rollouts), Row()
    if run.refills:
        rollouts, rewards, row = _exchanged(run, parts, number, step, rollouts, rewards)
    return _batch(run, parts, rollouts, rewards), row


def _exchanged(
    run: RunConfig, parts: Parts, number: int, step: int, rollouts: list[Rollout], rewards: list[float]
) -> tuple[list[Rollout], list[float], Row]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal, up to `EQUAL`, give
    way to those of new prompts, as many as are missing, `refills` times at most; what is missing then stays as it was
    drawn. Groups with signal come first, in the order in which they were drawn."""
    size, wanted = run.group_size, run.prompts_per_step

    def groups(rollouts: list[Rollout], rewards: list[float]) -> list[list[tuple[Rollout, float]]]:
        pairs = list(zip(rollouts, rewards, strict=True))
        return [pairs[i : i + size] for i in range(0, len(pairs), size)]

    def silent(group: list[tuple[Rollout, float]]) -> bool:
        rewards = [reward for _, reward in group]
        return max(rewards) - min(rewards) <= EQUAL

    found = groups(rollouts, rewards)
    for refill in range(1, run.refills + 1):
        if not (missing := wanted - sum(not silent(group) for group in found)):
            break
        prompts = _prompts(run, parts, missing, number, refill, 0)
        more = _drawn(run, parts, prompts, size, (number, refill, 0), run.max_new_tokens, step)
        found += groups(more, _rewards(parts, more))
    everything = [pair for group in found for pair in group]
    row = {
        "drawn_groups": len(found),
        "drawn_groups_without_signal": sum(map(silent, found)),
        "drawn_tokens": sum(rollout.own_tokens for rollout, _ in everything),
        "drawn_reward": sum(reward for _, reward in everything) / len(everything),
    }
    kept = [pair for group in sorted(found, key=silent)[:wanted] for pair in group]
    return [rollout for rollout, _ in kept], [reward for _, reward in kept], row


def _batch(run: RunConfig, parts: Parts, rollouts: list[Rollout], rewards: list[float]) -> Batch:
    groups = [i // run.group_size for i in range(len(rollouts))]
    return collate(rollouts, groups, rewards, parts.pad_token)
