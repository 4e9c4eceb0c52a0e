"""Record and replay on the device, in float32 and bfloat16: ten families, every way to do experts and attention."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from moe_rl.routing import record_routing, replay_routing
from tests.gpu.conftest import DEVICE, DTYPES, FAMILY, NEEDS_GPU, ROWS, TEN, TIME, family_on_device, short
from tests.routing import test_families
from tests.routing.test_families import (  # noqa: F401  the claims of docs/concepts.md, in float32 on the device
    test_checkpointing_recomputes_each_micro_batch_under_its_own_routes,
    test_forced_ids_reach_the_experts_with_the_familys_own_weights_and_gradient,
    test_recording_and_replaying_its_own_routes_change_no_bit,
    test_scores_are_the_routers_own_or_refused,
    test_unknown_rows_route_freely,
)

pytestmark = [
    NEEDS_GPU,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:.*(deterministic|gradient_checkpointing)"),
]


@pytest.fixture(params=TEN, scope="module")
def case(request, repeatable):
    """What `tests/routing/test_families.py` asks about, on the device."""
    return test_families.Case(FAMILY[request.param], DEVICE)


class Case:
    """One family in one dtype on the device, and the tokens it reads."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.family, self.model = FAMILY[name], family_on_device(name, dtype)
        self.tokens = torch.randint(3, 39, (ROWS, TIME), generator=torch.Generator().manual_seed(7)).to(DEVICE)

    def logits(self):
        """As in training: attention over a cache rounds otherwise."""
        return self.model(self.tokens, use_cache=False).logits

    def gradients(self, trace=None, checkpointing=None):
        """Logits and gradients of one forward and backward, live or replayed."""
        self.model.zero_grad()
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            self.model.enable_input_require_grads()
            for layer in self.model.modules():
                layer.training = getattr(layer, "gradient_checkpointing", False)
        with replay_routing(self.model, trace), record_routing(self.model) as recording:
            logits = self.logits()
            logits.float().logsumexp(-1).sum().backward()
        if checkpointing:
            self.model.gradient_checkpointing_disable()
            self.model.disable_input_require_grads()
            self.model.eval()
        found = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return recording.trace(self.tokens), logits.detach(), found

    def prove(self, way: str) -> None:
        """What must hold exactly, however experts and attention are computed."""
        with test_families.watched(self.model) as seen, torch.no_grad():
            plain = self.logits()
        with test_families.watched(self.model) as under, torch.no_grad(), record_routing(self.model) as recording:
            assert torch.equal(self.logits(), plain), f"{way}: recording changes the logits"
        trace = recording.trace(self.tokens)
        for moe_layer, (before, here) in enumerate(zip(seen, under, strict=True)):
            ids = trace.ids()[:, :, moe_layer].flatten(0, 1)
            assert torch.equal(here.ids.view_as(ids), ids), f"{way}: recorded are other experts than computed"
            assert torch.equal(before.ids, here.ids), f"{way}: recording changes the router's choice"
        live, logits, gradients = self.gradients()
        assert live == trace, f"{way}: routes with a graph and without differ"
        replayed, again, replayed_gradients = self.gradients(trace.to("cpu"))
        assert replayed == trace and torch.equal(again, logits), f"{way}: self-replay changes bits"
        for name, gradient in gradients.items():
            assert torch.equal(gradient, replayed_gradients[name]), f"{way}: {name}: replay has another gradient"
        for mode in ("reentrant", "non-reentrant") if self.family.checkpointing == "exact" else ():
            for routes in (None, trace):
                _, _, checkpointed = self.gradients(routes, mode)
                for name, gradient in gradients.items():
                    assert torch.equal(gradient, checkpointed[name]), f"{way}: {name}: {mode} checkpointing"


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", TEN)
def test_with_every_way_to_compute_experts(name, dtype):
    case = Case(name, dtype)
    for experts in ("eager", "grouped_mm", "batched_mm"):
        case.model.set_experts_implementation(experts)
        case.prove(experts)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("name", TEN)
def test_with_every_attention(name, attention):
    if attention.startswith("flash") and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed here, or sees no GPU")
    case = Case(name, torch.bfloat16)
    try:
        case.model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        pytest.skip(f"{name} has no {attention}: {str(error)[:100]}")
    if attention.startswith("flash"):  # its backward adds in any order: forwards alone repeat themselves
        with torch.no_grad(), record_routing(case.model) as recording:
            logits = case.logits()
        with torch.no_grad(), replay_routing(case.model, recording.trace(case.tokens)):
            assert torch.equal(case.logits(), logits)
        return
    case.prove(attention)
