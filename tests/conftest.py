"""Tiny models of real families, shared by the tests.

Every annotated shape in `moe_rl` is checked at every call. One thread, torch's and BLAS': two on two busy cores stall
each other.
"""

from __future__ import annotations

import importlib.util
import os
import re
from importlib.metadata import version

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when NumPy is imported

import gc

import pytest
import torch
from packaging.version import Version

from tests import typecheck

typecheck.install("moe_rl")
gc.disable()  # until all is imported: a fifth of the seconds of the collection
torch.set_num_threads(1)

CPU_KERNELS = hasattr(torch.nn.functional, "grouped_mm") and Version(version("transformers")) >= Version("5.7")
"""Whether models on a CPU can compute with the library's own operators."""
SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}


def python_block(page: str, part: str) -> str:
    """The one block of Python in the text of a page in which `part` occurs."""
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if part in block)
    return block


def build(family: str, seed: int = 0, **overrides):
    """A tiny random model with routing that is neither uniform nor degenerate."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **overrides})
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("gate.weight", "router.weight")):
                    parameter.normal_(0, 0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
    return model


def perturb(model, scale: float = 0.1, seed: int = 1) -> None:
    """Move every weight a little, so that live routes differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())


def pytest_collection_finish(session):
    gc.freeze()  # modules and items, which live to the end
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests stay together under `-n`: what its fixtures train, or launch, is made by one worker and not by
    each. Files of many tests go first."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_terminal_summary(terminalreporter):
    reasons = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])}
    for reason in sorted(reason for reason in reasons if "make test-" in reason):
        terminalreporter.write_line(reason)


@pytest.fixture
def forked_workers():
    """Workers of studies that are forked from this process."""
    from tests.forked import forking

    with forking():
        yield


@pytest.fixture
def qwen():
    return build("qwen3_moe")


@pytest.fixture
def tokens():
    return torch.randint(3, 48, (4, 9), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def one_rank(tmp_path):
    """This process as the only rank of a group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def pretend_installed(monkeypatch, package: str) -> None:
    """As if a package were installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: object() if name == package else find(name, *more)
    )
