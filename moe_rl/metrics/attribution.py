"""How much of the spread of log-ratios goes with route changes. NumPy only: tables are pooled with it too.

On the same tokens and weights: D = log r under unconstrained routes, R = log r under replayed routes, J = D - R. Then
Var(D) = Var(R) + Var(J) + 2·Cov(R, J). The J part is *associated with* route changes, not caused by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEPT = 1000
"""Largest D² carried along, so that the top 0.1 % stays exact up to KEPT / 0.001 tokens."""
TOP = 0.001
NO_VARIANCE = 1e-12
"""nats²: below it a variance of log-ratios is float32 rounding."""


@dataclass(frozen=True)
class AttributionSums:
    """Sums over tokens, in float64. Adding two pools their tokens; none is `AttributionSums()`."""

    n: float = 0
    """Tokens."""
    d: float = 0.0
    """Σ D, in nats, as `r`."""
    r: float = 0.0
    dd: float = 0.0
    """Σ D², in nats², as the other products."""
    rr: float = 0.0
    jj: float = 0.0
    rj: float = 0.0
    largest: tuple[float, ...] = ()
    """The KEPT largest D², descending: which tokens are the top 0.1 % is known only after pooling."""

    @staticmethod
    def of(unconstrained: NDArray[np.float64], replayed: NDArray[np.float64]) -> AttributionSums:
        """The sums of some tokens' log-ratios, one value per token."""
        d, r = unconstrained.astype(np.float64), replayed.astype(np.float64)
        j, squares = d - r, d * d
        return AttributionSums(
            n=len(d),
            d=float(d.sum()),
            r=float(r.sum()),
            dd=float(squares.sum()),
            rr=float(r @ r),
            jj=float(j @ j),
            rj=float(r @ j),
            largest=_largest(squares),
        )

    def __add__(self, other: AttributionSums) -> AttributionSums:
        sums = {name: value + vars(other)[name] for name, value in vars(self).items()}
        return AttributionSums(**sums | {"largest": _largest(np.array(sums["largest"]))})

    def shares(self) -> dict[str, float]:
        """Shares of Var(D): `replayed` = Var(R), `routes` = Var(J), `covariance` = 2·Cov(R, J); they sum to 1.

        A share can exceed 1, and the covariance can be negative. `variance` = Var(D) in nats² (population). The shares
        are NaN for fewer than 2 tokens, or Var(D) < NO_VARIANCE.
        """
        if self.n < 2:
            return dict.fromkeys(("variance", "replayed", "routes", "covariance"), math.nan)
        d, r = self.d / self.n, self.r / self.n
        j = d - r
        variance = self.dd / self.n - d * d
        scale = 1 / variance if variance >= NO_VARIANCE else math.nan
        return {
            "variance": variance,
            "replayed": (self.rr / self.n - r * r) * scale,
            "routes": (self.jj / self.n - j * j) * scale,
            "covariance": 2 * (self.rj / self.n - r * j) * scale,
        }

    @property
    def top_share(self) -> float:
        """Part of Σ D² in the top 0.1 % of tokens (at least one). NaN for Σ D² / n < NO_VARIANCE, and beyond the exact
        range of KEPT."""
        count = math.ceil(self.n * TOP)
        if not self.n or count > len(self.largest) or not self.dd / self.n >= NO_VARIANCE:
            return math.nan
        return sum(self.largest[:count]) / self.dd

    def row(self) -> dict[str, float]:
        """The sums as columns of a table."""
        sums = {f"attribution_sum_{name}": getattr(self, name) for name in ("d", "r", "dd", "rr", "jj", "rj")}
        return {"attribution_n": float(self.n), **sums, "attribution_top_share": self.top_share}


def _largest(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(np.sort(values)[::-1][:KEPT].tolist())
