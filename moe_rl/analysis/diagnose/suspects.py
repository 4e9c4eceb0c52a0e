"""What may be different in the engine, each as something that the trainer's model can be made to do for one forward.

A suspect changes the model inside a scope, the tokens it reads, or their positions; nothing of it is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_rl.analysis.diagnose.responses import Response
from moe_rl.analysis.diagnose.scopes import (
    Scope,
    experts_by,
    flip_renormalising,
    in_dtype,
    matrices_rounded,
    routers_changed,
    to_fp8_and_back,
    weights_of,
    weights_rounded,
)
from moe_rl.rollouts.mismatch import to_int8_and_back
from moe_rl.routing.balance import BIAS
from moe_rl.routing.sites import RoutingModule, find_sites, router_matrices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

@dataclass(frozen=True)
class Suspect:
    """One thing that the engine may do otherwise."""

    cause: str
    """A short name, for tests and scripts; suspects that are forms of the same thing share it."""
    rung: str
    """What its row of the table is called."""
    says: str
    """A sentence: what it would mean."""
    model: Scope = nullcontext
    tokens: Callable[[Response], Response] | None = None
    shift: int = 0
    """By how much the positions of the response move."""
    fault: bool = True
    """Whether it is something to mend; a dtype or another kernel is not."""

    @property
    def place(self) -> str:
        """Suspects of one place are not tried together: a router's weights cannot be rounded in two ways."""
        return self.cause.partition("_")[0] if self.cause.startswith("router_") else self.cause


# ---------------------------------------------------------------------- what there is to suspect
def suspects_of(
    model: nn.Module, responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase | None,
    also: dict[str, nn.Module],
) -> list[Suspect]:
    """Every suspect that would change something about this model and these responses."""
    return [*_routers(model), *_numerics(model), *_versions(model, also), *_tokens(responses, tokenizer), *_positions()]


def _routers(model: nn.Module) -> Iterator[Suspect]:
    modules, selectors = zip(*((spec.module, spec.selector) for spec in find_sites(model)), strict=True)
    own = {p.dtype for spec in find_sites(model) for p in router_matrices(spec)}
    if own != {torch.float32}:
        yield Suspect("router_fp32", "routers in float32", "the engine keeps and computes its routers in float32",
                      routers_changed(lambda spec: None, dtype=torch.float32), fault=False)
    if own != {torch.bfloat16}:
        yield Suspect("router_bf16", "router weights in bfloat16", "the engine's routers were rounded to bfloat16 on "
                      "their way to it", weights_rounded(lambda w: w.bfloat16()))
        yield Suspect("router_bf16", "routers computed in bfloat16", "the engine computes its routers in bfloat16",
                      routers_changed(lambda spec: None, dtype=torch.bfloat16))
    yield Suspect("router_int8", "routers in int8, by row", "the engine's routers are quantised to int8",
                  weights_rounded(to_int8_and_back))
    yield Suspect("router_int8", "routers in int8, by tensor", "the engine's routers are quantised to int8",
                  weights_rounded(lambda w: to_int8_and_back(w.reshape(1, -1)).view_as(w)))
    for axis, name in ((None, "by tensor"), (-1, "by row"), (0, "unscaled")):
        yield Suspect("router_fp8", f"routers in fp8, {name}", "the engine's routers are quantised to fp8 (e4m3)",
                      weights_rounded(partial(to_fp8_and_back, axis=axis)))
    if any(bool(getattr(m, BIAS).any()) for m in modules if isinstance(getattr(m, BIAS, None), Tensor)):
        yield Suspect("lost_bias", "correction bias lost",
                      f"the engine chooses experts without the correction bias ({BIAS} is zero there)",
                      routers_changed(lambda spec: getattr(spec.module, BIAS).zero_()))
    if (told := _renormalises(selectors)) is not None:
        yield Suspect("gates_raw" if told else "gates_renormalised",
                      f"combine weights {'raw' if told else 'renormalised'}",
                      "the engine does not renormalise its combine weights over the chosen experts; the trainer does"
                      if told else "the engine renormalises its combine weights over the chosen experts; the trainer "
                      "does not", routers_changed(lambda spec: flip_renormalising(spec.selector, told)))
    if any(getattr(m, "routed_scaling_factor", 1.0) != 1.0 for m in selectors):
        yield Suspect("lost_scaling", "routed scaling factor lost",
                      "the engine leaves out the factor on routed experts (routed_scaling_factor)",
                      routers_changed(lambda spec: setattr(spec.selector, "routed_scaling_factor", 1.0)))
    yield from _counts(selectors, [spec.site.num_experts for spec in find_sites(model)])


