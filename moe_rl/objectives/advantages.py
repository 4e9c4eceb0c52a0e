"""Rewards of a step's rollouts → advantages, step after step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, PositiveInt
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, RunError
from moe_rl.objectives.losses import Mask, PerToken
from moe_rl.objectives.spelling import suggest_field
from moe_rl.objectives.terms import ESTIMATORS
from moe_rl.registry import Component, NotNegative, Positive, Share, lookup, needs, needs_of, on_a_test_token
from moe_rl.tasks.base import EQUAL
from moe_rl.types import Batch, ScoredRollouts

Values = Float[Tensor, "batch ..."]
"""One number per row, [batch], or per token, [batch, time]."""
Compared = Literal["group", "batch", "running", "none"]
ESTIMATES, MEMORY = ("returns", "gae"), "advantage.pt"
"""Steps from rewards to advantages per token; the file of the steps' memory."""


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The rewards of a step's rollouts, and the values that earlier advantage steps made of them."""

    values: Values
    """At first the rewards, float32; then the output of the step before."""
    rewards: Float[Tensor, " batch"]
    prompt: Int[Tensor, " batch"]
    """Which prompt of the step a row answers; rows of equal number form a group."""
    mask: Mask
    """Response tokens."""
    finished: Bool[Tensor, " batch"]
    """False where the response was cut off."""
    turn: Int[Tensor, "batch time"]
    """The number of a response token's turn, from 1; 0 outside the response."""
    turn_rewards: PerToken
    """The reward of each turn at its last token, 0 elsewhere; a row adds up to its reward."""
    old_logprobs: PerToken | None = None
    """log π_old; for steps that are marked `needs("reference")`."""
    ref_logprobs: PerToken | None = None
    """log π_ref; likewise."""
    state_values: PerToken | None = None
    """V_old before every token; for steps that are marked `needs("values")`."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Numbers, text and tensors that this step keeps from batch to batch; saved and resumed with the run."""


@dataclass(frozen=True)
class Advantage:
    """Computes the advantages of a batch from its rewards. Made by `advantage_of`."""

    steps: tuple[tuple[str, Callable[[AdvantageInputs], Values]], ...]
    memory: dict[str, Any] = field(default_factory=dict)
    per_token: bool = False
    """Whether tokens of one response may have advantages of their own, which some losses cannot take."""

    @property
    def needs(self) -> frozenset[str]:
        """`reference` and `values` (of a critic), where a step reads them."""
        return frozenset().union(*(needs_of(step) for _, step in self.steps))

    def attach_advantages(self, scored: ScoredRollouts) -> Batch:
        """The batch with its advantages and, where a step asks for the critic's values, returns: what that step gave +
        V_old, before it is whitened or clipped."""
        advantages, returns = self.compute(
            rewards=scored.rewards,
            prompt=scored.prompt_index,
            mask=scored.response_mask,
            finished=scored.finished,
            turn=scored.turn,
            turn_rewards=scored.turn_rewards,
            old_logprobs=scored.old_logprobs,
            ref_logprobs=scored.ref_logprobs,
            state_values=scored.values,
        )
        dtype = scored.rollout_logprobs.dtype
        return Batch(**vars(scored) | {"advantages": advantages.to(dtype), "returns": returns})

    def compute(
        self,
        *,
        rewards: Float[Tensor, " batch"],
        mask: Mask,
        turn: Int[Tensor, "batch time"] | None = None,
        turn_rewards: PerToken | None = None,
        **inputs: Any,
    ) -> tuple[PerToken, PerToken | None]:
        """Advantages per token, 0 outside the response, and returns where a step asks for values. `inputs` are the
        other fields of `AdvantageInputs`; without turns a row is one. Raises RunError for a reward that is not finite,
        and ConfigError for a step that gives another shape."""
        if not bool(torch.isfinite(rewards).all()):
            row = int((~torch.isfinite(rewards)).nonzero()[0])
            raise RunError(f"the reward of row {row} is {rewards[row].item()}. Use numbers in [0, 1].")
        if (turn is None) != (turn_rewards is None):
            raise ConfigError("give turn and turn_rewards both, or neither if each row is one turn")
        if turn is None or turn_rewards is None:
            turn, turn_rewards = mask.long(), place_on_last(rewards, mask)
        x = AdvantageInputs(values=rewards, rewards=rewards, mask=mask, turn=turn, turn_rewards=turn_rewards, **inputs)
        returns = None
        for number, (name, step) in enumerate(self.steps):
            x = replace(x, memory=self.memory.setdefault(str(number), {}))
            values: object = step(x)
            if not isinstance(values, Tensor) or values.shape not in (x.rewards.shape, x.mask.shape):
                form = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
                raise ConfigError(
                    f"the advantage {name} has {form} for {len(mask)} rewards. Return (batch,), or (batch, time)."
                )
            x = replace(x, values=values)
            if not bool((finite := _per_token(x.values).isfinite() | ~mask).all()):
                row = int((~finite).any(1).nonzero()[0])
                raise RunError(f"the advantage {name} is not finite in row {row} of {len(mask)}")
            if "values" in needs_of(step) and x.state_values is not None:
                returns = torch.where(x.mask, _per_token(x.values) + x.state_values, 0)
        return torch.where(x.mask, _per_token(x.values), 0), returns

    def save(self, folder: Path) -> None:
        """Write the memory, if a step keeps something, and read it again: an unsafe object in it is an error now, not
        when the run is resumed."""
        if any(self.memory.values()):
            torch.save(self.memory, folder / MEMORY)
            torch.load(folder / MEMORY, weights_only=True)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self.memory.clear()
        if (folder / MEMORY).exists():
            self.memory.update(torch.load(folder / MEMORY, weights_only=True))


