"""An engine on rank 0 for a policy that is spread over ranks: weights are pushed to it, and every push is checked."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from moe_rl import ranks
from moe_rl.rollouts.base import RolloutEngine
from moe_rl.rollouts.push import PROBE_KEY, PROBE_TOKENS, Score, Tolerance, parity, require_parity
from moe_rl.types import Prompt, Rollout, Sampling


class PushedEngine:
    """`engine` keeps a model of its own on rank 0, and is None on the others, which only take part in pushes.

    `generate` is for rank 0 alone, `load` is collective. `score` is the policy's; after each push it is compared with
    what the engine says of its own completions of `probes`.
    """

    def __init__(
        self, engine: RolloutEngine | None, score: Score, probes: list[Prompt], tolerance: Tolerance, temperature: float
    ):
        self.engine, self.score, self.probes, self.tolerance = engine, score, probes, tolerance
        self.reports_routes = engine is None or engine.reports_routes
        self.sampling = Sampling(temperature, PROBE_TOKENS)
        self.pushes = 0

    def generate(
        self, prompts: list[Prompt], group_size: int, *, key: tuple[int, ...], sampling: Sampling
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        return self.engine.generate(prompts, group_size, key=key, sampling=sampling)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> float:
        """Push weights; returns max |log p(engine) - log p(policy)| over the probes' completions, in nats.

        Raises RunError when log-probs or routes are further apart than rounding explains.
        """
        if self.engine is not None:
            self.engine.load(weights)
        else:
            for _ in weights:  # a rank without an engine still has to give its part of them
                pass
        self.pushes += 1
        drawn = ranks.once(lambda: self.generate(self.probes, 1, key=PROBE_KEY, sampling=self.sampling))
        found = parity(drawn, self.score)
        require_parity(found, self.tolerance, f"push {self.pushes} to the engine on rank 0")
        return found.logprob_max

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self.engine is not None:
            self.engine.close()
