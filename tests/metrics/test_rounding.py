"""Rounding: its size by hand and against sums in other orders; numbers without its traces."""

from __future__ import annotations

import math

import pytest
import torch

from moe_rl.metrics.rounding import IN_A_LAYER, SUMMED, number, rounding

BFLOAT16, FLOAT64 = (torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float64))


def test_rounding_is_epsilon_times_depth_times_magnitude():
    assert torch.finfo(torch.float32).eps == SUMMED
    assert rounding(SUMMED, 0, 3) == 3 * 2**-23 and rounding(FLOAT64, 0, 3) == 3 * 2**-52
    assert rounding(SUMMED, 2, 1) == (2 * IN_A_LAYER + 1) * 2**-23
    assert rounding(BFLOAT16, 2, 1) == pytest.approx((2 * IN_A_LAYER + 1) * 2**-15), "√(2⁻⁷ · 2⁻²³)"
    assert rounding(SUMMED, 2, math.log(258)) == pytest.approx(1e-5, rel=0.2), "the tolerance of tiny models in tests"


def stack(x, weights, order):
    """Log-probs of a stack of feed-forward blocks, whose sums over the width are taken in this order."""
    for up, down in weights[:-1]:
        normed = x / x.pow(2).mean(-1, keepdim=True).sqrt()
        hidden = torch.relu(normed[:, order] @ up[order])
        x = x + hidden @ down
    return (x[:, order] @ weights[-1][order]).double().log_softmax(-1)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [2, 12])
def test_a_stack_whose_sums_are_taken_in_another_order_is_apart_by_less(dtype, layers):
    """Two blocks a layer, of a width of 64; the root mean square over 4,096 rows, and no hundredth of the bound."""
    draw = torch.Generator().manual_seed(0)
    sizes = [((64, 64), (64, 64))] * 2 * layers
    weights = [[torch.randn(s, generator=draw).to(dtype) / 8 for s in pair] for pair in sizes]
    weights.append(torch.randn(64, 48, generator=draw).to(dtype) / 8)
    x = torch.randn(4096, 64, generator=draw).to(dtype)
    one, other = (stack(x, weights, order) for order in (torch.arange(64), torch.randperm(64, generator=draw)))
    apart, magnitude = ((y**2).mean().sqrt().item() for y in (one - other, one))
    assert 0.01 < apart / rounding(torch.finfo(dtype).eps, layers, magnitude) < 1


@pytest.mark.parametrize(
    ("value", "form", "says"),
    [
        (-0.0004, ".3f", "0.000"),
        (-0.0, ".3g", "0"),
        (-0.0004, "+.2f", "+0.00"),
        (-0.04, ".0%", "-4%"),
        (0.125 - 2e-17, ".2f", "0.12"),
        (0.125 + 2e-17, ".2f", "0.12"),
        (0.1 + 0.2, ".17g", "0.29999999999999999"),
        (math.nan, ".3f", "nan"),
        (-math.inf, ".3g", "-inf"),
    ],
)
def test_a_number_is_printed_without_its_last_bits_and_a_zero_without_a_sign(value, form, says):
    assert number(value, form) == says
