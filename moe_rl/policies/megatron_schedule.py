"""How a batch goes through one of Megatron-core's schedules: cut over ranks and micro-batches, then put together again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as add_up
from torch import Tensor, nn

from moe_rl.policies.megatron_weights import gather
from moe_rl.types import Batch


@dataclass(frozen=True)
class Cut:
    """A batch as data-parallel ranks × micro-batches × rows of equal number. What is left over is filled up with copies
    of the last row, without a response, whose results are thrown away: schedules and dispatchers want equal shapes."""

    batch: Batch
    """All rows in order, the filling at the end."""
    order: Int[Tensor, " rows"]
    """Which row of the original batch each one is."""
    filling: Bool[Tensor, " rows"]
    size: int
    """Rows of a micro-batch."""
    mine: list[slice]
    """The rows of this rank's micro-batches."""
    inputs: Int[Tensor, "rows time"]
    """All tokens but the last, padded so that sequence parallelism can cut them evenly."""

    @staticmethod
    def of(batch: Batch, largest: int) -> Cut:
        """The fewest equal micro-batches of at most `largest` rows."""
        rank, ranks = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        share = -(-len(batch) // ranks)
        count = -(-share // largest)
        size = -(-share // count)
        order = torch.arange(ranks * count * size)
        filling = order >= len(batch)
        order = order.clamp(max=len(batch) - 1)
        rows = batch.rows(order)
        rows = replace(rows, response_mask=rows.response_mask & ~filling[:, None])
        inputs = rows.tokens[:, :-1]
        inputs = nn.functional.pad(inputs, (0, -inputs.shape[1] % ps.get_tensor_model_parallel_world_size()))
        starts = ((rank * count + i) * size for i in range(count))
        return Cut(rows, order, filling, size, [slice(start, start + size) for start in starts], inputs)


def token_statistics(
    logits: Float[Tensor, "rows time part"],
    tokens: Int[Tensor, "rows width"],
    mask: Bool[Tensor, "rows width"],
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, "rows width"]]:
    """log p(tokens[t] | tokens[<t]) and the entropy of that distribution where `mask` is True, 0 elsewhere.

    The vocabulary is cut over the tensor-parallel ranks: with x the logits, m their maximum and Z = Σ exp(x - m) over
    all ranks, log p = x[token] - m - log Z and the entropy is log Z - Σ exp(x - m) (x - m) / Z.
    """
    x = logits[:, : tokens.shape[1] - 1].float() / temperature
    highest = x.detach().amax(-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=ps.get_tensor_model_parallel_group())
    x = x - highest
    mass = x.exp()
    z = add_up(mass.sum(-1))
    here = tokens[:, 1:] - ps.get_tensor_model_parallel_rank() * x.shape[-1]
    inside = (here >= 0) & (here < x.shape[-1])
    chosen = add_up(x.gather(-1, (here * inside)[..., None])[..., 0] * inside)
    with nullcontext() if entropy_gradient else torch.no_grad():
        entropy = z.log() - add_up((mass * x).sum(-1)) / z
    return tuple(nn.functional.pad(v.where(mask[:, 1:], 0.0), (1, 0)) for v in (chosen - z.log(), entropy))


def from_last_stage(tensor: Tensor) -> Tensor:
    """The last pipeline stage's tensor, on every stage."""
    if ps.get_pipeline_model_parallel_world_size() > 1:
        group = ps.get_pipeline_model_parallel_group()
        dist.broadcast(tensor, ps.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def per_token(parts: list[Float[Tensor, "kind rows time"]], cut: Cut, batch: Batch) -> Float[Tensor, "kind batch time"]:
    """What the last stage knows about the tokens of every micro-batch, for the whole batch, on every rank."""
    mine = from_last_stage(torch.stack(parts, 1).contiguous())  # [kind, micro-batch, rows, time]
    whole = gather(mine, 1, ps.get_data_parallel_group()).flatten(1, 2)[:, : len(batch)]
    return nn.functional.pad(whole, (0, batch.tokens.shape[1] - whole.shape[-1])).to(batch.tokens.device)
