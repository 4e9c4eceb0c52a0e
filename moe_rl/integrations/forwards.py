"""What the routers say in each forward of a model, whoever calls it: in a trainer's own training, scoring, sampling."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.routing.hooks import Recording, Replay, RouterScores, read_scores
from moe_rl.routing.intercept import hooked, tokens_noted
from moe_rl.routing.sites import find_sites, make_layout, token_readers
from moe_rl.routing.trace import RoutingTrace


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
        self._decides = mask.bool()

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
                warnings.warn(f"{error} Left out: router_confidence, router_shift, gate_mass_moved and margins.",
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
                    f"decides has shape {tuple(self._decides.shape)}, but the forward reads {batch} rows of {time} "
                    "tokens; it says of every input whether its next token is of a response."
                )
            return self._decides.reshape(batch, time)
        given = self._attention if replay is None else replay.routes.attention_mask
        if given is not None and len(given) == batch and given.shape[1] >= time:
            return given[:, -time:]  # while generating it is as long as the cache
        return torch.ones(batch, time, dtype=torch.bool)

    def _forget(self) -> None:
        self._recording.clear()
        self._shape = self._attention = self._decides = None


def probe_of(
    readers: Iterable[nn.Module], probe: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, Tensor | None]:
    """What the model is called with, without a cache and with no more logits than it must make, and the mask."""
    if probe is None:
        return None, None
    if not isinstance(probe, Mapping):
        raise ConfigError(f"the probe is a {type(probe).__name__}: it is a batch by name, {{'input_ids': …}}.")
    ids, decides = probe.get("input_ids", probe.get("inputs_embeds")), probe.get("decides")
    if not isinstance(ids, Tensor) or ids.dim() < 2 or not ids.numel():
        raise ConfigError(f"the probe has {sorted(probe)}: it is a batch as the model is called with it, by name, with "
                          "input_ids [batch, time] or inputs_embeds among them.")
    if decides is not None and (decides.shape != ids.shape[:2] or not decides.any()):
        raise ConfigError(f"the probe's decides has shape {tuple(decides.shape)} and is true at {int(decides.sum())} "
                          f"inputs, of {tuple(ids.shape[:2])}: it is true where the next token is of a response.")
    understood = {name for module in readers for name in inspect.signature(module.forward).parameters}
    quiet = {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in understood}
    given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in probe.items() if name != "decides"}
    return quiet | given, None if decides is None else decides.bool()
