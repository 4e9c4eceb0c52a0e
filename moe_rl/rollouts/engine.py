"""What an engine is, and what all engines share: which requests none can carry out, and what ends a completion."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.types import Prompt, Reply, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ROUTES = ("raise", "unknown", "off")
"""What becomes of routes that an engine does not report, or that are impossible: an error, or they route freely under
replay and are counted; `off`: the engine is not asked for any."""


@runtime_checkable
class Sampler(Protocol):
    """Draws completions. The same prompts, group size, key and weights give the same completions, bit for bit."""

    reports_routes: bool
    """Whether rollouts carry the routes the engine used."""

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        *,
        key: tuple[int, ...],
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Rollout]:
        """`group_size` completions of every prompt, prompt-major: all of prompt 0, then all of prompt 1.

        With `reply` they are conversations: it answers every turn that ended by itself, and its answer goes
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


def sampling_of(run: RunConfig) -> Sampling:
    """How a run draws its completions."""
    return Sampling(
        run.temperature,
        run.max_new_tokens,
        tuple(run.stop),
        top_p=run.top_p,
        top_k=run.top_k,
        min_p=run.min_p,
        keep_mask=run.sampling_mask,
    )


def check_routes(run: RunConfig, routes: str) -> None:
    """Raise ConfigError for a value that `routes` cannot have, and where an arm replays routes that the
    engine is not asked for."""
    if routes not in ROUTES:
        raise ConfigError(f"engine.routes={routes!r}: choose {', '.join(ROUTES)}.")
    sources = [Component.of(use) for use in (run.arm.routes, run.arm.ratio_routes) if use is not None]
    if routes == "off" and "rollout" in {name for use in sources for name in (use.name, use.options.get("base"))}:
        raise ConfigError(
            "routes='rollout' replays the engine's routing, but engine.routes='off' records none. Set "
            "engine.routes to 'raise' or 'unknown'."
        )


def warn_without_mask(run: RunConfig, why: str) -> None:
    """Warn where a run truncates and the engine does not say which tokens it kept."""
    if run.truncates:
        warnings.warn(
            f"top_p={run.top_p:g}, top_k={run.top_k}, min_p={run.min_p:g}: the trainer's log-probs are over the whole "
            f"vocabulary, not over the kept tokens ({why}). Use engine='hf', which reports the kept tokens, or a "
            "correction such as truncated.",
            stacklevel=2,
        )


def check_dtype(name: str, dtype: str | None) -> None:
    """Raise ConfigError for a dtype that torch does not have, or that is not of floats."""
    if dtype is not None and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ConfigError(f"{name}={dtype!r} is not a floating-point dtype of torch. Use bfloat16 or float32.")


def end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """EOS of the tokenizer and of the model's generation config, which may name several."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = named if isinstance(named, list) else [named]
    return {token for token in (*named, tokenizer.eos_token_id) if token is not None}


def context_length(config: PreTrainedConfig) -> int | None:
    """Most tokens of a sequence, prompt and completion; None where the configuration does not say.

    Rotary positions may be stretched (YaRN, linear): the configuration then names the length before, or after it.
    """
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if most is None:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    stretched = (rope.get("original_max_position_embeddings") or most) * (rope.get("factor") or 1)
    return max(most, int(stretched))


def check_request(prompts: list[Prompt], group_size: int, sampling: Sampling, context: int | None = None) -> None:
    """Raise ConfigError for what no engine can carry out. `context` is the most tokens that a sequence may have."""
    if not prompts:
        raise ConfigError("no prompts were given. Give at least one.")
    s = sampling
    shares = 0 < s.top_p <= 1 and 0 <= s.min_p <= 1 and s.top_k >= 0
    if group_size < 1 or s.max_new_tokens < 1 or not s.temperature > 0 or not shares:
        raise ConfigError(
            f"group size {group_size} and {s}: group size, tokens and temperature must be positive, 0 < top_p ≤ 1, "
            "0 ≤ min_p ≤ 1, top_k ≥ 0."
        )
    for i, prompt in enumerate(prompts):
        if not prompt.tokens:
            raise ConfigError(f"prompt {i} ({prompt.text[:40]!r}) has no token ids. Encode it with the tokenizer.")
        if context is not None and len(prompt.tokens) + sampling.max_new_tokens > context:
            raise ConfigError(
                f"prompt {i} ({prompt.text[:40]!r}) has {len(prompt.tokens)} tokens and max_new_tokens is "
                f"{sampling.max_new_tokens}, but the model (max_position_embeddings) reads at most {context}."
            )


def completion_text(tokens: Sequence[int], ends: Collection[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Ids of a completion as text, without the one of `ends` that ended it; other special tokens stay visible."""
    written = list(tokens[:-1] if tokens[-1] in ends else tokens)
    return str(tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def before_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text up to the first stop string."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
