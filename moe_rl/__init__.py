"""`moe_rl.monitor(model)`: what routing does in anybody's trainer. All else is in the modules; nothing is imported here
before it is asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.integrations.monitor import monitor as monitor


def __getattr__(name: str) -> Any:
    if name == "monitor":
        from moe_rl.integrations.monitor import monitor

        return monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
