"""Which models and settings each policy cannot train, and why. Imports none of Megatron-core and FSDP2."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from moe_rl import ranks
from moe_rl.config import EngineConfig, Parallel, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.integrations.megatron.layout import check_layout
from moe_rl.models.load import hf_config
from moe_rl.registry import unknown
from moe_rl.routing.sites import router_parameters

POLICIES = ("hf", "fsdp", "megatron")


def check_policy(run: RunConfig) -> None:
    """Raise ConfigError where policy, layout, model and the processes that run do not fit each other."""
    if run.policy not in POLICIES:
        unknown("policy", run.policy, POLICIES)
    if run.policy != "hf" and run.truncates and run.sampling_mask:
        raise ConfigError(
            f"top_p={run.top_p:g}, top_k={run.top_k}, min_p={run.min_p:g}: policy={run.policy!r} has no log-probs over "
            "the tokens that were kept. Use policy='hf' or, knowing that engine and trainer are then different "
            "distributions, sampling_mask=False."
        )
    if run.measure.gradient_cosine and run.policy != "hf":
        raise ConfigError(f"measure.gradient_cosine=True: policy={run.policy!r} spreads its gradients over ranks, and "
                          "compares none; it is for policy='hf'.")
    if run.policy == "megatron":
        if importlib.util.find_spec("megatron.core") is None:
            raise ConfigError("policy='megatron' needs Megatron-core: pip install 'moe_rl[megatron]'.")
        if run.dial.sigma:
            raise ConfigError(f"dial.sigma={run.dial.sigma:g}: the routers of policy='megatron' cannot be moved.")
        if run.micro_batch_tokens:
            raise ConfigError(f"micro_batch_tokens={run.micro_batch_tokens}: the schedule of policy='megatron' cuts by "
                              "rows alone; use micro_batch.")
        check_layout(run.parallel, hf_config(run.model), ranks.planned())
    elif ranks.planned() > 1 and run.policy == "hf":
        raise ConfigError(
            f"a run of {ranks.planned()} processes, but policy='hf' runs in one: leave torchrun or launcher.ranks out, "
            "or add --policy fsdp or --policy megatron."
        )
    if run.policy != "hf" and run.engine.name == "hf" and run.engine != EngineConfig(routes=run.engine.routes):
        raise ConfigError(
            f"policy={run.policy!r} samples with the Hugging Face engine as it is, with vLLM or with a server; another "
            f"dtype, other experts, int8 and router noise are for policy='hf', not {run.engine}."
        )
    _check_fsdp(run)


def check_critic(run: RunConfig) -> None:
    """Raise ConfigError where an arm asks for values that nobody can give."""
    if run.policy != "hf":
        why = ("its schedule runs one model per process, which ends in a vocabulary" if run.policy == "megatron" else
               "a critic is a whole model of one process, and is not cut over ranks")
        raise ConfigError(f"arm {run.arm.name!r} needs a critic, which policy={run.policy!r} cannot have: {why}. Use "
                          "policy='hf', or returns (gae without a critic).")
    if not run.critic.lr:
        raise ConfigError(f"arm {run.arm.name!r} takes its advantage from a critic's values, and critic.lr=0 means "
                          "that there is none: set critic.lr, or use returns (gae without a critic) or group.")


def _check_fsdp(run: RunConfig) -> None:
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
