"""Arithmetic on a GPU that repeats itself bit for bit, as arithmetic on a CPU does unasked."""

from __future__ import annotations

import os

import torch

from moe_rl.errors import ConfigError

WORKSPACES = (":4096:8", ":16:8")
"""What cuBLAS may be given in CUBLAS_WORKSPACE_CONFIG to add in one order."""


def deterministic() -> None:
    """From now on, the same inputs give the same bits in this process: on the same card, with the same versions, cut
    into the same forwards.

    Call it before the first product on a card, since cuBLAS reads its workspace once. Attention is then computed by
    plain products, whose memory grows with time²: the backwards of fused ones add in any order. torch warns of
    operations that it calls nondeterministic; those used here (cumulative sums of a batch of rows, counts of integers,
    cross entropy without reduction) add each row in one order. Raises ConfigError where CUDA has begun without it.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in WORKSPACES:
        if torch.cuda.is_initialized():
            raise ConfigError(f"CUDA has begun with CUBLAS_WORKSPACE_CONFIG="
                              f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG')!r}, so its products may differ from run to "
                              f"run: call deterministic() first of all, or set it to {WORKSPACES[0]} outside.")
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACES[0]
    torch.use_deterministic_algorithms(True, warn_only=True)
    for allow in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{allow}_sdp")(False)
