"""Routes ↔ Megatron-core's RouterReplay: the experts that every router of one model must use, and those it used.

Megatron has one global list of all routers ever built, which two models in a process would share. Here a model's own
routers are walked instead, and cleared before and after every schedule, after an exception too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from megatron.core import parallel_state as ps
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.integrations.megatron.weights import gather
from moe_rl.integrations.on_ranks import CHUNK, one_per_machine
from moe_rl.routing.trace import Layout, RoutingTrace
from moe_rl.types import Rollouts


class MoeLayerReplay(RouterReplay):
    """Megatron-core's RouterReplay of one router, with three additions to its target look-up: a row of -1 routes
    freely, what the router would have picked itself is kept, and groups are the model's own. Unconstrained routing is a
    target that is -1 everywhere."""

    target_topk_idx: Tensor

    def __init__(self) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)
        self.preferred: Tensor | None = None
        self.in_order = True

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """(scores at the used ids, ids), as Megatron asks for them."""
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            choice = in_best_groups(scores.detach(), num_groups, group_topk) if group_topk else scores.detach()
            self.preferred = choice.topk(topk, dim=1, sorted=self.in_order).indices
            used = torch.where(self.target_topk_idx < 0, self.preferred, self.target_topk_idx)
            # A recomputation uses what this forward used, also where it routed freely.
            self.target_topk_idx = self.replay_backward_list[-1] = used
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)

    def clear_indices(self) -> None:
        super().clear_indices()
        self.preferred = None


def in_best_groups(scores: Float[Tensor, "tokens expert"], groups: int, kept: int) -> Float[Tensor, "tokens expert"]:
    """The scores inside the `kept` groups whose two best experts have the largest sum, -inf elsewhere: DeepSeek-V3
    (arXiv 2412.19437, section 2.1.2) as transformers has it. Megatron-core adds up topk // kept experts of a group."""
    grouped = scores.unflatten(1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=1).indices
    inside = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, True)
    return grouped.masked_fill(~inside[..., None], float("-inf")).flatten(1)


class ReplayRouter(TopKRouter):
    """Megatron-core's router with a replay of its own."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None):
        super().__init__(config, pg_collection)
        RouterReplay.global_router_replay_instances.remove(self.router_replay)
        self.router_replay: MoeLayerReplay = MoeLayerReplay()
        self.router_replay.in_order = self.score_function == "softmax"  # transformers sorts no others

    def _apply_expert_bias(self, *args: object, **kwargs: object) -> None:
        """Megatron's own counts for its own step of the bias, of replayed choices and padding: nobody reads them."""


class Routers:
    """The routers of this rank's layers, in forward order."""

    def __init__(self, model: nn.Module, num_experts: int, sizes: Sequence[int]):
        """`sizes`: MoE layers of each pipeline stage; dense layers have none."""
        self.num_experts, self.device, self.sizes = num_experts, next(model.parameters()).device, sizes
        self.modules = [module for module in model.modules() if isinstance(module, ReplayRouter)]
        self.moe_layers: list[MoeLayerReplay] = [module.router_replay for module in self.modules]
        stage = ps.get_pipeline_model_parallel_rank()
        self.layers = slice(sum(sizes[:stage]), sum(sizes[: stage + 1]))
        """Which MoE layers of a trace are this stage's."""

    @contextmanager
    def schedule(self, recompute: bool) -> Iterator[None]:
        """Scope of one schedule. Raises RoutingError when a recomputation did not use its routes."""
        self._clear()
        try:
            yield
            left = sum(len(moe_layer.replay_backward_list) for moe_layer in self.moe_layers)
            if recompute and left:
                raise RoutingError(
                    f"{left} layers were not recomputed with the replayed routing. Switch off recompute."
                )
        finally:
            self._clear()

    def aim(self, ids: Integer[Tensor, "rows time moe_layer k"], unknown: int) -> None:
        """Routes of the micro-batch whose forward comes next, at this stage's MoE layers; `unknown` routes freely."""
        ranks, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        for moe_layer, targets in zip(self.moe_layers, ids.permute(2, 1, 0, 3), strict=True):
            targets = targets.chunk(ranks)[rank]  # sequence parallel: a rank sees its part of the tokens
            targets = targets.flatten(0, 1).to(self.device, torch.int64)
            moe_layer.set_target_indices(targets.masked_fill(targets == unknown, -1))
            moe_layer.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def taken(self, rows: int, *, preferred: bool) -> tuple[Tensor, Tensor | None]:
        """After that forward: ids used, on request ids preferred, [MoE layer, time, rows, k], this rank's part. From
        here on, until the next micro-batch, a router that runs again is recomputed."""
        for moe_layer in self.moe_layers:
            moe_layer.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        narrow = torch.uint8 if self.num_experts <= 256 else torch.int16

        def stack(kind: str) -> Tensor:
            return torch.stack(
                [getattr(moe_layer, kind).to(narrow).unflatten(0, (-1, rows)) for moe_layer in self.moe_layers]
            )

        return stack("target_topk_idx"), stack("preferred") if preferred else None

    def _clear(self) -> None:
        for moe_layer in self.moe_layers:
            moe_layer.clear_indices()
            moe_layer.clear_router_replay_action()


