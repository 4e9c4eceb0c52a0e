"""Weights pushed to an engine that keeps its own, under the names of a checkpoint, and checked once they are there.

Updating a running engine fails silently (a kernel keeps its old packed copy, a cache its old keys), and wrong weights
give plausible text. So every push is followed by a hard check: a counter and checksums read back from the engine, and
log-probs and routes of a few completions against the policy's own. No engine checks itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moe_rl import ranks
from moe_rl.config import RunConfig
from moe_rl.errors import RunError
from moe_rl.metrics.volatility import route_change
from moe_rl.models.load import LoadedModel
from moe_rl.models.shards import checkpoint_weights
from moe_rl.registry import Component
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.engine import RolloutEngine, Sampler
from moe_rl.routing.sites import router_parameters
from moe_rl.types import Batch, Prompt, Reply, Rollout, Sampling, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Score = Callable[[Batch], Scored]
"""`Policy.score`: natural log-probs and routes of a batch."""
PROBES, PROBE_TOKENS = 8, 12
"""Random prompts, and the length of both prompt and completion, that a push is checked with."""
PROBE_KEY = (0,)
"""Noise of the check: the same after every push, since a resumed run counts its pushes anew."""


# ---------------------------------------------------------------------- checksums
def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class Receipt:
    """What an engine says it holds after a push."""

    pushes: int
    """Pushes it has taken over since it started."""
    checksums: Mapping[str, tuple[str, int]]
    """dtype and checksum of the weights it keeps as they are; what it fuses or packs for its kernels has none."""


def receipt(held: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], pushes: int) -> Receipt:
    """Made by the engine, of its own parameters. `shapes` are those sent; rows that pad a vocabulary do not count."""
    found = {}
    for name, tensor in held:
        shape = shapes.get(name)
        if shape and tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:] and len(tensor) >= shape[0]:
            found[name] = (str(tensor.dtype).removeprefix("torch."), checksum(tensor[: shape[0]]))
    return Receipt(pushes, found)


def require_receipt(got: Receipt, sent: Mapping[str, Tensor], pushes: int) -> None:
    """Raise RunError unless the engine counts the same pushes and holds, bit for bit, what was sent."""
    if got.pushes != pushes:
        raise RunError(
            f"the engine has taken over {got.pushes} pushes of weights, but {pushes} were sent. It was restarted or "
            "missed one; load the weights again."
        )
    if not got.checksums:
        raise RunError("the engine has no weight that can be read back, so a push to it cannot be checked")
    for name, (dtype, value) in got.checksums.items():
        if checksum(sent[name].to(getattr(torch, dtype))) != value:
            raise RunError(f"after push {pushes} the engine has other values of {name!r} than were sent")


# ---------------------------------------------------------------------- parity
@dataclass(frozen=True)
class Parity:
    """How far an engine's completions are from the policy's own scoring of them, at weights that should be equal."""

    tokens: int
    logprob_mean: float
    """Mean |log p(engine) - log p(policy)| over the completions' tokens, in nats."""
    logprob_max: float
    any_change_rate: float
    """Share of known (token, site) rows, prompts included, where engine and policy chose other sets of experts."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ. Measured with vLLM on tiny models of random weights: equal weights in float32 differ by 5e-7 and
    in no set, in bfloat16 by 7e-3 to 0.04 and in 2 to 4 % of the sets; corrupted ones by 0.2 to 0.7 and in half of the
    sets. In bfloat16 the checksums alone tell the weights of two consecutive updates apart."""

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
        changed = float(change.any_change_rate.sum() / change.n.sum().clamp(min=1))
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
    """An engine elsewhere: it samples as a `RolloutEngine` does, but is sent weights as a checkpoint has them."""

    @property
    def name(self) -> str:
        """For errors: where weights are pushed to."""

    model: PreTrainedModel
    """The model it serves, without weights: names and shapes."""
    dtype: str | None
    """In which it computes, if that is known: wider matrices are sent in it."""
    pushes: int
    """The number that the last push must have in its receipts."""

    def hold(self, weights: Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
        """Put weights, named and cut as in a checkpoint, where the engine can take them from: memory, or files."""

    def push(self, weights: Mapping[str, Tensor]) -> Sequence[Receipt]:
        """Take over what it holds. What each of its workers then has; empty where they do not say, so that the
        comparison of completions alone must do."""


def narrowed(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Weights of `model` with its matrices in `dtype`, where they are wider, so that fewer bytes travel. Routers and
    vectors stay as they are: engines keep some of them in float32."""
    routers = {id(parameter) for parameter in router_parameters(model)}
    kept = {name for name, parameter in model.named_parameters() if id(parameter) in routers}
    to = getattr(torch, dtype) if dtype else None
    for name, tensor in weights:
        wider = to is not None and tensor.is_floating_point() and tensor.dtype.itemsize > to.itemsize
        yield name, tensor.to(to) if wider and tensor.dim() > 1 and name not in kept else tensor


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
            sent = engine.hold(checkpoint_weights(engine.model, narrowed(engine.model, weights, engine.dtype)))
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
