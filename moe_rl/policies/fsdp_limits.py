"""Which models and settings FSDP2 cannot train here, and why. Imports none of it."""

from __future__ import annotations

import torch
from torch import nn

from moe_rl.config import Parallel, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.routing.sites import router_parameters


def check_settings(run: RunConfig) -> None:
    """Raise ConfigError for settings that policy='fsdp' does not honour, and for its own in another policy."""
    computes = run.parallel.compute_dtype
    if run.policy != "fsdp":
        if computes is not None:
            raise ConfigError(f"parallel.compute_dtype={computes!r} is for policy='fsdp'; policy={run.policy!r} "
                              "computes in model.dtype.")
        return
    if run.parallel != Parallel(compute_dtype=computes):
        raise ConfigError(f"policy='fsdp' has no layout, not {run.parallel}: torchrun's number of processes is all "
                          "there is. Leave dp, tp, pp, ep and etp out, or use policy='megatron'.")
    if computes is not None and not getattr(getattr(torch, computes, None), "is_floating_point", False):
        raise ConfigError(f"parallel.compute_dtype={computes!r} is none; use bfloat16 or float32.")
    if run.dial.sigma and run.dial.form == "choice" and run.dial.direction == "last_step":
        raise ConfigError("dial.form='choice' along dial.direction='last_step' moves a router inside its forward, "
                          "where policy='fsdp' has whole weights, but parts of the moments: use the direction "
                          "'random', another form, or policy='hf'.")


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder's layers. Raises ConfigError for a model that cannot be cut layer by layer."""
    layers = getattr(getattr(model, "get_decoder", lambda: None)(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"policy='fsdp' gathers one layer of a decoder at a time, but {type(model).__name__} has no "
                          "list of layers; use policy='hf'.")
    routers = {id(p) for p in router_parameters(model)}
    if len(dtypes := {p.dtype for p in model.parameters() if id(p) not in routers}) > 1:
        raise ConfigError(f"policy='fsdp' gathers the parameters of a layer as one, but those of "
                          f"{type(model).__name__} have several dtypes ({', '.join(sorted(map(str, dtypes)))}); "
                          "use model.dtype=float32.")
    return layers
