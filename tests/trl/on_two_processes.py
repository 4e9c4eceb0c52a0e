"""Launched by torchrun: two processes train, and each finds in its logs the statistics of the rows of both."""

from __future__ import annotations

import math
import os
import sys

import torch
import torch.distributed as dist

from tests.trl.conftest import logged, ours
from tests.trl.spy import Spy, expected_logs, tokens_of


def main(folder):
    torch.set_num_threads(1)
    trainer = ours(folder, routing={"routes": "old_policy"}, ddp_backend="gloo", max_completion_length=24, max_steps=4)
    spy = Spy(trainer)
    trainer.train()
    mine = [tokens_of(step, step["unconstrained"]) for step in spy.steps]
    everyones = [None, None]
    dist.all_gather_object(everyones, mine)
    assert len(mine) == 8 and everyones[0] != everyones[1]
    widths = [None, None]
    dist.all_gather_object(widths, [step["train"]["tokens"].shape[1] for step in spy.steps])
    assert widths[0] != widths[1]  # so that one process must pad what it gives to the other
    pooled = [[sum(parts, []) for parts in zip(*both, strict=True)] for both in zip(*everyones, strict=True)]
    for name, expected in expected_logs(pooled).items():
        assert expected[-1] != 0
        for ours_, theirs in zip(logged(trainer, name), expected, strict=True):
            assert math.isclose(ours_, theirs, rel_tol=1e-6, abs_tol=1e-12), (name, ours_, theirs)
    alone = expected_logs(mine)
    assert alone["routing/expert_change_rate"][-1] != expected_logs(pooled)["routing/expert_change_rate"][-1]
    print(f"process {dist.get_rank()} agrees", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # gloo threads that DDP still holds can abort an interpreter that ends: pytorch#190489


main(sys.argv[1])
