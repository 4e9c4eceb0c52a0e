"""Which rollouts of a step are kept, what is said of each, and that it stays small."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from moe_rl.models.tokens import byte_tokenizer
from moe_rl.rollouts import log
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.log import choose_rollouts, rollout_rows
from moe_rl.types import Batch, Prompt, Rollout

TOKENIZER = byte_tokenizer()


def batch_of(texts: list[tuple[str, str]], rewards: list[float]):
    rollouts = [
        Rollout(Prompt(p, tokens=tuple(p.encode())), tuple(r.encode()), torch.zeros(len(r.encode())), r, i != 0)
        for i, (p, r) in enumerate(texts)
    ]
    sampled = collate(rollouts, [i // 2 for i in range(len(texts))], rewards, 257)
    return Batch(**vars(sampled), old_logprobs=sampled.rollout_logprobs, advantages=sampled.rollout_logprobs * 0)


def rows_of(batch, log_ratio=None, clipped=None, flips=None, step=1, most=8):
    zeros = torch.zeros(batch.tokens.shape)
    flips = zeros.long() if flips is None else flips
    return rollout_rows(
        step,
        batch,
        zeros if log_ratio is None else log_ratio,
        zeros.to(torch.int8) if clipped is None else clipped,
        lambda rows: flips[rows],
        TOKENIZER,
        most,
    )


def test_a_row_by_hand():
    batch = batch_of([("2+2=", "4é"), ("2+2=", "5")], [1.0, 0.0])
    advantages = torch.where(batch.response_mask, torch.tensor([[0.5], [-0.5]]), 0.0)
    log_ratio, clipped, flips = (torch.zeros(2, 7) for _ in range(3))
    log_ratio[0, 4:7], clipped[0, 5], flips[0, 4:6] = torch.tensor([0.25, -1.5, 0.0]), -1, torch.tensor([2.0, 1.0])
    first, second = rows_of(replace(batch, advantages=advantages), log_ratio, clipped.to(torch.int8), flips.long())
    assert json.loads(first.pop("response")) == [["4", 0.25, 0, 2], ["·", -1.5, -1, 1], ["é", 0.0, 0, 0]]
    assert first == {
        "step": 1,
        "rollout": 0,
        "group": 0,
        "reward": 1.0,
        "advantage": 0.5,
        "response_tokens": 3.0,
        "truncated": 1.0,
        "log_ratio_min": -1.5,
        "log_ratio_max": 0.25,
        "clipped": 1,
        "flips": 3,
        "prompt": "2+2=",
    }
    assert (second["rollout"], second["truncated"], second["advantage"]) == (1, 0.0, -0.5)


def test_of_several_epochs_the_last_counts():
    batch = batch_of([("a", "xy")], [0.0])
    log_ratio = torch.tensor([[0.0, 9.0, 9.0], [0.0, 1.0, -2.0]])
    (row,) = rows_of(batch, log_ratio, torch.tensor([[0, 1, 1], [0, 0, 1]], dtype=torch.int8))
    assert (row["log_ratio_min"], row["log_ratio_max"], row["clipped"]) == (-2.0, 1.0, 1)


def test_what_an_environment_wrote_is_shown_without_a_ratio():
    batch = batch_of([("a", "xyz")], [0.0])
    mask = batch.response_mask.clone()
    mask[0, 2] = False
    (row,) = rows_of(replace(batch, response_mask=mask))
    assert [t[:2] for t in json.loads(row["response"])] == [["x", 0.0], ["y", None], ["z", 0.0]]
    assert row["response_tokens"] == 2


def test_the_extremes_of_every_order_are_among_few():
    """Of 40: the best and the worst reward, the largest ratio, which is negative, and the longest."""
    texts = [("q", "x" * (9 if i == 31 else 3)) for i in range(40)]
    batch = batch_of(texts, [1.0 if i == 7 else 0.0 if i == 22 else 0.5 for i in range(40)])
    log_ratio = torch.zeros(batch.tokens.shape)
    log_ratio[13, 2] = -0.7
    for step in (1, 2, 25):
        found = choose_rollouts(step, batch, log_ratio, 8).tolist()
        assert {7, 22, 13, 31} <= set(found) and len(set(found)) == 8
    assert choose_rollouts(1, batch, log_ratio, 4).tolist()[:3] == [7, 22, 13]
    assert not len(choose_rollouts(1, batch, log_ratio, 0))
    equal = batch_of(texts[:8], [0.5] * 8)
    firsts = {choose_rollouts(step, equal, log_ratio[:8], 1).item() for step in range(8)}
    assert len(firsts) == 8, "among equal ones another comes first at every step"


def test_long_ones_lose_their_middle_and_a_step_stays_in_its_bytes(monkeypatch):
    batch = batch_of([("p" * 2000, "abcd" * 500)] * 6, [0.0] * 6)
    rows = rows_of(batch)
    response = json.loads(rows[0]["response"])
    assert len(response) == 768 + 1 and response[384] == [2000 - 768] and response[383][0] == "d"
    assert rows[0]["prompt"] == "p" * 256 + "\n[…]\n" + "p" * 256 and rows[0]["response_tokens"] == 2000
    size = len((rows[0]["prompt"] + rows[0]["response"]).encode())
    monkeypatch.setattr(log, "STEP_BYTES", 3 * size + 1)
    assert len(rows_of(batch)) == 3
    monkeypatch.setattr(log, "STEP_BYTES", size - 1)
    assert rows_of(batch) == []


@pytest.mark.parametrize("text", ["\x1b[2J\x07", "</script><b>", "\x00\ud7ff\u202e", '"\\', "\n\n"])
def test_hostile_text_comes_through_as_it_is(text):
    (row,) = rows_of(batch_of([(text, text)], [0.0]))
    said = "".join(t[0] for t in json.loads(row["response"]))
    assert row["prompt"] == text and said.replace("·", "") == text
