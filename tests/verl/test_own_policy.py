"""verl's engine against our Hugging Face policy: the same batch under the same routes gives the same log-probs, the
same gradients and, three updates on, the same weights, for four families.

How far two right results may lie apart follows from their sums, none of which here has more than `TERMS` terms: in
float32 such a sum is the exact one of factors that are moved by at most TERMS · 2^-24 of themselves (Higham, Accuracy
and Stability of Numerical Algorithms, section 3.1). So our policy runs a second time from weights that are moved by so
much, each up or down at random, and what that changes, twice, is the bound: once for either trainer. It must stay below
a fifth of the fault of 1 % that these tests shall see.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from moe_rl.config import Optimizer
from moe_rl.errors import RoutingError
from moe_rl.objectives import objective_of
from moe_rl.objectives.methods import arm
from moe_rl.policies.hf import HFPolicy
from moe_rl.ranks import join_shards
from moe_rl.routing import RoutingTrace, layout_of
from moe_rl.routing.sources import SOURCES
from moe_rl.types import Batch
from tests.conftest import build
from tests.routing import families
from tests.verl.worker_inputs import actor_loss, batch, engine, score, update, with_old_policy

pytestmark = pytest.mark.usefixtures("one_rank")
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe")
TERMS = 64
"""Products of a hidden state, tokens of a mini-batch, entries of the vocabulary."""
OPTIMIZER = dict(lr=2e-2, betas=(0.9, 0.95), weight_decay=0.1)
EPS, CLIP, MOST = 1e-3, 0.5, 2e-3
UPDATES = (range(4), range(4, 8), range(4))
"""The sequences of each: two mini-batches, and the first once more."""
OBJECTIVE = objective_of(arm("grpo(clip_low=0.2,clip_high=0.2,dual=3.0,log_clamp=20.0)+token_mean"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint of a family, and how it attends: gpt-oss has no other way than eager."""
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(folder)
    return folder, "eager" if request.param == "gpt_oss" else "sdpa"


def reported_routes(data, layout, layers):
    """Random experts at the layers that route, in verl's field as an engine reports them: zeros elsewhere."""
    draw, tokens = torch.Generator().manual_seed(5), data["input_ids"]
    ids = torch.zeros(len(tokens.values()), layers, layout.top_k, dtype=torch.int16)
    for moe_layer in layout.moe_layers:
        order = torch.rand(len(ids), moe_layer.num_experts, generator=draw).argsort(-1)
        ids[:, moe_layer.decoder_layer] = order[:, : layout.top_k].to(torch.int16)
    ids[tokens.offsets()[1:] - 1] = 0
    return torch.nested.nested_tensor_from_jagged(ids, tokens.offsets())


def padded(rows, fill=0):
    """Rows of different length as one tensor."""
    return torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=fill)


def own_batch(data, layout):
    """verl's batch as ours: right-padded."""
    texts, starts = data["input_ids"].unbind(), [len(row) for row in data["prompts"].unbind()]
    mask = padded([torch.ones(len(row), dtype=torch.bool) for row in texts])
    response = mask & (torch.arange(mask.shape[1])[None] >= torch.tensor(starts)[:, None])
    advantages = torch.zeros(mask.shape)
    advantages[response] = data["advantages"].values().float()
    routes = None
    if "routed_experts" in data:
        moe_layers = [moe_layer.decoder_layer for moe_layer in layout.moe_layers]
        ids = padded(
            [
                rows[:, moe_layers].index_fill(0, torch.tensor([len(rows) - 1]), -1)
                for rows in data["routed_experts"].unbind()
            ],
            -1,
        )
        routes = RoutingTrace.from_ids(ids, layout, attention_mask=mask)
    count = len(texts)
    return Batch(
        tokens=padded(texts),
        attention_mask=mask,
        response_mask=response,
        prompt_index=torch.arange(count),
        rollout_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(count),
        finished=torch.ones(count, dtype=torch.bool),
        rollout_routes=routes,
        old_logprobs=torch.zeros(mask.shape),
        advantages=advantages,
    )


def watched(module, optimizer):
    """What an optimizer is handed, update by update: the gradients of all parameters, clipped."""
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            {
                name: torch.zeros(p.shape) if p.grad is None else join_shards(p.grad).clone()
                for name, p in module.named_parameters()
            }
        )
    )
    return seen


def weights_of(module):
    return {name: join_shards(p.detach()).clone() for name, p in module.named_parameters()}