def _counts(modules: Sequence[nn.Module], experts: Sequence[int]) -> Iterator[Suspect]:
    """Another number of experts per token, where the router keeps that number itself."""
    used = {getattr(m, "top_k", None) for m in modules}
    k, least = used.pop(), min(experts)
    if used or not isinstance(k, int):
        return
    for count in sorted({k - 1, k + 1, 2 * k, k // 2} - {k}):
        if 1 <= count < least:
            says = f"the engine uses {count} experts per token, the trainer {k}"
            yield Suspect("top_k", f"top {count} experts", says,
                          routers_changed(partial(_use, count=count)))


def _use(spec: RoutingModule, count: int) -> None:
    selector: Any = spec.selector
    selector.top_k = count


def _numerics(model: nn.Module) -> Iterator[Suspect]:
    own = next(model.parameters()).dtype
    for dtype in (torch.bfloat16, torch.float32):
        if dtype != own:
            name = str(dtype).removeprefix("torch.")
            yield Suspect("dtype", f"all in {name}", f"the engine computes in {name}, the trainer in "
                          f"{str(own).removeprefix('torch.')}", in_dtype(dtype), fault=False)
    current = getattr(model.config, "_experts_implementation", None)
    for name in ("eager", "grouped_mm"):
        if current not in (None, name) and hasattr(model, "set_experts_implementation"):
            yield Suspect("experts", f"experts by {name}", f"the engine sums experts as transformers' {name} does",
                          experts_by(name), fault=False)
    yield Suspect("int8", "all matrices in int8, but routers", "the engine's matrices are quantised to int8 by row",
                  matrices_rounded(to_int8_and_back))
    yield Suspect("fp8", "all matrices in fp8, but routers", "the engine's matrices are quantised to fp8 by tensor",
                  matrices_rounded(to_fp8_and_back))


def _versions(model: nn.Module, also: dict[str, nn.Module]) -> Iterator[Suspect]:
    for name, other in also.items():
        yield Suspect("weight_version", f"weights of {name}", f"the engine samples with the weights of {name}",
                      weights_of(other, lambda n: True))
        for part, picks in PARTS.items():
            yield Suspect(f"{part}_not_pushed", f"{part} of {name}, the rest as given",
                          f"the engine has the {part} of {name} and the rest of the checkpoint: "
                          f"the {part} did not reach it", weights_of(other, picks))


def _is_router(name: str) -> bool:
    return any(f".{part}." in f".{name}." for part in ("gate", "router")) and "experts" not in name.split(".")


PARTS: dict[str, Callable[[str], bool]] = {
    "head": lambda n: n.startswith("lm_head."),
    "embedding": lambda n: "embed_tokens" in n or "wte" in n,
    "routers": _is_router,
    "experts": lambda n: "experts" in n.split("."),
}
"""Parts of a model that a push may miss, by the names of their weights."""


def _tokens(responses: Sequence[Response], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Suspect]:
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
    seen = [[r.tokens for r in responses]]
    for cause, rung, says, change in changes:
        read = [change(r).tokens for r in responses]
        if read not in seen:
            seen.append(read)
            yield Suspect(cause, rung, says, tokens=change)


def _with_prompt(response: Response, prompt: tuple[int, ...]) -> Response:
    """After another prompt; as it stands where that would have no token."""
    if not prompt:
        return response
    tokens = (*prompt, *response.tokens[response.prompt :])
    return replace(response, tokens=tokens, prompt=len(prompt), ids=None, gates=None)


def _positions() -> Iterator[Suspect]:
    for shift in (1, -1):
        yield Suspect("positions", f"positions of the response {shift:+d}", f"the engine counts positions of the "
                      f"response {abs(shift)} too {'high' if shift > 0 else 'low'}, as after a cached prefix of "
                      "another length",
                      shift=shift)


def _renormalises(modules: Sequence[nn.Module]) -> bool | None:
    """Whether the routers renormalise their combine weights; None where that cannot be told or changed."""
    told = {getattr(m, "norm_topk_prob", None) for m in modules}
    if told <= {True, False}:
        return told == {True} if len(told) == 1 else None
    always = {"MixtralTopKRouter", "GptOssTopKRouter", "GraniteMoeTopKRouter"}
    return True if all(type(m).__name__ in always for m in modules) else None
