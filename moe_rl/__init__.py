"""`moe_rl.monitor(model)`: what routing does in anybody's trainer; `moe_rl.track` gives its rows to a tracker. All else
is in the modules; nothing is imported here before its first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.integrations.monitor import monitor as monitor
    from moe_rl.integrations.monitor import track as track


def __getattr__(name: str) -> Any:
    if name in ("monitor", "track"):
        from moe_rl.integrations import monitor

        return getattr(monitor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
