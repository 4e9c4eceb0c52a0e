"""What the study is made of beside what the package has: a task, a loss, a route source."""

import random

import torch

from moe_rl.errors import ConfigError
from moe_rl.objectives import LossInputs, LossOutput
from moe_rl.routing import RoutingTrace
from moe_rl.types import Batch, Prompt, Scored, response_rows


class Largest:
    """Some digits and an equals sign; the answer is the largest of them: `30814=` → `8`."""

    def __init__(self, digits: int = 5) -> None:
        if digits < 1:
            raise ConfigError(f"Largest(digits={digits}): a question needs at least one digit")
        self.digits = digits

    def prompts(self, count: int, seed: int) -> list[Prompt]:
        """Always the same ones for the same seed; a larger count begins with the same ones."""
        draw = random.Random(seed)
        texts = ["".join(draw.choices("0123456789", k=self.digits)) for _ in range(count)]
        return [Prompt(text=f"{text}=", answer=max(text)) for text in texts]

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 when the completion is the answer, else 0; anything in [0, 1] is a reward."""
        return float(completion == prompt.answer)


def clipped(x: LossInputs, *, bound: float) -> LossOutput:
    """−Σ W · min(r·A, clip(r, 1 ± bound)·A), r = π_θ/π_old of a token. Options are keyword-only."""
    ratio = x.log_ratio.exp()
    whole, held = ratio * x.advantages, ratio.clamp(1 - bound, 1 + bound) * x.advantages
    objective = torch.where(x.mask, torch.minimum(whole, held), 0)
    cut = (held < whole) & x.mask  # where the bound, which is constant, took the gradient: +1 above, −1 below
    return LossOutput(
        loss=-(x.weights * objective).sum(),
        log_ratio=x.log_ratio.detach(),
        clipped_by=torch.where(cut, (ratio - 1).sign(), 0).to(torch.int8),
    )


def responses(batch: Batch, natural: Scored) -> RoutingTrace:
    """Routing Replay where responses are decided, at the inputs before their tokens; all else routes freely."""
    where = natural.routes.known & response_rows(batch)[..., None].to(natural.routes.experts.device)
    return natural.routes.only(where)
