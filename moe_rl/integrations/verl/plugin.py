"""verl's entry point of moe_rl, in the group `verl.plugins`: every process of verl on the machine imports this module.

It does nothing unless the environment has MOE_RL_VERL=1. verl ignores an entry point that fails, so a failure ends the
process here. `actor_rollout_ref.model.external_lib=moe_rl.integrations.verl.active` does the same on every machine.
"""

from __future__ import annotations

import os
import traceback

from moe_rl.errors import ConfigError

VARIABLE = "MOE_RL_VERL"


def activate() -> None:
    """Replace verl's FSDP engines for this machine's device. Raises ImportError without verl, and ConfigError where
    another plugin has replaced them."""
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine.base import EngineRegistry

    from moe_rl.integrations.verl.engine import RoutingFSDPEngine

    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()  # as verl looks an engine up: the vendor's comes first
    for strategy in ("fsdp", "fsdp2"):
        engine = EngineRegistry._engines["language_model"][strategy].get((device, vendor))
        if engine is RoutingFSDPEngine:
            continue
        if engine is not None:
            raise ConfigError(f"verl's engine {strategy!r} was already replaced by {engine}. Switch one plugin off.")
        register = EngineRegistry.register(model_type="language_model", backend=strategy, device=device, vendor=vendor)
        register(RoutingFSDPEngine)


def _follow_environment() -> None:
    """Activate if the environment asks for it. Ends the process where that fails: verl would go on without us."""
    asked = os.environ.get(VARIABLE, "0")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"{VARIABLE}={asked!r} must be 1, which switches moe_rl on in verl, or 0")
    if asked == "1":
        try:
            activate()
        except Exception as error:
            traceback.print_exc()
            raise SystemExit(f"{VARIABLE}=1 could not switch moe_rl on: {error}") from error


_follow_environment()
