"""A Megatron-core model as a policy: the same verbs, spread over ranks. Every verb is collective.

Every rank gives the same full batch and gets the same full answer; which rows a rank computes is decided here: a batch
is cut over ranks and micro-batches, goes through one of Megatron-core's schedules, and is put together again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as add_up
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_rl import ranks
from moe_rl.config import SCORED, Optimizer
from moe_rl.errors import ConfigError, Diverged, RunError
from moe_rl.integrations.megatron.cpu import use_cpu
from moe_rl.integrations.megatron.layout import (
    Parallel,
    check_layout,
    expert_tensor,
    num_experts,
    routers_of_stages,
    sparse_layers,
)
from moe_rl.integrations.megatron.model import build_gpt, transformer_config
from moe_rl.integrations.megatron.optimizer import build_optimizer, inner_optimizers
from moe_rl.integrations.megatron.replay import Routers, own_targets, require_routes, shared_trace
from moe_rl.integrations.megatron.weights import WeightMap, gather
from moe_rl.integrations.on_ranks import from_rank_0
from moe_rl.objectives import LossOutput, Objective
from moe_rl.policies.hf import balance, correction_biases, fill_rows
from moe_rl.routing.moe_layers import layout_of
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import MiniBatch, Rollouts, Scored, Stage, Updated


class MegatronPolicy:
    """`model` is the Hugging Face model to train, and `weights` are its weights, by default those in `model`. Only rank
    0 needs them: any other may give a model on the meta device. `optimizer=None` makes a policy that only scores.

    `micro_batch` bounds the rows of one forward with gradient on one rank, and `score_batch` (SCORED times as many)
    those of one without. `recompute` recomputes every layer's activations in the backward pass, under the routes of its
    forward.
    """

    from_rank_0 = staticmethod(from_rank_0)

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer | None,
        parallel: Parallel,
        *,
        temperature: float = 1.0,
        micro_batch: int = 64,
        score_batch: int | None = None,
        recompute: bool = False,
        device: str = "cpu",
        weights: Mapping[str, Tensor] | None = None,
    ):
        config, dtype = model.config, next(model.parameters()).dtype
        check_layout(parallel, config, ranks.world())
        self.device = ranks.device(device)
        self.settings, self.layout = optimizer, layout_of(model)
        self.ranks = [parallel.dp, parallel.tp, parallel.pp, parallel.ep, expert_tensor(parallel)]
        self.temperature, self.recompute = temperature, recompute
        self.micro_batch, self.score_batch = micro_batch, score_batch or SCORED * micro_batch
        use_cpu()
        _form_groups(parallel)
        transformer = transformer_config(config, parallel, dtype, recompute)
        self.gpt = build_gpt(config, transformer).to(self.device)
        sparse = sparse_layers(config)
        if [moe_layer.decoder_layer for moe_layer in self.layout.moe_layers] != [
            n for n, here in enumerate(sparse) if here
        ]:
            raise ConfigError(f"{config.model_type} has routers in other layers than its configuration names")
        self.routers = Routers(self.gpt, num_experts(config), routers_of_stages(sparse, parallel.pp))
        self.module = Float16Module(transformer, self.gpt) if transformer.bf16 else self.gpt
        for router in self.routers.modules:
            router._maintain_float32_expert_bias()  # which Float16Module would have rounded
        self.map = WeightMap(self.gpt, model.state_dict(), parallel.pp, config.num_hidden_layers)
        self.map.put((weights or model.state_dict()) if ranks.rank() == 0 else None)
        self.updates = 0
        if optimizer is not None:
            if optimizer.loss_free_bias:
                correction_biases(model)  # which refuses a family without
            sums = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
            self.module = DistributedDataParallel(transformer, sums, self.module)
            self.optimizer = build_optimizer(self.module, optimizer, dtype)

    # ------------------------------------------------------------------ the verbs
    @torch.no_grad()
    def score(
        self, batch: Rollouts, routes: RoutingTrace | None = None, scores: bool = False, noise: Noise | None = None
    ) -> Scored:
        """Log-probs, entropy and routes of a batch; unconstrained routing when `routes` is None. Megatron-core's
        routers give no `scores`. See `Policy.score`."""
        _refuse(noise)
        return SchedulePass(self, batch, routes, Cut.of(batch, self.score_batch)).run()[0]

    def update(self, batch: MiniBatch, objective: Objective, noise: Noise | None = None) -> Updated:
        """One step on a mini-batch. Micro-batches and ranks only add: the weights of the loss span all of it."""
        _refuse(noise)
        optimizer, settings = self._trained()
        cut = Cut.of(batch, self.micro_batch)

        def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> LossOutput:
            part = cut.batch.rows(rows).to(self.device)
            time = part.tokens.shape[1]
            return objective(part, logprobs[:, :time], entropy[:, :time])

        self.module.zero_grad_buffer()
        optimizer.zero_grad()
        forwards = SchedulePass(self, batch, batch.routes, cut, loss, entropy_gradient="entropy" in objective.needs)
        scored, clipped_by, total, metrics = forwards.run()
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            where = objective.locate_divergence(batch, scored.logprobs, scored.entropy)
            raise Diverged(f"the gradient norm is {norm}, so no step was made. Lower the learning rate. {where}")
        limit = settings.grad_clip or float("inf")
        if norm > limit:
            self.module.scale_gradients(limit / (norm + 1e-6))
            optimizer.prepare_grads()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(self.updates + 1) * group["lr_mult"]
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]  # Megatron's own scheduler does it
        optimizer.step_with_ready_grads()
        self.updates += 1
        if settings.loss_free_bias:
            biases = [router.expert_bias for router in self.routers.modules]
            first = self.routers.layers.start
            balance(biases, scored.preferred or scored.routes, settings.loss_free_bias, first)
        return Updated(
            scored.logprobs,
            scored.entropy,
            scored.routes,
            scored.preferred,
            clipped_by.to(torch.int8),
            loss=total,
            grad_norm=norm,
            grad_clipped=norm > limit,
            metrics=metrics,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, on every rank; each rank must go through all of them."""
        yield from self.map.take()

    def save(self, folder: Path) -> None:
        """Write weights and moments, each rank its part. The folder must be on a file system that all ranks see."""
        state = {
            "layout": self.ranks,
            "weights": self.gpt.state_dict(),
            "masters": self._masters(),
            "moments": [inner.state_dict() for inner in inner_optimizers(self._trained()[0])],
            "updates": self.updates,
        }
        torch.save(state, folder / f"rank-{ranks.rank():05d}.pt")
        dist.barrier()  # all parts are written

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, bit-exact. Raises RunError under another layout."""
        file = folder / f"rank-{ranks.rank():05d}.pt"
        state: dict[str, Any] = (
            torch.load(file, map_location=self.device, weights_only=True) if file.exists() else {"layout": None}
        )
        if state["layout"] != self.ranks:
            written = state["layout"]
            raise RunError(
                f"{folder} was written with dp, tp, pp, ep, experts' tp = {written}, and this run has {self.ranks}"
            )
        self.gpt.load_state_dict(state["weights"])
        for inner, moments in zip(inner_optimizers(self._trained()[0]), state["moments"], strict=True):
            inner.load_state_dict(moments)
        for name, master in self._masters().items():
            master.copy_(state["masters"][name])
        self.updates = state["updates"]

    # ------------------------------------------------------------------ how
    def _trained(self) -> tuple:
        if self.settings is None:
            raise ConfigError("this policy was built without an optimizer, so it can only score")
        return self.optimizer, self.settings

    def _masters(self) -> dict[str, Tensor]:
        """The float32 weights of a model in bfloat16."""
        named = self.gpt.named_parameters()
        return {name: weight.main_param.detach() for name, weight in named if hasattr(weight, "main_param")}


def _refuse(noise: Noise | None) -> None:
    if noise is not None:
        raise ConfigError("policy='megatron' has no router noise. Use policy='hf'.")


def _form_groups(parallel: Parallel) -> None:
    """Megatron's process groups, which a process has one set of; another layout replaces them."""
    wanted = (parallel.tp, parallel.pp, parallel.ep, expert_tensor(parallel))
    kinds = ("tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel", "expert_tensor_parallel")
    if ps.model_parallel_is_initialized():
        if wanted == tuple(getattr(ps, f"get_{kind}_world_size")() for kind in kinds):
            return
        ps.destroy_model_parallel()
    ps.initialize_model_parallel(**{f"{kind}_size": size for kind, size in zip(kinds, wanted, strict=True)})
    model_parallel_cuda_manual_seed(1)  # nothing here draws from it: no dropout, no jitter


