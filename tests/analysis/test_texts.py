"""Texts: which tokens a line becomes, which of them are the response, and that a bad line is named."""

from __future__ import annotations

import json

import pytest
import torch

from moe_rl.analysis.checkpoints.texts import Texts
from moe_rl.errors import ConfigError
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.tasks.rollout_lines import read_rollouts

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def texts(tmp_path, *lines, template=None, max_tokens=99, batch_tokens=999, tokenizer=None):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = template
    return Texts(file, tokenizer, max_tokens=max_tokens, batch_tokens=batch_tokens)


def read(batch, b=0):
    """The text of a row and of its response."""
    tokens = byte_tokenizer()
    return tuple(tokens.decode(batch.tokens[b][mask[b]]) for mask in (batch.attention_mask, batch.response_mask))


@pytest.mark.parametrize(
    "line, whole, response",
    [
        ({"prompt": "2+2=", "response": "4 "}, "2+2=4 ", "4 "),
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4", "4"),
        ({"text": "four"}, "four", "our"),
        ({"prompt": "", "response": "four"}, "four", "our"),
        (
            {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2!"}]},
            "[user]2?[assistant]2!",
            "2!",
        ),
        ({"prompt": [{"role": "user", "content": "2?"}], "response": "2!"}, "[user]2?[assistant]2!", "2!"),
        ({"text": "</script> ünï"}, "</script> ünï", "/script> ünï"),
        ({"tokens": [50, 43, 50], "prompt_length": 2, "logprobs": [-0.5]}, "2+2", "2"),
        ({"prompt_tokens": [50, 43], "response_tokens": [50]}, "2+2", "2"),
        ({"input": "2+2=", "output": "4", "score": 1}, "2+2=4", "4"),
    ],
)
def test_every_form_marks_its_response(tmp_path, line, whole, response):
    (batch,) = texts(tmp_path, line, template=TEMPLATE).batches()
    assert read(batch) == (whole, response)


def test_the_rows_of_a_response_are_those_before_its_tokens(tmp_path):
    (batch,) = texts(tmp_path, {"prompt": "abc", "response": "de"}).batches()
    assert batch.response_rows[0].tolist() == [False, False, True, True, False]


def test_a_response_whose_reasoning_the_template_drops_is_refused(tmp_path):
    """DeepSeek-R1's does so; one that sets it apart by other spaces, as Qwen3's does, keeps it."""
    messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "<think>hm</think>2!"}]
    drops = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(ConfigError, match="line 1: .*template"):
        texts(tmp_path, {"messages": messages}, template=drops)
    spaces = TEMPLATE.replace("m.content", "m.content.replace('</think>', '</think>\n\n')")
    (batch,) = texts(tmp_path, {"messages": messages}, template=spaces).batches()
    assert read(batch)[1] == "<think>hm</think>\n\n2!"


@pytest.mark.parametrize(
    "response",
    [
        [{"role": "assistant", "content": "2!", "reasoning_content": "hm"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "2!"}, {"type": "thinking", "thinking": "hm"}]}],
        [
            {"role": "assistant", "content": "<think>hm</think>2!"},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "3!"},
        ],
    ],
)
def test_nor_is_reasoning_lost_of_a_field_of_its_own_of_a_part_or_of_an_earlier_turn(tmp_path, response):
    keeps_last = TEMPLATE.replace(
        "m.content",
        "(m.content if m.content is string and loop.last else "
        "m.content.split('>')[-1] if m.content is string else m.content[0].text)",
    )
    with pytest.raises(ConfigError, match="line 1: .*template"):
        texts(tmp_path, {"prompt": [{"role": "user", "content": "2?"}], "response": response}, template=keeps_last)


def test_batches_hold_every_line_once_in_the_budget_and_are_the_same_again(tmp_path):
    lines = [{"text": "x" * (2 + (7 * i) % 31)} for i in range(60)]
    found = texts(tmp_path, *lines, batch_tokens=100)
    first, again = list(found.batches()), list(found.batches())
    assert sorted(line for batch in first for line in batch.lines) == list(range(1, 61))
    assert all(batch.tokens.numel() <= 100 for batch in first)
    assert all(torch.equal(a.tokens, b.tokens) and a.lines == b.lines for a, b in zip(first, again, strict=True))
    assert found.sizes == [int(batch.attention_mask.sum()) for batch in first]
    assert found.lines == 60 and found.cut == 0


def test_a_longer_line_is_cut_and_counted(tmp_path):
    found = texts(tmp_path, {"prompt": "abc", "response": "defgh"}, {"text": "ab"}, max_tokens=5)
    assert found.cut == 1
    (batch,) = found.batches()
    assert read(batch, 1) == ("abcde", "de")


@pytest.mark.parametrize(
    "line, says",
    [
        ("{broken", "{broken"),
        ({"prompt": "2"}, "no response"),
        ({"text": "a"}, "no token"),
        ({"messages": [{"role": "user", "content": "2"}]}, "no response|prompt must be one"),
        (
            {"messages": [{"role": "assistant", "content": "2"}, {"role": "user", "content": "2"}]},
            "not from the assistant",
        ),
        ({"tokens": [1, 2], "prompt_length": 2}, "prompt_length is 2"),
        ({"tokens": [1, 2, 3], "prompt_length": 1, "logprobs": [-1.0]}, "1 log-probs for 2"),
        ({"tokens": [1, 999], "prompt_length": 1}, "token id 999"),
    ],
    ids=str,
)
def test_a_bad_line_is_named(tmp_path, line, says):
    with pytest.raises(ConfigError, match=f"line 2: .*({says.replace('[', chr(92) + '[')})"):
        texts(tmp_path, {"text": "fine"}, line)


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\n')
    (batch,) = Texts(tmp_path / "data.jsonl", byte_tokenizer(), max_tokens=9, batch_tokens=9).batches()
    assert read(batch)[0] == "ab"


def test_a_response_that_was_cut_off_whole_is_counted(tmp_path):
    found = texts(tmp_path, {"prompt": "abcdef", "response": "gh"}, {"text": "ab"}, max_tokens=5)
    assert (found.cut, found.lost) == (1, 1)
    with pytest.raises(ConfigError, match="--max-tokens 5"):
        texts(tmp_path, {"prompt": "abcdef", "response": "gh"}, max_tokens=5)


def test_a_misspelt_key_is_an_error_where_all_are_wanted(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"tokens": [1, 2], "prompt_length": 1, "temprature": 0.7}\n')
    ((_, line_number, line),) = read_rollouts(tmp_path / "data.jsonl")
    assert (line_number, line.temperature) == (1, 1.0)
    with pytest.raises(ConfigError, match="line 1.*temprature.*mean temperature"):
        list(read_rollouts(tmp_path / "data.jsonl", unknown_keys=False))