def advantage_of(arm: Arm) -> Advantage:
    """The advantages of an arm, tried on two responses of two turns. Raises ConfigError for an unknown name or
    option."""
    steps = [Component.of(part) for part in arm.advantage]
    for step, after in zip(steps, [*steps, Component("")][1:], strict=True):
        rewards = step.name == "turn_rewards" or step.name == "kl_penalty" and step.options.get("per_token", True)
        if rewards != (after.name in ESTIMATES) and (rewards or step.name in ("whitened", "by_turn", *ESTIMATES)):
            raise ConfigError(
                f"arm {arm.name!r}: {step} cannot come before {after if after.name else 'the end'}. Put kl_penalty or "
                "turn_rewards directly before returns or gae, and nowhere else."
            )
    advantage = Advantage(tuple((str(step), lookup("advantage", step, ADVANTAGES, suggest_field)) for step in steps))
    turn = torch.tensor([[1, 2], [1, 2]])
    earned, scores = torch.tensor([[1.0, 0.0], [0.0, 0.25]]), torch.tensor([[0.0, -0.1], [-0.3, 0.0]])
    with on_a_test_token(f"the advantage of arm {arm.name!r}"):
        computed, _ = advantage.compute(
            rewards=earned.sum(1),
            prompt=turn[:, 0] - 1,
            mask=turn > 0,
            finished=turn[:, 0] > 0,
            turn=turn,
            turn_rewards=earned,
            old_logprobs=torch.zeros(2, 2),
            ref_logprobs=scores,
            state_values=scores,
        )
        first, second = computed.unbind(1)
    advantage.memory.clear()
    return replace(advantage, per_token=not torch.equal(first, second))


# ---------------------------------------------------------------------- one value per row
def group(x: AdvantageInputs) -> Values:
    """(r_i - mean) / std over the rows of equal `prompt`: `normalized` with its defaults.

    GSPO, arXiv 2507.18071, eq. 7. The paper leaves the deviation open; this is the sample one (n - 1), as in verl and
    TRL (the population one makes advantages larger by sqrt(n/(n-1)), 7 % for groups of 8). No epsilon is added, as in
    eq. 7: the advantage is exactly 0 in a group of one and where rewards differ by at most `EQUAL`. verl adds 1e-6 and
    TRL 1e-4. The value of a row does not depend on the order of rows, to the last bit.
    """
    return normalized(x)


def normalized(
    x: AdvantageInputs, *, center: Compared = "group", scale: Compared = "group", eps: NotNegative = 0.0
) -> Values:
    """(r − center) / (scale + eps): mean and sample deviation of the group, the batch, "running", or "none".

    "running": all batches so far, this one included (Welford). ROLL's `norm_mean_type` × `norm_std_type`.
    scale="none" is the advantage of Dr. GRPO (arXiv 2503.20783), scale="batch" TRL's `scale_rewards="batch"`. Values
    that differ by at most `EQUAL` get 0, and so do all where scale + eps is 0.
    """
    values = _per_row(x, "normalized")
    sets = {
        "group": lambda: _moments(values, x.prompt),
        "batch": lambda: _moments(values, torch.zeros_like(x.prompt)),
        "running": lambda: _running(values, x.memory),
        "none": lambda: (torch.zeros_like(values), torch.ones_like(values)),
    }
    moments = {name: sets[name]() for name in {center, scale}}  # each once: a running one counts
    mean, divisor = moments[center][0], moments[scale][1] + (0 if scale == "none" else eps)
    return torch.where(divisor > 0, (values - mean) / divisor, 0).to(x.values.dtype)


