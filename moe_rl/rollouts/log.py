"""Rollouts that a run keeps: a few of every step for people to read, and those whose log-probs stand out, for
`moe-rl diagnose`. Nothing here is read by the run."""

from __future__ import annotations

import base64
import io
import json
import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from moe_rl.models.tokens import spell
from moe_rl.types import Batch, Rollouts, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL, TIMES = 3, 5.0
"""Steps after which a usual gap is known, and how many times it a gap has to be."""
UNHEARD_OF, NOTHING = 0.01, 1e-6
"""A KL, in nats per token, that is kept at the first step too; and one that never is."""
FILES, ROWS, FILE_BYTES = 3, 64, 2**24
"""Most files of a run; responses and bytes of a file, which has one response at least."""
PROMPT, RESPONSE = 512, 768
"""Most tokens of a prompt and of a response; of longer ones the middle is left out."""
LETTERS = 64
"""Most letters of one token: some are hundreds of spaces."""
STEP_BYTES = 2**17
"""Most bytes of a step's rollouts, before they are compressed; what does not fit is not kept."""
Row = dict[str, Any]


# ---------------------------------------------------------------------- those that stand out
class GapFiles:
    """Looks at the engine's gap of every step, and keeps the rollouts of a few of those that stand out.

    A gap is `engine_kl_k3`; usual is the median of up to 20 steps before, in this process, those that have one: NaN
    is a gap that stands out. What is written is never read by the run, and a file that cannot be written is a warning.
    """

    def __init__(self, folder: Path, sampling: Sampling):
        self.folder, self.sampling = folder, sampling
        self.before: deque[float] = deque(maxlen=20)

    def __call__(self, step: int, batch: Rollouts, row: Mapping[str, Any]) -> None:
        """The batch of a step and its row of `steps`."""
        gap = row.get("engine_kl_k3")
        if gap is None or not bool(batch.response_mask.any()):
            return
        usual = statistics.median(self.before) if len(self.before) >= USUAL else UNHEARD_OF / TIMES
        if math.isfinite(gap):
            self.before.append(gap)
        file = self.folder / f"step={step:06d}.jsonl"
        if gap <= max(TIMES * usual, NOTHING) or len(set(self.folder.glob("*.jsonl")) - {file}) >= FILES:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            with file.open("w", encoding="utf-8") as out:
                for line in to_lines(batch, self.sampling, f"step {step - 1}"):
                    if (there := out.tell()) and there + len(line) > FILE_BYTES:
                        break
                    out.write(line)
        except OSError as error:
            warnings.warn(
                f"step {step}: the engine's log-probs differ by {gap:.2g} nats per token, and the rollouts "
                f"cannot be saved: {error}",
                stacklevel=2,
            )
            return
        warnings.warn(
            f"step {step}: the KL between engine and trainer is {gap:.2g} nats per token, usually at most "
            f"{usual:.2g}. To find the cause, run `moe-rl diagnose {file} CHECKPOINT` with the weights after "
            f"step {step - 1}.",
            stacklevel=2,
        )


def to_lines(batch: Rollouts, sampling: Sampling, version: str) -> Iterator[str]:
    """The first responses of a batch, a line of JSON each, as docs/diagnose.md has them; null is a log-prob of what an
    environment wrote."""
    for b in range(min(len(batch), ROWS)):
        own = batch.response_mask[b]
        if not bool(own.any()):
            continue
        end, start = int(batch.attention_mask[b].sum()), int(own.long().argmax())
        values = zip(batch.rollout_logprobs[b, start:end].tolist(), own[start:end].tolist(), strict=True)
        entry: dict[str, Any] = {
            "tokens": batch.tokens[b, :end].tolist(),
            "prompt_length": start,
            "logprobs": [value if is_own else None for value, is_own in values],
            "temperature": sampling.temperature,
            "weight_version": version,
        }
        if sampling.truncates:
            entry |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        if batch.rollout_routes is not None:
            file = io.BytesIO()
            np.save(file, batch.rollout_routes.experts[b, : end - 1].cpu().numpy())
            entry["routes"] = base64.b64encode(file.getvalue()).decode()
        yield json.dumps(entry) + "\n"


