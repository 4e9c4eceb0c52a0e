"""Conversations of a real vLLM, in process and behind a server: every turn goes on from the ids of all before it, its
routes are those of one pass over the whole, and a run knows which weights drew what."""

from __future__ import annotations

import copy
import random
import zlib
from collections import Counter
from dataclasses import replace

from moe_rl.build import build
from moe_rl.config import Arm, Measure, Optimizer
from moe_rl.integrations.vllm.push import CheckedEngine, Tolerance, parity, probe_prompts
from moe_rl.integrations.vllm.server import ServerEngine
from moe_rl.metrics.volatility import route_change
from moe_rl.models.load import load
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import Recorder
from moe_rl.registry import Component
from moe_rl.trainer import train_step
from moe_rl.types import Prompt, Sampling
from tests.test_conversations import SHORT
from tests.vllm.conftest import NEEDS_VLLM, RUN

pytestmark = NEEDS_VLLM

PROMPTS = [Prompt("", tokens=tuple(40 + (i * 7 + k) % 80 for k in range(100 + 4 * i))) for i in range(8)]
"""vLLM's cache on CPUs has blocks of 128 tokens: the first is filled in the course of a conversation."""
TURNS = Sampling(0.7, 60, SHORT["stop"])
"""An untrained model says one of the stop strings soon."""
TRAINED = RUN.replace(
    arm=Arm(
        name="token",
        loss=Component("gspo_token", clip_low=0.01, clip_high=0.013),
        advantage="by_turn",
        routes="rollout",
    ),
    task="tests.talking_task:Talking",
    cold_start=RUN.cold_start.replace(target=0.0),
    optimizer=Optimizer(lr=1e-3),
    steps=3,
    batches="lagged(lag=1)",
    prompts_per_step=4,
    group_size=4,
    mini_batches=2,
    measure=Measure(responses=8, detail_every=3),
    **SHORT,
)


def reply(row: int, text: str) -> str | None:
    """Of 0 to 6 letters, by lot of the row and what it wrote."""
    draw = random.Random(zlib.crc32(repr((row, text)).encode()))
    return None if draw.random() < 0.1 else "".join(draw.choices("abcdefgh", k=draw.randint(0, 6)))


