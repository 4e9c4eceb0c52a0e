"""The engine against full forwards of the finished sequences, and against itself under other batchings."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from moe_rl.errors import ConfigError, Diverged, RunError
from moe_rl.rollouts.engine import context_length
from moe_rl.rollouts.hf import HFEngine, draw_noise, draw_tokens
from moe_rl.routing import record_routing
from moe_rl.types import Prompt, Rollout, Sampling
from tests.conftest import build

EOS, VOCABULARY = 1, 20
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13), (2,), (14, 15, 3, 4)]


def make_model(family: str = "qwen3_moe") -> torch.nn.Module:
    own = {"sliding_window": 8} if family == "gpt_oss" else {}
    model = build(family, vocab_size=VOCABULARY, eos_token_id=EOS, max_position_embeddings=64, **own)
    torch.manual_seed(0)
    for parameter in model.parameters():  # spread the logits and the routes, so that mistakes show
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0, 1: padding and EOS; then the letters a to r."""
    letters = "abcdefghijklmnopqr"
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<pad>", "<eos>", *letters])}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def prompts(rows: list[tuple[int, ...]] = PROMPTS) -> list[Prompt]:
    return [Prompt(text="", tokens=row) for row in rows]


def full_forward(model: torch.nn.Module, rollout: Rollout, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the completion and routes of all inputs, from one forward of one unpadded sequence."""
    sequence = torch.tensor([rollout.prompt.tokens + rollout.tokens])
    with torch.no_grad(), record_routing(model) as recording:
        logits = model(input_ids=sequence[:, :-1], use_cache=False).logits[0]
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, sequence[0, 1:, None])[:, 0]
    return logprobs[-len(rollout.tokens) :], recording.trace(sequence[:, :-1]).experts


def same(a: Rollout, b: Rollout) -> bool:
    return a.tokens == b.tokens and torch.equal(a.logprobs, b.logprobs) and a.routes == b.routes and a.text == b.text


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_routes_are_those_of_a_full_forward(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(family)
    sampling = Sampling(temperature=0.7, max_new_tokens=9)
    rollouts = HFEngine(model, tokenizer).generate(prompts(), 3, key=(0, 1), sampling=sampling)
    assert len({len(r.tokens) for r in rollouts}) > 1, "rows should end at different times"
    for rollout in rollouts:
        logprobs, experts = full_forward(model, rollout, 0.7)
        torch.testing.assert_close(rollout.logprobs, logprobs, rtol=0, atol=2e-5)
        assert rollout.routes.shape[1] == len(rollout.prompt.tokens) + len(rollout.tokens) - 1
        assert torch.equal(rollout.routes.experts, experts)
        assert rollout.routes.tokens[0].tolist() == list(rollout.prompt.tokens + rollout.tokens[:-1])
        assert rollout.routes.coverage == 1.0


def test_output_is_prompt_major_and_ends_are_flagged(model, tokenizer) -> None:
    rollouts = HFEngine(model, tokenizer).generate(prompts(), 3, key=(3,), sampling=Sampling(max_new_tokens=8))
    assert [r.prompt.tokens for r in rollouts] == [row for row in PROMPTS for _ in range(3)]
    assert {r.finished for r in rollouts} == {True, False}
    for r in rollouts:
        assert r.finished == (r.tokens[-1] == EOS)
        assert EOS not in r.tokens[:-1]
        assert r.finished or len(r.tokens) == 8
        assert "<eos>" not in r.text
        assert len(r.tokens) == len(r.logprobs)
        letters = r.tokens[:-1] if r.finished else r.tokens
        assert r.text == "".join(tokenizer.convert_ids_to_tokens(list(letters)))


def test_the_same_key_gives_the_same_bits_and_another_key_does_not(model, tokenizer) -> None:
    def draw(key: tuple[int, ...]) -> list[Rollout]:
        return HFEngine(model, tokenizer).generate(prompts(), 4, key=key, sampling=Sampling(max_new_tokens=8))

    first = draw((7, 1))
    torch.manual_seed(123)  # the global generator has no say
    assert all(map(same, first, draw((7, 1))))
    assert [r.tokens for r in first] != [r.tokens for r in draw((7, 2))]


def test_equal_prompts_of_one_call_draw_different_noise(model, tokenizer) -> None:
    rollouts = HFEngine(model, tokenizer).generate(
        prompts([(5, 6, 7)] * 2), 4, key=(5,), sampling=Sampling(max_new_tokens=8)
    )
    assert [r.tokens for r in rollouts[:4]] != [r.tokens for r in rollouts[4:]]
    assert len({r.tokens for r in rollouts}) > 4


def test_completions_do_not_depend_on_batching_or_on_other_prompts(model, tokenizer) -> None:
    sampling = Sampling(max_new_tokens=8)
    together = HFEngine(model, tokenizer).generate(prompts(), 4, key=(5,), sampling=sampling)
    apart = HFEngine(model, tokenizer, max_rows=4).generate(prompts(), 4, key=(5,), sampling=sampling)
    fewer = HFEngine(model, tokenizer).generate(prompts(PROMPTS[:2]), 2, key=(5,), sampling=sampling)
    assert [r.tokens for r in together] == [r.tokens for r in apart]
    assert [r.tokens for r in fewer] == [together[i].tokens for i in (0, 1, 4, 5)]
    for a, b in zip(together, apart, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
        assert a.routes == b.routes


def test_the_prompt_of_a_group_is_prefilled_once_and_ended_rows_are_dropped(model, tokenizer) -> None:
    shapes = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rollouts = HFEngine(model, tokenizer).generate(prompts(), 4, key=(5,), sampling=Sampling(max_new_tokens=8))
    handle.remove()
    assert shapes[0] == (4, 6)
    alive = [sum(len(r.tokens) > t for r in rollouts) for t in range(1, 8)]
    assert shapes[1:] == [(n, 1) for n in alive if n]
    assert alive[-1] < alive[0]


def test_greedy_takes_the_arg_max_whatever_the_key(model, tokenizer) -> None:
    engine, sampling = HFEngine(model, tokenizer), Sampling(max_new_tokens=6, greedy=True, temperature=0.5)
    rollouts = engine.generate(prompts(), 2, key=(1,), sampling=sampling)
    assert all(map(same, rollouts, engine.generate(prompts(), 2, key=(2,), sampling=sampling)))
    for rollout in rollouts:
        sequence = torch.tensor([rollout.prompt.tokens + rollout.tokens])
        with torch.no_grad():
            best = model(input_ids=sequence[:, :-1]).logits[0].argmax(-1)
        assert tuple(best[-len(rollout.tokens) :].tolist()) == rollout.tokens


def test_a_stop_string_ends_a_completion_and_leaves_the_text(model, tokenizer) -> None:
    free = HFEngine(model, tokenizer).generate(prompts(), 8, key=(9,), sampling=Sampling(max_new_tokens=10))
    stop = next(r.text[2:4] for r in free if len(r.text) >= 6)  # two letters, so it spans two tokens
    sampling = Sampling(max_new_tokens=10, stop=("never", stop))
    stopped = HFEngine(model, tokenizer).generate(prompts(), 8, key=(9,), sampling=sampling)
    assert any(stop in r.text for r in free)
    for before, after in zip(free, stopped, strict=True):
        assert after.text == before.text.partition(stop)[0]
        if stop in before.text:
            assert after.finished
            assert len(after.tokens) == before.text.index(stop) + 2
            assert after.tokens == before.tokens[: len(after.tokens)]
        else:
            assert after.tokens == before.tokens


def test_tokens_are_drawn_from_the_softmax_at_the_temperature() -> None:
    logits, temperature, n = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 2.0]), 0.5, 20_000
    noise = draw_noise((0,), 1, n)[0]
    token, logprob = draw_tokens(logits.expand(n, -1), noise, Sampling(temperature=temperature))
    p = np.exp(np.array([0.0, 1.0, -1.0, -np.inf, 2.0]) / temperature)
    p /= p.sum()
    counts = np.bincount(token.numpy(), minlength=5)
    assert counts[3] == 0
    np.testing.assert_allclose(counts / n, p, atol=4 * np.sqrt(p * (1 - p) / n).max())
    np.testing.assert_allclose(logprob.numpy(), np.log(p[token.numpy()]), rtol=1e-5)


def test_noise_at_its_limits_never_picks_an_impossible_token() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 3)
    token, _ = draw_tokens(logits, torch.tensor([0.0, 0.5, 1.0 - 2**-53]).double(), Sampling())
    assert token.tolist() == [1, 2, 2]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_a_divergence(odd, greedy) -> None:
    """Wherever they stand; an impossible token, of logit -inf, is none."""
    noise, sampling = torch.full((2,), 0.5).double(), Sampling(greedy=greedy)
    for at in range(4):
        logits = torch.tensor([[0.0, float("-inf"), 1.0, 2.0]] * 2)
        draw_tokens(logits, noise, sampling)
        logits[1, at] = odd
        with pytest.raises(Diverged, match="1 of 2 completions"):
            draw_tokens(logits, noise, sampling)
    with pytest.raises(Diverged, match="2 of 2 completions"):
        draw_tokens(torch.full((2, 4), float("-inf")), noise, sampling)


def test_gradients_may_use_what_was_recorded_and_modes_are_restored(model, tokenizer) -> None:
    model.model.layers[1].training = True
    rollout = HFEngine(model, tokenizer).generate(prompts(), 1, key=(0,), sampling=Sampling(max_new_tokens=3))[0]
    assert model.model.layers[1].training
    assert not model.model.layers[0].training
    model.model.layers[1].training = False
    assert not rollout.logprobs.is_inference()
    assert torch.is_grad_enabled()


def test_load_copies_into_an_own_model_and_leaves_a_shared_one_alone(model, tokenizer) -> None:
    own = copy.deepcopy(model)
    with torch.no_grad():
        own.lm_head.weight.add_(1.0)
    sampling = Sampling(max_new_tokens=4)
    expected = HFEngine(model, tokenizer).generate(prompts(), 2, key=(0,), sampling=sampling)
    engine = HFEngine(own, tokenizer)
    engine.load(model.state_dict().items())
    assert all(map(same, expected, engine.generate(prompts(), 2, key=(0,), sampling=sampling)))
    versions = [p._version for p in model.parameters()]
    HFEngine(model, tokenizer).load(model.state_dict().items())
    assert versions == [p._version for p in model.parameters()]
    state = list(model.state_dict().items())
    for weights, name in (([*state, ("nonsense", torch.zeros(1))], "nonsense"), (state[1:], state[0][0])):
        with pytest.raises(RunError, match=name):
            engine.load(weights)


def test_without_recording_nothing_else_changes(model, tokenizer) -> None:
    sampling = Sampling(max_new_tokens=5)
    with_routes = HFEngine(model, tokenizer).generate(prompts(), 2, key=(0,), sampling=sampling)
    without = HFEngine(model, tokenizer, record_routes=False).generate(prompts(), 2, key=(0,), sampling=sampling)
    for a, b in zip(with_routes, without, strict=True):
        assert b.routes is None
        assert a.tokens == b.tokens
        assert torch.equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize(
    ("rows", "group", "sampling", "message"),
    [
        ([()], 1, Sampling(), "no token ids"),
        ([(1,)], 1, Sampling(temperature=0.0), "temperature=0"),
        ([(1,), (1,) * 65], 1, Sampling(max_new_tokens=1), "prompt 1 .* 65 tokens.* 64"),
        ([(1,) * 60], 1, Sampling(max_new_tokens=5), "prompt 0 .* 60 tokens .* 5, .* 64"),
    ],
)
def test_requests_that_make_no_sense_are_refused(model, tokenizer, rows, group, sampling, message) -> None:
    with pytest.raises(ConfigError, match=message):
        HFEngine(model, tokenizer).generate(prompts(rows), group, key=(0,), sampling=sampling)


def test_a_prompt_may_fill_the_context_to_its_end(model, tokenizer) -> None:
    (rollout,) = HFEngine(model, tokenizer).generate(
        prompts([(5,) * 62]), 1, key=(0,), sampling=Sampling(max_new_tokens=2)
    )
    assert 1 <= len(rollout.tokens) <= 2


def test_the_context_is_what_the_configuration_says_after_any_stretching(model) -> None:
    config = copy.deepcopy(model.config)
    assert context_length(config) == 64
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert context_length(config) == 128
    assert context_length(PreTrainedConfig()) is None
