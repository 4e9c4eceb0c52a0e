"""Rewards of a step's rollouts → advantages, step after step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.config import Arm
from moe_rl.errors import ConfigError, MoeRlError, RunError
from moe_rl.objectives.losses import Mask, PerToken
from moe_rl.objectives.spelling import suggest_field
from moe_rl.objectives.terms import ESTIMATORS
from moe_rl.registry import Component, lookup, needs, needs_of, unknown
from moe_rl.tasks.base import EQUAL
from moe_rl.types import Batch

Values = Float[Tensor, "batch ..."]
"""One number per row, [batch], or per token, [batch, time]."""
ESTIMATES, MEMORY = ("returns", "gae"), "advantage.pt"
"""Steps from rewards to advantages per token; the file of what steps remember."""


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What the rollouts of a step earned, and what the steps before this one have made of it."""

    values: Values
    """At first the rewards, float32; then what the last step gave."""
    rewards: Float[Tensor, " batch"]
    prompt: Int[Tensor, " batch"]
    """Which prompt of the step a row answers; rows of equal number form a group."""
    mask: Mask
    """Response tokens."""
    finished: Bool[Tensor, " batch"]
    """False where the response was cut off."""
    turn: Int[Tensor, "batch time"]
    """The number of a response token's turn, from 1; 0 outside the response. Where a task has one turn, that is 1."""
    turn_rewards: PerToken
    """What each turn earned, at its last token, 0 elsewhere; a row adds up to that of `rewards`."""
    old_logprobs: PerToken | None = None
    """log π_old; for steps that are marked `needs("reference")`."""
    ref_logprobs: PerToken | None = None
    """log π_ref; likewise."""
    state_values: PerToken | None = None
    """V_old before every token; for steps that are marked `needs("values")`."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What this step keeps from one batch to the next, as JSON has it; it is saved and resumed with the run."""