def leave_one_out(x: AdvantageInputs) -> Values:
    """n/(n−1)·(r − mean) = r − mean of the others of the group (RLOO). 0 in a group of one."""
    values = _per_row(x, "leave_one_out")
    n = (x.prompt[:, None] == x.prompt).sum(1)
    return ((values - _moments(values, x.prompt)[0]) * n / (n - 1).clamp(min=1)).to(x.values.dtype)


def opo(x: AdvantageInputs) -> Values:
    """r − Σ |y|·r / Σ |y| over the group (OPO, arXiv 2505.23585). Equal lengths: Dr. GRPO's."""
    values, lengths = _per_row(x, "opo"), x.mask.sum(1).double()
    same = (x.prompt[:, None] == x.prompt).double()
    return (values - same @ (lengths * values) / (same @ lengths).clamp(min=1)).to(x.values.dtype)


def overlong(x: AdvantageInputs, *, limit: int, buffer: PositiveInt) -> Values:
    """r + min(0, max(−1, (limit − buffer − |y|) / buffer)) (DAPO, arXiv 2503.14476, eq. 13).

    In tokens; DAPO: 20480 and 4096. 0 up to limit − buffer, −1 from `limit` on. Before `group`.
    """
    if buffer > limit:
        raise ConfigError(f"overlong(limit={limit}, buffer={buffer}): the buffer is above the limit")
    return (_per_row(x, "overlong") + ((limit - buffer - x.mask.sum(1)) / buffer).clamp(-1, 0)).to(x.values.dtype)


# ---------------------------------------------------------------------- per row or per token
def clipped(x: AdvantageInputs, *, at: Positive) -> Values:
    """min(max(v, −at), at), of rewards or advantages (ROLL's `reward_clip` 10, `advantage_clip` 2)."""
    return x.values.clamp(-at, at)


def difficulty_mask(x: AdvantageInputs, *, low: float = 0.1, high: float = 0.95) -> Values:
    """0 for prompts unless low < mean reward < high (ROLL); such rows stay in |y| and N."""
    if not low < high:
        raise ConfigError(f"difficulty_mask(low={low:g}, high={high:g}) needs low < high")
    means = _moments(x.rewards.double(), x.prompt)[0]
    return torch.where(((low < means) & (means < high)).view(-1, *[1] * (x.values.dim() - 1)), x.values, 0)


# ---------------------------------------------------------------------- per token
def by_turn(
    x: AdvantageInputs,
    *,
    gamma: Share = 1.0,
    among: Literal["turn", "group"] = "turn",
    scale: Literal["group", "none"] = "group",
) -> Values:
    """(G_j − mean) / std at all tokens of turn j, G_j = r_j + γ·G_{j+1}.

    Compared with the same turn of the others of its group (`among="turn"`) or with all turns of its group ("group"); a
    turn that no other reached gets 0. γ = 1: the return to go; γ = 0: each turn alone. One turn: `group`. MT-GRPO
    (arXiv 2505.11821) has two turns and divides their rewards by deviations of their own. GSPO needs `gspo_token`.
    """
    require_raw_rewards(x, "by_turn")
    turns = int(x.turn.max())
    earned = torch.zeros(len(x.turn), turns + 1, dtype=torch.float64).scatter_add(1, x.turn, x.turn_rewards.double())
    for j in reversed(range(1, turns)):
        earned[:, j] += gamma * earned[:, j + 1]
    rows, numbers = (earned.new_zeros(earned.shape).scatter_add(1, x.turn, x.mask.double()) > 0).nonzero(as_tuple=True)
    labels = x.prompt[rows] * (turns + 1) + (numbers if among == "turn" else 0)
    mean, std = _moments(earned[rows, numbers], labels)
    centred, divisor = earned[rows, numbers] - mean, std if scale == "group" else torch.ones_like(std)
    by_turn = torch.zeros_like(earned)
    by_turn[rows, numbers] = torch.where(divisor > 0, centred / divisor, 0)
    return torch.where(x.mask, by_turn.gather(1, x.turn), 0).to(x.values.dtype)


