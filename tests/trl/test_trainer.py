"""The adapter against the real TRL: what it must not touch, what it must force, and what it says about both."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.rollouts.hf import HFEngine
from moe_rl.types import Prompt, Sampling
from tests.conftest import perturb, python_block
from tests.rollouts.fake_engine import as_base64, routes_of
from tests.trl.conftest import NEEDS_TRL, PROMPTS, logged, make, ours, reward, tiny
from tests.trl.spy import Spy, expected_logs, pairs, tokens_of

pytestmark = NEEDS_TRL

REPLAY, LIVE = {"routes": "old_policy"}, {"routes": "live"}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
ONCE = 10**6
"""`measure_every` that keeps a short run free of forwards for measuring."""


# ---------------------------------------------------------------------- without replay
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 1, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"gradient_checkpointing": False, "mask_truncated_completions": True, "bf16": True},
        {
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "eval_dataset": True,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "per_device_eval_batch_size": 4,
        },
    ],
    ids=["defaults", "sequence-level", "truncated-bf16", "reentrant-evaluated"],
)
def test_without_replay_losses_gradients_and_weights_are_trls_own_bit_for_bit(tmp_path, settings):
    from trl import GRPOTrainer

    theirs = make(GRPOTrainer, tmp_path, **settings)
    theirs.train()
    mine = ours(tmp_path, routing=LIVE, **settings)  # not before: TRL seeds the global generators when it is made
    mine.train()
    assert len(theirs.state.log_history) > 8 and len(set(logged(theirs, "loss"))) > 4
    for a, b in zip(theirs.state.log_history, mine.state.log_history, strict=True):
        different = {name for name in a if a[name] != b[name] and not name.endswith(("time", "runtime", "per_second"))}
        assert not different
        assert all(name.startswith(("routing/", "ratios/")) for name in set(b) - set(a))
    for a, b in zip(theirs.model.state_dict().values(), mine.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert max(logged(mine, "routing/expert_change_rate")) > 0


def test_without_replay_there_is_no_forward_beyond_trls(tmp_path):
    trainer = ours(tmp_path, routing=LIVE)
    spy = Spy(trainer)
    trainer.train()
    assert len(spy.steps) == 16 and all(set(step) == {"train", "old"} for step in spy.steps)


# ---------------------------------------------------------------------- with replay
def used(step, phase="ids"):
    """Whether each routed token of a training step went to the old policy's experts, in order, at every MoE layer."""
    for row, old, old_row in pairs(step["train"], step["old"]):
        mask = old["mask"][old_row]
        for moe_layer, ids in old["ids"].items():
            yield from (step["train"][phase][moe_layer][row] == ids[old_row])[mask].all(-1).tolist()


@pytest.mark.parametrize(
    "checkpointing",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["none", "non-reentrant", "reentrant"],
)
@pytest.mark.parametrize("routes", ["old_policy", "live"])
def test_every_update_uses_the_recorded_routes_of_its_very_rows_and_recomputes_under_them(
    tmp_path, checkpointing, routes
):
    trainer = ours(tmp_path, routing={"routes": routes, "measure_every": ONCE}, max_steps=8, **checkpointing)
    spy = Spy(trainer)
    trainer.train()
    assert len(spy.steps) == 16
    phases = ["ids", "again"] if checkpointing["gradient_checkpointing"] else ["ids"]
    for phase in phases:
        same = [list(used(step, phase)) for step in spy.steps]
        assert min(len(tokens) for tokens in same) > 50
        if routes == "old_policy":
            assert all(all(tokens) for tokens in same)
        else:  # the spy does see routes that moved
            assert not any(all(tokens) for tokens in same[4:8] + same[12:])
    if len(phases) == 1:
        assert not any(step["train"]["again"] for step in spy.steps)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_replay_every_router_gets_a_gradient_from_the_policy(tmp_path, checkpointing):
    from transformers import TrainerCallback

    seen = []

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            seen.append([layer.mlp.gate.weight.grad.abs().max().item() for layer in model.model.layers])

    trainer = ours(
        tmp_path, routing=REPLAY, router_aux_loss_coef=0.0, gradient_checkpointing=checkpointing, max_steps=4
    )
    trainer.add_callback(Gradients())
    trainer.train()
    assert len(seen) == 4 and min(min(step) for step in seen) > 0