def check_conversations(engine, score, asked, sampling=TURNS):
    """Draw some, of which `asked` collects the ids of every request."""
    drawn = engine.generate(PROMPTS, 3, key=(4, 1, 2), sampling=sampling, reply=reply)
    assert len(drawn) == 24 and sum(len(r.turns) > 1 for r in drawn) > 6 and max(len(r.turns) for r in drawn) > 2
    expected = [r.prompt.tokens + r.tokens[: turn.start] for r in drawn for turn in r.turns]
    assert Counter(expected) == Counter(asked), "every turn is asked for with exactly the ids before it"
    tokenizer = engine.engine.reader.tokenizer
    assert any(tuple(tokenizer.encode(tokenizer.decode(r.tokens))) != r.tokens for r in drawn), "text would not do"
    for r in drawn:
        said = [r.tokens[a.end : b.start] for a, b in zip(r.turns, r.turns[1:], strict=False)]
        assert said == [tuple(turn.reply.encode()) for turn in r.turns[:-1]]
        assert r.routes.tokens[0].tolist() == list(r.prompt.tokens + r.tokens[:-1])
        assert r.routes.coverage == 1, "of what the environment said, too"
    found = parity(drawn, score)
    print(found, f"{sum(len(r.turns) for r in drawn)} turns")
    assert found.tokens > 300 and found.logprob_max < 1e-5 and found.any_change_rate == 0
    again = engine.generate(
        PROMPTS[:3], 2, key=(4, 1, 2), sampling=sampling, reply=lambda row, text: reply(row + row // 2, text)
    )
    assert [(r.tokens, r.turns) for r in again] == [(drawn[n].tokens, drawn[n].turns) for n in (0, 1, 3, 4, 6, 7)]
    return drawn


def test_every_turn_goes_on_from_the_ids_before_it(serving, monkeypatch):
    asked, cached, generate = [], {}, serving.vllm.llm.generate

    def noting(prompts, *how, **further):
        outputs = generate(prompts, *how, **further)
        for prompt, output in zip(prompts, outputs, strict=True):
            asked.append(tuple(prompt["prompt_token_ids"]))
            cached[asked[-1]] = output.num_cached_tokens
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(serving.vllm.llm, "generate", noting)
        drawn = check_conversations(serving.at(TURNS.temperature).engine, serving.score, asked)
    later = [cached[r.prompt.tokens + r.tokens[: turn.start]] - len(r.prompt.tokens) for r in drawn for turn in r.turns]
    print(Counter(later))
    assert sum(n > 0 for n in later) > 5, "turns and replies that are read again come out of the cache"


def test_a_response_goes_on_from_within_a_character(serving):
    """vLLM takes all of such a prompt for text that was drawn, where it would find stop strings."""
    cut = [replace(prompt, tokens=(*prompt.tokens, 0xE2, 0x82)) for prompt in PROMPTS]
    free, stopped = (
        serving.at(0.7).engine.generate(cut, 2, key=(6,), sampling=how) for how in (replace(TURNS, stop=()), TURNS)
    )
    assert any(r.finished for r in stopped) and parity(stopped, serving.score).logprob_max < 1e-5
    for whole, r in zip(free, stopped, strict=True):
        assert r.tokens == whole.tokens[: len(r.tokens)] and r.routes.coverage == 1
        ended = any(stop in whole.text for stop in TURNS.stop)
        assert r.finished == (ended or whole.finished) and (len(r.tokens) < len(whole.tokens)) <= ended
        assert not any(stop in r.text for stop in TURNS.stop)


def test_a_server_is_asked_for_every_turn_with_the_ids_before_it(server, policy, monkeypatch):
    """As it was started, without a push."""
    receiver, asked = ServerEngine(server.address, server.folder, load(RUN.model, 0).tokenizer), []
    ask = receiver._ask

    def noting(request, lost):
        asked.append(request[1])
        return ask(request, lost)

    monkeypatch.setattr(receiver, "_ask", noting)
    engine = CheckedEngine(receiver, policy.score, [], Tolerance.of("float32"), TURNS.temperature)
    check_conversations(engine, policy.score, asked, replace(TURNS, stop=TURNS.stop[:4]))


def check_lagged(receiver, folder, run=TRAINED):
    """Three steps of R3 with a lag of 1 on an engine's conversations: what was trained on was drawn by the weights it
    names, and what the environment said takes no part."""
    parts = build(run, folder, folder)
    probes = probe_prompts(receiver.reader.tokenizer, receiver.reader.vocabulary)
    engine = CheckedEngine(receiver, parts.policy.score, probes, Tolerance.of("float32"), run.temperature)
    parts, before, moved = replace(parts, collector=replace(parts.collector, engine=engine)), [], []
    engine.load(parts.policy.weights())
    recorder = Recorder(run, parts.policy)
    for step, version in ((1, 0), (2, 0), (3, 1)):
        before.append(HFPolicy(copy.deepcopy(parts.policy.model), TRAINED.optimizer))
        rows = train_step(run, parts, step, recorder)
        batch, (row,), updates = recorder.batch, rows["steps"], rows["updates"]
        own = batch.response_mask
        assert batch.turn.max() == 3 and (batch.sampled_at[own] == version).all()
        assert batch.rollout_routes.weight_version == f"step {version}"
        then, now = before[version].score(batch), before[-1].score(batch)
        assert (then.logprobs - batch.rollout_logprobs)[own].abs().max() < 1e-5
        change = route_change(then.routes.ids(), batch.rollout_routes.ids(), batch.attention_mask)
        assert change["any_change_rate"].sum() == 0 < change["volatility_tokens"].sum()
        moved.append(bool((now.logprobs - batch.rollout_logprobs)[own].abs().max() > 1e-3))
        said = batch.attention_mask & ~own & (own.cumsum(1) > 0)
        assert said.sum() > 5
        for name, value in (
            ("log-prob", batch.rollout_logprobs),
            ("advantage", batch.advantages),
            ("log-ratio", recorder.log_ratio),
            ("clip", recorder.clipped_by),
        ):
            assert not value[said].any() and value.shape == said.shape, name
        assert row["first_update_log_ratio_max"] < 1e-5 and all(update["coverage"] == 1 for update in updates)
    assert moved == [False, True, True], "else old weights and new ones could not be told apart"


def test_a_run_trains_on_conversations_of_the_weights_that_it_names(serving, tmp_path):
    check_lagged(serving.at(1.0).vllm, tmp_path)
