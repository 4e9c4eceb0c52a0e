"""The package's numbers in somebody else's trainer: `with monitor:` around a training step, `monitor.row()` after it.

The columns are those of the data dictionary (`storage/columns.toml`), by the functions of our own runs.
Nothing is trained, sampled or drawn at random here: a trainer's weights are the same bits with a monitor and without.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moe_rl.errors import AuxLossSilentlyOn, ConfigError, RoutingError
from moe_rl.metrics import ratios, volatility
from moe_rl.routing.hooks import Recording, Replay, RouterScores, read_scores
from moe_rl.routing.ids import used
from moe_rl.routing.intercept import hooked, tokens_noted
from moe_rl.routing.sites import find_sites, make_layout, plain_name, token_readers
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
CHANGES = (volatility.RouteChange, volatility.ResponseChange, volatility.RouterShift)


class Monitor:
    """What the routers of `model` do: any Mixture-of-Experts model that `record_routing` knows, as the trainer calls
    it (wrapped in DDP or FSDP2, with LoRA adapters, a vision-language model).

        monitor = moe_rl.monitor(model, probe={"input_ids": ids, "attention_mask": mask}, every=10)
        with monitor:                # the forwards and backwards of one step
            ...
        optimizer.step()
        log(monitor.row())           # {} in nine steps of ten

    `row` has, each where it was measured:

    - with a `probe`, a fixed batch of what `model` is called with: `expert_change_rate` and all other volatility of its
      natural routes, and `load_…`, `router_confidence` and `margin_…` under the weights of now. It is read without
      gradient, in eval mode, before a measured step and when `row` is called. So a row says what one step did, whatever
      changed the weights in between; `since="start"`: all since the first step, and no forward before the others;
    - without one, `load_…`, `router_confidence` and `margin_…` of the block's own forwards that did not replay;
    - `pull` and `coverage` of the block's forwards inside `replay_routing`;
    - `engine_…` of the log-probs that `engine` was given, `token_…` of those that `ratios` was.

    The probe may name, as `decides`, the inputs whose *next* token is of a response; `decides` says so of the block's
    forwards. Without it all tokens that the attention mask lets in count. Padding of a probe never does: without a mask
    these are the model's padding tokens at the ends of rows.

    On several ranks `row` is collective, and with a probe the beginning of a block is: every rank of `group` (default:
    all) enters and asks, with rows of its own, and gets the numbers of all rows together. Ranks that read the same
    tokens (tensor parallelism) change no share.
    Warns (AuxLossSilentlyOn) of a load-balancing loss in the configuration, or of `router_aux_loss_coef` if the trainer
    has its own, and of a correction bias that moves under replay.
    Raises RoutingError for a dense model and ConfigError for settings that cannot be.
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
            raise ConfigError(f"every={every}, since={since!r}: every must be a number of blocks, at least 1, and "
                              "since 'step' or 'start'")
        self.model, self.every, self.since, self.group = model, every, since, group
        self.router_aux_loss_coef = router_aux_loss_coef
        self.forwards = Forwards(model)
        self.probe, self.probe_decides = probe_of(self.forwards.readers, probe)
        self.layers: list[Row] = []
        """What the last row says per site, as in the table `layers`."""
        self.blocks, self.measures = 0, False
        self._found: dict[str, Any] = {}
        """What was seen since the block began: sums, or values one after the other."""
        self._before: Seen | None = None
        """The probe under the weights that the next row compares with."""
        self._replayed = False
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
            self._found, self._replayed = {}, False
            self._biases = named_correction_biases(self.model)
            naturally = self.probe is None
            self._scope.enter_context(self.forwards.listening(self._see, lambda replay: naturally and not replay))
        return self

    def __exit__(self, *error: object) -> None:
        assert self._scope is not None, "it was entered"
        scope, self._scope = self._scope, None
        scope.close()

    def decides(self, mask: Tensor) -> None:
        """Say of the next forward in the block which inputs [batch, time] have a response token as their *next*."""
        if self._scope is None:
            raise RoutingError("decides was called outside of the block. Call it inside, before the forward that it "
                               "describes.")
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
        """The numbers of the last block, and of the probe; {} where that block was not measured, or asked before.

        Call it after `optimizer.step()`: warns if the routers say of the probe, bit for bit, what they said before.
        """
        if not self.blocks:
            raise RoutingError("row was called before any block. Put the forwards of a step inside `with monitor:`.")
        if not self.measures:
            return {}
        if self._scope is not None:
            raise RoutingError("row was called inside the block. Call it after the block, and after optimizer.step().")
        self.measures = False
        self._warn_of_biases()
        if self.probe is not None:
            self._compare(self._read_probe())
        found, self._found = self._over_ranks(), {}
        if not found:
            raise RoutingError("no forward of the monitored model ran inside the block. Give the monitor the module "
                               "that is trained, and call its forward inside the block.")
        return self._row_of(found)

    # ------------------------------------------------------------------ what is seen
    def _of_ranks(self, mine: Any) -> list[Any]:
        """What every rank of the group has."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self.group) == 1:
            return [mine]
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, mine, group=self.group)
        return parts

    def _see(self, seen: Seen) -> None:
        """A forward of the block."""
        if seen.replay is None:
            if self.probe is None:
                self._use(seen)
            return
        self._replayed = True
        forced, preferred = (trace.experts.to(seen.routes.experts.device)
                             for trace in (seen.replay.routes, seen.replay.preferred))
        self._add("pull", volatility.route_change(forced, preferred, seen.routes.attention_mask))
        real = seen.replay.routes.attention_mask.to(forced.device)
        self._add("coverage", volatility.coverage(used(forced[..., 0]), real))

    def _use(self, seen: Seen) -> None:
        """Natural routes by themselves."""
        ids, mask, scores = seen.routes.experts, seen.routes.attention_mask, seen.scores
        experts = [site.num_experts for site in self.forwards.layout.sites]
        self._add("load", volatility.load_statistics(ids, experts, mask))
        if scores is not None:
            self._add("confidence", volatility.router_confidence(scores.log_probs, ids, mask))
            room = None if self.probe is not None else MARGINS - len(self._found.get("margins", ()))
            self._add("margins", scores.margins[mask][:room])

    @torch.no_grad()
    def _read_probe(self) -> Seen:
        """Natural routes of the probe under the weights of now."""
        seen: list[Seen] = []
        with evaluation_mode(self.model), self.forwards.listening(seen.append, lambda replay: not replay):
            if self.probe_decides is not None:
                self.forwards.decides(self.probe_decides)
            self.model(**self.probe or {})
        if len(seen) != 1:
            raise RoutingError(f"the model ran {len(seen)} forwards for the probe; it must run one")
        if seen[0].replay is not None:
            raise RoutingError("the probe was read inside replay_routing, so its routing is replayed. Enter the "
                               "monitor before replay_routing, and call row() after that block.")
        return seen[0]

    def _compare(self, after: Seen) -> None:
        assert self._before is not None, "it was read when the block began"
        old, new, scores = self._before.routes, after.routes, self._before.scores
        gates: Tensor | None = None
        both: tuple[Tensor, Tensor] | None = None
        if scores is not None and after.scores is not None:
            gates, both = scores.gates, (scores.log_probs, after.scores.log_probs_at(old.ids()))
            if torch.equal(scores.log_probs, after.scores.log_probs):
                warnings.warn("the routing of the probe did not change at all. Call row() after optimizer.step(), and "
                              "check that the model is trained.", stacklevel=3)
        mask = after.routes.attention_mask
        for change in volatility.changes(old.experts, new.experts, mask, self.forwards.layout, gates, both):
            self._add(type(change).__name__, change)
        self._use(after)

    def _warn_of_biases(self) -> None:
        now = named_correction_biases(self.model) if self._replayed and self._biases else {}
        moved = [name for name, bias in now.items() if not torch.equal(bias, self._biases[name])]
        if moved:
            warnings.warn(
                f"{len(moved)} correction biases moved in a step with replay, {moved[0]} first, though replayed "
                "choices do not depend on them (prime-rl, pull request 2953). Switch their update off, or count the "
                "experts that the routers prefer.",
                AuxLossSilentlyOn, stacklevel=3)  # fmt: skip

    # ------------------------------------------------------------------ from what was seen to a row
    def _log_ratio(self, name: str, whose: str, logprobs: Tensor, others: Tensor, mask: Tensor) -> None:
        if not logprobs.shape == others.shape == mask.shape:
            shapes = [list(x.shape) for x in (logprobs, others, mask)]
            raise ConfigError(f"log-probs {shapes[0]}, {whose} {shapes[1]} and the mask {shapes[2]} must have one "
                              "shape [batch, time]")
        require_mask(mask)
        for given, of in ((logprobs, "log-probs"), (others, whose)):
            require_logprobs(given, mask.to(given.device), of)
        if self.measures:
            gap = (logprobs.detach() - others.to(logprobs.device))[mask]
            if not bool(gap.isfinite().all()):
                raise ConfigError(f"{int((~gap.isfinite()).sum())} of {gap.numel()} differences of log-probs and "
                                  f"{whose} are not finite")
            self._add(name, gap)

    def _add(self, name: str, value: Any) -> None:
        self._found[name] = _pooled((self._found[name], value)) if name in self._found else value

    def _over_ranks(self) -> dict[str, Any]:
        """What was found, on the CPU, of all ranks of the group together."""
        mine = {name: _on_cpu(value) for name, value in self._found.items()}
        parts = self._of_ranks(mine)
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _pooled([part[name] for part in parts if name in part]) for name in names}

    def _row_of(self, found: Mapping[str, Any]) -> Row:
        row: Row = {}
        self.layers = [{"site": i, "layer": site.decoder_layer} for i, site in enumerate(self.forwards.layout.sites)]
        for name in (*(kind.__name__ for kind in CHANGES), "load", "confidence"):
            if name in found:
                row |= found[name].row()
                self._of_sites(found[name].site_rows())
        if "margins" in found:
            by_site, (of_all,) = (volatility.margin_summary(x, torch.ones_like(x[..., 0], dtype=torch.bool))
                                  for x in (found["margins"][None], found["margins"].reshape(1, -1, 1)))
            self._of_sites(by_site)
            row |= of_all
        if "pull" in found:
            row |= {"pull": found["pull"].row()["expert_change_rate"]} | found["coverage"].row()
        if "engine" in found:
            gap = found["engine"][None]
            row |= ratios.engine_gap(gap, torch.ones_like(gap, dtype=torch.bool))
        if len(given := found.get("ratios", ())):
            spread = ratios.ratio_statistics(given[None], torch.ones_like(given[None], dtype=torch.bool))
            row |= {name: spread[name] for name in SPREAD}
        return row

    def _of_sites(self, rows: Iterable[Row]) -> None:
        for mine, values in zip(self.layers, rows, strict=True):
            mine |= values


monitor = Monitor


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No module of a model trains, for a forward between its steps; afterwards those that did do again. FSDP2's modules
    give back the weights that they gathered."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else the outermost keeps its weights of now, whatever the optimizer does


def _pooled(parts: Iterable[Any]) -> Any:
    return reduce(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a + b, parts)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    here = {f.name: getattr(value, f.name) for f in fields(value)}
    return replace(value, **{name: x.cpu() for name, x in here.items() if isinstance(x, Tensor)})


# ---------------------------------------------------------------------- balancing that nobody asked for
def auxiliary_loss(model: nn.Module, coefficient: float | None = None) -> str | None:
    """What the load-balancing loss in a model's configuration will do in training, in words; None where there is none.

    `coefficient` is the trainer's, where it has one of its own. Transformers adds the loss to its own `loss` where
    `output_router_logits` is set; trainers that take the coefficient alone as a wish are TRL (pull request 7248) and
    NeMo Automodel (NeMo-RL, pull request 3169: gradient norm 1.88 in place of 0.1).
    """
    for module in model.modules():  # the first with a configuration, inside whatever wraps it
        if (config := getattr(module, "config", None)) is not None:
            break
    else:
        return None
    text = getattr(config, "get_text_config", lambda: config)()
    given = getattr(text, "router_aux_loss_coef", None) if coefficient is None else coefficient
    if not given:
        return None
    if coefficient is not None:
        adds = "this trainer adds it to its loss"
    elif any(getattr(c, "output_router_logits", False) for c in (config, text)):
        adds = "with output_router_logits=True its forward adds it to its loss"
    else:
        adds = "TRL and NeMo Automodel add it to their loss; a loop of your own does not, unless its code does"
    return (f"{type(module).__name__} ({text.model_type}) has a load-balancing loss, router_aux_loss_coef={given:g}: "
            f"{adds}. It works against replay: to switch it off, set router_aux_loss_coef=0.0 in the trainer, or in "
            "model.config.")


def named_correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every correction bias of a model, by name; of a sharded one this rank's part."""
    found = (*model.named_buffers(), *model.named_parameters())
    here = {name: getattr(x, "to_local", lambda x=x: x)() for name, x in found if CORRECTION_BIAS.search(name)}
    return {plain_name(name): x.detach().clone() for name, x in here.items()}


