"""A few rollouts of every step as people read them: what was asked, what was answered, what training made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from moe_rl.models.tokens import spell
from moe_rl.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT, RESPONSE = 512, 768
"""Most tokens of a prompt and of a response; of longer ones the middle is left out."""
LETTERS = 64
"""Most letters of one token: some are hundreds of spaces."""
BYTES = 2**17
"""Most bytes of a step's rollouts, before they are compressed; what does not fit is not kept."""
Row = dict[str, Any]


def readable(
    step: int,
    batch: Batch,
    log_ratio: Float[Tensor, "epoch_rows time"],
    clipped_by: Integer[Tensor, "epoch_rows time"],
    flips: Callable[[Int[Tensor, " rows"]], Int[Tensor, "rows time"]],
    tokenizer: PreTrainedTokenizerBase,
    most: int,
) -> list[Row]:
    """Rows of the table `rollouts`: at most `most` responses of a step, in at most BYTES.

    `log_ratio` (nats) and `clipped_by` are of all epochs, whose rows follow each other, and 0 outside the response; the
    last epoch counts. `flips` gives, for some rows, at how many sites each token's routes changed.
    """
    log_ratio, clipped_by = log_ratio[-len(batch) :].cpu(), clipped_by[-len(batch) :].cpu()
    kept, left, rows = chosen(step, batch, log_ratio, most), BYTES, []
    for b, changed in zip(kept.tolist(), flips(kept).cpu(), strict=True):
        own, end = batch.response_mask[b].cpu(), int(batch.attention_mask[b].sum())
        start = int(own.long().argmax())
        ids, ratios = batch.tokens[b].tolist(), log_ratio[b].tolist()
        columns = [ratio if mine else None for ratio, mine in zip(ratios, own.tolist(), strict=True)]
        response: list[Any] = []
        for part in _ends(start, end, RESPONSE):
            response += [[part.start - start - len(response)]] * bool(response)  # how many are left out before it
            texts = (text[:LETTERS] for text in spell(ids[part], tokenizer))
            marks = (values[part] for values in (columns, clipped_by[b].tolist(), changed.tolist()))
            response += [[text, None if ratio is None else round(ratio, 4), clip, flip]
                         for text, ratio, clip, flip in zip(texts, *marks, strict=True)]
        asked = (str(tokenizer.decode(ids[part], clean_up_tokenization_spaces=False))
                 for part in _ends(0, start, PROMPT))
        rows.append({
            "step": step, "rollout": b, "group": int(batch.prompt_index[b]), "reward": float(batch.rewards[b]),
            "advantage": batch.advantages[b].cpu()[own].double().mean().item(), "response_tokens": float(own.sum()),
            "truncated": float(not batch.finished[b]),
            "log_ratio_min": log_ratio[b][own].min().item(), "log_ratio_max": log_ratio[b][own].max().item(),
            "clipped": int((clipped_by[b][own] != 0).sum()), "flips": int(changed[own].sum()),
            "prompt": "\n[…]\n".join(text[: LETTERS * PROMPT] for text in asked),
            "response": json.dumps(response, ensure_ascii=False, separators=(",", ":")),
        })
        left -= len((rows[-1]["prompt"] + rows[-1]["response"]).encode(errors="replace"))
        if left < 0:
            return rows[:-1]
    return rows


def chosen(step: int, batch: Batch, log_ratio: Float[Tensor, "batch time"], most: int) -> Int[Tensor, " rows"]:
    """Which rows are kept: in turns the best and the worst reward, the largest |log r|, the longest, and any. Among
    equal ones it changes from step to step which come first; nothing is drawn."""
    order = (torch.arange(len(batch)) + step) % len(batch)
    lengths = batch.response_mask.sum(1).cpu()
    order = order[lengths[order] > 0]
    scores = (batch.rewards.cpu(), -batch.rewards.cpu(), log_ratio.abs().amax(1), lengths, torch.zeros(len(batch)))
    rankings = [order[score[order].argsort(descending=True, stable=True)].tolist() for score in scores]
    found = dict.fromkeys(row for turn in zip(*rankings, strict=True) for row in turn)
    return torch.tensor([*found][:most], dtype=torch.long)


def _ends(start: int, end: int, most: int) -> list[slice]:
    """The places from `start` to `end`, or where there are too many their first and last half of `most`."""
    if end - start <= most:
        return [slice(start, end)]
    return [slice(start, start + most // 2), slice(end - most // 2, end)]