def whitened(x: AdvantageInputs, *, eps: NotNegative = 1e-8) -> Values:
    """(v − mean) / sqrt(var + eps) over all response tokens. var with n − 1, as verl and ROLL's `whiten_advantages`."""
    values = _per_token(x.values).expand(x.mask.shape).double()
    tokens = values[x.mask]
    if not len(tokens) or tokens.min() == tokens.max():  # where eps is 0, or their mean is rounded, they are 0 as well
        return torch.zeros_like(values).to(x.values.dtype)
    return torch.where(x.mask, (values - tokens.mean()) / (tokens.var() + eps).sqrt(), 0).to(x.values.dtype)


@needs("reference")
def kl_penalty(
    x: AdvantageInputs, *, coef: float, estimator: Literal["k1", "k2", "k3", "abs"] = "k1", per_token: bool = True
) -> Values:
    """r_t = 1[t last]·r − coef · k_t(π_old ‖ π_ref) per token; or r − coef · Σ_t k_t per row.

    For `returns`: KL in the reward (PPO; REINFORCE++, arXiv 2501.03262), without gradient; k is one of
    `terms.ESTIMATORS`, in nats.
    """
    if x.old_logprobs is None or x.ref_logprobs is None:
        raise ConfigError("kl_penalty compares with the reference policy, so it needs old_logprobs and ref_logprobs")
    rewards, k = _per_row(x, "kl_penalty"), ESTIMATORS[estimator]((x.ref_logprobs - x.old_logprobs).double())
    penalty = coef * torch.where(x.mask, k, 0)
    return (place_on_last(rewards, x.mask) - penalty if per_token else rewards - penalty.sum(1)).to(x.values.dtype)


def turn_rewards(x: AdvantageInputs) -> Values:
    """r_t: the reward of each turn at its last token, for `returns` and `gae`. These otherwise have one reward, at the
    end of the response. The first step."""
    require_raw_rewards(x, "turn_rewards")
    return x.turn_rewards


def returns(x: AdvantageInputs, *, gamma: Share = 1.0) -> Values:
    """G_t = r_t + γ·G_t′, t′ the next response token. A reward per row is its last token's.

    REINFORCE++, arXiv 2501.03262; GAE (arXiv 1506.02438) with λ = 1 and no critic. Holes in the mask are stepped over.
    """
    return _estimate(x, torch.zeros_like(x.mask, dtype=torch.float64), gamma, 1.0)


@needs("values")
def gae(
    x: AdvantageInputs,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    critic_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None,
    value_clip: Positive = math.inf,
) -> Values:
    """A_t = δ_t + γλ·A_t′, δ_t = r_t + γ·V_t′ − V_t, t′ the next response token.

    Generalised advantage estimation, arXiv 1506.02438, eq. 16. V_t is the critic's before token t, and 0 after the last
    one; the critic learns A + V_old. Defaults are verl's; 1707.06347 has γ .99 and λ .95. Holes in the mask are stepped
    over, as in verl, not in ROLL and slime. A reward per row is its last token's. λ = 0: δ; λ = 1: `returns` − V; V =
    0: `returns` with γλ for γ. The last two options are of the run's critic: its learning rate (None: the policy's),
    and the clip of `value_loss`.
    """
    if x.state_values is None:
        raise ConfigError("gae needs the values of a critic, and the batch has none")
    return _estimate(x, x.state_values.double(), gamma, lam)


