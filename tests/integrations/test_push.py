"""Weights on their way to another engine: names of a checkpoint, parity that notices wrong weights, who takes part."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_rl import ranks
from moe_rl.build import build_engine
from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.errors import RunError
from moe_rl.integrations import shards
from moe_rl.integrations.shards import checkpoint_weights, describe, one_by_one, write_shards
from moe_rl.integrations.vllm.push import (
    CheckedEngine,
    CheckpointReceiver,
    Parity,
    Tolerance,
    parity,
    probe_prompts,
    require_parity,
)
from moe_rl.integrations.vllm.server import ServerEngine
from moe_rl.models.load import skeleton
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import layout_of
from moe_rl.types import Sampling
from tests.conftest import FAMILIES, build, perturb
from tests.rollouts.fake_engine import SIZES, FakeEngine, policy_of, small


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_leave_under_the_names_a_checkpoint_has_and_come_back_bit_for_bit(family, tmp_path):
    loaded = small(family)
    loaded.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    describe(loaded.model, loaded.tokenizer, tmp_path / "engine")
    served, weights = skeleton(ModelConfig(name=str(tmp_path / "engine"))), loaded.model.state_dict()
    assert one_by_one(served, weights)
    sent = write_shards(tmp_path / "engine", checkpoint_weights(served, weights.items()))
    assert set(saved) <= set(sent), "a checkpoint leaves out tied weights at most"
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert layout_of(skeleton(ModelConfig(name=str(tmp_path / "engine")))) == layout_of(loaded.model)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.architectures == [type(loaded.model).__name__]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_weights_that_can_only_be_undone_together_are(family, tmp_path, monkeypatch):
    loaded = small(family)
    weights = dict(loaded.model.state_dict())
    whole = dict(checkpoint_weights(loaded.model, weights.items()))
    monkeypatch.setattr(shards, "one_by_one", lambda model, weights: False)
    together = dict(checkpoint_weights(loaded.model, weights.items()))
    assert whole.keys() == together.keys() and all(torch.equal(w, together[name]) for name, w in whole.items())


def test_files_are_written_as_weights_come_and_hold_no_more_than_they_must(tmp_path):
    """Never alive at once: more than a file, the weight that has come, and the one before it."""
    alive: set[int] = set()
    most = 0

    def coming():
        nonlocal most
        for number in range(20):
            tensor = torch.full((2**18,), float(number))  # 1 MiB
            alive.add(number)
            weakref.finalize(tensor, alive.discard, number)
            most = max(most, len(alive))
            yield f"w{number:02d}", tensor

    written = write_shards(tmp_path, coming(), most=5 * 2**20)
    assert most <= 2
    assert [Path(file).name for file in written.files] == [f"model-{n:05d}.safetensors" for n in (1, 2, 3, 4)]
    assert all(Path(file).stat().st_size < 5 * 2**20 + 2**12 for file in written.files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["w07"] == "model-00002.safetensors" and index["metadata"]["total_size"] == 20 * 2**20
    assert list(written) == [f"w{n:02d}" for n in range(20)] and all(
        bool((written[f"w{n:02d}"] == n).all()) for n in range(20)
    )


def test_a_push_replaces_the_files_of_the_one_before_and_what_is_written_is_a_copy(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    tied = {"a": weight, "b": weight, "c": weight.T}
    old = write_shards(tmp_path, tied.items(), most=30)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        *(f"model-0000{n}.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    new = write_shards(tmp_path, {name: 2 * w for name, w in tied.items()}.items())
    assert [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(new["c"], 2 * weight.T) and torch.equal(old["b"], weight), "a file that is open stays as it was"
    assert load_file(tmp_path / "model.safetensors").keys() == {"a", "b", "c"}


def test_weights_of_another_model_are_refused(tmp_path):
    loaded = small()
    describe(loaded.model, loaded.tokenizer, tmp_path)
    weights = dict(loaded.model.state_dict())
    weights.pop("model.norm.weight")
    with pytest.raises(RunError, match="model.norm.weight"):
        dict(checkpoint_weights(skeleton(ModelConfig(name=str(tmp_path))), weights.items()))


@pytest.fixture
def engine(tmp_path):
    return FakeEngine(tmp_path, small())


def found(engine, policy, temperature=1.0):
    prompts = probe_prompts(engine.engine.tokenizer, 258)
    sampling = Sampling(temperature, 12)
    return parity(engine.engine.generate(prompts, 1, key=(0,), sampling=sampling), policy.score)


def test_parity_holds_after_a_push_and_fails_before_after_an_update_and_at_another_temperature(engine, tmp_path):
    loaded = small()
    policy, tolerance = policy_of(loaded), Tolerance.of("float32")
    with pytest.raises(RunError, match="before"):
        require_parity(found(engine, policy), tolerance, "before")
    engine.reload(
        {n: w.contiguous() for n, w in checkpoint_weights(skeleton(ModelConfig(name=str(tmp_path))), policy.weights())}
    )
    good = found(engine, policy)
    require_parity(good, tolerance, "after")
    assert good.tokens > 50 and good.logprob_max < 1e-5 and good.any_change_rate == 0
    with pytest.raises(RunError, match="temperature"):
        require_parity(found(engine, policy, 0.7), tolerance, "another temperature")
    perturb(loaded.model, 0.01)
    with pytest.raises(RunError, match="after an update"):
        require_parity(found(engine, policy), tolerance, "after an update")


def test_parity_that_is_not_a_number_is_no_parity():
    with pytest.raises(RunError):
        require_parity(Parity(8, float("nan"), float("nan"), 0.0), Tolerance.of("bfloat16"), "nan")


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
