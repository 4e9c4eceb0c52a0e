"""A real vLLM, one for all tests: `make test-vllm` installs it and runs them. Skipped where it is absent."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moe_rl.config import Arm, ColdStart, ModelConfig, Optimizer, RunConfig
from moe_rl.models.load import load, save_checkpoint
from moe_rl.policies.hf import HFPolicy
from moe_rl.registry import Component

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
torch.set_num_threads(1)

RUN = RunConfig(
    arm=Arm(name="grpo"),
    model=ModelConfig(overrides={"head_dim": 32}),  # the least that vLLM's attention takes on a CPU
    task=Component("running_sums", digits=4),
    max_new_tokens=5,
    eval_prompts=8,
    cold_start=ColdStart(target=0.3, max_steps=1500),
)
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="tests against a real vLLM are run by `make test-vllm`"
)
START = 600.0
"""Seconds at most until a server answers, on a busy machine."""
CACHE = Path(__file__).parents[2] / ".cache" / "test-vllm"
"""Where the trained checkpoint is kept between runs of the tests."""


class Serving:
    """One engine and the policy whose weights it serves; the tests change the weights."""

    def __init__(self, folder, temperature=1.0, dtype="float32", model=RUN.model):
        from moe_rl.integrations.shards import describe
        from moe_rl.integrations.vllm.engine import VLLMEngine
        from moe_rl.integrations.vllm.push import CheckedEngine, Tolerance, probe_prompts

        self.loaded = load(model, 0)
        self.folder = folder
        describe(self.loaded.model, self.loaded.tokenizer, folder)
        self.policy = HFPolicy(self.loaded.model, Optimizer(), temperature=temperature)
        self.vllm = VLLMEngine(folder, self.loaded.tokenizer, dtype=dtype, max_tokens=256)
        probes = probe_prompts(self.loaded.tokenizer, self.loaded.model.config.vocab_size)
        self.engine = CheckedEngine(self.vllm, self.score, probes, Tolerance.of(dtype, "float32"), temperature)

    def score(self, batch):
        return self.policy.score(batch)

    def at(self, temperature):
        """Both sides at another temperature."""
        self.policy.temperature = self.engine.temperature = temperature
        return self


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    serving = Serving(tmp_path_factory.mktemp("served"))
    yield serving
    serving.engine.close()


@pytest.fixture
def serving(running):
    """The engine with the random weights of seed 0, pushed."""
    running.loaded.model.load_state_dict(load(RUN.model, 0).model.state_dict())
    running.at(1.0).engine.load(running.policy.weights())
    return running


@pytest.fixture(scope="session")
def trained():
    """Weights that solve four running sums in about a third of the attempts."""
    from moe_rl import build as execute
    from moe_rl.models.supervised import cold_start
    from moe_rl.tasks.base import load_task

    loaded = load(RUN.model, 0)
    cold_start(loaded, load_task(RUN.task), RUN, CACHE, execute.sample, alone=execute.alone)
    return loaded


# ---------------------------------------------------------------------- a server
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
ARGUMENTS = (
    "--dtype float32 --max-model-len 256 --enforce-eager --enable-return-routed-experts "
    "--no-enable-chunked-prefill "
    "--logprobs-mode processed_logprobs --worker-extension-cls moe_rl.integrations.vllm.engine.WorkerExtension"
)


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen
    address: str
    folder: Path
    log: Path

    def signal(self, number):
        """To the server and its engine processes, which share a session of their own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session", autouse=True)
def starting(request, tmp_path_factory):
    """A server on a checkpoint of the random weights of seed 0, where a test asks for one. Starting takes a minute,
    nearly all of it imports, so it starts first and gets ready while other tests run."""
    if not any("server" in item.fixturenames for item in request.session.items) or NEEDS_VLLM.args[0]:
        yield None
        return
    folder = tmp_path_factory.mktemp("server")
    loaded = load(RUN.model, 0)
    save_checkpoint(loaded.model, loaded.tokenizer, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | ENVIRONMENT
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--model", str(folder), *ARGUMENTS.split()],
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", folder, log)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def policy():
    return HFPolicy(load(RUN.model, 0).model, Optimizer(), temperature=0.7)


@pytest.fixture(scope="module")
def server(starting):
    """The server, ready."""
    started = time.monotonic()
    while not healthy(starting.address):
        if starting.process.poll() is not None or time.monotonic() - started > START:
            pytest.fail(f"the server did not start:\n{starting.log.read_text()[-3000:]}")
        time.sleep(0.5)
    print(f"waited {time.monotonic() - started:.0f} s for the server")
    return starting


def healthy(address):
    try:
        return urllib.request.urlopen(address + "/health", timeout=2).status == 200
    except OSError:
        return False
