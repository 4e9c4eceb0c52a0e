"""`Pooled` adds sums by name, over batches and ranks, and divides only in rows."""

import math
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from moe_rl.metrics.pooled import Pooled


def sums(**values):
    return Pooled({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})


def test_sums_are_added_before_they_are_divided():
    """1 of 2 and 0 of 6 are 1/8, not 1/4; a name of one side alone keeps its value."""
    pooled = sums(router_shift=[1.0], shift_n=[2.0]) + sums(router_shift=[0.0], shift_n=[6.0], load=[[3.0, 1.0]])
    assert pooled.row()["router_shift"] == 1 / 8 and pooled.row()["load_max_violation"] == 0.5
    assert pooled.moe_layer_rows()[0]["router_shift"] == 1 / 8
    assert (Pooled() + pooled).row() == pooled.row() and math.isnan(
        sums(coverage=0.0, coverage_n=0.0).row()["coverage"]
    )


def test_logarithms_of_sums_are_added_as_sums_even_beyond_the_range_of_a_double():
    both = sums(ratio_log_r2=900.0) + sums(ratio_log_r2=900.0)
    assert both["ratio_log_r2"].item() == pytest.approx(900 + math.log(2), rel=1e-15)


def rank_sums(rank, folder, queue):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mine = sums(coverage=float(rank + 1), coverage_n=4.0, x_log_n=float(rank))
    queue.put({name: value.tolist() for name, value in (mine + sums(**{f"of_rank_{rank}": 1.0})).over_ranks().items()})
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_get_the_sums_of_both(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=rank_sums, args=(rank, tmp_path, queue)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [queue.get(timeout=600) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert found[0] == found[1]
    assert found[0]["of_rank_0"] == found[0]["of_rank_1"] == 1
    assert (found[0]["coverage"], found[0]["coverage_n"]) == (3, 8)
    assert found[0]["x_log_n"] == pytest.approx(math.log(1 + math.e), rel=1e-15)
