"""A tokenizer of bytes, and prompts and answers as the model reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_rl.errors import ConfigError
from moe_rl.tasks.base import AnyTask, Environment, shortened
from moe_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def byte_tokenizer(vocab_size: int = 258) -> PreTrainedTokenizerBase:
    """Bytes as tokens: any text becomes its UTF-8 bytes and comes back exactly.

    Ids 0 … 255 are the bytes, then come end and padding. The text `<|end|>` in a prompt is seven bytes, not the end.
    With fewer than 258 ids only the first bytes from the space (32) on are known, and one id marks all others;
    `encode_prompts` refuses prompts that contain it.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    complete = vocab_size >= 258
    letters = [letter for _, letter in sorted(bytes_to_unicode().items())]  # as the ByteLevel pre-tokenizer writes them
    known = letters if complete else letters[32 : 32 + vocab_size - 3]
    vocab = {letter: i for i, letter in enumerate(known)}
    if complete:
        bpe = BPE(vocab=vocab, merges=[])
    else:
        bpe = BPE(vocab=vocab | {"<|unknown|>": len(vocab)}, merges=[], unk_token="<|unknown|>")
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **({} if complete else {"unk_token": "<|unknown|>"}),
    )


def encode_prompts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prompts with `tokens` filled in: as one user turn where the tokenizer has a chat template, else as plain text
    with the special tokens that the tokenizer puts in front."""
    chat = bool(tokenizer.chat_template)
    return [dataclasses.replace(p, tokens=tuple(_encode(p.text, tokenizer)), chat=chat) for p in prompts]


def plain_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a text to be continued: with the tokenizer's special tokens in front, unless the text has them,
    and without those behind."""
    bare = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return bare
    ids = tokenizer.encode(text)
    if not bare:  # only special tokens
        return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    return next((ids[:end] for end in range(len(bare), len(ids) + 1) if ids[end - len(bare) : end] == bare), ids)


def completion_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a whole completion, EOS included."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def demonstrated(task: AnyTask, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Encoded prompts for a cold start. The last turn of an environment's demonstration is the answer; the others
    become a part of the prompt. Raises ConfigError for a transcript that does not end with the policy."""
    show = getattr(task, "demonstration", None)
    if not isinstance(task, Environment) or show is None:
        return prompts
    examples = []
    for prompt in prompts:
        transcript = tuple(show(prompt))
        if len(transcript) % 2 == 0:
            raise ConfigError(f"{type(task).__name__}: the demonstration {shortened(transcript)} ends with a reply")
        tokens = list(prompt.tokens)
        for text, reply in zip(transcript[:-1:2], transcript[1::2], strict=True):
            tokens += [*completion_tokens(text, tokenizer), *reply_tokens(reply, tokenizer, ended=True)]
        examples.append(dataclasses.replace(prompt, tokens=tuple(tokens), answer=transcript[-1]))
    return examples


def reply_tokens(text: str, tokenizer: PreTrainedTokenizerBase, ended: bool) -> tuple[int, ...]:
    """The ids between two turns of the policy, for the reply `text` of an environment. Earlier tokens stay as they are.

    Without a chat template it is the plain text; else the user's turn with the template's ids around it. `ended`:
    whether the policy wrote the end token itself; else the template's end comes first. Raises ConfigError for text that
    the tokenizer cannot encode, and for a template that rewrites earlier turns.
    """
    if not tokenizer.chat_template:
        return tuple(_known(tokenizer.encode(text, add_special_tokens=False), "reply", text, tokenizer))
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, {"role": "user", "content": text}]
    before, after = _templated(tokenizer, turns[:2]), _templated(tokenizer, turns, prompt=True)
    if closing := before.count(tokenizer.eos_token_id):  # by number: templates drop thoughts from earlier turns
        ends = [i for i, token in enumerate(after) if token == tokenizer.eos_token_id]
        return tuple(_known(after[ends[closing - 1] + ended :], "reply", text, tokenizer))
    if after[: len(before)] != before:
        raise ConfigError(
            "the tokenizer's chat template changes earlier turns, so a multi-turn rollout cannot continue. Use a "
            "template that ends each turn with the end token."
        )
    return tuple(_known(after[len(before) :], "reply", text, tokenizer))


def spell(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each token's own text, spaces in front included; a token that only begins a character reads ·."""
    texts, before, start = [], 0, 0
    for end in range(1, len(ids) + 1):  # decoded with the token before, without which some tokenizers drop a space
        known, longer = (
            str(tokenizer.decode(part, clean_up_tokenization_spaces=False))
            for part in (ids[before:start], ids[before:end])
        )
        if longer.endswith("\ufffd") and end - start < 4 and end < len(ids):
            texts.append("·")
            continue
        texts.append(longer[len(known) :])
        before, start = start, end
    return texts


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template:
        ids = _templated(tokenizer, [{"role": "user", "content": text}], prompt=True)
    else:
        ids = plain_tokens(text, tokenizer)
    if not ids:
        raise ConfigError(f"the prompt {text!r} has no tokens, but one must predict the first token of the response")
    return _known(ids, "prompt", text, tokenizer)


def _templated(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], prompt: bool = False) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    return ids


def _known(ids: list[int], kind: str, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids. Raises ConfigError for the id of unknown text."""
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise ConfigError(
            f"the tokenizer cannot encode part of the {kind} {text[:80]!r}. Choose a model whose vocabulary (now "
            f"{len(tokenizer)} tokens) covers the task."
        )
    return ids
