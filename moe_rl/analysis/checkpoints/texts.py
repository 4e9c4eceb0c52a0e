"""A file of rollouts or texts → token ids with the response marked, streamed in batches of similar length."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.models.tokens import plain_tokens
from moe_rl.tasks.rollout_lines import RolloutLine, read_rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 1024
"""Lines that are held at a time and ordered by length, so that little of a batch is padding."""
SAID = ("content", "text", "reasoning_content", "reasoning", "thinking")
"""Where messages, and parts of them, have text."""


@dataclass(frozen=True)
class Text:
    """One line as the model reads it."""

    line: int
    """From 1."""
    tokens: tuple[int, ...]
    response: int
    """Index of the first token of the response; 1 for plain text, whose every predicted token counts."""
    cut: bool
    """Whether `max_tokens` cut it."""


@dataclass(frozen=True)
class TextBatch:
    """Some lines, right-padded."""

    lines: tuple[int, ...]
    tokens: Int64[Tensor, "batch time"]
    attention_mask: Bool[Tensor, "batch time"]
    response_mask: Bool[Tensor, "batch time"]
    cut: int
    """Lines that `max_tokens` cut."""
    lost: int
    """Of these, lines that kept nothing of their response: their prompts count, but no response does."""

    @property
    def response_rows(self) -> Bool[Tensor, "batch time"]:
        """Inputs whose *next* token belongs to the response: the rows that decide it."""
        return nn.functional.pad(self.response_mask[:, 1:], (0, 1))


class Texts:
    """The lines of a file of rollouts (`tasks.rollout_lines`): token ids, prompt and response, chat messages, or text.

    A prompt that is a string is taken verbatim, with the special tokens that the tokenizer puts in front; messages go
    through the chat template. Raises ConfigError, with the line, before anything is computed.
    """

    def __init__(self, file: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, batch_tokens: int):
        self.file, self.tokenizer = Path(file).expanduser(), tokenizer
        self.max_tokens, self.batch_tokens = max_tokens, batch_tokens
        if max_tokens < 2 or batch_tokens < 1:
            raise ConfigError(f"--max-tokens {max_tokens} must be at least 2, --batch-tokens {batch_tokens} at least 1")
        if not self.file.is_file():
            raise ConfigError(f"--data {self.file}: there is no such file")
        self.lines = self.cut = self.lost = 0
        self.sizes: list[int] = []
        """Tokens of every batch. Encoding it all once also shows every bad line before a model is loaded."""
        for batch in self.batches():
            self.lines += len(batch.lines)
            self.cut += batch.cut
            self.lost += batch.lost
            self.sizes.append(int(batch.attention_mask.sum()))
        if self.lost == self.lines:
            raise ConfigError(f"--data {self.file}: every prompt fills --max-tokens {max_tokens}. Raise it.")

    def batches(self) -> Iterator[TextBatch]:
        """The same batches every time: consecutive windows of lines, each ordered by length and cut at
        `batch_tokens` tokens, padding included."""
        window: list[Text] = []
        for where, n, line in read_rollouts(self.file):
            window.append(self._encode(line, n, where))
            if len(window) == WINDOW:
                yield from self._cut(window)
                window = []
        yield from self._cut(window)

    def _cut(self, window: list[Text]) -> Iterator[TextBatch]:
        window.sort(key=lambda text: (len(text.tokens), text.line))
        return map(_collate, cut_batches(window, self.batch_tokens))

    def _encode(self, line: RolloutLine, n: int, where: str) -> Text:
        tokens, start = encode_line(line, where, self.tokenizer)
        if max(tokens, default=0) >= (size := len(self.tokenizer)):
            raise ConfigError(f"{where}: token id {max(tokens)}, but the tokenizer has {size} tokens")
        start = max(start, 1)
        if start >= len(tokens):
            raise ConfigError(f"{where}: no token of the response has another one before it. Remove the line.")
        return Text(n, tuple(tokens[: self.max_tokens]), start, len(tokens) > self.max_tokens)


def cut_batches(texts: Iterable[Any], most: int) -> Iterator[list[Any]]:
    """Objects with `tokens`, in their order, cut so that a forward holds at most so many tokens, padding included; one
    of them is never cut."""
    rows: list[Any] = []
    longest = 0
    for text in texts:
        longest = max(longest, len(text.tokens))
        if rows and (len(rows) + 1) * longest > most:
            yield rows
            rows, longest = [], len(text.tokens)
        rows.append(text)
    if rows:
        yield rows


def encode_line(line: RolloutLine, where: str, tokenizer: PreTrainedTokenizerBase | None) -> tuple[list[int], int]:
    """The token ids of prompt and response, and how many are the prompt's. A prompt that is a string is taken verbatim,
    with the special tokens that the tokenizer puts in front; messages go through the chat template."""
    prompt, response = line.prompt, line.response
    if line.tokens is not None and line.prompt_length is not None:
        return line.tokens, line.prompt_length
    if tokenizer is None:
        raise ConfigError(f"{where}: text needs a tokenizer. Write token ids.")
    if isinstance(prompt, list):
        messages = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
        return _encode_chat(prompt, messages, where, tokenizer)
    assert isinstance(response, str), "a line has two strings or two lists"
    head = plain_tokens(prompt, tokenizer) if prompt else []
    body = tokenizer.encode(response, add_special_tokens=False) if head else plain_tokens(response, tokenizer)
    return head + body, len(head)


def _encode_chat(
    prompt: list[Any], response: list[Any], where: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], int]:
    """The whole conversation, and how many of its tokens it shares with the prompt alone."""
    if not tokenizer.chat_template:
        raise ConfigError(f"{where}: the tokenizer has no chat template. Write prompt and response as text.")
    render: Any = partial(tokenizer.apply_chat_template, return_dict=False)
    try:
        tokens, text = (render([*prompt, *response], tokenize=ids) for ids in (True, False))
        head = render(prompt, add_generation_prompt=True, tokenize=True)
    except Exception as error:  # templates are programs of their own, with errors of their own
        raise ConfigError(f"{where}: the chat template does not accept these messages ({error})") from error
    text = "".join(text.split())
    parts = (written for part in _said(response) for written in (part, json.dumps(part, ensure_ascii=False)[1:-1]))
    if not all(any("".join(form.split()) in text for form in forms) for forms in zip(parts, parts, strict=True)):
        raise ConfigError(f"{where}: the chat template leaves out a part of the response. Write it as text.")
    shared = next((i for i, (a, b) in enumerate(zip(head, tokens, strict=False)) if a != b), len(head))
    return list(tokens), shared


def _said(response: list[Any]) -> Iterator[str]:
    """All that an assistant says in these messages, in parts or whole, its reasoning included."""
    for message in response:
        if isinstance(message, dict) and message.get("role") == "assistant":
            content = message.get("content")
            for part in (message, *(content if isinstance(content, list) else ())):
                yield from (part[key] for key in SAID if isinstance(part, dict) and isinstance(part.get(key), str))


def _collate(rows: list[Text]) -> TextBatch:
    shape = (len(rows), max(len(row.tokens) for row in rows))
    tokens, mask, response = torch.zeros(shape, dtype=torch.long), torch.zeros(shape).bool(), torch.zeros(shape).bool()
    for b, row in enumerate(rows):
        tokens[b, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[b, : len(row.tokens)] = True
        response[b, row.response : len(row.tokens)] = True
    cut, lost = (sum(flags) for flags in ([row.cut for row in rows], (~response.any(1)).tolist()))
    return TextBatch(tuple(row.line for row in rows), tokens, mask, response, cut, lost)
