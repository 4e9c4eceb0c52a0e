"""Routing metrics for any training loop: `with monitor:` around a training step, `monitor.row()` after it.

The columns are those of the data dictionary (`storage/columns.toml`), by the functions of our own runs. A monitor
trains and samples nothing, and draws no random number: the weights are the same bits with a monitor and without.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from moe_rl.errors import AuxLossSilentlyOn, ConfigError, RoutingError
from moe_rl.metrics import ratios, volatility
from moe_rl.metrics.pooled import Pooled
from moe_rl.routing.hooks import Recording, Replay, RouterScores, lost_routes, read_scores
from moe_rl.routing.ids import used
from moe_rl.routing.intercept import forwards_watched, hooked
from moe_rl.routing.moe_layers import find_moe_layers, make_layout, plain_name, token_readers
from moe_rl.routing.observe import observe
from moe_rl.routing.selection import chosen
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import require_logprobs, require_mask

Row = dict[str, float]
CORRECTION_BIAS = re.compile(r"(^|\.)(e_score_correction_bias|score_correction_bias|expert_bias)$")
"""What families and trainers call the bias with which a router chooses, and does not weigh."""
MARGINS = 4096
"""Tokens of a block, per rank, whose margins are kept: quantiles cannot be pooled. A probe's are kept all."""
PerToken = Float[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]
SPREAD = ("token_n", "token_log_ratio_var", "token_ess", "token_kl_k3", "token_beyond_2")


