"""Presets route, the tokenizer loses nothing, checkpoints come back bit for bit, and wrong names are one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError
from moe_rl.models.load import PRESETS, hf_config, load, save_checkpoint
from moe_rl.models.tokens import byte_tokenizer, completion_tokens, encode_prompts, plain_tokens
from moe_rl.routing.moe_layers import router_parameters
from moe_rl.study.declaration import PRESET_NAMES
from moe_rl.types import Prompt
from tests.conftest import CPU_KERNELS

TOKENIZER = byte_tokenizer()
SMALL = {"hidden_size": 32, "num_hidden_layers": 2}


def same_weights(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------- tokenizer
@settings(deadline=None)  # a busy machine is no failure
@given(st.text())
def test_any_text_is_its_utf8_bytes_and_comes_back(text):
    tokens = TOKENIZER.encode(text)
    assert tokens == list(text.encode())
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.decode([*tokens, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_special_tokens_cannot_be_written_in_a_prompt():
    for text in ("<|end|>", "a<|pad|>b"):
        assert TOKENIZER.encode(text) == list(text.encode())
    assert (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, len(TOKENIZER)) == (256, 257, 258)


def test_a_vocabulary_of_64_knows_digits_and_refuses_the_rest():
    tokenizer = byte_tokenizer(64)
    assert len(tokenizer) == 64
    prompt = encode_prompts([Prompt(text="372=")], tokenizer)[0]
    assert tokenizer.decode(prompt.tokens) == "372="
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (62, 63)
    with pytest.raises(ConfigError, match="'word'"):
        encode_prompts([Prompt(text="word")], tokenizer)


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = byte_tokenizer()
    assert encode_prompts([Prompt(text="1=")], tokenizer)[0].tokens == (49, 61)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert bytes(encode_prompts([Prompt(text="1=")], tokenizer)[0].tokens) == b"[user]1=>"
    assert completion_tokens("1", tokenizer) == [49, 256]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="no tokens"):
        encode_prompts([Prompt(text="")], TOKENIZER)


@pytest.mark.parametrize(
    "form, front",
    [("<|pad|> $A", [257]), ("<|pad|> $A <|end|>", [257]), ("$A <|end|>", []), ("<|pad|> $A <|pad|>", [257])],
)
def test_what_a_tokenizer_puts_behind_a_text_is_left_out_and_what_the_text_ends_with_is_not(form, front):
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=form, special_tokens=[("<|end|>", 256), ("<|pad|>", 257)]
    )
    assert plain_tokens("ab", tokenizer) == [*front, 97, 98]
    assert plain_tokens("ab<|end|>", tokenizer) == [*front, 97, 98, 256]


# ---------------------------------------------------------------------- presets
def test_the_configuration_knows_the_names_of_the_presets():
    """Else a folder that has the name of a preset would take its place."""
    assert [*PRESET_NAMES] == [*PRESETS]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_routes_by_token_and_uses_most_experts_everywhere(name):
    from moe_rl.routing import record_routing

    model = load(ModelConfig(name=name), seed=0).model
    assert not model.training
    assert model.config._experts_implementation == ("moe_rl_cpu" if CPU_KERNELS else "grouped_mm")
    tokens = torch.randint(0, 60, (16, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), record_routing(model) as recording:
        assert model(tokens).logits.isfinite().all()
    trace = recording.trace(tokens)
    experts = trace.experts.long()
    for moe_layer in range(experts.shape[2]):
        counts = experts[:, :, moe_layer].flatten().bincount(minlength=trace.layout.moe_layers[moe_layer].num_experts)
        assert (counts > 0).float().mean() >= 0.75
        assert counts.max() < 0.75 * tokens.numel()  # of at most one per token
        assert len(experts[:, :, moe_layer].flatten(0, 1).sort(-1).values.unique(dim=0)) > 8  # different expert sets


def test_weights_follow_the_seed_and_the_global_random_state_does_not_move():
    before = torch.get_rng_state()
    one, same, other = (load(ModelConfig(overrides=SMALL), seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same_weights(one, same)
    assert not same_weights(one, other)


def test_overrides_apply_under_either_of_a_settings_names():
    for key in ("num_experts", "num_local_experts"):
        config = hf_config(ModelConfig(overrides={key: 5, "num_experts_per_tok": 3}))
        assert (config.num_local_experts, config.num_experts_per_tok, config.hidden_size) == (5, 3, 64)


@pytest.mark.parametrize(
    "config, said",
    [
        (ModelConfig(overrides={"num_expert": 4}), "num_experts"),
        (ModelConfig(overrides={"num_hidden_layers": "six"}), "six"),
        (ModelConfig(name="qwen3moe-tiny"), "did you mean qwen3_moe-tiny"),
        (ModelConfig(name="./nowhere"), "./nowhere"),
        (ModelConfig(name="/no/such/folder"), "'/no/such/folder'"),
        (ModelConfig(dtype="float31"), "float31"),
        (ModelConfig(dtype="int64"), "int64"),
        (ModelConfig(device="cuda:99"), "cuda:99"),
        (ModelConfig(device="gpu"), "gpu"),
    ],
)
def test_a_wrong_model_is_one_sentence(config, said):
    with pytest.raises(ConfigError) as error:
        load(config, 0)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("name", PRESETS)
def test_a_saved_checkpoint_comes_back_bit_for_bit(name, tmp_path):
    overrides = {} if name.startswith("deepseek") else {"hidden_size": 32}
    loaded = load(ModelConfig(name=name, overrides={**overrides, "num_hidden_layers": 2}), 3)
    save_checkpoint(loaded.model, loaded.tokenizer, tmp_path)
    again = load(ModelConfig(name=str(tmp_path)), 99)
    assert same_weights(loaded.model, again.model)
    assert not again.model.training
    prompt = Prompt(text="12=")
    assert encode_prompts([prompt], again.tokenizer) == encode_prompts([prompt], loaded.tokenizer)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens).logits, again.model(tokens).logits)


def test_a_dense_checkpoint_loads(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    dense = Qwen3ForCausalLM(Qwen3Config(vocab_size=258, hidden_size=16, intermediate_size=16, **shape))
    save_checkpoint(dense, TOKENIZER, tmp_path)
    assert same_weights(load(ModelConfig(name=str(tmp_path)), 0).model, dense)


def test_broken_checkpoints_are_refused(tmp_path):
    loaded = load(ModelConfig(overrides=SMALL), 0)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="config.json"):
        load(ModelConfig(name=str(empty)), 0)
    loaded.model.save_pretrained(tmp_path / "no_tokenizer")
    with pytest.raises((ConfigError, OSError)):
        load(ModelConfig(name=str(tmp_path / "no_tokenizer")), 0)
    small = load(ModelConfig(name="qwen3_moe-bench", overrides=SMALL), 0)
    save_checkpoint(small.model, TOKENIZER, tmp_path / "mixed")
    with pytest.raises(ConfigError, match="258 .* 64"):
        load(ModelConfig(name=str(tmp_path / "mixed")), 0)
    save_checkpoint(loaded.model, loaded.tokenizer, tmp_path / "fine")
    with pytest.raises(ConfigError, match="overrides"):
        load(ModelConfig(name=str(tmp_path / "fine"), overrides={"num_experts": 4}), 0)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = {"model_type": "my_own", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(ModelConfig(name=str(tmp_path)), 0)
    assert not ran.exists()


def test_routers_in_float32_come_back_from_a_checkpoint_bit_for_bit(tmp_path):
    """Beside weights in bfloat16: read as those are, what they have learned would be rounded."""
    config = ModelConfig(name="qwen3_moe-tiny", dtype="bfloat16", router_dtype="float32")
    first = load(config, 0)
    with torch.no_grad():
        for parameter in router_parameters(first.model):
            parameter += 1e-4 * torch.randn_like(parameter)
    save_checkpoint(first.model, first.tokenizer, tmp_path)
    again = load(ModelConfig(name=str(tmp_path), dtype="bfloat16", router_dtype="float32"), 0).model.state_dict()
    for name, weight in first.model.state_dict().items():
        assert again[name].dtype == weight.dtype and torch.equal(again[name], weight), name
