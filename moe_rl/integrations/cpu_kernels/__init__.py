"""One switch for the operators that this library replaces on a CPU: `use_cpu_kernels`."""

from __future__ import annotations

from typing import Any

import torch

from moe_rl.integrations.cpu_kernels import attention as attention_cpu
from moe_rl.integrations.cpu_kernels import experts as experts_cpu
from moe_rl.integrations.cpu_kernels import norms as norms_cpu


def use_cpu_kernels(model: Any) -> bool:
    """Make a transformers model on the CPU compute with this library's operators; returns whether it now does.

    False, and nothing is changed, when the model is not on the CPU, is not in float32 or float64, or does not dispatch
    its experts to transformers' default (`experts_cpu.register`). Norms and attention layers of other forms than the
    replaced ones keep their own. Outputs and gradients agree with the model's own to float rounding. A model, or a copy
    of it, that is moved to another device or dtype afterwards computes with its own again. A saved checkpoint does not
    mention it.
    """
    weight = next(model.parameters())
    possible = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
    if not (possible and experts_cpu.register(model)):
        return False
    norms_cpu.replace_norms(model)
    attention_cpu.replace_attention(model)
    return True
