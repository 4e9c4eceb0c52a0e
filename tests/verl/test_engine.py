"""The engine on one rank: what is recorded is replayed, however verl lays its tokens out."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.routing import layout_of, record_routing
from tests.routing import families
from tests.verl.worker_inputs import actor_loss, batch, engine, score, update, with_old_policy

pytestmark = pytest.mark.usefixtures("one_rank")
LAYOUTS = [dict(packed=False), dict(packed=True), dict(packed=True, dynamic=True), dict(packed=False, dynamic=True)]


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_r2_replays_the_recorded_routes_and_the_first_ratio_is_one(checkpoint, settings, checkpointing):
    made = engine(checkpoint, {"mode": "R2"}, checkpointing)
    found = score(made, batch(64, **settings))
    data = with_old_policy(batch(64, **settings), found)
    first = update(made, data)
    assert first["routing/coverage"] == [1.0] and first["routing/pull"] == [0.0]
    assert first["routing/token_log_ratio_var"] == [0.0] and first["routing/token_ess"] == [1.0]
    second = update(made, data)
    assert second["routing/coverage"] == [1.0] and second["routing/pull"][0] > 0.01
    assert second["routing/token_log_ratio_var"][0] > 0


def routes_of(recording):
    """What a recording saw in all forwards, one after the other: [tokens, site, k]."""
    return torch.cat([recording.layout.stack(sites) for sites in zip(*recording._ids, strict=True)])


def test_an_update_uses_the_experts_that_were_recorded_and_they_are_the_model_s_own(checkpoint):
    made = engine(checkpoint, {"mode": "R2"})
    data = batch(64)
    found = score(made, data)
    routes, inner = found["routed_experts"].values(), torch.ones(data["input_ids"].values().shape[0], dtype=torch.bool)
    inner[data["input_ids"].offsets()[1:] - 1] = False
    assert bool((routes[~inner] == -2).all()) and bool((routes[inner] >= 0).all())
    update(made, with_old_policy(data, found))  # other weights from here on
    with record_routing(made.module) as recording:
        update(made, with_old_policy(data, found))
    assert torch.equal(routes_of(recording)[inner], routes[inner].to(torch.uint8))
    fresh = engine(checkpoint, {"mode": "R2"})
    with record_routing(fresh.module) as recording, torch.no_grad():
        for row in data["input_ids"].unbind():
            fresh.module(input_ids=row[None], use_cache=False)
    assert torch.equal(routes_of(recording)[inner], routes[inner].to(torch.uint8))
    assert routes.dtype == torch.int16 and routes.shape[1:] == (3, 2)


def test_without_replay_routes_are_free_and_coverage_says_so(checkpoint):
    made = engine(checkpoint)
    found = score(made, batch(64))
    assert "routed_experts" not in found
    metrics = update(made, with_old_policy(batch(64), found))
    assert metrics["routing/coverage"] == [0.0] and "routing/pull" not in metrics
    assert metrics["routing/token_log_ratio_var"] == [0.0] and metrics["routing/load_max_violation"][0] > 0
    assert {f"routing/load_max_violation/layer_0{layer}" for layer in range(3)} <= metrics.keys()


@pytest.mark.parametrize("packed", [False, True])
def test_replay_and_measurements_go_with_verl_s_fused_kernels(checkpoint, packed, monkeypatch):
    """They replace the forward of the model's class."""
    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", Qwen3MoeForCausalLM.forward)  # puts it back
    data, found = batch(64, packed=packed), []
    for fused in (False, True):
        tu.assign_non_tensor(data, use_fused_kernels=fused)
        made = engine(checkpoint, {"mode": "R2", "measured_sequences": 2}, fused=fused)
        found.append(update(made, with_old_policy(data, score(made, data))))
    assert found[1]["routing/pull"] == [0.0] and found[1]["routing/coverage"] == [1.0]
    for name in ("expert_change_rate", "load_entropy", "token_ess"):
        assert found[1][f"routing/{name}"] == pytest.approx(found[0][f"routing/{name}"], abs=1e-6), name