class Monitor:
    """Measures the routers of `model`, any Mixture-of-Experts model that `record_routing` knows, as the trainer calls
    it (wrapped in DDP or FSDP2, with LoRA adapters, a vision-language model).

        monitor = moe_rl.monitor(model, probe={"input_ids": ids, "attention_mask": mask}, every=10)
        with monitor:                # the forwards and backwards of one step
            ...
        optimizer.step()
        log(monitor.row())           # {} in nine steps of ten

    `row` has, each where it was measured:

    - with a `probe`, a fixed batch of keyword arguments of `model`: `expert_change_rate` and all other volatility of
      its unconstrained routing, and `load_…`, `router_confidence` and `margin_…` under the current weights. The probe
      is read without gradient, in eval mode, before a measured step and when `row` is called. So a row covers one
      step, whatever changed the weights in between; `since="start"`: all steps since the first, with one forward a row;
    - without one, `load_…`, `router_confidence` and `margin_…` of the block's training forwards that did not replay;
    - `pull` and `coverage` of the block's forwards inside `replay_routing`;
    - `engine_…` of the log-probs given to `engine`, `token_…` of those given to `ratios`.

    A forward trains if it begins with gradient enabled and in training mode, unless the block began without: forwards
    that sample, score or recompute do not count. A forward that `decides` describes counts, too. `load_tokens` is the
    number of inputs behind `load_…`, `router_confidence` and `margin_…`, over all ranks. If routers had no finite
    scores for some inputs, the row is NaN, and a warning names the layer.

    Every input of the attention mask [batch, time] counts, or only those whose *next* token is of a response: the probe
    names them as `decides`, and `decides` those of the block's next forward. A forward that counts needs one of both.

    On several ranks `row` is collective, and with a probe the beginning of a block is: every rank of `group` (default:
    all) enters and calls `row`, with rows of its own, and gets the numbers of all rows together. Ranks that read the
    same tokens (tensor parallelism) change no share.
    Warns (AuxLossSilentlyOn) of a load-balancing loss in the configuration, or of `router_aux_loss_coef` if the trainer
    has its own, and of a correction bias that moves under replay.
    Raises RoutingError for a dense model, ConfigError for settings that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        probe: Mapping[str, Any] | None = None,
        every: int = 1,
        since: str = "step",
        router_aux_loss_coef: float | None = None,
        group: Any = None,
    ):
        if type(every) is not int or every < 1 or since not in ("step", "start"):
            raise ConfigError(f"every={every}, since={since!r}: use a number of at least 1, and 'step' or 'start'.")
        self.model, self.every, self.since, self.group = model, every, since, group
        self.router_aux_loss_coef = router_aux_loss_coef
        self.forwards = Forwards(model)
        self.probe: dict[str, Any] | None = None
        if probe is not None:
            self.counted = counted_inputs(probe)
            inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in probe.items()}
            self.probe = {name: x for name, x in inputs.items() if name != "decides"}
        self.listeners: list[Callable[[int, Row], None]] = []
        """Called with the number of the block and its row."""
        self.layers: list[Row] = []
        """The last row per MoE layer, as in the table `layers`."""
        self.blocks, self.measures = 0, False
        self._sums, self._values = Pooled(), dict[str, Tensor]()
        """Of the forwards since the block began; of values no sum would do."""
        self._before: Seen | None = None
        """The probe under the weights that the next row compares with."""
        self._replayed = self._warned = False
        self._scope: ExitStack | None = None

    # ------------------------------------------------------------------ what a trainer calls
    def __enter__(self) -> Monitor:
        if self._scope is not None:
            raise RoutingError("this monitor is already in a block. Leave it first, or use another monitor.")
        if self.blocks == 0 and (text := auxiliary_loss(self.model, self.router_aux_loss_coef)):
            warnings.warn(text, AuxLossSilentlyOn, stacklevel=2)
        self.blocks += 1
        self.measures = self.blocks % self.every == 0
        if self.probe is not None and (self._before is None if self.since == "start" else self.measures):
            self._before = self._read_probe().without_softmax()
        self._scope = ExitStack()
        if self.measures:
            self._sums, self._values, self._replayed = Pooled(), {}, False
            self._biases = named_correction_biases(self.model)
            self._scope.enter_context(self.forwards.listening(self._see, unconstrained=self.probe is None))
        return self

    def __exit__(self, *error: object) -> None:
        assert self._scope is not None, "it was entered"
        scope, self._scope = self._scope, None
        scope.close()

    def decides(self, mask: Tensor) -> None:
        """Give the inputs [batch, time] of the block's next forward whose *next* token is of a response."""
        if self._scope is None:
            raise RoutingError("decides was called outside of the block. Call it inside, before the forward.")
        self.forwards.decides(mask)

    def engine(self, logprobs: PerToken, engine_logprobs: PerToken, mask: Mask) -> None:
        """Give the trainer's log-probs of response tokens (where `mask` is true) and those of the engine that sampled
        them, in nats, at equal weights."""
        self._log_ratio("engine", "the engine's", logprobs, engine_logprobs, mask)

    def ratios(self, logprobs: PerToken, old_logprobs: PerToken, mask: Mask, *, replayed: bool = False) -> None:
        """Give the log-probs of the last mini-batch's response tokens as the trainer's ratios have them, and π_old's,
        in nats; all of its micro-batches. `replayed`: under another replay than `replay_routing`, which is seen."""
        self._log_ratio("ratios", "the old ones", logprobs, old_logprobs, mask)
        self._replayed = self._replayed or replayed

    def row(self) -> Row:
        """The numbers of the last block, and of the probe; {} if that block was not measured, or at a second call.

        Call it after `optimizer.step()`: it warns if the routing of the probe did not change in a single bit.
        """
        if not self.blocks or self._scope is not None:
            raise RoutingError("row was called before or inside a block. Call it after, and after optimizer.step().")
        if not self.measures:
            return {}
        self.measures = False
        self._warn_of_biases()
        if self.probe is not None:
            self._compare(self._read_probe())
        sums, values = self._sums.over_ranks(self.group), self._values_of_ranks()
        if not sums and not values:
            raise RoutingError(
                "no forward of the monitored model trained inside the block. Call the trained module there, or call "
                "decides before a forward that is to count."
            )
        row = self._row_of(sums, values)
        for listen in self.listeners:
            listen(self.blocks, row)
        return row

    # ------------------------------------------------------------------ what is seen
    def _see(self, seen: Seen) -> None:
        """Add a forward of the block."""
        if seen.replay is None:
            return self._use(seen)
        self._replayed = True
        self._add_lost(seen)
        forced, preferred = (
            trace.experts.to(seen.routes.experts.device) for trace in (seen.replay.routes, seen.replay.preferred)
        )
        pull = volatility.route_change(forced, preferred, seen.routes.attention_mask)
        real = seen.replay.routes.attention_mask.to(forced.device)
        self._sums += volatility.coverage(used(forced[..., 0]), real)
        self._sums += Pooled(pull=pull["expert_change_rate"], pull_n=pull["volatility_tokens"])

    def _use(self, seen: Seen) -> None:
        """Add the load and the scores of unconstrained routing."""
        ids, mask, scores = seen.routes.experts, seen.routes.attention_mask, seen.scores
        experts = [moe_layer.num_experts for moe_layer in self.forwards.layout.moe_layers]
        self._add_lost(seen)
        self._sums += volatility.load_statistics(ids, experts, mask) + Pooled(counted=mask.sum())
        if scores is not None:
            room = None if self.probe is not None else MARGINS - len(self._values.get("margins", ()))
            self._sums += volatility.router_confidence(scores.log_probs, ids, mask)
            self._add("margins", scores.margins[mask][:room])
        elif not self._warned:
            self._warned = True
            unmeasured = "router_confidence, router_shift, gate_mass_moved and margins"
            warnings.warn(f"the routers return no scores. Not measured: {unmeasured}.", stacklevel=2)

    def _add(self, name: str, values: Tensor) -> None:
        self._values[name] = torch.cat([self._values[name], values]) if name in self._values else values

    def _add_lost(self, seen: Seen) -> None:
        lost = ~seen.routes.known & seen.routes.attention_mask[..., None]
        self._sums += Pooled(lost=lost.sum((0, 1)))

    def _read_probe(self) -> Seen:
        """Unconstrained routing of the probe under the current weights."""
        assert self.probe is not None
        with hooked(self.forwards.modules, "listeners", lambda *_: None) as moe_layers:
            if moe_layers[0].replay is not None:
                raise RoutingError(
                    "the probe is read inside replay_routing. Enter the monitor before, and call row() after it."
                )
        seen = observe(self.model, self.probe, scores=True, lost="unknown")
        return Seen(replace(seen.routes, attention_mask=self.counted.to(seen.routes.experts.device)), seen.scores, None)

    def _compare(self, after: Seen) -> None:
        assert self._before is not None, "it was read when the block began"
        old, new, scores = self._before.routes, after.routes, self._before.scores
        gates: Tensor | None = None
        both: tuple[Tensor, Tensor] | None = None
        if scores is not None and after.scores is not None:
            gates, both = scores.gates, (scores.log_probs, after.scores.log_probs_at(old.ids()))
            if torch.equal(scores.log_probs, after.scores.log_probs):
                warnings.warn(
                    "the routing of the probe did not change at all. Call row() after optimizer.step(), and check that "
                    "the model is trained.",
                    stacklevel=3,
                )
        layout = self.forwards.layout
        self._sums += volatility.changes(old.experts, new.experts, new.attention_mask, layout, gates, both)
        self._add_lost(self._before)
        self._use(after)

    def _warn_of_biases(self) -> None:
        now = named_correction_biases(self.model) if self._replayed and self._biases else {}
        moved = [name for name, bias in now.items() if not torch.equal(bias, self._biases[name])]
        if moved:
            warnings.warn(
                f"{len(moved)} correction biases moved in a step with replay, {moved[0]} first, but replayed choices "
                "do not depend on them. Switch their update off, or count the experts that the routers prefer.",
                AuxLossSilentlyOn,
                stacklevel=3,
            )

    # ------------------------------------------------------------------ from what was seen to a row
    def _log_ratio(self, name: str, whose: str, logprobs: Tensor, others: Tensor, mask: Tensor) -> None:
        if not logprobs.shape == others.shape == mask.shape:
            shapes = [list(x.shape) for x in (logprobs, others, mask)]
            raise ConfigError(
                f"log-probs {shapes[0]}, {whose} {shapes[1]} and the mask {shapes[2]} must have one shape"
            )
        require_mask(mask)
        for values, of in ((logprobs, "log-probs"), (others, whose)):
            require_logprobs(values, mask.to(values.device), of)
        gap = (logprobs.detach() - others.to(logprobs.device))[mask]
        if infinite := int((~gap.isfinite()).sum()):
            raise ConfigError(f"{infinite} of {gap.numel()} differences of log-probs and {whose} are not finite")
        if self.measures:
            self._add(name, gap)

    def _values_of_ranks(self) -> dict[str, Tensor]:
        """The values of all ranks of the group together, on the CPU."""
        parts: list[Any] = [{name: x.cpu() for name, x in self._values.items()}]
        if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size(self.group)) > 1:
            mine, parts = parts[0], [None] * ranks
            dist.all_gather_object(parts, mine, group=self.group)
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}

    def _row_of(self, sums: Pooled, values: Mapping[str, Tensor]) -> Row:
        row, moe_layers = sums.row(), sums.moe_layer_rows()
        self.layers = [
            {"moe_layer": i, "layer": moe_layer.decoder_layer}
            for i, moe_layer in enumerate(self.forwards.layout.moe_layers)
        ]
        if "pull" in sums:
            row["pull"] = float(sums["pull"].sum() / sums["pull_n"].sum())
        if "counted" in sums:
            row["load_tokens"] = float(sums["counted"])
        if "margins" in values:
            by_moe_layer, (of_all,) = (
                volatility.margin_summary(x, torch.ones_like(x[..., 0], dtype=torch.bool))
                for x in (values["margins"][None], values["margins"].reshape(1, -1, 1))
            )
            moe_layers = [moe_layer | margins for moe_layer, margins in zip(moe_layers, by_moe_layer, strict=True)]
            row |= of_all
        for layer, moe_layer in zip(self.layers, moe_layers, strict=False):
            layer |= moe_layer
        if "lost" in sums and bool(sums["lost"].any()):
            self._mark_lost(row, sums["lost"].tolist())
        if "engine" in values:
            gap = values["engine"][None]
            row |= ratios.engine_gap(gap, torch.ones_like(gap, dtype=torch.bool))
        log_ratios = values.get("ratios", torch.empty(0))
        if len(log_ratios):
            spread = ratios.ratio_statistics(log_ratios[None], torch.ones_like(log_ratios[None], dtype=torch.bool))
            row |= {name: spread[name] for name in SPREAD}
        return row

    def _mark_lost(self, row: Row, lost: list[float]) -> None:
        """Make a row NaN in which some routers had no finite scores, and warn."""
        warnings.warn(f"{lost_routes(self.forwards.layout, lost)} The row is NaN.", stacklevel=4)
        for part in (row, *(layer for layer, n in zip(self.layers, lost, strict=True) if n)):
            part |= dict.fromkeys(part.keys() - {"moe_layer", "layer", "load_tokens"}, math.nan)


