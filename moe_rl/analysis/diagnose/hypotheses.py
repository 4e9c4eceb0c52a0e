"""What may be different in the engine, each as something that the trainer's model can be made to do for one forward.

A hypothesis changes the model inside a scope (routers, weights, dtypes, kernels), the tokens it reads, or their
positions; nothing of it is left behind.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moe_rl.analysis.diagnose.responses import Response, count_turns
from moe_rl.errors import ConfigError
from moe_rl.integrations.cpu_kernels.experts import NAME
from moe_rl.models.load import keep_routers_in
from moe_rl.policies.hf import BIAS
from moe_rl.rollouts.mismatch import to_int8_and_back
from moe_rl.routing.intercept import in_order
from moe_rl.routing.sites import RoutingModule, find_sites, router_matrices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scope = Callable[[nn.Module], AbstractContextManager[nn.Module]]
FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""
SOFTCAP = 30.0
"""Of the final logits of Gemma and Grok."""


@dataclass(frozen=True)
class Hypothesis:
    """One thing that the engine may do otherwise."""

    cause: str
    """A short name, for tests and scripts; hypotheses that are forms of the same thing share it."""
    name: str
    """What its row of the table is called."""
    says: str
    """A sentence: what it would mean."""
    model: Scope = nullcontext
    tokens: Callable[[Response], Response] | None = None
    positions: Callable[[Response], NDArray] | None = None
    """Other positions of the response's tokens."""
    late: bool = False
    """Whether it is tried only where nothing else explains the gap: one of a forward per layer."""
    fault: bool = True
    """Whether it is something to mend; a dtype or another kernel is not."""

    @property
    def target(self) -> str:
        """What it changes. Two of one target are never tried together: routers cannot be rounded in two ways."""
        return self.cause.partition("_")[0] if self.cause.startswith("router_") else self.cause


# ---------------------------------------------------------------------- what the engine may do otherwise
def list_hypotheses(
    model: nn.Module, responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase | None,
    also: dict[str, nn.Module],
) -> list[Hypothesis]:
    """Every hypothesis that would change something about this model and these responses."""
    return [*_routers(model), *_numerics(model), *_attention(model), *_windows(model, responses), *_softcap(model),
            *_versions(model, also), *_swapped_layers(model), *_tokens(responses, tokenizer), *_positions(responses)]


def _routers(model: nn.Module) -> Iterator[Hypothesis]:
    modules, selectors = zip(*((spec.module, spec.selector) for spec in find_sites(model)), strict=True)
    own = {p.dtype for spec in find_sites(model) for p in router_matrices(spec)}
    if own != {torch.float32}:
        yield Hypothesis("router_fp32", "routers in float32", "the engine keeps and computes its routers in float32",
                         change_routers(lambda spec: None, dtype=torch.float32), fault=False)
    if own != {torch.bfloat16}:
        yield Hypothesis("router_bf16", "router weights in bfloat16", "the engine's routers were rounded to bfloat16 "
                         "on their way to it", round_routers(lambda w: w.bfloat16()))
        yield Hypothesis("router_bf16", "routers computed in bfloat16", "the engine computes its routers in bfloat16",
                         change_routers(lambda spec: None, dtype=torch.bfloat16))
    yield Hypothesis("router_int8", "routers in int8, by row", "the engine's routers are quantised to int8",
                     round_routers(to_int8_and_back))
    yield Hypothesis("router_int8", "routers in int8, by tensor", "the engine's routers are quantised to int8",
                     round_routers(lambda w: to_int8_and_back(w.reshape(1, -1)).view_as(w)))
    for axis, name in ((None, "by tensor"), (-1, "by row"), (0, "unscaled")):
        yield Hypothesis("router_fp8", f"routers in fp8, {name}", "the engine's routers are quantised to fp8 (e4m3)",
                         round_routers(partial(to_fp8_and_back, axis=axis)))
    if any(bool(getattr(m, BIAS).any()) for m in modules if isinstance(getattr(m, BIAS, None), Tensor)):
        yield Hypothesis("lost_bias", "correction bias lost",
                         f"the engine chooses experts without the correction bias ({BIAS} is zero there)",
                         change_routers(lambda spec: getattr(spec.module, BIAS).zero_()))
    if (told := _renormalises(selectors)) is not None:
        yield Hypothesis("gates_raw" if told else "gates_renormalised",
                         f"combine weights {'raw' if told else 'renormalised'}",
                         "the engine does not renormalise its combine weights over the chosen experts; the trainer "
                         "does" if told else "the engine renormalises its combine weights over the chosen experts; the "
                         "trainer does not", change_routers(lambda spec: flip_renormalising(spec.selector, told)))
    if any(getattr(m, "routed_scaling_factor", 1.0) != 1.0 for m in selectors):
        yield Hypothesis("lost_scaling", "routed scaling factor lost",
                         "the engine leaves out the factor on routed experts (routed_scaling_factor)",
                         change_routers(lambda spec: setattr(spec.selector, "routed_scaling_factor", 1.0)))
    if told is not None and not any(hasattr(m, BIAS) for m in modules):
        yield Hypothesis("sigmoid", "combine weights by sigmoid", "the engine takes the sigmoid of router scores where "
                         "the trainer takes the softmax",
                         change_routers(lambda spec: spec.selector.register_forward_hook(partial(_sigmoid, told))))
    if shared := [x for n, x in model.named_parameters() if "shared_expert" in n and "down_proj" in n]:
        yield Hypothesis("shared_expert", "without the shared expert", "the engine leaves out the shared expert",
                         set_values(shared, [torch.zeros_like(x) for x in shared]))
    yield from _counts(selectors, [spec.site.num_experts for spec in find_sites(model)])


