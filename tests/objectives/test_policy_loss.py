"""`policy_loss` and its neighbours, for a loop of one's own: an arm means what it means in a study, or is refused."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import replace

import pytest
import torch

from moe_rl.errors import ConfigError, RunError
from moe_rl.objectives import advantage_of, compute_advantages, correction_weights, objective_of, policy_loss
from moe_rl.objectives.losses import reinforce
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


@pytest.mark.parametrize("text", ["dppo", "topr", "glm5", "engine_anchor", "prime:dppo"])
def test_the_ratio_of_an_anchor_at_the_engine_is_against_the_engine(text):
    method = f"{text}+advantage=none"
    with pytest.raises(ConfigError, match="rollout_logprobs"):
        loss(method)
    anchored = arm(method)
    expected = loss(anchored.replace(anchor="policy"), old_logprobs=ENGINE, rollout_logprobs=ENGINE)
    assert loss(method, rollout_logprobs=ENGINE) == expected


@pytest.mark.parametrize("text", ["replay", "r3", "soft_replay", "recall", "grpo+ratio_routes=old_policy"])
def test_an_arm_that_replays_is_refused(text):
    with pytest.raises(ConfigError, match="replays routing"):
        loss(f"{text}+advantage=none")


def test_an_arm_that_makes_advantages_is_refused():
    with pytest.raises(ConfigError, match="normalized"):
        loss("dr_grpo")
    assert math.isfinite(loss("dr_grpo+advantage=none"))


def test_advantages_of_an_arm_by_hand():
    """Two prompts of two answers each: r − mean, over the sample deviation in `group`, not divided in `dr_grpo`."""
    inputs = {
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.5]),
        "prompt": torch.tensor([0, 0, 1, 1]),
        "mask": torch.tensor([[True, True], [True, False], [True, True], [True, True]]),
    }
    half = 0.5
    assert compute_advantages("dr_grpo", **inputs).tolist() == [[half, half], [-half, 0], [0, 0], [0, 0]]
    expected = half / math.sqrt(half)
    assert compute_advantages("grpo", **inputs)[:2, 0].tolist() == pytest.approx([expected, -expected])
    with pytest.raises(RunError, match="reward of row 1 is nan"):
        compute_advantages("grpo", **inputs | {"rewards": torch.tensor([1.0, math.nan, 0.0, 0.0])})


def test_an_advantage_that_remembers_is_refused_where_nothing_is_kept():
    inputs = {"rewards": torch.tensor([1.0, 0.0]), "prompt": torch.zeros(2, dtype=torch.long), "mask": MASK}
    text = "grpo+normalized(center=running,scale=running)"
    with pytest.raises(ConfigError, match="remembers earlier batches"):
        compute_advantages(text, **inputs)
    made, finished = advantage_of(arm(text)), torch.ones(2, dtype=torch.bool)
    first, second = (
        made.compute(**inputs | {"rewards": r}, finished=finished)[0][:, 0]
        for r in (inputs["rewards"], torch.tensor([1.0, 1.0]))
    )
    assert first.tolist() == pytest.approx([0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)])
    assert second.tolist() == pytest.approx([0.5, 0.5]), "r − 3/4, over the sample deviation 1/2 of 1, 0, 1, 1"


def test_factors_that_are_given_count_where_an_arm_has_no_corrections():
    """`importance_weights` takes the place of what corrections would give: half of every weight is half of the loss."""
    for text in ("grpo", "gspo", "cispo"):
        assert loss(text, importance_weights=torch.full((2, 3), 0.5)) == pytest.approx(loss(text) / 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_rewards_of_any_type_are_numbers(dtype):
    inputs = {"prompt": torch.zeros(4, dtype=torch.long), "mask": torch.ones(4, 1, dtype=torch.bool)}
    found = compute_advantages("dr_grpo", rewards=torch.tensor([1, 0, 0, 0]).to(dtype), **inputs)
    assert found[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_inputs_that_do_not_fit_are_refused_with_a_sentence():
    with pytest.raises(ConfigError, match="3 rewards and 2 prompts for 2 rows"):
        inspect.unwrap(compute_advantages)(
            "grpo", rewards=torch.ones(3), prompt=torch.zeros(2, dtype=torch.long), mask=MASK
        )
    with pytest.raises(ConfigError, match="turn and turn_rewards"):
        compute_advantages(
            "grpo",
            rewards=torch.ones(2),
            prompt=torch.zeros(2, dtype=torch.long),
            mask=MASK,
            turn_rewards=torch.zeros(2, 3),
        )
    with pytest.raises(ConfigError, match=r"advantages have shape \(2, 1\)"):
        inspect.unwrap(policy_loss)("grpo", logprobs=NEW, old_logprobs=OLD, advantages=torch.ones(2, 1), mask=MASK)
    with pytest.raises(ConfigError, match="old_logprobs .*1 of 5"):
        loss("grpo", old_logprobs=torch.where(OLD == -0.7, -torch.inf, OLD))
    with pytest.raises(ConfigError, match="filters"):
        correction_weights("tis+filters=finished", old_logprobs=OLD, rollout_logprobs=ENGINE, mask=MASK, advantages=OLD)


def test_correction_weights_by_hand():
    """TIS: min(π_old / π_engine, 2) per token; an arm without corrections has ones."""
    far = OLD - math.log(3)
    found = correction_weights(
        "tis", old_logprobs=OLD, rollout_logprobs=torch.where(MASK, far, 0), mask=MASK, advantages=torch.zeros(2, 3)
    )
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
    output = policy_loss(
        "gspo", logprobs=one, old_logprobs=one * 0, advantages=torch.ones(1), mask=torch.ones(1, 1, dtype=torch.bool)
    )
    assert output.clipped_by.item() == 1


def test_gradients_flow_to_narrow_log_probs():
    new = NEW.bfloat16().requires_grad_()
    policy_loss("grpo", logprobs=new, old_logprobs=OLD, advantages=ADVANTAGES, mask=MASK).loss.backward()
    assert new.grad.dtype == torch.bfloat16 and bool(new.grad[MASK].abs().sum() > 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_advantages_that_are_not_finite_are_refused(bad):
    with pytest.raises(ConfigError, match=r"advantages .*3 of 5 .*\[0, 0\]"):
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
        inspect.unwrap(correction_weights)(
            "tis", old_logprobs=OLD, rollout_logprobs=ENGINE, mask=MASK.to(dtype), advantages=OLD
        )


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("change", [torch.exp, torch.neg])
def test_what_is_no_log_probability_is_refused(name, change):
    """Probabilities, and what many losses return: −log p."""
    honest = {
        key: -torch.rand(3, 4, dtype=torch.float64) - 0.1 for key in ("logprobs", "old_logprobs", "rollout_logprobs")
    }
    given = {"advantages": torch.ones(3), "mask": torch.ones(3, 4, dtype=torch.bool)}
    assert torch.isfinite(policy_loss("tis", **honest, **given).loss)
    with pytest.raises(ConfigError, match=f"{name} .*12 of 12"):
        policy_loss("tis", **honest | {name: change(honest[name])}, **given)
    if name != "logprobs":
        del honest["logprobs"]
        with pytest.raises(ConfigError, match=f"{name} are above 0"):
            correction_weights(
                "tis", **honest | {name: change(honest[name])}, mask=given["mask"], advantages=torch.ones(3, 4)
            )


OVERFLOWS = {
    "logprobs": torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, math.nan]]),
    "old_logprobs": torch.tensor([[-1.0, -102.0, math.inf], [-1.0, -91.0, 0.0]]),
    "advantages": torch.tensor([-1.0, 1.0]),
    "mask": torch.tensor([[True, True, False], [True, True, False]]),
}
"""At one token of the first row w = e^100, which float32 does not have; the padding holds anything."""


@pytest.mark.parametrize(
    "text",
    ["grpo", "dapo", "dr_grpo+advantage=none", "kl_cov", "grpo+kl(coef=0.1,against=old,estimator=k2,ratio=true)"],
)
def test_a_loss_that_is_not_finite_names_its_token_and_what_bounds_it(text):
    given = {**OVERFLOWS, "logprobs": OVERFLOWS["logprobs"].clone().requires_grad_()}
    with pytest.raises(RunError, match=r"Row 0, token [01] .*100 .*-1\. grpo.dual=3"):
        policy_loss(text, **given)


def test_what_is_bounded_is_finite_whatever_the_padding_holds():
    for text in ("grpo(dual=3.0)", "cispo", "sapo", "reinforce", "gmpo(clip_low=0.1,clip_high=0.1)"):
        new = OVERFLOWS["logprobs"].clone().requires_grad_()
        policy_loss(text, **{**OVERFLOWS, "logprobs": new}).loss.backward()
        assert new.grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_log_probs_of_the_policy_that_are_no_numbers_are_named(bad):
    """Also where the loss itself is finite: GRPO's of a ratio of 0 is."""
    new = torch.where(MASK & (NEW[1, 1] == NEW), bad, NEW)
    with pytest.raises(RunError, match=f"Row 1, token 1 has the log-ratio {bad}"):
        loss("grpo", logprobs=new)


