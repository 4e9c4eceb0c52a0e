"""Low-rank adapters: what is trained, what engines and checkpoints receive, and that runs with them resume."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_rl.build import check
from moe_rl.config import Arm, ModelConfig, Optimizer, RouterNoise
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations.fsdp import fsdp
from moe_rl.models.adapters import add_adapters, find_layers, merged, plain_state
from moe_rl.models.load import load, save_checkpoint
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.policies.hf import HFPolicy, hf
from moe_rl.ranks import join_shards
from moe_rl.registry import Component
from moe_rl.rollouts.hf import HFEngine
from moe_rl.rollouts.mismatch import MismatchedEngine
from tests.conftest import build
from tests.policies.test_hf import GRPO, make_batch, part_of
from tests.test_trainer import TINY, whole_and_cut

TARGETS = ("q_proj", "v_proj")


def policy_of(model, **settings):
    add_adapters(model, 4, 32.0, TARGETS, seed=3)
    return HFPolicy(model, Optimizer(lr=1e-2), **settings)


def train(policy, count=2):
    for seed in range(count):
        batch = make_batch(seed=seed)
        policy.update(part_of(batch, policy.score(batch)), GRPO)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss"])
def test_a_merged_model_computes_what_the_adapted_one_does(family):
    batch, plain = make_batch(), build(family)
    before = HFPolicy(plain, Optimizer()).score(batch)
    policy = policy_of(build(family))
    assert torch.equal(policy.score(batch).logprobs, before.logprobs), "new adapters change nothing"
    train(policy)
    after = policy.score(batch)
    assert (after.logprobs - before.logprobs).abs().max() > 1e-3
    changed = {name for name, tensor in policy.weights() if not torch.equal(tensor, plain.state_dict()[name])}
    assert changed and all(name.split(".")[-2] in TARGETS for name in changed)
    plain.load_state_dict(dict(policy.weights()))
    twin = HFPolicy(plain, Optimizer()).score(batch)
    assert torch.allclose(twin.logprobs, after.logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_trained_and_saved(dtype, tmp_path):
    def fresh():
        return policy_of(load(ModelConfig(dtype=dtype), 0).model)

    policy = fresh()
    start = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    train(policy)
    moved = {name for name, p in policy.model.named_parameters() if not torch.equal(p, start[name])}
    assert moved and all(".lora_" in name for name in moved)
    policy.save(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.2 * 4 * sum(p.numel() for p in start.values())
    resumed = fresh()
    resumed.load(tmp_path)
    for one in (policy, resumed):
        train(one, 1)
    assert all(torch.equal(*pair) for pair in zip(policy.model.parameters(), resumed.model.parameters(), strict=True))


def test_engines_receive_merged_weights_and_checkpoints_hold_them(tmp_path):
    loaded = load(ModelConfig(), 0)
    batch = make_batch()
    policy = policy_of(loaded.model)
    own, copy = HFEngine(loaded.model, loaded.tokenizer), MismatchedEngine(loaded.model, loaded.tokenizer)
    train(policy)
    adapters = [p.detach().clone() for p in policy.trained.parameters()]
    own.load(pushed := policy.weights())
    assert len([*pushed]) == len(copy.model.state_dict()) - 1, "nothing of its own module is merged or copied"
    copy.load(policy.weights())
    save_checkpoint(loaded.model, loaded.tokenizer, tmp_path)
    expected = policy.score(batch).logprobs
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (copy.model, exported):
        assert not find_layers(model)
        twin = HFPolicy(model.requires_grad_(), Optimizer())
        assert torch.allclose(twin.score(batch).logprobs, expected, atol=1e-5)
    assert all(torch.equal(*pair) for pair in zip(adapters, policy.trained.parameters(), strict=True))
    other = load(ModelConfig(), 0)
    add_adapters(other.model, 4, 32.0, TARGETS, seed=3)
    with pytest.raises(RunError, match="has adapters"):
        HFEngine(other.model, other.tokenizer).load(policy.weights())


@pytest.mark.parametrize(
    "kind",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
        {"target_modules": ["q_proj"], "lora_bias": True},
    ],
    ids=["dora", "bias"],
)
def test_all_kinds_of_adapters_are_merged_by_peft_itself(kind, tmp_path):
    """DoRA is no sum; the merged weights are those of PEFT's own `merge_and_unload`."""
    from peft import LoraConfig, PeftModel, get_peft_model

    plain = build("qwen2_moe" if "lora_bias" in kind else "olmoe")
    plain_weights = {name: x.clone() for name, x in plain.state_dict().items()}
    adapted = get_peft_model(plain, LoraConfig(r=2, init_lora_weights=False, **kind))
    for name, p in adapted.named_parameters():
        if name.endswith("lora_B.default.bias"):
            torch.nn.init.normal_(p)
    ours = {name.removeprefix("base_model.model."): x for name, x in merged(adapted)}
    with adapted.disable_adapter():
        off = {name.removeprefix("base_model.model."): x for name, x in merged(adapted)}
    assert all(torch.equal(off[name], plain_weights[name]) for name in off)
    save_checkpoint(adapted, byte_tokenizer(), tmp_path)
    again = PeftModel.from_pretrained(build("qwen2_moe" if "lora_bias" in kind else "olmoe"), tmp_path)
    again.get_base_model().load_state_dict(adapted.get_base_model().state_dict(), strict=False)
    assert all(name in dict(again.named_parameters()) for name, _ in adapted.named_parameters())
    theirs = adapted.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_a_model_without_adapters_gives_its_own_tensors():
    model = build("olmoe")
    state = model.state_dict()
    assert {name: x.data_ptr() for name, x in merged(model)} == {name: x.data_ptr() for name, x in state.items()}
    assert plain_state(model).keys() == state.keys()


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    "targets", [["nowhere"], ["q_proj", "gate", "router"], ["gate_proj", "up_proj", "down_proj"], ["lm_head"]], ids=str
)
def test_targets_that_are_missing_routers_experts_or_embeddings_are_refused(family, targets):
    """PEFT puts adapters on parameters in the place of linear maps that became one tensor."""
    if family == "gpt_oss" and "gate_proj" in targets:
        targets = ["gate_up_proj"]
    with pytest.raises(ConfigError, match=targets[0]):
        add_adapters(build(family), 2, 4.0, targets, 0)