@dataclass(frozen=True)
class Advantage:
    """What makes advantages of the rewards of a batch. Made by `advantage_of`."""

    steps: tuple[tuple[str, Callable[[AdvantageInputs], Values]], ...]
    memory: dict[str, Any] = field(default_factory=dict)
    per_token: bool = False
    """Whether tokens of one response may have advantages of their own, which some losses cannot take."""

    @property
    def needs(self) -> frozenset[str]:
        """`reference`, where a step compares with it, and `values`, where it asks the critic: then the batch must have
        been scored."""
        return frozenset().union(*(needs_of(step) for _, step in self.steps))

    def __call__(self, batch: Batch) -> PerToken:
        """Per token, 0 outside the response. Raises RunError for a reward that is not finite, and ConfigError for a
        step that gives another shape."""
        return self.attach_advantages(batch).advantages

    def attach_advantages(self, batch: Batch) -> Batch:
        """The batch with its advantages and, where a step asks for the critic's values, returns: what that step gave +
        V_old, before it is whitened or clipped."""
        advantages, returns = self.compute(
            rewards=batch.rewards, prompt=batch.prompt_index, mask=batch.response_mask, finished=batch.finished,
            turn=batch.turn, turn_rewards=batch.turn_rewards, old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs, state_values=batch.values)
        return replace(batch, advantages=advantages.to(batch.advantages.dtype), returns=returns)

    def compute(self, *, rewards: Float[Tensor, " batch"], mask: Mask, turn: Int[Tensor, "batch time"] | None = None,
                turn_rewards: PerToken | None = None, **inputs: Any) -> tuple[PerToken, PerToken | None]:
        """Advantages per token, 0 outside the response, and returns where a step asks for values. `inputs` are the
        other fields of `AdvantageInputs`; without turns a row is one."""
        if not bool(torch.isfinite(rewards).all()):
            row = int((~torch.isfinite(rewards)).nonzero()[0])
            raise RunError(
                f"the reward of row {row} is {rewards[row].item()}. Rewards must be numbers in [0, 1]: one NaN spoils "
                "the whole group."
            )
        if (turn is None) != (turn_rewards is None):
            raise ConfigError("turn and turn_rewards are needed together. Give both, or neither if each row is one "
                              "turn.")
        if turn is None or turn_rewards is None:
            turn, turn_rewards = mask.long(), place_on_last(rewards, mask)
        x = AdvantageInputs(values=rewards, rewards=rewards, mask=mask, turn=turn, turn_rewards=turn_rewards, **inputs)
        returns = None
        for number, (name, step) in enumerate(self.steps):
            x = replace(x, memory=self.memory.setdefault(str(number), {}))
            x = replace(x, values=step(x))
            if x.values.shape not in (x.rewards.shape, x.mask.shape):
                raise ConfigError(f"the advantage {name} has shape {tuple(x.values.shape)} for {len(mask)} rewards. "
                                  "Return shape (batch,), or (batch, time) for one value per token.")
            if "values" in needs_of(step) and x.state_values is not None:
                returns = torch.where(x.mask, _per_token(x.values) + x.state_values, 0)
        return torch.where(x.mask, _per_token(x.values), 0), returns

    def save(self, folder: Path) -> None:
        """Write the memory, if a step keeps something. Raises ConfigError for what could not be read again."""
        if any(self.memory.values()):
            try:
                torch.save(self.memory, folder / MEMORY)
                torch.load(folder / MEMORY, weights_only=True)
            except Exception as error:  # of pickle or torch, by what it is
                names = " and ".join(self.steps[int(n)][0] for n, memory in self.memory.items() if memory)
                raise ConfigError(f"x.memory of the advantage {names} cannot be saved "
                                  f"({str(error).partition(chr(10))[0]}). Store only numbers, text and tensors in it, "
                                  "or lists, tuples and dictionaries of these.") from error

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises RunError for a checkpoint of an earlier version."""
        if (folder / "advantage.json").exists():
            raise RunError(f"{folder / 'advantage.json'} was written by release 0.1.0 or earlier. Resume the run with "
                           "that release, or start it again.")
        self.memory.clear()
        if (folder / MEMORY).exists():
            self.memory.update(torch.load(folder / MEMORY, weights_only=True))


def advantage_of(arm: Arm) -> Advantage:
    """What makes advantages of an arm's rewards, tried on two responses of two turns. Raises ConfigError for a name or
    option that is not there."""
    assert isinstance(arm.advantage, tuple), "an arm makes one of a part alone"
    steps = [Component.of(part) for part in arm.advantage]
    for one, after in zip(steps, [*steps, Component("")][1:], strict=True):
        rewards = one.name == "turn_rewards" or one.name == "kl_penalty" and one.options.get("per_token", True)
        if rewards != (after.name in ESTIMATES) and (rewards or one.name in ("whitened", "by_turn", *ESTIMATES)):
            raise ConfigError(f"arm {arm.name!r}: {one} cannot come before {after if after.name else 'the end'}. Put "
                              "kl_penalty or turn_rewards directly before returns or gae, and nowhere else.")
    found = Advantage(tuple((str(step), lookup("advantage", step, ADVANTAGES, suggest_field)) for step in steps))
    turn = torch.tensor([[1, 2], [1, 2]])
    earned, said = torch.tensor([[1.0, 0.0], [0.0, 0.25]]), torch.tensor([[0.0, -0.1], [-0.3, 0.0]])
    mask, zeros = turn > 0, torch.zeros(2, 2)
    two = Batch(tokens=turn, attention_mask=mask, response_mask=mask, prompt_index=turn[:, 0] - 1, advantages=zeros,
                rollout_logprobs=zeros, rewards=earned.sum(1), finished=mask[:, 0], turn=turn, turn_rewards=earned,
                old_logprobs=zeros, ref_logprobs=said, values=said)
    try:
        first, second = found(two).unbind(1)
        with TemporaryDirectory() as folder:
            found.save(Path(folder))
    except MoeRlError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"arm {arm.name!r}: its advantage failed on two test responses ({error}). Check the types of "
                          "its options.") from error
    found.memory.clear()
    return replace(found, per_token=not torch.equal(first, second))


# ---------------------------------------------------------------------- one value per row
def group(x: AdvantageInputs) -> Values:
    """(r_i - mean) / std over the rows of equal `prompt`: `normalized` with its defaults.

    GSPO, arXiv 2507.18071, eq. 7. The paper does not say which deviation its std is; this is the sample one (n - 1), as
    in verl and TRL, so that advantages compare with theirs (the population one would be larger by sqrt(n/(n-1)),
    7 % for groups of 8). No epsilon is added, as in eq. 7: none is needed, since the advantage is exactly 0 in a group
    of one and in a group whose rewards differ by at most `EQUAL`. verl adds 1e-6 and TRL 1e-4, which also shrinks the
    advantages of groups with nearly equal rewards.

    The value of a row does not depend on the order of rows, to the last bit.
    """
    return normalized(x)


def normalized(x: AdvantageInputs, *, center: str = "group", scale: str = "group", eps: float = 0.0) -> Values:
    """(r − center) / (scale + eps): mean and sample deviation of the group, the batch, "running", or "none".

    "running": all batches so far, this one included (Welford). ROLL's `norm_mean_type` × `norm_std_type`.
    scale="none" is the advantage of Dr. GRPO (arXiv 2503.20783), scale="batch" TRL's `scale_rewards="batch"`. Of values
    that differ by at most `EQUAL` the deviation is 0 and each is its own mean; 0 where scale + eps is.
    """
    values = _per_row(x, "normalized")
    sets = {"group": lambda: _moments(values, x.prompt), "batch": lambda: _moments(values, torch.zeros_like(x.prompt)),
            "running": lambda: _running(values, x.memory),
            "none": lambda: (torch.zeros_like(values), torch.ones_like(values))}
    if not eps >= 0:
        raise ConfigError(f"normalized(eps={eps:g}): eps is added to a standard deviation, so it must not be negative")
    if wrong := {center, scale} - set(sets):
        unknown("set that normalized compares with", min(wrong), sets)
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


def overlong(x: AdvantageInputs, *, limit: int, buffer: int) -> Values:
    """r + min(0, max(−1, (limit − buffer − |y|) / buffer)) (DAPO, arXiv 2503.14476, eq. 13).

    In tokens; DAPO: 20480 and 4096. 0 up to limit − buffer, −1 from `limit` on. Before `group`.
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"overlong(limit={limit}, buffer={buffer}): buffer is a number of tokens, with 0 < buffer <= "
                          "limit")
    return (_per_row(x, "overlong") + ((limit - buffer - x.mask.sum(1)) / buffer).clamp(-1, 0)).to(x.values.dtype)


