"""Weights between Hugging Face names and Megatron-core, whatever the layout; nothing is ever held twice in full.

Both ways go through the model layer by layer, in the same order on every rank. In: rank 0 sends each full tensor, every
rank keeps its part. Out: the parts are gathered inside the pipeline stage that has them, then sent to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.errors import ConfigError

Way = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Weight:
    """Some Hugging Face tensors and the Megatron parameters that hold them on this rank."""

    names: tuple[str, ...]
    """Hugging Face names."""
    stage: int
    """Pipeline stage that holds them."""
    parameters: tuple[Tensor, ...]
    """This rank's part; empty on other stages."""
    put: Way
    """Full tensors → this rank's part, one per parameter."""
    take: Way
    """This rank's parts → full tensors. Collective inside the stage."""


LAYER: tuple[tuple[str, str, Any], ...] = (
    ("input_layernorm.weight", "input_layernorm.weight", None),
    ("self_attn.{q,k,v}_proj.weight", "self_attention.linear_qkv.weight", "heads"),
    ("self_attn.{q,k,v}_proj.bias", "self_attention.linear_qkv.bias", "heads"),
    ("self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", 0),  # of latent attention, which has no k_proj
    ("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", None),
    ("self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight", None),
    ("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", 0),
    ("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", None),
    ("self_attn.kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", None),
    ("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", 0),
    ("self_attn.o_proj.weight", "self_attention.linear_proj.weight", 1),
    ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", None),
    ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", None),
    ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", None),
    ("mlp.{gate,up}_proj.weight", "mlp.linear_fc1.weight", "halves"),
    ("mlp.down_proj.weight", "mlp.linear_fc2.weight", 1),
    ("mlp.gate.weight", "mlp.router.weight", None),
    ("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", None),
    ("mlp.experts.gate_up_proj", "mlp.experts.local_experts.linear_fc1.weight", "experts' halves"),
    ("mlp.experts.down_proj", "mlp.experts.local_experts.linear_fc2.weight", "experts"),
    *(
        (f"mlp.{shared}.{{gate,up}}_proj.weight", "mlp.shared_experts.linear_fc1.weight", "halves")
        for shared in ("shared_experts", "shared_expert")
    ),
    *(
        (f"mlp.{shared}.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", 1)
        for shared in ("shared_experts", "shared_expert")
    ),
    ("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", None),
)
"""Every tensor that a decoder layer of any family may have: Hugging Face names, of which {several} make one parameter,
Megatron's name, and how it is cut: not at all, along an axis over the tensor-parallel ranks, or in a way of its own."""


