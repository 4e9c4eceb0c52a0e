"""The components of the study: a task, a loss, a replay source."""

import random

import torch

from moe_rl.errors import ConfigError
from moe_rl.objectives import LossInputs, LossOutput
from moe_rl.routing import RoutingTrace
from moe_rl.types import Prompt, Rollouts, Scored, response_rows


class Largest:
    """Digits and an equals sign; the answer is the largest digit: `30814=` → `8`."""

    def __init__(self, digits: int = 5) -> None:
        if digits < 1:
            raise ConfigError(f"Largest(digits={digits}): a question needs at least one digit")
        self.digits = digits

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """Equal seeds give equal prompts; a larger count begins with the same prompts."""
        draw = random.Random(seed)
        texts = ["".join(draw.choices("0123456789", k=self.digits)) for _ in range(count)]
        return [Prompt(text=f"{text}=", answer=max(text)) for text in texts]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 if the completion is the answer, else 0; any number in [0, 1] is a reward."""
        return float(completion == prompt.answer)


def clipped(x: LossInputs, *, bound: float) -> LossOutput:
    """−Σ W · min(r·A, clip(r, 1 ± bound)·A), r = π_θ/π_old of a token. Options are keyword-only."""
    ratio = x.log_ratio.exp()
    plain, bounded = ratio * x.advantages, ratio.clamp(1 - bound, 1 + bound) * x.advantages
    objective = torch.where(x.mask, torch.minimum(plain, bounded), 0)
    cut = (bounded < plain) & x.mask  # tokens without gradient, because the bound is constant: +1 above, −1 below
    return LossOutput(
        loss=-(x.weights * objective).sum(),
        log_ratio=x.log_ratio,
        clipped_by=torch.where(cut, (ratio - 1).sign(), 0).to(torch.int8),
    )


def responses(batch: Rollouts, unconstrained: Scored) -> RoutingTrace:
    """Routing Replay at the inputs that decide response tokens; all other tokens route freely."""
    where = unconstrained.routes.known & response_rows(batch)[..., None].to(unconstrained.routes.experts.device)
    return unconstrained.routes.only(where)
