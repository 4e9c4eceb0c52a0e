"""Record and replay the experts that a Mixture-of-Experts model uses."""

from typing import Any

from moe_rl.errors import warn_of
from moe_rl.routing.hooks import Recording, Replay, RouterScores, record_routing, replay_routing
from moe_rl.routing.moe_layers import Layout, MoeLayer, layout_of
from moe_rl.routing.observe import Observation, observe
from moe_rl.routing.trace import RoutingTrace

__all__ = [
    "Layout",
    "Observation",
    "Recording",
    "Replay",
    "RouterScores",
    "RoutingTrace",
    "MoeLayer",
    "layout_of",
    "observe",
    "record_routing",
    "replay_routing",
]


def __getattr__(name: str) -> Any:
    if name == "Site":
        warn_of("moe_rl.routing.Site", "MoeLayer")
        return MoeLayer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