def test_a_run_with_adapters_resumes_equal_and_exports_a_whole_model(tmp_path):
    """With a reference, which has no adapters, and an engine in bfloat16, which has none either."""
    run = TINY.replace(
        policy=Component("hf", lora=4, lora_targets=TARGETS),
        arm=Arm(name="kl", routes="old_policy", terms=(Component("kl", coef=0.1),)),
        engine=Component("perturbed", dtype="bfloat16"),
        hf_checkpoints=(4,),
    )
    whole_and_cut(run, tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoints" / "step=000004")
    assert not find_layers(exported)


@pytest.mark.parametrize(
    "options, settings",
    [
        ({}, {}),
        ({"reduce": "update"}, {"activation_checkpointing": True}),
        ({}, {"model.dtype": "bfloat16", "model.router_dtype": "float32"}),
        ({"compile": "eager"}, {"model.dtype": "bfloat16", "activation_checkpointing": True}),
    ],
    ids=str,
)
def test_one_rank_of_fsdp_trains_adapters_to_the_bit_as_hf_does(options, settings, one_rank, tmp_path):
    """Adapters of two micro-batches' gradients, clipped; then from a checkpoint. Frozen weights keep their dtype."""
    run = TINY.replace(**{"micro_batch": 2, "optimizer": Optimizer(lr=1e-2, grad_clip=0.5), **settings})
    shared = {name: value for name, value in options.items() if name != "reduce"}
    adapters = {"lora": 4, "lora_alpha": 16.0, "lora_targets": TARGETS}
    alone = hf(run, load(run.model, 0), False, **adapters, **shared)
    ours, resumed = (fsdp(run, load(run.model, 0), False, **adapters, **options) for _ in range(2))
    assert all(torch.equal(x, dict(alone.weights())[name]) for name, x in ours.weights())
    wide = {p.dtype for name, p in ours.model.named_parameters() if ".lora_" in name}
    frozen = {p.dtype for name, p in ours.model.named_parameters() if ".lora_" not in name and ".gate." not in name}
    assert wide == {torch.float32} and frozen == {getattr(torch, run.model.dtype)}
    for seed in (0, 1):
        batch = make_batch(seed=seed)
        old = alone.score(batch)
        part = part_of(batch, old, old.routes)
        assert torch.equal(ours.score(batch).logprobs, old.logprobs)
        assert torch.equal(ours.gradient(part, GRPO), alone.gradient(part, GRPO))
        one, two = (policy.update(part, GRPO) for policy in (alone, ours))
        assert one.grad_norm == two.grad_norm and one.grad_clipped and two.grad_clipped
        if seed == 0:
            ours.save(tmp_path)
            resumed.load(tmp_path)
            ours = resumed
    trained = [policy.trained.parameters() for policy in (alone, ours)]
    assert all(torch.equal(p, join_shards(q)) for p, q in zip(*trained, strict=True))


@pytest.mark.parametrize("policy", ["hf", "fsdp"])
@pytest.mark.parametrize(
    "options, settings",
    [
        ({"lora": 4}, {"optimizer": Optimizer(router_lr_scale=0.5)}),
        ({"lora_alpha": 16.0}, {}),
        ({"lora_targets": ["q_proj"]}, {}),
        ({"lora": 4, "lora_targets": ["nowhere"]}, {}),
        ({"lora": 4, "lora_targets": "q_proj"}, {}),
        ({"lora": 0}, {}),
        ({"lora": 4}, {"router_noise": RouterNoise(scale=1.0, direction="last_step")}),
    ],
    ids=str,
)
def test_settings_that_would_change_nothing_are_refused(policy, options, settings):
    with pytest.raises(ConfigError, match="lora"):
        check(TINY.replace(policy=Component(policy, **options), **settings))
