"""How sure the routers were: gates, log-probabilities and margins of one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.routing.sites import RoutingModule, family_class, since


@dataclass(frozen=True)
class RouterScores:
    """How sure the routers were, in one forward. Without gradient, float32."""

    ids: Integer[Tensor, "batch time site k"]
    """The used experts, as a trace has them, -1 where a site uses fewer than k."""
    gates: Float[Tensor, "batch time site k"]
    """Combine weights of the used experts, as the family computes them."""
    log_probs: Float[Tensor, "batch time site k"]
    """log softmax over all experts of the router's logits, at the used experts."""
    margins: Float[Tensor, "batch time site"]
    """k-th minus (k+1)-th choice score: in the router's own units, bias included, infinite where k = all experts."""
    all_log_probs: tuple[Float[Tensor, "batch time _"], ...]
    """The whole log softmax, per site."""

    @staticmethod
    def cat(parts: Sequence[RouterScores], time: int) -> RouterScores:
        """Scores of consecutive rows, their time axis widened with zeros."""

        def join(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([nn.functional.pad(x, [0] * 2 * (x.dim() - 2) + [0, time - x.shape[1]]) for x in tensors])

        return RouterScores(
            ids=join([p.ids for p in parts]),
            gates=join([p.gates for p in parts]),
            log_probs=join([p.log_probs for p in parts]),
            margins=join([p.margins for p in parts]),
            all_log_probs=tuple(join(site) for site in zip(*(p.all_log_probs for p in parts), strict=True)),
        )

    def rows(self, index: Tensor | slice, time: int) -> RouterScores:
        """The given rows and the first `time` columns."""
        return self._each(lambda x: x[index][:, :time])

    def to(self, device: torch.device | str) -> RouterScores:
        """The same scores on another device."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> RouterScores:
        sites = tuple(map(change, self.all_log_probs))
        return RouterScores(change(self.ids), change(self.gates), change(self.log_probs), change(self.margins), sites)

    def log_probs_at(self, ids: Integer[Tensor, "batch time site k"]) -> Float[Tensor, "batch time site k"]:
        """Log-probabilities of other ids than the used ones (-1 allowed; its value means nothing)."""
        return torch.stack([p.gather(-1, ids[:, :, s].clamp(min=0)) for s, p in enumerate(self.all_log_probs)], 2)


def read_logits(spec: RoutingModule, output: Any) -> Float[Tensor, "tokens experts"]:
    """The logits of one site's forward as its router hands them out, with their graph.

    Nothing is computed here: under activation checkpointing it would not be computed again. Raises RoutingError for
    routers that do not return (logits, gates of the chosen, ...), and where the forward has no graph.
    """
    name = family_class(spec.module).__name__
    logits = output[0] if isinstance(output, tuple) and len(output) > 2 else None
    if logits is None or logits.shape[-1:] != (spec.site.num_experts,):
        raise RoutingError(f"{name} does not hand out its logits, so its router can have no term in a loss."
                           + since(name))
    if not torch.is_grad_enabled():
        raise RoutingError(
            f"{spec.site.name} runs without a graph, so no gradient of its logits could reach the router: re-entrant "
            "activation checkpointing computes layers that way. Use the other kind, activation_checkpointing=True."
        )
    return logits


def read_scores(spec: RoutingModule, used: Tensor, choice: Tensor, output: Any) -> dict[str, Tensor]:
    """Gates, log-probabilities and margins of one site's forward, from its output and the scores it chose by.

    Raises RoutingError for the few families whose routers do not return (logits, gates of the chosen, ...).
    """
    experts, k = spec.site.num_experts, spec.site.top_k
    choice = choice.reshape(-1, experts).float()
    logits, gates = output[:2] if isinstance(output, tuple) and len(output) > 2 else (choice, choice)
    if logits.shape != choice.shape or gates.shape != used.shape:
        name = family_class(spec.module).__name__
        raise RoutingError(f"{name} does not hand out its logits and combine weights; record without scores."
                           + since(name))
    log_probs = logits.detach().float().log_softmax(-1)
    if k < experts:
        top = choice.topk(k + 1, dim=-1).values
        margins = top[:, -2] - top[:, -1]
    else:
        margins = choice.new_full(choice.shape[:1], float("inf"))
    return {
        "gates": gates.detach().float(),
        "log_probs": log_probs.gather(-1, used),
        "margins": margins,
        "all_log_probs": log_probs,
    }
