"""One switch for the operators that this library replaces on a CPU: `use_cpu_kernels`."""

from __future__ import annotations

from typing import Any

import torch

from moe_rl.models import attention_cpu, experts_cpu, norms_cpu


def use_cpu_kernels(model: Any) -> bool:
    """Make a transformers model on the CPU compute with this library's operators; returns whether any is replaced.

    Each falls back to the model's own by itself where it does not fit. Nothing is changed when the model is not on the
    CPU or not in float32 or float64. Outputs and gradients agree with the model's own to float rounding. A saved
    checkpoint does not mention it.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        return False
    replaced = [experts_cpu.register(model), norms_cpu.replace_norms(model), attention_cpu.replace_attention(model)]
    return any(replaced)