# ---------------------------------------------------------------------- the forwards of a model, whoever calls it
@dataclass(frozen=True)
class Seen:
    """One forward."""

    routes: RoutingTrace
    """Used. Its mask says which tokens count: those that decide a response, or all real ones where nobody said."""
    scores: RouterScores | None
    replay: Replay | None
    """The replay that the forward ran under."""

    def without_softmax(self) -> Seen:
        """With the log-probabilities of the used experts alone: the others are most of what this holds."""
        return replace(self, scores=None if self.scores is None else replace(self.scores, all_log_probs=()))


class Forwards:
    """The forwards of one model while a `listening` scope is open. Recomputations are not counted again."""

    _shape: torch.Size | None
    _attention: Tensor | None
    _decides: Tensor | None

    def __init__(self, model: nn.Module):
        self.model, self.modules = model, find_sites(model)
        self.layout = make_layout(model, self.modules)
        self.readers = token_readers(model)
        self.scored = True
        """Whether the routers hand out scores: found out at the first forward."""
        self._recording = Recording(self.layout, scored=True)
        self._forget()

    def decides(self, mask: Tensor) -> None:
        """Which inputs [batch, time] of the next forward count."""
        require_mask(mask, "decides")
        self._decides = mask

    @contextmanager
    def listening(self, see: Callable[[Seen], None], scores: Callable[[Replay | None], bool]) -> Iterator[None]:
        """Hand each forward to `see` once its last router has chosen; `scores` says, given the replay that it runs
        under, whether scores are wanted."""

        def attention(module: nn.Module, args: tuple, kwargs: dict) -> None:
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            if isinstance(mask, Tensor) and mask.dim() == 2:
                self._attention = mask.bool()

        def tokens(shape: torch.Size, ids: Tensor | None) -> None:
            self._shape = shape

        def routed(site: int, used: Tensor, choice: Tensor, output: Any) -> None:
            if site == 0:
                self._recording.clear()  # of a forward that failed half-way
            replay = sites[0].replay
            read = self._scores(site, used, choice, output) if scores(replay) else None
            self._recording.routed(site, used, read, None)
            if site == len(self.modules) - 1:
                try:
                    see(self._whole(len(used), replay, scores(replay) and self.scored))
                finally:
                    self._forget()

        self._forget()
        with ExitStack() as scope:
            for module in self.readers:
                scope.callback(module.register_forward_pre_hook(attention, with_kwargs=True).remove)
            scope.enter_context(tokens_noted(self.model, tokens))
            sites = scope.enter_context(hooked(self.modules, "listeners", routed))
            yield

    # ------------------------------------------------------------------ how
    def _scores(self, site: int, used: Tensor, choice: Tensor, output: Any) -> dict[str, Tensor] | None:
        if self.scored:
            try:
                return read_scores(self.modules[site], used, choice, output)
            except RoutingError as error:
                self.scored = False
                warnings.warn(f"{error} Not measured: router_confidence, router_shift, gate_mass_moved and margins.",
                              stacklevel=2)
        return None

    def _whole(self, tokens: int, replay: Replay | None, scored: bool) -> Seen:
        """The forward of so many tokens that has just reached its last router."""
        batch = self._shape[0] if self._shape is not None and math.prod(self._shape) == tokens else 1
        scores = self._recording.scores(batch) if scored else None
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
        given = self._attention if replay is None else replay.routes.attention_mask
        if given is not None and len(given) == batch and given.shape[1] >= time:
            return given[:, -time:]  # while generating it is as long as the cache
        return torch.ones(batch, time, dtype=torch.bool)

    def _forget(self) -> None:
        self._recording.clear()
        self._shape = self._attention = self._decides = None


