"""An engine that keeps weights of its own, given the policy's and checked after every push. No engine checks itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.integrations.vllm.push import (
    PROBE_KEY,
    PROBE_TOKENS,
    Receipt,
    Score,
    Tolerance,
    parity,
    probe_prompts,
    require_parity,
    require_receipt,
)
from moe_rl.models.load import LoadedModel
from moe_rl.models.shards import checkpoint_weights
from moe_rl.registry import Component
from moe_rl.rollouts.base import RolloutEngine, Sampler
from moe_rl.types import Prompt, Reply, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@runtime_checkable
class CheckpointReceiver(Sampler, Protocol):
    """An engine elsewhere: it samples as a `RolloutEngine` does, but is sent weights as a checkpoint has them."""

    @property
    def name(self) -> str:
        """For errors: where weights are pushed to."""

    model: PreTrainedModel
    """The model it serves, without weights: names and shapes."""
    pushes: int
    """The number that the last push must have in its receipts."""

    def hold(self, weights: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
        """Put weights, named and cut as in a checkpoint, where the engine can take them from: memory, or files."""

    def push(self, weights: Mapping[str, Tensor]) -> Sequence[Receipt]:
        """Take over what it holds. What each of its workers then has; empty where they do not say, so that the
        comparison of completions alone must do."""


def check_pushes(run: RunConfig, start: LoadedModel | None, engine: CheckpointReceiver | RolloutEngine | None,
                 score: Score) -> CheckedEngine:  # fmt: skip
    """An engine of a run, with every push to it checked. `start` and `engine` are None on ranks that have none."""
    dtypes = [Component.of(use).options.get(key) for use, key in ((run.engine, "dtype"), (run.policy, "compute_dtype"))]
    tolerance = Tolerance.of(*(dtype or run.model.dtype for dtype in dtypes), run.model.dtype)
    probes = probe_prompts(start.tokenizer, start.model.config.vocab_size) if start else []
    return CheckedEngine(engine, score, probes, tolerance, run.temperature)


class CheckedEngine:
    """Any engine with weights of its own behind the verbs of `RolloutEngine`; every push to it is checked.

    With several ranks, rank 0 has `engine` and the others None: they only take part in `load`, which is collective,
    and `generate` is for rank 0 alone. `score` is the policy's, and `temperature` the one it scores at: after each push
    it is compared with what the engine says of its own completions of `probes`, which only rank 0 needs. An engine that
    shares the policy's module needs none of this.
    """

    def __init__(
        self,
        engine: CheckpointReceiver | RolloutEngine | None,
        score: Score,
        probes: list[Prompt],
        tolerance: Tolerance,
        temperature: float,
    ):
        self.engine, self.score, self.probes = engine, score, probes
        self.tolerance, self.temperature = tolerance, temperature
        self.reports_routes = engine is None or engine.reports_routes
        self.loads = 0

    def generate(
        self, prompts: list[Prompt], group_size: int, *, key: tuple[int, ...], sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """See `RolloutEngine.generate`."""
        assert self.engine is not None, "rank 0 has an engine, and draws for all"
        conversation = {} if reply is None else {"reply": reply}
        return self.engine.generate(prompts, group_size, key=key, sampling=sampling, **conversation)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> float:
        """Push the policy's weights, and check: the engine's push counter and checksums, where it has any, then
        log-probs and routes of a few completions.

        Returns the largest |log p(engine) - log p(policy)| over these, in nats. Raises RunError when anything
        disagrees by more than rounding explains.
        """
        self._hand_over(weights)
        drawn, what = ranks.from_rank_0(self._answer)
        found = parity(drawn, self.score)
        require_parity(found, self.tolerance, what)
        return found.logprob_max

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self.engine is not None:
            self.engine.close()

    # ------------------------------------------------------------------ how
    def _hand_over(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        engine, self.loads = self.engine, self.loads + 1
        if engine is None:
            for _ in weights:  # a rank without an engine still has to give its part of them
                pass
        elif isinstance(engine, CheckpointReceiver):
            sent = engine.hold(checkpoint_weights(engine.model, weights))
            for receipt in engine.push(sent):
                require_receipt(receipt, sent, engine.pushes)
        else:
            engine.load(weights)

    def _answer(self) -> tuple[list[Rollout], str]:
        """Completions of the probes, and which push they are of."""
        sampling = Sampling(self.temperature, PROBE_TOKENS)
        drawn = self.generate(self.probes, 1, key=PROBE_KEY, sampling=sampling)
        number = getattr(self.engine, "pushes", self.loads)
        return drawn, f"push {number} to {getattr(self.engine, 'name', 'the engine on rank 0')}"
