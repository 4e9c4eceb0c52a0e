"""Weights pushed to an engine that has its own, and the check that it has taken them over.

Updating a running engine fails silently (a kernel keeps its old packed copy, a cache its old keys), and wrong weights
give plausible text. So two checks follow every push: the engine's own count of pushes, and log-probs and routes of a
few completions against the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import RunError
from moe_rl.integrations.shards import checkpoint_weights
from moe_rl.metrics.volatility import route_change
from moe_rl.models.load import LoadedModel
from moe_rl.registry import Component
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.engine import RolloutEngine, Sampler
from moe_rl.routing.moe_layers import router_parameters
from moe_rl.types import Prompt, Rollout, Rollouts, Sampling, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Score = Callable[[Rollouts], Scored]
"""`Policy.score`: log-probs without replay and routes of a batch."""
PROBES, PROBE_TOKENS = 8, 12
"""Random prompts, and the length of both prompt and completion, that a push is checked with."""
PROBE_KEY = (0,)
"""Noise of the check: the same after every push, since a resumed run counts its pushes anew."""


# ---------------------------------------------------------------------- parity
@dataclass(frozen=True)
class Parity:
    """How far an engine's completions are from the policy's own scoring of them, at weights that should be equal."""

    tokens: int
    logprob_mean: float
    """Mean |log p(engine) - log p(policy)| over the completions' tokens, in nats."""
    logprob_max: float
    any_change_rate: float
    """Share of known (token, MoE layer) rows, prompts included, where engine and policy chose other sets of experts."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ. Measured with vLLM on tiny models of random weights: equal weights in float32 differ by 5e-7 and
    in no set, in bfloat16 by 7e-3 to 0.04 and in 2 to 4 % of the sets; corrupted ones by 0.2 to 0.7 and in half of the
    sets. In bfloat16 the weights of two consecutive updates cannot be told apart; the count of pushes does that."""

    logprob_mean: float
    any_change_rate: float

    @staticmethod
    def of(*dtypes: str) -> Tolerance:
        """Loose where any of the dtypes is narrower than float32."""
        return Tolerance(1e-4, 0.01) if set(dtypes) <= {"float32", "float64"} else Tolerance(0.2, 0.25)


def parity(rollouts: list[Rollout], score: Score) -> Parity:
    """Compare what the engine reported of its completions with what the policy says of the same tokens."""
    batch = collate(rollouts, list(range(len(rollouts))), [0.0] * len(rollouts), 0)
    scored = score(batch)
    gap = (scored.logprobs - batch.rollout_logprobs)[batch.response_mask].abs().double()
    changed = 0.0
    if batch.rollout_routes is not None:
        change = route_change(scored.routes.experts, batch.rollout_routes.experts, batch.attention_mask)
        changed = float(change["any_change_rate"].sum() / change["volatility_tokens"].sum().clamp(min=1))
    return Parity(len(gap), gap.mean().item(), gap.max().item(), changed)


def require_parity(found: Parity, tolerance: Tolerance, what: str) -> None:
    """Raise RunError when engine and policy are further apart than their numerics explain. NaN is further."""
    if not (found.logprob_mean <= tolerance.logprob_mean and found.any_change_rate <= tolerance.any_change_rate):
        raise RunError(
            f"{what}: the engine has other weights than the policy, or another temperature. Over {found.tokens} tokens "
            f"the mean |Δ log-prob| is {found.logprob_mean:.2g} (limit {tolerance.logprob_mean:g}), and "
            f"{found.any_change_rate:.1%} of the expert sets differ (limit {tolerance.any_change_rate:.1%})."
        )


