"""What the site axis of a trace means: the places at which one architecture routes, and what can be ids there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError

LIGHTEST = 1e-6
"""The heaviest combine weight of a row is at least this."""


@dataclass(frozen=True)
class Site:
    """One place that routes."""

    name: str
    """Module path inside the model, e.g. `model.layers.3.mlp.gate`."""
    decoder_layer: int
    """Absolute index of the decoder layer; dense layers count."""
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class Layout:
    """The sites of one architecture, in forward order: what the site axis of a trace means."""

    sites: tuple[Site, ...]
    architecture: str
    """Fingerprint of the architecture (family and sizes); weights of one architecture share it."""

    @property
    def top_k(self) -> int:
        """Width of the k axis: the largest top-k of any site."""
        return max(site.top_k for site in self.sites)

    @property
    def dtype(self) -> torch.dtype:
        """One byte per id up to 255 experts (255 marks an unknown row), else two (-1 marks it)."""
        return torch.uint8 if max(site.num_experts for site in self.sites) <= 255 else torch.int16

    @property
    def unknown(self) -> int:
        return 255 if self.dtype == torch.uint8 else -1

    def widen(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Widen the last axis, which has the slots of one site, to `top_k`."""
        more = self.top_k - x.shape[-1]
        return nn.functional.pad(x, (0, more), value=value) if more else x

    def stack(self, ids: Sequence[Integer[Tensor, "tokens _"]]) -> Integer[Tensor, "tokens site k"]:
        """The ids of every site, wherever its layer is, as one tensor in the layout's dtype."""
        return torch.stack([self.widen(x, self.unknown).to(ids[0].device, self.dtype) for x in ids], 1)

    def require(self, other: Layout, what: str) -> None:
        """Raise unless `other` is this layout."""
        if self.architecture != other.architecture or len(self.sites) != len(other.sites):
            raise RoutingError(
                f"{what} comes from another model: it has {len(other.sites)} routing sites of architecture "
                f"{other.architecture}, the model has {len(self.sites)} of {self.architecture}. "
                "Record the routes again with this model."
            )
        for mine, theirs in zip(self.sites, other.sites, strict=True):
            if mine != theirs:
                raise RoutingError(f"{what} does not fit the model: it has {theirs}, the model has {mine}.")

    def check(self) -> None:
        """Raise unless this layout, which was read from a file, could be a model's."""
        for site in self.sites:
            sizes = (site.decoder_layer, site.num_experts, site.top_k)
            if not all(type(x) is int for x in sizes) or not isinstance(site.name, str) \
                    or not (site.decoder_layer >= 0 and 1 <= site.top_k <= site.num_experts < 2**15):
                raise RoutingError(f"no router of a model is {site}, which the trace names.")
        if not self.sites or not isinstance(self.architecture, str):
            raise RoutingError(f"the trace names {len(self.sites)} sites of architecture {self.architecture!r}.")

    def check_ids(self, ids: Integer[Tensor, "batch time site k"]) -> None:
        """Raise unless every row is unknown, or holds distinct ids in range (so an all-zero row with k > 1 is refused).
        """
        if ids.dim() != 4 or ids.shape[2:] != (len(self.sites), self.top_k):
            expected = f"[batch, time, {len(self.sites)} sites, {self.top_k}]"
            raise RoutingError(f"routes have shape {tuple(ids.shape)}; expected {expected}.")
        unknown = 255 if ids.dtype == torch.uint8 else -1
        for s, site in enumerate(self.sites):
            rows = ids[:, :, s, : site.top_k].long()
            known = (rows != unknown).any(-1)
            ordered = rows.sort(-1).values
            outside = ((rows < 0) | (rows >= site.num_experts)).any(-1) & known
            twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & known
            if bool((outside | twice).any()):
                b, t = (outside if bool(outside.any()) else twice).nonzero()[0].tolist()
                why = (f"but ids run from 0 to {site.num_experts - 1}; mark a missing route with -1 in every slot."
                       if bool(outside.any()) else "which names an expert twice. An all-zero row is how some engines "
                       "write a missing route; mark it with -1.")
                raise RoutingError(f"{site.name}: row {b}, token {t} has experts {rows[b, t].tolist()}, {why}")

    def check_gates(self, gates: Tensor, known: Bool[Tensor, "batch time site"]) -> None:
        """Raise unless combine weights are float32 or float16, one per slot, and where a route is known finite, not
        negative and not all 0."""
        if gates.dtype not in (torch.float32, torch.float16) or gates.shape != (*known.shape, self.top_k):
            raise RoutingError(f"combine weights are {gates.dtype} of shape {tuple(gates.shape)}; expected float32 or "
                               f"float16, one per id: {(*known.shape, self.top_k)}.")
        slots = torch.arange(self.top_k) < torch.tensor([site.top_k for site in self.sites])[:, None]
        weights = gates.masked_fill(~slots.to(gates.device), 0)
        bad = ((~weights.isfinite() | (weights < 0)).any(-1) | (weights.amax(-1) < LIGHTEST)) & known
        if bool(bad.any()):
            b, t, s = bad.nonzero()[0].tolist()
            raise RoutingError(f"{self.sites[s].name}: row {b}, token {t} has combine weights "
                               f"{gates[b, t, s].tolist()}; expected finite ones, not negative, of which one weighs "
                               f"{LIGHTEST} or more.")