@pytest.mark.parametrize("rows", [1, 4])
def test_right_after_generation_every_ratio_is_one(tmp_path, rows):
    """Up to rounding: TRL scores without a gradient, and with its shuffle in other batches."""
    trainer = ours(
        tmp_path, routing=REPLAY, per_device_train_batch_size=rows, gradient_accumulation_steps=1, max_steps=16
    )
    trainer.train()
    largest = logged(trainer, "ratios/token_log_ratio_max")
    fresh = largest[::8]
    assert len(largest) == 16
    assert max(fresh) < 2e-6
    assert min(set(largest) - set(fresh)) > 1e-4
    assert logged(trainer, "routing/expert_change_rate")[::8] == [0, 0] == logged(trainer, "routing/pull")[::8]


def test_adapters_that_are_switched_off_for_the_reference_do_not_lend_their_routes(tmp_path):
    """With LoRA and a KL term TRL scores the same module twice: as old policy, and without adapters as reference."""
    from peft import LoraConfig

    trainer = ours(
        tmp_path,
        routing={**REPLAY, "measure_every": ONCE},
        beta=0.1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        peft_config=LoraConfig(**LORA),
    )
    spy = Spy(trainer)
    trainer.train()
    for step in spy.steps:
        assert len(step["old"]) == 8
        assert all(used({**step, "old": step["old"][:4]}))
        assert not all(used({**step, "old": step["old"][4:]}))
    assert logged(trainer, "ratios/token_log_ratio_max")[0] < 2e-6


def test_evaluation_is_trls_own_under_replay_too(tmp_path):
    trainer = ours(tmp_path, routing=REPLAY, eval_dataset=True, per_device_eval_batch_size=4, max_steps=4)
    spy = Spy(trainer)
    trainer.train()
    spy.steps.append({})
    found = trainer.evaluate()
    assert math.isfinite(found["eval_loss"]) and set(spy.steps[-1]) == {"unconstrained"}
    assert not any("routing" in name or "ratios" in name for name in found)


# ---------------------------------------------------------------------- what it logs
@pytest.mark.parametrize("routes", ["old_policy", "live"])
@pytest.mark.parametrize("truncated", [False, True])
def test_what_is_logged_equals_a_recomputation(tmp_path, routes, truncated):
    trainer = ours(tmp_path, routing={"routes": routes}, mask_truncated_completions=truncated)
    spy = Spy(trainer)
    trainer.train()
    seen = [tokens_of(step, step["train" if routes == "live" else "unconstrained"]) for step in spy.steps]
    expected = expected_logs(seen)
    if routes == "live":
        assert expected.pop("routing/pull") == expected["routing/expert_change_rate"] and not logged(
            trainer, "routing/pull"
        )
    for name, values in expected.items():
        assert logged(trainer, name) == pytest.approx(values, rel=1e-6, abs=1e-12), name
        assert values[-1] != 0


def test_measuring_now_and_then_measures_the_last_micro_step_of_each_stretch(tmp_path):
    trainer = ours(tmp_path, routing={**REPLAY, "measure_every": 8}, gradient_accumulation_steps=1, max_steps=16)
    spy = Spy(trainer)
    trainer.train()
    assert [("unconstrained" in step) for step in spy.steps] == ([False] * 7 + [True]) * 2
    change = logged(trainer, "routing/expert_change_rate")
    assert len(change) == 2 and min(change) > 0 and len(logged(trainer, "ratios/token_ess")) == 16


def test_with_dropout_too_measuring_changes_no_weight(tmp_path):
    """The forward for the unconstrained routes draws from the same generators, and runs before the one that is
    trained."""
    weights = []
    for every in (1, ONCE):
        trainer = ours(tmp_path, tiny(attention_dropout=0.3), routing={**REPLAY, "measure_every": every}, max_steps=3)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))


