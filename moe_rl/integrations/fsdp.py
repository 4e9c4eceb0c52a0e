"""The Hugging Face policy spread over ranks by FSDP2: the same verbs, all of them collective.

Every rank gives the same full batch and gets the same full answer. A rank computes some of its rows: as many as every
other, in as many forwards, since each of them gathers the parameters of a layer from all ranks.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from moe_rl import ranks
from moe_rl.config import ModelConfig, Optimizer, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.integrations.cpu_kernels import use_cpu_kernels
from moe_rl.integrations.on_ranks import check_spread, from_rank_0, shared_rows
from moe_rl.models.adapters import ATTENTION, adapter_weights, add_adapters, draw_adapters
from moe_rl.models.compilation import check_backend, compile_parts, decoder_layers, try_parts
from moe_rl.models.load import LoadedModel, keep_routers_in, skeleton
from moe_rl.models.master_weights import is_narrow
from moe_rl.models.vocabulary import head_is_apart
from moe_rl.objectives import Objective
from moe_rl.policies.hf import HFPolicy, Rows, check_adapters, cut, fill_rows, join, settings_of
from moe_rl.registry import Positive, checked, needs
from moe_rl.rollouts.engine import check_dtype
from moe_rl.routing.moe_layers import find_moe_layers, router_parameters
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import MiniBatch, Rollouts, Scored, Stage, rows_of

REDUCE = ("micro_batch", "update")
"""When ranks add up their gradients."""


def _check(
    run: RunConfig,
    *,
    compute_dtype: str | None = None,
    reduce: str = "micro_batch",
    compile: str | None = None,
    **options: Any,
) -> None:
    check_backend(compile)
    check_adapters(run, **options)
    narrow = options.get("lora") and options.get("master_weights", True) and run.model.dtype != "float32"
    if narrow and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise ConfigError("policy='fsdp(lora=…)' beside narrower weights needs torch 2.8. Use model.dtype=float32.")
    check_spread(run, "a critic is a whole model of one process, and is not cut over ranks")
    check_dtype("policy.compute_dtype", compute_dtype)
    if reduce not in REDUCE:
        raise ConfigError(f"policy.reduce={reduce!r}: choose {' or '.join(REDUCE)}.")
    if run.router_noise.scale and run.router_noise.target == "choice" and run.router_noise.direction == "last_step":
        raise ConfigError(
            "router_noise.target='choice' with router_noise.direction='last_step' is not possible with policy='fsdp'. "
            "Use the direction 'random', another target, or policy='hf'."
        )
    layers_of(skeleton(run.model))


@needs("ranks")
@checked(_check)
def fsdp(
    run: RunConfig,
    start: LoadedModel | None,
    frozen: bool,
    *,
    compute_dtype: str | None = None,
    reduce: str = "micro_batch",
    master_weights: bool = True,
    compile: str | None = None,
    lora: PositiveInt | None = None,
    lora_alpha: Positive = 32.0,
    lora_targets: Sequence[str] = ATTENTION,
) -> FSDPPolicy:
    """The policy `fsdp`: hf cut by FSDP2, each process a part of every layer. `compute_dtype`: in which forwards and
    backwards compute (default: `model.dtype`); routers compute in `model.router_dtype`, if it is set. Weights, sums of
    gradients and moments are float32, 16 bytes a parameter. `master_weights=False` keeps them in `model.dtype`, and
    loses most small steps in bfloat16. `reduce`: ranks add up their gradients after every `micro_batch`, or once per
    `update`, for which every rank holds the gradients of the whole model. `compile`, `lora`, `lora_alpha` and
    `lora_targets`: as for `hf`; the weights that adapters freeze stay in `model.dtype`."""
    weights, config = start.weights() if start else None, run.model
    if master_weights and is_narrow(getattr(torch, config.dtype)):
        compute_dtype = compute_dtype or config.dtype
        config = config if lora else config.replace(dtype="float32")
    adapt = None
    if lora and not frozen:
        drawn: dict[str, Any] = {"seed": run.cold_start.seed, "wide": master_weights}
        adapt = partial(add_adapters, rank=lora, alpha=lora_alpha, targets=lora_targets, **drawn)
    return FSDPPolicy(
        config,
        weights,
        run.optimizer,
        compute_dtype=compute_dtype,
        reduce=reduce,
        compile=compile,
        adapt=adapt,
        **settings_of(run, frozen),
    )


class FSDPPolicy(HFPolicy):
    """`HFPolicy` on ranks that have met (`ranks.join`). `start` are the weights and buffers it begins with
    (`LoadedModel.weights`), which only rank 0 needs; they are copied, one after the other, into a model of `config` of
    which every rank holds a part.

    `compute_dtype` is that of forwards and backwards; weights, sums of gradients and moments keep the dtype of
    `config`. Routers with a dtype of their own (`config.router_dtype`) compute in it. With `reduce="update"` gradients
    are added up over ranks once per update. `adapt` puts adapters into a model. Further settings are those of
    `HFPolicy`.
    """

    from_rank_0 = staticmethod(from_rank_0)

    def __init__(
        self,
        config: ModelConfig,
        start: Mapping[str, Tensor] | None,
        optimizer: Optimizer,
        *,
        compute_dtype: str | None = None,
        reduce: str = "micro_batch",
        compile: str | None = None,
        adapt: Callable[[nn.Module], None] | None = None,
        **settings: Any,
    ):
        self.reduce = reduce
        model = sharded(config, start, compute_dtype, compile, adapt)
        super().__init__(model, optimizer, master_weights=False, **settings)
        self._head_is_apart = head_is_apart(self.model)  # now, since all ranks take part

    # ------------------------------------------------------------------ the verbs
    def score(
        self, batch: Rollouts, routes: RoutingTrace | None = None, scores: bool = False, noise: Noise | None = None
    ) -> Scored:
        """Log-probs, entropy and routes of a batch; unconstrained routing when `routes` is None. See `Policy.score`."""
        if routes is not None and len(order := _order(batch)) > len(batch):
            routes = routes.rows(order.clamp(max=len(batch) - 1))
        scored = super().score(_even(batch), routes, scores, noise)
        return Scored(*(rows_of(x, slice(len(batch)), batch.tokens.shape[1]) for x in vars(scored).values()))

    def save(self, folder: Path) -> None:
        """Write weights, moments and the number of updates with torch's distributed checkpoint, each rank its part. The
        folder must be on a file system that all ranks see."""
        dcp.save(self._state(), storage_writer=_Writer(folder))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote on as many ranks (bit-exact) or on others."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # adapters have no more; `dcp.load` asks for all of `state`
        )
        self.updates = state["updates"]

    # ------------------------------------------------------------------ how
    def _backward(
        self, batch: MiniBatch, objective: Objective, noise: Noise | None = None
    ) -> tuple[list, float, Mapping[str, float]]:
        outputs, loss, metrics = super()._backward(_even(batch), objective, noise)
        total = ranks.sum_over_ranks({"loss": loss, "positions": self.positions, **metrics})
        self.padding = 1 - int(batch.attention_mask.sum()) / total.pop("positions")
        outputs = [rows_of(x, slice(len(batch)), batch.tokens.shape[1]) for x in outputs]
        return outputs, total.pop("loss"), total

    def _prepare_backward(self, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last or self.reduce == "micro_batch")

    def _cut(self, batch: Rollouts, most: int) -> list[Rows]:
        """Those of this rank; under a budget of tokens its forwards are halved until it has as many as any other."""
        order = torch.arange(len(batch))
        if self.micro_batch_tokens is not None:
            order = batch.attention_mask.sum(1).argsort(descending=True, stable=True)
        mine = order[ranks.rank() :: ranks.world()]
        cuts = [mine[rows] for rows in cut(batch.rows(mine), most, self.micro_batch_tokens)]
        count = max(ranks.gather(len(cuts)))
        while len(cuts) < count:
            largest = max(range(len(cuts)), key=lambda i: len(cuts[i]))
            cuts[largest : largest + 1] = cuts[largest].tensor_split(2)
        return list(cuts)

    def _join(self, parts: list[tuple], batch: Rollouts, cuts: list[Rows]) -> list:
        rows = [index for index in cuts if isinstance(index, Tensor)]  # all of them, here
        traces = {
            n: shared_rows(kind, rows, batch)
            for n, kind in enumerate(zip(*parts, strict=True))
            if isinstance(kind[0], RoutingTrace)
        }
        rest = [tuple(None if n in traces else x for n, x in enumerate(part)) for part in parts]
        everywhere = ranks.gather((rest, cuts))
        joined = join(
            [part for parts, _ in everywhere for part in parts],
            batch,
            [rows for _, cuts in everywhere for rows in cuts],
        )
        return [traces.get(n, x) for n, x in enumerate(joined)]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": adapter_weights(self.model) or model, "optimizer": optimizer, "updates": self.updates}


def _order(batch: Rollouts) -> Tensor:
    """Rows that ranks can share evenly: those of the batch, and beyond."""
    return torch.arange(len(batch) + -len(batch) % ranks.world())


def _even(batch: Stage) -> Stage:
    """The batch filled up to those, where it must be: a copy, routes and all."""
    order = _order(batch)
    return batch if len(order) == len(batch) else fill_rows(batch, order)


class _Writer(FileSystemWriter):
    """Writes equal bytes for equal states: torch's own notes down when and where."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


