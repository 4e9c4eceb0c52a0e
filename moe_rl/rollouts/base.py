"""What the trainer asks of whatever turns prompts into completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import Tensor

from moe_rl.types import Prompt, Reply, Rollout, Sampling


@runtime_checkable
class Sampler(Protocol):
    """Draws completions. The same prompts, group size, key and weights give the same completions, bit for bit."""

    reports_routes: bool
    """Whether rollouts carry the routes the engine used."""

    def generate(
        self, prompts: list[Prompt], group_size: int, *, key: tuple[int, ...], sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """`group_size` completions of every prompt, prompt-major: all of prompt 0, then all of prompt 1.

        With `reply` they are conversations: it is asked about every turn that ended by itself, and what it says goes
        between the policy's tokens as ids (`models.tokens.reply_tokens`); the policy goes on from all that is there. A
        reply that would leave no room for a token is left out, and the conversation counts as cut off.

        Noise is drawn per completion from `key` + (position of the prompt, number of the sample), so that arms which
        share a key share their noise, and no completion depends on how rows were batched. A key is one number, or three
        and more (`seeds.derive`).
        """

    def close(self) -> None:
        """Give back processes, devices and memory. The engine cannot be used afterwards."""


@runtime_checkable
class RolloutEngine(Sampler, Protocol):
    """What the trainer samples from."""

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> float | None:
        """Take over the policy's weights, given by Hugging Face name. A `CheckedEngine` returns the largest
        difference between the engine's log-probs and the policy's, in nats."""
