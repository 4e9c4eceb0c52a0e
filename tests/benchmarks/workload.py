"""What both sides of the speed benchmark run. Imports neither `moe_rl` nor TRL: each side has its own environment."""

from __future__ import annotations

import os

# Before torch is imported: one thread, no tokenizer threads, no network.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, MINI_BATCHES = 32, 8, 6, 16, 4
LR = 1e-5


def model() -> Qwen3MoeForCausalLM:
    """6.7 M parameters, random, float32, transformers' default experts and attention."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,
        norm_topk_prob=True,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen3MoeForCausalLM(config)


def tokenizer(eos: bool = True) -> PreTrainedTokenizerFast:
    """One token per character, 64 of them; ids 0 and 1 are padding and EOS."""
    characters = [chr(ord("0") + i) for i in range(62)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>" if eos else None)


def prompts(count: int, seed: int = 0) -> list[str]:
    """Digits and an equals sign, `PROMPT_TOKENS` tokens each."""
    digits = torch.randint(0, 10, (count, PROMPT_TOKENS - 1), generator=torch.Generator().manual_seed(seed))
    return ["".join(map(str, row)) + "=" for row in digits.tolist()]


def reward(text: str) -> float:
    """Share of characters with an odd code: cheap, and never equal in a whole group."""
    return sum(ord(character) % 2 for character in text) / max(1, len(text))