# ---------------------------------------------------------------------- one schedule over a batch
@dataclass(frozen=True)
class Cut(Generic[Stage]):
    """A batch as data-parallel ranks × micro-batches × rows of equal number. What is left over is filled up with copies
    of the last row, without a response, whose results are thrown away: schedules and dispatchers want equal shapes."""

    batch: Stage
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
    def of(batch: Stage, largest: int) -> Cut[Stage]:
        """The fewest equal micro-batches of at most `largest` rows."""
        rank, ranks = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        share = -(-len(batch) // ranks)
        count = -(-share // largest)
        size = -(-share // count)
        order = torch.arange(ranks * count * size)
        traces: dict[str, Any] = {name: None for name, value in vars(batch).items() if isinstance(value, RoutingTrace)}
        rows = fill_rows(replace(batch, **traces), order)
        order = order.clamp(max=len(batch) - 1)
        inputs = rows.tokens[:, :-1]
        inputs = nn.functional.pad(inputs, (0, -inputs.shape[1] % ps.get_tensor_model_parallel_world_size()))
        starts = ((rank * count + i) * size for i in range(count))
        return Cut(rows, order, size, [slice(start, start + size) for start in starts], inputs)


Loss = Callable[[Tensor, Tensor, slice], LossOutput]
"""loss(logprobs, entropy, rows): the objective of one micro-batch, those rows of the cut batch."""


class SchedulePass:
    """One schedule over a batch: forward, and with a loss backward and the sum of gradients over all ranks."""

    def __init__(
        self,
        policy: MegatronPolicy,
        batch: Rollouts,
        routes: RoutingTrace | None,
        cut: Cut,
        loss: Loss | None = None,
        *,
        entropy_gradient: bool = False,
    ):
        self.policy, self.batch, self.cut, self.loss = policy, batch, cut, loss
        self.entropy_gradient, self.replayed = entropy_gradient, routes is not None
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

    def run(self) -> tuple[Scored, Float[Tensor, "batch time"], float, Mapping[str, float]]:
        """Carry it out; collective. The last three are `clipped_by`, `loss` and `metrics` of `Updated`."""
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
        used, preferred = (None if kind[0] is None else list(kind) for kind in zip(*self.taken, strict=True))
        assert used is not None, "every router says what it used"
        self.taken.clear()
        sizes = policy.routers.sizes
        trace = shared_trace(used, self.batch, policy.layout, sizes)
        chosen = None if preferred is None else shared_trace(preferred, self.batch, policy.layout, sizes)
        last = ps.is_pipeline_last_stage() and ps.get_tensor_model_parallel_rank() == 0
        counted: Mapping[str, float] = self.metrics if last else {}
        logprobs, entropy, clipped_by = join_tokens(self.per_token, self.batch)
        scored = Scored(logprobs, entropy, trace, chosen)
        return scored, clipped_by, from_last_stage(self.total).item(), ranks.sum_over_ranks(counted)

    def _forward(self, micro_batches: Iterator[tuple[int, slice]], model: nn.Module) -> tuple[Tensor, Callable]:
        """Megatron's forward step: this stage's part of a micro-batch, and what the last stage does with its logits."""
        number, rows = next(micro_batches)
        routers = self.policy.routers
        first = rows.start - self.cut.mine[0].start
        routers.aim(self.ids[first : first + self.cut.size], self.policy.layout.unknown)
        output = model(self.cut.inputs[rows].to(self.policy.device), self.positions, self.hidden)
        self.taken.append(routers.taken(self.cut.size, preferred=self.replayed))
        return output, partial(self._finish, number, rows)

    def _finish(self, number: int, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor, dict]:
        """The loss, a count of 0 tokens (so that Megatron divides it by nothing), and no report."""
        device, batch = self.policy.device, self.cut.batch
        tokens, mask = batch.tokens[rows].to(device), batch.response_mask[rows].to(device)
        statistics = token_statistics(logits, tokens, mask, self.policy.temperature, self.entropy_gradient)
        row, value = self.per_token[number], logits.new_zeros(())
        row[0], row[1] = (x.detach() for x in statistics)
        if self.loss is not None:
            output = self.loss(*statistics, rows)
            row[2, :, : output.clipped_by.shape[1]] = output.clipped_by
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


def join_tokens(parts: list[Float[Tensor, "kind rows time"]], batch: Rollouts) -> Float[Tensor, "kind batch width"]:
    """What the last stage knows about the tokens of every micro-batch, for the whole batch, on every rank."""
    mine = from_last_stage(torch.stack(parts, 1))  # [kind, micro-batch, rows, time]
    rows = gather(mine, 1, ps.get_data_parallel_group()).flatten(1, 2)[:, : len(batch)]
    return nn.functional.pad(rows, (0, batch.tokens.shape[1] - rows.shape[-1])).to(batch.tokens.device)