# ---------------------------------------------------------------------- per row or per token, as it comes
def clipped(x: AdvantageInputs, *, at: float) -> Values:
    """min(max(v, −at), at), of rewards or advantages (ROLL's `reward_clip` 10, `advantage_clip` 2)."""
    if not at > 0:
        raise ConfigError(f"clipped(at={at:g}): values are clipped to [-at, at], so at must be positive")
    return x.values.clamp(-at, at)


def difficulty_mask(x: AdvantageInputs, *, low: float = 0.1, high: float = 0.95) -> Values:
    """0 for prompts unless low < mean reward < high (ROLL); such rows stay in |y| and N."""
    means = _moments(x.rewards.double(), x.prompt)[0]
    return torch.where(((low < means) & (means < high)).view(-1, *[1] * (x.values.dim() - 1)), x.values, 0)


# ---------------------------------------------------------------------- per token
def by_turn(x: AdvantageInputs, *, gamma: float = 1.0, among: str = "turn", scale: str = "group") -> Values:
    """(G_j − mean) / std at all tokens of turn j, G_j = r_j + γ·G_{j+1}.

    Compared with the same turn of the others of its group (`among="turn"`) or with all turns of its group ("group"); a
    turn that no other reached is its own mean, so 0. γ = 1: the return to go; γ = 0: each turn for itself.
    scale="none": not divided. One turn: `group`. MT-GRPO (arXiv 2505.11821) has two turns and divides the reward of the
    first and that of the outcome by deviations of their own before it adds them. GSPO needs `gspo_token` for it.
    """
    require_raw_rewards(x, "by_turn")
    if not 0 <= gamma <= 1:
        raise ConfigError(f"by_turn(gamma={gamma:g}): the discount per turn must be from 0 to 1")
    for name, value, choices in (("among", among, ("turn", "group")), ("scale", scale, ("group", "none"))):
        if value not in choices:
            unknown(f"{name} of by_turn", value, choices)
    turns = int(x.turn.max())
    earned = torch.zeros(len(x.turn), turns + 1, dtype=torch.float64).scatter_add(1, x.turn, x.turn_rewards.double())
    for j in reversed(range(1, turns)):
        earned[:, j] += gamma * earned[:, j + 1]
    rows, numbers = (earned.new_zeros(earned.shape).scatter_add(1, x.turn, x.mask.double()) > 0).nonzero(as_tuple=True)
    labels = x.prompt[rows] * (turns + 1) + (numbers if among == "turn" else 0)
    mean, std = _moments(earned[rows, numbers], labels)
    centred, divisor = earned[rows, numbers] - mean, std if scale == "group" else torch.ones_like(std)
    found = torch.zeros_like(earned)
    found[rows, numbers] = torch.where(divisor > 0, centred / divisor, 0)
    return torch.where(x.mask, found.gather(1, x.turn), 0).to(x.values.dtype)


