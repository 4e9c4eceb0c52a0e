"""The rollout engine that a run's settings ask for."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch

from moe_rl.config import EngineConfig, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.integrations.vllm.answers import ROUTES
from moe_rl.integrations.vllm.checked import CheckedEngine, CheckpointReceiver
from moe_rl.integrations.vllm.engine import INSTALL, VLLMEngine
from moe_rl.integrations.vllm.push import Score, Tolerance, describe, probe_prompts
from moe_rl.integrations.vllm.server import ServerEngine
from moe_rl.models.load import LoadedModel
from moe_rl.registry import Use
from moe_rl.rollouts.base import RolloutEngine
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.mismatch import MismatchedEngine

OF_HF = ("experts", "int8", "router_noise")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
OF_VLLM = ("gpu_memory", "max_tokens")
STOPS_OF_OPENAI = 4
"""Most stop strings of a request to `/v1/completions`; vLLM refuses more."""


def check_engine(run: RunConfig) -> None:
    """Raise ConfigError, before any compute is spent, for engine settings that fit neither each other nor the run."""
    engine, default = run.engine, EngineConfig()
    server = engine.name.startswith(("http://", "https://"))
    if engine.name not in ("hf", "vllm") and not server:
        raise ConfigError(f"engine.name={engine.name!r}: choose hf, vllm, or the address of a server (http://…).")
    applies = OF_HF if engine.name == "hf" else OF_VLLM if engine.name == "vllm" else ("dialect",)
    for name in (*OF_HF, *OF_VLLM, "dialect"):
        if name not in applies and getattr(engine, name) != getattr(default, name):
            value = getattr(engine, name)
            raise ConfigError(f"engine.{name}={value!r} has no effect with engine.name={engine.name!r}.")
    if server and engine.dialect == "openai" and len(run.stop) > STOPS_OF_OPENAI:
        raise ConfigError(f"stop has {len(run.stop)} texts, but /v1/completions takes at most {STOPS_OF_OPENAI}: set "
                          "engine.dialect=vllm (or sglang), or give fewer.")
    if engine.name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"engine.name='vllm', but vLLM is not installed here; {INSTALL}")
    if engine.routes not in ROUTES:
        raise ConfigError(f"engine.routes={engine.routes!r}: choose {', '.join(ROUTES)}.")
    sources = [Use.of(routes) for routes in (run.arm.routes, run.arm.ratio_routes) if routes is not None]
    replayed = {name for use in sources for name in (use.name, use.options.get("base"))}
    if engine.routes == "off" and "rollout" in replayed:
        raise ConfigError("routes='rollout' replays the engine's routes, but engine.routes='off' asks for none.")
    if engine.dtype is not None and not isinstance(getattr(torch, engine.dtype, None), torch.dtype):
        raise ConfigError(f"engine.dtype={engine.dtype!r} is no dtype of torch; use bfloat16 or float32.")
    if engine.experts not in (None, *EXPERTS):
        raise ConfigError(f"engine.experts={engine.experts!r}: choose {', '.join(EXPERTS)}.")
    if run.truncates and not (run.sampling_mask and engine.name == "hf"):
        why = f"engine {engine.name!r} does not say what it kept" if run.sampling_mask else "sampling_mask=False"
        warnings.warn(
            f"top_p={run.top_p:g}, top_k={run.top_k}, min_p={run.min_p:g} without their mask ({why}): completions are "
            "drawn from the kept tokens, but the trainer's log-probs are over the whole vocabulary, so that engine and "
            "trainer, and an engine's log-probs as anchor, are different distributions. What corrects for it is "
            "truncated, masked or another correction; the engine hf gives the mask.", stacklevel=2)
    if engine.router_noise < 0:
        raise ConfigError(f"engine.router_noise={engine.router_noise} must not be negative.")


def engine_of(
    run: RunConfig, loaded: LoadedModel | None, score: Score, folder: Path, *, shared: bool = True
) -> RolloutEngine:
    """The engine. `score` is the policy's; `folder` is where an engine elsewhere finds the model's description, and a
    server its weights. `loaded` is None on ranks that have no engine.

    `shared` says that `loaded.model` is the policy's own module: the Hugging Face engine then has the policy's weights
    or, where its numerics differ on purpose, a copy of them. Any other engine is checked after every push.
    """
    settings = run.engine
    if settings.name == "hf" and shared and loaded is not None:
        if settings == EngineConfig(routes=settings.routes):
            return HFEngine(loaded.model, loaded.tokenizer, record_routes=settings.routes != "off")
        return MismatchedEngine(loaded.model, loaded.tokenizer, settings)
    computes = run.parallel.compute_dtype or run.model.dtype
    tolerance = Tolerance.of(settings.dtype or run.model.dtype, run.model.dtype, computes)
    if loaded is None:
        return CheckedEngine(None, score, [], tolerance, run.temperature)
    probes = probe_prompts(loaded.tokenizer, loaded.model.config.vocab_size)
    return CheckedEngine(_with_own_weights(run, loaded, folder), score, probes, tolerance, run.temperature)


def _with_own_weights(run: RunConfig, loaded: LoadedModel, folder: Path) -> CheckpointReceiver | HFEngine:
    settings = run.engine
    if settings.name == "hf":
        return HFEngine(loaded.model, loaded.tokenizer, record_routes=settings.routes != "off")
    folder.mkdir(parents=True, exist_ok=True)
    describe(loaded.model, loaded.tokenizer, folder)
    if settings.name == "vllm":
        return VLLMEngine(
            folder,
            loaded.tokenizer,
            dtype=settings.dtype or run.model.dtype,
            routes=settings.routes,
            max_tokens=settings.max_tokens,
            memory=settings.gpu_memory,
        )
    return ServerEngine(
        settings.name, folder, loaded.tokenizer, dialect=settings.dialect, routes=settings.routes
    )
