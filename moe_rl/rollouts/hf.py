"""Rollouts from a Hugging Face model in this process: sampling with a KV cache, in batches, routes recorded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from moe_rl.config import MAX_ROWS, Count, RunConfig
from moe_rl.errors import Diverged, RunError
from moe_rl.models.adapters import plain_state
from moe_rl.models.compilation import run_eagerly
from moe_rl.models.load import LoadedModel
from moe_rl.models.vocabulary import kept
from moe_rl.registry import checked
from moe_rl.rollouts.engine import (
    before_stop,
    check_request,
    check_routes,
    context_length,
    end_tokens,
    warn_without_mask,
)
from moe_rl.rollouts.turns import Conversations
from moe_rl.routing import Layout, Recording, RoutingTrace, record_routing
from moe_rl.routing.observe import evaluation_mode
from moe_rl.types import KeptTokens, Prompt, Reply, Rollout, Sampling, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def _check(run: RunConfig, *, routes: str = "raise", max_rows: Count = MAX_ROWS) -> None:
    check_routes(run, routes)
    if not run.sampling_mask:
        warn_without_mask(run, "sampling_mask=False")


@checked(_check)
def hf(
    run: RunConfig, start: LoadedModel, folder: Path, *, routes: str = "raise", max_rows: Count = MAX_ROWS
) -> HFEngine:
    """The engine `hf`: samples from `start` itself, which is the policy's own module where one process trains.
    `routes`: `raise`, or `off`: they are not recorded. `max_rows`: completions sampled at once, which bounds memory."""
    return HFEngine(start.model, start.tokenizer, record_routes=routes != "off", max_rows=max_rows)


class HFEngine:
    """Samples from `model` itself. Give it the policy's module and it always has the policy's weights, at no cost;
    give it a copy (another dtype, say) and `load` keeps the copy up to date.

    A completion ends at the tokenizer's EOS, at one of the generation config's, or at a stop string. `max_rows` bounds
    the completions sampled at once; it changes memory and speed, and results by no more than float rounding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        record_routes: bool = True,
        max_rows: int = MAX_ROWS,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.reports_routes = record_routes
        self.max_rows = max_rows
        self.device = next(model.parameters()).device
        self.context = context_length(model.config)
        self.ends = torch.tensor(sorted(end_tokens(model, tokenizer)), dtype=torch.long, device=self.device)

    # ------------------------------------------------------------------ the verbs
    def generate(
        self,
        prompts: list[Prompt],
        group_size: int,
        *,
        key: tuple[int, ...],
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Rollout]:
        """`group_size` completions of every prompt, prompt-major; see `RolloutEngine.generate`.

        What `reply` says is read token by token beside the rows that are being drawn, into the cache that is there: a
        conversation is one pass, so that its routes are, too, and no family of models needs more than decoding.

        Prompts are batched with others of about their length and padded on the left. Log-probabilities are float32,
        of softmax(logits / temperature), over what truncation keeps, under `greedy` too (where the token is the arg
        max). Raises Diverged when the model's logits are not finite, and ConfigError for a prompt that leaves no room
        in its context.
        """
        check_request(prompts, group_size, sampling, self.context)
        groups: list[list[Rollout]] = [[] for _ in prompts]
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
        at_once = max(1, self.max_rows // group_size)
        recorder = record_routing(self.model) if self.reports_routes else nullcontext()
        with torch.no_grad(), evaluation_mode(self.model), run_eagerly(self.model), recorder as recording:
            for start in range(0, len(by_length), at_once):
                chosen = by_length[start : start + at_once]
                part = [prompts[i] for i in chosen]
                noise = torch.cat([draw_noise((*key, i), group_size, sampling.max_new_tokens) for i in chosen])
                conversations = None
                if reply is not None:
                    numbers = [i * group_size + n for i in chosen for n in range(group_size)]
                    conversations = Conversations(reply, numbers, self.tokenizer, set(self.ends.tolist()), sampling)
                drawn = self._draw(part, group_size, noise.to(self.device), sampling, recording, conversations)
                rollouts = self._hand_out(part, group_size, drawn, sampling, recording, conversations)
                for n, i in enumerate(chosen):
                    groups[i] = rollouts[n * group_size : (n + 1) * group_size]
        return [rollout for group in groups for rollout in group]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the model, casting to its dtype. Tensors that *are* the model's own are left alone, so this
        costs nothing when the engine shares the policy's module. Raises RunError for names that do not match, and where
        the model has adapters and is not the policy's own."""
        mine, received = plain_state(self.model), set()
        adapted = not all(isinstance(value, Tensor) for value in mine.values())
        for name, tensor in weights:
            received.add(name)
            own = mine.get(name)
            if isinstance(own, Tensor) and tensor.data_ptr() != own.data_ptr():
                if adapted:
                    raise RunError(f"{name}: the engine's model has adapters. Use the policy's own, or one without.")
                own.copy_(tensor.detach())
            elif isinstance(own, Tensor) and adapted:
                return  # the policy's own module: nothing to copy, so nothing is merged
        if names := sorted(mine.keys() ^ received):
            raise RunError(f"policy or engine lacks {len(names)} weights, e.g. {names[0]!r}. Use one model for both.")

    def close(self) -> None:
        """Nothing to give back: the module belongs to its maker."""

    # ------------------------------------------------------------------ how
    def _draw(
        self,
        prompts: list[Prompt],
        group_size: int,
        noise: Float[Tensor, "rows new"],
        sampling: Sampling,
        recording: Recording | None,
        conversations: Conversations | None,
    ) -> CompletionBuffers:
        """Prefill every prompt once, repeat the cache per sample, then decode until every row has ended."""
        padded, mask = _pad_left(prompts, self.device)
        start = padded.shape[1]
        layout = None if recording is None else recording.layout
        drawn = CompletionBuffers.empty(padded, mask, group_size, sampling.max_new_tokens, layout)
        ragged = not bool(mask.all())  # without padding no mask is needed, which is faster
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        inputs = {"attention_mask": mask.long(), "position_ids": positions} if ragged else {}
        output = self.model(input_ids=padded, use_cache=True, logits_to_keep=1, **inputs)
        drawn.keep_routes(slice(None), slice(0, start), recording, group_size)
        kept_as = cache_argument(self.model)
        cache = getattr(output, kept_as)
        sample = torch.arange(len(prompts), device=self.device).repeat_interleave(group_size)
        cache.reorder_cache(sample)
        logits = output.logits[:, -1][sample]
        rows = torch.arange(len(sample), device=self.device)  # of the completions still being drawn
        for t in range(sampling.max_new_tokens):
            if sampling.truncates:
                scaled = logits.float() / sampling.temperature
                may_be_drawn = kept(scaled, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
                logits = logits.masked_fill(~may_be_drawn, -torch.inf)
                if sampling.keep_mask:
                    if conversations is not None:
                        may_be_drawn &= conversations.is_drawn(rows, t)[:, None]
                    drawn.keep_tokens(rows, may_be_drawn)
            token, logprob = draw_tokens(logits, noise[rows, t], sampling)
            if conversations:
                token, logprob = conversations.put_replies(rows, t, token, logprob)
            drawn.tokens[rows, start + t] = token
            drawn.logprobs[rows, t] = logprob
            so_far = drawn.tokens[rows, start : start + t + 1]
            begun = None if conversations is None else conversations.begun[rows.cpu()]
            ended = torch.isin(token, self.ends) | self._stopped(so_far, sampling, begun)
            drawn.lengths[rows] += 1
            drawn.finished[rows] = ended
            if conversations:
                ended, drawn.finished[rows] = conversations.end_turns(rows, t, ended, so_far)
            if t + 1 == sampling.max_new_tokens or bool(ended.all()):
                break
            if bool(ended.any()):
                alive = (~ended).nonzero()[:, 0]
                rows, token = rows[alive], token[alive]
                cache.reorder_cache(alive)
            inputs = drawn.decode_inputs(rows, start + t + 1) if ragged else {}
            output = self.model(input_ids=token[:, None], use_cache=True, **{kept_as: cache}, **inputs)
            drawn.keep_routes(rows, slice(start + t, start + t + 1), recording)
            logits = output.logits[:, -1]
        return drawn

    def _stopped(
        self, tokens: Int[Tensor, "rows time"], sampling: Sampling, begun: Int[Tensor, " rows"] | None = None
    ) -> Bool[Tensor, " rows"]:
        """Rows whose text, from where they `begun` at, now holds a stop string. Only a window that must contain a fresh
        one is decoded."""
        if not sampling.stop:
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        window = max(len(stop.encode()) for stop in sampling.stop) + 4  # a token is at least a byte; 4 to spare
        since = max(0, tokens.shape[1] - window)
        starts = [0] * len(tokens) if begun is None else [max(0, b - since) for b in begun.tolist()]
        texts = self._decode([row[at:] for row, at in zip(tokens[:, since:].tolist(), starts, strict=True)])
        hits = [any(stop in text for stop in sampling.stop) for text in texts]
        return torch.tensor(hits, device=tokens.device)

    def _decode(self, tokens: list[list[int]]) -> list[str]:
        """Special tokens stay visible: skipped ones would let `3<pad>02` pass for the answer 302."""
        return self.tokenizer.batch_decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _hand_out(
        self,
        prompts: list[Prompt],
        group_size: int,
        drawn: CompletionBuffers,
        sampling: Sampling,
        recording: Recording | None,
        conversations: Conversations | None,
    ) -> list[Rollout]:
        """Cut every row out of the buffers; tensors are views of them."""
        drawn = drawn.cpu()
        ends = set(self.ends.tolist())
        width = drawn.tokens.shape[1] - drawn.logprobs.shape[1]
        lengths, finished = drawn.lengths.tolist(), drawn.finished.tolist()
        tokens = [row[width : width + n] for row, n in zip(drawn.tokens.tolist(), lengths, strict=True)]
        kept_tokens = drawn.kept_tokens()
        if conversations is None:
            turns: list[tuple[Turn, ...]] = [()] * len(tokens)
            texts = self._decode([row[:-1] if row[-1] in ends else row for row in tokens])
            texts = [before_stop(text, sampling.stop) for text in texts]
        else:
            turns = [conversations.turns(b, row) for b, row in enumerate(tokens)]
            texts = ["".join(turn.text + turn.reply for turn in row) for row in turns]
        rollouts = []
        for b, text in enumerate(texts):
            prompt, n = prompts[b // group_size], lengths[b]
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    tokens=tuple(tokens[b]),
                    logprobs=drawn.logprobs[b, :n],
                    text=text,
                    finished=finished[b],
                    kept_tokens=kept_tokens[b],
                    routes=drawn.trace(b, slice(width - len(prompt.tokens), width + n - 1), recording),
                    turns=turns[b],
                )
            )
        return rollouts


# ---------------------------------------------------------------------- drawing
def draw_noise(key: tuple[int, ...], samples: int, length: int) -> Float[Tensor, "samples length"]:
    """Uniform numbers in [0, 1), float64. Sample i has the same ones however many samples there are."""
    return torch.from_numpy(np.random.default_rng(key).random((samples, length)))


def draw_tokens(
    logits: Float[Tensor, "rows vocabulary"], noise: Float[Tensor, " rows"], sampling: Sampling
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """The token at which the cumulative probability first exceeds the noise, and its log-probability.

    log p = log softmax(logits / temperature), in float32; probabilities are added up in float64, so that no token of a
    large vocabulary loses its share to rounding. With `greedy` the arg max instead. Raises Diverged for logits that are
    NaN or infinite, from which nothing can be drawn; -inf is an impossible token.
    """
    logprobs = (logits.float() / sampling.temperature).log_softmax(-1)
    broken = logprobs[:, 0].isnan()  # one bad logit makes its whole row NaN, so a column tells
    if bool(broken.any()):
        raise Diverged(
            f"the logits of {int(broken.sum())} of {len(broken)} completions are NaN or infinite, so no token can be "
            "sampled. Lower the learning rate, or use float32."
        )
    if sampling.greedy:
        token = logits.argmax(-1)
    else:
        cumulative = logprobs.double().exp_().cumsum(-1)
        total = cumulative[:, -1:]
        threshold = torch.minimum(noise[:, None] * total, total.nextafter(torch.zeros_like(total)))  # stay below it
        token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return token, logprobs.gather(-1, token[:, None])[:, 0]


# ---------------------------------------------------------------------- small parts
def _pad_left(
    prompts: list[Prompt], device: torch.device
) -> tuple[Int[Tensor, "prompts start"], Bool[Tensor, "prompts start"]]:
    """Left, so that every row's next token is in the last column. The pad token is never attended to; 0 will do."""
    width = max(len(prompt.tokens) for prompt in prompts)
    pads = [width - len(prompt.tokens) for prompt in prompts]
    rows = [(0,) * pad + prompt.tokens for pad, prompt in zip(pads, prompts, strict=True)]
    mask = torch.arange(width)[None] >= torch.tensor(pads)[:, None]
    return torch.tensor(rows, device=device), mask.to(device)


# ---------------------------------------------------------------------- memory of a batch of completions
@dataclass(frozen=True)
class CompletionBuffers:
    """What a batch of completions has so far: one buffer per quantity, prompts left-padded, filled in place."""

    tokens: Int[Tensor, "rows time"]
    """Prompt and completion."""
    mask: Bool[Tensor, "rows time"]
    """False at the prompt's padding only."""
    logprobs: Float[Tensor, "rows new"]
    lengths: Int[Tensor, " rows"]
    """Completion tokens so far."""
    finished: Bool[Tensor, " rows"]
    routes: Integer[Tensor, "rows time moe_layer k"] | None
    kept_ids: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of every position in turn: the row and the id of each token that truncated sampling kept."""

    @staticmethod
    def empty(
        prompts: Int[Tensor, "prompts start"],
        mask: Bool[Tensor, "prompts start"],
        group_size: int,
        new: int,
        layout: Layout | None,
    ) -> CompletionBuffers:
        rows, device = len(prompts) * group_size, prompts.device
        tokens = nn.functional.pad(prompts, (0, new)).repeat_interleave(group_size, 0)
        routes = None
        if layout is not None:
            shape = (*tokens.shape, len(layout.moe_layers), layout.top_k)
            routes = torch.full(shape, layout.unknown, dtype=layout.dtype, device=device)
        return CompletionBuffers(
            tokens=tokens,
            mask=nn.functional.pad(mask, (0, new), value=True).repeat_interleave(group_size, 0),
            logprobs=torch.zeros(rows, new, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            finished=torch.zeros(rows, dtype=torch.bool, device=device),
            routes=routes,
        )

    def decode_inputs(self, rows: Int[Tensor, " rows"], time: int) -> dict[str, Tensor]:
        """Mask and position of the token at `time - 1`, for rows whose prompts were padded."""
        mask = self.mask[rows, :time].long()
        return {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}

    def keep_routes(
        self, rows: Int[Tensor, " rows"] | slice, time: slice, recording: Recording | None, repeat: int = 1
    ) -> None:
        """Store the routes of the last forward; `repeat` rows share those of one prompt."""
        if recording is not None and self.routes is not None:
            ids = recording.take().unflatten(0, (-1, time.stop - time.start))
            self.routes[rows, time] = ids.repeat_interleave(repeat, 0) if repeat > 1 else ids

    def keep_tokens(self, rows: Int[Tensor, " rows"], may_be_drawn: Bool[Tensor, "rows vocabulary"]) -> None:
        """Store what truncated sampling kept at the next position of these rows."""
        row, token = may_be_drawn.nonzero(as_tuple=True)
        self.kept_ids.append((rows[row], token.int()))

    def kept_tokens(self) -> Sequence[KeptTokens | None]:
        """What was kept at every token of each row; None where nothing was stored."""
        if not self.kept_ids:
            return [None] * len(self.tokens)
        counts = torch.stack([row.bincount(minlength=len(self.tokens)) for row, _ in self.kept_ids], 1).int()
        order = torch.cat([row for row, _ in self.kept_ids]).argsort(stable=True)
        return KeptTokens(torch.cat([token for _, token in self.kept_ids])[order], counts).each(self.lengths.tolist())

    def cpu(self) -> CompletionBuffers:
        buffers: dict[str, Any] = {name: x.cpu() for name, x in vars(self).items() if isinstance(x, Tensor)}
        buffers["kept_ids"] = [(row.cpu(), token.cpu()) for row, token in self.kept_ids]
        return replace(self, **buffers | {"tokens": buffers["tokens"].to(torch.int32)})

    def trace(self, row: int, time: slice, recording: Recording | None) -> RoutingTrace | None:
        """The routes of one row, without its padding."""
        if recording is None or self.routes is None:
            return None
        tokens, mask, ids = (x[row : row + 1, time] for x in (self.tokens, self.mask, self.routes))
        return RoutingTrace.from_ids(ids, recording.layout, tokens=tokens, attention_mask=mask, check=False)


def cache_argument(model: nn.Module) -> str:
    """What a model calls its cache, as an argument and in its output: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
