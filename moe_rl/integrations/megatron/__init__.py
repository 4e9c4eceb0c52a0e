"""Training with Megatron-core, which is imported when a policy is made."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.integrations.megatron.layout import Parallel, check_layout, check_routers
from moe_rl.integrations.on_ranks import check_spread
from moe_rl.models.load import LoadedModel, hf_config, skeleton
from moe_rl.objectives import objective_of
from moe_rl.registry import checked, needs

if TYPE_CHECKING:
    from moe_rl.integrations.megatron.policy import MegatronPolicy


def _check(run: RunConfig, **options: Any) -> None:
    check_spread(run, "its schedule runs one model per process, which ends in a vocabulary")
    if importlib.util.find_spec("megatron.core") is None:
        raise ConfigError("policy='megatron' needs Megatron-core: pip install 'moe_rl[megatron]'.")
    if run.model.device == "cpu" and run.model.dtype != "float32":
        raise ConfigError(f"policy='megatron' on a CPU needs dtype float32, not {run.model.dtype}.")
    check_layout(_layout(**options), hf_config(run.model), ranks.planned())
    check_routers(run, objective_of(run.arm).needs)


def _layout(dp: int | None = None, **options: Any) -> Parallel:
    size = options.get("tp", 1) * options.get("pp", 1)
    return Parallel(dp or max(1, ranks.planned() // max(1, size)), **options)


@needs("ranks")
@checked(_check)
def megatron(
    run: RunConfig,
    start: LoadedModel | None,
    frozen: bool,
    *,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
) -> MegatronPolicy:
    """The policy `megatron` on dp × tp × pp processes, one per GPU; see `layout.Parallel`. `dp`: None takes the
    processes that tp and pp leave."""
    from moe_rl.integrations.megatron.policy import MegatronPolicy

    return MegatronPolicy(
        start.model if start else skeleton(run.model),
        None if frozen else run.optimizer,
        _layout(dp, tp=tp, pp=pp, ep=ep),
        temperature=run.temperature,
        micro_batch=run.micro_batch,
        recompute=run.activation_checkpointing and not frozen,
        device=run.model.device,
        weights=start.weights() if start else None,
    )