def as_verl_trains(made, data):
    """Log-probs of responses under π_old, then what every update hands to its optimizer and moves."""
    found, before, seen = score(made, data), weights_of(made.module), watched(made.module, made.optimizer)
    whole = with_old_policy(data, found)
    for rows in UPDATES:
        part = tu.index_select_tensor_dict(whole, [*rows])
        tu.assign_non_tensor(part, global_batch_size=len(rows))
        update(made, part, actor_loss())
    moved = {name: w - before[name] for name, w in weights_of(made.module).items()}
    return found.get("routed_experts"), {"log-probs": whole["old_log_probs"].values()}, *seen, moved


def as_we_train(model, data, source, routes=None):
    """The same by our policy; under the given `routes` instead of those that the source finds."""
    policy = HFPolicy(model, Optimizer(eps=EPS, grad_clip=CLIP, **OPTIMIZER), micro_batch=3)
    for group in policy.optimizer.param_groups:  # verl's norms and biases decay, too
        group["weight_decay"] = OPTIMIZER["weight_decay"]
    whole, before, seen = own_batch(data, layout_of(model)), weights_of(model), watched(model, policy.optimizer)
    routes = routes or SOURCES[source](whole, policy.score(whole))
    whole = replace(whole, routes=routes, old_logprobs=policy.score(whole, routes).logprobs)
    for rows in UPDATES:
        policy.update(OBJECTIVE.attach_weights(whole.rows(torch.tensor(rows))), OBJECTIVE)
    moved = {name: w - before[name] for name, w in weights_of(model).items()}
    return routes, {"log-probs": whole.old_logprobs[whole.response_mask]}, *seen, moved


def apart(found, expected):
    """How far two results lie apart, tensor by tensor, as a share of the expected one."""
    assert found.keys() == expected.keys()
    norms = {name: (float((found[name] - x).norm()), float(x.norm())) for name, x in expected.items()}
    assert all(difference == 0 for difference, norm in norms.values() if norm == 0), "experts that no token uses"
    return {name: difference / norm for name, (difference, norm) in norms.items() if norm}


@pytest.mark.parametrize("mode, source, packed", [("R2", "old_policy", True), ("R3", "rollout", False)])
def test_log_probs_gradients_and_three_updates_are_those_of_our_policy(family, mode, source, packed):
    folder, attention = family
    packed = packed and attention == "sdpa"

    def loaded():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()

    model, near = loaded(), loaded()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in near.parameters():
            weight *= 1 + TERMS * 2.0**-24 * (2 * torch.randint(2, weight.shape, generator=draw) - 1)
    data = batch(48, prompts=(4, 3, 4, 2) * 2, responses=(5, 9, 1, 6, 3, 4, 8, 2), packed=packed)
    if mode == "R3":
        data["routed_experts"] = reported_routes(data, layout_of(model), model.config.num_hidden_layers)
    made = engine(
        folder,
        {"mode": mode},
        attention=attention,
        optimizer=dict(OPTIMIZER, clip_grad=CLIP, override_optimizer_config={"eps": EPS}),
    )
    recorded, *theirs = as_verl_trains(made, data)
    routes, *ours = as_we_train(model, data, source)
    _, *moved = as_we_train(near, data, source, routes)
    if mode == "R2":
        data["routed_experts"] = recorded
        assert torch.equal(own_batch(data, routes.layout).rollout_routes.experts, routes.experts)
    names = ("log-probs", "gradients of update 1", "of update 2", "of update 3", "what they move")
    for what, found, expected, other in zip(names, theirs, ours, moved, strict=True):
        bound = 2 * max(apart(other, expected).values())
        assert bound < MOST, f"{what}: these numbers are too ill-conditioned to be compared"
        for name, share in apart(found, expected).items():
            assert share <= bound, f"{what}, {name}: {share:.1e} of it apart, more than {bound:.1e}"


@pytest.mark.parametrize("mixes", ["qwen3_next", "jamba", "minimax", "lfm2_moe", "gpt_oss", "glm_moe_dsa"])
def test_packed_sequences_that_change_one_another_are_refused(mixes, tmp_path):
    """Linear attention, convolutions, and in transformers 5.9 masks that are made without position ids."""
    families.build(next(one for one in families.FAMILIES if one.model_type == mixes)).save_pretrained(tmp_path)
    made = engine(tmp_path, {"mode": "R2"}, attention="eager" if mixes == "gpt_oss" else "sdpa")
    score(made, batch(32, packed=False))
    with pytest.raises(RoutingError, match="mixes sequences"):
        score(made, batch(32))
