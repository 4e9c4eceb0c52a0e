"""The data that flows through `moe_rl`: frozen dataclasses, explained field by field.

Axis legend, used in every signature of the package:

    batch   rows of a batch: prompts × group, or any part of them
    time    token positions, right-padded; position 0 is the first prompt token
    MoE layer    places that route, in forward order (a decoder layer may hold more than one)
    k       experts per token at an MoE layer

`logprobs[b, t]` is log p(tokens[b, t] | tokens[b, <t]), so column 0 is always 0.
`experts[b, t]` are the experts used when token t was the *input*: the row that produced token t+1. The routes that
decide a response are therefore rows prompt_len-1 … len-2, and the last token of a sequence has no route of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Int32, Integer
from torch import Tensor, nn

from moe_rl.errors import ConfigError, renamed
from moe_rl.routing.hooks import RouterScores
from moe_rl.routing.trace import RoutingTrace

Stage = TypeVar("Stage", bound="Rollouts")


@dataclass(frozen=True)
class Prompt:
    """One question. Example: `Prompt(text="372=", answer="302", entry={"digits": [3, 7, 2]})`."""

    text: str
    """The question, before any chat template."""
    answer: str | None = None
    """A reference completion, which the cold start imitates; None where the task knows none."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """The dataset's own record, for its own scorer."""
    tokens: tuple[int, ...] = ()
    """Token ids of the prompt as the model reads it; empty until a tokenizer has encoded it."""
    chat: bool = False
    """Whether these are by a chat template, so that the text is the user's message."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not isinstance(self.answer, str | None):
            raise ConfigError(
                f"Prompt(text={self.text!r:.80}, answer={self.answer!r:.80}): both must be text, and an "
                "answer may be None"
            )


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Engine and policy both divide logits by `temperature`, so that a ratio compares one
    distribution with itself."""

    temperature: float = 1.0
    max_new_tokens: int = 32
    """Most tokens after the prompt; in a conversation what the environment says counts, too."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the tokenizer's EOS; the text handed to the scorer excludes them."""
    greedy: bool = False
    top_p: float = 1.0
    """The fewest tokens that together have this probability; see `models.vocabulary.kept`. 1: all."""
    top_k: int = 0
    """At most so many tokens. 0: all."""
    min_p: float = 0.0
    """Tokens of at least so many times the highest probability."""
    keep_mask: bool = True
    """Whether rollouts shall say which tokens these three kept, so that the trainer can renormalise over them, too."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens may not be drawn; log-probs are then renormalised over those that may."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


Reply = Callable[[int, str], str | None]
"""reply(row, text): what an environment says to what the policy wrote last in the conversation of that row, rows being
prompt-major; None where the conversation is over."""


@dataclass(frozen=True)
class Turn:
    """What the policy wrote at once in a conversation."""

    start: int
    end: int
    """Its own tokens are `Rollout.tokens[start:end]`, the EOS included; what follows up to the next turn is the
    environment's."""
    text: str
    """Without EOS and stop string."""
    reply: str = ""
    """What the environment said to it; of the last turn nothing."""
    reward: float = 0.0


