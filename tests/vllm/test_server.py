"""A real vLLM server on loopback: pushes over a shared folder, hangs, refusals, policies on two ranks
(Megatron-core, FSDP2) that train with it, and its death."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from moe_rl.errors import RunError
from moe_rl.integrations.vllm.push import CheckedEngine, Tolerance, parity, probe_prompts
from moe_rl.integrations.vllm.server import ServerEngine
from moe_rl.models.load import load
from moe_rl.storage import folder as runs
from moe_rl.storage import frames
from moe_rl.types import Prompt, Sampling
from tests.conftest import perturb
from tests.vllm.conftest import NEEDS_VLLM, RUN, healthy
from tests.vllm.test_conversations import TRAINED, check_lagged

pytestmark = NEEDS_VLLM

PROMPTS = [Prompt("", tokens=tuple(range(40 + i, 52 + i))) for i in range(16)]
LONG = Sampling(0.7, 40)
ROOT = Path(__file__).parents[2]
MAIN = Path(sys.prefix).with_name(".venv") / "bin" / "python"
"""Of the environment beside this one, which has Megatron-core."""


def before_request(number, engine, action, monkeypatch):
    """Carry out the action before the engine's request of this number, counted from 1. With `concurrency=4` between
    `number - 4` and `number - 1` answers have come by then, however fast the server is."""
    client, count = engine.engine.client, itertools.count(1)
    post = client.post

    def counted(*request):
        if next(count) == number:
            action()
        return post(*request)

    monkeypatch.setattr(client, "post", counted)


def engine_of(server, policy, **settings):
    tokenizer = load(RUN.model, 0).tokenizer
    engine = ServerEngine(server.address, server.folder, tokenizer, **{"retries": 1, "timeout": 60.0, **settings})
    probes = probe_prompts(tokenizer, policy.model.config.vocab_size)
    return CheckedEngine(engine, policy.score, probes, Tolerance.of("float32"), LONG.temperature)


def same(a, b):
    return a.tokens == b.tokens and torch.equal(a.logprobs, b.logprobs) and a.routes == b.routes and a.text == b.text


def test_a_server_answers_with_the_policys_rollouts(server, policy):
    """As it was started, without a push."""
    rollouts = engine_of(server, policy).generate(PROMPTS, 2, key=(1,), sampling=LONG)
    found = parity(rollouts, policy.score)
    print(found)
    assert found.tokens > 1000 and found.logprob_max < 1e-5 and found.any_change_rate == 0
    assert all(r.routes.coverage == 1 for r in rollouts)


def test_pushes_over_a_shared_folder_are_checked_like_those_in_process(server, policy):
    engine = engine_of(server, policy)
    for push in range(3):
        perturb(policy.model, 0.05, seed=push)
        assert engine.load(policy.weights()) < 1e-5
    found = parity(engine.generate(PROMPTS, 1, key=(1,), sampling=LONG), policy.score)
    assert found.logprob_max < 1e-5 and found.any_change_rate == 0
    sampling = Sampling(0.7, 40, ("a",))
    stopped = [r for r in engine.generate(PROMPTS, 2, key=(2,), sampling=sampling) if r.finished]
    assert stopped and all(r.routes.coverage == 1 and "a" not in r.text for r in stopped)

    other = engine_of(server, policy)  # as a resumed run, or the study's next one
    assert other.load(policy.weights()) < 1e-5
    with pytest.raises(RunError, match="push 4, .* push 3"):
        engine.generate(PROMPTS[:1], 1, key=(3,), sampling=LONG)


def test_a_run_trains_on_conversations_of_the_weights_that_it_names(server, policy, tmp_path):
    check_lagged(engine_of(server, policy).engine, tmp_path, TRAINED.replace(stop=TRAINED.stop[:4]))


class Job:
    """`megatron_study.py` on two ranks in the main environment, with this server; begun, or gone on with."""

    def __init__(self, server, out, policy):
        self.run, self.log = out / "megatron_vllm/r3/base/seed=0", out.with_suffix(".log")
        launcher = [MAIN, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = ["-m", "moe_rl", "run", "tests/vllm/megatron_study.py", "--policy", *policy]
        settings = ["--set", "engine=server", "--set", f"engine.url={server.address}", "--out", out]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*launcher, *command, *settings], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def finish(self):
        assert self.process.wait(600) == 0, self.log.read_text()[-5000:]
        return self.run

    def kill_after(self, step):
        """SIGKILL to the launcher and both ranks, as soon as this step is committed."""
        while runs.last_step(self.run) < step:
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            time.sleep(0.01)
        launcher = psutil.Process(self.process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for process in family:
            process.kill()
        psutil.wait_procs(family, 60)  # until then they hold the run's lock
        found = runs.state(self.run)
        assert (found["state"], runs.last_step(self.run)) == ("interrupted", step)


@pytest.mark.skipif(not MAIN.exists(), reason=f"Megatron-core is in the main environment, {MAIN}: `make setup`")
@pytest.mark.parametrize("trained_by", [("megatron(ep=2)",), ("fsdp",)], ids=lambda words: words[0])
def test_two_ranks_train_on_its_routes_and_end_identical_after_a_kill(trained_by, server, policy, tmp_path):
    """R3. The server has seen pushes of others before, and goes on with those of the run that was killed."""
    engine = engine_of(server, policy).engine
    before = engine.count_pushes()
    whole = Job(server, tmp_path / "whole", trained_by).finish()
    now = engine.count_pushes()
    assert now == before + 4 > 4, "one to begin with, and one after every step"
    Job(server, tmp_path / "cut", trained_by).kill_after(2)
    cut = Job(server, tmp_path / "cut", trained_by).finish()

    steps, updates = (frames.read_table(whole, name) for name in ("steps", "updates"))
    trained = steps[steps["step"] > 0]
    print(trained.filter(regex="^(reward|push|engine)").T, updates["coverage"].describe())
    assert len(trained) == 3 and (trained["push_gap_max"] < 1e-5).all() and trained["reward"].nunique() > 1
    assert (trained["engine_unknown"] == 0).all() and (trained["engine_any_change_rate"] == 0).all()
    assert (trained["engine_logprob_max"] < 1e-5).all() and (updates["coverage"] == 1).all()
    assert frames.read_table(cut, "steps")["reward"].equals(steps["reward"])
    assert frames.diff(whole, cut) is None
    assert runs.read_manifest(whole)["checkpoint"] == runs.read_manifest(cut)["checkpoint"]


def test_a_server_killed_in_the_middle_of_a_batch_loses_nothing_already_received(server, policy, monkeypatch):
    """The last test of this file: the server is gone afterwards."""
    engine = engine_of(server, policy, concurrency=4, retries=1)
    whole = engine.generate(PROMPTS, 4, key=(5,), sampling=LONG)
    before_request(20, engine, server.kill, monkeypatch)
    with pytest.raises(RunError, match="of 64 completions were received"):
        engine.generate(PROMPTS, 4, key=(5,), sampling=LONG)
    kept = [*engine.engine.received.values()]
    print(f"{len(kept)} of 64 kept")
    assert 16 <= len(kept) < 20 and all(any(same(rollout, other) for other in whole) for rollout in kept)
    assert not healthy(server.address)
