"""Conversations: what an environment says between the policy's turns, drawn in one pass or turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.errors import RunError
from moe_rl.models.tokens import reply_tokens
from moe_rl.rollouts.engine import before_stop, completion_text
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Prompt, Reply, Rollout, Sampling, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Draw = Callable[[list[Prompt], list[tuple[int, ...]], list[int]], list[Rollout]]
"""draw(prompts, keys of their noise, most tokens of each) → one completion of every prompt."""


# ---------------------------------------------------------------------- in one pass
class Conversations:
    """The conversations of rows that are decoded side by side: a reply is read a token per step, in place of tokens
    that would be drawn, while other rows are drawn. Rows count from 0; `numbers` are those that `reply` knows."""

    def __init__(
        self, reply: Reply, numbers: list[int], tokenizer: PreTrainedTokenizerBase, ends: set[int], sampling: Sampling
    ):
        self.reply, self.numbers, self.tokenizer, self.ends, self.sampling = reply, numbers, tokenizer, ends, sampling
        self.replied = torch.full((len(numbers), sampling.max_new_tokens), -1)
        """What replies put where; -1 where the policy draws."""
        self.begun = torch.zeros(len(numbers), dtype=torch.long)
        """Where in the response the policy's turn begins, which may still be to come."""
        self.over: list[list[Turn]] = [[] for _ in numbers]

    def is_drawn(self, rows: Int[Tensor, " rows"], t: int) -> Bool[Tensor, " rows"]:
        """Whose token at position t of the response is the policy's."""
        return (self.replied[rows.cpu(), t] < 0).to(rows.device)

    def put_replies(
        self, rows: Int[Tensor, " rows"], t: int, token: Int[Tensor, " rows"], logprob: Float[Tensor, " rows"]
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Tokens at position t of the response and their log-probs: the environment's, where it speaks."""
        replied = self.replied[rows.cpu(), t].to(token.device)
        return torch.where(replied < 0, token, replied), torch.where(replied < 0, logprob, 0)

    def end_turns(
        self, rows: Int[Tensor, " rows"], t: int, ended: Bool[Tensor, " rows"], tokens: Int[Tensor, "rows so_far"]
    ) -> tuple[Bool[Tensor, " rows"], Bool[Tensor, " rows"]]:
        """After position t: which of the `rows` are over, and which of them ended by themselves. `ended` says whose
        last token could end a turn."""
        over, finished, at = torch.zeros_like(ended), torch.zeros_like(ended), rows.tolist()
        for n in ended.nonzero()[:, 0].tolist():
            b = at[n]
            if self.replied[b, t] >= 0:  # the environment's own
                continue
            start = int(self.begun[b])
            turn = self._turn(start, tokens[n, start:].tolist())
            reply = self.reply(self.numbers[b], turn.text)
            if reply is not None:
                ids = reply_tokens(reply, self.tokenizer, int(tokens[n, t]) in self.ends)
                if t + 1 + len(ids) < self.sampling.max_new_tokens:
                    self.over[b].append(replace(turn, reply=reply))
                    self.begun[b] = t + 1 + len(ids)
                    self.replied[b, t + 1 : t + 1 + len(ids)] = torch.tensor(ids, dtype=torch.long)
                    continue
            self.over[b].append(turn)
            over[n], finished[n] = True, reply is None
        return over, finished

    def turns(self, row: int, tokens: list[int]) -> tuple[Turn, ...]:
        """Those of a row, the one that was cut off included."""
        over, start = self.over[row], int(self.begun[row])
        cut = not over or over[-1].end <= start  # of the last turn that was answered with None, it is its start
        return (*over, self._turn(start, tokens[start:])) if cut else tuple(over)

    def _turn(self, start: int, own: list[int]) -> Turn:
        text = completion_text(own, self.ends, self.tokenizer)
        return Turn(start, start + len(own), before_stop(text, self.sampling.stop))


# ---------------------------------------------------------------------- turn by turn
def generate_by_turns(
    draw: Draw,
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    prompts: list[Prompt],
    group_size: int,
    *,
    key: tuple[int, ...],
    sampling: Sampling,
    reply: Reply | None,
) -> list[Rollout]:
    """`group_size` completions of every prompt or, with `reply`, conversations, of an engine that takes ids: every turn
    goes on from the ids of all before it, which the engine may have cached. Rows are drawn turn by turn, all that go on
    together. Raises RunError for an engine that draws more tokens than it was asked for.

    Noise of a later turn comes from key + (position of the prompt, number of the sample, turn, 0, 0), a length that no
    first turn has: not even that of a refill, whose key is two numbers longer.
    """
    rows = [(i, n) for i in range(len(prompts)) for n in range(group_size)]
    drawn = draw([prompts[i] for i, _ in rows], [(*key, i, n) for i, n in rows], [sampling.max_new_tokens] * len(rows))
    if reply is None:
        return drawn
    drawn = [replace(r, turns=(Turn(0, len(r.tokens), r.text),)) for r in drawn]
    going, number = list(range(len(rows))), 0
    while going:
        number += 1
        ids: dict[int, tuple[int, ...]] = {}
        for b in going:
            last = drawn[b].turns[-1]
            answer = reply(b, last.text) if drawn[b].finished else None
            if answer is None:
                continue
            ids[b] = reply_tokens(answer, tokenizer, drawn[b].tokens[-1] in ends)
            if len(drawn[b].tokens) + len(ids[b]) >= sampling.max_new_tokens:
                del ids[b]
                drawn[b] = replace(drawn[b], finished=False)
            else:
                drawn[b] = replace(drawn[b], turns=(*drawn[b].turns[:-1], replace(last, reply=answer)))
        going = list(ids)
        if not going:
            break
        so_far = [replace(drawn[b].prompt, tokens=drawn[b].prompt.tokens + drawn[b].tokens + ids[b]) for b in going]
        room = [sampling.max_new_tokens - len(drawn[b].tokens) - len(ids[b]) for b in going]
        more = draw(so_far, [(*key, *rows[b], number, 0, 0) for b in going], room)
        for b, most, new in zip(going, room, more, strict=True):
            if len(new.tokens) > most:
                raise RunError(f"the engine sampled {len(new.tokens)} tokens in a turn with room for {most}.")
            drawn[b] = append_turn(drawn[b], ids[b], new)
    return drawn


def append_turn(before: Rollout, said: tuple[int, ...], new: Rollout) -> Rollout:
    """A conversation with another turn, drawn after all ids before it and those that the environment `said`."""
    start, tokens = len(before.tokens) + len(said), before.tokens + said + new.tokens
    return replace(
        before,
        tokens=tokens,
        logprobs=torch.cat([before.logprobs, torch.zeros(len(said)), new.logprobs]),
        text=before.text + before.turns[-1].reply + new.text,
        finished=new.finished,
        routes=splice_routes(before, new, tokens),
        turns=(*before.turns, Turn(start, start + len(new.tokens), new.text)),
    )


def splice_routes(before: Rollout, new: Rollout, tokens: tuple[int, ...]) -> RoutingTrace | None:
    """The routes of one response of two parts, of which the first's stay where a later prefill read its tokens again;
    None where a part has none. Raises RoutingError for an engine that read others than these `tokens` of it."""
    if before.routes is None or new.routes is None:
        return None
    read = torch.tensor([(before.prompt.tokens + tokens)[:-1]])
    return RoutingTrace.splice([part.rows(slice(None), read.shape[1]) for part in (before.routes, new.routes)], read)
