"""Weights on their way to another engine: under the names of a checkpoint, and checked once they are there.

Updating a running engine fails silently (a kernel keeps its old packed copy, a cache its old keys), and wrong weights
give plausible text. So every push is followed by a hard check: a counter and checksums read back from the engine, and
log-probs and routes of a few completions against the policy's own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_rl.errors import RunError
from moe_rl.metrics.volatility import route_change
from moe_rl.rollouts.collate import collate
from moe_rl.types import Batch, Prompt, Rollout, Scored

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
            f"the engine has taken over {got.pushes} pushes of weights, but {pushes} were sent: it was restarted or "
            "missed one, and would sample from other weights than the policy's."
        )
    if not got.checksums:
        raise RunError("the engine holds no weight that can be read back, so a push to it cannot be checked.")
    for name, (dtype, value) in got.checksums.items():
        if checksum(sent[name].to(getattr(torch, dtype))) != value:
            raise RunError(f"after push {pushes} the engine holds other values of {name!r} than were sent.")


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
        change = route_change(scored.routes.ids(), batch.rollout_routes.ids(), batch.attention_mask)
        changed = float(change.any_change_rate.sum() / change.n.sum().clamp(min=1))
    return Parity(len(gap), gap.mean().item(), gap.max().item(), changed)


def require_parity(found: Parity, tolerance: Tolerance, what: str) -> None:
    """Raise RunError when engine and policy are further apart than their numerics explain. NaN is further."""
    if not (found.logprob_mean <= tolerance.logprob_mean and found.any_change_rate <= tolerance.any_change_rate):
        raise RunError(
            f"{what}: the engine does not serve the policy's weights, or not at its temperature. Over {found.tokens} "
            f"tokens |Δ log-prob| is {found.logprob_mean:.2g} on average (at most {tolerance.logprob_mean:g} expected) "
            f"and {found.any_change_rate:.1%} of the expert sets differ (at most {tolerance.any_change_rate:.1%}). "
            f"Its samples "
            "would be off-policy without anyone noticing."
        )


def probe_prompts(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> list[Prompt]:
    """A few prompts of random tokens, the same ones each time, no special token among them."""
    special = torch.tensor(sorted(tokenizer.all_special_ids))
    usable = torch.arange(min(vocabulary, len(tokenizer)))
    usable = usable[~torch.isin(usable, special)]
    drawn = torch.randint(len(usable), (PROBES, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    return [Prompt("", tokens=tuple(row)) for row in usable[drawn].tolist()]
