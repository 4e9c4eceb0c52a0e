"""A file and checkpoints by name → a diagnosis: what `moe-rl diagnose` does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from moe_rl.analysis.diagnose.diagnosis import Diagnosis, diagnose
from moe_rl.analysis.diagnose.responses import Rollouts
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.load import PRESETS, check_weights, load, load_tokenizer, no_progress_bars, placement, skeleton
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import Layout


def diagnose_checkpoint(
    rollouts: str,
    checkpoint: str,
    *,
    also: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float32",
    router_dtype: str | None = None,
    responses: int = 128,
    batch_tokens: int = 4096,
    trust_remote_code: bool = False,
) -> Diagnosis:
    """`diagnose` of a file, against a Hugging Face checkpoint in the trainer's dtype and those in `also`. Raises
    ConfigError, before weights are read, for a file that cannot be used and for checkpoints that are no versions of one
    model."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # else up to 1 GB of compiled bfloat16 products
    if batch_tokens < 1:
        raise ConfigError(f"--batch-tokens {batch_tokens}: a forward needs at least 1.")
    if router_dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--router-dtype {router_dtype!r} is none; use float32 or bfloat16.")
    settings = [ModelConfig(name=name, device=device, dtype=dtype, router_dtype=router_dtype)
                for name in (checkpoint, *also)]
    placement(settings[0])
    (layout, sizes), *others = [_described(s, trust_remote_code) for s in settings]
    for name, (other, _) in zip(also, others, strict=True):
        try:
            layout.require(other, f"--also {name}")
        except RoutingError as error:
            raise ConfigError(f"--also {name} is no version of {checkpoint}: {error}") from error
    read = Rollouts(rollouts, layout, vocabulary=sizes.vocab_size, num_layers=sizes.num_hidden_layers, limit=responses,
                    tokenizer=load_tokenizer(checkpoint, trust_remote_code))
    with no_progress_bars():
        loaded, *older = [load(s, seed=0, trust_remote_code=trust_remote_code) for s in settings]
    return diagnose(read, loaded.model, tokenizer=loaded.tokenizer, batch_tokens=batch_tokens,
                    also={name: other.model for name, other in zip(also, older, strict=True)})


def _described(settings: ModelConfig, trust: bool) -> tuple[Layout, Any]:
    """Layout and sizes of a checkpoint, from its configuration alone."""
    if settings.name in PRESETS:
        raise ConfigError(f"{settings.name!r} is a preset, whose weights are random; give the folder of a checkpoint.")
    check_weights(settings.name)
    model: Any = skeleton(ModelConfig(name=settings.name), trust)
    try:
        return layout_of(model), model.config.get_text_config()
    except RoutingError as error:
        raise ConfigError(f"{settings.name}: {error}") from error