monitor = Monitor


def track(monitor: Monitor, writer: Any) -> Monitor:
    """Give each row of a monitor to a TensorBoard `SummaryWriter` or a W&B run, as `moe_rl/<column>`, and those of
    layers as `moe_rl/<column>/moe_layer_<n>`, over the number of the block. On several ranks one of them tracks."""
    if not (scalars := hasattr(writer, "add_scalar")) and not hasattr(writer, "log"):
        raise ConfigError(f"{writer!r:.80} has no add_scalar or log. Give a TensorBoard SummaryWriter, or a W&B run.")
    if not scalars and hasattr(writer, "define_metric"):
        writer.define_metric("moe_rl/*", step_metric="moe_rl/block")  # the run's own step is the trainer's

    def listen(block: int, row: Row) -> None:
        values = {f"moe_rl/{name}": value for name, value in row.items()}
        for layer in monitor.layers:
            values |= {f"moe_rl/{n}/moe_layer_{layer['moe_layer']}": x for n, x in layer.items() if "layer" not in n}
        if not scalars:
            writer.log(values | {"moe_rl/block": block})
        for name, value in values.items() if scalars else ():
            writer.add_scalar(name, value, block)

    monitor.listeners.append(listen)
    return monitor


# ---------------------------------------------------------------------- balancing that nobody asked for
def auxiliary_loss(model: nn.Module, coefficient: float | None = None) -> str | None:
    """A warning of the load-balancing loss in a model's configuration, or of the trainer's own `coefficient`; None
    where there is none. Transformers adds the loss to its own `loss` where `output_router_logits` is set; TRL (pull
    request 7248) and NeMo Automodel (NeMo-RL, pull request 3169) add it where the coefficient alone is set."""
    module = next((module for module in model.modules() if getattr(module, "config", None) is not None), None)
    config: Any = getattr(module, "config", None)
    if config is None:
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    factor = getattr(config, "router_aux_loss_coef", None) if coefficient is None else coefficient
    if not factor:
        return None
    return (
        f"{type(module).__name__} ({config.model_type}) has a load-balancing loss, router_aux_loss_coef={factor:g}. "
        "It works against replay. Transformers adds it with output_router_logits=True, TRL and NeMo Automodel without. "
        "To switch it off, set router_aux_loss_coef=0.0 in the trainer, or in model.config."
    )