def random_routes(data, seed=5):
    """A rollout's routes as its engine reports them: other experts than the routers', zeros at the last tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens = data["input_ids"]
    ids = torch.rand(len(tokens.values()), 3, 8, generator=draw).argsort(-1)[..., :2].to(torch.int16)
    ids[tokens.offsets()[1:] - 1] = 0
    return torch.nested.nested_tensor_from_jagged(ids, tokens.offsets())


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_r3_replays_the_rollout_s_routes_in_both_passes(checkpoint, settings):
    made = engine(checkpoint, {"mode": "R3"})
    data = batch(64, **settings)
    data["routed_experts"] = random_routes(data)
    found = score(made, data)
    assert "routed_experts" not in found, "verl would overwrite the rollout's"
    metrics = update(made, with_old_policy(data, found))
    assert metrics["routing/coverage"] == [1.0] and metrics["routing/pull"][0] > 0.3
    assert metrics["routing/token_log_ratio_var"] == [0.0] and metrics["routing/token_ess"] == [1.0]
    free = score(engine(checkpoint), batch(64, **settings))
    assert not torch.allclose(found["log_probs"].values(), free["log_probs"].values(), atol=1e-3)


def test_log_probs_under_replay_are_those_of_the_plain_model(checkpoint):
    from transformers import AutoModelForCausalLM

    from moe_rl.routing import RoutingTrace, replay_routing

    data = batch(64)
    data["routed_experts"] = random_routes(data)
    found = score(engine(checkpoint, {"mode": "R3"}), data)["log_probs"].unbind()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    for row, ids, logprobs in zip(data["input_ids"].unbind(), data["routed_experts"].unbind(), found, strict=True):
        ids = ids.masked_fill((torch.arange(len(row)) == len(row) - 1)[:, None, None], -1)
        trace = RoutingTrace.from_ids(ids[None], layout_of(model))
        with torch.no_grad(), replay_routing(model, trace):
            plain = model(input_ids=row[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(logprobs[:-1], plain[:-1].gather(1, row[1:, None])[:, 0], atol=1e-5, rtol=0)


def test_missing_and_foreign_routes_are_refused(checkpoint):
    made = engine(checkpoint, {"mode": "R2"})
    data = batch(64)
    found = score(made, data)
    plain = with_old_policy(data, {"log_probs": found["log_probs"]})
    with pytest.raises(RoutingError, match="bypass_mode=False"):
        update(made, plain)
    with pytest.raises(RoutingError, match="enable_rollout_routing_replay"):
        score(engine(checkpoint, {"mode": "R3"}), batch(64))
    routes = found["routed_experts"]
    for ids, message in ((routes.values()[:, :2], "expected one row per token"),
                         (routes.values().clamp(max=0) + 8, "not of this engine"),
                         (routes.values().where(routes.values() < 0, 8), "at most 8")):
        data = with_old_policy(batch(64), found)
        data["routed_experts"] = torch.nested.nested_tensor_from_jagged(ids.contiguous(), routes.offsets())
        with pytest.raises(RoutingError, match=message):
            update(made, data)
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(torch.zeros_like(routes.values()), routes.offsets())
    with pytest.raises(ConfigError, match="the mini-batch has no known routing"):
        update(made, data)
    reported = routes.values().roll(1, -1)
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(reported.abs() % 8, routes.offsets())
    with pytest.raises(RoutingError, match="not of this engine"):
        update(made, data)
    update(made, with_old_policy(batch(64), found))  # the scopes of the failures are gone


def test_routes_in_the_batch_are_measured_with_every_engine(checkpoint):
    """With an engine of verl; Megatron's and VeOmni's have the same `train_batch`, and say so where they replay."""
    ours, theirs = engine(checkpoint, {"mode": "R2"}), engine(checkpoint, kind=FSDPEngineWithLMHead)
    theirs.enable_routing_replay = True  # as verl's engines that replay have it
    found = score(ours, batch(64))
    data = with_old_policy(batch(64), found)
    expected, metrics = update(ours, data), update(theirs, data)
    assert metrics["routing/coverage"] == [1.0] and metrics["grad_norm"] > 0
    loads = [name for name in expected if "/load_" in name]
    assert len(loads) == 4 + 3 and [metrics[name] for name in loads] == [expected[name] for name in loads]
    without, off = with_old_policy(batch(64), {"log_probs": found["log_probs"]}), engine(
        checkpoint, kind=FSDPEngineWithLMHead)
    for metrics in (update(theirs, without), update(off, data)):  # no routes; routes that nobody replays
        assert not [name for name in metrics if name.startswith("routing/")]
    dense = found["routed_experts"].values().clone()
    dense[:, 1] = 0  # as a layer without experts has it
    dense[:4] = 0  # and an engine that does not know the routes of the first tokens
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(dense, data["input_ids"].offsets())
    metrics = update(theirs, data)
    inputs = len(dense) - len(data)
    assert metrics["routing/coverage"] == [pytest.approx((inputs - 4) / inputs)]
    assert "routing/load_max_violation/layer_01" not in metrics and "routing/load_max_violation/layer_02" in metrics


def test_sequences_that_only_fill_a_batch_up_are_not_counted(checkpoint):
    made = engine(checkpoint, {"mode": "R3"})
    data = batch(64)
    empty = [mask * (row != 1) for row, mask in enumerate(data["response_mask"].unbind())]
    routes = random_routes(data)
    ids = routes.values().clone()
    ids[routes.offsets()[1] : routes.offsets()[2]] = 0
    masks = torch.nested.as_nested_tensor(empty, layout=torch.jagged)
    data["response_mask"], data["loss_mask"] = masks, masks
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(ids, routes.offsets())
    metrics = update(made, with_old_policy(data, score(made, data)), actor_loss(aggregation="token-mean"))
    assert metrics["routing/coverage"] == [1.0]


def test_a_reference_is_left_alone(checkpoint, monkeypatch):
    from torch.distributed.fsdp import OffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    made = engine(checkpoint, {"mode": "R2"}, lora=4)
    data = batch(64)
    found = score(made, data)
    update(made, with_old_policy(data, found))
    with made.disable_adapter():
        assert "routed_experts" not in score(made, data)
    assert "routed_experts" in score(made, data)
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", lambda **_: OffloadPolicy())  # it takes an accelerator
    reference = engine(checkpoint, {"mode": "R2"}, forward_only=True)
    assert "routed_experts" not in score(reference, data)


def test_lora_replays(checkpoint):
    made = engine(checkpoint, {"mode": "R2"}, lora=4, checkpointing=True, learning_rate=0.3)
    data = batch(64)
    data = with_old_policy(data, score(made, data))
    first, second = update(made, data), update(made, data)
    assert first["routing/pull"] == [0.0] and first["routing/token_ess"] == [1.0]
    assert second["routing/coverage"] == [1.0] and second["routing/token_log_ratio_var"][0] > 0


SOURCES = {"soft(ratio=0.5)": 1.0, "random_share(share=0.5)": 0.5, "by_layer(first=1)": 1 / 3,
           "by_margin(below=inf)": 1.0,
           "by_probability(below=2.0)": 1.0, "shuffled": 26 / 30, "random_sets": 1.0,
           "false_flips(share=0.5)": 1.0,
           "soft(ratio=0.5,base=rollout)": 1.0, "by_layer(last=1,base=rollout)": 1 / 3}


@pytest.mark.parametrize("written, coverage", SOURCES.items())
@pytest.mark.parametrize("settings", LAYOUTS[:2], ids=str)
def test_sources_by_name(checkpoint, written, coverage, settings):
    made = engine(checkpoint, {"mode": f"moe_rl:{written}"})
    data = batch(64, **settings)
    if "rollout" in written:
        data["routed_experts"] = random_routes(data)
    found = score(made, data)
    assert ("routed_experts" in found) == (not written.startswith("soft(ratio=0.5,base=rollout"))
    metrics = update(made, with_old_policy(data, found))
    assert metrics["routing/coverage"][0] == pytest.approx(coverage, abs=0.15 * written.startswith("random_share"))
    assert metrics["routing/token_log_ratio_var"] == [0.0], "both sides of the ratio use the same routes"
    assert (metrics["routing/pull"][0] == 0) == (not written.startswith(("shuffled", "random_sets", "false")) and
                                                 "rollout" not in written)


def test_settings_that_cannot_be_are_refused(checkpoint):
    for replay, message in (({"mode": "R4"}, "choose disabled, R2, R3 or moe_rl:"),
                            ({"mode": "moe_rl:recal"}, "recall"),
                            ({"mode": "moe_rl:recall"}, "combine weights"), ({"mode": "R2", "file": "x"}, "has file"),
                            ({"mode": "moe_rl:under_noise(sigma=0.1)"}, "other routers"),
                            ({"mode": "moe_rl:soft(ratio=0.5,base=rolout)"}, "base must be one of old_policy, rollout"),
                            ({"mode": "moe_rl:soft(ratio=-1)"}, "a number of at least 0"),
                            ({"mode": "moe_rl:soft"}, "ratio"), ({"measured_sequences": -1}, "measured_sequences=-1")):
        with pytest.raises(ConfigError, match=message):
            engine(checkpoint, replay)


def test_a_dense_model_is_refused(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8)
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(RoutingError, match="no MoE layer"):
        engine(tmp_path, {"mode": "R2"})


def test_sequences_cut_over_ranks_and_two_routers_in_a_layer_are_refused(checkpoint, tmp_path):
    made = engine(checkpoint)
    made.ulysses_sequence_parallel_size = 2  # as verl's own initialisation finds it on two ranks
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=2.*Set it to 1"):
        made.initialize()
    families.build(next(one for one in families.FAMILIES if one.model_type == "jetmoe")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="two routers.*room for one. Switch moe_rl off"):
        engine(tmp_path, {"mode": "R2"})


def test_ratios_are_measured_as_our_trainer_measures_them(checkpoint):
    from moe_rl.metrics.ratios import engine_gap, ratio_statistics

    made = engine(checkpoint, learning_rate=3e-2)
    data = batch(64)
    old = with_old_policy(data, score(made, data))
    update(made, old)
    now = with_old_policy(data, score(made, data))["old_log_probs"]
    old["rollout_log_probs"] = torch.nested.nested_tensor_from_jagged(
        old["old_log_probs"].values() - 0.1, old["old_log_probs"].offsets())
    metrics = update(made, old)
    log_ratio = now.to_padded_tensor(0.0) - old["old_log_probs"].to_padded_tensor(0.0)
    mask = old["response_mask"].to_padded_tensor(0).bool()
    expected = ratio_statistics(log_ratio, mask)
    for level in ("token", "sequence"):
        for name in ("log_ratio_mean", "log_ratio_var", "ess", "kl_k3", "beyond_2"):
            assert metrics[f"routing/{level}_{name}"][0] == pytest.approx(expected[f"{level}_{name}"], abs=1e-6), name
    gap = engine_gap(torch.full_like(log_ratio, 0.1), mask)
    for name in ("engine_kl_k3", "engine_logprob_mean", "engine_beyond_2"):
        assert metrics[f"routing/{name}"][0] == pytest.approx(gap[name], abs=1e-6)


@pytest.mark.parametrize("settings", LAYOUTS[:2], ids=str)
def test_expert_change_is_measured_on_fixed_tokens_and_changes_nothing(checkpoint, settings):
    from moe_rl.integrations.verl import fields
    from moe_rl.metrics.volatility import response_change, route_change
    from tests.verl.worker_inputs import RESPONSES

    data = batch(64, **settings)
    measured = engine(checkpoint, {"measured_sequences": 3}, learning_rate=3e-2)
    plain, twin = engine(checkpoint, learning_rate=3e-2), engine(checkpoint, {"mode": "R2"}, learning_rate=3e-2)
    old = with_old_policy(data, score(measured, data))
    for _ in range(2):
        before = score(twin, data)["routed_experts"].unbind()[:3]
        began = time.perf_counter()
        metrics = update(measured, old)
        assert 0 < metrics["routing/measure_seconds"][0] < time.perf_counter() - began
        reference = update(plain, old)
        assert metrics["grad_norm"] == reference["grad_norm"]
        twin.module.load_state_dict(plain.module.state_dict())
        after = score(twin, data)["routed_experts"].unbind()[:3]
        decides = fields.deciding_tokens(data).split(data["input_ids"].offsets().diff().tolist())[:3]
        one, other, mask = (torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True)
                            for rows in (before, after, decides))
        change = route_change(one, other, mask).row() | response_change(one, other, mask, 8).row()
        for name in ("expert_change_rate", "any_change_rate", "any_layer_change", "jaccard_distance", "layers_changed",
                     "response_set_change", "response_usage_change"):
            assert metrics[f"routing/{name}"][0] == pytest.approx(change[name]), name
        assert change["expert_change_rate"] > 0 and int(mask.sum()) == sum(RESPONSES[:3])


@pytest.mark.parametrize("mode", ["R3", "disabled"])
def test_the_engine_s_routes_are_compared_with_the_natural_ones_before_the_first_update(checkpoint, mode):
    """By hand, on the 5 + 9 response tokens of two sequences at three layers."""
    data = batch(64, packed=False)
    natural = score(engine(checkpoint, {"mode": "R2"}), data)["routed_experts"]
    ids, start = natural.values().clone().clamp(min=0), data["prompts"].offsets().diff().tolist()
    second = int(natural.offsets()[1])
    others = [[next(e for e in range(8) if e not in row), *row[1:]] for row in ids[:, 0].tolist()]
    ids[start[0], 0] = torch.tensor(others[start[0]]).short()  # a response token: one of two experts
    ids[second + start[1] - 1, 1:] = (ids[second + start[1] - 1, 1:] + 4) % 8  # the last of a prompt decides, too
    ids[second + start[1] + 2] = 0  # not reported
    for uncounted in (0, second, int(natural.offsets()[2]) + 3):  # prompts, and a sequence that is not measured
        ids[uncounted, 0] = torch.tensor(others[uncounted]).short()
    moved = ids[second + start[1] - 1, 1:], natural.values()[second + start[1] - 1, 1:]
    lost = sum(len({*old.tolist()} - {*new.tolist()}) / 2 for new, old in zip(*moved, strict=True))
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(ids, natural.offsets())
    made = engine(checkpoint, {"mode": mode, "measured_sequences": 2})
    data = with_old_policy(data, score(made, data))
    first, second = update(made, data), update(made, data)
    assert first["routing/engine_expert_change_rate"] == [pytest.approx((0.5 + lost) / (13 * 3))]
    assert first["routing/engine_any_change_rate"] == [pytest.approx(3 / (13 * 3))]
    assert first["routing/engine_any_layer_change"] == [pytest.approx(2 / 13)]
    assert not [name for name in second if "engine_" in name], "the weights are other ones from here on"


def test_each_update_is_logged_and_what_a_step_changes_as_a_whole(checkpoint):
    """Of two updates per step, the second says how far the routes moved from those before the first."""
    data = batch(64)
    made = engine(checkpoint, {"measured_sequences": 2, "updates_per_step": 2}, learning_rate=3e-2)
    plain = engine(checkpoint, {"measured_sequences": 2}, learning_rate=3e-2)
    old = with_old_policy(data, score(made, data))
    score(plain, data)
    for _ in range(2):
        first, second, alone, alone_again = (update(one, old) for one in (made, made, plain, plain))
        assert not [name for name in alone_again if "update_" in name or "step_" in name]
        for number, metrics in ((1, first), (2, second)):
            prefix = f"routing/update_{number:02d}/"
            for name in ("token_ess", "coverage", "load_entropy", "expert_change_rate"):
                assert metrics[prefix + name] == metrics[f"routing/{name}"]
            assert all(name.startswith(prefix) for name in metrics if "update_" in name)
        assert not [name for name in first if "step_" in name]
        assert first["routing/expert_change_rate"] == alone["routing/expert_change_rate"]
        layers = [second[f"routing/step_expert_change_rate/layer_0{layer}"][0] for layer in range(3)]
        assert sum(layers) / 3 == pytest.approx(second["routing/step_expert_change_rate"][0])
        assert second["routing/step_any_change_rate"][0] >= second["routing/any_change_rate"][0] / 2 > 0
        assert second["routing/step_expert_change_rate"] != second["routing/expert_change_rate"]
