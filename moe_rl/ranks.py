"""Several processes that carry out one run together: who is who, and what rank 0 does for all.

Started by torchrun. Every rank goes through the same program; random draws, sampling, rewards and writes happen on rank
0 and reach the others through `from_rank_0`. A rank that fails ends the job: torchrun stops the others."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from moe_rl.errors import Diverged

T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""Others wait for rank 0 while it samples or trains a cold start; a dead rank is torchrun's to notice."""
_planned = 1
_messages: Any = None
"""The group over which objects travel: gloo, also beside NCCL."""


def launched() -> bool:
    """Whether torchrun started this process beside others. A world of one is none: some schedulers leave its
    variables in the environment of every command."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1


def rank() -> int:
    return int(os.environ["RANK"]) if launched() else 0


def world() -> int:
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def plan_for(processes: int) -> None:
    """Say of how many processes the runs will be that this one only checks and hands out."""
    global _planned
    _planned = processes


def planned() -> int:
    """Processes of a run: of this one, or of those that it hands out."""
    return world() if launched() else _planned


def join(device: str) -> None:
    """Meet the other ranks; a process of its own is a world of one. `device` is the model's: cpu or cuda."""
    global _messages
    import torch.distributed as dist

    if dist.is_initialized():
        return
    # That kernels are unfused without TransformerEngine, and that Megatron calls torch by old names.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.c10d_logger")
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if launched():
        dist.init_process_group(backend, timeout=PATIENCE)
        if rank():
            warnings.simplefilter("ignore")  # rank 0 says it
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _messages = dist.new_group(backend="gloo", timeout=PATIENCE)


def leave() -> None:
    """Part from the other ranks, after everything went well."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier(_messages)
        dist.destroy_process_group()


def device(name: str) -> Any:
    """This rank's device: each rank of a machine has a GPU of its own."""
    import torch

    if not name.startswith("cuda"):
        return torch.device(name)
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(mine)
    return mine


def from_rank_0(function: Callable[[], T]) -> T:
    """What `function()` returns on rank 0, on every rank. When it fails there, rank 0 raises and the others end; a
    divergence is raised on all of them, which finish the run together."""
    if world() == 1:
        return function()
    import torch.distributed as dist

    answer: list[Any] = [None, True]
    if rank() == 0:
        try:
            answer = [function(), False]
        except Diverged as error:
            answer = [error, True]
            raise
        finally:
            dist.broadcast_object_list(answer, 0, group=_messages)
    else:
        dist.broadcast_object_list(answer, 0, group=_messages)
        if isinstance(answer[0], Diverged):
            raise answer[0]
        if answer[1]:
            sys.exit(2)
    return answer[0]


def gather(mine: T) -> list[T]:
    """What every rank has, in the order of ranks, for every rank; collective."""
    import torch.distributed as dist

    parts: list[Any] = [None] * world()
    dist.all_gather_object(parts, mine, group=_messages)
    return parts


def join_shards(tensor: Any) -> Any:
    """A tensor that is cut over ranks (a DTensor), put together on every rank; collective. Any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def cut_as(pattern: Any, full: Any) -> Any:
    """A tensor that every rank has, cut as `pattern` is; as it is where that is whole."""
    if not hasattr(pattern, "full_tensor"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, pattern.device_mesh, pattern.placements, src_data_rank=None)


def sum_over_ranks(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers by name, added up over all ranks, for every rank; collective."""
    parts = gather(dict(numbers))
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