class WeightMap:
    """The table of one model: every Hugging Face tensor, with its full shape, and where it lives."""

    def __init__(self, model: Any, like: Mapping[str, Tensor], pp: int, layers: int):
        """`like`: the Hugging Face state dict, for names, shapes and dtypes alone. Raises ConfigError where a tensor on
        either side has no partner on the other."""
        from megatron.core import parallel_state as ps

        self.model = model
        self.like = {name: torch.empty_like(tensor, device="meta") for name, tensor in like.items()}
        self.layers, self.per_stage, self.stages = layers, layers // pp, pp
        self.stage = ps.get_pipeline_model_parallel_rank()
        self.pipeline = ps.get_pipeline_model_parallel_group()
        self.groups = {
            "tp": ps.get_tensor_model_parallel_group(),
            "etp": ps.get_expert_tensor_parallel_group(),
            "ep": ps.get_expert_model_parallel_group(),
        }
        table = list(self._table())
        mine = {id(parameter) for weight in table for parameter in weight.parameters}
        left = [name for name in self.like if not any(name in weight.names for weight in table)]
        left += [name for name, parameter in model.named_parameters() if id(parameter) not in mine]
        if left:
            raise ConfigError(
                f"policy='megatron' cannot map {', '.join(left[:5])} ({len(left)} tensors). Use policy='hf'."
            )

    # ------------------------------------------------------------------ both ways
    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor] | None) -> None:
        """Take over weights; only rank 0 needs to have them."""
        for weight in self._table():
            full = [self._send(None if weights is None else weights[name], name) for name in weight.names]
            if weight.parameters:
                for mine, part in zip(weight.parameters, weight.put(full), strict=True):
                    if mine.shape != part.shape:  # which copy_ would stretch
                        raise ConfigError(
                            f"{weight.names} has shape {tuple(part.shape)} on this rank, but "
                            f"Megatron-core's parameter has {tuple(mine.shape)}"
                        )
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
                    tensor = torch.empty_like(self.like[name], device=device)
                if self.stages > 1:
                    source = dist.get_global_rank(self.pipeline, weight.stage)
                    dist.broadcast(tensor := tensor.contiguous(), source, group=self.pipeline)
                yield name, tensor

    def _send(self, tensor: Tensor | None, name: str) -> Tensor:
        device = next(self.model.parameters()).device
        if tensor is None:
            tensor = torch.empty_like(self.like[name], device=device)
        tensor = tensor.detach().to(device, self.like[name].dtype).contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    # ------------------------------------------------------------------ the table
    def _table(self) -> Iterator[Weight]:
        """Every weight in forward order, the same on every rank."""
        model, last = self.model, self.stages - 1
        yield self._weight(("model.embed_tokens.weight",), 0, "embedding.word_embeddings.weight", 0, model)
        for number in range(self.layers):
            stage, local = divmod(number, self.per_stage)
            layer = model.decoder.layers[local] if stage == self.stage else None
            done: set[str] = set()
            for pattern, at, cut in LAYER:
                names = _names(f"model.layers.{number}.{pattern}")
                if done.isdisjoint(names) and all(name in self.like for name in names):
                    done.update(names)
                    yield self._weight(names, stage, at, cut, layer)
        yield self._weight(("model.norm.weight",), last, "decoder.final_layernorm.weight", None, model)
        # Tied embeddings are one parameter on one stage, and a second copy on the last of several.
        yield self._weight(("lm_head.weight",), last, "", 0, model)

    def _weight(self, names: tuple[str, ...], stage: int, at: str, cut: int | str | None, owner: Any) -> Weight:
        """Hugging Face tensors and their Megatron parameters: the parameter `at` of `owner`, or one of each expert."""
        put, take = self._cut(cut, [self.like[name].shape[0] for name in names])
        if stage != self.stage:
            return Weight(names, stage, (), put, take)
        head, experts, tail = at.partition("local_experts.")
        if experts:
            mine = tuple(attrgetter(tail)(expert) for expert in attrgetter(head + "local_experts")(owner))
        elif at:
            mine = (attrgetter(at)(owner),)
        else:
            tied = self.model.share_embeddings_and_output_weights
            mine = (owner.shared_embedding_or_output_weight() if tied else owner.output_layer.weight,)
        return Weight(names, stage, mine, put, take)

    def _cut(self, cut: int | str | None, rows: list[int]) -> tuple[Way, Way]:
        """How full tensors, of so many rows, become this rank's part, and the parts full tensors."""
        part, join = self._part, self._join
        if cut is None:
            return list, list
        if isinstance(cut, int):
            return lambda full: [part(full[0], cut, "tp")], lambda parts: [join(parts[0], cut, "tp")]
        if cut == "heads":  # one matrix, key-value group after group: [queries …, key, value]
            groups = self.model.config.num_query_groups
            return (
                lambda full: [part(torch.cat([x.unflatten(0, (groups, -1)) for x in full], 1).flatten(0, 1), 0, "tp")],
                lambda parts: [
                    x.flatten(0, 1)
                    for x in join(parts[0], 0, "tp").unflatten(0, (groups, -1)).split([n // groups for n in rows], 1)
                ],
            )
        if cut == "halves":  # gate and up, each cut, one above the other
            return (
                lambda full: [torch.cat([part(half, 0, "tp") for half in full])],
                lambda parts: [join(half, 0, "tp") for half in parts[0].chunk(2)],
            )
        if cut == "experts":  # spread over ep, each cut along its input
            return (
                lambda full: list(part(part(full[0], 0, "ep"), 2, "etp")),
                lambda parts: [join(join(torch.stack(parts), 2, "etp"), 0, "ep")],
            )
        return (
            lambda full: list(torch.cat([part(x, 1, "etp") for x in part(full[0], 0, "ep").chunk(2, 1)], 1)),
            lambda parts: [join(torch.cat([join(x, 1, "etp") for x in torch.stack(parts).chunk(2, 1)], 1), 0, "ep")],
        )

    # ------------------------------------------------------------------ parts
    def _part(self, full: Tensor, axis: int, group: str) -> Tensor:
        ranks = self.groups[group]
        return full.chunk(dist.get_world_size(ranks), axis)[dist.get_rank(ranks)]

    def _join(self, part: Tensor, axis: int, group: str) -> Tensor:
        return gather(part, axis, self.groups[group])


def _names(pattern: str) -> tuple[str, ...]:
    """`a.{b,c}.d` → `a.b.d`, `a.c.d`."""
    head, _, rest = pattern.partition("{")
    inside, _, tail = rest.partition("}")
    return tuple(head + word + tail for word in inside.split(","))


def gather(part: Tensor, axis: int, group: dist.ProcessGroup, sizes: Sequence[int] | None = None) -> Tensor:
    """The parts of all ranks of a group, equal or of these sizes, joined along `axis`."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return part
    sizes = sizes or [part.shape[axis]] * ranks
    if part.shape[axis] < max(sizes):
        filling = list(part.shape)
        filling[axis] = max(sizes) - part.shape[axis]
        part = torch.cat([part, part.new_zeros(filling)], axis)
    parts = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat([p.narrow(axis, 0, size) for p, size in zip(parts, sizes, strict=True)], axis)