def test_two_processes_log_what_both_saw(tmp_path):
    """Each has rows of its own, of other lengths; the numbers are of all tokens, not means of means."""
    script = Path(__file__).with_name("on_two_processes.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*launch, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2


def test_the_lines_in_the_docs_run_as_they_stand(tmp_path, monkeypatch):
    import trl
    from datasets import Dataset

    small = {"output_dir": str(tmp_path), "max_steps": 4, "max_completion_length": 5, "use_cpu": True, "bf16": False}
    small |= {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    monkeypatch.setattr(trl, "GRPOConfig", partial(trl.GRPOConfig, **small))
    page = Path(__file__).parents[2] / "docs" / "your_trainer.md"
    block = python_block(page.read_text(), "GRPOConfig")
    model, tokenizer = tiny()
    names = {
        "model": model,
        "tokenizer": tokenizer,
        "reward": reward,
        "dataset": Dataset.from_dict({"prompt": PROMPTS}),
    }
    exec(block, names)
    documented = set(re.findall(r"`routing/(\w+)`", page.read_text()))
    last = names["trainer"].state.log_history[3]
    assert documented == {name.removeprefix("routing/") for name in last if name.startswith("routing/")}


def test_the_callback_of_the_page_logs_a_probe_in_trls_own_trainer(tmp_path):
    from trl import GRPOTrainer

    page = Path(__file__).parents[2] / "docs" / "your_trainer.md"
    block = python_block(page.read_text(), "MonitorCallback")
    trainer = make(GRPOTrainer, tmp_path, max_steps=2, router_aux_loss_coef=0.0)
    ids = torch.arange(3, 43).view(4, 10)
    exec(block, {"trainer": trainer, "probe": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}})
    trainer.train()
    assert (
        len(logged(trainer, "routing/expert_change_rate")) == 2
        and logged(trainer, "routing/expert_change_rate")[-1] > 0
    )
    assert 0 < logged(trainer, "routing/router_confidence")[0] < 1


# ---------------------------------------------------------------------- the engine's routes
class Engine:
    """A `rollout_func`: samples from a model with other routers, and returns its experts as vLLM writes them."""

    def __init__(self, reports=True):
        model, self.tokenizer = tiny()
        perturb(model, 0.2)
        self.engine, self.reports, self.calls = HFEngine(model, self.tokenizer), reports, 0
        self.experts = {}
        """Tokens of a completion with its prompt → ids [input, MoE layer, k]."""

    def __call__(self, prompts, trainer):
        self.calls += 1
        asked = [Prompt("", tokens=tuple(self.tokenizer(text)["input_ids"])) for text in prompts]
        drawn = self.engine.generate(asked, 1, key=(self.calls,), sampling=Sampling(max_new_tokens=9))
        for r in drawn:
            self.experts[r.prompt.tokens + r.tokens] = r.routes.experts[0]
        answer = {
            "prompt_ids": [list(r.prompt.tokens) for r in drawn],
            "completion_ids": [list(r.tokens) for r in drawn],
            "logprobs": [r.logprobs.tolist() for r in drawn],
        }
        return answer | ({"routed_experts": [as_base64(routes_of(r)) for r in drawn]} if self.reports else {})

    def replayed(self, forward):
        """Whether each (token, MoE layer) row of a forward used the engine's experts."""
        for row, mask in enumerate(forward["mask"]):
            tokens = forward["tokens"][row][mask]
            theirs = self.experts[tuple(tokens.tolist())]
            for moe_layer, ids in forward["ids"].items():
                mine = ids[row][mask][:-1].sort(-1).values
                yield from (mine == theirs[:, moe_layer].long().sort(-1).values).all(-1).tolist()


def test_old_log_probs_and_updates_replay_the_engines_experts(tmp_path):
    engine = Engine()
    trainer = ours(tmp_path, routing={"routes": "rollout", "rollout_func": engine})
    spy = Spy(trainer)
    trainer.train()
    assert engine.calls == 2 and len(spy.steps) == 16
    assert all(all(engine.replayed(forward)) for step in spy.steps for forward in (step["train"], *step["old"]))
    assert not all(engine.replayed(spy.steps[0]["unconstrained"])), "the engine's routers are others"
    for first in (0, 4):  # log entries of two micro-steps each, four per pass over a generation batch
        assert logged(trainer, "ratios/token_log_ratio_max")[first] < 1e-5
    assert max(logged(trainer, "ratios/token_log_ratio_max")) > 1e-3
    assert set(logged(trainer, "routing/coverage")) == {1.0} and min(logged(trainer, "routing/pull")) > 0
    assert min(logged(trainer, "routing/engine_any_change_rate")) > 0
    assert not logged(trainer, "routing/any_change_rate")


def test_one_update_per_generation_replays_the_engines_experts_without_old_log_probs(tmp_path):
    engine, on_policy = Engine(), {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 1}
    routing = {"routes": "rollout", "rollout_func": engine}
    trainer = ours(
        tmp_path,
        routing=routing,
        max_steps=1,
        eval_dataset=True,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        mask_truncated_completions=True,
        **on_policy,
    )
    spy = Spy(trainer)
    trainer.train()
    assert [step["old"] for step in spy.steps] == [[]] * 4 and not logged(trainer, "ratios/token_ess")
    assert logged(trainer, "routing/pull")[0] > 0 and logged(trainer, "eval_reward")


def test_an_engine_that_reports_no_experts_is_an_error(tmp_path):
    trainer = ours(tmp_path, routing={"routes": "rollout", "rollout_func": Engine(reports=False)})
    with pytest.raises(RoutingError, match="no 'routed_experts'"):
        trainer.train()


# ---------------------------------------------------------------------- what cannot work is said


@pytest.mark.parametrize(
    "settings, value",
    [
        (dict(routing={"routes": "engine"}), "routes='engine'"),
        (dict(routing={"measure_every": 0}), "measure_every=0"),
        (dict(routing={"routes": "rollout"}), "rollout_func"),
        (dict(torch_compile=True), "torch_compile=True"),
    ],
)
def test_other_settings_are_refused(tmp_path, settings, value):
    with pytest.raises(ConfigError, match=value):
        ours(tmp_path, **settings)


def test_one_update_per_generation_is_refused_under_replay_and_warned_of_without(tmp_path):
    on_policy = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "num_iterations": 1, "max_steps": 1}
    with pytest.raises(ConfigError, match="num_iterations"):
        ours(tmp_path, routing=REPLAY, **on_policy)
    with pytest.warns(UserWarning, match="every ratio is 1"):
        trainer = ours(tmp_path, routing=LIVE, **on_policy)
    trainer.train()
    assert not logged(trainer, "ratios/token_ess") and not logged(trainer, "routing/expert_change_rate")


