"""A checkpoint without a whole model in memory: weights under the names and cuts of a checkpoint, written as they come,
and read one by one."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_rl.config import ModelConfig, folder_of
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.load import (
    INDEX,
    PRESETS,
    WHOLE,
    LoadedModel,
    check_weights,
    complete_tokenizer,
    keep_routers_in,
    load_tokenizer,
    no_progress_bars,
    skeleton,
)

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


def write_checkpoint(loaded: LoadedModel, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write a checkpoint of a model whose weights come one by one."""
    describe(loaded.model, loaded.tokenizer, folder)
    write_shards(folder, checkpoint_weights(loaded.model, weights))


def checkpoint_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """A policy's weights as a checkpoint on disk names and cuts them, which is what every engine can load. Tensors of
    the policy, or views of them.

    In memory, transformers fuses the experts of a layer and renames modules; that is undone one weight after the other,
    so that none but the last is held, or for a family that also splits weights in memory, of all at once. Raises
    RunError when the weights are not those of `model`, once all have come.
    """
    from transformers.core_model_loading import revert_weight_conversion

    expected: dict[str, Tensor] = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    alone, names, together = one_by_one(model, expected), set(), {}
    for name, tensor in weights:
        names.add(name)
        if alone and name in expected:
            yield from revert_weight_conversion(model, {name: tensor}).items()
        elif name in expected:
            together[name] = tensor
    if odd := sorted(expected.keys() ^ names):
        raise RunError(
            f"the policy gave {len(names)} weights, the engine's model has {len(expected)}; {odd[0]!r} is in one of "
            "them only. Use the same model for both."
        )
    yield from revert_weight_conversion(model, together).items()


def one_by_one(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
    """Whether weights give the same when each of them is undone by itself. Tried on the meta device."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tensor.shape for name, tensor in revert_weight_conversion(model, dict(weights)).items()}
    try:
        parts = [revert_weight_conversion(model, {name: tensor}) for name, tensor in weights.items()]
    except (RuntimeError, ValueError, KeyError, IndexError):  # of weights that lack their other half
        return False
    return {name: tensor.shape for part in parts for name, tensor in part.items()} == shapes


class Shards(Mapping[str, Tensor]):
    """The tensors of some safetensors files, each read when it is needed."""

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


def outline(config: ModelConfig) -> LoadedModel | None:
    """What `load` returns of a checkpoint, with the model on the meta device and its weights left in the files.

    None where that is not possible: for a preset, a name on the hub, other files than safetensors, and a family whose
    weights in memory are not made of those in the files one by one. Raises ConfigError as `load` does.
    """
    from transformers import GenerationConfig

    if config.name in PRESETS or not (files := check_weights(config.name)):
        return None
    model = _with_routers(config)
    with suppress(OSError):  # of a checkpoint without such a file
        model.generation_config = GenerationConfig.from_pretrained(folder_of(config.name))
    weights = StoredWeights(Shards(files), _with_routers(config))
    tokenizer = load_tokenizer(config.name)
    complete_tokenizer(tokenizer, model, config.name)
    return LoadedModel(model, tokenizer, weights) if weights.complete else None


def _with_routers(config: ModelConfig) -> PreTrainedModel:
    model = skeleton(config)
    if config.router_dtype is not None:
        keep_routers_in(model, getattr(torch, config.router_dtype))
    return model


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint's files under the names and in the dtypes of `model`, and the buffers that no file
    has. Each is read when it is needed, and its parts are joined by transformers.

    `model` is on the meta device, and belongs to this object.
    """

    def __init__(self, shards: Shards, model: PreTrainedModel):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion

        self.shards, self.model = shards, model
        self.buffers = compute_buffers(model)
        self.conversions: list[Any] = get_model_conversion_mapping(model)
        tensors = model.state_dict(keep_vars=True)
        parts = {name: [*revert_weight_conversion(model, {name: tensor.detach()})] for name, tensor in tensors.items()}
        stored = {id(tensors[name]): name for name in parts if shards.keys() >= set(parts[name])}
        tied = {name: stored.get(id(tensor)) for name, tensor in tensors.items()}
        self.parts = {name: (twin, parts[twin]) for name, twin in tied.items() if twin is not None}
        """Name → the name of the same weight that the files have, and there the names of its parts."""
        self.complete = self.parts.keys() == tensors.keys() and one_by_one(model, model.state_dict())

    def __getitem__(self, name: str) -> Tensor:
        """Raises ConfigError where a part in the files has another shape."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model as read_into
        from transformers.modeling_utils import LoadStateDictConfig

        if name in self.buffers:
            return self.buffers[name]
        stored, parts = self.parts[name]
        path, _, last = stored.rpartition(".")
        module = self.model.get_submodule(path)
        outline = getattr(module, last)
        older = {"tp_plan": None} if "tp_plan" in inspect.signature(read_into).parameters else {}
        with no_progress_bars():
            read_into(
                self.model,
                {part: self.shards[part] for part in parts},
                LoadStateDictConfig(weight_mapping=self.conversions),
                **older,
            )
        loaded = getattr(module, last)
        setattr(module, last, outline)
        if loaded is outline:
            raise ConfigError(
                f"the checkpoint stores {name!r} of {type(self.model).__name__} in other shapes "
                f"({', '.join(parts[:3])}). Save the whole model."
            )
        return loaded.detach().to(outline.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.buffers, **self.parts})

    def __len__(self) -> int:
        return len({**self.buffers, **self.parts})


def compute_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers of a model on the meta device that checkpoints leave out, e.g. the frequencies of rotary embeddings,
    computed as `from_pretrained` does."""
    owners = {path: module for path, module in model.named_modules() if module._non_persistent_buffers_set}
    for module in owners.values():
        module.to_empty(device="cpu", recurse=False)
        module._is_hf_initialized = False  # transformers' mark of what it need not compute
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in owners.items()
        for name in sorted(module._non_persistent_buffers_set)
    }


def write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]], most: int = SHARD) -> Shards:
    """Weights as a checkpoint's files: `model.safetensors`, or several of at most `most` bytes and their index. Memory:
    one file, beside what makes a weight. Files of an earlier call are replaced, for those who read them as a whole."""

    files: list[str] = []
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = size = 0

    def put(name: str) -> None:
        beside = folder / f"writing-{name}"
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
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": where})
        (folder / INDEX).write_text(index, encoding="utf-8")
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()
    return Shards(folder / name for name in files)
