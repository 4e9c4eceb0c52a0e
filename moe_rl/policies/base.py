"""The verbs every training engine honours. Nothing outside a policy may ask it for logits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from moe_rl.objectives import Objective
from moe_rl.routing.router_noise import Noise
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import MiniBatch, Rollouts, Scored, Updated


@runtime_checkable
class Policy(Protocol):
    """π_θ: scores batches, takes optimizer steps, hands out weights. All verbs are collective where there are ranks.

    A component is a function `policy(run, start, frozen, *, option=…)` that makes one: `start` is the model past its
    cold start, None on all ranks but 0; `frozen`: it will only score, as a reference. `needs("ranks")` marks one that
    runs on several processes, and `checked` gives it a check of the run. One on several processes may have
    `from_rank_0`, which hands a batch of rank 0 to all.
    """

    def score(
        self, batch: Rollouts, routes: RoutingTrace | None = None, scores: bool = False, noise: Noise | None = None
    ) -> Scored:
        """Log-probs, entropy and routing of rollouts without gradient; unconstrained when `routes` is None.

        `scores` asks for router scores as well, which cost memory: for probes. Under a `noise` the routers are moved.
        """

    def update(self, mini_batch: MiniBatch, objective: Objective, noise: Noise | None = None) -> Updated:
        """One optimizer step on one mini-batch, under its routes where it has some. The result was measured before the
        weights moved. Under a `noise` the loss and its gradient are those of moved routers; the step moves the others.
        """

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, for the rollout engine."""

    def save(self, folder: Path) -> None:
        """Write everything that resuming needs."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
