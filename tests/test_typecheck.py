"""The type checker of the tests refuses what annotations say is wrong, and is on in the whole package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.metrics.volatility import route_change
from tests.typecheck import check

if TYPE_CHECKING:
    from somewhere import Unknown

A, B = torch.zeros(2, 3), torch.zeros(4, 3)
Table = Float[Tensor, "row column"]


@check
def joined(x: Table, y: Table | None = None, *, swap: Float[Tensor, "column row"] | None = None) -> Table:
    return x


@check
def listed(x: Table, each: list[Float[Tensor, " column"]], *more: Table) -> list[Table]:
    return [x, *more]


@check
def turned(x: Table) -> Table:
    return x.T


@check
def scaled(x: float, by: list[int], context: Unknown) -> float:
    return x * by[0]


@check
def rows(x: Table, each: Int[Tensor, " row"] | None = None) -> Iterator[Float[Tensor, " column"]]:
    yield from x


@check
@dataclass(frozen=True)
class Pair:
    x: Table
    y: Table

    @check
    @classmethod
    def twice(cls, x: Table) -> Pair:
        return cls(x, x)

    @check
    @property
    def product(self) -> Float[Tensor, ""]:
        return (self.x * self.y).sum(0)


def test_what_agrees_passes():
    assert joined(A, A, swap=A.T) is A and turned(torch.zeros(2, 2)).shape == (2, 2)
    assert scaled(2, [3], object()) == 6, "an int is a float, and a name that mypy alone knows is anything"
    assert len([*rows(A, torch.zeros(2, dtype=torch.int64))]) == 2
    assert listed(A, [A[0]], A) == [A, A] and Pair.twice(A).y is A
    assert joined(A) is A and joined(B) is B, "a call's axes are its own"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: joined(A.int()),
        lambda: joined(A, B),
        lambda: joined(A, swap=A),
        lambda: turned(A),
        lambda: listed(A, [B[:2, 0]]),
        lambda: listed(A, [A[0]], B),
        lambda: scaled("2", [3], None),
        lambda: rows(A, torch.zeros(3, dtype=torch.int64)),
        lambda: Pair(A, B),
        lambda: Pair.twice(torch.zeros(2)),
        lambda: Pair(A, A).product,
    ],
)
def test_what_does_not_is_refused(wrong):
    for _ in "12":
        with pytest.raises(Exception, match="type|violates|missing"):
            wrong()


def test_a_result_of_another_shape_is_refused_after_right_ones():
    sizes = iter((3, 3, 4))

    @check
    def grown(x: Table) -> Table:
        return torch.zeros(2, next(sizes))

    assert grown(A).shape == grown(A).shape == A.shape
    with pytest.raises(Exception, match="return"):
        grown(A)


def test_it_is_on_in_the_package():
    ids, mask = torch.zeros(1, 2, 3, 1, dtype=torch.int32), torch.ones(1, 2, dtype=torch.bool)
    assert route_change(ids, ids, mask)["volatility_tokens"].tolist() == [2, 2, 2]
    with pytest.raises(Exception, match="violates"):
        route_change(ids, ids, mask[:, :1])
