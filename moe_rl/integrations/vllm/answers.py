"""Requests to an inference engine, and its answers, read strictly and made into `Rollout`s."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_rl.config import ModelConfig
from moe_rl.errors import RoutingError, RunError
from moe_rl.integrations.vllm.payloads import RoutesRefused, decode_routes
from moe_rl.models.load import skeleton
from moe_rl.rollouts.engine import before_stop, check_request, completion_text, context_length, end_tokens
from moe_rl.rollouts.turns import generate_by_turns
from moe_rl.routing.moe_layers import layout_of
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Prompt, Reply, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def vllm_settings(sampling: Sampling, seed: int, ends: list[int]) -> dict[str, Any]:
    """vLLM's `SamplingParams`, as its server takes them, too. Complete, since a server fills gaps from the model's
    generation config."""
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "stop": list(sampling.stop),
        "stop_token_ids": ends,
        "skip_special_tokens": False,  # a stop string is looked for in the text that the scorer will see
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        "logprobs": 0,
    }


def is_finished(reason: str | None) -> bool:
    """Whether a completion ended by itself. Raises RunError for another reason than that and the length limit."""
    if reason not in ("stop", "length"):
        raise RunError(f"the engine ended a completion with {reason!r} instead of 'stop' or 'length'")
    return reason == "stop"


@dataclass(frozen=True)
class Answer:
    """One completion as an engine reports it; nothing of it is checked yet."""

    tokens: Sequence[Any]
    """Ids of the completion, with the EOS or the stop string's tokens that ended it."""
    logprobs: Sequence[Any]
    """Of these tokens, in nats, under the distribution they were drawn from."""
    finished: bool
    """Whether it ended by itself rather than at its length limit."""
    routes: Any = None
    """In any form that `decode_routes` reads."""


