"""A Megatron-core model as a policy: the same verbs, spread over ranks. Every verb is collective.

Every rank gives the same full batch and gets the same full answer; which rows a rank computes is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from moe_rl import ranks
from moe_rl.config import Optimizer
from moe_rl.errors import ConfigError, Diverged
from moe_rl.integrations.megatron import optimizer as optimizers
from moe_rl.integrations.megatron.cpu import use_cpu
from moe_rl.integrations.megatron.layout import Parallel, check_layout, expert_tensor, num_experts, sparse_layers
from moe_rl.integrations.megatron.model import build_gpt, transformer_config
from moe_rl.integrations.megatron.replay import Routers
from moe_rl.integrations.megatron.schedule import Cut, SchedulePass
from moe_rl.integrations.megatron.weights import WeightMap
from moe_rl.integrations.on_ranks import from_rank_0
from moe_rl.objectives import LossOutput, Objective
from moe_rl.routing.balance import balance, correction_biases
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import Layout, RoutingTrace
from moe_rl.types import Batch, Scored, Updated


class MegatronPolicy:
    """`model` is the Hugging Face model to train; only rank 0 needs its weights, the others may give one on the meta
    device. `optimizer=None` makes a policy that only scores.

    `micro_batch` bounds the rows of one forward with gradient on one rank. `recompute` recomputes every layer's
    activations in the backward pass, under the routes of its forward.
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
        use_cpu()
        _form_groups(parallel)
        transformer = transformer_config(config, parallel, dtype, recompute)
        self.gpt = build_gpt(config, transformer).to(self.device)
        self.routers = Routers(self.gpt, num_experts(config), _sites_of_stages(config, parallel.pp, self.layout))
        self.module = Float16Module(transformer, self.gpt) if transformer.bf16 else self.gpt
        for router in self.routers.modules:
            router._maintain_float32_expert_bias()  # which Float16Module would have rounded
        self.map = WeightMap(self.gpt, model.state_dict(), parallel.pp, config.num_hidden_layers)
        self.map.put(model.state_dict() if ranks.rank() == 0 else None)
        self.updates = 0
        if optimizer is not None:
            if optimizer.loss_free_bias:
                correction_biases(model)  # which refuses a family without
            sums = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
            self.module = DistributedDataParallel(transformer, sums, self.module)
            self.optimizer = optimizers.build(self.module, optimizer, dtype)

    # ------------------------------------------------------------------ the verbs
    @torch.no_grad()
    def score(
        self, batch: Batch, routes: RoutingTrace | None = None, scores: bool = False, noise: Noise | None = None
    ) -> Scored:
        """Log-probs, entropy and routes of a batch; natural routing when `routes` is None. See `Policy.score`."""
        _refuse(noise)
        result = SchedulePass(self, batch, routes, Cut.of(batch, self.score_batch), scores=scores).run()
        return Scored(result.logprobs, result.entropy, result.routes, result.preferred, result.scores)

    def update(self, batch: Batch, objective: Objective, noise: Noise | None = None) -> Updated:
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
        result = SchedulePass(self, batch, batch.routes, cut, loss, entropy_gradient="entropy" in objective.needs).run()
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm}: a step would destroy the weights. Lower the learning rate.")
        limit = settings.grad_clip or float("inf")
        if norm > limit:
            self.module.scale_gradients(limit / (norm + 1e-6))
            optimizer.prepare_grads()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(self.updates + 1) * group["lr_mult"]
        optimizer.step_with_ready_grads()
        self.updates += 1
        if settings.loss_free_bias:
            biases = [router.expert_bias for router in self.routers.modules]
            first = self.routers.layers.start
            balance(biases, result.preferred or result.routes, settings.loss_free_bias, first)
        found = (result.logprobs, result.entropy, result.routes, result.preferred, result.clipped_by.to(torch.int8))
        return Updated(*found, loss=result.loss, grad_norm=norm, grad_clipped=norm > limit, metrics=result.metrics)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, on every rank; each rank must go through all of them."""
        yield from self.map.take()

    def save(self, folder: Path) -> None:
        """Write weights and moments with dist_checkpointing, each rank its part, for any layout to read. The folder
        must be on a file system that all ranks see."""
        optimizers.save(folder, self.gpt, self._trained()[0], self.updates)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote under this layout (bit-exact) or another one."""
        self.updates = optimizers.load(folder, self.gpt, self._trained()[0])

    # ------------------------------------------------------------------ how
    def _trained(self) -> tuple:
        if self.settings is None:
            raise ConfigError("this policy was built without an optimizer, so it can only score.")
        return self.optimizer, self.settings


def _refuse(noise: Noise | None) -> None:
    if noise is not None:
        raise ConfigError("the routers of policy='megatron' cannot be moved: use policy='hf' with router_noise.")


def _sites_of_stages(config: PreTrainedConfig, pp: int, layout: Layout) -> list[int]:
    """How many sites each pipeline stage has."""
    sparse = sparse_layers(config)
    sites = [site.decoder_layer for site in layout.sites]
    if sites != (meant := [number for number, here in enumerate(sparse) if here]):
        raise ConfigError(f"{config.model_type} routes in layers {sites}, but its configuration says {meant}: use "
                          "policy='hf'.")
    per_stage = len(sparse) // pp
    return [sum(sparse[stage * per_stage :][:per_stage]) for stage in range(pp)]


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
