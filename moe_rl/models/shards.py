"""A checkpoint without a whole model in memory: weights under the names and cuts of a checkpoint, written as they come,
and read one by one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.errors import RunError, raise_os_errors
from moe_rl.models.load import INDEX, WHOLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD = 2**30
"""Bytes of a file, unless a single tensor has more."""


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write all of a checkpoint but its weights: configuration, generation settings, tokenizer."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # which a model that was never saved leaves out
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def checkpoint_weights(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """A policy's weights as a checkpoint on disk names and cuts them, which is what every engine can load. Tensors of
    the policy, or views of them.

    In memory, transformers fuses the experts of a layer and renames modules; that is undone one weight after the other,
    so that none but the last is held, or for a family that also splits weights in memory, of all at once. Raises
    RunError when the weights are not those of `model`, once all have come.
    """
    from transformers.core_model_loading import revert_weight_conversion

    expected: dict[str, Tensor] = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    alone, given, kept = one_by_one(model, expected), set(), {}
    for name, tensor in weights:
        given.add(name)
        if alone and name in expected:
            yield from revert_weight_conversion(model, {name: tensor}).items()
        elif name in expected:
            kept[name] = tensor
    if odd := sorted(expected.keys() ^ given):
        raise RunError(
            f"the policy gave {len(given)} weights, the engine's model has {len(expected)}; {odd[0]!r} is in one of "
            "them only: not the same model."
        )
    yield from revert_weight_conversion(model, kept).items()


def one_by_one(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
    """Whether weights give the same when each of them is undone by itself. Tried on the meta device."""
    from transformers.core_model_loading import revert_weight_conversion

    whole = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(weights)).items()}
    try:
        parts = [revert_weight_conversion(model, {name: tensor}) for name, tensor in weights.items()]
    except (RuntimeError, ValueError, KeyError, IndexError):  # of weights that lack their other half
        return False
    return {name: tensor.shape for part in parts for name, tensor in part.items()} == whole


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
