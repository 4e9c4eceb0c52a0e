"""The real verl on CPUs: `make test-verl` installs it and runs these tests. Skipped where it is absent."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    RAY_USAGE_STATS_ENABLED="0",
    VERL_PLATFORM="cpu",
    VERL_USE_EXTERNAL_MODULES="tests.verl.cpu_platform",
    RAY_DEDUP_LOGS="0",
    RAY_prestart_worker_first_driver="0",
    HYDRA_FULL_ERROR="1",
    RAY_worker_niceness="0",
)

HAVE_VERL = importlib.util.find_spec("verl") is not None
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)


class Absent(pytest.Module):
    def collect(self):
        pytest.skip("tests against the real verl are run by `make test-verl`", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    """Their imports would fail before a mark could skip them."""
    return None if HAVE_VERL else Absent.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3-MoE whose routers decide clearly."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(20)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A tiny model with a tokenizer of characters, and sums as a parquet file."""
    import pandas as pd
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("ppo")
    words = {t: i for i, t in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+-*/=? abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | {"vocab_size": len(fast)})).save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 8 * a + b},
        }
        for a in range(4)
        for b in range(4)
    ]
    pd.DataFrame(rows).to_parquet(folder / "sums.parquet")
    return folder


@pytest.fixture(scope="session")
def one_rank():
    """A process group of this process alone, and our engine in verl's registry."""
    import torch.distributed as dist
    import verl  # noqa: F401

    from moe_rl.integrations.verl.plugin import activate

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    activate()
    yield
    dist.destroy_process_group()
