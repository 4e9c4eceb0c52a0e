"""Several processes that carry out one run together: who is who, what rank 0 does for all, and whose folder it is.

Started by torchrun. Every rank goes through the same program; what draws, samples, rewards or writes happens on rank 0
and reaches the others through `from_rank_0`. A rank that fails ends the job: torchrun stops the others.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_rl.errors import Diverged, Stopped

if TYPE_CHECKING:
    from moe_rl.storage.folder import Row, RunFolder

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


def gathered(mine: T) -> list[T]:
    """What every rank has, in the order of ranks, for every rank; collective."""
    import torch.distributed as dist

    parts: list[Any] = [None] * world()
    dist.all_gather_object(parts, mine, group=_messages)
    return parts


def whole(tensor: Any) -> Any:
    """A tensor that is cut over ranks (a DTensor), put together on every rank; collective. Any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def cut_as(pattern: Any, full: Any) -> Any:
    """A tensor that every rank has, cut as `pattern` is; as it is where that is whole."""
    if not hasattr(pattern, "full_tensor"):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, pattern.device_mesh, pattern.placements, src_data_rank=None)


def summed(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers by name, added up over all ranks, for every rank; collective."""
    parts = gathered(dict(numbers))
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


class SharedFolder:
    """A run's folder as all ranks see it. Rank 0 has the real one; the others learn what it says, and take part in
    writing checkpoints into it, so it must be on a file system that all ranks see."""

    def __init__(self, folder: RunFolder | None):
        self.folder = folder
        self.path: Path = from_rank_0(lambda: self._real().path)
        self.told: Callable[[], bool] = folder.stopping if folder else lambda: False
        """Whether rank 0 was told to stop."""
        self._stopping = False
        if folder is not None:
            folder.stopping = lambda: self._stopping  # what all ranks know, and not what rank 0 heard since

    def latest(self) -> tuple[int, Path | None]:
        return from_rank_0(lambda: self._real().latest())

    def _real(self) -> RunFolder:
        assert self.folder is not None, "rank 0 has it, and alone is asked"
        return self.folder

    def add(self, table: str, rows: Iterable[Row]) -> None:
        if self.folder is not None:
            self.folder.add(table, rows)

    def diverged(self) -> str | None:
        return from_rank_0(lambda: self._real().diverged())

    def commit(self, step: int, save: Callable[[Path], None], diverged: str | None = None) -> None:
        """Rank 0 commits; when it comes to the checkpoint, every rank saves its part."""
        if self.folder is None:
            if (target := from_rank_0(lambda: None)) is not None:
                save(target)
            if self._stopping:
                raise Stopped(f"{self.path} was told to stop")
            return
        announced = []

        def together(target: Path) -> None:
            announced.append(from_rank_0(lambda: target))
            save(target)

        try:
            self.folder.commit(step, together, diverged)
        finally:
            if not announced:  # this step was committed before, or the folder is somebody else's now
                from_rank_0(lambda: None)

    def stopping(self) -> bool:
        self._stopping = from_rank_0(self.told)
        return self._stopping

    def finish(self, diverged: str | None = None) -> None:
        if self.folder is not None:
            self.folder.finish(diverged)
