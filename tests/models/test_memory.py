"""The estimate against what PyTorch really keeps."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from moe_rl.config import Arm, ModelConfig, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.models import memory, presets, vocabulary
from moe_rl.models.load import load
from moe_rl.models.memory import check_memory, estimate_memory
from moe_rl.models.presets import PRESETS
from moe_rl.policies import hf
from tests.policies.test_hf import GRPO, make_batch, part_of, policy_of
from tests.routing.families import FAMILIES, tiny_config


def run(**changes) -> RunConfig:
    return RunConfig(arm=Arm(name="grpo")).replace(**changes)


def kept_for_backward(model, tokens) -> int:
    """Bytes of the distinct storages that autograd keeps, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens, use_cache=False).logits.log_softmax(-1).sum()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_activations_are_estimated_within_a_factor_of_one_and_a_half(name, own, monkeypatch):
    """Of the operators on a CPU, and of the own ones of a model, which any other device runs."""
    if own:
        monkeypatch.setattr("moe_rl.models.load.use_cpu_kernels", lambda model: False)
    model = load(ModelConfig(name=name), 0).model
    settings = {"model.name": name, "micro_batch": 8, "max_new_tokens": 12}
    estimate = estimate_memory(run(**settings, **{"model.device": "meta" if own else "cpu"}), prompt_tokens=12)
    measured = kept_for_backward(model, torch.arange(8 * 24).view(8, 24) % 60)
    assert 1 / 1.5 < estimate.activations / measured < 1.5


def test_half_precision_keeps_half_of_what_the_models_own_operators_keep():
    """A CPU runs them, too, in bfloat16: 4 rows of 12 + 12 tokens of qwen3_moe-tiny, 6 layers, by the formula;
    log-softmax is in float32."""
    layer = 8 * 64 + 5 * 4 * 16 + 2 * (4 * 32 + 2 * 64)
    settings = {"micro_batch": 4, "max_new_tokens": 12, "model.dtype": "bfloat16"}
    assert estimate_memory(run(**settings), 12).activations == 4 * 24 * (6 * layer * 2 + 3 * 258 * 4)


class Largest(TorchDispatchMode):
    """The most bytes that tensors of `size` bytes or more hold at once."""

    def __init__(self, size):
        super().__init__()
        self.size, self.live, self.now, self.most = size, set(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(out)):
            storage = x.untyped_storage()
            if storage.nbytes() >= self.size and storage._cdata not in self.live:
                self.live.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
                self.most = max(self.most, self.now)
        return out

    def gone(self, key, size):
        self.live.discard(key)
        self.now -= size


@pytest.mark.parametrize("family, settings", [
    ("granitemoe", {"logits_scaling": 3.0}), ("cohere2_moe", {}),
    ("gemma4_text", {"final_logit_softcapping": 30.0})])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_logits_of_a_family_that_scales_them_are_counted(family, settings, dtype, tmp_path, monkeypatch):
    """Against the peak of a real update, with a vocabulary beside which nothing else counts: what scales its logits
    makes them all, however few are allowed at once."""
    known = next(f for f in FAMILIES if f.model_type == family)
    config = tiny_config(CONFIG_MAPPING[family], known.settings | settings | {"vocab_size": 20_000})
    model = AutoModelForCausalLM.from_config(config).eval().to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    for module in (hf, vocabulary, memory):
        monkeypatch.setattr(module, "LOGITS", 40_000)
    batch = make_batch()
    policy = policy_of(model)
    part = part_of(batch, policy.score(batch))
    rows, time = part.tokens.shape
    kept = time - hf.first_response(part)
    with Largest(2 * rows * kept * 20_000) as measured:
        policy._backward(part, GRPO)
    settings = {"model.name": str(tmp_path), "model.dtype": dtype, "prompts_per_step": rows, "group_size": 1}
    small, large = (estimate_memory(run(**settings, mini_batches=1, micro_batch=rows, max_new_tokens=n), 1).activations
                    for n in (1, 1 + kept))
    assert large - small == pytest.approx(measured.most, rel=0.05)


def test_logits_that_are_made_in_pieces_are_bounded():
    large = {"model.overrides": {"vocab_size": 10**6}, "micro_batch": 64}
    few, many = (estimate_memory(run(**large, max_new_tokens=n), 100).activations for n in (20, 40))
    plain = [estimate_memory(run(micro_batch=64, max_new_tokens=n), 100) for n in (20, 40)]
    assert 0 < many - few < plain[1].activations - plain[0].activations, "of the layers alone"


def test_weights_gradients_and_moments_are_exact():
    parameters = sum(p.numel() for p in load(ModelConfig(), 0).model.parameters())
    estimate = estimate_memory(run(), 13)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert estimate_memory(run(**{"model.dtype": "bfloat16"}), 13).weights == 2 * parameters
    critic = estimate_memory(run(), 13, critic=True)
    assert (estimate.critic, critic.critic) == (0, 16 * (parameters + 65)), "a head of 64 weights and a bias"
    assert critic.persistent == estimate.persistent + critic.critic
    own = {"model.name": "olmoe-tiny", "model.overrides": {"tie_word_embeddings": False}}
    untied = estimate_memory(run(**own), 13, critic=True)
    assert untied.critic == 4 * (untied.weights - 4 * 258 * 64 + 4 * 65), "no vocabulary to choose from"
    assert (estimate.reference, estimate_memory(run(), 13, reference=True).reference) == (0, 4 * parameters)


def test_ranks_of_fsdp_divide_what_they_hold_and_rank_0_samples_from_a_whole_model(monkeypatch):
    whole = estimate_memory(run(), 8, reference=True)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    on_a_cpu = run(policy="fsdp")
    assert estimate_memory(on_a_cpu, 8, reference=True) == whole, "the ranks of a machine share its memory"
    monkeypatch.setattr(memory, "skeleton", lambda model: presets.skeleton(model.replace(device="cpu")))
    part = estimate_memory(on_a_cpu.replace(**{"model.device": "cuda", "activation_checkpointing": True}), 8, True)
    assert part.weights == whole.weights * 5 // 4
    assert (part.gradients, part.optimizer, part.reference) == (whole.weights // 4, whole.weights // 2,
                                                                whole.weights // 4)


def test_checkpointing_saves_activations():
    assert (
        estimate_memory(run(activation_checkpointing=True), 13).activations < estimate_memory(run(), 13).activations / 2
    )


def test_too_little_memory_is_refused_or_warned_of(monkeypatch):
    estimate = estimate_memory(run(), 13)
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate.total)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_memory(estimate)
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate.total - 1)
    with pytest.warns(UserWarning, match="may be killed"):
        check_memory(estimate)
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate.persistent - 1)
    with pytest.raises(ConfigError, match="weights, gradients and optimizer alone"):
        check_memory(estimate)


def test_this_machine_has_memory():
    assert memory.available_memory() > 1e6


def test_of_a_card_what_this_process_holds_is_available_too(monkeypatch):
    """The weights are there by then, and the estimate counts them: without them it would refuse runs that fit."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3)
    assert memory.available_memory("cuda") == 8