def whitened(x: AdvantageInputs, *, eps: float = 1e-8) -> Values:
    """(v − mean) / sqrt(var + eps) over all response tokens. var with n − 1, as verl and ROLL's `whiten_advantages`."""
    if not eps >= 0:
        raise ConfigError(f"whitened(eps={eps:g}): eps is added to a variance, so it must not be negative")
    values = _per_token(x.values).expand(x.mask.shape).double()
    tokens = values[x.mask]
    if not len(tokens) or tokens.min() == tokens.max():  # where eps is 0, or their mean is rounded, they are 0 as well
        return torch.zeros_like(values).to(x.values.dtype)
    return torch.where(x.mask, (values - tokens.mean()) / (tokens.var() + eps).sqrt(), 0).to(x.values.dtype)


@needs("reference")
def kl_penalty(x: AdvantageInputs, *, coef: float, estimator: str = "k1", per_token: bool = True) -> Values:
    """r_t = 1[t last]·r − coef · k_t(π_old ‖ π_ref) per token; or r − coef · Σ_t k_t per row.

    For `returns`: KL in the reward (PPO; REINFORCE++, arXiv 2501.03262), without gradient; k is one of
    `terms.ESTIMATORS`, in nats.
    """
    if estimator not in ESTIMATORS:
        unknown("estimator of a KL", estimator, ESTIMATORS)
    if x.old_logprobs is None or x.ref_logprobs is None:
        raise ConfigError("kl_penalty compares with the reference policy, so it needs old_logprobs and ref_logprobs")
    rewards, k = _per_row(x, "kl_penalty"), ESTIMATORS[estimator]((x.ref_logprobs - x.old_logprobs).double())
    penalty = coef * torch.where(x.mask, k, 0)
    return (place_on_last(rewards, x.mask) - penalty if per_token else rewards - penalty.sum(1)).to(x.values.dtype)


def turn_rewards(x: AdvantageInputs) -> Values:
    """r_t: the reward of each turn at its last token, for `returns` and `gae`. These else have one reward, at the end
    of the response. One turn: the same as without. The first step, since it is of the rewards as they were given."""
    require_raw_rewards(x, "turn_rewards")
    return x.turn_rewards


