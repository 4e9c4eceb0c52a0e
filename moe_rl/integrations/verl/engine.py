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
from moe_rl.integrations.monitor import evaluation_mode
from moe_rl.integrations.verl import fields, measure
from moe_rl.integrations.verl.losses import register_named
from moe_rl.integrations.verl.mode import Mode
from moe_rl.registry import needs_of
from moe_rl.routing import RoutingTrace, layout_of, record_routing, replay_routing
from moe_rl.routing.ids import used

RECORD, REPLAY = "record", "replay"
COMPARED = 64
"""Tokens of the two sequences that show whether packed sequences are kept apart."""


class RoutingFSDPEngine(FSDPEngineWithLMHead):
    """Replays and measures as `router_replay` of the engine's configuration says (`Mode`); a reference model is left
    alone.

    Raises ConfigError for settings that would hide or move tokens from the hooks and for packed sequences that read one
    another, and RoutingError for a model that does not route, for a batch without the routes that the mode needs, and
    for an update in which no route is known.
    """

    def initialize(self) -> None:
        self._moe_off = bool(self.engine_config.forward_only)
        self._moe_mode = Mode.of(self.engine_config.router_replay)
        self._moe_phase, self._moe_training, self._moe_scope = "", False, ExitStack()
        self._moe_fixed: tuple[TensorDict, Tensor] | None = None
        self._moe_updates, self._moe_apart = 0, False
        if not self._moe_off and self.ulysses_sequence_parallel_size > 1:
            raise ConfigError(f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}: moe_rl cannot "
                              "split routing along sequences. Set it to 1, or switch moe_rl off.")
        super().initialize()
        if not self._moe_off:
            self._moe_layout = layout_of(self.module)
            layers = [site.decoder_layer for site in self._moe_layout.sites]
            if len({*layers}) < len(layers):
                raise ConfigError("a decoder layer of the model has two routers, but verl's routed_experts has room "
                                  "for one. Switch moe_rl off.")
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
        self._moe_number = number = self._moe_updates % (self._moe_mode.updates_per_step or 1)
        self._moe_updates += 1
        if self._moe_mode.updates_per_step and not number:
            self._moe_fixed = None  # a step begins
        output = (self._measured_update if self._moe_mode.measured_sequences else super().train_batch)(
            data, loss_function)
        if self._moe_mode.updates_per_step:
            output["metrics"] |= {name.replace("/", f"/update_{number + 1:02d}/"): value
                                  for name, value in output["metrics"].items()
                                  if name.startswith("routing/") and name.count("/") == 1 and "/step_" not in name}
        return output

    def _measured_update(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """An update, with what it changes of the routes of some sequences."""
        began, row = time.perf_counter(), {}
        if self._moe_fixed is None:
            subset = _first_sequences(data, self._moe_mode.measured_sequences)
            self._moe_began = self._natural_routes(subset)
            self._moe_fixed = subset, self._moe_began
            if self._moe_mode.routes in ("", "reported") and fields.ROUTES in subset:  # at equal weights
                engine = fields.read_routes(subset, self._moe_layout, self._moe_layers, reported=True)
                found = self._changes(subset, self._moe_began, engine.to(self._moe_began.device))
                row = {f"routing/engine_{name}": found[f"routing/{name}"] for name in measure.OF_ENGINE
                       if f"routing/{name}" in found}
        subset, before = self._moe_fixed
        spent = time.perf_counter() - began
        output = super().train_batch(data, loss_function)
        began = time.perf_counter()
        after = self._natural_routes(subset)
        self._moe_fixed = subset, after
        row |= self._changes(subset, before, after)
        if self._moe_number + 1 == self._moe_mode.updates_per_step:
            whole = self._changes(subset, self._moe_began, after)
            row |= {name.replace("/", "/step_", 1): value for name, value in whole.items()}
        row["routing/measure_seconds"] = spent + time.perf_counter() - began
        output["metrics"] |= {name: [value] for name, value in row.items()}
        return output

    def _changes(self, subset: TensorDict, before: Tensor, after: Tensor, counted: Tensor | None = None
                 ) -> dict[str, float]:
        """Of the tokens that decide a response, or of those that are `counted`."""
        sums, mask = measure.Sums(), fields.padded_mask(subset).to(before.device)
        old, new = (fields.spread(ids, mask, self._moe_layout.unknown) for ids in (before, after))
        decides = fields.deciding_tokens(subset) if counted is None else counted
        measure.add_change(sums, old, new, fields.spread(decides.to(mask.device), mask), self._moe_layout)
        return measure.row_of(sums.reduced(), self._moe_layout)

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        register_named(loss_function)
        if self._moe_off:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._require_apart(data)
        self._moe_training, self._moe_sums = not forward_only, measure.Sums()
        if forward_only:
            self._moe_fixed = None  # the log-probs of π_old are scored once per step: other tokens from here on
        routes = self._moe_mode.routes
        self._moe_phase = REPLAY if routes == "reported" or (routes and not forward_only) else RECORD
        self._moe_phase *= bool(routes) or not forward_only
        with ExitStack() as self._moe_scope:
            output = super().forward_backward_batch(data, loss_function, forward_only)
        if not forward_only:  # what a pass without update measures never reaches verl's logger
            row = measure.row_of(self._moe_sums.reduced(), self._moe_layout)
            if routes and row.get("routing/coverage", 1.0) == 0:
                raise ConfigError(f"router_replay.mode replays {self._moe_mode.source}, but the mini-batch has no "
                                  "known routing, so nothing was replayed. Does the engine of the rollout report "
                                  "routing?")
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

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
                              ) -> dict[str, Any]:
        found = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._moe_off or not self._moe_phase:
            return found
        if self._moe_training:
            self._measure(micro_batch, found)
        elif self._moe_phase == RECORD:
            self._moe_natural = self._recorded_ids()
            if self._moe_mode.routes == "recorded":
                found[fields.ROUTES] = self._field(self._moe_natural, micro_batch)
        return found

    # ------------------------------------------------------------------ routes
    def _recorded_ids(self) -> Integer[Tensor, "tokens site k"]:
        if self._moe_recording.scored:
            self._moe_scores = self._moe_recording.scores(len(self._moe_mask))
        return self._moe_recording.take().unflatten(0, tuple(self._moe_mask.shape))[self._moe_mask]

    def _field(self, ids: Integer[Tensor, "tokens site k"], micro_batch: TensorDict) -> Tensor:
        return fields.write_routes(ids, self._moe_layout, self._moe_layers, micro_batch)

    def _trace(self, micro_batch: TensorDict, mask: Bool[Tensor, "batch time"], reported: bool) -> RoutingTrace:
        ids = fields.read_routes(micro_batch, self._moe_layout, self._moe_layers, reported)
        return fields.trace_of(ids, self._moe_layout, mask)

    def _routes_of_source(self, micro_batch: TensorDict) -> Tensor:
        """verl's field with the routes that the mode's source makes of π_old's own routes in this micro-batch."""
        source, micro_batch = self._moe_mode.function(), micro_batch.to(self._moe_natural.device)
        mask = fields.padded_mask(micro_batch)
        reported = self._trace(micro_batch, mask, reported=True) if self._moe_mode.of_rollout else None
        batch = fields.sampled_of(micro_batch, reported)
        natural, scores = fields.trace_of(self._moe_natural, self._moe_layout, mask), None
        if "scores" in needs_of(source):
            scores = self._moe_scores.each(lambda x: fields.spread(x[self._moe_mask], mask))
        trace = source(batch, SimpleNamespace(routes=natural, scores=scores))
        trace = natural.only(torch.zeros_like(natural.known)) if trace is None else trace
        if trace.keep or trace.gates is not None:
            raise RoutingError(f"router_replay.mode: {self._moe_mode.source} needs `keep` or `gates`, but verl's "
                               "routed_experts has no room for them. Use another source.")
        return self._field(trace.experts[mask], micro_batch)

    # ------------------------------------------------------------------ measuring
    @torch.no_grad()
    def _measure(self, micro_batch: TensorDict, found: dict[str, Any]) -> None:
        """Add what a micro-batch of an update shows, before its weights move."""
        sums, decides = self._moe_sums, fields.deciding_tokens(micro_batch)
        if self._moe_phase == RECORD:
            chosen = self._recorded_ids()
        else:
            forced, preferred = (trace.experts[self._moe_mask]
                                 for trace in (self._moe_replay.routes, self._moe_replay.preferred))
            measure.add_replay(sums, forced, preferred, fields.counted_tokens(micro_batch), decides)
            chosen = torch.where(used(forced[..., :1]), forced, preferred)
        if self._moe_phase == RECORD or not self._moe_mode.keep:  # `soft` uses a part of each
            measure.add_load(sums, chosen, self._moe_layout, decides)
        if "old_log_probs" not in micro_batch or found.get("log_probs") is None:
            return
        wanted = micro_batch.select("response_mask", "old_log_probs", "rollout_log_probs", strict=False)
        padded = wanted.to_padded_tensor()
        mask, old = padded["response_mask"].bool(), padded["old_log_probs"]
        now = no_padding_2_padding(found["log_probs"].detach(), micro_batch)
        measure.add_ratios(sums, "ratio", now - old, mask)
        if "rollout_log_probs" in padded:
            measure.add_ratios(sums, "engine", old - padded["rollout_log_probs"], mask)

    @torch.no_grad()
    def _natural_routes(self, subset: TensorDict) -> Integer[Tensor, "tokens site k"]:
        """The routes of some sequences under the weights of now, by a forward of their own."""
        self._moe_training, self._moe_phase = False, ""
        with evaluation_mode(self.module):
            on_device = subset.to(next(self.module.parameters()).device)
            inputs, _ = self.prepare_model_inputs(on_device)
            mask = fields.real_inputs(on_device, inputs["input_ids"])
            dtype, device = getattr(self, "_autocast_dtype", torch.bfloat16), inputs["input_ids"].device.type
            with record_routing(self.module) as recording, torch.autocast(device, dtype, dtype != torch.float32):
                self.module(**inputs, use_cache=False)
            return recording.take().unflatten(0, tuple(mask.shape))[mask]

    def _require_apart(self, data: TensorDict) -> None:
        """Once, on sequences that are packed: raise ConfigError where one changes the routes of the one after it. Such
        models do not pass position ids on to their masks, or carry a state along. How far rounding moves routes is seen
        at the first of two sequences, which cannot read the second."""
        packed = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        if self._moe_apart or not packed or len(data) < 2 or data["position_ids"].dim() == 3:  # which images have
            return
        first, second = (row[:COMPARED] for row in data["input_ids"].unbind()[:2])
        original = _packed(data, first, second)
        routes, changes = self._natural_routes(original), []
        for pair, read in (((first, second.flip(0)), [True, False]), ((first.flip(0), second), [False, True])):
            compared = torch.tensor(read).repeat_interleave(torch.tensor([len(first), len(second)]))
            found = self._changes(original, routes, self._natural_routes(_packed(data, *pair)), compared)
            changes.append(found["routing/any_change_rate"])
        if changes[1] > 4 * changes[0] + 0.01:
            raise ConfigError(f"a sequence changes {changes[1]:.0%} of the routes of the next one in its micro-batch: "
                              "this model with this attention cannot take packed sequences. Set "
                              "model.use_remove_padding=False.")
        self._moe_apart = True


