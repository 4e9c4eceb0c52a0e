"""A JSONL file of texts → token ids with the response marked, streamed in batches of similar length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from moe_rl.errors import ConfigError
from moe_rl.models.tokens import plain_tokens
from moe_rl.tasks.json_lines import objects

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 1024
"""Lines that are held at a time and ordered by length, so that little of a batch is padding."""
SAID = ("content", "text", "reasoning_content", "reasoning", "thinking")
"""Where messages, and parts of them, have text."""
FORMS = '{"prompt": …, "response": …}, {"messages": [{"role": …, "content": …}, …]} or {"text": …}'


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

    @property
    def prompt_rows(self) -> Bool[Tensor, "batch time"]:
        """Inputs whose next token belongs to the prompt."""
        return nn.functional.pad(self.attention_mask[:, 1:], (0, 1)) & ~self.response_rows


class Texts:
    """The lines of a JSONL file: prompt and response, chat messages, or text.

    `prompt` (string) and `response` (or `completion`) are taken verbatim, with the special tokens that the tokenizer
    puts in front. Messages — as `messages`, or as lists in `prompt` and `response` — go through the chat template; the
    last one, the assistant's, is the response. Raises ConfigError, with the line, before anything is computed.
    """

    def __init__(self, file: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, batch_tokens: int):
        self.file, self.tokenizer = Path(file).expanduser(), tokenizer
        self.max_tokens, self.batch_tokens = max_tokens, batch_tokens
        if max_tokens < 2:
            raise ConfigError(f"--max-tokens {max_tokens} must be at least 2")
        if batch_tokens < 1:
            raise ConfigError(f"--batch-tokens {batch_tokens} must be at least 1")
        check_file(self.file)
        self.lines = self.cut = self.lost = 0
        self.sizes: list[int] = []
        """Tokens of every batch. Encoding it all once also shows every bad line before a model is loaded."""
        for batch in self.batches():
            self.lines += len(batch.lines)
            self.cut += batch.cut
            self.lost += batch.lost
            self.sizes.append(int(batch.attention_mask.sum()))
        if self.lost == self.lines:
            raise ConfigError(f"--data {self.file}: none of {self.lines} lines has a response left, because every "
                              f"prompt fills --max-tokens {max_tokens}. Raise it.")

    def batches(self) -> Iterator[TextBatch]:
        """The same batches every time: consecutive windows of lines, each ordered by length and cut at
        `batch_tokens` tokens, padding included."""
        window: list[Text] = []
        for where, n, entry in objects(self.file):
            window.append(self._encode(entry, n, where))
            if len(window) == WINDOW:
                yield from self._cut(window)
                window = []
        yield from self._cut(window)

    def _cut(self, window: list[Text]) -> Iterator[TextBatch]:
        rows: list[Text] = []
        for text in sorted(window, key=lambda t: (len(t.tokens), t.line)):
            if rows and (len(rows) + 1) * len(text.tokens) > self.batch_tokens:
                yield _collate(rows)
                rows = []
            rows.append(text)
        if rows:
            yield _collate(rows)

    def _encode(self, entry: Mapping[str, Any], n: int, where: str) -> Text:
        prompt, response = _parts(entry, where)
        if isinstance(prompt, list):
            tokens, start = self._chat(prompt, response, where)
        else:
            assert isinstance(response, str), "_parts gives two strings or two lists"
            head = plain_tokens(prompt, self.tokenizer) if prompt else []
            body = (self.tokenizer.encode(response, add_special_tokens=False) if head else
                    plain_tokens(response, self.tokenizer))
            tokens, start = head + body, len(head)
        start = max(start, 1)
        if len(tokens) < 2 or start >= len(tokens):
            raise ConfigError(f"{where}: the response has no token with another token before it ({len(tokens)} "
                              "tokens). Remove the line.")
        return Text(n, tuple(tokens[: self.max_tokens]), start, len(tokens) > self.max_tokens)

    def _chat(self, prompt: list[Any], response: Any, where: str) -> tuple[list[int], int]:
        """The whole conversation, and how many of its tokens it shares with the prompt alone."""
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{where} contains chat messages, but the tokenizer has no chat template. Write prompt "
                              "and response as text.")
        try:
            tokens = self.tokenizer.apply_chat_template([*prompt, *response], tokenize=True, return_dict=False)
            head = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            whole: Any = self.tokenizer.apply_chat_template([*prompt, *response], tokenize=False)
        except Exception as error:  # templates are programs of their own, with errors of their own
            raise ConfigError(f"{where}: the chat template does not accept these messages ({error})") from error
        whole = "".join(whole.split())
        if any("".join(text.split()) not in whole and "".join(json.dumps(text, ensure_ascii=False)[1:-1].split()) not in
               whole for text in _said(response)):
            raise ConfigError(f"{where}: the chat template leaves out a part of the response, such as its reasoning. "
                              "Write prompt and response as text.")
        shared = next((i for i, (a, b) in enumerate(zip(head, tokens, strict=False)) if a != b), len(head))
        return list(tokens), shared


def _said(response: list[Any]) -> Iterator[str]:
    """All that an assistant says in these messages, in parts or whole, its reasoning included."""
    for message in response:
        if isinstance(message, dict) and message.get("role") == "assistant":
            content = message.get("content")
            for part in (message, *(content if isinstance(content, list) else ())):
                yield from (part[key] for key in SAID if isinstance(part, dict) and isinstance(part.get(key), str))


def check_file(file: Path) -> str:
    """A digest of the file. Raises ConfigError for the first line without text, or if there is none with."""
    if not file.is_file():
        what = "is a folder; give one JSONL file" if file.is_dir() else "there is no such file"
        raise ConfigError(f"--data {file}: {what} (searched at {file.absolute()})")
    count = 0
    for count, (where, _, entry) in enumerate(objects(file), start=1):  # noqa: B007
        _parts(entry, where)
    if not count:
        raise ConfigError(f"--data {file} is empty. Write one JSON object per line: {FORMS}.")
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]


def _parts(entry: Mapping[str, Any], where: str) -> tuple[str | list, str | list]:
    """Prompt and response, both strings or both lists of messages; plain text has the prompt ''."""
    prompt, response = entry.get("prompt"), entry.get("response", entry.get("completion"))
    if isinstance(entry.get("messages"), list):
        prompt, response = entry["messages"][:-1], entry["messages"][-1:]
    elif prompt is None and response is None:
        prompt, response = "", entry.get("text")
    if isinstance(prompt, str) and isinstance(response, str) and response:
        return prompt, response
    if isinstance(prompt, list) and isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    if isinstance(prompt, list) and isinstance(response, list) and prompt and response:
        last = response[-1]
        if isinstance(last, dict) and last.get("role") == "assistant":
            return prompt, response
        raise ConfigError(f"{where}: the last message is not from the assistant, so there is no response. Remove the "
                          "line.")
    if response == "":
        raise ConfigError(f"{where}: the response is empty. Remove the line.")
    raise ConfigError(f"{where}: no text; the keys are {', '.join(map(repr, entry)) or 'none'}. Expected {FORMS}.")


def _collate(rows: list[Text]) -> TextBatch:
    shape = (len(rows), max(len(row.tokens) for row in rows))
    tokens, mask, response = torch.zeros(shape, dtype=torch.long), torch.zeros(shape).bool(), torch.zeros(shape).bool()
    for b, row in enumerate(rows):
        tokens[b, : len(row.tokens)] = torch.tensor(row.tokens)
        mask[b, : len(row.tokens)] = True
        response[b, row.response : len(row.tokens)] = True
    cut, lost = (sum(flags) for flags in ([row.cut for row in rows], (~response.any(1)).tolist()))
    return TextBatch(tuple(row.line for row in rows), tokens, mask, response, cut, lost)