def pad_of(readers: Iterable[nn.Module]) -> int | None:
    """The padding token in the configuration of a model."""
    found = (getattr(getattr(m, "config", None), "pad_token_id", None) for m in readers)
    return next((pad for pad in found if pad is not None), None)


def _real_inputs(ids: Tensor, mask: Any, pad: int | None) -> Mask | None:
    """Which inputs of a probe are no padding: what its mask says or, without one, all but a model's padding tokens at
    the ends of rows. None where neither tells, or there is none. Warns where it had to guess, or cannot."""
    if isinstance(mask, Tensor) and mask.shape == ids.shape[:2]:
        return mask.bool()
    if mask is not None:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        warnings.warn(f"the probe's attention_mask ({shape}) does not say which inputs are padding, so all count. Give "
                      "`decides`, or a mask [batch, time].", stacklevel=4)
        return None
    if pad is None or ids.dim() > 2 or not bool((ids[:, [0, -1]] == pad).any()):
        return None
    real = ids != pad
    inside = (real.cumsum(1) > 0) & (real.flip(1).cumsum(1) > 0).flip(1)
    warnings.warn(f"{int((~inside).sum())} inputs of the probe, at the ends of its rows, are the padding token {pad}, "
                  "and do not count. If they are no padding, or precede real tokens, give the attention_mask.",
                  stacklevel=4)
    return inside


