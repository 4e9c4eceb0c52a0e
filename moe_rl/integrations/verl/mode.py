"""`router_replay` in verl's configuration: which routes are replayed, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from moe_rl.errors import ConfigError
from moe_rl.registry import Component, lookup
from moe_rl.routing.sources import SOURCES

PREFIX = "moe_rl:"
NAMES = {"disabled": "live", "R2": "old_policy", "R3": "rollout"}
OF_OLD_POLICY = {"random_share", "by_layer", "by_margin"}
"""Sources that force nothing but π_old's own choices, unless their base is the rollout: one scoring of π_old serves."""
COUNTS = ("measured_sequences", "updates_per_step")
REFUSED = {
    "recall": "it forces combine weights, which verl's field of routes has no room for",
    "under_noise": "it scores the policy with other routers, which an engine of verl does not",
}


@dataclass(frozen=True)
class Mode:
    """What `router_replay` of an engine's configuration says. Made by `Mode.of`."""

    source: Component
    measured_sequences: int = 0
    """Sequences of each rank that are scored before and after every update, to measure how many experts change."""
    updates_per_step: int = 0
    """Updates whose measurements are logged one by one, beside their means over a step; 0: none."""

    @staticmethod
    def of(config: Any) -> Mode:
        """Of verl's dataclass, or of the mapping that keys given by hand become. Raises ConfigError for an unknown key,
        source or option, and for a source that verl cannot carry out."""
        settings = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config or {})
        text, counts = settings.pop("mode", None) or "disabled", {name: settings.pop(name, 0) for name in COUNTS}
        wrong = [name for name, value in settings.items() if name != "_target_" and value is not None]
        wrong += [f"{name}={n!r}" for name, n in counts.items() if not isinstance(n, int) or n < 0]
        if wrong:
            raise ConfigError(
                f"router_replay has {', '.join(wrong)}. Use mode, and numbers for {' and '.join(COUNTS)}."
            )
        if text not in NAMES and not str(text).startswith(PREFIX):
            raise ConfigError(f"router_replay.mode={text!r}: choose disabled, R2, R3 or '{PREFIX}soft(ratio=0.5)'.")
        mode = Mode(Component.read(NAMES.get(text, text.removeprefix(PREFIX))), **counts)
        if mode.source.name in REFUSED:
            raise ConfigError(f"router_replay.mode={text!r} cannot run in verl: {REFUSED[mode.source.name]}.")
        mode.function()
        return mode

    @property
    def of_rollout(self) -> bool:
        """Whether the source reads the routes of the rollout."""
        return "rollout" in (self.source.name, self.source.options.get("base"))

    @property
    def routes(self) -> str:
        """What an update replays: "" nothing, "recorded" π_old's own routes, "reported" the rollout's, "made" what
        the source makes of either."""
        if self.source.name in ("old_policy", "rollout", "soft"):
            return "reported" if self.of_rollout else "recorded"
        return "" if self.source.name == "live" else "made"

    @property
    def scored_again(self) -> bool:
        """Whether π_old has other log-probs under the routes of the source than under its own."""
        return self.routes == "made" and (self.of_rollout or self.source.name not in OF_OLD_POLICY)

    @property
    def keep(self) -> float:
        """`RoutingTrace.keep` of what is replayed."""
        return float(self.source.options["ratio"]) if self.source.name == "soft" else 0.0

    def function(self) -> Callable[..., Any]:
        """The source, its options bound."""
        return lookup("route source", self.source, SOURCES)
