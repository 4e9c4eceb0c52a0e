"""Qwen3-30B-A3B with verl on Ray, on one or two nodes of eight GPUs: float32 weights, bfloat16 products, vLLM."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from one_node import study as one_node  # noqa: E402

from moe_rl.registry import Component  # noqa: E402

study = replace(
    one_node,
    name="verl_nodes",
    base=one_node.base.replace(
        policy=Component("fsdp", compute_dtype="bfloat16"),
        engine=Component("vllm", dtype="bfloat16"),
    ),
)