def probe_of(
    readers: Iterable[nn.Module], probe: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, Tensor | None]:
    """What the model is called with, without a cache and with no more logits than it must make, and the mask."""
    if probe is None:
        return None, None
    if not isinstance(probe, Mapping):
        raise ConfigError(f"the probe is a {type(probe).__name__}. Give a dictionary, {{'input_ids': …}}.")
    ids, decides = probe.get("input_ids", probe.get("inputs_embeds")), probe.get("decides")
    if not isinstance(ids, Tensor) or ids.dim() < 2 or not ids.numel():
        raise ConfigError(f"the probe has {sorted(probe)}. Give the keyword arguments of the model, with input_ids "
                          "[batch, time] or inputs_embeds.")
    if decides is not None:
        require_mask(decides, "the probe's decides")
    if decides is not None and (decides.shape != ids.shape[:2] or not decides.any()):
        raise ConfigError(f"the probe's decides has shape {tuple(decides.shape)} and {int(decides.sum())} true values, "
                          f"for {tuple(ids.shape[:2])} inputs. Set it to true where the next token is of a response.")
    real = _real_inputs(ids, probe.get("attention_mask"), pad_of(readers))
    if real is not None:
        counted = real if decides is None else decides & real.to(decides.device)
        if not counted.any():
            raise ConfigError("no input of the probe counts: all are padding, or decides is true at padding only. Give "
                              "rows with real tokens.")
        decides = counted if decides is not None or probe.get("attention_mask") is None else None  # the model has it
    understood = {name for module in readers for name in inspect.signature(module.forward).parameters}
    quiet = {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in understood}
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in probe.items() if name != "decides"}
    return quiet | given, decides
