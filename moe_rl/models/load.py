"""A model and its tokenizer: a preset with weights drawn from a seed, or a Hugging Face checkpoint (of the package, a
folder or a name on the hub), which is read whole or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moe_rl.config import SHIPPED, ModelConfig, folder_of
from moe_rl.errors import ConfigError
from moe_rl.models.adapters import find_layers, merged
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.registry import import_component, unknown
from moe_rl.routing.moe_layers import find_moe_layers

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
    "qwen3_moe-fine": (
        "qwen3_moe",
        _QWEN3_MOE
        | {"num_hidden_layers": 12, "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 24},
    ),
    "olmoe-tiny": ("olmoe", _NO_HEAD_DIM | {"intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}),
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
"""Name → (Hugging Face model type, settings of its configuration). 0.7 M parameters; `-bench` 6.7 M, `-fine` 3.8 M."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in eval mode and the tokenizer that goes with it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored: Mapping[str, Tensor] | None = None
    """Weights and buffers of a `model` that is on the meta device, each read when it is asked for."""

    def weights(self) -> Mapping[str, Tensor]:
        """Weights and buffers by name, as transformers names them in memory."""
        return dict(self.model.named_buffers()) | self.model.state_dict() if self.stored is None else self.stored


def load(model_config: ModelConfig, seed: int, trust_remote_code: bool = False) -> LoadedModel:
    """The preset `model_config.name`, with weights drawn from `seed`, or the checkpoint, with its own weights,
    tokenizer and chat template.

    Code of a checkpoint runs only with `trust_remote_code`. The global random state stays as it was. Raises ConfigError
    for an unknown name or setting, a missing folder, and an impossible device or dtype.
    """
    from transformers import AutoModelForCausalLM

    device, dtype = placement(model_config)
    if model_config.name in PRESETS:
        config = hf_config(model_config)
        with torch.random.fork_rng(devices=[]):  # drawn on the CPU, so that every device starts from the same weights
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would also seed CUDA
            model: Any = _with_wide_buffers(AutoModelForCausalLM.from_config(config, dtype=dtype))
        tokenizer = byte_tokenizer(config.vocab_size)
    else:
        model, tokenizer = _load_checkpoint(model_config, dtype, trust_remote_code)
    model = model.to(device).eval()
    if model_config.router_dtype is not None:
        keep_routers_in(model, wide := getattr(torch, model_config.router_dtype))
        if model_config.name not in PRESETS and wide != dtype:
            # Routers that were trained in this dtype may be saved in it: read as the rest, they would be rounded.
            wide_model = load_weights(model_config.name, wide, trust_remote_code)
            for moe_layer, exact in zip(find_moe_layers(model), find_moe_layers(wide_model), strict=True):
                moe_layer.module.load_state_dict(exact.module.state_dict())
    import_component("operators", "cpu_kernels", "moe_rl.integrations.cpu_kernels:use_cpu_kernels")(model)
    return LoadedModel(model, tokenizer)


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face checkpoint, adapters merged; `AutoModelForCausalLM.from_pretrained(folder)` returns the same
    bits. Of a PeftModel the adapters are written, as PEFT does it."""
    weights = dict(merged(model)) if find_layers(model) and not hasattr(model, "active_peft_config") else None
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers, which break up a study's own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_checkpoint(config: ModelConfig, dtype: torch.dtype, trust: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    hf_config(config, trust)  # the cheap part first: does it exist, does it take overrides
    tokenizer = load_tokenizer(config.name, trust)
    model: Any = load_weights(config.name, dtype, trust)
    complete_tokenizer(tokenizer, model, config.name)
    return model, tokenizer


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, model: Any, name: str) -> None:
    """Give the tokenizer of the checkpoint `name` a padding token. Raises ConfigError for one without an EOS token, and
    for one with more tokens than the model."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name} has no EOS token, so no completion could end. Set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(f"the tokenizer of {name} has {len(tokenizer)} tokens, but the model has {rows} embeddings")


