"""What an inference engine of its own is asked for, and what it sends back, read strictly and made into `Rollout`s."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from moe_rl.errors import ConfigError, RoutingError, RunError
from moe_rl.integrations.vllm.payloads import RoutesRefused, decode_routes
from moe_rl.rollouts.engine import ROUTES, before_stop, completion_text, end_tokens
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import RoutingTrace
from moe_rl.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def common_settings(sampling: Sampling, ends: list[int]) -> dict[str, Any]:
    """What vLLM and SGLang call alike. Everything is said, since a server fills gaps from the model's generation
    config."""
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "stop": list(sampling.stop),
        "stop_token_ids": ends,
        "skip_special_tokens": False,  # a stop string is looked for in the text that the scorer will see
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
    }


def vllm_settings(sampling: Sampling, seed: int, ends: list[int]) -> dict[str, Any]:
    """vLLM's `SamplingParams`, as its servers take them, too."""
    return {**common_settings(sampling, ends), "max_tokens": sampling.max_new_tokens, "seed": seed, "logprobs": 0}


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
    """Makes rollouts of one model's answers. An answer that would train on something else than was sampled is an error.
    Of the `model`, which may be without weights, it knows vocabulary, layers and routing sites.

    `routes` says what becomes of routes that are missing or impossible (all zero, an expert twice, the wrong number of
    rows): `raise` refuses them; `unknown` makes them unknown, so that replay routes there freely, and `refused` counts
    them; with `off` no rollout has routes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, routes: str = "raise"):
        if routes not in ROUTES:
            raise ConfigError(f"engine.routes is {routes!r}; choose {', '.join(ROUTES)}.")
        self.tokenizer, self.layout, self.ends = tokenizer, layout_of(model), end_tokens(model, tokenizer)
        self.vocabulary, self.num_layers = model.config.vocab_size, model.config.num_hidden_layers
        self.routes = routes
        self.refused = 0
        """Rows (token × site) whose routes were missing or impossible, so far."""

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
            rows = sum(len(r.prompt.tokens) + len(r.tokens) - 1 for r in rollouts) * len(self.layout.sites)
            warnings.warn(
                f"the engine's routing is missing or impossible in {refused} of {rows} (token, layer) rows. They route "
                "freely under replay; the columns engine_unknown and coverage count them.",
                RoutesRefused,
                stacklevel=4,
            )

    def asked(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """What an engine is asked for. After a prompt that ends within a character, as the part of a response may, it
        gets no stop strings, and `read` ends the completion: vLLM (seen in 0.30.0) takes the text of all such a prompt
        for drawn, and finds them there."""
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
                f"{sampling.max_new_tokens} of each. Does it have another API?"
            )
        if odd := [t for t in tokens if not (isinstance(t, Integral) and 0 <= int(t) < self.vocabulary)]:
            raise RunError(
                f"the engine returned the token {odd[0]!r}, but ids of the model run from 0 to {self.vocabulary - 1}. "
                "Does it serve another model, or have another API?"
            )
        if odd := [x for x in logprobs if not (isinstance(x, Real) and math.isfinite(x) and x <= 1e-4)]:
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
        late = next((t for t in tokens[:-1] if t in self.ends), None)
        if late is not None:
            raise RunError(f"the engine continued after the end token {late}. Start it with the tokenizer of this "
                           "model.")
        stopped = tokens[-1] in self.ends or any(stop in text for stop in sampling.stop)
        if finished != stopped:
            raise RunError(
                f"a completion {('ended' if finished else 'was cut off')} with the token {tokens[-1]} (end tokens: "
                f"{sorted(self.ends)}) and the text {text[-20:]!r} (stop strings: {sampling.stop}). Set the engine to "
                "keep end tokens and stop strings."
            )

    def _routes(self, tokens: tuple[int, ...], payload: Any) -> RoutingTrace:
        """Decoded routes. With `unknown`, rows that cannot be routes are unknown, all of them where nothing fits."""
        layout = self.layout
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RoutesRefused)  # `read` says it once for all answers
                invalid = "raise" if self.routes == "raise" else "unknown"
                trace = decode_routes(
                    payload, layout=layout, tokens=tokens, num_layers=self.num_layers, invalid=invalid
                )
        except RoutingError:
            if self.routes == "raise":
                raise
            shape = (1, len(tokens) - 1, len(layout.sites), layout.top_k)
            trace = RoutingTrace.from_ids(torch.full(shape, -1), layout, tokens=torch.tensor([tokens[:-1]]))
        if self.routes == "raise" and trace.coverage < 1:
            missing = int((~trace.known).sum())
            raise RoutingError(
                f'the engine reports no routing for {missing} of {trace.known.numel()} (token, layer) rows of a '
                'completion. With engine.routes="unknown" they route freely under replay and are counted.'
            )
        self.refused += int((~trace.known).sum())
        return trace
