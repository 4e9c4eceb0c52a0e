"""What may be different in the engine, each as something that the trainer's model can be made to do for one forward.

A hypothesis changes the model inside a scope (routers, weights), the tokens that it reads, or their positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_rl.analysis.diagnose.responses import Response, count_turns
from moe_rl.analysis.diagnose.scopes import (
    Scope,
    change_routers,
    change_weights,
    flip_renormalising,
    select_matrices,
    select_routers,
    select_shared_experts,
    take_weights,
)
from moe_rl.policies.hf import BIAS
from moe_rl.rollouts.mismatch import to_int8_and_back
from moe_rl.routing.moe_layers import RoutingModule, find_moe_layers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""


Ids = tuple[int, ...]


@dataclass(frozen=True)
class Hypothesis:
    """One thing that the engine may do otherwise. Several forms of one cause share its name."""

    cause: str
    """A row of CAUSES."""
    name: str
    """The name of its row in the table of tests."""
    model: Scope = nullcontext
    detail: str = ""
    """What the sentence of the cause has in place of {}."""
    tokens: Callable[[Response], Response] | None = None
    positions: Callable[[Response], NDArray] | None = None
    """Other positions of the tokens of a response."""
    late: bool = False
    """Whether it is tried only where nothing else explains the gap: one of a forward per layer."""


def list_hypotheses(
    model: nn.Module,
    responses: Sequence[Response],
    tokenizer: PreTrainedTokenizerBase | None,
    also: dict[str, nn.Module],
) -> list[Hypothesis]:
    """Every hypothesis that would change something about this model and these responses."""
    return [
        *_round_routers(model),
        *_change_gates(model),
        *_count_experts(model),
        *_change_matrices(model),
        *_push_weights(model, also),
        *_change_prompts(responses, tokenizer),
        *_move_positions(responses),
    ]


def _round_routers(model: nn.Module) -> Iterator[Hypothesis]:
    own = {p.dtype for p in select_routers(model)}
    if own != {torch.float32}:
        yield Hypothesis("router_fp32", "routers in float32", change_routers(lambda spec: None, torch.float32))
    if own != {torch.bfloat16}:
        rounded = change_weights(select_routers, Tensor.bfloat16)
        yield Hypothesis("router_bf16", "router weights in bfloat16", rounded, "rounded to")
        computed = change_routers(lambda spec: None, torch.bfloat16)
        yield Hypothesis("router_bf16", "routers computed in bfloat16", computed, "computed in")
    for name, int8 in (("by row", to_int8_and_back), ("by tensor", _to_int8_by_tensor)):
        yield Hypothesis("router_int8", f"routers in int8, {name}", change_weights(select_routers, int8), name)
    for name, axis in (("by tensor", None), ("by row", -1), ("unscaled", 0)):
        fp8 = change_weights(select_routers, partial(to_fp8_and_back, axis=axis))
        yield Hypothesis("router_fp8", f"routers in fp8, {name}", fp8, name)


def _change_gates(model: nn.Module) -> Iterator[Hypothesis]:
    modules, selectors = zip(*((spec.module, spec.selector) for spec in find_moe_layers(model)), strict=True)
    if any(bool(getattr(m, BIAS).any()) for m in modules if isinstance(getattr(m, BIAS, None), Tensor)):
        without = change_routers(lambda spec: getattr(spec.module, BIAS).zero_())
        yield Hypothesis("lost_bias", "correction bias lost", without)
    if (renormalises := _renormalises(selectors)) is not None:
        cause, name = ("gates_raw", "raw") if renormalises else ("gates_renormalised", "renormalised")
        other = change_routers(lambda spec: flip_renormalising(spec.selector, renormalises))
        yield Hypothesis(cause, f"combine weights {name}", other)
    if any(getattr(m, "routed_scaling_factor", 1.0) != 1.0 for m in selectors):
        yield Hypothesis("lost_scaling", "routed scaling factor lost", change_routers(partial(_scale, power=0)))
        yield Hypothesis("scaled_twice", "routed scaling factor twice", change_routers(partial(_scale, power=2)))


def _renormalises(modules: Sequence[nn.Module]) -> bool | None:
    """Whether the routers renormalise their combine weights; None where that is not known or cannot be changed."""
    values = {getattr(m, "norm_topk_prob", None) for m in modules}
    if values <= {True, False}:
        return values == {True} if len(values) == 1 else None
    always = {"MixtralTopKRouter", "GptOssTopKRouter", "GraniteMoeTopKRouter"}
    return True if all(type(m).__name__ in always for m in modules) else None


def _scale(spec: RoutingModule, power: int) -> None:
    selector: Any = spec.selector
    selector.routed_scaling_factor = selector.routed_scaling_factor**power


def _count_experts(model: nn.Module) -> Iterator[Hypothesis]:
    """Another number of experts per token, where the router keeps that number itself."""
    moe_layers = find_moe_layers(model)
    used = {getattr(spec.selector, "top_k", None) for spec in moe_layers}
    k, least = used.pop(), min(spec.moe_layer.num_experts for spec in moe_layers)
    if used or not isinstance(k, int):
        return
    for count in sorted({k - 1, k + 1, 2 * k, k // 2} - {k}):
        if 1 <= count < least:
            detail = f"{count} experts per token, the trainer {k}"
            yield Hypothesis("top_k", f"top {count} experts", change_routers(partial(_use, count)), detail)


def _use(count: int, spec: RoutingModule) -> None:
    selector: Any = spec.selector
    selector.top_k = count


def _change_matrices(model: nn.Module) -> Iterator[Hypothesis]:
    yield Hypothesis("int8", "all matrices in int8, but routers", change_weights(select_matrices, to_int8_and_back))
    yield Hypothesis("fp8", "all matrices in fp8, but routers", change_weights(select_matrices, to_fp8_and_back))
    if select_shared_experts(model):
        without = change_weights(select_shared_experts, torch.zeros_like)
        yield Hypothesis("shared_expert", "without the shared expert", without)


def _push_weights(model: nn.Module, also: dict[str, nn.Module]) -> Iterator[Hypothesis]:
    parts: dict[str, Callable[[str], bool]] = {
        "head": lambda n: n.startswith("lm_head."),
        "embedding": lambda n: "embed_tokens" in n or "wte" in n,
        "routers": _is_router,
        "experts": lambda n: "experts" in n.split("."),
    }
    names = "\n".join(n for n, _ in model.named_parameters())
    layers = sorted(set(re.findall(r"(?:^|\.)layers\.(\d+)\.", names, re.M)), key=int)
    for name, other in also.items():
        weights = take_weights(other, lambda n: True)
        yield Hypothesis("weight_version", f"weights of {name}", weights, f"the weights of {name}")
        for part, picks in parts.items():
            yield Hypothesis(f"{part}_not_pushed", f"{part} of {name}", take_weights(other, picks), name)
        for layer in layers:
            stale = take_weights(other, partial(_contains, f"layers.{layer}."))
            yield Hypothesis("layer_not_pushed", f"layer {layer} of {name}", stale, f"{layer} of {name}", late=True)


def _contains(part: str, name: str) -> bool:
    return part in name


def _is_router(name: str) -> bool:
    return any(f".{part}." in f".{name}." for part in ("gate", "router")) and "experts" not in name.split(".")


# ---------------------------------------------------------------------- what the engine reads
def _change_prompts(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Hypothesis]:
    bos, special = getattr(tokenizer, "bos_token_id", None), set(getattr(tokenizer, "all_special_ids", ()))
    longest = max((r.prompt for r in responses), default=0)
    changes: list[tuple[str, str, str, Callable[[Ids], Ids]]] = []
    if bos is not None:
        changes = [
            ("bos", "BOS in front", "behind a BOS token that the file lacks", lambda ids: (bos, *ids)),
            ("bos", "BOS dropped", "without its BOS token", lambda ids: ids[ids[0] == bos :]),
        ]
    without_special = ("special_tokens", "special tokens of the prompt skipped", "")
    changes.append((*without_special, lambda ids: tuple(t for t in ids if t not in special)))
    for cut in (1, 2, 4):
        detail = f"{cut} tokens" if cut > 1 else "token"
        changes.append(("prompt_cut", f"first {detail} of the prompt dropped", detail, partial(_cut, cut)))
    pads = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0)
    for pad in dict.fromkeys(pad for pad in pads if pad is not None):
        name = f"padded on the left with token {pad}, visible"
        changes.append(("visible_padding", name, "", partial(_pad, pad, longest)))
    read = [[r.tokens for r in responses]]
    for cause, name, detail, change in changes:
        with_prompt = partial(_with_prompt, change)
        tokens = [with_prompt(r).tokens for r in responses]
        if tokens not in read:
            read.append(tokens)
            yield Hypothesis(cause, name, detail=detail, tokens=with_prompt)


def _cut(count: int, ids: Ids) -> Ids:
    return ids[count:]


def _pad(pad: int, length: int, ids: Ids) -> Ids:
    return (*[pad] * (length - len(ids)), *ids)


def _with_prompt(change: Callable[[Ids], Ids], response: Response) -> Response:
    """After another prompt; unchanged where that would have no token."""
    prompt = change(response.tokens[: response.prompt]) or response.tokens[: response.prompt]
    tokens = (*prompt, *response.tokens[response.prompt :])
    return replace(response, tokens=tokens, prompt=len(prompt), ids=None, gates=None)


def _move_positions(responses: Sequence[Response]) -> Iterator[Hypothesis]:
    longest = max((r.prompt for r in responses), default=0)
    for shift, detail in ((1, "high"), (-1, "low")):
        name = f"positions of the response {shift:+d}"
        yield Hypothesis("positions", name, detail=detail, positions=partial(_move, shift))
    if any((_restart(r) != np.arange(len(r.tokens))).any() for r in responses):
        yield Hypothesis("positions_per_turn", "positions from 0 in every turn", positions=_restart)
    if any(r.prompt < longest for r in responses):
        name = "positions of the response after padding"
        yield Hypothesis("positions_of_padding", name, positions=lambda r: _move(longest - r.prompt, r))


def _move(by: int, response: Response) -> NDArray:
    t = np.arange(len(response.tokens))
    return t + by * (t >= response.prompt)


def _restart(response: Response) -> NDArray:
    """Positions that begin again where the engine goes on after tokens of an environment."""
    t, turn = np.arange(len(response.tokens)), count_turns(response.logprobs)
    first = np.searchsorted(turn, turn) + response.prompt
    return t - np.r_[np.zeros(response.prompt, dtype=int), np.where(turn > 1, first, 0)]


# ---------------------------------------------------------------------- small parts
def _to_int8_by_tensor(weight: Tensor) -> Tensor:
    return to_int8_and_back(weight.reshape(1, -1)).view_as(weight)


def to_fp8_and_back(weight: Tensor, axis: int | None = None) -> Tensor:
    """Rounded to e4m3, with the largest |w| of a row (`axis` -1) or of the tensor (None) at 448; unscaled with `axis`
    0."""
    if axis == 0:
        return weight.to(torch.float8_e4m3fn).float()
    largest = weight.abs().amax() if axis is None else weight.abs().amax(-1, keepdim=True)
    scale = (largest / FP8_MAX).clamp(min=1e-12)
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale
