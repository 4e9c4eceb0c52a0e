"""A recording knows which tokens its forwards read, and hands out routes of those alone."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache

from moe_rl.errors import Diverged, NotFinite, RoutingError
from moe_rl.routing import record_routing, replay_routing
from moe_rl.routing.moe_layers import find_moe_layers, mixes_packed_rows, router_matrices
from tests.conftest import FAMILIES, build, perturb
from tests.routing import families
from tests.routing.test_hooks import Held, record

Wrapped = partial(Held, name="module")  # as DDP does


def adapted(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).eval()


WRAPPERS = {"plain": lambda model: model, "wrapped": Wrapped, "peft": adapted, "both": lambda m: Wrapped(adapted(m))}


@pytest.fixture(params=WRAPPERS)
def model(request):
    return WRAPPERS[request.param](build("qwen3_moe"))


@pytest.mark.parametrize(
    "inputs, apart",
    [
        ({"use_cache": False}, True),
        ({}, False),
        ({"use_cache": False, "attention_mask": torch.ones(1, 10).long()}, False),
        ({"use_cache": False, "past_key_values": DynamicCache()}, False),
        ({"use_cache": False, "position_ids": None, "cu_seq_lens_q": torch.tensor([0, 5, 10])}, False),
        ({"attention_mask": torch.block_diag(*[torch.ones(5, 5).tril()] * 2).bool()[None, None]}, True),
    ],
)
def test_packed_rows_are_recorded_as_rows_of_their_own_or_refused(inputs, apart):
    """Transformers keeps packed sequences apart without a cache and a mask [batch, time] alone."""
    model = build("qwen3_moe")
    rows = torch.randint(3, 39, (2, 5), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), record_routing(model) as recording:
        model(rows, use_cache=False)
    alone = recording.trace(rows).experts.flatten(0, 1)
    inputs = {"position_ids": torch.arange(5).repeat(2)[None]} | inputs
    refused = nullcontext() if apart else pytest.raises(RoutingError, match="use_cache=False")
    with torch.no_grad(), refused, record_routing(model) as recording:
        model(rows.view(1, 10), **inputs)
    assert not apart or torch.equal(recording.take(), alone)


@pytest.mark.parametrize(
    "axes, inputs, apart",
    [
        (3, {"use_cache": False}, False),
        (4, {"use_cache": False}, True),
        (4, {}, False),
    ],
)
def test_packed_rows_have_positions_on_several_axes(axes, inputs, apart):
    """Those of text, which come first of four, tell sequences apart; those of an image stand still."""
    model = families.build(next(family for family in families.FAMILIES if family.model_type == "qwen3_vl_moe"))
    rows = torch.randint(3, 39, (2, 5), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), record_routing(model) as recording:
        model(rows, use_cache=False)
    alone = recording.trace(rows).experts.flatten(0, 1)
    refused = nullcontext() if apart else pytest.raises(RoutingError, match="use_cache=False")
    with torch.no_grad(), refused, record_routing(model) as recording:
        model(rows.view(1, 10), position_ids=torch.arange(5).repeat(2).expand(axes, 1, 10), **inputs)
    assert not apart or torch.equal(recording.take(), alone)
    with torch.no_grad(), record_routing(model):
        model(rows, position_ids=torch.tensor([0, 1, 1, 1, 2]).expand(3, 2, 5))


@pytest.mark.parametrize("training, checkpointed, apart", [(True, True, True), (False, True, False)])
def test_a_checkpointed_model_has_no_cache_while_it_trains(training, checkpointed, apart):
    model = build("qwen3_moe").train(training)
    model.gradient_checkpointing_enable()
    refused = nullcontext() if apart else pytest.raises(RoutingError, match="use_cache=False")
    with refused, record_routing(model):
        model(torch.arange(3, 9)[None], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


@pytest.mark.parametrize(
    "positions, mask",
    [
        ([[0, 0, 0, 1, 2, 3]], [[0, 0, 1, 1, 1, 1]]),  # left padding
        ([[0, 1, 2, 3, 3, 3]], [[1, 1, 1, 1, 0, 0]]),
        ([[0, 1, 2, 5, 6, 7]], None),  # a jump is no restart
    ],
)
def test_positions_of_padding_are_no_packed_row(positions, mask):
    model = build("qwen3_moe")
    with torch.no_grad(), record_routing(model) as recording:
        model(
            torch.arange(3, 9)[None],
            position_ids=torch.tensor(positions),
            attention_mask=None if mask is None else torch.tensor(mask),
        )
    assert recording.take().shape[0] == 6


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.model_type)
def test_families_that_mix_packed_rows_whatever_their_inputs_are_known(family):
    """Seen from outside: the second of two sequences is read beside two others."""
    if family.model_type == "glm_moe_dsa" and families.older_than("5.11"):
        pytest.skip("its packed sequences see one another there")
    model = families.build(family)
    draw = torch.randint(3, 39, (3, 1, 8), generator=torch.Generator().manual_seed(7))
    inputs = {"position_ids": torch.arange(8).repeat(2)[None], "use_cache": False}
    with torch.no_grad():
        beside = [model(torch.cat([first, draw[2]], 1), **inputs).logits[:, 8:] for first in draw[:2]]
    apart = torch.allclose(*beside, atol=1e-5)
    assert (mixes_packed_rows(model.config) is None) == apart
    refused = nullcontext() if apart else pytest.raises(RoutingError, match="one sequence into each row")
    with torch.no_grad(), refused, record_routing(model):
        model(draw[1:].view(1, 16), **inputs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_without_finite_scores_has_no_routes(family, value):
    """At its layer for the real tokens, and at those after it, which read what it made."""
    model, tokens = build(family), torch.arange(3, 21).view(2, 9)
    moe_layer = find_moe_layers(model)[1]
    router_matrices(moe_layer)[0].data.fill_(value)
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    with pytest.raises(NotFinite, match=f"{moe_layer.moe_layer.name}: .* 18 tokens") as error:
        recording.trace(tokens)
    assert isinstance(error.value, Diverged), "in a run it is a result"
    unknown = recording.take() == recording.layout.unknown
    assert unknown[:, 1:].all() and not unknown[:, 0].any()


def test_tokens_that_were_not_read_are_refused_by_row_position_and_id(model, tokens):
    other = tokens.clone()
    other[2, 5] = 1
    with torch.no_grad(), record_routing(model) as recording:
        model(tokens)
    says = rf"row 2, position 5 is token 1 .* and {int(tokens[2, 5])} there.*\n?.*take\(\)"
    with pytest.raises(RoutingError, match=says):
        recording.trace(other)
    assert recording.trace(tokens).coverage == 1, "a refusal forgets nothing"


def test_tokens_count_by_keyword_and_where_an_inner_module_is_called(model, tokens):
    inner = model
    while not hasattr(type(inner), "get_decoder") or isinstance(inner, Held):
        inner = next(inner.children())
    for call in (lambda: model(input_ids=tokens), lambda: inner.get_decoder()(tokens)):
        with torch.no_grad(), record_routing(model) as recording:
            call()
        assert recording.trace(tokens).coverage == 1
        with pytest.raises(RoutingError, match="row 0, position 0"):
            recording.trace(tokens + 1)


def test_padding_and_a_last_column_that_was_no_input_do_not_count(qwen, tokens):
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 6:] = False
    padded = tokens.masked_fill(~mask, 0)
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(padded[:, :-1])
    assert recording.trace(tokens, mask) == recording.trace(padded, mask)
    with pytest.raises(RoutingError, match="row 0, position 6"):
        recording.trace(tokens)


def test_embeddings_name_no_token_so_none_is_compared(qwen, tokens):
    plain, _ = record(qwen, tokens)
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(inputs_embeds=qwen.get_input_embeddings()(tokens))
    assert recording.trace(tokens) == plain
    recording.clear()
    with torch.no_grad(), record_routing(qwen) as recording:
        prefill = qwen(inputs_embeds=qwen.get_input_embeddings()(tokens), use_cache=True)
        qwen(tokens[:, :1], past_key_values=prefill.past_key_values)
    with pytest.raises(RoutingError, match="row 0, position 9"):
        recording.trace(torch.cat([tokens, tokens[:, :1] + 1], 1))


def test_embeddings_of_other_rows_are_refused(qwen, tokens):
    """Rows read one after the other are not the columns of a prefill and decoding, though their sum fits."""
    tokens = tokens[:2, :8]
    embedded = qwen.get_input_embeddings()(tokens)
    plain, _ = record(qwen, tokens)
    with torch.no_grad(), record_routing(qwen) as recording:
        for row in embedded:
            qwen(inputs_embeds=row[None])
    with pytest.raises(RoutingError, match=r"\[1, 8\]|\(1, 8\)"):
        recording.trace(tokens)
    with torch.no_grad(), pytest.raises(RoutingError, match=r"shape \(4, 4\)"), replay_routing(qwen, plain):
        qwen(inputs_embeds=embedded.reshape(4, 4, -1))


class MaskFirst(nn.Module):
    """A wrapper of one's own whose first argument looks like tokens, and is none."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, mask, ids):
        return self.policy(input_ids=ids, attention_mask=mask)