def test_a_gradient_that_float16_does_not_have_is_named_where_the_loss_is_finite():
    new = torch.full((1, 1), -1.0, dtype=torch.float16, requires_grad=True)
    with pytest.raises(RunError, match="162755, .*Row 0, token 0 .* 12 "):
        policy_loss(
            "grpo",
            logprobs=new,
            old_logprobs=torch.full((1, 1), -13.0),
            advantages=-torch.ones(1),
            mask=torch.ones(1, 1, dtype=torch.bool),
        )


@pytest.mark.parametrize(
    "text",
    [
        "kl_cov(share=0.2)",
        "sat",
        "clip_cov(low=0)",
        "high_entropy(share=0.5)",
        "sat+m2po",
        "tis(batch_normalized=true)",
    ],
)
def test_parts_of_a_mini_batch_need_its_statistics(text):
    """With weights, which say that they are a part, they are refused; without, a warning says what they are taken for.
    With weights, batch_statistics and factors of the whole they add up to it."""
    text = text.replace("tis", "grpo+truncated")  # TIS
    given = {
        "logprobs": NEW.double(),
        "old_logprobs": OLD.double(),
        "rollout_logprobs": ENGINE.double(),
        "mask": MASK,
        "advantages": ADVANTAGES[:, None].expand(2, 3).double(),
        "entropy": (NEW * NEW).double(),
    }
    objective = objective_of(arm(text))
    weights = objective.aggregate(MASK)
    with pytest.warns(UserWarning, match="weights .objective_of"):
        whole = policy_loss(text, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy_loss(text, **given, weights=weights).loss == whole.loss
        importance_weights = correction_weights(
            text, **{name: given[name] for name in ("old_logprobs", "rollout_logprobs", "mask", "advantages")}
        )
        statistics = {
            "weights": weights,
            "importance_weights": importance_weights,
            "batch_statistics": whole.batch_statistics,
        }
        parts = [
            policy_loss(text, **{name: None if x is None else x[row] for name, x in (given | statistics).items()})
            for row in (slice(0, 1), slice(1, 2))
        ]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), abs=1e-12)
    for row in (slice(0, 1), slice(1, 2)):
        with pytest.raises(ConfigError, match="batch_statistics and importance_weights"):
            policy_loss(text, **{name: x[row] for name, x in given.items()}, weights=weights[row])


