"""The page of a flip, as a file: what it holds, that text cannot become markup, and what is refused."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch

from moe_rl import cli
from moe_rl.analysis.response_page import write_response_page
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.tokens import byte_tokenizer, spell
from moe_rl.routing import Layout, MoeLayer, RoutingTrace

EVIL = ["</script>", "<script>window.hacked=1</script>", "<!--", "<img src=x onerror=window.hacked=1>", "&lt;"]
"""Tokens of their own, as a tokenizer for code may well have them: ids from 258 on."""


def save_tokenizer(folder):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(EVIL)
    tokenizer.save_pretrained(folder)
    return tokenizer


def bytes_of(text):
    return list(text.encode()) if isinstance(text, str) else text


def trace_file(path, ids, texts, experts=8, gates=True, moe_layers=3, pad=0):
    """Rows of bytes (or of ids), right-padded; gates are 0.75 and 0.25."""
    tokens = [bytes_of(text) for text in texts]
    time = max(map(len, tokens)) + pad
    mask = torch.arange(time)[None] < torch.tensor([len(row) for row in tokens])[:, None]
    padded = torch.tensor([row + [0] * (time - len(row)) for row in tokens])
    layout = Layout(
        tuple(MoeLayer(f"model.layers.{2 * s}.gate", 2 * s, experts, 2) for s in range(moe_layers)), "tiny-0"
    )
    wide = torch.full((len(tokens), time, moe_layers, 2), -1)
    wide[mask] = ids[: int(mask.sum())]
    weights = torch.tensor([0.75, 0.25]).expand(wide.shape).half()
    beside = {"response": mask & (torch.arange(time) >= 3)} | ({"gates": weights} if gates else {})
    RoutingTrace.from_ids(wide, layout, tokens=padded, attention_mask=mask).save(path, beside)
    return path


def pair(tmp_path, texts=("hello",), flips=((1, 0),), pad=0, **settings):
    """Two files: everything on experts 0 and 1; after, expert 7 instead of 1 at the given (token, MoE layer)."""
    n = sum(len(bytes_of(text)) for text in texts)
    ids = torch.tensor([0, 1]).expand(n, settings.get("moe_layers", 3), 2).clone()
    before = trace_file(tmp_path / "before.safetensors", ids, texts, **settings)
    for token, moe_layer in flips:
        ids[token, moe_layer] = torch.tensor([7, 0])
    return before, trace_file(tmp_path / "after.safetensors", ids, texts, pad=pad, **settings)


def embedded(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1))


def unpacked(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


def test_the_page_holds_both_routes_gates_and_the_text(tmp_path, tokenizer):
    before, after = pair(tmp_path, pad=2)
    write_response_page([before, after], tmp_path / "page.html")
    data = embedded(tmp_path / "page.html")
    ids = [unpacked(side, "u1").reshape(5, 3, 2) for side in data["experts"]]
    assert (ids[0] == [0, 1]).all()
    assert ids[1][1, 0].tolist() == [7, 0] and (np.delete(ids[1].reshape(15, 2), 3, 0) == [0, 1]).all()
    assert unpacked(data["gates"][1], "<f2").reshape(5, 3, 2)[0, 0].tolist() == [0.75, 0.25]
    assert data["tokens"] == list("hello") and data["ids"] == list(b"hello")
    assert data["response"] == [False, False, False, True, True]
    assert [moe_layer["layer"] for moe_layer in data["moe_layers"]] == [0, 2, 4]


def test_text_of_a_model_cannot_end_its_element(tmp_path, tokenizer):
    write_response_page(pair(tmp_path, [[97, *range(258, 258 + len(EVIL))]]), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert embedded(tmp_path / "page.html")["tokens"] == ["a", *EVIL]
    assert page.count("<script") == 2 and page.count("</script>") == 2 and "<!--" not in page


def test_a_file_name_cannot_become_markup_either(tmp_path):
    before, after = pair(tmp_path)
    evil = before.rename(tmp_path / "<img src=x onerror=alert(1)>.safetensors")
    write_response_page([evil, after], tmp_path / "page.html")
    assert "<img" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_row_that_changed_most_is_shown_unless_another_is_asked_for(tmp_path):
    files = pair(tmp_path, ["hello", "world"], [(1, 0), (6, 0), (7, 2)])
    assert write_response_page(files, tmp_path / "page.html") == 1
    assert write_response_page(files, tmp_path / "page.html", row=0) == 0
    with pytest.raises(ConfigError, match="--row 2"):
        write_response_page(files, tmp_path / "page.html", row=2)


def test_without_a_tokenizer_ids_are_shown_and_without_gates_none(tmp_path):
    write_response_page(pair(tmp_path, gates=False), tmp_path / "page.html")
    data = embedded(tmp_path / "page.html")
    assert data["tokens"][0] == "104 " and data["gates"] == [None, None]


@pytest.mark.parametrize(
    "other, says",
    [
        ({"texts": ["hullo"]}, "row 0 of .* different tokens"),
        ({"texts": ["hello", "x"]}, "1 responses, .* 2"),
        ({"experts": 9}, "num_experts=9"),
    ],
)
def test_routes_of_other_tokens_or_another_model_are_refused(tmp_path, other, says):
    (tmp_path / "other").mkdir()
    with pytest.raises(RoutingError, match=says):
        write_response_page([pair(tmp_path)[0], pair(tmp_path / "other", **other)[1]], tmp_path / "page.html")


@pytest.mark.parametrize("given", [["moved"], ["moved/traces/before", "moved/traces/after"]])
def test_a_folder_of_one_trace_stands_for_it(tmp_path, monkeypatch, given, capsys):
    monkeypatch.chdir(tmp_path)
    for side, file in zip(("before", "after"), pair(tmp_path), strict=True):
        (folder := tmp_path / "moved" / "traces" / side).mkdir(parents=True)
        file.rename(folder / "000000.safetensors")
    assert cli.main(["checkpoint", "view", *given]) == 0
    names = embedded(tmp_path / "view.html")["names"]
    assert [name.split("/")[-2:] for name in names] == [[side, "000000.safetensors"] for side in ("before", "after")]
    (tmp_path / "moved/traces/after/000001.safetensors").write_bytes(b"")
    assert cli.main(["checkpoint", "view", *given]) == 2
    assert "2 traces" in capsys.readouterr().err


def test_every_token_is_spelled_and_together_they_are_the_text():
    tokenizer = byte_tokenizer()
    text = "a é中 \n b"
    spelled = spell(tokenizer.encode(text), tokenizer)
    assert spelled == ["a", " ", "·", "é", "·", "·", "中", " ", "\n", " ", "b"]
    assert len(spell([0xE4, 0x61], tokenizer)) == 2  # half a character, then another one


def test_the_page_asks_for_nothing_outside_itself(tmp_path):
    write_response_page(pair(tmp_path), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    loads = r"https?://|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttpRequest|innerHTML"
    assert not re.search(loads, page)
