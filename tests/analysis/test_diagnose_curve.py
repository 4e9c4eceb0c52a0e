"""A few files of the generator for each dtype of the engine: faults are named, honest engines are not accused.

The operating curve is `tests/benchmarks/diagnose_curve.py`. Here are files whose gap is far from rounding.
"""

from __future__ import annotations

import pytest
import torch

from moe_rl.analysis.diagnose import diagnose
from tests.analysis.engine_files import make_file, make_honest_files

NAMED = {
    None: ("router_int8", "rope_scaling", "log_base"),
    torch.bfloat16: ("window_size", "shifted_mask", "row_shift"),
    torch.float16: ("positions_of_padding", "temperature", "top_k"),
}
OTHER = {None: "attention_warmer", torch.bfloat16: "stale_layer_unknown", torch.float16: "older_unknown"}
SEED = 40


def answer(file):
    return diagnose(file.entries, file.model, tokenizer=file.tokenizer, also=file.also)


@pytest.mark.parametrize("dtype, kind", [(dtype, kind) for dtype, kinds in NAMED.items() for kind in kinds])
def test_a_listed_fault_is_named(dtype, kind):
    file = make_file(kind, SEED, dtype)  # of an engine in another dtype that may be told, too
    found = answer(file)
    assert found.causes[:1] == (file.cause,) and not found.equally and found.fault, found.verdict


def test_stale_routes_are_named_beside_a_dtype_that_explains_the_gap():
    file = make_file("stale_routes", 4004, torch.float16)
    found = answer(file)
    assert found.causes[0] == "stale_routes" and found.fault, found.verdict


@pytest.mark.parametrize("dtype", OTHER)
def test_another_fault_is_unexplained(dtype):
    found = answer(make_file(OTHER[dtype], SEED, dtype))
    assert found.fits[0].mean > 2 * found.fits[2].mean
    assert found.fault and set(found.causes) <= {"unexplained", "routing", "combine_weights"}, found.verdict


@pytest.mark.parametrize("dtype", NAMED)
def test_an_honest_engine_is_not_accused(dtype):
    """Four files, of one response to 31."""
    for file in make_honest_files(SEED, dtype):
        found = answer(file)
        assert not found.fault, found.verdict
