"""A real vLLM server on loopback: both dialects, pushes over a shared folder, and its death within a batch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch

from moe_rl.config import Optimizer
from moe_rl.models import load, save_checkpoint
from moe_rl.policies.hf import HFPolicy
from moe_rl.rollouts.http import BatchIncomplete, ServerEngine
from moe_rl.rollouts.push import parity
from moe_rl.types import Prompt, Sampling
from tests.conftest import perturb
from tests.vllm.conftest import NEEDS_VLLM, RUN

pytestmark = NEEDS_VLLM

PROMPTS = [Prompt("", tokens=tuple(range(40 + i, 52 + i))) for i in range(16)]
LONG = Sampling(0.7, 40)
START = 600.0  # seconds at most, on a busy machine
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def policy():
    return HFPolicy(load(RUN.model, 0).model, Optimizer(), temperature=LONG.temperature)


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory):
    """(process, address, folder), the server started on a checkpoint of the policy's random weights."""
    folder = tmp_path_factory.mktemp("server")
    loaded = load(RUN.model, 0)
    save_checkpoint(loaded.model, loaded.tokenizer, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", str(folder), "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    command += ["--enable-return-routed-experts", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", "moe_rl.rollouts.vllm.WorkerExtension"]
    log = folder / "server.log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | ENVIRONMENT
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    address, started = f"http://127.0.0.1:{port}", time.monotonic()
    while not healthy(address):
        if process.poll() is not None or time.monotonic() - started > START:
            kill(process)
            pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)
    print(f"server ready after {time.monotonic() - started:.0f} s")
    yield process, address, folder
    kill(process)


def healthy(address):
    try:
        return urllib.request.urlopen(address + "/health", timeout=2).status == 200
    except OSError:
        return False


def kill(process):
    """The server and its engine process, which share a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def engine_of(server, policy, **settings):
    _, address, folder = server
    tokenizer = load(RUN.model, 0).tokenizer
    settings = {"temperature": LONG.temperature, "retries": 1, "timeout": 60.0, **settings}
    return ServerEngine(address, folder, tokenizer, policy.score, **settings)


def same(a, b):
    return a.tokens == b.tokens and torch.equal(a.logprobs, b.logprobs) and a.routes == b.routes and a.text == b.text


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
def test_a_server_answers_with_the_policys_rollouts(server, policy, dialect):
    """As it was started, without a push; both dialects draw the same."""
    rollouts = engine_of(server, policy, dialect=dialect).generate(PROMPTS, 2, key=(1,), sampling=LONG)
    found = parity(rollouts, policy.score)
    print(dialect, found)
    assert found.tokens > 1000 and found.logprob_max < 1e-5 and found.set_change == 0
    assert all(r.routes.coverage == 1 for r in rollouts)


def test_pushes_over_a_shared_folder_are_checked_like_those_in_process(server, policy):
    engine = engine_of(server, policy)
    for push in range(3):
        perturb(policy.model, 0.05, seed=push)
        assert engine.load(policy.weights()) < 1e-5
    found = parity(engine.generate(PROMPTS, 1, key=(1,), sampling=LONG), policy.score)
    assert found.logprob_max < 1e-5 and found.set_change == 0
    sampling = Sampling(0.7, 40, ("a",))
    stopped = [r for r in engine.generate(PROMPTS, 2, key=(2,), sampling=sampling) if r.finished]
    assert stopped and all(r.routes.coverage == 1 and "a" not in r.text for r in stopped)


def test_a_server_killed_in_the_middle_of_a_batch_loses_nothing_already_received(server, policy):
    """The last test of this file: the server is gone afterwards."""
    process, address, _ = server
    engine = engine_of(server, policy, concurrency=4, retries=1)
    whole = engine.generate(PROMPTS, 4, key=(5,), sampling=LONG)

    def strike():
        while len(engine.received) < 9:
            time.sleep(0.002)
        kill(process)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(BatchIncomplete, match="of 64 completions were received") as raised:
        engine.generate(PROMPTS, 4, key=(5,), sampling=LONG)
    kept = [n for n, rollout in enumerate(raised.value.rollouts) if rollout is not None]
    print(f"{len(kept)} of 64 kept")
    assert 9 <= len(kept) < 64 and all(same(raised.value.rollouts[n], whole[n]) for n in kept)
    assert len(engine.received) == len(kept) and not healthy(address)
