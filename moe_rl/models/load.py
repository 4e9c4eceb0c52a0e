"""A model and its tokenizer: a preset with weights drawn from a seed, or any Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, raise_os_errors
from moe_rl.models import checkpoints
from moe_rl.models.kernels_cpu import use_cpu_kernels
from moe_rl.models.presets import PRESETS, hf_config, placement
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.routing.balance import keep_routers_in
from moe_rl.routing.sites import find_sites

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in eval mode and the tokenizer that goes with it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(model_config: ModelConfig, seed: int, trust_remote_code: bool = False) -> LoadedModel:
    """The preset, with weights drawn from `seed`, or the checkpoint that `model_config.name` names, whose weights are
    its own.

    A checkpoint is a directory written by `save_pretrained`, or a name on the Hugging Face hub; it brings its own
    tokenizer and chat template. Code that it may bring is run only if `trust_remote_code` says so. The global random
    state is left as it was. Raises ConfigError for an unknown name, a missing folder, an impossible device or dtype, or
    a setting that does not exist.
    """
    from transformers import AutoModelForCausalLM

    device, dtype = placement(model_config)
    if model_config.name in PRESETS:
        config = hf_config(model_config)
        with torch.random.fork_rng(devices=[]):  # drawn on the CPU, so that every device starts from the same weights
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would also seed CUDA
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tokenizer = byte_tokenizer(config.vocab_size)
    else:
        model, tokenizer = _from_checkpoint(model_config, dtype, trust_remote_code)
    model = model.to(device).eval()
    if model_config.router_dtype is not None:
        keep_routers_in(model, wide := getattr(torch, model_config.router_dtype))
        if model_config.name not in PRESETS and wide != dtype:
            # What was trained in this dtype may be saved in it: read as the rest is, it would be rounded.
            whole = checkpoints.load_weights(model_config.name, wide, trust_remote_code)
            for site, exact in zip(find_sites(model), find_sites(whole), strict=True):
                site.module.load_state_dict(exact.module.state_dict())
    use_cpu_kernels(model)
    return LoadedModel(model, tokenizer)


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face checkpoint; `AutoModelForCausalLM.from_pretrained(folder)` returns the same bits."""
    with no_progress_bars(), raise_os_errors(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences those of transformers, which would break up a study's own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _from_checkpoint(
    model_config: ModelConfig, dtype: torch.dtype, trust: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    name = model_config.name
    hf_config(model_config, trust)  # the cheap part first: does it exist, does it take overrides
    tokenizer = checkpoints.load_tokenizer(name, trust)
    model = checkpoints.load_weights(name, dtype, trust)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name} has no EOS token, so no completion could ever end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer of {name} has {len(tokenizer)} tokens but the model only {rows} embeddings: they do not "
            "belong together."
        )
    return model, tokenizer