def returns(x: AdvantageInputs, *, gamma: float = 1.0) -> Values:
    """G_t = r_t + γ·G_t′, t′ the next response token. A reward per row is its last token's.

    REINFORCE++, arXiv 2501.03262; GAE (arXiv 1506.02438) with λ = 1 and no critic. Holes in the mask are stepped over.
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"returns(gamma={gamma:g}): the discount must be from 0 to 1")
    return _estimate(x, torch.zeros_like(x.mask, dtype=torch.float64), gamma, 1.0)


@needs("values")
def gae(
    x: AdvantageInputs,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    critic_lr: float | None = None,
    value_clip: float = math.inf,
) -> Values:
    """A_t = δ_t + γλ·A_t′, δ_t = r_t + γ·V_t′ − V_t, t′ the next response token.

    Generalised advantage estimation, arXiv 1506.02438, eq. 16. V_t is the critic's before token t, and 0 after the last
    one, be the response finished or cut off; the critic learns A + V_old. Defaults are verl's; 1707.06347 has γ .99 and
    λ .95, ROLL λ .95. Holes in the mask are stepped over, as in verl, not in ROLL and slime. A reward per row is its
    last token's. λ = 0: δ; λ = 1: `returns` − V; V = 0: `returns` with γλ for γ.

    The last two options are the critic's, which a run makes: its learning rate (None: that of the policy), and
    `value_loss`'s clip. Nothing is computed with them here.
    """
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0 <= share <= 1:
            raise ConfigError(f"gae({name}={share:g}): the discount must be from 0 to 1")
    if critic_lr is not None and not 0 < critic_lr < math.inf:
        raise ConfigError(f"gae(critic_lr={critic_lr:g}): the learning rate must be above 0, or None for the policy's. "
                          "Without a critic use `returns`.")
    if not value_clip > 0:
        raise ConfigError(f"gae(value_clip={value_clip:g}): the distance must be above 0, or inf for no clipping")
    if x.state_values is None:
        raise ConfigError("gae needs the values of a critic, and the batch has none. Score the batch with a critic, or "
                          "use `returns`.")
    return _estimate(x, x.state_values.double(), gamma, lam)


def _estimate(x: AdvantageInputs, v: PerToken, gamma: float, lam: float) -> PerToken:
    """A_t = r_t + γ·V_t′ − V_t + γλ·A_t′, over response tokens."""
    rewards = (x.values if x.values.dim() == 2 else place_on_last(x.values, x.mask)).double()
    found, later, next_v = torch.zeros_like(rewards), rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = x.mask[:, t]
        later = torch.where(here, rewards[:, t] + gamma * next_v - v[:, t] + gamma * lam * later, later)
        next_v = torch.where(here, v[:, t], next_v)
        found[:, t] = torch.where(here, later, 0)
    return found.to(x.values.dtype)


# ---------------------------------------------------------------------- what they share
def _per_token(values: Values) -> PerToken:
    """Of one per row, the same at all its tokens; to be broadcast."""
    return values[:, None] if values.dim() == 1 else values


def _per_row(x: AdvantageInputs, step: str) -> Float[Tensor, " batch"]:
    """The values, float64, one per row. Raises ConfigError where a step before has made them per token."""
    if x.values.dim() != 1:
        raise ConfigError(f"the advantage {step} takes one value per row, but an earlier step made one per token. Put "
                          "whitened, kl_penalty and returns after it.")
    return x.values.double()


def _moments(values: Float[Tensor, " batch"], labels: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
    """Mean and sample deviation of the set of each row; the value itself and 0 where all of them are equal."""
    mean, std = values.clone(), torch.zeros_like(values)
    for one in labels.unique():
        rows = labels == one
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
    """Raise ConfigError where a step before has made something else of the rewards."""
    if x.values is not x.rewards:
        raise ConfigError(f"the advantage {step} uses the rewards of turns, and an earlier step changed the rewards of "
                          f"rows. Put {step} first.")


def place_on_last(rewards: Float[Tensor, " batch"], mask: Mask) -> PerToken:
    """Each row's reward at its last response token, 0 elsewhere."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards[:, None], 0)


# ---------------------------------------------------------------------- what a critic minimises
def value_loss(
    values: PerToken,
    *,
    old_values: PerToken,
    returns: PerToken,
    weights: PerToken,
    clip: float = math.inf,
) -> Float[Tensor, ""]:
    """½ Σ W · max((V − R)², (clip(V, V_old ± clip) − R)²), to be minimised; only `values` has a gradient.

    PPO's critic as its authors' code has it; 1707.06347, eq. 9, has the square alone. clip is 0.5 in verl, 0.2 in
    slime. W is the arm's aggregation, over the whole mini-batch, so that parts of it add up. The gradient W·(V − R) is
    gone where V is beyond the range and the clipped error is the larger one. clip = ∞: half the squared error.
    """
    near = values.clamp(old_values - clip, old_values + clip)
    error, clipped = (values - returns) ** 2, (near - returns) ** 2
    worst = torch.where(clipped > error, clipped, error)  # at a tie the gradient is kept
    return (weights * torch.where(weights != 0, worst, 0)).sum() / 2


ADVANTAGES: dict[str, Callable[..., Values]] = {
    "group": group, "normalized": normalized, "leave_one_out": leave_one_out, "opo": opo, "overlong": overlong,
    "clipped": clipped, "difficulty_mask": difficulty_mask, "whitened": whitened, "kl_penalty": kl_penalty,
    "returns": returns, "gae": gae, "by_turn": by_turn, "turn_rewards": turn_rewards,
}  # fmt: skip
"""Steps from rewards to advantages."""
