"""Record and replay the experts that a Mixture-of-Experts model uses."""

from moe_rl.routing.hooks import Recording, Replay, RouterScores, record_routing, replay_routing
from moe_rl.routing.observe import Observation, observe
from moe_rl.routing.sites import Layout, Site, layout_of
from moe_rl.routing.trace import RoutingTrace

__all__ = [
    "Layout",
    "Observation",
    "Recording",
    "Replay",
    "RouterScores",
    "RoutingTrace",
    "Site",
    "layout_of",
    "observe",
    "record_routing",
    "replay_routing",
]
