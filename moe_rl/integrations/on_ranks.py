"""Tensors that all ranks of a parallel policy read, once in the memory of a machine."""

from __future__ import annotations

import math
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.objectives import advantage_of
from moe_rl.registry import Component
from moe_rl.routing.trace import ROUTED, RoutingTrace
from moe_rl.types import Rollouts

T = TypeVar("T")
CHUNK = 2**20
"""Bytes of routes that are gathered at a time, or a row of every rank."""


def check_spread(run: RunConfig, no_critic: str) -> None:
    """Raise ConfigError for settings that no policy of several processes honours; `no_critic`: why it has none."""
    policy = Component.of(run.policy).name
    if run.truncates and run.sampling_mask:
        raise ConfigError(
            f"top_p={run.top_p:g}, top_k={run.top_k}, min_p={run.min_p:g}: policy={policy!r} has no log-probs over the "
            "kept tokens. Use policy='hf', or sampling_mask=False if engine and trainer may differ."
        )
    if run.optimizer.name == "adamw_8bit":
        raise ConfigError(
            f"optimizer.name='adamw_8bit' runs in one process, not with policy={policy!r}. Use policy='hf'."
        )
    if run.measure.gradient_cosine:
        raise ConfigError(
            f"measure.gradient_cosine=True: policy={policy!r} spreads its gradients over ranks. Use policy='hf'."
        )
    if "values" in advantage_of(run.arm).needs:
        raise ConfigError(
            f"arm {run.arm.name!r} needs a critic, but policy={policy!r} has none: {no_critic}. Use "
            "policy='hf', or the advantage `returns`."
        )


def one_per_machine(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, bool]:
    """A CPU tensor that all ranks of a machine share, and whether this is the rank that fills it; collective. The
    others may read it after a barrier.

    It lies in a file without a name in the folder for temporary files (TMPDIR), mapped by every rank and gone with the
    last of them, so that memory holds it once and may write it out. Raises ConfigError where a rank of the machine does
    not see that folder; OSError where it has no room."""
    if ranks.world() == 1:
        return torch.empty(tuple(shape), dtype=dtype), True
    here = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    first = ranks.gather(here).index(here) == ranks.rank()
    count, name = math.prod(shape), None
    if first and count:
        handle, name = tempfile.mkstemp(prefix="moe_rl-")
        os.posix_fallocate(handle, 0, count * dtype.itemsize)  # a full disk is an error here, later a dead process
        os.close(handle)
    name = next((name for machine, name in ranks.gather((here, name)) if machine == here and name), None)
    try:
        tensor = torch.from_file(name, shared=True, size=count, dtype=dtype) if name else torch.empty(0, dtype=dtype)
    except RuntimeError as error:
        raise ConfigError(
            f"rank {ranks.rank()} cannot map {name}, which another rank on {here} created ({error}). Use "
            "one TMPDIR for all ranks of a machine."
        ) from error
    dist.barrier()
    if first and name:
        os.unlink(name)
    return tensor.view(tuple(shape)), first


def from_rank_0(function: Callable[[], T]) -> T:
    """As `ranks.from_rank_0`, but of a batch the engine's routes are in the memory of a machine once; a few rows of
    them travel at a time."""
    if ranks.world() == 1:
        return function()
    held: list[RoutingTrace] = []

    def outlined() -> tuple[Any, RoutingTrace | None]:
        result: Any = function()
        if not isinstance(result, Rollouts) or result.rollout_routes is None:
            return result, None
        held.append(result.rollout_routes)
        return replace(result, rollout_routes=None), held[0].each(lambda _, x: x.to("meta"), ROUTED)

    batch, outline = ranks.from_rank_0(outlined)
    if outline is None:
        return batch
    return replace(
        batch,
        rollout_routes=outline.each(lambda name, x: _from_rank_0(getattr(held[0], name) if held else None, x), ROUTED),
    )


def _from_rank_0(mine: Tensor | None, outline: Tensor) -> Tensor:
    """A tensor that rank 0 alone has, and of which the others know shape and dtype."""
    shared, fills = one_per_machine(outline.shape, outline.dtype)
    step = max(1, CHUNK // max(1, outline[:1].nbytes))
    for start in range(0, len(outline), step):
        part = (
            torch.empty(outline[start : start + step].shape, dtype=outline.dtype)
            if mine is None
            else mine[start : start + step].contiguous()
        )
        dist.broadcast(part.view(torch.uint8), 0)
        if fills:
            shared[start : start + step] = part
    dist.barrier()
    return shared


def shared_rows(parts: Sequence[RoutingTrace], rows: Sequence[Tensor], batch: Rollouts) -> RoutingTrace:
    """The traces of all forwards of all ranks, each over some rows of the batch, as one; collective, and every rank has
    as many. The ids are in the memory of a machine once, and a few rows of them at a time on the way."""
    layout = parts[0].layout
    ids, fills = one_per_machine((*batch.tokens.shape, len(layout.moe_layers), layout.top_k), layout.dtype)
    if fills:
        ids.fill_(layout.unknown)
    step = max(1, CHUNK // (ranks.world() * ids[0].nbytes))
    longest = max(ranks.gather(max(map(len, rows))))
    for trace, index in zip(parts, rows, strict=True):
        for start in range(0, longest, step):
            here = slice(start, start + step)
            for where, part in ranks.gather((index[here], trace.experts[here].clone().cpu())):
                if fills:
                    ids[where, : part.shape[1]] = part
    dist.barrier()
    ids = ids.to(batch.tokens.device)
    return RoutingTrace.from_ids(ids, layout, tokens=batch.tokens, attention_mask=batch.attention_mask, check=False)