def _counts(modules: Sequence[nn.Module], experts: Sequence[int]) -> Iterator[Hypothesis]:
    """Another number of experts per token, where the router keeps that number itself."""
    used = {getattr(m, "top_k", None) for m in modules}
    k, least = used.pop(), min(experts)
    if used or not isinstance(k, int):
        return
    for count in sorted({k - 1, k + 1, 2 * k, k // 2} - {k}):
        if 1 <= count < least:
            says = f"the engine uses {count} experts per token, the trainer {k}"
            yield Hypothesis("top_k", f"top {count} experts", says,
                             change_routers(partial(_use, count=count)))


def _use(spec: RoutingModule, count: int) -> None:
    selector: Any = spec.selector
    selector.top_k = count


def _numerics(model: nn.Module) -> Iterator[Hypothesis]:
    own = next(model.parameters()).dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype != own:
            name = str(dtype).removeprefix("torch.")
            yield Hypothesis("dtype", f"all in {name}", f"the engine computes in {name}, the trainer in "
                             f"{str(own).removeprefix('torch.')}", cast_to(dtype), fault=False)
    current = getattr(model.config, "_experts_implementation", None)
    for name in ("eager", "grouped_mm"):
        if current not in (None, name) and hasattr(model, "set_experts_implementation"):
            yield Hypothesis("experts", f"experts by {name}", f"the engine sums experts as transformers' {name} does",
                             switch_experts(name), fault=False)
    yield Hypothesis("int8", "all matrices in int8, but routers", "the engine's matrices are quantised to int8 by row",
                     round_matrices(to_int8_and_back))
    yield Hypothesis("fp8", "all matrices in fp8, but routers", "the engine's matrices are quantised to fp8 by tensor",
                     round_matrices(to_fp8_and_back))


def _versions(model: nn.Module, also: dict[str, nn.Module]) -> Iterator[Hypothesis]:
    for name, other in also.items():
        yield Hypothesis("weight_version", f"weights of {name}", f"the engine samples with the weights of {name}",
                         take_weights(other, lambda n: True))
        for part, picks in PARTS.items():
            yield Hypothesis(f"{part}_not_pushed", f"{part} of {name}, the rest as given",
                             f"the engine has the {part} of {name} and the rest of the checkpoint: "
                             f"the {part} did not reach it", take_weights(other, picks))
        for layer in _layers(model):
            yield Hypothesis("layer_not_pushed", f"layer {layer} of {name}, the rest as given",
                             f"the engine has layer {layer} of {name} and the rest of the checkpoint",
                             take_weights(other, partial(_is_in_layer, layer)), late=True)


def _is_in_layer(layer: str, name: str) -> bool:
    return f"layers.{layer}." in name


def _layers(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """By number of the layer, its weights by their names within it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, x in model.named_parameters():
        if parts := re.search(r"(?:^|\.)layers\.(\d+)\.(.*)", name):
            found.setdefault(parts[1], {})[parts[2]] = x
    return found


def _swapped_layers(model: nn.Module) -> Iterator[Hypothesis]:
    layers = _layers(model)
    for (one, a), (two, b) in pairwise(layers.items()):
        if {n: x.shape for n, x in a.items()} == {n: x.shape for n, x in b.items()}:
            yield Hypothesis("swapped_layers", f"layers {one} and {two} swapped", f"the engine has the weights of "
                             f"layer {one} in layer {two}, and the other way round",
                             set_values([*a.values(), *b.values()], [*(b[n] for n in a), *(a[n] for n in b)]),
                             late=True)


def _attention(model: nn.Module) -> Iterator[Hypothesis]:
    config: Any = model.config
    config = config.get_text_config()
    tables: list[Any] = [m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    if tables:
        plain = [torch.arange(len(x), device=x.device) / len(x) for x in tables]
        for base in (1e4, 1e5, 5e5, 1e6, 5e6, 1e7):
            values = [(base**-x).to(own.dtype) for x, own in zip(plain, tables, strict=True)]
            if not all(torch.allclose(x, own, rtol=1e-3) for x, own in zip(values, tables, strict=True)):
                yield Hypothesis("rope_base", f"RoPE base {base:g}, unscaled", f"the engine rotates positions with "
                                 f"base {base:g} and no scaling, unlike the trainer", set_values(tables, values))
        for factor in (2, 4, 8):
            yield Hypothesis("rope_scaling", f"positions divided by {factor}", f"the engine divides positions by "
                             f"{factor} (linear RoPE scaling)", set_values(tables, [x / factor for x in tables]))
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "o_proj")
                          and isinstance(getattr(m, "scaling", None), float)]
    for power, words in ((0, "without a scale"), (2, "scaled by 1/d, not by 1/√d")):
        if modules:
            yield Hypothesis("attention_scale", f"attention {words}", f"the engine computes attention {words}",
                             set_attributes([(m, "scaling", m.scaling**power) for m in modules]))
    if norms := [(m, n, nn.Identity()) for m in model.modules() for n in ("q_norm", "k_norm") if hasattr(m, n)]:
        yield Hypothesis("qk_norm", "without norms of queries and keys", "the engine leaves out the norms of queries "
                         "and keys", set_attributes(norms))
    if sinks := [x for n, x in model.named_parameters() if n.endswith(".sinks")]:
        yield Hypothesis("sinks", "without attention sinks", "the engine leaves out the sinks of attention",
                         set_values(sinks, [torch.full_like(x, -1e4) for x in sinks]))


def _windows(model: nn.Module, responses: Sequence[Response]) -> Iterator[Hypothesis]:
    """Sliding windows: lost, of another size, or in every layer of a model that has none."""
    config: Any = model.config
    config, longest = config.get_text_config(), max((len(r.tokens) for r in responses), default=0)
    own, attention = getattr(config, "sliding_window", None), [m for m in model.modules() if hasattr(m, "o_proj")]
    sizes = {2**n for n in range(2, (longest - 1).bit_length())[-4:]}
    if isinstance(own, int):
        yield Hypothesis("window_lost", "without the sliding window", "the engine reads beyond the sliding window",
                         set_attributes([(config, "sliding_window", 2**30)]))
        sizes = {own - 1, own + 1, own // 2, 2 * own}
    for size in sorted(w for w in sizes if 0 < w < longest):
        yield Hypothesis("window_size", f"a sliding window of {size}", f"the engine has a sliding window of {size} "
                         f"tokens, the trainer {f'one of {own}' if isinstance(own, int) else 'none'}",
                         set_attributes([(config, "sliding_window", size)]) if isinstance(own, int)
                         else set_hooks(attention, partial(_narrow, size)), late=True)


def _narrow(window: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an attention without a cache, its mask cut to the last `window` tokens."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    t = torch.arange(hidden.shape[1], device=hidden.device)
    seen, mask = ((t <= t[:, None]) & (t > t[:, None] - window))[None, None], kwargs["attention_mask"]
    if mask is None or mask.dtype == torch.bool:
        mask = seen if mask is None else mask & seen
    else:
        mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
    return args, kwargs | {"attention_mask": mask}


def _softcap(model: Any) -> Iterator[Hypothesis]:
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if getattr(config, "final_logit_softcapping", None):
        yield Hypothesis("softcap", "without the soft-cap of logits", "the engine leaves out the soft-cap of logits",
                         set_attributes([(config, "final_logit_softcapping", None)]))
    elif head is not None:
        yield Hypothesis("softcap", f"logits soft-capped at {SOFTCAP:g}", f"the engine soft-caps logits at "
                         f"{SOFTCAP:g}, the trainer does not",
                         set_hooks([head], after=lambda m, args, x: SOFTCAP * (x / SOFTCAP).tanh()))


def _is_router(name: str) -> bool:
    return any(f".{part}." in f".{name}." for part in ("gate", "router")) and "experts" not in name.split(".")


PARTS: dict[str, Callable[[str], bool]] = {
    "head": lambda n: n.startswith("lm_head."),
    "embedding": lambda n: "embed_tokens" in n or "wte" in n,
    "routers": _is_router,
    "experts": lambda n: "experts" in n.split("."),
}
"""Parts of a model that a push may miss, by the names of their weights."""


def _tokens(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Hypothesis]:
    bos = getattr(tokenizer, "bos_token_id", None)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    changes: list[tuple[str, str, str, Callable[[Response], Response]]] = []
    if bos is not None:
        changes.append(("bos", "BOS put in front", "the engine reads a BOS token in front that the file does not have",
                        lambda r: _with_prompt(r, (bos, *r.tokens[: r.prompt]))))
        changes.append(("bos", "BOS dropped", "the engine reads the prompt without its BOS token",
                        lambda r: _with_prompt(r, r.tokens[r.tokens[0] == bos : r.prompt])))
    changes.append(("special_tokens", "special tokens of the prompt skipped",
                    "the engine reads the prompt without its special tokens", lambda r: _with_prompt(
                        r, tuple(t for t in r.tokens[: r.prompt] if t not in special))))
    changes.append(("prompt_cut", "first token of the prompt dropped", "the engine reads the prompt without its first "
                    "token", lambda r: _with_prompt(r, r.tokens[1 : r.prompt])))
    longest = max((r.prompt for r in responses), default=0)
    for pad in dict.fromkeys((getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0)):
        if pad is not None:
            changes.append(("visible_padding", f"padded on the left with token {pad}, visible",
                            "the engine's attention reads the padding on the left of prompts",
                            partial(_pad_prompt, pad, longest)))
    seen = [[r.tokens for r in responses]]
    for cause, name, says, change in changes:
        read = [change(r).tokens for r in responses]
        if read not in seen:
            seen.append(read)
            yield Hypothesis(cause, name, says, tokens=change)


def _pad_prompt(pad: int, length: int, r: Response) -> Response:
    return _with_prompt(r, (*[pad] * (length - r.prompt), *r.tokens[: r.prompt]))


def _with_prompt(response: Response, prompt: tuple[int, ...]) -> Response:
    """After another prompt; as it stands where that would have no token."""
    if not prompt:
        return response
    tokens = (*prompt, *response.tokens[response.prompt :])
    return replace(response, tokens=tokens, prompt=len(prompt), ids=None, gates=None)


def _positions(responses: Sequence[Response]) -> Iterator[Hypothesis]:
    for shift in (1, -1):
        yield Hypothesis("positions", f"positions of the response {shift:+d}", f"the engine counts positions of the "
                         f"response {abs(shift)} too {'high' if shift > 0 else 'low'}, as after a cached prefix of "
                         "another length", positions=partial(_move, shift))
    if any((_restart(r) != np.arange(len(r.tokens))).any() for r in responses):
        yield Hypothesis("positions_per_turn", "positions from 0 in every turn", "the engine counts the positions of "
                         "each further turn of a response from 0", positions=_restart)
    longest = max((r.prompt for r in responses), default=0)
    if any(r.prompt < longest for r in responses):
        yield Hypothesis("positions_of_padding", "positions of the response after padding", "the engine counts the "
                         "positions of a response from the end of the padded prompt",
                         positions=lambda r: _move(longest - r.prompt, r))


def _move(by: int, response: Response) -> NDArray:
    t = np.arange(len(response.tokens))
    return t + by * (t >= response.prompt)


def _restart(response: Response) -> NDArray:
    """Positions that begin again where the engine goes on after tokens of an environment."""
    t, turn = np.arange(len(response.tokens)), count_turns(response.logprobs)
    first = np.searchsorted(turn, turn) + response.prompt
    return t - np.r_[np.zeros(response.prompt, dtype=int), np.where(turn > 1, first, 0)]


def _renormalises(modules: Sequence[nn.Module]) -> bool | None:
    """Whether the routers renormalise their combine weights; None where that cannot be told or changed."""
    told = {getattr(m, "norm_topk_prob", None) for m in modules}
    if told <= {True, False}:
        return told == {True} if len(told) == 1 else None
    always = {"MixtralTopKRouter", "GptOssTopKRouter", "GraniteMoeTopKRouter"}
    return True if all(type(m).__name__ in always for m in modules) else None


# ---------------------------------------------------------------------- what is done to a model for one forward
def change_routers(change: Callable[[RoutingModule], Any], dtype: torch.dtype | None = None) -> Scope:
    """Every router is a changed copy of itself inside the scope, on request kept and computed in `dtype`; the module
    that takes the top-k of its logits, where that is another one, takes other attributes."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        names = {module: name for name, module in model.named_modules()}
        own = [(names[spec.module], spec.module) for spec in find_sites(model)]
        attributes = [(vars(spec.selector), dict(vars(spec.selector))) for spec in find_sites(model)]
        try:
            for name, module in own:
                model.set_submodule(name, copy.deepcopy(module))
            for spec in find_sites(model):
                with torch.no_grad():
                    change(spec)
            if dtype is not None:
                keep_routers_in(model, dtype)
            yield model
        finally:
            for name, module in own:
                model.set_submodule(name, module)
            for now, before in attributes:
                now.update(before)

    return scope


def round_routers(rounded: Callable[[Tensor], Tensor]) -> Scope:
    """The routers' matrices take other values."""
    return change_routers(lambda spec: [p.copy_(rounded(p.detach().float())) for p in router_matrices(spec)])


def round_matrices(rounded: Callable[[Tensor], Tensor]) -> Scope:
    """All matrices but routers, embeddings and the head take other values."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        routers = {id(p) for spec in find_sites(model) for p in router_matrices(spec)}
        chosen = [p for n, p in model.named_parameters() if p.dim() > 1 and id(p) not in routers
                  and not any(part in n for part in ("embed", "lm_head"))]
        with _values(chosen, (rounded(p.detach().float()) for p in chosen)):
            yield model

    return scope


def take_weights(other: nn.Module, picks: Callable[[str], bool]) -> Scope:
    """The weights that `picks` names are those of another model. A tied head that is picked alone comes apart from the
    embedding, and the other way round."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        theirs, mine = _tensors(other), _tensors(model)
        if missing := sorted(n for n, x in mine.items() if n in theirs and theirs[n].shape != x.shape
                             or n not in theirs and picks(n) and not n.endswith("inv_freq")):
            raise ConfigError(f"{missing[0]} is missing in the other checkpoint, or has another shape")
        names = [n for n in mine if n in theirs and picks(n)]
        with _untied(model, names) as own, _values([own[n] for n in names], (theirs[n] for n in names)):
            yield model

    return scope


@contextmanager
def _untied(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The model's weights by name, where one that is picked and shared with one that is not is a copy of its own."""
    every = _tensors(model)
    shared = {n for n in names if any(x is every[n] and m not in names for m, x in every.items())}
    for name in shared:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(every[name].detach().clone(), requires_grad=False))
    try:
        yield _tensors(model)
    finally:
        for name in shared:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, every[name])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def set_values(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Scope:
    """Other values of these tensors of the model, which may be those of each other."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        with _values(tensors, [x.detach().clone() for x in values]):
            yield model

    return scope


def set_attributes(changes: Sequence[tuple[Any, str, Any]]) -> Scope:
    """Other attributes: (object, name, value) of each."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        kept = [getattr(of, name) for of, name, _ in changes]
        try:
            for of, name, value in changes:
                setattr(of, name, value)
            yield model
        finally:
            for (of, name, _), value in zip(changes, kept, strict=True):
                setattr(of, name, value)

    return scope


def set_hooks(modules: Sequence[nn.Module], before: Callable[..., Any] | None = None,
              after: Callable[..., Any] | None = None) -> Scope:
    """Hooks of these modules: on their arguments, named ones too, or on what they return."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in modules if before]
        handles += [m.register_forward_hook(after) for m in modules if after]
        try:
            yield model
        finally:
            for handle in handles:
                handle.remove()

    return scope


@contextmanager
def _values(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> Iterator[None]:
    """Other values inside the scope, made one after the other; the old ones are kept beside."""
    kept = [x.detach().clone() for x in tensors]
    try:
        with torch.no_grad():
            for x, value in zip(tensors, values, strict=True):
                x.copy_(value)
        yield
    finally:
        with torch.no_grad():
            for x, old in zip(tensors, kept, strict=True):
                x.copy_(old)


def cast_to(dtype: torch.dtype) -> Scope:
    """A copy of the model whose parameters are in `dtype`, `make_runnable` there; buffers stay."""

    @contextmanager
    def scope(model: nn.Module) -> Iterator[nn.Module]:
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.data = parameter.data.to(dtype)
        with make_runnable(twin):
            yield twin

    return scope


def switch_experts(name: str) -> Scope:
    """Another of transformers' implementations of the experts. Raises ConfigError for a model that has no such one."""

    @contextmanager
    def scope(model: Any) -> Iterator[nn.Module]:
        own = model.config._experts_implementation
        if name == "grouped_mm" and not _groups(model):
            raise ConfigError("grouped_mm cannot compute these experts: their rows are not a multiple of 16 bytes")
        try:
            model.set_experts_implementation(name)
        except (AttributeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} cannot compute these experts: {error}") from error
        try:
            yield model
        finally:
            model.set_experts_implementation(own)

    return scope


def make_runnable(model: Any) -> AbstractContextManager[Any]:
    """The model, with its experts one by one where they are too narrow for grouped products in its dtype."""
    by = getattr(model.config, "_experts_implementation", None)
    return nullcontext() if by not in ("grouped_mm", NAME) or _groups(model) else switch_experts("eager")(model)


@contextmanager
def set_to_eval(model: nn.Module) -> Iterator[nn.Module]:
    """The model in eval mode; what was in training mode is so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield model
    finally:
        for module in training:
            module.training = True


def _groups(model: nn.Module) -> bool:
    """Whether torch can multiply all experts at once: it wants rows of a multiple of 16 bytes."""
    experts = (p for p in model.parameters() if p.dim() == 3)
    return all(size * p.element_size() % 16 == 0 for p in experts for size in p.shape[1:])


# ---------------------------------------------------------------------- small parts
def to_fp8_and_back(weight: Tensor, axis: int | None = None) -> Tensor:
    """Rounded to e4m3, with the largest |w| of a row (`axis` -1) or of the tensor (None) at 448; unscaled with `axis`
    0."""
    if axis == 0:
        return weight.to(torch.float8_e4m3fn).float()
    largest = weight.abs().amax() if axis is None else weight.abs().amax(-1, keepdim=True)
    scale = (largest / FP8_MAX).clamp(min=1e-12)
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def flip_renormalising(module: Any, told: bool) -> None:
    """Make a router that renormalises its combine weights hand out raw ones, or the other way round."""
    if isinstance(getattr(module, "norm_topk_prob", None), bool):
        module.norm_topk_prob = not told
    else:  # softmax over all experts, read at the chosen ones
        module.register_forward_hook(_raw_weights)


def _raw_weights(module: nn.Module, args: Any, output: Any) -> Any:
    (logits, weights, ids), order = in_order(output)
    scores = logits.float()
    made = (scores >= 0).all() and (scores.sum(-1) - 1).abs().max() < 1e-3  # before transformers 5.6
    raw = (scores if made else scores.softmax(-1)).gather(-1, ids).to(weights.dtype)
    return tuple((logits, raw, ids)[i] for i in order or (0, 1, 2))


def _sigmoid(renormalised: bool, module: nn.Module, args: Any, output: Any) -> Any:
    (logits, weights, ids), order = in_order(output)
    raw = logits.float().sigmoid().gather(-1, ids)
    raw = (raw / raw.sum(-1, keepdim=True) if renormalised else raw).to(weights.dtype)
    return tuple((logits, raw, ids)[i] for i in order or (0, 1, 2))