@dataclass(frozen=True)
class KeptTokens:
    """The ids that sampling kept at every response token: 4 bytes for each, where a bit for every token of a vocabulary
    of 152,000 would be 19 kB a token, and this is less for any set of up to 4,700."""

    ids: Int32[Tensor, " kept"]
    """Token by token, in the order of `counts`."""
    counts: Int32[Tensor, "*token"]
    """How many ids are a token's; 0 where nothing is known to be left out: at prompts, padding, what an environment
    said."""

    @staticmethod
    def stack(parts: Sequence[KeptTokens], where: Bool[Tensor, "batch time"]) -> KeptTokens:
        """Of several rollouts, whose tokens after the prompt are the True places of a batch, row by row."""
        counts = torch.zeros(where.shape, dtype=torch.int32)
        counts[where] = torch.cat([part.counts for part in parts])
        return KeptTokens(torch.cat([part.ids for part in parts]), counts)

    def joined(self, then: KeptTokens, end: int | None) -> KeptTokens:
        """Of one response of two parts, up to `end`."""
        counts = torch.cat([self.counts, then.counts])[:end]
        return KeptTokens(torch.cat([self.ids, then.ids])[: int(counts.sum())], counts)

    def each(self, sizes: Sequence[int]) -> list[KeptTokens]:
        """The first so many tokens of every row."""
        return [
            KeptTokens(ids, row[:size])
            for ids, row, size in zip(self.ids.split(self.counts.sum(1).tolist()), self.counts, sizes, strict=True)
        ]

    def rows(self, index: Tensor | slice, time: int) -> KeptTokens:
        """The given rows, to go with `Rollouts.rows`: columns that it leaves out, or that are not here, keep no ids."""
        of_rows = self.ids.split(self.counts.sum(1).tolist())
        chosen = torch.arange(len(self.counts))[index].tolist()
        counts = self.counts[index][:, :time]
        ids = torch.cat([self.ids[:0], *(of_rows[row] for row in chosen)])
        return KeptTokens(ids, nn.functional.pad(counts, (0, time - counts.shape[1])))

    def since(self, first: int) -> KeptTokens:
        """The columns from `first` on, before which there are no ids."""
        return KeptTokens(self.ids, self.counts[:, first:])

    def pieces(self, where: Bool[Tensor, "*token"], size: int) -> Iterator[KeptTokens]:
        """The tokens in `where`, which has all that have ids, `size` at a time."""
        counts = self.counts[where].split(size)
        ids = self.ids.split([int(part.sum()) for part in counts])
        return map(KeptTokens, ids, counts)

    def only(self, logits: Float[Tensor, "*token vocabulary"]) -> Float[Tensor, "*token vocabulary"]:
        """The logits, -inf at what was not kept: their log-softmax is renormalised over the kept set."""
        counts = self.counts.flatten()
        keep = (counts == 0)[:, None].repeat(1, logits.shape[-1])
        token = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        keep[token, self.ids.long()] = True
        return logits.masked_fill(~keep.view(logits.shape), -torch.inf)

    def to(self, device: torch.device | str) -> KeptTokens:
        """The same on another device."""
        return KeptTokens(self.ids.to(device), self.counts.to(device))


