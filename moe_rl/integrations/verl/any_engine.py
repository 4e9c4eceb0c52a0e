"""Routes that verl's batch holds, measured with every engine of verl: Megatron's, VeOmni's and those to come.

All engines have `BaseEngine.train_batch`, and verl keeps routes in the field `routed_experts`, whichever engine
recorded (R2) or reported (R3) them. Load and coverage need nothing more. Our own engine measures them itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.metric_utils import infer_moe_num_experts
from verl.workers.engine.base import BaseEngine

from moe_rl.integrations.verl import fields, measure
from moe_rl.integrations.verl.engine import RoutingFSDPEngine
from moe_rl.routing import Layout
from moe_rl.routing.ids import used
from moe_rl.routing.sites import Site


def measure_every_engine() -> None:
    """Add what the routes of a mini-batch show to the metrics of every engine that replays them; twice does nothing."""
    if not hasattr(BaseEngine.train_batch, "__wrapped__"):
        BaseEngine.train_batch = _measured(BaseEngine.train_batch)


def _measured(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_batch)
    def update(engine: BaseEngine, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        replays = getattr(engine, "enable_routing_replay", False)  # of Megatron and VeOmni; else routes go unused
        here = replays and not isinstance(engine, RoutingFSDPEngine) and fields.ROUTES in data
        row = _row(data, infer_moe_num_experts(engine.model_config)) if here else {}
        output = train_batch(engine, data, loss_function)
        if row and engine.is_mp_src_rank_with_outputs():
            output["metrics"] |= {name: [value] for name, value in row.items()}
        return output

    return update


def _row(data: TensorDict, num_experts: int | None) -> dict[str, float]:
    """Load of the tokens that decide a response, and coverage: the share of inputs whose routes the batch holds. Layers
    are numbered as in the field. Ranks of one data-parallel rank hold equal rows, so shares stay as they are."""
    if not num_experts or not data[fields.ROUTES].is_nested:
        return {}
    _, layers, k = data[fields.ROUTES].values().shape
    layout = Layout(tuple(Site("", layer, num_experts, k) for layer in range(layers)), "")
    ids, sums = fields.read_routes(data, layout, layers, reported=True), measure.Sums()
    measure.add_load(sums, ids, layout, fields.deciding_tokens(data).to(ids.device))
    known = used(ids[..., 0])[fields.counted_tokens(data).to(ids.device)]
    sums.add("known", known.sum(0))
    sums.add("inputs", ids.new_tensor(len(known), dtype=torch.float64))
    found = sums.reduced()
    routing = (found["known"] > 0).nonzero().flatten().tolist()  # a dense layer has no route anywhere
    if not routing:
        return {"routing/coverage": 0.0}
    row = measure.row_of({"load": found["load"][routing]}, Layout(tuple(layout.sites[i] for i in routing), ""))
    return row | {"routing/coverage": float(found["known"][routing].sum() / (found["inputs"] * len(routing)))}
