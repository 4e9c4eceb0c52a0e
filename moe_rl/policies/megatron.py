"""A Megatron-core model as a policy: the same verbs, spread over ranks. Every verb is collective.

Every rank gives the same full batch and gets the same full answer; which rows a rank computes is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import Optimizer, Parallel
from moe_rl.errors import ConfigError, Diverged
from moe_rl.losses import LossOutput, Objective, sequence_mean_weights
from moe_rl.policies import megatron_optimizer
from moe_rl.policies.megatron_cpu import use_cpu
from moe_rl.policies.megatron_layout import check_layout, expert_tensor, normalised, num_experts
from moe_rl.policies.megatron_model import build_gpt, transformer_config
from moe_rl.policies.megatron_replay import Routers, gathered, scores_of, targets_of, trace_of
from moe_rl.policies.megatron_schedule import Cut, from_last_stage, per_token, token_statistics
from moe_rl.policies.megatron_weights import WeightMap
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Batch, Scored, Updated

Loss = Callable[[Tensor, Tensor, slice], LossOutput]
"""loss(logprobs, entropy, rows): the objective of one micro-batch, those rows of the cut batch."""


@dataclass(frozen=True)
class Ran:
    """What one schedule over a batch found out, on every rank; fields as in `Scored` and `Updated`."""

    logprobs: Tensor
    entropy: Tensor
    lost: Tensor
    loss: float
    routes: RoutingTrace
    preferred: RoutingTrace
    scores: RouterScores | None


class MegatronPolicy:
    """`model` is the Hugging Face model to train; only rank 0 needs its weights, the others may give one on the meta
    device. `optimizer=None` makes a policy that only scores.

    `micro_batch` bounds the rows of one forward with gradient on one rank. `recompute` recomputes every layer's
    activations in the backward pass, under the routes of its forward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        parallel: Parallel,
        *,
        temperature: float = 1.0,
        micro_batch: int = 64,
        score_batch: int = 256,
        recompute: bool = False,
        device: str = "cpu",
    ):
        config, dtype = model.config, next(model.parameters()).dtype
        check_layout(parallel, config, ranks.world())
        self.device = ranks.device(device)
        if self.device.type == "cpu" and dtype != torch.float32:
            raise ConfigError(f"policy='megatron' on a CPU needs dtype float32, not {dtype}.")
        self.settings, self.layout = optimizer, layout_of(model)
        self.temperature, self.recompute = temperature, recompute
        self.micro_batch, self.score_batch = micro_batch, score_batch
        self.by_probability = not normalised(config)
        use_cpu()
        _form_groups(parallel)
        transformer = transformer_config(config, parallel, dtype, recompute)
        self.gpt = build_gpt(config, transformer).to(self.device)
        self.routers = Routers(self.gpt, num_experts(config))
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.map = WeightMap(self.gpt, shapes, parallel.pp, config.num_hidden_layers)
        self.map.put(model.state_dict() if ranks.rank() == 0 else None)
        self.module = Float16Module(transformer, self.gpt) if transformer.bf16 else self.gpt
        if optimizer is not None:
            sums = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
            self.module = DistributedDataParallel(transformer, sums, self.module)
            self.optimizer = megatron_optimizer.adamw(self.module, optimizer, dtype)

    # ------------------------------------------------------------------ the verbs
    @torch.no_grad()
    def score(self, batch: Batch, routes: RoutingTrace | None = None, scores: bool = False) -> Scored:
        """Log-probs, entropy and routes of a batch; natural routing when `routes` is None. See `Policy.score`."""
        ran = self._run(batch, routes, self.score_batch, scores=scores)
        return Scored(ran.logprobs, ran.entropy, ran.routes, ran.preferred if routes else None, ran.scores)

    def update(self, batch: Batch, old: Scored, objective: Objective, routes: RoutingTrace | None = None) -> Updated:
        """One AdamW step on a mini-batch. Micro-batches and ranks only add: the weights of the loss span all of it."""
        optimizer, settings = self._trained()
        cut = Cut.of(batch, self.micro_batch)
        weights = sequence_mean_weights(batch.response_mask)[cut.order] * ~cut.filling[:, None]
        old_logprobs = old.logprobs[cut.order]

        def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> LossOutput:
            part = cut.batch.rows(rows).to(self.device)
            time = part.tokens.shape[1]
            old_part, weight = (x[rows, :time].to(self.device) for x in (old_logprobs, weights))
            return objective(logprobs[:, :time], entropy[:, :time], old_part, part, weight)

        self.module.zero_grad_buffer()
        optimizer.zero_grad()
        ran = self._run(batch, routes, self.micro_batch, loss, entropy_gradient=objective.entropy != 0)
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm}: a step would destroy the weights. Lower the learning rate.")
        limit = settings.grad_clip or float("inf")
        if norm > limit:
            self.module.scale_gradients(limit / (norm + 1e-6))
            optimizer.prepare_grads()
        optimizer.step_with_ready_grads()
        preferred = ran.preferred if routes else None
        found = (ran.logprobs, ran.entropy, ran.routes, preferred, ran.lost.to(torch.int8))
        return Updated(*found, loss=ran.loss, grad_norm=norm, grad_clipped=norm > limit)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, on every rank; each rank must go through all of them."""
        yield from self.map.take()

    def save(self, folder: Path) -> None:
        """Write weights and moments with dist_checkpointing, each rank its part, for any layout to read. The folder
        must be on a file system that all ranks see."""
        megatron_optimizer.save(folder, self.gpt, self._trained()[0])

    def load(self, folder: Path) -> None:
        """Read what `save` wrote under this layout (bit-exact) or another one."""
        megatron_optimizer.load(folder, self.gpt, self._trained()[0])

    # ------------------------------------------------------------------ how
    def _trained(self) -> tuple:
        if self.settings is None:
            raise ConfigError("this policy was built without an optimizer, so it can only score.")
        return self.optimizer, self.settings

    def _run(
        self,
        batch: Batch,
        routes: RoutingTrace | None,
        largest: int,
        loss: Loss | None = None,
        *,
        entropy_gradient: bool = False,
        scores: bool = False,
    ) -> Ran:
        """One schedule over the batch: forward, and with a loss backward and the sum of gradients over all ranks."""
        cut = Cut.of(batch, largest)
        time = cut.inputs.shape[1]
        ids = targets_of(batch, routes, self.layout, self.device)[cut.order]
        ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, time - ids.shape[1]), value=-1)
        hidden = torch.ones(time, time, dtype=torch.bool, device=self.device).triu(1)[None, None]
        positions = torch.arange(time, device=self.device)[None].expand(cut.size, -1)
        tokens, mask = cut.batch.tokens.to(self.device), cut.batch.response_mask.to(self.device)
        told = [torch.zeros(3, cut.size, tokens.shape[1], device=self.device) for _ in cut.mine]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        taken = []

        def forward_step(micro_batches: Iterator[tuple[int, slice]], model: nn.Module) -> tuple[Tensor, Callable]:
            number, rows = next(micro_batches)
            self.routers.aim(ids[rows])
            logits = model(cut.inputs[rows].to(self.device), positions, hidden)
            taken.append(self.routers.taken(cut.size, scores))

            def finish(logits: Tensor) -> tuple[Tensor, Tensor, dict]:  # runs on the last stage only
                found = token_statistics(logits, tokens[rows], mask[rows], self.temperature, entropy_gradient)
                told[number][0], told[number][1] = (x.detach() for x in found)
                value = logits.new_zeros(())
                if loss is not None:
                    output = loss(*found, rows)
                    told[number][2, :, : output.lost.shape[1]] = output.lost
                    value = output.loss
                    total.add_(value.detach())
                return value, torch.zeros((), dtype=torch.int, device=self.device), {}

            return logits, finish

        with self.routers.schedule(self.recompute and loss is not None):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(enumerate(cut.mine)),
                model=self.module,
                num_microbatches=len(cut.mine),
                seq_length=time,
                micro_batch_size=cut.size,
                forward_only=loss is None,
            )
        logprobs, entropy, lost = per_token(told, cut, batch)
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        used, preferred, chosen_by = (
            None if kind[0] is None else gathered(list(kind)) for kind in zip(*taken, strict=True)
        )
        rows = slice(len(batch)), slice(batch.tokens.shape[1] - 1)
        trace = trace_of(used[rows], batch, self.layout)
        return Ran(
            logprobs,
            entropy,
            lost,
            from_last_stage(total).item(),
            trace,
            trace_of(preferred[rows], batch, self.layout),
            scores_of(chosen_by[rows], trace, probabilities=self.by_probability) if scores else None,
        )


def _form_groups(parallel: Parallel) -> None:
    """Megatron's process groups, which a process has one set of; another layout replaces them."""
    wanted = (parallel.tp, parallel.pp, parallel.ep, expert_tensor(parallel))
    if ps.model_parallel_is_initialized():
        there = (
            ps.get_tensor_model_parallel_world_size(),
            ps.get_pipeline_model_parallel_world_size(),
            ps.get_expert_model_parallel_world_size(),
            ps.get_expert_tensor_parallel_world_size(),
        )
        if there == wanted:
            return
        ps.destroy_model_parallel()
    tp, pp, ep, etp = wanted
    ps.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    model_parallel_cuda_manual_seed(1)  # nothing here draws from it: no dropout, no jitter
