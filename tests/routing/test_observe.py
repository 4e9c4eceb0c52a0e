"""`observe` against a recorded forward and a softmax written out."""

import pytest
import torch

from moe_rl.config import ModelConfig
from moe_rl.errors import NotFinite, RoutingError
from moe_rl.models.load import load
from moe_rl.routing import RoutingTrace, layout_of, observe, record_routing

TOKENS = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 5, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
RESPONSE = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]]).bool()
INPUTS = {"input_ids": TOKENS, "attention_mask": MASK}


@pytest.fixture(scope="module")
def model():
    return load(ModelConfig(name="qwen3_moe-tiny"), 0).model.eval()


def test_routes_scores_and_logprobs_are_those_of_the_forward(model):
    seen = observe(model, INPUTS, scores=True, logits=4)
    with torch.no_grad(), record_routing(model, scores=True) as recording:
        logits = model(input_ids=TOKENS, attention_mask=MASK).logits
    assert seen.routes == recording.trace(TOKENS, MASK)
    assert torch.equal(seen.scores.log_probs, recording.scores(2).log_probs)
    assert torch.equal(seen.scores.margins, recording.scores(2).margins)
    expected = logits[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None])[..., 0]
    found = seen.logprobs(TOKENS, RESPONSE)
    assert torch.equal(found[:, 1:][RESPONSE[:, 1:]], expected[RESPONSE[:, 1:]])
    assert not found[~RESPONSE].any()
    shorter = observe(model, {"input_ids": TOKENS[:, :-1]}, logits=3).logprobs(TOKENS, RESPONSE)
    torch.testing.assert_close(shorter, found)


def test_logits_that_were_not_kept_are_an_error_not_zeros(model):
    for count in (0, 2):
        with pytest.raises(RoutingError, match=f"logits={count}"):
            observe(model, INPUTS, logits=count).logprobs(TOKENS, RESPONSE)


def test_replayed_routes_are_used(model):
    layout, plain = layout_of(model), observe(model, INPUTS)
    shifted = (plain.routes.ids() + 1) % layout.moe_layers[0].num_experts
    trace = RoutingTrace.from_ids(
        shifted.masked_fill(~MASK[..., None, None], -1), layout, tokens=TOKENS, attention_mask=MASK
    )
    seen = observe(model, INPUTS, routes=trace)
    assert seen.routes == trace


def test_dropout_is_off_and_comes_back_and_no_hook_stays(model):
    model.train()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert observe(model, INPUTS).routes == observe(model, INPUTS).routes and model.training
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    model.eval()


def test_a_router_without_finite_scores_is_refused_or_unknown(model):
    gate = next(m for name, m in model.named_modules() if name.endswith("mlp.gate"))
    before = gate.weight.data.clone()
    gate.weight.data.fill_(torch.nan)
    try:
        with pytest.raises(NotFinite):
            observe(model, INPUTS)
        assert not observe(model, INPUTS, lost="unknown").routes.known[:, :, 0].any()
    finally:
        gate.weight.data.copy_(before)