def test_what_a_wrapper_takes_first_is_not_mistaken_for_tokens(qwen, tokens):
    wrapped, mask = MaskFirst(qwen), torch.ones_like(tokens)
    with torch.no_grad(), record_routing(wrapped) as recording:
        logits = wrapped(mask, tokens).logits
    routes = recording.trace(tokens)
    with torch.no_grad(), replay_routing(wrapped, routes):
        assert torch.equal(wrapped(mask, tokens).logits, logits)
    with pytest.raises(RoutingError, match="trace is of other tokens"), replay_routing(wrapped, routes):
        wrapped(mask, tokens + 1)


def test_a_model_that_calls_its_tokens_otherwise_is_given_them_first(qwen, tokens):
    decoder, forward = qwen.model, qwen.model.forward
    decoder.forward = lambda words: forward(input_ids=words)
    with torch.no_grad(), record_routing(decoder) as recording:
        decoder(tokens)
    with pytest.raises(RoutingError, match="is of other tokens"), replay_routing(decoder, recording.trace(tokens)):
        decoder(tokens + 1)


def test_a_buffer_of_tokens_that_is_used_again_is_not_mistaken(qwen, tokens):
    buffer = tokens.clone()
    with torch.no_grad(), record_routing(qwen) as recording:
        qwen(buffer)
    buffer.add_(1)
    assert recording.trace(tokens).coverage == 1
    with pytest.raises(RoutingError, match="row 0, position 0"):
        recording.trace(buffer)


def test_beams_that_swap_rows_between_steps_are_refused(qwen, tokens):
    """One beam per row, swapped after each step: the forwards add up, the rows do not."""
    swap = torch.tensor([1, 0, 3, 2])
    with torch.no_grad(), record_routing(qwen) as recording:
        output = qwen(tokens[:, :5], use_cache=True)
        read = tokens[:, :5]
        for t in range(5, 9):
            output.past_key_values.reorder_cache(swap)
            read = torch.cat([read[swap], tokens[:, t : t + 1]], 1)
            output = qwen(tokens[:, t : t + 1], past_key_values=output.past_key_values, use_cache=True)
    with pytest.raises(RoutingError, match="other tokens"):
        recording.trace(read[swap])


@pytest.mark.parametrize("new", [8, 24])
def test_speculation_whose_tokens_were_rejected_is_refused(qwen, tokens, new):
    draft = build("qwen3_moe")
    perturb(draft, 0.05 if new == 8 else 0.02)
    with record_routing(qwen) as recording:
        full = qwen.generate(tokens[:1], max_new_tokens=new, min_new_tokens=new, do_sample=False, assistant_model=draft)
    with pytest.raises(RoutingError, match="other tokens"):
        recording.trace(full)