def gather_rows(parts: list[Tensor], sizes: Sequence[int] | None) -> Tensor:
    """What `Routers.taken` gave for every micro-batch, as [batch, time, MoE layer, …] on every rank. `sizes` as
    there."""
    mine = torch.stack(parts)  # [micro-batch, MoE layer, time, rows, …]
    mine = gather(mine, 2, ps.get_tensor_model_parallel_group())
    mine = gather(mine, 1, ps.get_pipeline_model_parallel_group(), sizes)
    mine = gather(mine, 0, ps.get_data_parallel_group())
    return mine.movedim((0, 3), (0, 1)).flatten(0, 1).transpose(1, 2)


def require_routes(batch: Rollouts, routes: RoutingTrace, layout: Layout) -> None:
    """Raise RoutingError for routes that do not belong to this model or these tokens, or that know nothing."""
    layout.require(routes.layout, "the trace")
    if routes.keep or routes.gates is not None:
        raise RoutingError(
            "Megatron-core replays all ids and no gate weights. For soft replay and recall, use policy='hf'."
        )
    time, followed = batch.tokens.shape[1] - 1, _followed(batch)
    if routes.tokens is not None:
        same = (routes.tokens[:, :time] == batch.tokens[:, :time]) | ~followed
        if routes.tokens.shape != batch.tokens.shape or not bool(same.all()):
            raise RoutingError("the trace is of other tokens than the batch. Align the paddings first.")
    rows = zip(routes.experts[:, :time], followed, strict=True)  # one by one: nothing as large as the whole is made
    if not any(bool((row[here] != layout.unknown).any()) for row, here in rows):
        raise RoutingError("the trace contains no known routing, so replay would do nothing")


def own_targets(
    batch: Rollouts,
    routes: RoutingTrace | None,
    layout: Layout,
    rows: Integer[Tensor, " rows"],
    layers: slice,
    width: int,
) -> Integer[Tensor, "rows width moe_layer k"]:
    """Ids to force at some rows of the batch and the MoE layers of one stage, unknown where a router decides: this
    rank's part of the routes, and nothing more."""
    shape = len(rows), width, len(layout.moe_layers[layers]), layout.top_k
    if routes is None:
        return torch.full((1, 1, 1, 1), layout.unknown, dtype=layout.dtype).expand(shape)
    ids, followed = torch.full(shape, layout.unknown, dtype=layout.dtype), _followed(batch)
    for mine, row in zip(ids, rows.tolist(), strict=True):
        here = followed[row].cpu()
        mine[: len(here)][here] = routes.experts[row, : len(here), layers].cpu()[here]
    return ids


def shared_trace(
    parts: list[Tensor], batch: Rollouts, layout: Layout, sizes: Sequence[int] | None = None
) -> RoutingTrace:
    """What `Routers.taken` gave for every micro-batch of every rank as a trace over the batch, unknown where no token
    follows; collective. A machine holds the ids once; a few rows of them at a time are on the way."""
    ids, fills = one_per_machine((*batch.tokens.shape, len(layout.moe_layers), layout.top_k), layout.dtype)
    if fills:
        ids.fill_(layout.unknown)
    size, followed, world = parts[0].shape[2], _followed(batch).cpu(), ps.get_data_parallel_world_size()
    step = max(1, CHUNK // (world * ids[:1].nbytes))
    for number, part in enumerate(parts):
        for start in range(0, size, step):
            chunk = gather_rows([part[:, :, start : start + step]], sizes)
            for rank, block in enumerate(chunk.chunk(world) if fills else ()):
                first = (rank * len(parts) + number) * size + start
                here = followed[first : first + len(block)]  # none of the rows that only fill up
                ids[first : first + len(here), :-1][here] = (
                    block[: len(here), : here.shape[1]].cpu().to(layout.dtype)[here]
                )
    dist.barrier()
    ids = ids.to(batch.tokens.device)
    return RoutingTrace.from_ids(ids, layout, tokens=batch.tokens, attention_mask=batch.attention_mask, check=False)


def _followed(batch: Rollouts) -> Bool[Tensor, "batch time"]:
    """The last token of a row is never an input, and padding decides nothing."""
    return batch.attention_mask[:, 1:]
