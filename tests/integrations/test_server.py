"""The HTTP client against a small server on loopback that speaks vLLM's dialects and misbehaves on request.

SGLang's dialect is tested against payloads written after its documentation: no SGLang server has answered this client.
A real vLLM server answers in tests/vllm/test_server.py.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_rl.build import check
from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError, RoutingError, RunError
from moe_rl.integrations.vllm import server as http
from moe_rl.integrations.vllm.push import CheckedEngine, Tolerance, probe_prompts, receipt
from moe_rl.integrations.vllm.server import DIALECTS, BatchIncomplete, ServerEngine
from moe_rl.registry import Component
from moe_rl.types import Sampling
from tests.rollouts.fake_engine import PROMPTS, FakeEngine, as_base64, policy_of, routes_of, small

SAMPLING = Sampling(max_new_tokens=5)


class Server:
    """`faults` is asked before every completion, with the number of the request: None, an HTTP status, or an action."""

    def __init__(self, folder, loaded):
        self.fake, self.lock = FakeEngine(folder, loaded), threading.Lock()
        self.faults, self.completions, self.bodies = lambda number: None, 0, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.handle(self, body)

            def log_message(self, *args):
                pass

            def reply(self, body, status=200):
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def handle(self, handler, body):
        if handler.path in ("/inference/v1/generate", "/v1/completions"):
            with self.lock:
                self.completions += 1
                self.bodies.append(body)
                fault = self.faults(self.completions)
            if callable(fault):
                return fault(handler)
            return handler.reply({"error": "on purpose"}, fault) if fault else handler.reply(self.complete(body))
        if handler.path == "/collective_rpc":
            if body["method"] == "moe_rl_push":
                weights = {name: weight for file in body["args"][0] for name, weight in load_file(file).items()}
                self.fake.reload(weights)
                shapes = {name: tuple(t.shape) for name, t in weights.items()}
                held = receipt(self.fake.engine.model.state_dict().items(), shapes, self.fake.pushes)
                return handler.reply({"results": [{"pushes": held.pushes, "checksums": held.checksums}]})
            return handler.reply({"results": [str(self.fake.pushes)]})
        return handler.reply({}, 200 if handler.path == "/reset_prefix_cache" else 404)

    def complete(self, body):
        native = "token_ids" in body
        s = body["sampling_params"] if native else body
        tokens = body["token_ids"] if native else body["prompt"]
        with self.lock:
            r = self.fake.complete(tokens, s["temperature"], s["max_tokens"], s["seed"], s["stop"])
        values = [float(x) for x in r.logprobs]
        found = {"content": [{"token": "", "logprob": x} for x in values]} if native else {"token_logprobs": values}
        choice = {"index": 0, "token_ids": list(r.tokens), "logprobs": found, "routed_experts": as_base64(routes_of(r))}
        return {"choices": [choice | {"finish_reason": "stop" if r.finished else "length"}]}

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def loaded():
    return small()


@pytest.fixture
def server(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
    server = Server(tmp_path / "served", loaded)
    yield server
    with contextlib.suppress(OSError):
        server.stop()


def engine_of(server, loaded, tmp_path, **settings):
    settings = {"dialect": "vllm", "timeout": 5.0, "retries": 2, "concurrency": 4, **settings}
    urls = [one.url for one in server] if isinstance(server, list) else server.url
    engine = ServerEngine(urls, tmp_path / "served", loaded.tokenizer, **settings)
    probes = probe_prompts(loaded.tokenizer, 258)
    return CheckedEngine(engine, policy_of(loaded).score, probes, Tolerance.of("float32"), temperature=1.0)


def same(a, b):
    return a.tokens == b.tokens and torch.equal(a.logprobs, b.logprobs) and a.routes == b.routes and a.text == b.text


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_a_pushed_server_answers_with_the_policys_own_rollouts(server, loaded, tmp_path, dialect):
    engine, policy = engine_of(server, loaded, tmp_path, dialect=dialect), policy_of(loaded)
    assert engine.load(policy.weights()) < 1e-5
    rollouts = engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    assert [r.prompt for r in rollouts] == [p for p in PROMPTS for _ in range(2)]
    assert rollouts[0].tokens != rollouts[1].tokens, "the samples of a group have noise of their own"
    assert all(map(same, rollouts, engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)))
    assert all(r.routes.coverage == 1 for r in rollouts)


def test_a_request_says_everything_a_server_might_otherwise_fill_in(server, loaded, tmp_path):
    sampling = Sampling(0.7, 5, ("\n",))
    engine = engine_of(server, loaded, tmp_path)
    engine.generate(PROMPTS[:1], 1, key=(3,), sampling=replace(sampling, top_p=0.5, top_k=7, min_p=0.25))
    truncated = server.bodies[-1]["sampling_params"]
    assert [truncated[name] for name in ("top_p", "top_k", "min_p")] == [0.5, 7, 0.25]
    engine.generate(PROMPTS[:1], 1, key=(3,), sampling=sampling)
    sent = server.bodies[-1]["sampling_params"]
    neutral = {"temperature": 0.7, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert {name: sent[name] for name in neutral} == neutral
    assert (sent["stop"], sent["stop_token_ids"], sent["max_tokens"]) == (["\n"], [256], 5)


def test_a_push_that_did_not_arrive_is_an_error(server, loaded, tmp_path, monkeypatch):
    engine, policy = engine_of(server, loaded, tmp_path), policy_of(loaded)
    reload = server.fake.reload

    def forgets_a_layer(weights):
        kept = server.fake.engine.model.model.layers[1].mlp.experts.down_proj.clone()
        reload(weights)
        with torch.no_grad():
            server.fake.engine.model.model.layers[1].mlp.experts.down_proj.copy_(kept)

    monkeypatch.setattr(server.fake, "reload", forgets_a_layer)
    with pytest.raises(RunError, match="has other weights than the policy"):
        engine.load(policy.weights())
    monkeypatch.setattr(server.fake, "reload", lambda weights: None)
    with pytest.raises(RunError, match="pushes of weights"):
        engine.load(policy.weights())


def test_a_server_that_was_restarted_is_noticed(server, loaded, tmp_path):
    engine = engine_of(server, loaded, tmp_path)
    engine.load(policy_of(loaded).weights())
    server.fake.pushes = 0
    with pytest.raises(RunError, match="restarted"):
        engine.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)


def test_a_server_outlives_its_clients_and_notices_when_two_push_to_it(server, loaded, tmp_path):
    first, second = (engine_of(server, loaded, tmp_path) for _ in range(2))
    for engine in (first, first, second):
        assert engine.load(policy_of(loaded).weights()) < 1e-5
    assert (first.engine.pushes, second.engine.pushes) == (2, 3)
    second.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    with pytest.raises(RunError, match="has push 3, but this run sent push 2"):
        first.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    server.fake.pushes = 0  # restarted between two pushes, which the next one mends
    assert first.load(policy_of(loaded).weights()) < 1e-5 and first.engine.pushes == 1


def test_weights_travel_in_the_dtype_of_the_server(server, loaded, tmp_path):
    """Half the bytes, the same values as a server makes of float32; routers and vectors are sent as they are."""
    policy, sent = policy_of(loaded), []
    for dtype in (None, "bfloat16"):
        engine = engine_of(server, loaded, tmp_path, dtype=dtype)
        engine.tolerance = Tolerance.of(dtype or "float32")
        engine.load(policy.weights())
        sent.append(load_file(server.fake.folder / "model.safetensors"))
    wide, narrow = sent
    halved = {name for name, weight in narrow.items() if weight.dtype == torch.bfloat16}
    assert wide.keys() - halved == {name for name in wide if "norm" in name or name.endswith("mlp.gate.weight")}
    assert all(torch.equal(narrow[name], w.to(narrow[name].dtype)) for name, w in wide.items())
    assert sum(w.nbytes for w in narrow.values()) < 0.52 * sum(w.nbytes for w in wide.values())


def test_a_push_whose_answer_was_lost_is_sent_again(server, loaded, tmp_path, monkeypatch):
    engine, reload = engine_of(server, loaded, tmp_path), server.fake.reload

    def loses_its_answer(weights):
        reload(weights)
        if server.fake.pushes == 1:
            raise ConnectionResetError

    monkeypatch.setattr(server.fake, "reload", loses_its_answer)
    monkeypatch.setattr(server.http, "handle_error", lambda *args: None)
    assert engine.load(policy_of(loaded).weights()) < 1e-5
    assert engine.engine.pushes == server.fake.pushes == 2
    assert len(engine.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)) == 3


def test_passing_failures_are_tried_again(server, loaded, tmp_path):
    engine = engine_of(server, loaded, tmp_path)
    expected = engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    server.completions, server.faults = 0, lambda number: (503, 500, None)[number % 3]
    engine = engine_of(server, loaded, tmp_path, concurrency=1)
    assert all(map(same, expected, engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)))
    assert server.completions == 3 * 6 - 1


def test_retries_end(server, loaded, tmp_path):
    server.faults = lambda number: 503
    with pytest.raises(BatchIncomplete, match=r"no answer in 3 tries; the last .* HTTP 503.*on purpose") as raised:
        engine_of(server, loaded, tmp_path, concurrency=1).generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    assert raised.value.rollouts == [None] * 3
    assert server.completions == 3, "one request is tried to the end, and the others are spared"


def test_a_refusal_is_final_and_leaves_the_others_alone(server, loaded, tmp_path):
    server.faults = lambda number: 400 if number == 2 else None
    engine = engine_of(server, loaded, tmp_path, concurrency=1)
    with pytest.raises(BatchIncomplete, match=r"5 of 6 .* refused the request \(HTTP 400") as raised:
        engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    assert [r is None for r in raised.value.rollouts].count(True) == 1
    assert server.completions == 6


def test_a_server_that_says_nothing_times_out(server, loaded, tmp_path):
    server.faults = lambda number: lambda handler: time.sleep(0.4)
    engine = engine_of(server, loaded, tmp_path, timeout=0.1, retries=1, concurrency=1)
    with pytest.raises(BatchIncomplete, match=r"no answer in 2 tries"):
        engine.generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)


def test_half_an_answer_is_no_answer(server, loaded, tmp_path):
    def breaks_off(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [')
        handler.close_connection = True

    server.faults = lambda number: breaks_off if number == 1 else None
    rollouts = engine_of(server, loaded, tmp_path, concurrency=1).generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    assert len(rollouts) == 3


def test_an_answer_that_breaks_off_before_its_first_byte_is_no_answer(server, loaded, tmp_path):
    def says_nothing(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.close_connection = True

    server.faults = lambda number: says_nothing if number == 1 else None
    rollouts = engine_of(server, loaded, tmp_path, concurrency=1).generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    assert len(rollouts) == 3 and server.completions == 4


@pytest.mark.parametrize("said", [True, False])
def test_an_answer_without_end_is_refused_by_its_size(server, loaded, tmp_path, monkeypatch, said):
    monkeypatch.setattr(http, "LARGEST_ANSWER", 10_000)

    def goes_on(handler):
        handler.send_response(200)
        if said:
            handler.send_header("Content-Length", "20000")
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(b" " * 20_000)
        handler.close_connection = True

    server.faults = lambda number: goes_on
    with pytest.raises(BatchIncomplete, match=("20,000 bytes" if said else "more than") + ".*10,000"):
        engine_of(server, loaded, tmp_path, concurrency=1).generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)
    assert server.completions == 1, "another try would be as long"


def test_tokens_that_the_model_has_not_are_refused(server, loaded, tmp_path, monkeypatch):
    complete = server.complete

    def of_a_larger_model(body):
        reply = complete(body)
        reply["choices"][0]["token_ids"][0] = 99_999
        return reply

    monkeypatch.setattr(server, "complete", of_a_larger_model)
    with pytest.raises(RunError, match="99999"):
        engine_of(server, loaded, tmp_path).generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)


def test_a_server_that_dies_mid_batch_loses_nothing_already_received(server, loaded, tmp_path):
    engine = engine_of(server, loaded, tmp_path, concurrency=2)
    whole = engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)
    server.completions = 0

    def dies(handler):
        threading.Thread(target=server.stop, daemon=True).start()
        time.sleep(0.2)
        handler.connection.close()

    server.faults = lambda number: dies if number > 5 else None
    with pytest.raises(BatchIncomplete, match="of 12 completions were received") as raised:
        engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)
    kept = [n for n, r in enumerate(raised.value.rollouts) if r is not None]
    assert len(kept) >= 5 and all(same(raised.value.rollouts[n], whole[n]) for n in kept)

    again = Server(tmp_path / "again", loaded)
    engine.engine.clients[0].url = again.url
    assert all(map(same, whole, engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)))
    assert again.completions == 12 - len(kept), "only what was missing is asked for"
    engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)
    assert again.completions == 24 - len(kept), "a complete batch is not kept"
    again.stop()


@pytest.fixture
def two(server, loaded, tmp_path):
    """Two servers that read the same folder, of which the second one has taken over a push before."""
    other = Server(tmp_path / "served", loaded)
    other.fake.pushes = 1
    yield [server, other]
    with contextlib.suppress(OSError):
        other.stop()


def test_two_servers_share_the_requests_and_both_take_over_weights(server, two, loaded, tmp_path):
    alone = engine_of(server, loaded, tmp_path)
    alone.load(policy_of(loaded).weights())
    expected = alone.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    engine = engine_of(two, loaded, tmp_path)
    assert engine.load(policy_of(loaded).weights()) < 1e-5
    assert [one.fake.pushes for one in two] == [2, 2] and [c.pushes for c in engine.engine.clients] == [2, 2]
    for one in two:
        one.completions = 0
    assert all(map(same, expected, engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)))
    assert [one.completions for one in two] == [3, 3]
    two[1].fake.pushes = 0
    with pytest.raises(RunError, match=two[1].url + " has push 0, but this run sent push 2"):
        engine.generate(PROMPTS, 2, key=(4,), sampling=SAMPLING)


def test_one_of_two_servers_that_misses_a_push_is_an_error(two, loaded, tmp_path, monkeypatch):
    engine = engine_of(two, loaded, tmp_path)
    monkeypatch.setattr(two[1].fake, "reload", lambda weights: None)
    with pytest.raises(RunError, match="missed one"):
        engine.load(policy_of(loaded).weights())


def test_one_of_two_servers_that_is_gone_leaves_the_answers_of_the_other(two, loaded, tmp_path):
    engine = engine_of(two, loaded, tmp_path, retries=0)
    two[1].stop()
    with pytest.raises(BatchIncomplete, match="3 of 6 completions") as raised:
        engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    assert [rollout is None for rollout in raised.value.rollouts] == [False, True] * 3


def test_no_more_requests_are_in_flight_to_a_server_than_are_set(two, loaded, tmp_path):
    flying, most = {one.url: 0 for one in two}, {one.url: 0 for one in two}
    for one in two:
        def counted(body, one=one, complete=one.complete):
            flying[one.url] += 1
            most[one.url] = max(most[one.url], flying[one.url])
            time.sleep(0.05)
            flying[one.url] -= 1
            return complete(body)

        one.complete = counted
    engine_of(two, loaded, tmp_path, concurrency=3).generate(PROMPTS, 6, key=(3,), sampling=SAMPLING)
    assert list(most.values()) == [3, 3]


def test_answers_are_decoded_while_others_still_come_in(server, loaded, tmp_path, monkeypatch):
    engine, decoded = engine_of(server, loaded, tmp_path, concurrency=6), threading.Event()
    real = engine.engine.reader.decode
    monkeypatch.setattr(engine.engine.reader, "decode", lambda *given: (real(*given), decoded.set())[0])
    late = []

    def waits(handler):
        late.append(decoded.wait(4.0))
        handler.reply(server.complete(server.bodies[-1]))

    server.faults = lambda number: waits if number == 3 else None
    engine.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    assert late == [True]


@pytest.mark.parametrize("options, says", [
    ({"url": []}, "or a list of addresses"), ({"url": ["http://a", "b"]}, "or a list of addresses"),
    ({"url": ["http://a", "http://a"]}, "an address twice"), ({"url": "http://a", "concurrency": 0}, "at least 1"),
])
def test_addresses_and_requests_in_flight_are_checked_before_compute(options, says):
    with pytest.raises(ConfigError, match=says):
        check(RunConfig(arm=Arm(name="a"), engine=Component("server", **options)))


def test_answers_of_another_dialect_say_what_is_missing(server, loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "complete", lambda body: {"choices": [{"text": "hello", "logprobs": None}]})
    with pytest.raises(BatchIncomplete, match="Does it have another dialect"):
        engine_of(server, loaded, tmp_path).generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)


def test_nobody_at_the_address(loaded, server, tmp_path):
    engine = engine_of(server, loaded, tmp_path, retries=0)
    server.stop()
    with pytest.raises(BatchIncomplete, match="0 of 3 completions"):
        engine.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)


def test_an_unknown_dialect_is_refused(server, loaded, tmp_path):
    with pytest.raises(ConfigError, match="vllm, openai, sglang"):
        engine_of(server, loaded, tmp_path, dialect="tgi")


# ---------------------------------------------------------------------- SGLang, after its documentation
def sglang_reply(loaded, **meta):
    """`/generate` with return_logprob and return_routed_experts: routes are a flat int32 buffer of all layers."""
    routes = np.arange(2, dtype=np.int32)[None, None] + np.zeros((4, 3, 1), np.int32)
    return {
        "text": "AB",
        "output_ids": [65, 256],
        "meta_info": {
            "id": "eadcfbb6f5bd4eb8b3cd5e1d7f64f3a5",
            "finish_reason": {"type": "stop", "matched": 256},
            "prompt_tokens": 3,
            "weight_version": "default",
            "completion_tokens": 2,
            "cached_tokens": 0,
            "e2e_latency": 0.028,
            "output_token_logprobs": [[-0.25, 65, None], [-1.5, 256, None]],
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
            **meta,
        },
    }


@pytest.fixture
def sglang(server, loaded, tmp_path, monkeypatch):
    checked = engine_of(server, loaded, tmp_path, dialect="sglang")
    engine = checked.engine
    engine.replies, engine.asked, engine.checked = sglang_reply(loaded), [], checked

    def post(path, body, lost=None):
        engine.asked.append((path, body))
        return {"success": True, "message": "ok"} if path.startswith("/update") else engine.replies

    monkeypatch.setattr(engine.clients[0], "post", post)
    return engine


def test_sglang_is_asked_and_read_in_its_own_words(sglang):
    (rollout,) = sglang.generate(PROMPTS[:1], 1, key=(3,), sampling=Sampling(0.5, 5, ("\n",)))
    path, body = sglang.asked[0]
    assert [body["sampling_params"][name] for name in ("top_p", "top_k", "min_p")] == [1.0, -1, 0.0]
    assert path == "/generate" and body["return_routed_experts"] and body["return_logprob"]
    assert body["input_ids"] == [65, 66, 67] and body["sampling_params"]["max_new_tokens"] == 5
    assert 0 <= body["sampling_params"]["sampling_seed"] < 2**31
    assert rollout.tokens == (65, 256) and rollout.logprobs.tolist() == [-0.25, -1.5] and rollout.finished
    assert rollout.text == "A"
    assert rollout.routes.experts.tolist() == [[[[0, 1]] * 3] * 4]


def test_sglang_length_abort_and_old_weights(sglang, loaded):
    cut, pairs = {"type": "length", "length": 2}, [[-0.25, 65, None], [-1.5, 66, None]]
    sglang.replies = sglang_reply(loaded, finish_reason=cut, output_token_logprobs=pairs)
    assert not sglang.generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)[0].finished
    sglang.replies = sglang_reply(loaded, finish_reason={"type": "abort", "message": "memory"})
    with pytest.raises(BatchIncomplete, match="abort"):
        sglang.generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)
    sglang.replies, sglang.clients[0].pushes = sglang_reply(loaded, weight_version="1"), 2
    with pytest.raises(BatchIncomplete, match="weights '1', but push 2"):
        sglang.generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)


def test_sglang_takes_weights_from_disk_and_must_then_agree(sglang, loaded):
    sglang.replies = sglang_reply(loaded, weight_version="1", routed_experts=None)
    with pytest.raises(RoutingError, match="no routing"):
        sglang.checked.load(policy_of(loaded).weights())
    path, body = sglang.asked[0]
    assert path == "/update_weights_from_disk" and body["weight_version"] == "1" and body["flush_cache"]
    assert (sglang.folder / "model.safetensors").is_file() and (sglang.folder / "config.json").is_file()


def test_every_dialect_is_listed():
    assert set(DIALECTS) == {"vllm", "openai", "sglang"}
