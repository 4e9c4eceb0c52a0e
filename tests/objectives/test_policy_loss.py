"""`policy_loss` and its neighbours, for a loop of one's own: an arm means what it means in a study, or is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from moe_rl.errors import ConfigError, RunError
from moe_rl.objectives import advantage_of, compute_advantages, correction_weights, policy_loss
from moe_rl.objectives.methods import arm
from moe_rl.registry import Component

MASK = torch.tensor([[True, True, True], [True, True, False]])
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.2, 0.0]])
ENGINE = OLD + torch.tensor([[0.3, -0.2, 0.1], [-0.4, 0.2, 0.0]])
NEW = OLD + torch.tensor([[0.05, -0.1, 0.2], [-0.3, 0.15, 0.0]])
ADVANTAGES = torch.tensor([1.0, -1.0])


def loss(arm_or_text, **changes):
    inputs = {"logprobs": NEW, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK} | changes
    return policy_loss(arm_or_text, **inputs).loss.item()


@pytest.mark.parametrize("text", [
    "cispo", "reinforce", "minirl", "vespo", "clip_cov", "dapo", "sapo(tau_neg=1.05)+token_mean",
])  # fmt: skip
def test_a_text_is_the_method_of_that_name(text):
    """The arm that a study makes of the text, its aggregation and terms included."""
    plain = arm(f"{text}+advantage=none")
    given = {"rollout_logprobs": ENGINE} if plain.corrections or plain.anchor == "engine" else {}
    assert loss(f"{text}+advantage=none", **given) == loss(plain, **given)


@pytest.mark.parametrize("text", ["dppo", "topr", "glm5", "engine_anchor", "prime:dppo"])
def test_the_ratio_of_an_anchor_at_the_engine_is_against_the_engine(text):
    method = f"{text}+advantage=none"
    with pytest.raises(ConfigError, match="the engine's probabilities: give rollout_logprobs"):
        loss(method)
    anchored = arm(method)
    expected = loss(anchored.replace(anchor="policy"), old_logprobs=ENGINE, rollout_logprobs=ENGINE)
    assert loss(method, rollout_logprobs=ENGINE) == expected


@pytest.mark.parametrize("text", ["replay", "r3", "soft_replay", "recall", "grpo+ratio_routes=old_policy"])
def test_an_arm_that_replays_is_refused(text):
    with pytest.raises(ConfigError, match="replays routing, but a loss cannot"):
        loss(f"{text}+advantage=none")


def test_an_arm_that_makes_advantages_is_refused():
    with pytest.raises(ConfigError, match=r"computes advantages .normalized.*compute_advantages.*advantage=none"):
        loss("dr_grpo")
    assert math.isfinite(loss("dr_grpo+advantage=none"))


def test_advantages_of_an_arm_by_hand():
    """Two prompts of two answers each: r − mean, over the sample deviation in `group`, not divided in `dr_grpo`."""
    inputs = {"rewards": torch.tensor([1.0, 0.0, 0.5, 0.5]), "prompt": torch.tensor([0, 0, 1, 1]),
              "mask": torch.tensor([[True, True], [True, False], [True, True], [True, True]])}
    half = 0.5
    assert compute_advantages("dr_grpo", **inputs).tolist() == [[half, half], [-half, 0], [0, 0], [0, 0]]
    expected = half / math.sqrt(half)
    assert compute_advantages("grpo", **inputs)[:2, 0].tolist() == pytest.approx([expected, -expected])
    with pytest.raises(RunError, match="reward of row 1 is nan"):
        compute_advantages("grpo", **inputs | {"rewards": torch.tensor([1.0, math.nan, 0.0, 0.0])})


def test_an_advantage_that_remembers_is_refused_where_nothing_is_kept():
    inputs = {"rewards": torch.tensor([1.0, 0.0]), "prompt": torch.zeros(2, dtype=torch.long), "mask": MASK}
    text = "grpo+normalized(center=running,scale=running)"
    with pytest.raises(ConfigError, match="remembers earlier batches, and compute_advantages does not"):
        compute_advantages(text, **inputs)
    made, finished = advantage_of(arm(text)), torch.ones(2, dtype=torch.bool)
    first, second = (made.compute(**inputs | {"rewards": r}, finished=finished)[0][:, 0]
                     for r in (inputs["rewards"], torch.tensor([1.0, 1.0])))
    assert first.tolist() == pytest.approx([0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)])
    assert second.tolist() == pytest.approx([0.5, 0.5]), "r − 3/4, over the sample deviation 1/2 of 1, 0, 1, 1"


@pytest.mark.parametrize("option", ["critic_lr=true", "lam=true", "gamma=false", "value_clip=true", "critic_lr=fast"])
def test_a_truth_value_is_no_number(option):
    with pytest.raises(ConfigError, match=r"gae\(.*the option is of type float"):
        advantage_of(arm(f"ppo+gae({option})"))


def test_factors_that_are_given_count_where_an_arm_has_no_corrections():
    """`trust` takes the place of what corrections would give: half of every weight is half of the loss."""
    for text in ("grpo", "gspo", "cispo"):
        assert loss(text, trust=torch.full((2, 3), 0.5)) == pytest.approx(loss(text) / 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_rewards_of_any_type_are_numbers(dtype):
    inputs = {"prompt": torch.zeros(4, dtype=torch.long), "mask": torch.ones(4, 1, dtype=torch.bool)}
    found = compute_advantages("dr_grpo", rewards=torch.tensor([1, 0, 0, 0]).to(dtype), **inputs)
    assert found[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_inputs_that_do_not_fit_are_refused_with_a_sentence():
    with pytest.raises(ConfigError, match="3 rewards and 2 prompts for 2 rows"):
        inspect.unwrap(compute_advantages)("grpo", rewards=torch.ones(3), prompt=torch.zeros(2, dtype=torch.long),
                                           mask=MASK)
    with pytest.raises(ConfigError, match="turn and turn_rewards are needed together"):
        compute_advantages("grpo", rewards=torch.ones(2), prompt=torch.zeros(2, dtype=torch.long), mask=MASK,
                           turn_rewards=torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"advantages have shape \(2, 1\)"):
        inspect.unwrap(policy_loss)("grpo", logprobs=NEW, old_logprobs=OLD, advantages=torch.ones(2, 1), mask=MASK)
    with pytest.raises(ConfigError, match="old_logprobs is not finite at 1 of 5 response tokens"):
        loss("grpo", old_logprobs=torch.where(OLD == -0.7, -torch.inf, OLD))
    with pytest.raises(ConfigError, match="filters must run before corrections"):
        correction_weights("tis+filters=finished", old_logprobs=OLD, rollout_logprobs=ENGINE, mask=MASK, advantages=OLD)


def test_correction_weights_by_hand():
    """TIS: min(π_old / π_engine, 2) per token; an arm without corrections has ones."""
    far = OLD - math.log(3)
    found = correction_weights("tis", old_logprobs=OLD, rollout_logprobs=torch.where(MASK, far, 0), mask=MASK,
                               advantages=torch.zeros(2, 3))
    assert found[MASK].tolist() == pytest.approx([2.0] * 5)
    assert correction_weights("grpo", old_logprobs=OLD, mask=MASK, advantages=OLD).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ratios_of_narrow_log_probs_are_computed_in_float32(dtype):
    """GSPO's upper bound, 1.0004, is no number of bfloat16, so nothing would be clipped; 20 nats overflow float16."""
    narrow = {name: x.to(dtype) for name, x in {"logprobs": NEW, "old_logprobs": OLD}.items()}
    wide = {name: x.float() for name, x in narrow.items()}
    for text in ("gspo", "grpo"):
        assert loss(text, **narrow) == loss(text, **wide)
    gap = torch.full((2, 3), 20.0, dtype=dtype)
    assert math.isfinite(loss("reinforce", logprobs=gap - 25, old_logprobs=gap - 45))
    one = torch.tensor([[1.0078125]], dtype=dtype).log()
    output = policy_loss("gspo", logprobs=one, old_logprobs=one * 0, advantages=torch.ones(1),
                         mask=torch.ones(1, 1, dtype=torch.bool))
    assert output.clipped_by.item() == 1


