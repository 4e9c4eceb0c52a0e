"""One wrapper for every engine with weights of its own: what is pushed, what is checked, and who takes part."""

from __future__ import annotations

import pytest

from moe_rl import ranks
from moe_rl.build import build_engine
from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.errors import RunError
from moe_rl.integrations.vllm.push import CheckedEngine, CheckpointReceiver, Tolerance, probe_prompts
from moe_rl.integrations.vllm.server import ServerEngine
from moe_rl.models.load import skeleton
from moe_rl.rollouts.hf import HFEngine
from tests.conftest import build, perturb
from tests.rollouts.fake_engine import SIZES, FakeEngine, policy_of, small

RUN = RunConfig(arm=Arm(name="a"))


class Receiver:
    """An engine elsewhere; pushes in `lost` reach no weight, those in `missed` are not even counted."""

    name, reports_routes, dtype = "elsewhere", True, None

    def __init__(self, folder, loaded):
        self.fake, self.pushes, self.lost, self.missed = FakeEngine(folder, loaded), 0, (), ()
        self.model = skeleton(ModelConfig(name=str(folder)))

    def generate(self, *arguments, **settings):
        return self.fake.engine.generate(*arguments, **settings)

    def push(self, weights):
        self.pushes += 1
        sent = {name: weight.contiguous() for name, weight in weights}
        if self.pushes not in (*self.lost, *self.missed):
            self.fake.reload(sent)
        elif self.pushes in self.lost:
            self.fake.pushes += 1
        return self.fake.pushes

    def close(self):
        self.closed = True


@pytest.fixture
def loaded():
    return small()


def checked(engine, loaded):
    probes = probe_prompts(loaded.tokenizer, 258)
    return CheckedEngine(engine, policy_of(loaded).score, probes, Tolerance.of("float32"), 1.0)


def weights(loaded):
    return policy_of(loaded).weights()


def test_a_receiver_is_sent_a_checkpoint_and_answers_as_the_policy_does(loaded, tmp_path):
    engine = checked(Receiver(tmp_path, loaded), loaded)
    assert isinstance(engine.engine, CheckpointReceiver)
    for seed in range(2):
        perturb(loaded.model, 0.05, seed=seed)
        assert engine.load(weights(loaded)) < 1e-5
    engine.close()
    assert engine.engine.closed


@pytest.mark.parametrize("kind, match", [("missed", "taken over 1 pushes"), ("lost", "push 2 to elsewhere")])
def test_a_lost_push_is_noticed_by_the_count_or_else_by_completions(loaded, tmp_path, kind, match):
    engine = checked(Receiver(tmp_path, loaded), loaded)
    setattr(engine.engine, kind, (2,))
    engine.load(weights(loaded))
    perturb(loaded.model, 0.05)
    with pytest.raises(RunError, match=match):
        engine.load(weights(loaded))
    if kind == "lost":
        assert engine.load(weights(loaded)) < 1e-5, "the next push mends it"


def test_a_copy_of_the_module_is_loaded_under_its_own_names_and_checked_too(loaded, monkeypatch):
    engine = checked(HFEngine(build("qwen3_moe", seed=9, **SIZES), loaded.tokenizer), loaded)
    assert engine.load(weights(loaded)) < 1e-5
    monkeypatch.setattr(engine.engine, "load", lambda given: list(given))
    perturb(loaded.model, 0.05)
    with pytest.raises(RunError, match="push 2"):
        engine.load(weights(loaded))


def test_a_rank_without_engine_gives_its_weights_and_compares_what_rank_0_drew(loaded, monkeypatch):
    with_engine = checked(HFEngine(build("qwen3_moe", seed=9, **SIZES), loaded.tokenizer), loaded)
    drawn = []
    monkeypatch.setattr(ranks, "from_rank_0", lambda function: drawn.append(function()) or drawn[-1])
    gap = with_engine.load(weights(loaded))
    other, given = checked(None, loaded), list(weights(loaded))
    monkeypatch.setattr(ranks, "from_rank_0", lambda function: drawn[-1])
    left = iter(given)
    assert other.load(left) == gap and next(left, None) is None
    perturb(loaded.model, 0.05)
    with pytest.raises(RunError, match="push 1"):
        other.load(given)
    other.close()


@pytest.mark.parametrize("engine", ["hf", "server(url='http://127.0.0.1:1', dtype=bfloat16)"])
def test_an_engine_is_checked_unless_it_shares_the_policys_module(loaded, tmp_path, engine):
    run, policy = RUN.replace(engine=engine), policy_of(loaded)
    apart = build_engine(run, loaded, policy, tmp_path, spread=True)
    assert isinstance(apart, CheckedEngine) and isinstance(apart.engine, HFEngine if engine == "hf" else ServerEngine)
    assert apart.tolerance == Tolerance.of("float32" if engine == "hf" else "bfloat16")
    assert apart.temperature == run.temperature and len(apart.probes) == 8
    nobody = build_engine(run, None, policy, tmp_path, spread=True)
    assert isinstance(nobody, CheckedEngine) and nobody.engine is None
    together = build_engine(run, loaded, policy, tmp_path, spread=False)
    assert type(together) is (HFEngine if engine == "hf" else CheckedEngine)
