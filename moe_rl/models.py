"""Small MoE models of real architectures with a byte-level tokenizer, and loading of any Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_rl import checkpoints
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError
from moe_rl.experts_cpu import use_cpu_experts
from moe_rl.lookup import unknown
from moe_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# 2^-3 = 1/sqrt(hidden): at the usual 0.02, scores of so narrow a router differ by 0.1 and the model learns nothing.
_TINY = {
    "vocab_size": 258,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.125,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
_NO_HEAD_DIM = {k: v for k, v in _TINY.items() if k != "head_dim"}  # for families that derive it
_DEEPSEEK_LIKE = {  # one dense layer, shared expert, sigmoid scores with a selection bias, experts chosen within groups
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
}
_QWEN3_MOE = _TINY | {
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe-tiny": ("qwen3_moe", _QWEN3_MOE),
    "qwen3_moe-bench": (
        "qwen3_moe",
        _QWEN3_MOE
        | {
            "vocab_size": 64,
            "hidden_size": 128,
            "num_hidden_layers": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "eos_token_id": 62,
            "pad_token_id": 63,
        },
    ),
    "olmoe-tiny": (
        "olmoe",
        _NO_HEAD_DIM | {"intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
    ),
    "mixtral-tiny": ("mixtral", _TINY | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3-tiny": (
        "deepseek_v3",
        _NO_HEAD_DIM
        | _DEEPSEEK_LIKE
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss-tiny": (
        "gpt_oss",
        _TINY
        | {
            "intermediate_size": 32,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe-tiny": ("glm4_moe", _TINY | _DEEPSEEK_LIKE),
}
"""Name → (Hugging Face model type, settings of its configuration). About 0.7 M parameters each; `-bench` 6.7 M."""


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
    use_cpu_experts(model)
    return LoadedModel(model, tokenizer)


def hf_config(model_config: ModelConfig, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face configuration, overrides applied, without any weights being made or read."""
    from transformers import CONFIG_MAPPING

    if model_config.name not in PRESETS:
        if model_config.overrides:
            raise ConfigError(
                f"model {model_config.name!r} is a checkpoint, whose weights fix its shape, so the overrides "
                f"{dict(model_config.overrides)!r} cannot apply; presets with overrides are {', '.join(PRESETS)}."
            )
        if not checkpoints.may_exist(model_config.name):
            unknown("model preset or checkpoint folder", model_config.name, PRESETS)
        return checkpoints.load_config(model_config.name, trust_remote_code)
    model_type, settings = PRESETS[model_config.name]
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | set(settings)
    for key in model_config.overrides:
        if key not in known:
            unknown(f"setting of the {model_type} configuration", key, known)
    overrides = {config_class.attribute_map.get(key, key): value for key, value in model_config.overrides.items()}
    try:
        return config_class(**{**settings, **overrides})
    except Exception as error:  # transformers' validation raises classes of its own
        raise ConfigError(f"{model_config.name} refuses the overrides {overrides!r}: {error}") from error


def skeleton(model_config: ModelConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without memory or weights (on the meta device), from its configuration alone: names, shapes, layout."""
    from transformers import AutoModelForCausalLM

    config, (_, dtype) = hf_config(model_config, trust_remote_code), placement(model_config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype).eval()


def byte_tokenizer(vocab_size: int = 258) -> PreTrainedTokenizerBase:
    """Bytes as tokens: any text becomes its UTF-8 bytes and comes back exactly.

    Ids 0 … 255 are the bytes, then come end and padding. The text `<|end|>` in a prompt is seven bytes, not the end.
    With fewer than 258 ids only the first bytes from the space (32) on are known, the last known id standing for all
    others; `encode_prompts` refuses prompts that contain it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    complete = vocab_size >= 258
    letters = _letters_of_bytes()
    known = letters if complete else letters[32 : 32 + vocab_size - 3]
    vocab = {letter: i for i, letter in enumerate(known)}
    if complete:
        bpe = BPE(vocab=vocab, merges=[])
    else:
        bpe = BPE(vocab=vocab | {"<|unknown|>": len(vocab)}, merges=[], unk_token="<|unknown|>")
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **({} if complete else {"unk_token": "<|unknown|>"}),
    )


def encode_prompts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts with `tokens` filled in: as one user turn where the tokenizer has a chat template, else as plain text
    with the special tokens that the tokenizer puts in front."""
    return [dataclasses.replace(p, tokens=tuple(_encode(p.text, tokenizer))) for p in prompts]


def completion_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a whole completion, EOS included."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face checkpoint; `AutoModelForCausalLM.from_pretrained(folder)` returns the same bits."""
    with no_progress_bars():
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


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer.encode(text)
    if not ids:
        raise ConfigError(f"the prompt {text!r} has no tokens; the first token of a response needs one before it.")
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise ConfigError(
            f"the tokenizer has no tokens for part of the prompt {text[:80]!r}, which the model would not see; "
            f"choose a model whose vocabulary (now {len(tokenizer)}) covers the task."
        )
    return ids


def _letters_of_bytes() -> list[str]:
    """The letter that the ByteLevel pre-tokenizer writes for each byte: itself if printable, else the next from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def placement(model_config: ModelConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a configuration. Raises ConfigError for one that is not there."""
    dtype = getattr(torch, model_config.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"model dtype {model_config.dtype!r} is none; use float32 or bfloat16.")
    try:
        device = torch.device(model_config.device)
    except RuntimeError as error:
        raise ConfigError(f"model device {model_config.device!r} is none; use cpu, cuda or cuda:<index>.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"model device {model_config.device!r} is not there: this machine shows {torch.cuda.device_count()} CUDA "
            "devices to this PyTorch; use cpu."
        )
    return device, dtype


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
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer of {name} has {len(tokenizer)} tokens but the model only {rows} embeddings: they do not "
            "belong together."
        )
    return model, tokenizer