# ---------------------------------------------------------------------- a few of every step
def rollout_rows(
    step: int,
    batch: Batch,
    log_ratio: Float[Tensor, "epoch_rows time"],
    clipped_by: Integer[Tensor, "epoch_rows time"],
    flips: Callable[[Int[Tensor, " rows"]], Int[Tensor, "rows time"]],
    tokenizer: PreTrainedTokenizerBase,
    most: int,
) -> list[Row]:
    """Rows of the table `rollouts`: at most `most` responses of a step, in at most STEP_BYTES.

    `log_ratio` (nats) and `clipped_by` are of all epochs, whose rows follow each other, and 0 outside the response; the
    last epoch counts. `flips` gives, for some rows, at how many MoE layers each token's routes changed.
    """
    log_ratio, clipped_by = log_ratio[-len(batch) :].cpu(), clipped_by[-len(batch) :].cpu()
    chosen, left, rows = choose_rollouts(step, batch, log_ratio, most), STEP_BYTES, []
    for b, changed in zip(chosen.tolist(), flips(chosen).cpu(), strict=True):
        own, end = batch.response_mask[b].cpu(), int(batch.attention_mask[b].sum())
        start = int(own.long().argmax())
        ids, ratios = batch.tokens[b].tolist(), log_ratio[b].tolist()
        columns = [ratio if mine else None for ratio, mine in zip(ratios, own.tolist(), strict=True)]
        response: list[Any] = []
        for part in _ends(start, end, RESPONSE):
            response += [[part.start - start - len(response)]] * bool(response)  # how many are left out before it
            texts = (text[:LETTERS] for text in spell(ids[part], tokenizer))
            marks = (values[part] for values in (columns, clipped_by[b].tolist(), changed.tolist()))
            response += [
                [text, None if ratio is None else round(ratio, 4), clip, flip]
                for text, ratio, clip, flip in zip(texts, *marks, strict=True)
            ]
        asked = (
            str(tokenizer.decode(ids[part], clean_up_tokenization_spaces=False)) for part in _ends(0, start, PROMPT)
        )
        rows.append(
            {
                "step": step,
                "rollout": b,
                "group": int(batch.prompt_index[b]),
                "reward": float(batch.rewards[b]),
                "advantage": batch.advantages[b].cpu()[own].double().mean().item(),
                "response_tokens": float(own.sum()),
                "truncated": float(not batch.finished[b]),
                "log_ratio_min": log_ratio[b][own].min().item(),
                "log_ratio_max": log_ratio[b][own].max().item(),
                "clipped": int((clipped_by[b][own] != 0).sum()),
                "flips": int(changed[own].sum()),
                "prompt": "\n[…]\n".join(text[: LETTERS * PROMPT] for text in asked),
                "response": json.dumps(response, ensure_ascii=False, separators=(",", ":")),
            }
        )
        left -= len((rows[-1]["prompt"] + rows[-1]["response"]).encode(errors="replace"))
        if left < 0:
            return rows[:-1]
    return rows


def choose_rollouts(
    step: int, batch: Rollouts, log_ratio: Float[Tensor, "batch time"], most: int
) -> Int[Tensor, " rows"]:
    """Which rows are kept: in turns the best and the worst reward, the largest |log r|, the longest, and any. Among
    equal ones it changes from step to step which come first; nothing is drawn."""
    order = (torch.arange(len(batch)) + step) % len(batch)
    lengths = batch.response_mask.sum(1).cpu()
    order = order[lengths[order] > 0]
    scores = (batch.rewards.cpu(), -batch.rewards.cpu(), log_ratio.abs().amax(1), lengths, torch.zeros(len(batch)))
    rankings = [order[score[order].argsort(descending=True, stable=True)].tolist() for score in scores]
    rows = dict.fromkeys(row for turn in zip(*rankings, strict=True) for row in turn)
    return torch.tensor([*rows][:most], dtype=torch.long)


def _ends(start: int, end: int, most: int) -> list[slice]:
    """The places from `start` to `end`, or where there are too many their first and last half of `most`."""
    if end - start <= most:
        return [slice(start, end)]
    return [slice(start, start + most // 2), slice(end - most // 2, end)]