@renamed(kept="kept_tokens")
@dataclass(frozen=True)
class Rollout:
    """One sampled completion, or one conversation."""

    prompt: Prompt
    tokens: tuple[int, ...]
    """Token ids after the prompt, every EOS included that was sampled, and what an environment said in between."""
    logprobs: Float[Tensor, " response"]
    """Log-probability of each token under the distribution it was drawn from, in nats; 0 at an environment's."""
    text: str
    """The completion as text, without EOS and stop string; of a conversation all turns and replies, one after another.
    """
    finished: bool
    """False when `max_new_tokens` cut it off, be it in a turn or because a reply would have left no room for one."""
    kept_tokens: KeptTokens | None = None
    """Which tokens truncated sampling kept for each of its own; None where it did not truncate, or does not say."""
    routes: RoutingTrace | None = None
    """Routes the engine used, batch 1 and time len(prompt) + len(tokens) - 1: the last token was never an input."""
    turns: tuple[Turn, ...] = ()
    """Of a conversation, at least one; empty where a task asks for one completion."""
    sampled_at: Int[Tensor, " response"] | None = None
    """The step after which the weights were those that drew each token; 0 is the cold start. None: nobody said."""

    @property
    def own_tokens(self) -> int:
        """How many tokens the policy drew: of a conversation those of its turns, without what was replied."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else len(self.tokens)


@renamed(kept="kept_tokens")
@dataclass(frozen=True, kw_only=True, repr=False)
class Rollouts:
    """The rewarded rollouts of one step, right-padded, or some of their rows. `rollouts.batches.collate` builds it."""

    tokens: Integer[Tensor, "batch time"]
    attention_mask: Bool[Tensor, "batch time"]
    """True at prompt and response tokens, and at what an environment wrote in between."""
    response_mask: Bool[Tensor, "batch time"]
    """True at the policy's own tokens, EOS included."""
    prompt_index: Int[Tensor, " batch"]
    """Which prompt of the step a row answers; rows of equal index form a group."""
    rollout_logprobs: Float[Tensor, "batch time"]
    """The engine's log-probabilities; 0 outside the response."""
    rewards: Float[Tensor, " batch"]
    finished: Bool[Tensor, " batch"]
    turn: Int[Tensor, "batch time"] | None = None
    """In a conversation, the number of an own token's turn, from 1; 0 elsewhere. None where each response is one turn.
    """
    turn_rewards: Float[Tensor, "batch time"] | None = None
    """The reward of each turn, at its last token; 0 elsewhere. A row adds up to the row of `rewards`."""
    rollout_routes: RoutingTrace | None = None
    """Routing that the engine reported."""
    sampled_at: Int[Tensor, "batch time"] | None = None
    """The step after which the weights were those that drew each response token; 0 outside the response."""
    kept_tokens: KeptTokens | None = None
    """What truncated sampling kept: every log-prob and entropy is then over these tokens alone."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} × {self.tokens.shape[1]} tokens, {len(self.prompt_index.unique())} "
            f"prompts, {int(self.response_mask.sum())} response tokens)"
        )

    def rows(self: Stage, index: Int[Tensor, " rows"] | slice) -> Stage:
        """The given rows, without the columns that are padding in all of them."""
        mask = self.attention_mask[index]
        time = int(mask.sum(1).max()) if mask.shape[0] else 0
        return type(self)(**{name: rows_of(value, index, time) for name, value in vars(self).items()})

    def to(self: Stage, device: torch.device | str) -> Stage:
        """The same on another device."""
        moved: dict[str, Any] = {name: x if x is None else x.to(device) for name, x in vars(self).items()}
        return type(self)(**moved)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoredRollouts(Rollouts):
    """Rollouts with the log-probs of π_old, and the routing to replay. `trainer.attach_old_policy` builds it."""

    old_logprobs: Float[Tensor, "batch time"]
    """log π_old, the denominator of the ratio."""
    lag: Int[Tensor, "batch time"] | None = None
    """Steps between the weights that drew a response token and those that begin the step; None where unknown."""
    routes: RoutingTrace | None = None
    """Routing that an update replays; None is unconstrained routing."""
    ratio_routes: RoutingTrace | None = None
    """Routing of the ratio, where it is not that of the gradient; None is unconstrained routing."""
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_ref under `routes`; None where the arm has no reference."""
    old_scores: RouterScores | None = None
    """Scores of π_old's routers, where the objective compares with them; rows are those of a trace."""
    values: Float[Tensor, "batch time"] | None = None
    """The critic's V_old at a response token: the value of the prefix before it; 0 outside the response."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Batch(ScoredRollouts):
    """What a step trains on. `Advantage.attach_advantages` builds it."""

    advantages: Float[Tensor, "batch time"]
    """0 outside the response."""
    returns: Float[Tensor, "batch time"] | None = None
    """The critic's target: the raw advantage + V_old; 0 outside the response."""


@dataclass(frozen=True, kw_only=True, repr=False)
class MiniBatch(Batch):
    """The rows of one update, or some of them, with what spans all. `Objective.attach_weights` builds it."""

    mask: Bool[Tensor, "batch time"]
    """The response tokens of the loss: those that no filter removes."""
    weights: Float[Tensor, "batch time"]
    """The aggregation over the mini-batch, float64; 0 outside `mask`."""
    importance_weights: Float[Tensor, "batch time"] | None = None
    """The product of the arm's corrections over the mini-batch; None where the arm has none."""
    ratio_logprobs: Float[Tensor, "batch time"] | None = None
    """log π_θ of the ratio before the update, where the ratio has routing or noise of its own."""
    batch_statistics: Float[Tensor, "batch time"] | None = None
    """Statistics of the mini-batch under π_θ before the update, for a loss that needs them."""


