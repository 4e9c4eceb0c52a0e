"""What the site axis of a trace means: the places at which one architecture routes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_rl.errors import RoutingError


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
