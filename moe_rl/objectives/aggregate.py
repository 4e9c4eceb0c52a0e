"""How the tokens of a mini-batch weigh in its loss: a function of the response mask, over the whole mini-batch.

Micro-batches and ranks receive slices of the weights and only add, so how a mini-batch is cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

Mask = Bool[Tensor, "batch time"]
Weights = Float[Tensor, "batch time"]


def seq_mean_token_mean(mask: Mask) -> Weights:
    """1 / (N·|y_i|) on response tokens, 0 elsewhere, in float64: the mean over sequences of the mean over tokens.

    GSPO, arXiv 2507.18071, eq. 2 and 6: 1/G Σ_i 1/|y_i| Σ_t, averaged over queries. N counts the sequences that have
    a response token; an empty response counts nowhere.
    """
    lengths = mask.sum(1, keepdim=True)
    sequences = (lengths > 0).sum()
    return mask.double() / (lengths.clamp(min=1) * sequences.clamp(min=1))


AGGREGATIONS: dict[str, Callable[..., Weights]] = {"seq_mean_token_mean": seq_mean_token_mean}
