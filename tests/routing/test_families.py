"""Every decoder MoE family of transformers: what is recorded, what is forced, and which families are refused, why."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import signature
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from moe_rl.errors import RoutingError
from moe_rl.integrations.cpu_kernels import use_cpu_kernels
from moe_rl.integrations.cpu_kernels.experts import NAME as CPU_EXPERTS
from moe_rl.routing import RoutingTrace, record_routing, replay_routing
from moe_rl.routing.moe_layers import SELECTS, find_moe_layers
from tests.routing.families import FAMILIES, REFUSED, At, Family, build, jetmoe_dispatch, older_than, table
from tests.routing.test_hooks import record

MODELS = Path(transformers.__file__).parent / "models"
NOT_MOE = {"granite_docling"}  # has a class named router, which chooses the density of an image


class Case:
    """One family: a tiny model, the tokens it reads and the routes it took; and the model after its weights moved."""

    def __init__(self, family: Family, device: str = "cpu"):
        self.family, self.model = family, build(family).to(device)
        self.tokens = torch.randint(3, 39, (4, 8), generator=torch.Generator().manual_seed(7)).to(device)
        with torch.no_grad():
            self.logits = self.model(self.tokens).logits
        self.trace, self.recorded_logits = record(self.model, self.tokens)

    @cached_property
    def moved(self) -> nn.Module:
        model = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator).to(p.device) * 0.1 * p.std(correction=0))
        return model

    @cached_property
    def moved_gradients(self) -> dict[str, Tensor]:
        return gradients(self.moved, self.tokens, self.trace)

    def ids(self, moe_layer: int) -> Tensor:
        return self.trace.ids()[:, :, moe_layer].flatten(0, 1)

    def padded(self, mask: Tensor) -> dict[str, Tensor]:
        """Inputs for a padded batch; position ids where the model takes them, else it counts the padding in."""
        inputs = {"attention_mask": mask.long()}
        if "position_ids" in signature(self.model.forward).parameters:
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        return inputs


@pytest.fixture(params=FAMILIES, ids=lambda family: family.model_type, scope="module")
def case(request):
    return Case(request.param)


# ---------------------------------------------------------------------- what reaches the experts, seen from outside
class Seen:
    """What one MoE layer got, chose and handed out, noted by ordinary hooks on the router and on the experts beside
    it."""

    router: tuple[nn.Module, Tensor, tuple | Tensor]
    ids: Tensor
    weights: Tensor


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Seen]]:
    hooks, seen = [], []
    for spec in find_moe_layers(model):
        here = Seen()
        seen.append(here)

        def note_router(module, args, output, here=here):
            here.router = (module, args[0].detach().flatten(0, -2), output)

        def note_experts(_, args, kwargs, here=here):
            here.ids, here.weights = (x.detach() for x in (*args, *kwargs.values())[1:3])

        def note_logits(_, args, output, here=here, router=spec.module):
            here.router = (router, args[0].detach().flatten(0, -2), router(args[0]).flatten(0, -2))

        beside = model.get_submodule(spec.moe_layer.name.rpartition(".")[0])
        experts = getattr(beside, "experts", None)
        if spec.selector is experts:  # Aria's before transformers 5.18 are not called with ids and weights
            hooks += spied(experts, here)
            experts = None
        if spec.selector is spec.module:
            hooks.append(spec.module.register_forward_hook(note_router))
        else:
            hooks.append(beside.register_forward_hook(note_logits))
        if experts is not None and len(signature(type(experts).forward).parameters) > 3 or hasattr(experts, "config"):
            hooks.append(experts.register_forward_pre_hook(note_experts, with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def spied(experts: nn.Module, here: Seen) -> list:
    """Hooks that note the ids and weights which experts take from a method of their own, whatever stands in for it."""
    inside = {}

    def before(*_):
        inside["was"] = vars(experts).get(SELECTS)
        select = getattr(experts, SELECTS)

        def spy(*args):
            ids, weights = select(*args)
            here.ids, here.weights = ids, weights.detach()
            return ids, weights

        setattr(experts, SELECTS, spy)

    def after(*_):
        delattr(experts, SELECTS)
        if inside["was"] is not None:
            setattr(experts, SELECTS, inside["was"])

    return [experts.register_forward_pre_hook(before), experts.register_forward_hook(after)]


def logits_of(seen: Seen) -> Tensor:
    module, hidden, output = seen.router
    if isinstance(output, tuple):
        floats = [x for x in output if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 2]
        logits = floats[0]
        if len(output) in (2, 5) or len(output) == 3 and not output[0].is_floating_point():
            logits = floats[-1]
        if len(output) == 2 and hasattr(module, "classifier"):  # Longcat Flash before transformers 5.19
            logits = module.classifier(hidden)
    else:
        logits = output
    logits = logits.detach().double()
    probabilities = (logits >= 0).all() and (logits.sum(-1) - 1).abs().max() < 1e-6
    return logits.log() if probabilities else logits  # of Gemma 4, and of many before transformers 5.6


def assert_weights_are_the_familys_own(case: Case, seen: Seen, ids: Tensor) -> None:
    module, hidden, output = seen.router
    expected = case.family.formula(logits_of(seen), ids, At(module, hidden, case.model.config.get_text_config()))
    dispatch = jetmoe_dispatch if isinstance(output, tuple) and len(output) == 5 else case.family.dispatch
    if dispatch:
        dense = dispatch(output).detach().double()
        expected = torch.zeros_like(dense).scatter(1, ids, expected)
        torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-7)
        return
    passed = expected > 0  # a class that skips the experts hands them a weight of 0, for whichever expert
    assert torch.equal(seen.ids.view_as(ids)[passed], ids[passed])
    torch.testing.assert_close(seen.weights.view_as(expected).double(), expected, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- the claims of docs/concepts.md
def test_recording_and_replaying_its_own_routes_change_no_bit(case):
    assert torch.equal(case.recorded_logits, case.logits)
    with torch.no_grad(), replay_routing(case.model, case.trace) as replay:
        assert torch.equal(case.model(case.tokens).logits, case.logits)
    assert replay.preferred == case.trace
    assert replay.coverage == 1


def test_moe_layers_are_the_routers_of_the_text_decoder_in_forward_order(case):
    moe_layers, order = case.trace.layout.moe_layers, []
    hooks = [
        spec.reader.register_forward_pre_hook(lambda *_, s=spec.moe_layer: order.append(s))
        for spec in find_moe_layers(case.model)
    ]
    with torch.no_grad():
        case.model(case.tokens)
    for hook in hooks:
        hook.remove()
    assert order == list(moe_layers)
    assert all(f".{moe_layer.decoder_layer}." in moe_layer.name for moe_layer in moe_layers)


def test_forced_ids_reach_the_experts_with_the_familys_own_weights_and_gradient(case):
    live, _ = record(case.moved, case.tokens)
    assert not live.same_sets(case.trace).all(), "the perturbation must change some routes, or this test shows nothing"
    case.moved.zero_grad()
    with watched(case.moved) as seen, replay_routing(case.moved, case.trace) as replay:
        case.moved(case.tokens).logits.logsumexp(-1).sum().backward()
    assert replay.preferred.same_sets(live)[:, :, 0].all(), "nothing is forced upstream of the first MoE layer"
    for moe_layer, here in enumerate(seen):
        assert_weights_are_the_familys_own(case, here, case.ids(moe_layer))
        parameters = [p for n, p in here.router[0].named_parameters() if "experts" not in n and p.grad is not None]
        assert max(p.grad.abs().max() for p in parameters) > 1e-6, case.trace.layout.moe_layers[moe_layer]


def test_unknown_rows_route_freely(case):
    live, logits = record(case.moved, case.tokens)
    experts = case.trace.experts.clone()
    experts[1:] = case.trace.layout.unknown
    holes = RoutingTrace.from_ids(experts, case.trace.layout, tokens=case.tokens)
    with replay_routing(case.moved, holes) as replay:
        used, mixed = record(case.moved, case.tokens)
    assert replay.coverage == 0.25
    assert torch.equal(used.experts[0], case.trace.experts[0])
    assert torch.equal(used.experts[1:], live.experts[1:])
    torch.testing.assert_close(mixed[1:], logits[1:], rtol=1e-4, atol=1e-4)


def gradients(model, tokens, trace, checkpointing=None) -> dict[str, Tensor]:
    """Gradients of one backward over two micro-batches, each under its own routes, in nested scopes."""
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
        for layer in model.modules():
            layer.training = getattr(layer, "gradient_checkpointing", False)

    def loss(rows):
        return model(tokens[rows], use_cache=False).logits.logsumexp(-1).pow(2).sum()

    one, two = slice(0, 2), slice(2, 4)
    with replay_routing(model, trace.rows(one)):
        first = loss(one)
        with replay_routing(model, trace.rows(two)):
            (first + loss(two)).backward()
    if checkpointing:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
        model.eval()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_recomputes_each_micro_batch_under_its_own_routes(case, mode):
    if not case.model.supports_gradient_checkpointing:
        assert case.family.checkpointing == "none" or older_than("5.23")
        with pytest.raises(ValueError, match="not support"):
            case.model.gradient_checkpointing_enable()
        return
    if mode == "reentrant" and case.family.checkpointing == "not re-entrant" and not older_than("5.24"):
        with pytest.raises(RuntimeError, match="a second time"):
            gradients(build(case.family), case.tokens, case.trace, mode)
        return
    plain, checkpointed = case.moved_gradients, gradients(case.moved, case.tokens, case.trace, mode)
    assert plain.keys() == checkpointed.keys()
    tolerance = 1e-6 if case.family.checkpointing == "rounded" else 0
    for name in plain:
        assert (plain[name] - checkpointed[name]).abs().max() <= tolerance * plain[name].abs().max(), name


def test_generation_with_a_cache_records_what_a_full_forward_would(case):
    if not case.family.generates:
        assert not hasattr(case.model, "generate")
        return
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = False
    prompts = case.tokens[:2].masked_fill(~mask[:, :8], 0)
    with torch.no_grad(), record_routing(case.model) as recording:
        full = case.model.generate(
            prompts, attention_mask=mask[:, :8].long(), max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    routes = recording.trace(full, mask)
    assert not routes.known[:, -1].any(), "the last sampled token was never an input"
    again, _ = record(case.model, full, **case.padded(mask))
    if older_than(case.family.sound_since):
        pytest.skip(f"{case.family.model_type} of transformers {transformers.__version__} is not the same with a cache")
    assert torch.equal(again.experts[:, :-1], routes.experts[:, :-1])


def test_left_and_right_padding_have_the_same_routes_and_replay_each_others(case):
    mask = torch.ones_like(case.tokens, dtype=torch.bool)
    mask[0, :3], mask[2, :1] = False, False
    left = case.tokens.masked_fill(~mask, 0)
    right_mask = mask.flip(1)
    right = torch.zeros_like(left).masked_scatter(right_mask, left[mask])
    left_trace, left_logits = record(case.model, left, **case.padded(mask))
    right_trace, right_logits = record(case.model, right, attention_mask=right_mask.long())
    same = torch.allclose(left_logits[mask], right_logits[right_mask], rtol=1e-4, atol=1e-4)
    assert same == (case.family.padding and not older_than(case.family.sound_since))
    moved = left_trace.align(right_mask) if same else right_trace
    assert moved == right_trace
    with torch.no_grad(), replay_routing(case.model, moved) as replay:
        replayed = case.model(right, attention_mask=right_mask.long()).logits
    assert torch.equal(replayed[right_mask], right_logits[right_mask])
    assert replay.preferred == right_trace


def test_every_experts_implementation_routes_and_replays_alike(case):
    if not case.family.experts or not case.model._can_set_experts_implementation():
        assert not case.model._can_set_experts_implementation()
        assert not case.family.experts or older_than("5.23")
        return
    before = case.model.config._experts_implementation
    own = (CPU_EXPERTS,) if use_cpu_kernels(case.model) else ()
    try:
        for implementation in ("eager", "grouped_mm", "batched_mm", *own):
            case.model.set_experts_implementation(implementation)
            trace, logits = record(case.model, case.tokens)
            assert trace == case.trace
            torch.testing.assert_close(logits, case.logits, rtol=1e-4, atol=1e-4)
            with torch.no_grad(), replay_routing(case.model, trace):
                assert torch.equal(case.model(case.tokens).logits, logits), implementation
    finally:
        case.model.set_experts_implementation(before)


def test_scores_are_the_routers_own_or_refused(case):
    with torch.no_grad(), watched(case.model) as seen, record_routing(case.model, scores=True) as recording:
        since = case.family.scores_since
        if since is None or older_than(since):
            with pytest.raises(RoutingError, match="Record without scores"):
                case.model(case.tokens)
            return
        case.model(case.tokens)
    scores = recording.scores(len(case.tokens))
    for moe_layer, here in enumerate(seen):
        logits = logits_of(here)
        log_p = logits.log_softmax(-1)
        torch.testing.assert_close(scores.all_log_probs[moe_layer].flatten(0, 1).double(), log_p, rtol=1e-5, atol=1e-5)
        used = log_p.gather(1, case.ids(moe_layer))
        torch.testing.assert_close(scores.log_probs[:, :, moe_layer].flatten(0, 1).double(), used, rtol=1e-5, atol=1e-5)
        assert torch.equal(scores.gates[:, :, moe_layer].flatten(0, 1), here.weights.view_as(used).float())
    assert (scores.margins >= 0).all()


# ---------------------------------------------------------------------- which families there are
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.package)
def test_a_family_that_cannot_be_replayed_is_refused_by_name_with_the_reason(refused):
    if not (MODELS / refused.package).exists():
        pytest.skip(f"transformers {transformers.__version__} has no {refused.package}")
    source = importlib.import_module(f"transformers.models.{refused.package}.modeling_{refused.package}")
    module = nn.Module.__new__(getattr(source, refused.class_name))
    nn.Module.__init__(module)
    with pytest.raises(RoutingError, match=f"{refused.class_name}.*{refused.reason}"):
        find_moe_layers(nn.Sequential(module))


def test_no_family_of_the_installed_transformers_is_forgotten():
    router = re.compile(r"^class \w*(Router|TopKGating|MoEV1Gate|CDMoE)\(", re.MULTILINE)
    found = {path.parent.name for path in MODELS.glob("*/modeling_*.py") if router.search(path.read_text())}
    known = {family.package for family in FAMILIES} | {refused.package for refused in REFUSED} | NOT_MOE
    assert found <= known, f"no entry in tests/routing/families.py for {sorted(found - known)}"


def test_the_tables_of_families_are_current():
    page = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    assert table() in page, "put the output of `python -m tests.routing.families` into docs/concepts.md"
