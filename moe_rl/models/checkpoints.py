"""Hugging Face checkpoints, the package's, folders or names on the hub: read whole or refused; their code runs only if
asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from moe_rl.config import folder_of
from moe_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def may_exist(name: str) -> bool:
    """Whether `name` is a folder, or has the form of a name on the hub, `owner/repository`."""
    owner, _, repository = name.partition("/")
    on_hub = repository and "/" not in repository and owner not in ("", ".", "..", "~") and not Path(owner).is_dir()
    return bool(on_hub) or folder_of(name).is_dir()


def load_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a checkpoint. Raises ConfigError when it has none that transformers knows."""
    from transformers import AutoConfig

    folder = folder_of(name)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ConfigError(f"{name!r} holds an adapter of PEFT, not a model; merge it into its base "
                          "(merge_and_unload) and give the folder that the merged model was saved to.")
    return _pretrained(AutoConfig, name, trust_remote_code)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises ConfigError when it has none."""
    from transformers import AutoTokenizer

    tokenizer = _pretrained(AutoTokenizer, name, trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one when it finds no files
        raise ConfigError(f"{name!r} cannot be loaded: it has no tokenizer; save the model's tokenizer beside it.")
    return tokenizer


def load_weights(name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a checkpoint, every weight its own.

    Raises ConfigError for weights that are missing, damaged or of another shape, which transformers would replace by
    random ones with no more than a warning.
    """
    from transformers import AutoModelForCausalLM

    check_weights(name)
    settings = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = _pretrained(AutoModelForCausalLM, name, trust_remote_code, settings)
    for what, keys in (("lacks", found["missing_keys"]), ("has other shapes of", found["mismatched_keys"])):
        names = sorted(key if isinstance(key, str) else key[0] for key in keys)
        if names:
            some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise ConfigError(f"{name!r} {what} {len(names)} of the weights of {type(model).__name__} ({some}), which "
                              "would stay random; save the whole model.")
    return model


def check_weights(name: str) -> None:
    """Raise ConfigError for a folder that is not there, or whose weight files are missing or damaged. Of safetensors
    only headers are read; names on the hub are left to the download."""
    _require(name)
    folder = folder_of(name)
    if not folder.is_dir():
        return
    files = [WHOLE] if (folder / WHOLE).exists() else []
    if not files and (folder / INDEX).exists():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{name!r} cannot be loaded: its {INDEX} is damaged ({error}).") from error
    if not files and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"{name!r} cannot be loaded: it holds no weights ({WHOLE}, or {INDEX} and its shards).")
    for file in files:
        try:
            with safe_open(folder / file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{name!r} cannot be loaded: {file} is missing or damaged ({reason}); copy it again.") \
                from error


def _require(name: str) -> None:
    if not may_exist(name):
        raise ConfigError(f"there is no checkpoint folder {name!r} (looked at {folder_of(name).absolute()}).")
    folder = folder_of(name)
    known = ("config.json", "adapter_config.json", "tokenizer_config.json")  # the last, where a tokenizer is alone
    if folder.is_dir() and not any((folder / file).exists() for file in known):
        raise ConfigError(f"{name!r} cannot be loaded as a Hugging Face causal-LM checkpoint: the folder has no "
                          f"config.json (looked at {folder.absolute()}).")


def _pretrained(auto_class: Any, name: str, trust: bool, settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """`auto_class.from_pretrained`, with what it cannot load reported in one sentence."""
    _require(name)
    try:
        return auto_class.from_pretrained(str(folder_of(name)), trust_remote_code=trust, **settings)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{name!r} cannot be loaded as a Hugging Face causal-LM checkpoint: {reason}") from error
