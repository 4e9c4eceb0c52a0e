"""Truncated sampling: which tokens top-k, top-p and min-p keep, and log-probs renormalised over these.

What is drawn from a kept set has the probability π(y) / Σ π(kept). A ratio compares a distribution with its like where
the trainer takes the same sum over the same set, whatever its weights have become: DeepSeek-V3.2's "keep sampling mask"
(arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor, nn


def kept(
    logits: Float[Tensor, "rows vocabulary"],
    *,
    top_p: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    min_p: float | Tensor = 0.0,
) -> Bool[Tensor, "rows vocabulary"]:
    """True at the tokens that may be drawn. Logits are after the temperature; log-probs will do as well.

    min-p keeps what has at least `min_p` times the highest probability; of these top-k the `top_k` most likely (0:
    all); of these, renormalised, top-p the fewest that together have `top_p`. That is vLLM's order. Of equal tokens
    those of smaller ids come first. Settings may be tensors [rows, 1]. Logits that are NaN keep nothing.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    settings = (torch.as_tensor(x, dtype=torch.float64, device=logits.device) for x in (top_p, top_k, min_p))
    share, most, floor = settings
    rank = torch.arange(logits.shape[-1], device=logits.device)
    relative = (ordered - ordered[:, :1]).double()  # log of p over the highest p
    keep = (relative >= floor.log()) & (relative > -torch.inf) & ((rank < most) | (most <= 0))
    mass = relative.exp().where(keep, 0.0)
    before = mass.cumsum(-1) - mass
    keep &= (before < share * mass.sum(-1, keepdim=True)) | (share >= 1)  # rounding takes nothing from all of them
    return torch.zeros_like(keep).scatter(-1, order, keep)


@dataclass(frozen=True)
class KeptTokens:
    """The ids that sampling kept at every response token: 4 bytes for each, where a bit for every token of a vocabulary
    of 152,000 would be 19 kB a token, and this is less for any set of up to 4,700."""

    ids: Int32[Tensor, " kept"]
    """Token by token, in the order of `counts`."""
    counts: Int32[Tensor, "*token"]
    """How many ids are a token's; 0 where nothing is known to be left out: at prompts, padding, what an environment
    said."""

    @staticmethod
    def stack(parts: Sequence[KeptTokens], where: Bool[Tensor, "batch time"]) -> KeptTokens:
        """Of several rollouts, whose tokens after the prompt are the True places of a batch, row by row."""
        counts = torch.zeros(where.shape, dtype=torch.int32)
        counts[where] = torch.cat([part.counts for part in parts])
        return KeptTokens(torch.cat([part.ids for part in parts]), counts)

    def joined(self, then: KeptTokens, end: int | None) -> KeptTokens:
        """Of one response of two parts, up to `end`."""
        counts = torch.cat([self.counts, then.counts])[:end]
        return KeptTokens(torch.cat([self.ids, then.ids])[: int(counts.sum())], counts)

    def each(self, sizes: Sequence[int]) -> list[KeptTokens]:
        """The first so many tokens of every row."""
        return [KeptTokens(ids, row[:size]) for ids, row, size in
                zip(self.ids.split(self.counts.sum(1).tolist()), self.counts, sizes, strict=True)]  # fmt: skip

    def rows(self, index: Tensor | slice, time: int) -> KeptTokens:
        """The given rows, to go with `Batch.rows`: columns that it leaves out, or that are not here, keep no ids."""
        of_rows = self.ids.split(self.counts.sum(1).tolist())
        chosen = torch.arange(len(self.counts))[index].tolist()
        counts = self.counts[index][:, :time]
        ids = torch.cat([self.ids[:0], *(of_rows[row] for row in chosen)])
        return KeptTokens(ids, nn.functional.pad(counts, (0, time - counts.shape[1])))

    def since(self, first: int) -> KeptTokens:
        """The columns from `first` on, before which there are no ids."""
        return KeptTokens(self.ids, self.counts[:, first:])

    def pieces(self, where: Bool[Tensor, "*token"], size: int) -> Iterator[KeptTokens]:
        """The tokens in `where`, which has all that have ids, `size` at a time."""
        counts = self.counts[where].split(size)
        ids = self.ids.split([int(part.sum()) for part in counts])
        return map(KeptTokens, ids, counts)

    def only(self, logits: Float[Tensor, "*token vocabulary"]) -> Float[Tensor, "*token vocabulary"]:
        """The logits, -inf at what was not kept: their log-softmax is renormalised over the kept set."""
        counts = self.counts.flatten()
        keep = (counts == 0)[:, None].repeat(1, logits.shape[-1])
        token = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        keep[token, self.ids.long()] = True
        return logits.masked_fill(~keep.view(logits.shape), -torch.inf)

    def to(self, device: torch.device | str) -> KeptTokens:
        """The same on another device."""
        return KeptTokens(self.ids.to(device), self.counts.to(device))


def entropy_of(log_p: Float[Tensor, "*token vocabulary"], truncated: bool) -> Float[Tensor, "*token"]:
    """−Σ p log p in nats; where it is truncated, over what was kept, since 0 · -inf would be NaN."""
    known = log_p.masked_fill(log_p == -torch.inf, 0.0) if truncated else log_p
    return -(log_p.exp() * known).sum(-1)