def _packed(data: TensorDict, *sequences: Tensor) -> TensorDict:
    """What a forward as that of `data` reads of sequences in one row."""
    ids, places = (torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for rows in (
        sequences, [torch.arange(len(x), device=x.device) for x in sequences]))
    return _as_in(data, TensorDict({"input_ids": ids, "position_ids": places}, batch_size=[len(sequences)]))


def _first_sequences(data: TensorDict, count: int) -> TensorDict:
    """The first sequences of a mini-batch, with what a forward reads."""
    names = ("input_ids", "position_ids", "loss_mask", "responses", "prompts", "attention_mask",
             "multi_modal_inputs", fields.ROUTES)
    subset = tu.index_select_tensor_dict(data.select(*names, strict=False), list(range(min(count, data.shape[0]))))
    return _as_in(data, subset)


def _as_in(data: TensorDict, subset: TensorDict) -> TensorDict:
    """The subset with the settings of a forward that `data` has. verl's fused kernels replace that of the model."""
    packed, fused = (tu.get_non_tensor_data(data=data, key=key, default=default)
                     for key, default in (("use_remove_padding", True), ("use_fused_kernels", False)))
    tu.assign_non_tensor(subset, temperature=1.0, use_remove_padding=packed, pad_token_id=0, use_fused_kernels=fused)
    return subset
