"""PPO's critic: the policy's model with a scalar in place of its vocabulary, and an optimizer of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moe_rl.config import SCORED, Optimizer
from moe_rl.models.master_weights import TrainedWeights
from moe_rl.objectives.advantages import value_loss
from moe_rl.policies.hf import checkpoint_activations, cut, join, move_beside
from moe_rl.policies.optimizer import make_optimizer, read_state, take_step, write_state
from moe_rl.tasks.base import EQUAL
from moe_rl.types import MiniBatch, Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS, MOMENTS = "critic.safetensors", "critic.pt"


class HFCritic:
    """V(prefix) = w · h + b, h the last hidden state (final norm included) of the prefix's last token.

    It takes over `model`, without its vocabulary; w and b are float32 and 0 at first, so V = 0 and the first step moves
    them alone. Its routers route freely, whatever the policy replays, and nothing is recorded. It draws no random
    number. The module stays in eval mode; forwards are cut as the policy's, and only add.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        *,
        clip: float = math.inf,
        micro_batch: int = 64,
        micro_batch_tokens: int | None = None,
        activation_checkpointing: bool = False,
    ):
        body: Any = model.base_model
        embeddings = body.get_input_embeddings().weight
        head = nn.utils.skip_init(nn.Linear, embeddings.shape[1], 1, dtype=torch.float32, device=embeddings.device)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        self.model = nn.ModuleDict({"body": body, "head": head}).eval()
        self.settings, self.clip = optimizer, clip
        self.micro_batch, self.micro_batch_tokens = micro_batch, micro_batch_tokens
        self.device = embeddings.device
        self.trained = TrainedWeights(self.model)
        self.optimizer = make_optimizer(self.trained, optimizer)
        self.updates = 0
        if activation_checkpointing:
            checkpoint_activations(body, reentrant=False)

    @torch.no_grad()
    def values(self, batch: Rollouts) -> Float[Tensor, "batch time"]:
        """V of the state before every response token, 0 elsewhere."""
        cuts = cut(batch, SCORED * self.micro_batch, self.micro_batch_tokens)
        return join([move_beside(batch, self._forward(batch.rows(rows))) for rows in cuts], batch, cuts)[0]

    def update(self, mini_batch: MiniBatch) -> dict[str, float]:
        """One step on a mini-batch down the value loss; columns of `updates`, measured before it."""
        self.optimizer.zero_grad(set_to_none=True)
        parts, loss = [], 0.0
        cuts = cut(mini_batch, self.micro_batch, self.micro_batch_tokens)
        for rows in cuts:
            part = mini_batch.rows(rows).to(self.device)
            assert part.values is not None and part.returns is not None, "an arm with a critic has both"
            values = self._forward(part)
            part_loss = value_loss(
                values, old_values=part.values, returns=part.returns, weights=part.weights, clip=self.clip
            )
            part_loss.backward()
            loss += part_loss.item()
            parts.append(move_beside(mini_batch, values.detach()))
        norm, _ = take_step(self.trained, self.optimizer, self.settings, self.updates + 1, whose=" critic's")
        self.updates += 1
        row = {"value_loss": loss, "value_grad_norm": norm}
        assert mini_batch.returns is not None
        returns = mini_batch.returns[mini_batch.response_mask].double()
        if returns.numel() and (spread := returns.std(correction=0)) > EQUAL:
            residuals = returns - join(parts, mini_batch, cuts)[0][mini_batch.response_mask]
            row["value_explained_variance"] = 1 - (residuals.std(correction=0) / spread).item() ** 2
        return row

    def save(self, folder: Path) -> None:
        """Write weights (safetensors) and optimizer moments beside the policy's; bit-exact."""
        write_state(folder / WEIGHTS, folder / MOMENTS, self.trained, self.optimizer, self.updates)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote into this critic."""
        self.updates = read_state(folder / WEIGHTS, folder / MOMENTS, self.trained, self.optimizer, self.device)

    def _forward(self, part: Rollouts) -> Float[Tensor, "batch time"]:
        """V, with gradient. The value before token t comes out at t − 1, where the policy's log-probs of t do too, so
        the last token is no input, and right padding reaches nothing."""
        tokens, mask = part.tokens.to(self.device), part.response_mask.to(self.device)
        hidden = self.model["body"](input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        values = self.model["head"](hidden.float())[..., 0]
        return nn.functional.pad(values, (1, 0)).where(mask, 0.0)