def test_what_takes_no_statistics_is_no_part_and_weights_of_a_sum_do_not_say_it():
    given = {"logprobs": NEW, "old_logprobs": OLD, "rollout_logprobs": ENGINE, "mask": MASK, "advantages": ADVANTAGES}
    first = {name: x[:1] for name, x in given.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = policy_loss("grpo+truncated", **first, weights=MASK[:1] / 6)
        assert policy_loss("grpo+truncated(batch_normalized=false)", **first, weights=MASK[:1] / 6).loss == plain.loss
    with pytest.warns(UserWarning, match="kl_cov"):
        policy_loss("kl_cov+aggregate=token_sum", **first, weights=MASK[:1].float())


@pytest.mark.parametrize("name", ["weights", "importance_weights", "log_shift", "entropy", "batch_statistics"])
def test_other_inputs_that_are_no_numbers_are_named(name):
    """Not a token whose log-ratio is as it should be; where the arm does not read an entropy, it may be anything."""
    spoilt = {name: torch.where(MASK & (NEW[1, 1] == NEW), math.nan, torch.ones(2, 3))}
    with pytest.raises(ConfigError, match=rf"{name} is not finite at 1 of 5 .*\[1, 1\]"):
        loss("grpo+entropy(coef=0.1)", **{"entropy": -NEW} | spoilt)
    assert math.isfinite(loss("grpo", entropy=torch.full((2, 3), math.nan)))


class BackwardOnce(torch.autograd.Function):
    """As what torch.compile makes for training: it keeps nothing for a second backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("This backward function was compiled with non-empty donated buffers")
        return gradient


def compiled(x):
    found = reinforce(x)
    return replace(found, loss=BackwardOnce.apply(found.loss))


def test_the_check_of_the_gradient_leaves_the_callers_graph_alone():
    """A hook sees one gradient; a part that goes backward but once still does for the caller."""
    seen, new = [], NEW.clone().requires_grad_()
    new.register_hook(lambda gradient: seen.append(gradient.clone()))
    given = {"logprobs": new, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK}
    policy_loss("loss=reinforce", **given).loss.backward()
    assert len(seen) == 1 and torch.equal(seen[0], new.grad)
    policy_loss(Component(f"{__name__}:compiled"), **given).loss.backward()
    assert torch.equal(seen[1], seen[0])


def test_one_response_per_prompt_says_why_it_teaches_nothing():
    """Half of the rows being alone is said too: their reward does not count. A return compares with nobody."""
    given = {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]), "mask": torch.ones(4, 1, dtype=torch.bool)}
    with pytest.warns(UserWarning, match="4 of 4 rows"):
        assert not compute_advantages("grpo", prompt=torch.arange(4), **given).any()
    with pytest.warns(UserWarning, match="2 of 4 rows"):
        compute_advantages("grpo", prompt=torch.tensor([0, 1, 2, 2]), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_advantages("grpo+advantage=returns", prompt=torch.arange(4), **given)
        compute_advantages("grpo", prompt=torch.tensor([0, 0, 1, 1]), **given)


def test_advantages_that_a_step_took_are_not_called_equal_rewards():
    given = {"rewards": torch.tensor([1.0, 0.0]), "prompt": torch.zeros(2, dtype=torch.long), "mask": MASK}
    for text, mask in (("grpo+group+difficulty_mask(low=0.6)", MASK), ("grpo", ~(MASK | True))):
        with pytest.warns(UserWarning, match="advantage is 0"):
            assert not compute_advantages(text, **{**given, "mask": mask}).any()
    for text in ("grpo+group+difficulty_mask(low=0.9,high=0.1)", "clip_cov(low=5,high=1)"):
        with pytest.raises(ConfigError, match="low < high"):
            advantage_of(arm(text)), objective_of(arm(text))
    for change in ({"prompt": torch.zeros(2, 1, dtype=torch.long)}, {"mask": MASK[:, 0]}):
        with pytest.raises(ConfigError, match="Give one per row"):
            inspect.unwrap(compute_advantages)("grpo", **given | change)
