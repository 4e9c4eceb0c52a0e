"""A second numerics without a second engine: the same model sampled in other arithmetic, as much as one sets.

Production samples with one engine and trains with another; at equal weights their routes and log-probs differ. Here
the engine is a copy of the policy's model in another dtype, with another implementation of the experts, with weights
rounded to 8 bits or with noise on its routers. What is measured between the two is what would be measured with vLLM.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models.adapters import merged, remove_adapters
from moe_rl.models.load import LoadedModel
from moe_rl.registry import Component, NotNegative, checked
from moe_rl.rollouts.engine import check_dtype, check_routes, warn_without_mask
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing.moe_layers import router_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEPT = ("embed", "lm_head")
"""Parts of a name of matrices that 8-bit checkpoints keep; routers are kept too."""


def _check(run: RunConfig, *, dtype: str | None = None, routes: str = "raise", **_: Any) -> None:
    check_routes(run, routes)
    check_dtype("engine.dtype", dtype)
    if Component.of(run.policy).name != "hf":
        raise ConfigError(
            f"engine='perturbed' copies the model of policy='hf', which policy={str(run.policy)!r} does "
            "not have. Use engine hf, vllm or a server."
        )
    if not run.sampling_mask:
        warn_without_mask(run, "sampling_mask=False")


@checked(_check)
def perturbed(
    run: RunConfig,
    start: LoadedModel,
    folder: Path,
    *,
    dtype: str | None = None,
    experts: Literal["eager", "batched_mm", "grouped_mm"] | None = None,
    int8: bool = False,
    router_noise: NotNegative = 0.0,
    routes: str = "raise",
) -> MismatchedEngine:
    """The engine `perturbed`. `dtype`: in which it computes, e.g. `bfloat16`; `experts`: another of transformers'
    implementations, `eager`, `batched_mm` or `grouped_mm`; `int8`: matrices rounded to 8 bits, one scale per row,
    embeddings and routers kept; `router_noise`: on router weights, in units of their standard deviation, new after
    every update; `routes`: `raise`, or `off`."""
    return MismatchedEngine(
        start.model,
        start.tokenizer,
        dtype=dtype,
        experts=experts,
        int8=int8,
        router_noise=router_noise,
        record_routes=routes != "off",
    )


class MismatchedEngine(HFEngine):
    """Samples from a copy of `model` in other numerics; `load` keeps the copy up to date.

    What is done to weights depends on their values only, so a resumed run meets the same ones.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: str | None = None,
        experts: str | None = None,
        int8: bool = False,
        router_noise: float = 0.0,
        record_routes: bool = True,
    ):
        twin = remove_adapters(copy.deepcopy(model)).requires_grad_(False).eval()
        if experts is not None:
            _set_experts(twin, experts)
        if dtype is not None:
            for parameter in twin.parameters():  # buffers stay: rotary frequencies are float32 in every checkpoint
                parameter.data = parameter.data.to(getattr(torch, dtype))
        routers = {id(p) for p in router_parameters(twin)}
        self.routers = {name for name, p in twin.named_parameters() if id(p) in routers and p.dim() > 1}
        self.int8, self.router_noise = int8, router_noise
        super().__init__(twin, tokenizer, record_routes=record_routes)
        self.load(merged(model))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the engine's model, rounded and disturbed as the settings say."""
        super().load(self._distorted(weights))

    def _distorted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name in self.routers:
                yield name, with_noise(tensor, self.router_noise)
            elif self.int8 and tensor.dim() > 1 and not any(part in name for part in KEPT):
                yield name, to_int8_and_back(tensor)
            else:
                yield name, tensor


def to_int8_and_back(weight: Float[Tensor, "... out in"]) -> Float[Tensor, "... out in"]:
    """scale · round(w / scale), scale = max |w| / 127 over the last axis: symmetric 8 bits, one scale per row."""
    scale = weight.detach().float().abs().amax(-1, keepdim=True) / 127
    return ((weight.float() / scale).round() * scale).where(scale > 0, 0.0)


def with_noise(weight: Float[Tensor, "experts hidden"], scale: float) -> Float[Tensor, "experts hidden"]:
    """w + scale · std(w) · ε, ε standard normal and drawn from a seed that is the checksum of w: new after every
    update, equal for equal weights. Router logits then carry noise of about `scale` times their own spread."""
    if not scale:
        return weight
    weight = weight.detach().float().cpu()
    seed = zlib.crc32(weight.contiguous().numpy().tobytes())
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    return weight + scale * weight.std() * noise


def _set_experts(model: PreTrainedModel, name: str) -> None:
    """Another of transformers' implementations of the experts: eager, batched_mm, grouped_mm."""
    model.set_experts_implementation(name)
    if getattr(model.config, "_experts_implementation", None) != name:
        raise ConfigError(f"engine.experts={name!r} has no effect on {type(model).__name__}. Leave it out.")