def probe_prompts(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[Prompt]:
    """A few prompts of random tokens, the same ones each time, no special token among them."""
    special = torch.tensor(sorted(tokenizer.all_special_ids))
    usable = torch.arange(min(vocabulary, len(tokenizer)))
    usable = usable[~torch.isin(usable, special)]
    drawn = torch.randint(len(usable), (PROBES, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    return [Prompt("", tokens=tuple(row)) for row in usable[drawn].tolist()]


# ---------------------------------------------------------------------- the engine
@runtime_checkable
class CheckpointReceiver(Sampler, Protocol):
    """An engine that samples as a `RolloutEngine` does and receives weights under the names of a checkpoint."""

    @property
    def name(self) -> str:
        """For errors: where weights are pushed to."""

    model: PreTrainedModel
    """The model it serves, without weights: names and shapes."""
    dtype: str | None
    """In which it computes, if that is known: wider matrices are sent in it."""
    pushes: int
    """The number of pushes that it should have taken over."""

    def push(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Take over weights, named and cut as in a checkpoint, all of them. Returns the number of pushes that its
        workers have taken over, of the one with the fewest."""


def narrowed(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Weights of `model` with its matrices in `dtype`, where they are wider, so that fewer bytes travel. Routers and
    vectors stay as they are: engines keep some of them in float32."""
    routers = {id(parameter) for parameter in router_parameters(model)}
    as_they_are = {name for name, parameter in model.named_parameters() if id(parameter) in routers}
    to = getattr(torch, dtype) if dtype else None
    for name, tensor in weights:
        wider = to is not None and tensor.is_floating_point() and tensor.dtype.itemsize > to.itemsize
        yield name, tensor.to(to) if wider and tensor.dim() > 1 and name not in as_they_are else tensor


def check_pushes(
    run: RunConfig, start: LoadedModel | None, engine: CheckpointReceiver | RolloutEngine | None, score: Score
) -> CheckedEngine:
    """An engine of a run, with every push to it checked. `start` and `engine` are None on ranks that have none."""
    dtypes = [Component.of(use).options.get(key) for use, key in ((run.engine, "dtype"), (run.policy, "compute_dtype"))]
    tolerance = Tolerance.of(*(dtype or run.model.dtype for dtype in dtypes), run.model.dtype)
    probes = probe_prompts(start.tokenizer, start.model.config.get_text_config().vocab_size) if start else []
    return CheckedEngine(engine, score, probes, tolerance, run.temperature)


class CheckedEngine:
    """Any engine with weights of its own behind the verbs of `RolloutEngine`; every push to it is checked.

    With several ranks, rank 0 has `engine` and the others None. `load` is collective; `generate` is for rank 0. After
    each push, `score` (the policy's, at `temperature`) is compared with the engine's log-probs of its own completions
    of `probes`, which only rank 0 needs. An engine that shares the policy's module needs none of this.
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

    def generate(self, prompts: list[Prompt], group_size: int, **request: Any) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        assert self.engine is not None, "rank 0 has an engine, and draws for all"
        return self.engine.generate(prompts, group_size, **request)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> float:
        """Push the policy's weights, and check the engine's count of pushes, and log-probs and routes of a few
        completions.

        Returns the largest |log p(engine) - log p(policy)| over these, in nats. Raises RunError when anything
        disagrees by more than rounding explains.
        """
        self._hand_over(weights)
        drawn, what = ranks.from_rank_0(self._answer)
        measured = parity(drawn, self.score)
        require_parity(measured, self.tolerance, what)
        return measured.logprob_max

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
            taken = engine.push(checkpoint_weights(engine.model, narrowed(engine.model, weights, engine.dtype)))
            if taken != engine.pushes:
                raise RunError(
                    f"{engine.name} has taken over {taken} pushes of weights, but {engine.pushes} were sent. It was "
                    "restarted or missed one; load the weights again."
                )
        else:
            engine.load(weights)

    def _answer(self) -> tuple[list[Rollout], str]:
        """Completions of the probes, and which push they are of."""
        sampling = Sampling(self.temperature, PROBE_TOKENS)
        drawn = self.generate(self.probes, 1, key=PROBE_KEY, sampling=sampling)
        number = getattr(self.engine, "pushes", self.loads)
        return drawn, f"push {number} to {getattr(self.engine, 'name', 'the engine on rank 0')}"
