"""Files of rollouts, the command and its exit codes."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest

from moe_rl import cli
from moe_rl.analysis.diagnose.responses import Rollouts
from moe_rl.errors import ConfigError
from moe_rl.models.load import save_checkpoint
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.routing import layout_of
from tests.benchmarks.broken_engines import LISTED, STRANGE, Engine


@pytest.fixture(scope="module")
def engine():
    return Engine("qwen3_moe", 8)


def read(engine, entries, **settings):
    settings = {"vocabulary": 48, "tokenizer": engine.tokenizer} | settings
    return Rollouts(entries, layout_of(engine.model), **settings)


def lines_of(entries):
    """As JSON: routes as the base64 of a .npy file."""
    for e in entries:
        file = io.BytesIO()
        np.save(file, e["routes"].astype(np.uint8))
        yield json.dumps(e | {"routes": base64.b64encode(file.getvalue()).decode()})


@pytest.fixture(scope="module")
def there(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnose")
    save_checkpoint(engine.model, engine.tokenizer, folder / "step")
    files = {
        "good": engine.honest(),
        "shifted": LISTED["row_late"].make(engine),
        "other": STRANGE["unknown_weights"].make(engine),
        "deepseek": Engine("deepseek_v3", 2).honest(),
    }
    for name, entries in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines_of(entries)) + "\n")
    return folder


@pytest.mark.parametrize(("file", "code"), [("good", 0), ("shifted", 1), ("other", 1), ("deepseek", 2)])
def test_the_exit_code_is_that_of_a_fault(there, tmp_path, capsys, monkeypatch, file, code):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "page.html"
    assert cli.main(["diagnose", str(there / f"{file}.jsonl"), str(there / "step"), "--out", str(out)]) == code
    printed = capsys.readouterr()
    assert out.exists() is (code < 2) and bool(printed.err) is (code == 2)
    if code < 2:
        page = out.read_text()
        assert "<script" not in page and "unconstrained" in page and "ids forced" in printed.out


GOOD = {"tokens": [5, 6, 7, 8], "prompt_length": 2, "logprobs": [-1.0, -2.0]}
ROWS = [[[0, 1]] * 4] * 3


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ({"logprobs": [-1.0, float("nan")]}, "nan"),
        ({"logprobs": [-1.0, 0.5]}, "0.5"),
        ({"logprobs": [-1.0]}, "1 log-probs"),
        ({"logprobs": [None, None]}, "log-prob"),
        ({"tokens": [5, 6], "logprobs": []}, "2 of 2 tokens"),
        ({"temprature": 0.7}, "'temprature'"),
        ({"tokens": [5, 6, 7, 48]}, "48"),
        ({"tokens": None}, "no response"),
        ({"tokens": None, "prompt": "ab", "response": "cd", "logprobs": [-1.0] * 9}, "9 log-probs"),
        ({"routes": [[[0, 8]] * 4] * 3}, r"\[0, 8\]"),
        ({"routes": (np.array(ROWS) + 1 + 6 * (np.arange(3) == 2)[:, None, None]).tolist()}, "from 1"),
        ({"routes": [[[0, 1]] * 6] * 3}, "6"),
        ({"routes": ROWS[:1]}, "3 rows"),
        ({"routes": ROWS, "gates": [[[0.5]]]}, "gates"),
        ({"routes": "AAAAAAAAAAAAAAAAAAAAAA==", "routes_dtype": "(2,)O"}, "routing has the dtype"),
    ],
)
def test_a_bad_line_is_refused_with_its_value(engine, line, value):
    with pytest.raises(ConfigError, match=f"rollout 1.*{value}"):
        read(engine, [GOOD | line])
    assert read(engine, [GOOD]).count == 1


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["empty.jsonl", "step"], "empty"),
        (["cut.jsonl", "step"], "line 1"),
        (["good.jsonl", "qwen3_moe-tiny"], "preset"),
        (["good.jsonl", "step", "--engine-dtype", "int8"], "int8"),
        (["good.jsonl", "step", "--out", "."], "--out ."),
    ],
)
def test_a_bad_request_is_refused_with_its_value(there, capsys, monkeypatch, words, value):
    monkeypatch.chdir(there)
    (there / "empty.jsonl").write_text("")
    (there / "cut.jsonl").write_text('{"tokens": [5, 6')
    assert cli.main(["diagnose", *words]) == 2
    printed = capsys.readouterr().err
    assert value in printed and printed.count("\n") == 1, printed


def test_a_large_file_is_drawn_from(engine):
    entry = engine.honest()[0]
    drawn = [read(engine, (entry for _ in range(500)), limit=8, seed=seed) for seed in (0, 0, 1)]
    lines = [sorted(r.line for r in x.responses) for x in drawn]
    assert drawn[0].count == 500 and len(lines[0]) == 8
    assert lines[0] == lines[1] != lines[2] and max(lines[0]) > 100


def test_a_text_gets_the_end_token_that_its_log_probs_count(engine):
    (response,) = read(engine, [{"prompt": "12", "response": "34", "logprobs": [-1.0] * 3}]).responses
    assert response.prompt == 2 and response.tokens[-1] == engine.tokenizer.eos_token_id


@pytest.mark.parametrize("text", ["ab", "<|pad|>ab"])
def test_a_prompt_as_text_has_one_bos_and_no_end(engine, text):
    """A rendered chat template may bring the BOS along."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|pad|>"
    tokenizer.encode = lambda text, add_special_tokens=True: (
        [257] * (add_special_tokens + text.startswith("<|pad|>"))
        + list(text.removeprefix("<|pad|>").encode())
        + [256] * add_special_tokens
    )
    lines = [{"prompt": text, "response": "c", "logprobs": [-1.0]}]
    (response,) = read(engine, lines, vocabulary=258, tokenizer=tokenizer).responses
    assert response.tokens == (257, 97, 98, 99) and response.prompt == 3
