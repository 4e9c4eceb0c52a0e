"""verl's jagged fields and our tensors: `routed_experts`, the tokens that decide a response, and a batch for sources.

verl keeps the tokens of a micro-batch one after another; `tokens` is that axis. `routed_experts` is jagged, int16,
[batch, time, decoder layer, k]. The engine of a rollout writes zeros where it knows no route; our records write -1.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from jaxtyping import Bool, Integer
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from moe_rl.errors import RoutingError
from moe_rl.routing import Layout, RoutingTrace

ROUTES = "routed_experts"
MARK = -2
"""At the last token of every sequence that `write_routes` wrote: a replay needs no route there."""


def padded_mask(fields: TensorDict) -> Bool[Tensor, "batch time"]:
    """True at the tokens of right-padded sequences."""
    lengths = fields["input_ids"].offsets().diff()
    return torch.arange(int(lengths.max()), device=lengths.device)[None] < lengths[:, None]


def real_inputs(fields: TensorDict, input_ids: Integer[Tensor, "batch time"]) -> Bool[Tensor, "batch time"]:
    """Where inputs of a forward are real tokens: right-padded sequences, or one row of packed ones, then padding."""
    if not tu.get_non_tensor_data(data=fields, key="use_remove_padding", default=True):
        return padded_mask(fields)
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None] < len(fields["input_ids"].values())


def spread(flat: Tensor, mask: Bool[Tensor, "batch time"], blank: float = 0) -> Tensor:
    """The rows of `flat`, one per token, at the True entries of `mask`; `blank` elsewhere."""
    full = flat.new_full((*mask.shape, *flat.shape[1:]), blank)
    full[mask] = flat
    return full


def response_tokens(fields: TensorDict) -> Bool[Tensor, " tokens"]:
    """Tokens of the policy that the loss is about. verl's mask covers whole sequences or responses alone."""
    ends, mask = fields["input_ids"].offsets()[1:].tolist(), fields["loss_mask"]
    tokens = torch.zeros_like(fields["input_ids"].values(), dtype=torch.bool)
    if mask.is_nested and len(mask.values()) == len(tokens):
        return mask.values().bool()
    if mask.is_nested or fields["responses"].is_nested:
        sizes = (mask if mask.is_nested else fields["responses"]).offsets().diff().tolist()
    else:
        sizes = fields["attention_mask"][:, fields["prompts"].shape[1] :].sum(1).tolist()
    for end, size, row in zip(ends, sizes, mask.unbind(), strict=True):
        tokens[end - size : end] = row[:size].bool()
    return tokens


def deciding_tokens(fields: TensorDict) -> Bool[Tensor, " tokens"]:
    """Inputs whose next token is one of the policy's own."""
    decides = response_tokens(fields).roll(-1)
    decides[fields["input_ids"].offsets()[1:] - 1] = False
    return decides


def counted_tokens(fields: TensorDict) -> Bool[Tensor, " tokens"]:
    """Inputs of sequences that have a response, without the last token. verl fills batches up with empty sequences."""
    decides = deciding_tokens(fields)
    lengths = fields["input_ids"].offsets().diff().tolist()
    counted = torch.cat([torch.ones_like(row) & row.any() for row in decides.split(lengths)])
    counted[fields["input_ids"].offsets()[1:] - 1] = False
    return counted


def write_routes(ids: Integer[Tensor, "tokens moe_layer k"], layout: Layout, layers: int, fields: TensorDict) -> Tensor:
    """verl's field with ids in the dtype of `layout`; decoder layers that do not route have zeros."""
    wide = ids.new_zeros((len(ids), layers, layout.top_k), dtype=torch.int16)
    moe_layers = [moe_layer.decoder_layer for moe_layer in layout.moe_layers]
    wide[:, moe_layers] = ids.to(torch.int16).masked_fill(ids == layout.unknown, -1)
    wide[fields["input_ids"].offsets()[1:] - 1] = MARK
    return torch.nested.nested_tensor_from_jagged(wide, fields["input_ids"].offsets())


def read_routes(
    fields: TensorDict, layout: Layout, layers: int, reported: bool
) -> Integer[Tensor, "tokens moe_layer k"]:
    """The ids of verl's field in the dtype of `layout`. A row with an expert twice is unknown; so is the last token of
    a sequence whose routes the engine of a rollout `reported`. Raises RoutingError for a missing field, for another
    shape, for routes of another source and for ids that no router has."""
    if ROUTES not in fields:
        raise RoutingError(
            f"the batch of verl has no {ROUTES!r} to replay. For those of the rollout, set rollout."
            "enable_rollout_routing_replay=True, with an engine that reports routes; for those of the old policy, set "
            "algorithm.rollout_correction.bypass_mode=False."
        )
    field, tokens = fields[ROUTES], fields["input_ids"]
    shape = (len(tokens.values()), layers, layout.top_k)
    if (
        not field.is_nested
        or tuple(field.values().shape) != shape
        or not torch.equal(field.offsets().to(tokens.device), tokens.offsets())
    ):
        actual = tuple(field.values().shape) if field.is_nested else tuple(field.shape)
        raise RoutingError(
            f"{ROUTES} has shape {actual}, not {shape}: jagged [tokens, decoder layers, experts per token]"
        )
    if not reported:
        ends = (tokens.offsets()[1:] - 1).tolist()
        for row, end in zip(field.unbind(), ends, strict=True):
            if bool((field.values()[end] != MARK).any()) and bool(row.any()):  # verl fills batches up with zeros
                raise RoutingError(
                    f"{ROUTES} contains the routing of the rollout. Set rollout.enable_rollout_routing_replay=False, "
                    "or router_replay.mode=R3 to replay it."
                )
    moe_layers = torch.tensor([moe_layer.decoder_layer for moe_layer in layout.moe_layers], device=field.device)
    flat = field.values().index_select(1, moe_layers).to(torch.int16)
    limits = torch.tensor([moe_layer.num_experts for moe_layer in layout.moe_layers], device=flat.device)
    if bool((flat >= limits[:, None]).any()):
        raise RoutingError(
            f"{ROUTES} contains the id {int(flat.max())}, but the model's routers have at most {int(limits.max())} "
            "experts. Give rollout and trainer the same model."
        )
    ordered = flat.sort(-1).values
    unknown = (flat[..., :1] < 0) | ((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any(-1, keepdim=True)
    unknown[tokens.offsets()[1:] - 1] |= reported
    flat = flat.masked_fill(unknown, -1)
    return flat.masked_fill(flat < 0, layout.unknown).to(layout.dtype)


def trace_of(
    ids: Integer[Tensor, "tokens moe_layer k"], layout: Layout, mask: Bool[Tensor, "batch time"]
) -> RoutingTrace:
    """The trace of a forward that reads the tokens at the True entries of `mask`."""
    return RoutingTrace.from_ids(spread(ids, mask, layout.unknown), layout, attention_mask=mask, check=False)


def sampled_of(fields: TensorDict, reported: RoutingTrace | None) -> SimpleNamespace:
    """What route sources read of a micro-batch (`routing.sources.Sampled`). Rows of equal prompts form a group."""
    mask = padded_mask(fields)
    tokens, response = spread(fields["input_ids"].values(), mask), spread(response_tokens(fields), mask)
    starts = torch.where(response.any(1), response.int().argmax(1), mask.sum(1)).tolist()
    prompts = [tuple(row[:start]) for row, start in zip(tokens.tolist(), starts, strict=True)]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    index = torch.tensor([numbers[prompt] for prompt in prompts], device=mask.device)
    return SimpleNamespace(tokens=tokens, prompt_index=index, rollout_routes=reported)
