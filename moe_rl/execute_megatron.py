"""The parts of a run whose policy is Megatron-core: the policy on every rank, everything else on rank 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from moe_rl import ranks
from moe_rl.cold_start import cold_start
from moe_rl.config import RunConfig
from moe_rl.losses import objective_of
from moe_rl.memory import check_memory, estimate_memory
from moe_rl.models import LoadedModel, encode_prompts, hf_config, load, save_checkpoint
from moe_rl.rollouts.choose import engine_of
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.request import check_request, context_length
from moe_rl.routing.sources import RouteSource
from moe_rl.tasks.base import Task, held_out
from moe_rl.trainer import Parts, sampling_of
from moe_rl.types import Prompt


def build_on_ranks(run: RunConfig, task: Task, source: RouteSource, folder: Path, cache: Path) -> Parts:
    """As `execute.build`, for all ranks together. Rank 0 has the Hugging Face model, past its cold start: where the
    policy starts from, and what the Hugging Face engine samples from."""
    ranks.join(run.model.device)
    from moe_rl.policies.megatron import MegatronPolicy  # Megatron-core asks for process groups when it is imported

    loaded = load(run.model, run.cold_start.seed) if ranks.rank() == 0 else None
    evaluation, pad_token = ranks.once(lambda: _prepare(run, task, loaded, cache))
    model = loaded.model if loaded else _without_weights(run)
    policy_of = partial(MegatronPolicy, model, parallel=run.parallel, temperature=run.temperature)
    policy = policy_of(
        run.optimizer,
        micro_batch=run.micro_batch,
        recompute=run.activation_checkpointing,
        device=run.model.device,
    )

    def export(step: int) -> None:
        """Collective. The Hugging Face model has the policy's weights only where the engine samples from it."""
        weights = policy.weights()
        if loaded is None:
            for _ in weights:
                pass
            return
        HFEngine(loaded.model, loaded.tokenizer).load(weights)
        save_checkpoint(loaded.model, loaded.tokenizer, folder / "checkpoints" / f"step={step:06d}")

    return Parts(
        task=task,
        policy=policy,
        engine=engine_of(run, loaded, policy.score, folder / "engine", shared=False),
        objective=objective_of(run.arm),
        source=source,
        encode=partial(encode_prompts, tokenizer=loaded and loaded.tokenizer),
        pad_token=pad_token,
        held_out=evaluation,
        reference=policy_of(None, device=run.model.device) if run.arm.kl else None,
        export=export,
        once=ranks.once,
    )


def _prepare(run: RunConfig, task: Task, loaded: LoadedModel, cache: Path) -> tuple[list[Prompt], int]:
    """The cold start; evaluation prompts and the padding token."""
    tokenizer = loaded.tokenizer
    evaluation = encode_prompts(held_out(task, run.eval_prompts), tokenizer)
    check_request(evaluation, 1, sampling_of(run), context_length(loaded.model.config))
    check_memory(estimate_memory(run, max(len(p.tokens) for p in evaluation)), run.model.device)
    cold_start(loaded, task, run, cache)
    return evaluation, tokenizer.pad_token_id


def _without_weights(run: RunConfig) -> torch.nn.Module:
    """The Hugging Face model as names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(run.model), dtype=getattr(torch, run.model.dtype))
