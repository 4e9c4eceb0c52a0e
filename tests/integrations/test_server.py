"""The HTTP client against a small server on loopback that answers as vLLM does, and misbehaves on request. A real one
answers in tests/vllm/test_server.py."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.build import check
from moe_rl.config import Arm, RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations.vllm import server as http
from moe_rl.integrations.vllm.push import CheckedEngine, Tolerance, probe_prompts
from moe_rl.integrations.vllm.server import ServerEngine
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
        if handler.path == "/v1/completions":
            with self.lock:
                self.completions += 1
                self.bodies.append(body)
                fault = self.faults(self.completions)
            if callable(fault):
                return fault(handler)
            return handler.reply({"error": "on purpose"}, fault) if fault else handler.reply(self.complete(body))
        if handler.path == "/collective_rpc":
            if body["method"] == "moe_rl_push":
                self.fake.reload({name: x for file in body["args"][0] for name, x in load_file(file).items()})
            return handler.reply({"results": [str(self.fake.pushes), self.fake.pushes]})
        return handler.reply({}, 200 if handler.path == "/reset_prefix_cache" else 404)

    def complete(self, body):
        with self.lock:
            r = self.fake.complete(*(body[name] for name in ("prompt", "temperature", "max_tokens", "seed", "stop")))
        choice = {"token_ids": list(r.tokens), "logprobs": {"token_logprobs": [float(x) for x in r.logprobs]}}
        choice |= {"routed_experts": as_base64(routes_of(r)), "finish_reason": "stop" if r.finished else "length"}
        return {"choices": [choice]}

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
    settings = {"timeout": 60.0, "retries": 2, "concurrency": 4, **settings}
    engine = ServerEngine(server.url, tmp_path / "served", loaded.tokenizer, **settings)
    probes = probe_prompts(loaded.tokenizer, 258)
    return CheckedEngine(engine, policy_of(loaded).score, probes, Tolerance.of("float32"), temperature=1.0)


def same(a, b):
    return a.tokens == b.tokens and torch.equal(a.logprobs, b.logprobs) and a.routes == b.routes and a.text == b.text


def test_a_pushed_server_answers_with_the_policys_own_rollouts(server, loaded, tmp_path):
    engine, policy = engine_of(server, loaded, tmp_path), policy_of(loaded)
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
    truncated = server.bodies[-1]
    assert [truncated[name] for name in ("top_p", "top_k", "min_p")] == [0.5, 7, 0.25]
    engine.generate(PROMPTS[:1], 1, key=(3,), sampling=sampling)
    sent = server.bodies[-1]
    neutral = {"temperature": 0.7, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert {name: sent[name] for name in neutral} == neutral
    assert (sent["stop"], sent["stop_token_ids"], sent["max_tokens"]) == (["\n"], [256], 5)


def test_a_server_outlives_its_clients_and_notices_when_two_push_to_it(server, loaded, tmp_path):
    first, second = (engine_of(server, loaded, tmp_path) for _ in range(2))
    for engine in (first, first, second):
        assert engine.load(policy_of(loaded).weights()) < 1e-5
    assert (first.engine.pushes, second.engine.pushes) == (2, 3)
    second.generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    with pytest.raises(RunError, match="push 3, .* push 2"):
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


def test_log_probs_of_the_arg_max_are_known_at_temperature_one_alone(server, loaded, tmp_path):
    engine, greedy = engine_of(server, loaded, tmp_path), replace(SAMPLING, greedy=True)
    (one, *_), (half, *_) = (
        engine.generate(PROMPTS, 1, key=(3,), sampling=replace(greedy, temperature=t)) for t in (1.0, 0.5)
    )
    assert one.tokens == half.tokens and one.logprobs.isfinite().all() and half.logprobs.isnan().all()


def test_passing_failures_are_tried_again(server, loaded, tmp_path):
    engine = engine_of(server, loaded, tmp_path)
    expected = engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    server.completions, server.faults = 0, lambda number: (503, 500, None)[number % 3]
    engine = engine_of(server, loaded, tmp_path, concurrency=1)
    assert all(map(same, expected, engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)))
    assert server.completions == 3 * 6 - 1


def test_retries_end(server, loaded, tmp_path):
    server.faults = lambda number: 503
    with pytest.raises(RunError, match="in 3 tries.* HTTP 503.*on purpose"):
        engine_of(server, loaded, tmp_path, concurrency=1).generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    assert server.completions == 3, "one request is tried to the end, and the others are spared"


def test_a_refusal_is_final_and_leaves_the_others_alone(server, loaded, tmp_path):
    server.faults = lambda number: 400 if number == 2 else None
    engine = engine_of(server, loaded, tmp_path, concurrency=1)
    with pytest.raises(RunError, match="5 of 6 .*HTTP 400"):
        engine.generate(PROMPTS, 2, key=(3,), sampling=SAMPLING)
    assert len(engine.engine.received) == 5 and server.completions == 6


def test_a_server_that_says_nothing_times_out(server, loaded, tmp_path):
    server.faults = lambda number: lambda handler: time.sleep(0.4)
    engine = engine_of(server, loaded, tmp_path, timeout=0.1, retries=1, concurrency=1)
    with pytest.raises(RunError, match="in 2 tries"):
        engine.generate(PROMPTS[:1], 1, key=(3,), sampling=SAMPLING)


@pytest.mark.parametrize("begun", [b"", b'{"choices": ['])
@pytest.mark.parametrize("status", [200, 503])
def test_an_answer_that_breaks_off_is_requested_again(server, loaded, tmp_path, begun, status):
    def breaks_off(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(begun)
        handler.close_connection = True

    server.faults = lambda number: breaks_off if number == 1 else None
    rollouts = engine_of(server, loaded, tmp_path, concurrency=1).generate(PROMPTS, 1, key=(3,), sampling=SAMPLING)
    assert len(rollouts) == 3 and server.completions == 4


def test_a_server_that_dies_mid_batch_loses_nothing_already_received(server, loaded, tmp_path):
    engine = engine_of(server, loaded, tmp_path, concurrency=2)
    whole = engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)
    server.completions = 0

    def dies(handler):
        threading.Thread(target=server.stop, daemon=True).start()
        time.sleep(0.2)
        handler.connection.close()

    server.faults = lambda number: dies if number > 5 else None
    with pytest.raises(RunError, match="of 12 completions"):
        engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)
    kept = [*engine.engine.received.values()]
    assert len(kept) >= 5 and all(any(same(rollout, other) for other in whole) for rollout in kept)

    again = Server(tmp_path / "again", loaded)
    engine.engine.client = http.Client(again.url)
    assert all(map(same, whole, engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)))
    assert again.completions == 12 - len(kept), "only what was missing is asked for"
    engine.generate(PROMPTS, 4, key=(3,), sampling=SAMPLING)
    assert again.completions == 24 - len(kept), "a complete batch is not kept"
    again.stop()


@pytest.mark.parametrize(
    "url", ["http://me:word@a:1", "http://a:1?key=word", "http://a:1#word", "http://", "ftp://a:1", "http://a:word"]
)
def test_an_address_is_checked_before_compute_and_shown_nowhere(url):
    with pytest.raises(ConfigError, match="engine.url") as raised:
        check(RunConfig(arm=Arm(name="a"), engine=Component("server", url=url)))
    assert "word" not in str(raised.value)


@pytest.mark.parametrize("change, match", [({}, "concurrency=0"), ({"stop": tuple("abcde")}, "5 texts")])
def test_what_a_server_cannot_do_is_refused_before_compute(change, match):
    options = {} if change else {"concurrency": 0}
    with pytest.raises(ConfigError, match=match):
        check(RunConfig(arm=Arm(name="a"), engine=Component("server", url="http://a:1", **options), **change))


@pytest.mark.parametrize(
    "spoil, match",
    [
        (lambda choice: choice["token_ids"].pop(), "tokens and"),
        (lambda choice: choice.update(token_ids=None), "cannot be read"),
        (lambda choice: choice.pop("token_ids"), "'token_ids'"),
        (lambda choice: choice.update(finish_reason="abort"), "'abort'"),
    ],
)
def test_an_answer_that_cannot_be_one_leaves_the_others(server, loaded, tmp_path, monkeypatch, spoil, match):
    complete = server.complete

    def spoiled(body):
        reply = complete(body)
        if server.completions == 2:
            spoil(reply["choices"][0])
        return reply

    monkeypatch.setattr(server, "complete", spoiled)
    engine = engine_of(server, loaded, tmp_path, concurrency=1)
    with pytest.raises(RunError, match=match):
        engine.generate(PROMPTS, 2, key=(9,), sampling=SAMPLING)
    assert len(engine.engine.received) == 5


class Seen:
    """What a server, or a proxy, gets."""

    def __init__(self, server, monkeypatch):
        self.requests = []
        monkeypatch.setattr(server, "handle", self.handle)

    def handle(self, handler, body):
        self.requests.append((handler.path, handler.headers["Authorization"]))
        handler.reply({})


def test_a_key_comes_from_the_environment_and_is_in_no_error(server, monkeypatch):
    seen = Seen(server, monkeypatch)
    monkeypatch.setenv(http.HEADERS, '{"Authorization": "Bearer sk-1234"}')
    assert http.Client(server.url).post("/x", {}) == {} and seen.requests == [("/x", "Bearer sk-1234")]
    for wrong in ("Bearer sk-1234", '{"Authorization": "sk-1\\n234"}', '["sk-1234"]', '{"sk": 1234}', '{"a": "sk-é"}'):
        monkeypatch.setenv(http.HEADERS, wrong)
        with pytest.raises(ConfigError, match=http.HEADERS) as raised:
            check(RunConfig(arm=Arm(name="a"), engine=Component("server", url=server.url)))
        assert "sk" not in str(raised.value)


def test_a_key_follows_no_redirection(server, monkeypatch):
    asked = []

    def redirects(handler, body):
        asked.append(handler.path)
        handler.send_response(307)
        handler.send_header("Location", f"http://localhost:{server.http.server_port}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(server, "handle", redirects)
    monkeypatch.setenv(http.HEADERS, '{"Authorization": "Bearer x"}')
    with pytest.raises(ConfigError, match="HTTP 307"):
        http.Client(server.url).post("/x", {})
    assert asked == ["/x"]


def test_the_proxy_of_the_environment_is_asked(server, monkeypatch):
    seen = Seen(server, monkeypatch)
    monkeypatch.setenv("http_proxy", server.url)
    http.Client("http://engine.invalid:9").post("/x", {})
    assert seen.requests == [("http://engine.invalid:9/x", None)]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    http.Client(server.url).post("/y", {})
    assert seen.requests[1:] == [("/y", None)]