# ---------------------------------------------------------------------- the model
def sharded(
    config: ModelConfig,
    start: Mapping[str, Tensor] | None,
    compute_dtype: str | None = None,
    compile: str | None = None,
    adapt: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """A model of which every rank holds a part of each parameter: every decoder layer is gathered by itself when it
    runs, and what is left of the model as one. Its weights are those of `start`, on rank 0. A group has one dtype, but
    what `adapt` freezes may have another. Collective."""
    model: Any = skeleton(config)
    layers = layers_of(model)
    if adapt is not None:
        adapt(model)
        if start is not None:
            start = ChainMap(draw_adapters(skeleton(config), adapt), start)  # type: ignore[arg-type]  # only read
    device = ranks.device(config.device)
    # Given up after every forward, the root's too, which else would keep plain whole tensors among the parameters.
    every: dict[str, Any] = {"mesh": init_device_mesh(device.type, (ranks.world(),)), "reshard_after_forward": True}
    usual = dict(every)
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, compute_dtype), reduce_dtype=torch.float32)
        usual["mp_policy"] = policy
    if config.router_dtype is not None:
        keep_routers_in(model, getattr(torch, config.router_dtype))
        for moe_layer in find_moe_layers(model):  # a group has one dtype
            fully_shard(moe_layer.module, **every)
    parts = {} if compile is None else compile_parts(model, compile, getattr(torch, compute_dtype or config.dtype))
    for layer in layers:
        fully_shard(layer, **usual)
    fully_shard(model, **usual)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the weights of a loss span the mini-batch, so ranks add up
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    model.tie_weights()
    take_over(model, start)
    use_cpu_kernels(model)
    if compile is not None:
        try_parts(model, parts, compile)
    return model


@torch.no_grad()
def take_over(model: nn.Module, start: Mapping[str, Tensor] | None) -> None:
    """Give a sharded model weights and buffers that rank 0 has, tensor by tensor. Collective."""
    for name, mine in (dict(model.named_buffers()) | model.state_dict()).items():
        full = (
            start[name.replace(".base_layer.", ".")].to(mine.device, mine.dtype).contiguous()
            if start is not None
            else torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
        )
        dist.broadcast(full, 0)
        mine.copy_(ranks.cut_as(mine, full))


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder's layers. Raises ConfigError for a model that cannot be cut layer by layer."""
    layers = decoder_layers(model)
    if layers is None:
        raise ConfigError(
            f"policy='fsdp' needs a list of decoder layers, which {type(model).__name__} does not have. "
            "Use policy='hf'."
        )
    routers = {id(p) for p in router_parameters(model)}
    if len(dtypes := {p.dtype for p in model.parameters() if id(p) not in routers}) > 1:
        raise ConfigError(
            f"policy='fsdp' needs one dtype per layer, but {type(model).__name__} has several "
            f"({', '.join(sorted(map(str, dtypes)))}). Use model.dtype=float32."
        )
    return layers
