"""How a batch goes through one of Megatron-core's schedules: cut over ranks and micro-batches, then put together again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as add_up
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.integrations.megatron.replay import Routers, gathered, own_targets, require_routes, scores_of, shared_trace
from moe_rl.integrations.megatron.weights import gather
from moe_rl.objectives import LossOutput
from moe_rl.policies.micro_batches import filled
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.trace import Layout, RoutingTrace
from moe_rl.types import Batch


@runtime_checkable
class Model(Protocol):
    """What a pass uses of a `MegatronPolicy`."""

    module: nn.Module
    routers: Routers
    layout: Layout
    device: torch.device
    temperature: float
    recompute: bool


@dataclass(frozen=True)
class Cut:
    """A batch as data-parallel ranks × micro-batches × rows of equal number. What is left over is filled up with copies
    of the last row, without a response, whose results are thrown away: schedules and dispatchers want equal shapes."""

    batch: Batch
    """All rows in order, the filling at the end, without routes: of these a rank takes its own part."""
    order: Int[Tensor, " rows"]
    """Which row of the original batch each one is."""
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
        rows = filled(replace(batch, routes=None, rollout_routes=None, ratio_routes=None), order)
        order = order.clamp(max=len(batch) - 1)
        inputs = rows.tokens[:, :-1]
        inputs = nn.functional.pad(inputs, (0, -inputs.shape[1] % ps.get_tensor_model_parallel_world_size()))
        starts = ((rank * count + i) * size for i in range(count))
        return Cut(rows, order, size, [slice(start, start + size) for start in starts], inputs)


Loss = Callable[[Tensor, Tensor, slice], LossOutput]
"""loss(logprobs, entropy, rows): the objective of one micro-batch, those rows of the cut batch."""


@dataclass(frozen=True)
class PassResult:
    """What one pass over a batch found out, on every rank; fields as in `Scored` and `Updated`."""

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    clipped_by: Float[Tensor, "batch time"]
    loss: float
    metrics: Mapping[str, float]
    routes: RoutingTrace
    preferred: RoutingTrace | None
    scores: RouterScores | None


class SchedulePass:
    """One schedule over a batch: forward, and with a loss backward and the sum of gradients over all ranks."""

    def __init__(
        self,
        policy: Model,
        batch: Batch,
        routes: RoutingTrace | None,
        cut: Cut,
        loss: Loss | None = None,
        *,
        entropy_gradient: bool = False,
        scores: bool = False,
    ):
        self.policy, self.batch, self.cut, self.loss = policy, batch, cut, loss
        self.entropy_gradient, self.scores, self.replayed = entropy_gradient, scores, routes is not None
        time = cut.inputs.shape[1]
        if routes is not None:
            require_routes(batch, routes, policy.layout)
        mine = cut.order[cut.mine[0].start : cut.mine[-1].stop]
        self.ids = own_targets(batch, routes, policy.layout, mine, policy.routers.layers, time)
        self.hidden = torch.ones(time, time, dtype=torch.bool, device=policy.device).triu(1)[None, None]
        self.positions = torch.arange(time, device=policy.device)[None].expand(cut.size, -1)
        width = cut.batch.tokens.shape[1]
        self.per_token = [torch.zeros(3, cut.size, width, device=policy.device) for _ in cut.mine]
        self.total = torch.zeros((), dtype=torch.float64, device=policy.device)
        self.metrics: Counter[str] = Counter()
        self.taken: list[tuple] = []

    def run(self) -> PassResult:
        """Carry it out; collective."""
        policy, cut = self.policy, self.cut
        with policy.routers.schedule(policy.recompute and self.loss is not None):
            get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(enumerate(cut.mine)),
                model=policy.module,
                num_microbatches=len(cut.mine),
                seq_length=cut.inputs.shape[1],
                micro_batch_size=cut.size,
                forward_only=self.loss is None,
            )
        dist.all_reduce(self.total, group=ps.get_data_parallel_group())
        used, preferred, chosen_by = (None if kind[0] is None else list(kind) for kind in zip(*self.taken, strict=True))
        assert used is not None, "every router says what it used"
        self.taken.clear()
        sizes = policy.routers.sizes
        trace = shared_trace(used, self.batch, policy.layout, sizes)
        counted = ps.is_pipeline_last_stage() and ps.get_tensor_model_parallel_rank() == 0
        logprobs, entropy, clipped_by = whole(self.per_token, self.batch)
        return PassResult(
            *(logprobs, entropy, clipped_by),
            loss=from_last_stage(self.total).item(),
            metrics=ranks.summed(self.metrics if counted else {}),
            routes=trace,
            preferred=None if preferred is None else shared_trace(preferred, self.batch, policy.layout, sizes),
            scores=None if chosen_by is None else scores_of(gathered(chosen_by, sizes)[: len(self.batch)], trace),
        )

    def _forward(self, micro_batches: Iterator[tuple[int, slice]], model: nn.Module) -> tuple[Tensor, Callable]:
        """Megatron's forward step: this stage's part of a micro-batch, and what the last stage does with its logits."""
        number, rows = next(micro_batches)
        routers = self.policy.routers
        first = rows.start - self.cut.mine[0].start
        routers.aim(self.ids[first : first + self.cut.size], self.policy.layout.unknown, scores=self.scores)
        output = model(self.cut.inputs[rows].to(self.policy.device), self.positions, self.hidden)
        self.taken.append(routers.taken(self.cut.size, preferred=self.replayed, scores=self.scores))
        return output, partial(self._finish, number, rows)

    def _finish(self, number: int, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor, dict]:
        """The loss, a count of 0 tokens (so that Megatron divides it by nothing), and no report."""
        device, batch = self.policy.device, self.cut.batch
        tokens, mask = batch.tokens[rows].to(device), batch.response_mask[rows].to(device)
        found = token_statistics(logits, tokens, mask, self.policy.temperature, self.entropy_gradient)
        kept, value = self.per_token[number], logits.new_zeros(())
        kept[0], kept[1] = (x.detach() for x in found)
        if self.loss is not None:
            output = self.loss(*found, rows)
            kept[2, :, : output.clipped_by.shape[1]] = output.clipped_by
            value = output.loss
            self.total += value.detach()
            self.metrics.update(output.metrics)
        return value, torch.zeros((), dtype=torch.int, device=device), {}


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
    logprobs, entropy = (nn.functional.pad(v.where(mask[:, 1:], 0.0), (1, 0)) for v in (chosen - z.log(), entropy))
    return logprobs, entropy


def from_last_stage(tensor: Tensor) -> Tensor:
    """The last pipeline stage's tensor, on every stage."""
    if ps.get_pipeline_model_parallel_world_size() > 1:
        group = ps.get_pipeline_model_parallel_group()
        dist.broadcast(tensor, ps.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def whole(parts: list[Float[Tensor, "kind rows time"]], batch: Batch) -> Float[Tensor, "kind batch width"]:
    """What the last stage knows about the tokens of every micro-batch, for the whole batch, on every rank."""
    mine = from_last_stage(torch.stack(parts, 1))  # [kind, micro-batch, rows, time]
    rows = gather(mine, 1, ps.get_data_parallel_group()).flatten(1, 2)[:, : len(batch)]
    return nn.functional.pad(rows, (0, batch.tokens.shape[1] - rows.shape[-1])).to(batch.tokens.device)
