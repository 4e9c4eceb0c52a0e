"""verl's entry point of moe_rl, in the group `verl.plugins`: every process of verl on the machine imports this module.

It does nothing unless the environment says MOE_RL_VERL=1. verl logs an entry point that fails at the level DEBUG, and
goes on without it, so a failure ends the process here. The configuration can ask for the same, on every machine, by
`actor_rollout_ref.model.external_lib=moe_rl.integrations.verl.active`.
"""

from __future__ import annotations

import os
import traceback

from moe_rl.errors import ConfigError

VARIABLE = "MOE_RL_VERL"


def activate() -> None:
    """Put our engine in the place of verl's for this machine's device, and measure routes with the others; twice does
    nothing.

    Raises ImportError without verl, and ConfigError where another engine is already registered for the vendor.
    """
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine.base import EngineRegistry

    from moe_rl.integrations.verl.any_engine import measure_every_engine
    from moe_rl.integrations.verl.engine import RoutingFSDPEngine

    measure_every_engine()
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()  # as verl looks an engine up: the vendor's comes first
    for strategy in ("fsdp", "fsdp2"):
        found = EngineRegistry._engines["language_model"][strategy].get((device, vendor))
        if found is RoutingFSDPEngine:
            continue
        if found is not None:
            raise ConfigError(f"verl's engine {strategy!r} for {device}, {vendor} was already replaced by {found}. "
                              "Switch off one of the two plugins.")
        EngineRegistry.register(model_type="language_model", backend=strategy, device=device, vendor=vendor)(
            RoutingFSDPEngine)


def _follow_environment() -> None:
    """Activate if the environment asks for it. Ends the process where that fails: verl would go on without us."""
    asked = os.environ.get(VARIABLE, "0")
    if asked in ("", "0"):
        return
    try:
        if asked != "1":
            raise ConfigError(f"{VARIABLE}={asked!r} must be 1, which switches moe_rl on in verl, or 0")
        activate()
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"moe_rl was switched on by {VARIABLE}={asked}, and failed: {error}") from error


_follow_environment()
