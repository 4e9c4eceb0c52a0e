"""Weights between Hugging Face names and Megatron-core, whatever the layout; nothing is ever held twice in full.

Both ways go through the model layer by layer, in the same order on every rank. In: rank 0 sends each full tensor, every
rank keeps its part. Out: the parts are gathered inside the pipeline stage that has them, then sent to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """Some Hugging Face tensors and the Megatron parameters that hold them on this rank."""

    names: tuple[str, ...]
    """Hugging Face names."""
    stage: int
    """Pipeline stage that holds them."""
    parameters: tuple[Tensor, ...]
    """This rank's part; empty on other stages."""
    put: Callable[[list[Tensor]], list[Tensor]]
    """Full tensors → this rank's part, one per parameter."""
    take: Callable[[list[Tensor]], list[Tensor]]
    """This rank's parts → full tensors. Collective inside the stage."""


class WeightMap:
    """The table of one model: every Hugging Face tensor, with its full shape, and where it lives."""

    def __init__(self, model: Any, shapes: Mapping[str, torch.Size], pp: int, layers: int):
        from megatron.core import parallel_state as ps

        self.model, self.shapes = model, shapes
        self.layers, self.per_stage, self.stages = layers, layers // pp, pp
        self.stage = ps.get_pipeline_model_parallel_rank()
        self.pipeline = ps.get_pipeline_model_parallel_group()
        self.groups = {
            "tp": ps.get_tensor_model_parallel_group(),
            "etp": ps.get_expert_tensor_parallel_group(),
            "ep": ps.get_expert_model_parallel_group(),
        }

    # ------------------------------------------------------------------ both ways
    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor] | None) -> None:
        """Take over weights; only rank 0 needs to have them."""
        for weight in self._table():
            full = [self._send(None if weights is None else weights[name], name) for name in weight.names]
            if weight.parameters:
                for mine, part in zip(weight.parameters, weight.put(full), strict=True):
                    mine.copy_(part)

    @torch.no_grad()
    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full tensors, on every rank. Collective: every rank must go through to the end."""
        device = next(self.model.parameters()).device
        for weight in self._table():
            mine = [parameter.detach() for parameter in weight.parameters]
            full: Sequence[Tensor | None] = weight.take(mine) if mine else [None] * len(weight.names)
            for name, tensor in zip(weight.names, full, strict=True):
                if tensor is None:  # another stage has it
                    tensor = torch.empty(self.shapes[name], dtype=self._dtype(), device=device)
                if self.stages > 1:
                    source = dist.get_global_rank(self.pipeline, weight.stage)
                    dist.broadcast(tensor := tensor.contiguous(), source, group=self.pipeline)
                yield name, tensor

    def _send(self, tensor: Tensor | None, name: str) -> Tensor:
        device = next(self.model.parameters()).device
        if tensor is None:
            tensor = torch.empty(self.shapes[name], dtype=self._dtype(), device=device)
        tensor = tensor.detach().to(device, self._dtype()).contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    # ------------------------------------------------------------------ the table
    def _table(self) -> Iterator[Weight]:
        """Every weight in forward order, the same on every rank."""
        model, last = self.model, self.stages - 1
        yield self._cut("model.embed_tokens.weight", 0, lambda: model.embedding.word_embeddings.weight, 0)
        for number in range(self.layers):
            stage, local = divmod(number, self.per_stage)
            layer = model.decoder.layers[local] if stage == self.stage else None
            yield from self._layer(f"model.layers.{number}.", stage, layer)
        yield self._cut("model.norm.weight", last, lambda: model.decoder.final_layernorm.weight, None)
        yield self._cut("lm_head.weight", last, lambda: self._output_weight(), 0)

    def _output_weight(self) -> Tensor:
        """Tied embeddings are one parameter on one stage, and a second copy on the last of several."""
        tied = self.model.share_embeddings_and_output_weights
        return self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight

    def _layer(self, at: str, stage: int, layer: Any) -> Iterator[Weight]:
        """Of one of Megatron's layers; None on the other stages."""
        yield self._cut(at + "input_layernorm.weight", stage, lambda: layer.input_layernorm.weight, None)
        yield self._attention(at + "self_attn.", stage, layer and layer.self_attention)
        yield self._cut(at + "self_attn.o_proj.weight", stage, lambda: layer.self_attention.linear_proj.weight, 1)
        for head in "qk":
            if at + f"self_attn.{head}_norm.weight" in self.shapes:
                norm = partial(attrgetter(f"self_attention.{head}_layernorm.weight"), layer)
                yield self._cut(at + f"self_attn.{head}_norm.weight", stage, norm, None)
        yield self._cut(at + "post_attention_layernorm.weight", stage, lambda: layer.pre_mlp_layernorm.weight, None)
        yield self._cut(at + "mlp.gate.weight", stage, lambda: layer.mlp.router.weight, None)
        experts = () if layer is None else tuple(layer.mlp.experts.local_experts)
        yield self._experts(at + "mlp.experts.gate_up_proj", stage, [e.linear_fc1.weight for e in experts], gated=True)
        yield self._experts(at + "mlp.experts.down_proj", stage, [e.linear_fc2.weight for e in experts], gated=False)

    def _cut(self, name: str, stage: int, parameter: Callable[[], Tensor], axis: int | None) -> Weight:
        """One tensor, cut along `axis` over the tensor-parallel ranks; None: every rank has all of it."""
        mine = (parameter(),) if stage == self.stage else ()
        if axis is None:
            return Weight((name,), stage, mine, put=list, take=list)
        return Weight(
            (name,),
            stage,
            mine,
            put=lambda full: [self._part(full[0], axis, "tp")],
            take=lambda parts: [self._whole(parts[0], axis, "tp")],
        )

    def _attention(self, at: str, stage: int, attention: Any) -> Weight:
        """Queries, keys and values: one matrix in Megatron, key-value group after group: [queries …, key, value]."""
        names = tuple(f"{at}{head}_proj.weight" for head in "qkv")
        rows = [self.shapes[name][0] for name in names]

        def put(full: list[Tensor]) -> list[Tensor]:
            groups = attention.config.num_query_groups
            joined = torch.cat([w.view(groups, -1, w.shape[1]) for w in full], 1).flatten(0, 1)
            return [self._part(joined, 0, "tp")]

        def take(parts: list[Tensor]) -> list[Tensor]:
            groups = attention.config.num_query_groups
            joined = self._whole(parts[0], 0, "tp").unflatten(0, (groups, -1))
            return [w.flatten(0, 1) for w in joined.split([n // groups for n in rows], 1)]

        return Weight(names, stage, () if attention is None else (attention.linear_qkv.weight,), put, take)

    def _experts(self, name: str, stage: int, mine: list[Tensor], gated: bool) -> Weight:
        """All experts of a layer: spread over ep, each cut over etp (gate and up apart, or down along its input)."""

        def put(full: list[Float[Tensor, "expert out in"]]) -> list[Tensor]:
            local = self._part(full[0], 0, "ep")
            if not gated:
                return list(self._part(local, 2, "etp"))
            return list(torch.cat([self._part(half, 1, "etp") for half in local.chunk(2, 1)], 1))

        def take(parts: list[Tensor]) -> list[Tensor]:
            local = torch.stack(parts)
            if gated:
                local = torch.cat([self._whole(half, 1, "etp") for half in local.chunk(2, 1)], 1)
            else:
                local = self._whole(local, 2, "etp")
            return [self._whole(local, 0, "ep")]

        return Weight((name,), stage, tuple(mine), put, take)

    # ------------------------------------------------------------------ parts
    def _part(self, full: Tensor, axis: int, group: str) -> Tensor:
        ranks = self.groups[group]
        return full.chunk(dist.get_world_size(ranks), axis)[dist.get_rank(ranks)]

    def _whole(self, part: Tensor, axis: int, group: str) -> Tensor:
        return gather(part, axis, self.groups[group])


def gather(part: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """The equal parts of all ranks of a group, joined along `axis`."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return part
    parts = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)