def rows_of(value: Tensor | KeptTokens | RoutingTrace | RouterScores | None, index: Tensor | slice, time: int) -> Any:
    """Some rows of a field and, where it has a time axis, its first columns."""
    if isinstance(value, Tensor):
        return value[index][:, :time] if value.dim() > 1 else value[index]
    return None if value is None else value.rows(index, time)


@dataclass(frozen=True)
class Scored:
    """What a forward without gradient says about a batch."""

    logprobs: Float[Tensor, "batch time"]
    """Of the batch's tokens, at the run's temperature; 0 outside the response."""
    entropy: Float[Tensor, "batch time"]
    """Of the distribution each response token was drawn from, in nats; 0 outside the response."""
    routes: RoutingTrace
    """Routes used in this forward: the model's own when it was unconstrained, the given ones when it replayed."""
    preferred: RoutingTrace | None = None
    """Under replay, what each router would have picked from the hidden states that replay produced upstream."""
    scores: RouterScores | None = None
    """Gates, margins and router log-probabilities, on request."""

    def rows(self, index: Int[Tensor, " rows"] | slice, time: int) -> Scored:
        """The given rows and the first `time` columns, to go with `Rollouts.rows`; without router scores."""
        fields = (self.logprobs, self.entropy, self.routes, self.preferred)
        return Scored(*(rows_of(value, index, time) for value in fields))


RouteSource = Callable[[Rollouts, Scored], RoutingTrace | None]
"""The routing that an update replays, from rollouts and their unconstrained scoring. See `routing.sources`."""


@dataclass(frozen=True)
class Updated:
    """What one optimizer step reports about its mini-batch, measured before the weights moved."""

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    routes: RoutingTrace
    preferred: RoutingTrace | None
    clipped_by: Integer[Tensor, "batch time"]
    """+1 where the upper clip bound removed a token's gradient, -1 where the lower one did, else 0."""
    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    grad_clipped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those of `LossOutput`, added up over the mini-batch."""


def require_mask(mask: Tensor, name: str = "the mask") -> Tensor:
    """The mask. Raises ConfigError for one of numbers: as an index it would name rows 0 and 1."""
    if mask.dtype != torch.bool:
        raise ConfigError(f"{name} has dtype {str(mask.dtype).removeprefix('torch.')}. Give it as bool: mask.bool().")
    return mask


def require_logprobs(logprobs: Tensor, mask: Tensor, name: str) -> None:
    """Raise ConfigError where nine of ten numbers of eight response tokens or more are above 0: probabilities, or
    log-probs with the sign turned, whose ratios would be wrong without a word. Rounding alone makes few."""
    values = logprobs.detach()[mask]
    if values.numel() >= 8 and int((values > 1e-4).sum()) > 0.9 * values.numel():
        raise ConfigError(
            f"{name} are above 0 at {int((values > 0).sum())} of {values.numel()} response tokens, so they "
            "are no log-probabilities. Give log p: not p, and not −log p."
        )


def response_rows(batch: Rollouts) -> Bool[Tensor, "batch time"]:
    """The rows of a trace that decide a response: inputs whose *next* token is one of the policy's own."""
    return nn.functional.pad(batch.response_mask[:, 1:], (0, 1))


def prompt_rows(batch: Rollouts) -> Bool[Tensor, "batch time"]:
    """The rows of a trace whose next token belongs to the prompt: what comes before the first response token. What an
    environment writes later is neither prompt nor response."""
    prompt = batch.attention_mask & (batch.response_mask.cumsum(1) == 0)
    return nn.functional.pad(prompt[:, 1:], (0, 1))