def hf_config(model_config: ModelConfig, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The Hugging Face configuration with its overrides. No weights are made or read."""
    from transformers import CONFIG_MAPPING

    if model_config.name not in PRESETS:
        if model_config.overrides:
            raise ConfigError(f"model {model_config.name!r} is a checkpoint, so it takes no overrides")
        if not may_exist(model_config.name):
            unknown("model preset or checkpoint folder", model_config.name, [*PRESETS, *SHIPPED])
        return load_config(model_config.name, trust_remote_code)
    model_type, settings = PRESETS[model_config.name]
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(config_class.attribute_map) | set(settings)
    for key in model_config.overrides:
        if key not in known:
            unknown(f"setting of the {model_type} configuration", key, known)
    overrides = {config_class.attribute_map.get(key, key): value for key, value in model_config.overrides.items()}
    try:
        return config_class(**{**settings, **overrides})
    except Exception as error:  # of huggingface_hub's validators, which share no base with ValueError
        raise ConfigError(f"model.overrides={model_config.overrides}: {' '.join(str(error).split())}") from error


def skeleton(model_config: ModelConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model on the meta device, from its configuration alone: names, shapes and layout."""
    from transformers import AutoModelForCausalLM

    config, (_, dtype) = hf_config(model_config, trust_remote_code), placement(model_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
    return _with_wide_buffers(model).eval()


def _with_wide_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """A new model with the buffers in float32 that `from_pretrained` would keep so, e.g. correction biases."""
    wide = model._keep_in_fp32_modules_strict or () if model.dtype.itemsize == 2 else ()
    for module in model.modules():
        for name in module._buffers.keys() & wide:
            module._buffers[name] = module.get_buffer(name).float()
    return model


def placement(model_config: ModelConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a configuration. Raises ConfigError for a missing device or an unknown dtype."""
    dtype = getattr(torch, model_config.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"model.dtype={model_config.dtype!r} is unknown. Use float32 or bfloat16.")
    if is_missing(model_config.device):
        raise ConfigError(f"model.device={model_config.device!r} does not exist on this machine. Use cpu.")
    return torch.device(model_config.device), dtype


def is_missing(device: str) -> bool:
    """Whether this machine lacks a device. Raises ConfigError for one that PyTorch does not know."""
    try:
        known = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device={device!r} is unknown. Use cpu, cuda or cuda:<index>.") from error
    count = getattr(getattr(torch, known.type, None), "device_count", lambda: 0)
    return known.type != "cpu" and (known.index or 0) >= count()


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
        raise ConfigError(f"{name!r} is a PEFT adapter, not a model. Merge it into its base (merge_and_unload) first.")
    return _pretrained(AutoConfig, name, trust_remote_code)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises ConfigError when it has none."""
    from transformers import AutoTokenizer

    tokenizer = _pretrained(AutoTokenizer, name, trust_remote_code)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one when it finds no files
        raise ConfigError(f"{name!r} has no tokenizer. Save the model's tokenizer in the same folder.")
    return tokenizer


def load_weights(name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a checkpoint. Raises ConfigError for weights that are missing or of another shape,
    which transformers would replace by random ones with no more than a warning."""
    from transformers import AutoModelForCausalLM

    model, info = _pretrained(
        AutoModelForCausalLM,
        name,
        trust_remote_code,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    for fault, keys in (("lacks", info["missing_keys"]), ("has other shapes of", info["mismatched_keys"])):
        names = sorted(key if isinstance(key, str) else key[0] for key in keys)
        if names:
            raise ConfigError(
                f"{name!r} {fault} {len(names)} of the weights of {type(model).__name__} ({', '.join(names[:3])}), "
                "which would be random. Save the whole model."
            )
    return model


def check_weights(name: str) -> list[Path]:
    """The safetensors files of a folder's weights, of which only headers are read; none for a name on the hub. Raises
    ConfigError for a missing folder, and for missing or damaged files."""
    if not may_exist(name):
        raise ConfigError(f"there is no checkpoint folder {name!r} (searched at {folder_of(name).absolute()})")
    folder = folder_of(name)
    if not folder.is_dir():
        return []
    files = [folder / WHOLE] if (folder / WHOLE).exists() else []
    if not files and (folder / INDEX).exists():
        shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted({folder / file for file in shards})
    if not files and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"{name!r} cannot be loaded: it holds no weights ({WHOLE}, or {INDEX} and its shards).")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} is missing or damaged ({error}). Copy it again.") from error
    return files


def _pretrained(auto_class: Any, name: str, trust: bool, **settings: Any) -> Any:
    """`auto_class.from_pretrained`. Raises ConfigError for a folder that is missing or has no configuration, which
    transformers would look up on the hub, and for what cannot be read."""
    folder = folder_of(name)
    files = ("config.json", "adapter_config.json", "tokenizer_config.json")  # the last: a tokenizer alone
    if not may_exist(name) or folder.is_dir() and not any((folder / file).exists() for file in files):
        raise ConfigError(f"{name!r} is no Hugging Face checkpoint: no config.json in {folder.absolute()}")
    try:
        return auto_class.from_pretrained(str(folder), trust_remote_code=trust, **settings)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{name!r} cannot be loaded: {error}") from error


def make_deterministic() -> None:
    """Make equal inputs give equal bits in this process: on the same card, with the same versions, cut into the same
    forwards.

    Call it before the first product on a card, since cuBLAS reads its workspace once. Attention then uses plain
    products, whose memory grows with time², since the backwards of fused ones add in any order. torch warns of
    operations that it calls nondeterministic; those used here add each row in one order. Raises ConfigError where CUDA
    has begun without it.
    """
    default = ":4096:8"  # cuBLAS adds in one order with this workspace, and with :16:8
    if (workspace := os.environ.get("CUBLAS_WORKSPACE_CONFIG")) not in (default, ":16:8"):
        if torch.cuda.is_initialized():
            raise ConfigError(
                f"CUDA has started with CUBLAS_WORKSPACE_CONFIG={workspace!r}. Call make_deterministic() first, or set "
                f"it to {default}."
            )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = default
    torch.use_deterministic_algorithms(True, warn_only=True)
    for allow in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{allow}_sdp")(False)


def keep_routers_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the parameters of every router in `dtype`, and cast its inputs. Its logits and combine weights are then of
    this dtype; the experts read hidden states in the model's."""
    for moe_layer in find_moe_layers(model):
        moe_layer.module.to(dtype)
        moe_layer.module.register_forward_pre_hook(_cast, with_kwargs=True)


def _cast(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    dtype = next(module.parameters()).dtype

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(cast, args)), {name: cast(x) for name, x in kwargs.items()}