def test_gradients_flow_to_narrow_log_probs():
    new = NEW.bfloat16().requires_grad_()
    policy_loss("grpo", logprobs=new, old_logprobs=OLD, advantages=ADVANTAGES, mask=MASK).loss.backward()
    assert new.grad.dtype == torch.bfloat16 and bool(new.grad[MASK].abs().sum() > 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_advantages_that_are_not_finite_are_refused(bad):
    with pytest.raises(ConfigError, match="1 of 2 advantages are not finite"):
        loss("grpo", advantages=torch.tensor([bad, 1.0]))
    per_token = torch.ones(2, 3)
    per_token[1, 2] = bad  # outside the mask
    assert math.isfinite(loss("grpo", advantages=per_token))


def test_a_component_is_a_loss_alone():
    """With everything else as in GRPO; the method has the aggregation of its paper."""
    assert loss(Component("cispo")) == loss("cispo+aggregate=seq_mean_token_mean") != loss("cispo")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_a_mask_of_numbers_is_refused(dtype):
    """As an index it would take the rows 0 and 1, and as a factor it would count in no denominator."""
    said = f"dtype {str(dtype).removeprefix('torch.')}. Give it as bool"
    given = {"logprobs": NEW, "old_logprobs": OLD, "mask": MASK.to(dtype)}
    with pytest.raises(ConfigError, match=f"the mask has {said}"):
        inspect.unwrap(policy_loss)("grpo", advantages=torch.ones(2), **given)
    inputs = {"rewards": torch.ones(2), "prompt": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ConfigError, match=f"the mask has {said}"):
        inspect.unwrap(compute_advantages)("grpo", mask=MASK.to(dtype), **inputs)
    with pytest.raises(ConfigError, match=f"finished has {said}"):
        inspect.unwrap(compute_advantages)("grpo", mask=MASK, finished=torch.ones(2).to(dtype), **inputs)
    with pytest.raises(ConfigError, match=f"the mask has {said}"):
        inspect.unwrap(correction_weights)("tis", old_logprobs=OLD, rollout_logprobs=ENGINE, mask=MASK.to(dtype),
                                           advantages=OLD)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("change", [torch.exp, torch.neg])
def test_what_is_no_log_probability_is_refused(name, change):
    """Probabilities, and what many losses return: −log p."""
    honest = {key: -torch.rand(3, 4, dtype=torch.float64) - 0.1 for key in ("logprobs", "old_logprobs",
                                                                          "rollout_logprobs")}
    given = {"advantages": torch.ones(3), "mask": torch.ones(3, 4, dtype=torch.bool)}
    assert torch.isfinite(policy_loss("tis", **honest, **given).loss)
    with pytest.raises(ConfigError, match=f"{name} are above 0 at 12 of 12 response tokens"):
        policy_loss("tis", **honest | {name: change(honest[name])}, **given)
    if name != "logprobs":
        del honest["logprobs"]
        with pytest.raises(ConfigError, match=f"{name} are above 0"):
            correction_weights("tis", **honest | {name: change(honest[name])}, mask=given["mask"],
                               advantages=torch.ones(3, 4))


def test_a_finished_response_too_few_is_refused():
    with pytest.raises(ConfigError, match="2 rewards and 2 prompts for 2 rows"):
        inspect.unwrap(compute_advantages)("grpo", rewards=torch.ones(2), prompt=torch.zeros(2, dtype=torch.long),
                                           mask=MASK, finished=torch.ones(1, dtype=torch.bool))
