"""What `gpu.py` runs: random models at the sizes of real ones, batches, and what they should cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_rl.config import Arm
from moe_rl.objectives import objective_of
from moe_rl.rollouts.batches import collate
from moe_rl.types import Batch, Prompt, Rollout, Scored

OLMOE = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 50_279,
    "pad_token_id": 1,
}
"""allenai/OLMoE-1B-7B: 6.9 B parameters, of which a token uses 1.3 B."""
DEEP = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""A Qwen3-MoE as deep as Qwen3-30B-A3B: 2 B parameters."""
TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `small` is the dry run."""

    olmoe: dict
    deep: dict
    matmul: int
    rows: int
    tokens: int
    micro_batch_tokens: int
    prompts: int
    new_tokens: int
    repeats: int
    pairs: int
    updates: int
    compared: int

    @staticmethod
    def of(small: bool) -> Sizes:
        if not small:
            return Sizes(OLMOE, DEEP, 8192, 64, 512, 8192, 32, 128, 5, 31, 3, 2**21)
        deep = DEEP | TINY | {"moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
        olmoe = OLMOE | TINY | {"num_hidden_layers": 2, "num_key_value_heads": 4}
        return Sizes(olmoe, deep, 256, 4, 16, 32, 2, 4, 2, 3, 2, 4096)


def random_model(family: str, settings: dict, device: torch.device) -> torch.nn.Module:
    """In bfloat16, made on the device: norms 1, everything else normal with deviation 0.02, routers 1/sqrt(width)."""
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = settings["hidden_size"] ** -0.5 if name.endswith("gate.weight") else 0.02
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, std)
        model.model.rotary_emb.__init__(config)  # its frequencies, which to_empty left empty
    return model.to(device)


def random_batch(rows: int, tokens: int, vocabulary: int) -> Batch:
    """The second half of each row is a response; advantages are normal."""
    generator, half = torch.Generator().manual_seed(0), tokens // 2
    drawn = torch.randint(3, vocabulary, (rows, tokens), generator=generator).tolist()
    rollouts = [
        Rollout(Prompt("", tokens=tuple(r[:half])), tuple(r[half:]), torch.zeros(tokens - half), "", True)
        for r in drawn
    ]
    batch = collate(rollouts, list(range(rows)), [0.0] * rows, 0)
    advantages = torch.randn(rows, generator=generator)[:, None].where(batch.response_mask, 0)
    return Batch(**vars(batch), old_logprobs=torch.zeros_like(advantages), advantages=advantages)


GRPO = objective_of(Arm(name="grpo"))


def weighed(batch: Batch, old: Scored, replayed: bool) -> Batch:
    return GRPO.attach_weights(replace(batch, old_logprobs=old.logprobs, routes=old.routes if replayed else None))


def products(settings: dict, batch: Batch) -> float:
    """FLOPs of the matrix products of an update on a batch: twice the multiplications of a forward, three times, since
    a backward has two products for each; recomputation under checkpointing is not counted. Attention is causal, logits
    are those of responses."""
    hidden, kv = settings["hidden_size"], settings["num_key_value_heads"] / settings["num_attention_heads"]
    attention = (2 + 2 * kv) * hidden**2
    experts = 3 * settings["num_experts_per_tok"] * hidden * settings["intermediate_size"]
    per_token = settings["num_hidden_layers"] * (attention + experts + hidden * settings["num_experts"])
    rows, time = len(batch), batch.tokens.shape[1] - 1
    over_time = settings["num_hidden_layers"] * rows * time**2 * hidden  # q·k and p·v, half of each
    logits = int(batch.response_mask.sum()) * hidden * settings["vocab_size"]
    return 6 * (rows * time * per_token + over_time + logits)
