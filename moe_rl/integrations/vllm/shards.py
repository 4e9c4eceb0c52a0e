"""Weights in a folder of safetensors files, written as they arrive and read one by one: no whole model in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.errors import raise_os_errors
from moe_rl.models.load import INDEX, WHOLE

SHARD = 2**30
"""Bytes of a file, unless a single tensor has more."""


class Shards(Mapping[str, Tensor]):
    """The tensors of some safetensors files, each read when it is asked for."""

    def __init__(self, files: Iterable[str | Path]):
        from safetensors import safe_open

        self.files = [str(Path(file).resolve()) for file in files]
        self._open = [safe_open(file, "pt") for file in self.files]
        self._where = {name: opened for opened in self._open for name in opened.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], most: int = SHARD) -> Shards:
    """Weights as a checkpoint's files: `model.safetensors`, or several of at most `most` bytes and their index. Memory:
    one file, beside what makes a weight. Files of an earlier call are replaced, for those who read them as a whole."""

    files: list[str] = []
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = size = 0

    def put(name: str) -> None:
        beside = folder / f"writing-{name}"
        with raise_os_errors(beside):
            save_file(held, beside, metadata={"format": "pt"})
        beside.replace(folder / name)
        files.append(name)
        where.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in weights:
        if held and size + tensor.nbytes > most:
            put(f"model-{len(files) + 1:05d}.safetensors")
            size = 0
        held[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())  # tied ones become two
        size, total = size + tensor.nbytes, total + tensor.nbytes
    put(f"model-{len(files) + 1:05d}.safetensors" if files else WHOLE)
    (folder / INDEX).unlink(missing_ok=True)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()
    return Shards(folder / name for name in files)