def named_correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every correction bias of a model, by name; of a sharded one this rank's part."""
    tensors = (*model.named_buffers(), *model.named_parameters())
    here = {name: getattr(x, "to_local", lambda x=x: x)() for name, x in tensors if CORRECTION_BIAS.search(name)}
    return {plain_name(name, model): x.detach().clone() for name, x in here.items()}


# ---------------------------------------------------------------------- the forwards of a model, whoever calls it
@dataclass(frozen=True)
class Seen:
    """One forward."""

    routes: RoutingTrace
    """The used experts. The mask names the tokens that count."""
    scores: RouterScores | None
    replay: Replay | None
    """The replay that the forward ran under."""

    def without_softmax(self) -> Seen:
        """With the log-probabilities of the used experts alone: the others take most of the memory."""
        return replace(self, scores=None if self.scores is None else replace(self.scores, all_log_probs=()))


class Forwards:
    """Records each forward of one model by itself, while a `listening` scope is open. Recomputations do not count."""

    _shape: torch.Size | None
    _attention: Tensor | None
    _trains: bool | None
    _decides: Tensor | None

    def __init__(self, model: nn.Module):
        self.model, self.modules = model, find_moe_layers(model)
        self.layout = make_layout(model, self.modules)
        self.readers = token_readers(model)
        self.scored = True
        """Whether the routers return scores, which the first forward shows."""
        self._recording = Recording(self.layout, scored=True)
        self._forget()

    def decides(self, mask: Tensor) -> None:
        """Which inputs [batch, time] of the next forward count."""
        require_mask(mask, "decides")
        self._decides = mask.clone()

    @contextmanager
    def listening(self, see: Callable[[Seen], None], unconstrained: bool) -> Iterator[None]:
        """Hand each forward that replays to `see` once its last router has chosen; with `unconstrained` also those
        without replay that train, or that `decides` describes."""
        begun = torch.is_grad_enabled(), self.model.training

        def attention(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._trains is None:  # the outermost, in whose forward the others run
                self._trains = torch.is_grad_enabled() >= begun[0] and module.training >= begun[1]
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            if isinstance(mask, Tensor) and mask.dim() == 2:
                self._attention = mask.bool()

        def tokens(shape: torch.Size, ids: Tensor | None) -> None:
            self._shape = shape

        def routed(moe_layer: int, used: Tensor, choice: Tensor, output: Any) -> None:
            replay = moe_layers[0].replay
            if not (replay or unconstrained and (self._trains or self._decides is not None)):
                return
            read = None if replay else self._scores(moe_layer, used, choice, output)
            self._recording.routed(moe_layer, chosen(used, choice), read, None)
            if moe_layer == len(self.modules) - 1:
                see(self._seen(len(used), replay))

        self._forget()
        with ExitStack() as scope:
            for module in self.readers:
                scope.enter_context(module.register_forward_pre_hook(attention, with_kwargs=True))
                scope.enter_context(module.register_forward_hook(lambda *_: self._forget(), always_call=True))
            scope.enter_context(forwards_watched(self.model, self.modules, tokens))
            moe_layers = scope.enter_context(hooked(self.modules, "listeners", routed))
            yield

    # ------------------------------------------------------------------ how
    def _scores(self, moe_layer: int, used: Tensor, choice: Tensor, output: Any) -> dict[str, Tensor] | None:
        try:
            return read_scores(self.modules[moe_layer], used, choice, output) if self.scored else None
        except RoutingError:
            self.scored = False
            return None

    def _seen(self, tokens: int, replay: Replay | None) -> Seen:
        """The forward of so many tokens that has just reached its last router."""
        batch = self._shape[0] if self._shape is not None and math.prod(self._shape) == tokens else 1
        scores = self._recording.scores(batch) if self.scored and not replay else None
        ids = self._recording.take().unflatten(0, (batch, -1))
        mask = self._counted(batch, ids.shape[1], replay).to(ids.device)
        return Seen(RoutingTrace.from_ids(ids, self.layout, attention_mask=mask, check=False), scores, replay)

    def _counted(self, batch: int, time: int, replay: Replay | None) -> Bool[Tensor, "batch time"]:
        if self._decides is not None:
            if self._decides.numel() != batch * time:
                raise RoutingError(
                    f"decides has shape {tuple(self._decides.shape)}, but the forward has {batch} rows of {time} "
                    "tokens. Give one value per input: whether its next token is of a response."
                )
            return self._decides.reshape(batch, time)
        mask = self._attention if replay is None else replay.routes.attention_mask
        if mask is None or len(mask) != batch or mask.shape[1] < time:
            raise RoutingError(
                f"a monitored forward of {batch} rows has no attention_mask [batch, time], so its padding is unknown. "
                "Give it one, or call decides before it."
            )
        return mask[:, -time:]  # while generating it is as long as the cache

    def _forget(self) -> None:
        self._recording.clear()
        self._shape = self._attention = self._decides = self._trains = None


def counted_inputs(probe: Mapping[str, Any]) -> Bool[Tensor, "batch time"]:
    """The inputs of a probe that its attention mask and its `decides` name."""
    ids = probe.get("input_ids", probe.get("inputs_embeds"))
    values = [probe.get(name) for name in ("attention_mask", "decides")]
    masks = [mask.bool() for mask in values if isinstance(mask, Tensor) and mask.dim() == 2]
    shapes = [list(mask.shape) for mask in masks]
    if not isinstance(ids, Tensor) or not shapes or any(shape != list(ids.shape[:2]) for shape in shapes):
        raise ConfigError(
            f"the probe has {sorted(probe)}, with masks of shape {shapes}. Give the keyword arguments of the model, "
            "with input_ids or inputs_embeds, and with an attention_mask [batch, time], decides [batch, time], or both."
        )
    counted = masks[0] & masks[-1].to(masks[0].device)
    if not counted.any():
        raise ConfigError("no input of the probe counts: decides is true at padding only, or nowhere.")
    return counted.clone()
