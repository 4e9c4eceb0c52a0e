"""verl's FSDP engine with the routing of its model recorded, replayed and measured (verl 0.9.1, `fsdp` and `fsdp2`).

Three of verl's methods are extended. `prepare_model_inputs` opens a scope before a forward, `prepare_model_outputs`
reads it after the forward, and `forward_backward_batch` ends it. A scope spans forward and backward of one micro-batch,
so that activation checkpointing recomputes under the same routes. Routes travel as verl's own field `routed_experts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool, Integer
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.integrations.verl import fields, measure
from moe_rl.integrations.verl.losses import register_named
from moe_rl.integrations.verl.mode import Mode
from moe_rl.metrics.pooled import Pooled
from moe_rl.metrics.volatility import changes
from moe_rl.registry import needs_of
from moe_rl.routing import RoutingTrace, layout_of, observe, record_routing, replay_routing
from moe_rl.routing.ids import used

RECORD, REPLAY = "record", "replay"
FORWARD = (
    "input_ids",
    "position_ids",
    "loss_mask",
    "responses",
    "prompts",
    "attention_mask",
    "multi_modal_inputs",
    fields.ROUTES,
)
"""What a forward reads of a mini-batch."""


class RoutingFSDPEngine(FSDPEngineWithLMHead):
    """Replays and measures what `router_replay` of the engine's configuration asks for (`Mode`), except in a reference
    model.

    Raises ConfigError for settings that would hide or move tokens from the hooks, and for an update in which no route
    is known; RoutingError for a model that does not route, for packed sequences that change one another, and for a
    batch without the routes that the mode needs.
    """

    def initialize(self) -> None:
        self._moe_off = bool(self.engine_config.forward_only)
        self._moe_mode = Mode.of(self.engine_config.router_replay)
        self._moe_phase, self._moe_training, self._moe_scope = "", False, ExitStack()
        self._moe_fixed: tuple[TensorDict, Tensor] | None = None
        self._moe_updates, self._moe_last = 0, True
        if not self._moe_off and self.ulysses_sequence_parallel_size > 1:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}: moe_rl cannot split routing "
                "along sequences. Set it to 1."
            )
        super().initialize()
        if not self._moe_off:
            self._moe_layout = layout_of(self.module)
            layers = [moe_layer.decoder_layer for moe_layer in self._moe_layout.moe_layers]
            if len({*layers}) < len(layers):
                raise ConfigError("a decoder layer has two routers, but verl's routed_experts has room for one.")
            self._moe_layers = int(self.model_config.hf_config.get_text_config().num_hidden_layers)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Without its adapters the model is the reference, which is left alone."""
        before, self._moe_off = self._moe_off, True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._moe_off = before

    # ------------------------------------------------------------------ verl's methods, in the order it calls them
    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        if self._moe_off:
            return super().train_batch(data, loss_function)
        tu.maybe_fix_3d_position_ids(data)  # of images; verl does so later, when we have read them
        if self._moe_last:  # a step begins
            self._moe_updates, self._moe_fixed = 0, None
        self._moe_updates = number = self._moe_updates + 1
        # verl names the last update of a step; another loop makes as many as are declared
        self._moe_last = tu.get(data, "update_lr_scheduler", number == self._moe_mode.updates_per_step)
        output = (self._measured_update if self._moe_mode.measured_sequences else super().train_batch)(
            data, loss_function
        )
        if self._moe_mode.updates_per_step:
            output["metrics"] |= {
                name.replace("/", f"/update_{number:02d}/"): value
                for name, value in output["metrics"].items()
                if name.startswith("routing/") and name.count("/") == 1 and "/step_" not in name
            }
        return output

    def _measured_update(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """An update, with its changes to the routes of some sequences."""
        began, row = time.perf_counter(), {}
        if self._moe_fixed is None:
            subset = _first_sequences(data, self._moe_mode.measured_sequences)
            self._moe_began = self._unconstrained_routes(subset)
            self._moe_fixed = subset, self._moe_began
            if self._moe_mode.routes in ("", "reported") and fields.ROUTES in subset:  # at equal weights
                engine = fields.read_routes(subset, self._moe_layout, self._moe_layers, reported=True)
                change = self._changes(subset, self._moe_began, engine.to(self._moe_began.device))
                names = [name for name in measure.OF_ENGINE if f"routing/{name}" in change]
                row = {f"routing/engine_{name}": change[f"routing/{name}"] for name in names}
        subset, before = self._moe_fixed
        spent = time.perf_counter() - began
        output = super().train_batch(data, loss_function)
        began = time.perf_counter()
        after = self._unconstrained_routes(subset)
        self._moe_fixed = subset, after
        row |= self._changes(subset, before, after)
        if self._moe_mode.updates_per_step and self._moe_last:
            step = self._changes(subset, self._moe_began, after)
            row |= {name.replace("/", "/step_", 1): value for name, value in step.items()}
        row["routing/measure_seconds"] = spent + time.perf_counter() - began
        output["metrics"] |= {name: [value] for name, value in row.items()}
        return output

    def _changes(self, subset: TensorDict, before: Tensor, after: Tensor) -> dict[str, float]:
        """Of the tokens that decide a response."""
        mask = fields.padded_mask(subset).to(before.device)
        old, new = (fields.spread(ids, mask, self._moe_layout.unknown) for ids in (before, after))
        decides = fields.spread(fields.deciding_tokens(subset).to(mask.device), mask)
        return measure.row_of(changes(old, new, decides, self._moe_layout).over_ranks(), self._moe_layout)

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        register_named(loss_function)
        if self._moe_off:
            return super().forward_backward_batch(data, loss_function, forward_only)
        routes = self._moe_mode.routes
        self._moe_training, self._moe_sums = not forward_only, Pooled()
        if forward_only:
            self._moe_last = True  # the log-probs of π_old are scored once per step, before its updates
        if routes == "reported" or (routes and not forward_only):
            self._moe_phase = REPLAY
        else:
            self._moe_phase = "" if forward_only and not routes else RECORD
        with ExitStack() as self._moe_scope:
            output = super().forward_backward_batch(data, loss_function, forward_only)
        if not forward_only:  # what a pass without update measures never reaches verl's logger
            row = measure.row_of(self._moe_sums.over_ranks(), self._moe_layout)
            if routes and row.get("routing/coverage", 1.0) == 0:
                raise ConfigError(
                    f"router_replay.mode replays {self._moe_mode.source}, but the mini-batch has no known routing. "
                    "Check that the engine of the rollout reports it."
                )
            row = row if routes else {"routing/coverage": 0.0} | row
            output["metrics"] |= {name: [value] for name, value in row.items()}
        return output

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        mode = self._moe_mode
        if self._moe_off or not forward_only or mode.routes != "made":
            return super().forward_step(micro_batch, loss_function, forward_only)
        self._moe_phase = RECORD
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        routes = self._routes_of_source(micro_batch)
        if mode.scored_again:
            self._moe_phase = REPLAY
            micro_batch[fields.ROUTES] = routes
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        output["model_output"][fields.ROUTES] = routes
        return loss, output

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        inputs, args = super().prepare_model_inputs(micro_batch)
        if self._moe_off or not self._moe_phase:
            return inputs, args
        self._moe_scope.close()  # the micro-batch before has been backpropagated
        self._moe_mask = fields.real_inputs(micro_batch, inputs["input_ids"])
        if self._moe_phase == RECORD:
            scores = not self._moe_training and "scores" in needs_of(self._moe_mode.function())
            self._moe_recording = self._moe_scope.enter_context(record_routing(self.module, scores=scores))
        else:
            trace = self._trace(micro_batch, self._moe_mask, self._moe_mode.routes == "reported")
            trace = replace(trace, keep=self._moe_mode.keep)
            self._moe_replay: Any = self._moe_scope.enter_context(replay_routing(self.module, trace, part=True))
        return inputs, args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        outputs = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._moe_off or not self._moe_phase:
            return outputs
        if self._moe_training:
            self._measure(micro_batch, outputs)
        elif self._moe_phase == RECORD:
            self._moe_unconstrained = self._recorded_ids()
            if self._moe_mode.routes == "recorded":
                outputs[fields.ROUTES] = self._field(self._moe_unconstrained, micro_batch)
        return outputs

    # ------------------------------------------------------------------ routes
    def _recorded_ids(self) -> Integer[Tensor, "tokens moe_layer k"]:
        if self._moe_recording.scored:
            self._moe_scores = self._moe_recording.scores(len(self._moe_mask))
        return self._moe_recording.take().unflatten(0, tuple(self._moe_mask.shape))[self._moe_mask]

    def _field(self, ids: Integer[Tensor, "tokens moe_layer k"], micro_batch: TensorDict) -> Tensor:
        return fields.write_routes(ids, self._moe_layout, self._moe_layers, micro_batch)

    def _trace(self, micro_batch: TensorDict, mask: Bool[Tensor, "batch time"], reported: bool) -> RoutingTrace:
        ids = fields.read_routes(micro_batch, self._moe_layout, self._moe_layers, reported)
        return fields.trace_of(ids, self._moe_layout, mask)

    def _routes_of_source(self, micro_batch: TensorDict) -> Tensor:
        """verl's field with the routes that the mode's source makes of π_old's own routes in this micro-batch."""
        source, micro_batch = self._moe_mode.function(), micro_batch.to(self._moe_unconstrained.device)
        mask = fields.padded_mask(micro_batch)
        reported = self._trace(micro_batch, mask, reported=True) if self._moe_mode.of_rollout else None
        batch = fields.sampled_of(micro_batch, reported)
        unconstrained, scores = fields.trace_of(self._moe_unconstrained, self._moe_layout, mask), None
        if "scores" in needs_of(source):
            scores = self._moe_scores.each(lambda x: fields.spread(x[self._moe_mask], mask))
        trace = source(batch, SimpleNamespace(routes=unconstrained, scores=scores))
        trace = unconstrained.only(torch.zeros_like(unconstrained.known)) if trace is None else trace
        if trace.keep or trace.gates is not None:
            raise RoutingError(
                f"router_replay.mode: verl's field of routes has no room for what {self._moe_mode.source} needs."
            )
        return self._field(trace.experts[mask], micro_batch)

    # ------------------------------------------------------------------ measuring
    @torch.no_grad()
    def _measure(self, micro_batch: TensorDict, output: dict[str, Any]) -> None:
        """Add what a micro-batch of an update shows, before its weights move."""
        decides = fields.deciding_tokens(micro_batch)
        if self._moe_phase == RECORD:
            chosen = self._recorded_ids()
        else:
            forced, preferred = (
                trace.experts[self._moe_mask] for trace in (self._moe_replay.routes, self._moe_replay.preferred)
            )
            counted = fields.counted_tokens(micro_batch)
            self._moe_sums += measure.sum_replay(forced, preferred, counted, decides)
            chosen = torch.where(used(forced[..., :1]), forced, preferred)
        if self._moe_phase == RECORD or not self._moe_mode.keep:  # `soft` uses a part of each
            self._moe_sums += measure.sum_load(chosen, self._moe_layout, decides)
        if "old_log_probs" not in micro_batch or output.get("log_probs") is None:
            return
        wanted = micro_batch.select("response_mask", "old_log_probs", "rollout_log_probs", strict=False)
        padded = wanted.to_padded_tensor()
        mask, old = padded["response_mask"].bool(), padded["old_log_probs"]
        log_ratio = no_padding_2_padding(output["log_probs"].detach(), micro_batch) - old
        self._moe_sums += measure.sum_ratios("ratio", log_ratio, mask)
        if "rollout_log_probs" in padded:
            self._moe_sums += measure.sum_ratios("engine", old - padded["rollout_log_probs"], mask)

    @torch.no_grad()
    def _unconstrained_routes(self, subset: TensorDict) -> Integer[Tensor, "tokens moe_layer k"]:
        """The unconstrained routes of some sequences under the current weights, by a forward of their own."""
        self._moe_training, self._moe_phase = False, ""
        on_device = subset.to(next(self.module.parameters()).device)
        inputs, _ = self.prepare_model_inputs(on_device)
        dtype, device = self._autocast_dtype, inputs["input_ids"].device.type
        with torch.autocast(device, dtype, dtype != torch.float32):
            seen = observe(self.module, inputs, lost="unknown")
        return seen.routes.experts[fields.real_inputs(on_device, inputs["input_ids"])]


def _first_sequences(data: TensorDict, count: int) -> TensorDict:
    """The first sequences of a mini-batch, with what a forward reads."""
    rows = list(range(min(count, data.shape[0])))
    subset = tu.index_select_tensor_dict(data.select(*FORWARD, strict=False), rows)
    packed, fused = (  # verl's fused kernels replace the forward of the model
        tu.get_non_tensor_data(data=data, key=key, default=default)
        for key, default in (("use_remove_padding", True), ("use_fused_kernels", False))
    )
    tu.assign_non_tensor(subset, temperature=1.0, use_remove_padding=packed, pad_token_id=0, use_fused_kernels=fused)
    return subset