def _estimate(x: AdvantageInputs, v: PerToken, gamma: float, lam: float) -> PerToken:
    """A_t = r_t + γ·V_t′ − V_t + γλ·A_t′, over response tokens."""
    rewards = (x.values if x.values.dim() == 2 else place_on_last(x.values, x.mask)).double()
    estimate, later, next_v = torch.zeros_like(rewards), *rewards.new_zeros(2, len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = x.mask[:, t]
        later = torch.where(here, rewards[:, t] + gamma * next_v - v[:, t] + gamma * lam * later, later)
        next_v = torch.where(here, v[:, t], next_v)
        estimate[:, t] = torch.where(here, later, 0)
    return estimate.to(x.values.dtype)


# ---------------------------------------------------------------------- shared parts
def _per_token(values: Values) -> PerToken:
    """Values per row as [batch, 1], to be broadcast; values per token as they are."""
    return values[:, None] if values.dim() == 1 else values


def _per_row(x: AdvantageInputs, step: str) -> Float[Tensor, " batch"]:
    """The values, float64, one per row. Raises ConfigError where an earlier step made them per token."""
    if x.values.dim() != 1:
        raise ConfigError(
            f"the advantage {step} takes one value per row. Put whitened, kl_penalty and returns after it."
        )
    return x.values.double()


def _moments(values: Float[Tensor, " batch"], labels: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
    """Mean and sample deviation of the set of each row; its value and 0 where all values are equal."""
    mean, std = values.clone(), torch.zeros_like(values)
    for label in labels.unique():
        rows = labels == label
        ordered = values[rows].sort().values  # floating-point sums depend on the order
        if len(ordered) > 1 and ordered[-1] - ordered[0] > EQUAL:
            mean[rows], std[rows] = ordered.mean(), ordered.std()
    return mean, std


def _running(values: Float[Tensor, " batch"], memory: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and sample deviation of all values so far (Welford; Chan et al. 1979)."""
    count, mean, squares = memory.get("running", (0, 0.0, 0.0))
    ordered = values.sort().values
    total, off = count + len(values), ordered.mean().item() - mean
    mean += off * len(values) / total
    squares += ((ordered - ordered.mean()) ** 2).sum().item() + off**2 * count * len(values) / total
    memory["running"] = [total, mean, squares]
    std = math.sqrt(squares / max(1, total - 1))
    return torch.full_like(values, mean), torch.full_like(values, std if std > EQUAL else 0)


def require_raw_rewards(x: AdvantageInputs, step: str) -> None:
    """Raise ConfigError where an earlier step has changed the rewards."""
    if x.values is not x.rewards:
        raise ConfigError(f"the advantage {step} uses the rewards of turns. Put {step} first.")


def explain_zeros(advantages: PerToken, rewards: Float[Tensor, " batch"], prompt: Int[Tensor, " batch"]) -> str:
    """Why advantages are 0 where nothing is learned, or where rows are alone in their groups; "" elsewhere."""
    _, groups, sizes = prompt.unique(return_inverse=True, return_counts=True)
    alone, silent = sizes[groups] == 1, not advantages.any()
    if alone.any() and (silent or rewards[alone].any() and not advantages[alone].any()):
        return (
            f"{int(alone.sum())} of {len(prompt)} rows are the only response to their prompt, so their group-relative "
            "advantages are 0. Give all responses to a prompt in one call."
        )
    reason = "all rewards of every group are equal, so there is no gradient. If this goes on, change the task."
    if silent and _moments(rewards.double(), groups)[1].any():
        reason = "every advantage is 0, although rewards differ: a step of the arm or an empty mask took all of them."
    return reason if silent else ""


def place_on_last(rewards: Float[Tensor, " batch"], mask: Mask) -> PerToken:
    """Each row's reward at its last response token, 0 elsewhere."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards[:, None], 0)


# ---------------------------------------------------------------------- the critic's loss
def value_loss(
    values: PerToken,
    *,
    old_values: PerToken,
    returns: PerToken,
    weights: PerToken,
    clip: float = math.inf,
) -> Float[Tensor, ""]:
    """½ Σ W · max((V − R)², (clip(V, V_old ± clip) − R)²), to be minimised; only `values` has a gradient.

    PPO's critic in its authors' code; 1707.06347, eq. 9, has the square alone. clip is 0.5 in verl, 0.2 in slime. W is
    the arm's aggregation over the whole mini-batch. The gradient W·(V − R) is 0 where V is beyond the range and the
    clipped error is the larger one. clip = ∞: half the squared error.
    """
    near = values.clamp(old_values - clip, old_values + clip)
    error, clipped = (values - returns) ** 2, (near - returns) ** 2
    worst = torch.where(clipped > error, clipped, error)  # at a tie the gradient is kept
    return (weights * torch.where(weights != 0, worst, 0)).sum() / 2


ADVANTAGES: dict[str, Callable[..., Values]] = {
    "group": group,
    "normalized": normalized,
    "leave_one_out": leave_one_out,
    "opo": opo,
    "overlong": overlong,
    "clipped": clipped,
    "difficulty_mask": difficulty_mask,
    "whitened": whitened,
    "kl_penalty": kl_penalty,
    "returns": returns,
    "gae": gae,
    "by_turn": by_turn,
    "turn_rewards": turn_rewards,
}
"""Steps from rewards to advantages."""