def test_another_trl_is_refused_before_it_trains_and_another_tuple_before_it_is_read(tmp_path, monkeypatch):
    from trl import GRPOTrainer

    from moe_rl.integrations import trl as adapter

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "__version__", "1.17.0")
        with pytest.raises(ConfigError, match=r"trl 1\.17\.0"):
            ours(tmp_path)
    generate, trainer = GRPOTrainer._generate, ours(tmp_path, routing=LIVE)
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: (*generate(self, prompts)[:5], None, {}, 0, 0))
    with pytest.raises(RoutingError, match="9 values"):
        trainer.train()


@pytest.mark.parametrize("routes", ["old_policy", "live"])
def test_log_probs_that_bypass_the_recorded_forwards_are_an_error(tmp_path, monkeypatch, routes):
    from trl import GRPOTrainer

    trainer = ours(tmp_path, routing={"routes": routes})
    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: model.lm_head.weight.sum())
        with pytest.raises(RoutingError, match="bypassed the forward"):
            trainer.train()
    trainer = ours(tmp_path, routing={"routes": routes})
    generate = GRPOTrainer._generate_and_score_completions

    def elsewhere(self, inputs):
        outputs = generate(self, inputs)
        return {**outputs, "old_per_token_logps": outputs["old_per_token_logps"].clone()}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", elsewhere)
    with pytest.raises(RoutingError, match="old log-probs"):
        trainer.train()


def test_a_loss_outside_a_training_step_is_refused_and_nothing_stays_hooked(tmp_path):
    trainer = ours(tmp_path, routing=REPLAY, max_steps=1)
    trainer.train()
    trainer.model.train()
    with pytest.raises(RoutingError, match="outside training_step"):
        trainer.compute_loss(trainer.model, trainer._buffered_inputs[0])
    assert not any("forward" in layer.mlp.gate.__dict__ for layer in trainer.model.model.layers)
    assert math.isfinite(logged(trainer, "loss")[0])
