"""Conversations of the engines: one pass, or turn by turn from ids, against full forwards and against each other."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from moe_rl.errors import RunError
from moe_rl.rollouts.batches import collate
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.turns import generate_by_turns
from moe_rl.seeds import NOISE, derive
from moe_rl.types import Rollout, Sampling
from tests.integrations.test_server import engine_of, loaded, server  # noqa: F401
from tests.rollouts.fake_engine import PROMPTS as BYTES
from tests.rollouts.test_hf import EOS, PROMPTS, full_forward, make_model, model, prompts, tokenizer  # noqa: F401

LETTERS = "abcdefghijklmnopqr"
ENDS = {EOS}


def talk(seed: int, most: int = 4, longest: int = 5):
    """Replies by lot of row and turn: of 0 to `longest` letters, at most `most` turns; and what it was asked."""
    asked: list[tuple[int, str]] = []

    def reply(row: int, text: str) -> str | None:
        turn = sum(r == row for r, _ in asked)
        asked.append((row, text))
        draw = random.Random(zlib.crc32(repr((seed, row, turn)).encode()))
        if turn + 1 >= most or draw.random() < 0.2:
            return None
        return "".join(draw.choices(LETTERS, k=draw.randint(0, longest)))

    return reply, asked


def turn_by_turn(engine, key, group_size, sampling, reply, rows=PROMPTS):
    """The engine as one that is given ids and draws each turn anew, without what it had cached."""

    def draw(asked, noise, most):
        found = []
        for prompt, position, room in zip(asked, noise, most, strict=True):
            one = replace(sampling, max_new_tokens=room)
            found += engine.generate([prompt], 1, key=position, sampling=one)
        return found

    return generate_by_turns(
        draw, engine.tokenizer, ENDS, prompts(rows), group_size, key=key, sampling=sampling, reply=reply
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_conversation_is_one_pass(family: str, tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    """Routes of its turns are those of one forward over all of it, bit for bit; log-probs up to the cache's rounding,
    sliding windows and padding included; 0 where the environment speaks."""
    model = make_model(family)  # noqa: F811
    sampling = Sampling(temperature=0.7, max_new_tokens=24, stop=("c", "d", "e", "f"))
    rollouts = HFEngine(model, tokenizer).generate(prompts(), 3, key=(0, 1), sampling=sampling, reply=talk(1)[0])
    assert len({len(r.turns) for r in rollouts}) > 1 and max(len(r.turns) for r in rollouts) > 2
    for r in rollouts:
        logprobs, experts = full_forward(model, r, 0.7)
        own = torch.zeros(len(r.tokens), dtype=torch.bool)
        for turn in r.turns:
            own[turn.start : turn.end] = True
        torch.testing.assert_close(r.logprobs, torch.where(own, logprobs, 0), rtol=0, atol=2e-5)
        assert torch.equal(r.routes.experts, experts) and r.routes.coverage == 1
        assert r.routes.tokens[0].tolist() == list(r.prompt.tokens + r.tokens[:-1])


@pytest.mark.parametrize("seed", range(6))
def test_random_transcripts(seed: int, model, tokenizer) -> None:  # noqa: F811
    """Turns and replies alternate and fill the response; each is the text of its tokens; only what ended is answered;
    empty replies and a limit in the middle of a turn included. The first turn is that without an environment."""
    draw = random.Random(seed)
    sampling = Sampling(max_new_tokens=draw.randint(1, 20), stop=("c", "mn") if seed % 2 else ())
    reply, asked = talk(seed)
    engine, key = HFEngine(model, tokenizer, max_rows=6), (seed, 2, 3)
    found = {
        "one pass": engine.generate(prompts(), 3, key=key, sampling=sampling, reply=reply),
        "by ids": turn_by_turn(engine, key, 3, sampling, talk(seed)[0]),
    }
    alone = engine.generate(prompts(), 3, key=key, sampling=sampling)
    for way, rollouts in found.items():
        for row, r in enumerate(rollouts):
            at = ended_turns = 0
            for turn in r.turns:
                own = list(r.tokens[turn.start : turn.end])
                assert turn.start == at < turn.end and EOS not in own[:-1], way
                written = tokenizer.decode(own[:-1] if own[-1] == EOS else own, clean_up_tokenization_spaces=False)
                cut = min([written.find(stop) for stop in sampling.stop if stop in written], default=len(written))
                assert turn.text == written[:cut]
                at = turn.end + len(turn.reply)
                assert tokenizer.decode(list(r.tokens[turn.end : at])) == turn.reply
                ended = own[-1] == EOS or cut < len(written)
                ended_turns += ended
                assert ended or (turn is r.turns[-1] and not r.finished and len(r.tokens) == sampling.max_new_tokens)
            assert at == len(r.tokens) <= sampling.max_new_tokens and r.turns[-1].reply == ""
            assert r.text == "".join(turn.text + turn.reply for turn in r.turns)
            if way == "one pass":
                assert [text for b, text in asked if b == row] == [t.text for t in r.turns[:ended_turns]]
                first = r.turns[0]
                assert r.tokens[: first.end] == alone[row].tokens
                torch.testing.assert_close(r.logprobs[: first.end], alone[row].logprobs, rtol=0, atol=1e-5)
    batch = collate(found["one pass"], [i // 3 for i in range(12)], [0.0] * 12, 0)
    assert torch.equal(batch.response_mask, batch.turn > 0)
    assert batch.turn.amax(1).tolist() == [len(r.turns) for r in found["one pass"]]


def test_turn_by_turn_is_one_pass_where_nothing_is_drawn(model, tokenizer) -> None:  # noqa: F811
    """Greedy: the same tokens, and the routes of turns that were prefilled anew, spliced, are those of one pass bit for
    bit; log-probs up to rounding."""
    engine, sampling = HFEngine(model, tokenizer), Sampling(max_new_tokens=40, greedy=True, stop=("c", "d", "e"))
    one = engine.generate(prompts(), 1, key=(0,), sampling=sampling, reply=talk(3)[0])
    turns = turn_by_turn(engine, (0, 1, 2), 1, sampling, talk(3)[0])
    assert max(len(r.turns) for r in one) > 2
    for a, b in zip(one, turns, strict=True):
        assert (a.tokens, a.turns, a.text, a.finished) == (b.tokens, b.turns, b.text, b.finished)
        assert a.routes == b.routes and torch.equal(a.routes.tokens, b.routes.tokens)
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_a_reply_that_leaves_no_room_is_left_out(model, tokenizer) -> None:  # noqa: F811
    engine, sampling = HFEngine(model, tokenizer), Sampling(max_new_tokens=12)
    for generate in (
        lambda reply: engine.generate(prompts(), 4, key=(5, 0, 0), sampling=sampling, reply=reply),
        lambda reply: turn_by_turn(engine, (5, 0, 0), 4, sampling, reply),
    ):
        long = generate(lambda row, text: "a" * 12)
        assert {len(r.turns) for r in long} == {1} and not any(r.finished for r in long)
        assert any(r.tokens[-1] == EOS for r in long), "the environment wanted to go on: cut off all the same"


def test_no_turn_shares_its_noise_with_another_nor_with_a_refill(tokenizer) -> None:  # noqa: F811
    """Of a batch and of what refills draw in place of its groups, whose keys are two numbers longer."""
    seeds = []

    def draw(asked, noise, most):
        seeds.extend(derive(*position) for position in noise)
        return [Rollout(prompt, (EOS,), torch.zeros(1), "", True) for prompt in asked]

    for key in ((0, NOISE, 7), (0, NOISE, 7, 1, 0), (0, NOISE, 7, 2, 0)):
        generate_by_turns(
            draw,
            tokenizer,
            ENDS,
            prompts(),
            3,
            key=key,
            sampling=Sampling(max_new_tokens=4),
            reply=lambda row, text: "",
        )
    assert len(seeds) == len(set(seeds)) == 3 * len(PROMPTS) * 3 * 4


def test_a_server_goes_on_from_ids_and_keeps_what_it_answered(server, loaded, tmp_path) -> None:  # noqa: F811
    """Every request is exactly the tokens before it; after a failure in a later turn only the missing are asked for."""
    engine = engine_of(server, loaded, tmp_path, retries=0, timeout=120.0)
    sampling = Sampling(max_new_tokens=30, stop=tuple(chr(c) for c in range(33, 127)))

    def drawn():
        return engine.generate(BYTES, 2, key=(0, 1, 2), sampling=sampling, reply=lambda row, text: "?!" * (row < 4))

    reference = drawn()
    assert max(len(r.turns) for r in reference) > 2
    assert {r.prompt.tokens for r in reference} == {p.tokens for p in BYTES}
    whole = [list(r.prompt.tokens + r.tokens) for r in reference]
    assert all(any(ids[: len(body["prompt"])] == body["prompt"] for ids in whole) for body in server.bodies)
    every, server.completions = server.completions, 0
    server.faults = lambda number: 500 if number == 7 else None  # the first of the second turn
    with pytest.raises(RunError):
        drawn()
    server.faults = lambda number: None
    again = drawn()
    assert server.completions == every + 1
    for a, b in zip(reference, again, strict=True):
        assert (a.tokens, a.turns) == (b.tokens, b.turns) and a.routes.same_sets(b.routes).all()