class Reader:
    """Makes rollouts of one model's answers. Raises where tokens, log-probs or routes cannot be what was sampled. The
    `model` gives vocabulary, layers and routing MoE layers; it may be without weights.

    `routes` decides about routes that are missing or impossible (all zero, an expert twice, the wrong number of rows):
    `raise` refuses them; `unknown` makes them unknown, so that replay routes there freely, and `refused` counts them;
    with `off` no rollout has routes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, routes: str = "raise"):
        self.tokenizer, self.layout, self.ends = tokenizer, layout_of(model), end_tokens(model, tokenizer)
        config: Any = model.config.get_text_config()
        self.vocabulary, self.num_layers = config.vocab_size, config.num_hidden_layers
        self.routes = routes
        self.refused = 0
        """Rows (token × MoE layer) whose routes were missing or impossible, so far."""

    def read(self, prompts: Sequence[Prompt], answers: Sequence[Answer], sampling: Sampling) -> list[Rollout]:
        """One rollout per answer. Raises RunError or RoutingError for an answer that cannot be one; warns once when
        routes became unknown."""
        before = self.refused
        rollouts = [self.decode(p, a, sampling) for p, a in zip(prompts, answers, strict=True)]
        self.warn(rollouts, self.refused - before)
        return rollouts

    def warn(self, rollouts: Sequence[Rollout], refused: int) -> None:
        """Warn where so many rows of `rollouts` have no route."""
        if refused:
            rows = sum(len(r.prompt.tokens) + len(r.tokens) - 1 for r in rollouts) * len(self.layout.moe_layers)
            warnings.warn(
                f"the engine's routing is missing or impossible in {refused} of {rows} (token, layer) rows. They route "
                "freely under replay; the columns engine_unknown and coverage count them.",
                RoutesRefused,
                stacklevel=4,
            )

    def asked(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """What to request. After a prompt that ends within a character, as a part of a response may, there are no stop
        strings, and `read` ends the completion: vLLM (0.30.0) takes the text of such a prompt for sampled, and finds
        stop strings there."""
        within = sampling.stop and self._text(prompt.tokens[-4:]).endswith("\ufffd")
        return replace(sampling, stop=()) if within else sampling

    # ------------------------------------------------------------------ one answer
    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode(self, prompt: Prompt, answer: Answer, sampling: Sampling) -> Rollout:
        """The rollout of one answer, as in `read`, without the warning."""
        tokens, logprobs = tuple(answer.tokens), list(answer.logprobs)
        if not tokens or len(tokens) != len(logprobs) or len(tokens) > sampling.max_new_tokens:
            raise RunError(
                f"the engine returned {len(tokens)} tokens and {len(logprobs)} log-probabilities; expected 1 to "
                f"{sampling.max_new_tokens} of each"
            )
        if odd := [t for t in tokens if not (isinstance(t, Integral) and 0 <= int(t) < self.vocabulary)]:
            raise RunError(f"the engine returned the token {odd[0]!r}; ids of the model end at {self.vocabulary - 1}")
        if odd := [x for x in logprobs if not (isinstance(x, Real) and -9999 < float(x) <= 1e-4)]:  # −9999: −inf
            raise RunError(f"the engine returned {odd[0]!r} as the log-probability of a sampled token")
        drawn, finished = prompt.tokens + tokens, answer.finished
        if self.asked(prompt, sampling) != sampling:
            ends = (e for e in range(1, len(tokens) + 1) if any(s in self._text(tokens[:e]) for s in sampling.stop))
            if end := next(ends, None):
                tokens, logprobs, finished = tokens[:end], logprobs[:end], True
        text = completion_text(tokens, self.ends, self.tokenizer)
        self._check_end(tokens, text, finished, sampling)
        routes = None if self.routes == "off" else self._routes(drawn, answer.routes)
        return Rollout(
            prompt=prompt,
            tokens=tokens,
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            text=before_stop(text, sampling.stop),
            finished=finished,
            routes=routes and routes.rows(slice(None), len(prompt.tokens) + len(tokens) - 1),
        )

    def _check_end(self, tokens: tuple[int, ...], text: str, finished: bool, sampling: Sampling) -> None:
        """Engine and trainer must agree on what ends a completion, or the policy never learns to end one."""
        stopped = tokens[-1] in self.ends or any(stop in text for stop in sampling.stop)
        if finished != stopped or not self.ends.isdisjoint(tokens[:-1]):
            raise RunError(
                f"a completion {'ended' if finished else 'was cut off'} with the tokens {tokens[-4:]} and the text "
                f"{text[-20:]!r}, but ends are {sorted(self.ends)} and {sampling.stop}. Start the engine with the "
                "tokenizer of this model, and so that it returns end tokens and stop strings."
            )

    def _routes(self, tokens: tuple[int, ...], payload: Any) -> RoutingTrace:
        """Decoded routes. With `unknown`, rows that cannot be routes are unknown, all of them where nothing fits."""
        strict, layout = self.routes == "raise", self.layout
        invalid = "raise" if strict else "unknown"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RoutesRefused)  # `warn` counts them over all answers
                trace = decode_routes(
                    payload, layout=layout, tokens=tokens, num_layers=self.num_layers, invalid=invalid
                )
        except RoutingError:
            if strict:
                raise
            shape = (1, len(tokens) - 1, len(layout.moe_layers), layout.top_k)
            trace = RoutingTrace.from_ids(torch.full(shape, -1), layout, tokens=torch.tensor([tokens[:-1]]))
        missing = int((~trace.known).sum())
        if strict and missing:
            raise RoutingError(
                f"the engine reports no routing for {missing} of {trace.known.numel()} (token, layer) rows of a "
                'completion. With engine.routes="unknown" they route freely under replay and are counted.'
            )
        self.refused += missing
        return trace


class CompletionEngine(ABC):
    """The verb `generate` of an engine that completes prompts, each by a request of its own. `folder` has the model's
    config and tokenizer; `most` is a limit on the tokens of prompt and completion, beside the model's."""

    def __init__(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, routes: str, dtype: str | None, most: int | None = None
    ):
        self.model = skeleton(ModelConfig(name=str(folder)))
        self.reader = Reader(tokenizer, self.model, routes)
        self.reports_routes, self.dtype, self.pushes = routes != "off", dtype, 0
        limits = (most, context_length(self.model.config))
        self.context = min((limit for limit in limits if limit), default=None)

    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        *,
        key: tuple[int, ...],
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Rollout]:
        """`group_size` completions of every prompt, prompt-major; see `RolloutEngine.generate`."""
        check_request(prompts, group_size, sampling, self.context)
        reader, draw = self.reader, partial(self._draw, sampling)
        rollouts = generate_by_turns(
            draw, reader.tokenizer, reader.ends, prompts, group_size, key=key, sampling=sampling, reply=reply
        )
        self.finish()
        return rollouts

    def _draw(
        self, sampling: Sampling, prompts: list[Prompt], noise: list[tuple[int, ...]], most: list[int]
    ) -> list[Rollout]:
        """A completion of every prompt; see `turns.Draw`. Log-probs of the arg max at another temperature than 1, or
        among truncated tokens, are NaN."""
        asked = [
            replace(self.reader.asked(prompt, sampling), max_new_tokens=room)
            for prompt, room in zip(prompts, most, strict=True)
        ]
        rollouts = self.complete(prompts, asked, noise, sampling)
        if sampling.greedy and (sampling.temperature != 1 or sampling.truncates):  # vLLM has other log-probs there
            return [replace(r, logprobs=r.logprobs * float("nan")) for r in rollouts]
        return rollouts

    @abstractmethod
    def complete(
        self, prompts: list[Prompt], asked: list[Sampling], noise: list[tuple[int, ...]], sampling: Sampling
    ) -> list[Rollout]:
        """A completion of every prompt, drawn as `asked` and read as `sampling`."""

    def finish(self) -> None:  # noqa: B027
        """After the last request of a `generate`."""
