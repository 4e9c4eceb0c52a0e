"""The engine on one rank: what is recorded is replayed, however verl lays its tokens out."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from verl.utils import tensordict_utils as tu

from moe_rl.errors import ConfigError, RoutingError
from moe_rl.integrations.verl import measure
from moe_rl.integrations.verl.mode import Mode
from moe_rl.routing import record_routing
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
    """What a recording saw in all forwards, one after the other: [tokens, MoE layer, k]."""
    return torch.cat([recording.layout.stack(moe_layers) for moe_layers in zip(*recording._ids, strict=True)])


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


def test_missing_and_foreign_routes_are_refused(checkpoint):
    made = engine(checkpoint, {"mode": "R2"})
    found = score(made, batch(64))
    with pytest.raises(RoutingError, match="bypass_mode=False"):
        update(made, with_old_policy(batch(64), {"log_probs": found["log_probs"]}))
    with pytest.raises(RoutingError, match="enable_rollout_routing_replay=True"):
        score(engine(checkpoint, {"mode": "R3"}), batch(64))
    routes = found["routed_experts"].values()
    for ids, kind, value in (
        (routes[:, :2], RoutingError, "shape"),
        (routes.clamp(max=0) + 8, RoutingError, "of the rollout"),
        (routes.roll(1, -1).abs() % 8, RoutingError, "of the rollout"),
        (routes.where(routes < 0, 8), RoutingError, "id 8"),
        (torch.zeros_like(routes), ConfigError, "no known routing"),
    ):
        data = with_old_policy(batch(64), found)
        offsets = found["routed_experts"].offsets()
        data["routed_experts"] = torch.nested.nested_tensor_from_jagged(ids.contiguous(), offsets)
        with pytest.raises(kind, match=value):
            update(made, data)
    update(made, with_old_policy(batch(64), found))  # the scopes of the failures are gone


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


SOURCES = {
    "soft(ratio=0.5)": 1.0,
    "random_share(share=0.5)": 0.5,
    "by_layer(first=1)": 1 / 3,
    "by_margin(below=inf)": 1.0,
    "shuffled": 26 / 30,
    "random_sets": 1.0,
    "soft(ratio=0.5,base=rollout)": 1.0,
    "by_layer(last=1,base=rollout)": 1 / 3,
}


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
    assert (metrics["routing/pull"][0] == 0) == (
        not written.startswith(("shuffled", "random_sets", "false")) and "rollout" not in written
    )


@pytest.mark.parametrize(
    "replay, value",
    [
        ({"mode": "R4"}, "R4"),
        ({"mode": "moe_rl:recal"}, "recal"),
        ({"mode": "R2", "file": "x"}, "file"),
        ({"mode": "moe_rl:soft(ratio=0.5,base=rolout)"}, "rolout"),
        ({"mode": "moe_rl:soft(ratio=-1)"}, "-1"),
        ({"mode": "moe_rl:soft"}, "ratio"),
        ({"measured_sequences": -1}, "measured_sequences=-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(replay, value):
    with pytest.raises(ConfigError, match=value):
        Mode.of(replay)


def test_models_and_layouts_that_cannot_be_are_refused(checkpoint, tmp_path):
    made = engine(checkpoint)
    made.ulysses_sequence_parallel_size = 2  # as verl's own initialisation finds it on two ranks
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=2"):
        made.initialize()
    families.build(next(one for one in families.FAMILIES if one.model_type == "jetmoe")).save_pretrained(tmp_path / "2")
    with pytest.raises(ConfigError, match="two routers"):
        engine(tmp_path / "2", {"mode": "R2"})
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8)
    dense = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    Qwen3ForCausalLM(dense).save_pretrained(tmp_path / "dense")
    with pytest.raises(RoutingError, match="no MoE layer"):
        engine(tmp_path / "dense", {"mode": "R2"})


def test_ratios_are_measured_as_our_trainer_measures_them(checkpoint):
    from moe_rl.metrics.ratios import engine_gap, ratio_statistics

    made = engine(checkpoint, learning_rate=3e-2)
    data = batch(64)
    old = with_old_policy(data, score(made, data))
    update(made, old)
    now = with_old_policy(data, score(made, data))["old_log_probs"]
    old["rollout_log_probs"] = torch.nested.nested_tensor_from_jagged(
        old["old_log_probs"].values() - 0.1, old["old_log_probs"].offsets()
    )
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


def test_a_ratio_that_diverges_is_reported(checkpoint):
    """By hand: of weights e^400, 1 and 1 only the first counts, so the ESS is a third of the tokens, and each of the
    two sequences has its own. A log-ratio that is not a number leaves no number."""
    layout, mask = engine(checkpoint)._moe_layout, torch.tensor([[True, True], [True, False]])
    rows = zip(([400.0, 0.0], [0.0, math.nan]), mask, strict=True)
    far = [measure.sum_ratios("ratio", torch.tensor([row]), part[None]) for row, part in rows]
    undefined = measure.sum_ratios("ratio", torch.full((2, 2), math.nan), mask)
    none = measure.sum_ratios("ratio", torch.zeros(2, 2), torch.zeros_like(mask))
    row, nothing, unknown = (measure.row_of(sums.over_ranks(), layout) for sums in (far[0] + far[1], none, undefined))
    assert row["routing/token_ess"] == pytest.approx(1 / 3) and row["routing/sequence_ess"] == pytest.approx(1 / 2)
    assert row["routing/token_kl_k3"] == pytest.approx(math.exp(400) / 3)
    assert row.keys() == unknown.keys() and math.isnan(unknown["routing/token_ess"]) and not nothing


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
        metrics = update(measured, old)
        reference = update(plain, old)
        assert metrics["grad_norm"] == reference["grad_norm"]
        twin.module.load_state_dict(plain.module.state_dict())
        after = score(twin, data)["routed_experts"].unbind()[:3]
        decides = fields.deciding_tokens(data).split(data["input_ids"].offsets().diff().tolist())[:3]
        one, other, mask = (
            torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True) for rows in (before, after, decides)
        )
        change = route_change(one, other, mask).row() | response_change(one, other, mask, 8).row()
        for name in (
            "expert_change_rate",
            "any_change_rate",
            "any_layer_change",
            "jaccard_distance",
            "layers_changed",
            "response_set_change",
            "response_usage_change",
        ):
            assert metrics[f"routing/{name}"][0] == pytest.approx(change[name]), name
        assert change["expert_change_rate"] > 0 and int(mask.sum()) == sum(RESPONSES[:3])


@pytest.mark.parametrize("mode", ["R3", "disabled"])
def test_the_engine_s_routes_are_compared_with_the_unconstrained_ones_before_the_first_update(checkpoint, mode):
    """By hand, on the 5 + 9 response tokens of two sequences at three layers."""
    data = batch(64, packed=False)
    unconstrained = score(engine(checkpoint, {"mode": "R2"}), data)["routed_experts"]
    ids, start = unconstrained.values().clone().clamp(min=0), data["prompts"].offsets().diff().tolist()
    second = int(unconstrained.offsets()[1])
    others = [[next(e for e in range(8) if e not in row), *row[1:]] for row in ids[:, 0].tolist()]
    ids[start[0], 0] = torch.tensor(others[start[0]]).short()  # a response token: one of two experts
    ids[second + start[1] - 1, 1:] = (ids[second + start[1] - 1, 1:] + 4) % 8  # the last of a prompt decides, too
    ids[second + start[1] + 2] = 0  # not reported
    for uncounted in (0, second, int(unconstrained.offsets()[2]) + 3):  # prompts, and a sequence that is not measured
        ids[uncounted, 0] = torch.tensor(others[uncounted]).short()
    moved = ids[second + start[1] - 1, 1:], unconstrained.values()[second + start[1] - 1, 1:]
    lost = sum(len({*old.tolist()} - {*new.tolist()}) / 2 for new, old in zip(*moved, strict=True))
    data["routed_experts"] = torch.nested.nested_tensor_from_jagged(ids, unconstrained.offsets())
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


@pytest.mark.parametrize("declared, made", [(3, 2), (2, 3)])
def test_updates_are_counted_from_the_first_of_a_step(checkpoint, declared, made):
    """A step begins with the scoring of its old policy, or after the update that verl calls the last of a step; with
    `bypass_mode` nothing is scored."""
    for bypass in (False, True):
        trained = engine(checkpoint, {"measured_sequences": 1, "updates_per_step": declared}, learning_rate=3e-2)
        data = with_old_policy(batch(64), score(trained, batch(64)))
        for _ in range(2):
            if not bypass:
                score(trained, batch(64))
            for number in range(1, made + 1):
                tu.assign_non_tensor(data, update_lr_scheduler=number == made)
                metrics = update(trained, data)
                assert f"routing/update_{number:02d}/token_ess" in metrics
                assert ("routing/step_expert_change_rate" in metrics) == (number == made)
    if made < declared:
        first = update(trained, with_old_policy(batch(64), score(trained, batch(64))))
        assert "routing/update_01/token_ess" in first, "after a scoring, in a loop that is not verl's"


def test_the_precision_of_unconstrained_routes_is_that_of_the_update_or_an_error(checkpoint):
    made = engine(checkpoint, {"measured_sequences": 1})
    data = with_old_policy(batch(64), score(made, batch(64)))
    del made._autocast_dtype
    with pytest.raises(AttributeError, match="_autocast_dtype"):
        update(made, data)


def test_positions_of_images_are_read_as_verl_reads_them(checkpoint, monkeypatch):
    """A jagged tensor [batch, 3, time] that was sent to a worker has its axis of time in the wrong place."""
    made, data = engine(checkpoint, {"measured_sequences": 1}), batch(64)
    data = with_old_policy(data, score(made, data))
    places = torch.nested.as_nested_tensor(
        [row.expand(3, -1).contiguous() for row in data["position_ids"].unbind()], layout=torch.jagged
    )
    data["position_ids"], axes = places, []
    places._ragged_idx = 1
    monkeypatch.setattr(
        made, "_measured_update", lambda data, loss: axes.append(data["position_ids"]._ragged_idx) or {"metrics": {}}
    )
    update(made, data)
    assert axes == [2]
