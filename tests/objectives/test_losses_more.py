"""IPO, CPPO, A-3PO, a mask of entropies and corrections of π_θ/π_engine, against the numbers of their sources' code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.objectives import objective_of, policy_loss
from moe_rl.objectives.losses import LOSSES
from moe_rl.objectives.methods import arm
from moe_rl.objectives.weights import current, masked, rejected, truncated
from tests.objectives import peers
from tests.objectives.examples import inputs

CASES = [name for name in peers.CASES if "extreme" not in name]


def ours(case, name, anchor="rollout_logprobs", *, weights=None, **options):
    """(output, gradient) of a loss with weights 1 / number of tokens, and of the terms of a field more."""
    x = peers.case(case)
    logprobs = torch.tensor(x["logprobs"], requires_grad=True)
    further = {k: torch.as_tensor(options.pop(k)) for k in ("lag", "entropy") if k in options}
    weights = x["mask"] / x["mask"].sum() if weights is None else weights
    given = inputs(logprobs, x[anchor], x["advantages"], x["mask"], weights=torch.as_tensor(weights), **further)
    output = LOSSES[name](given, **options)
    output.loss.backward()
    return output, logprobs.grad.numpy()


def agree(found, expected):
    np.testing.assert_allclose(found[0].loss.item(), expected[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10, atol=1e-12)


def of_case(case, anchor="rollout_logprobs"):
    """A, mask, log π_θ and its log-ratio, 0 outside the response."""
    x = peers.case(case)
    mask = x["mask"]
    return np.where(mask, x["advantages"][:, None], 0), mask, np.where(mask, x["logprobs"] - x[anchor], 0), x


@pytest.mark.parametrize("case", CASES)
def test_ipo_is_prime_rls(case):
    """prime-rl adds 1e-3 · (log r)². At threshold 1 all is kept, at 0 what has not moved."""
    advantages, mask, log_ratio, x = of_case(case)
    logprobs = torch.tensor(x["logprobs"], requires_grad=True)
    output = policy_loss(
        "ipo(threshold=0.05)+advantage=none",
        logprobs=logprobs,
        old_logprobs=torch.tensor(x["old_logprobs"]),
        advantages=torch.tensor(x["advantages"]),
        rollout_logprobs=torch.tensor(np.where(mask, x["rollout_logprobs"], 0)),
        mask=torch.tensor(mask),
    )
    output.loss.backward()
    agree((output, logprobs.grad.numpy()), peers.expected(case, "prime/ipo"))
    whole = -advantages * np.exp(log_ratio) / mask.sum()
    agree(ours(case, "ipo", threshold=1.0), (whole.sum(), whole))
    none, equal = ours(case, "ipo", threshold=0.0), np.where(log_ratio == 0, whole, 0)
    agree(none, (equal.sum(), equal))
    assert ((none[0].clipped_by.numpy() != 0) == (mask & (advantages != 0) & (log_ratio != 0))).all()


def test_ipo_masks_either_side_and_dppo_the_one_that_the_advantage_pushes_to():
    """Probabilities .2 → .5 and .5 → .2, for either sign of A: of four tokens ipo takes all, dppo two."""
    old, new = torch.tensor([[0.2, 0.5, 0.2, 0.5]]).log(), torch.tensor([[0.5, 0.2, 0.5, 0.2]]).log()
    x = inputs(new, old, torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4, dtype=torch.bool))
    assert LOSSES["ipo"](x).clipped_by.tolist() == [[1, -1, 1, -1]]
    assert LOSSES["dppo"](x).clipped_by.tolist() == [[1, 0, 0, -1]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "key, options",
    [
        ("unirl/cppo", {}),
        ("unirl/cppo.tight", {"threshold": 0.05, "budget": 0.005, "last": 0.5}),
    ],
)
def test_cppo_is_its_authors(case, key, options):
    found = ours(case, "cppo", **options)
    agree(found, peers.expected(case, key))
    assert found[0].clipped_by.any() == ("wide" in case)


def test_cppo_takes_a_token_that_the_ones_before_have_left_no_budget():
    """Weights 1, .9 and .8, distances of .3 each. S is .3 and .57 before tokens 2 and 3. b is .04, so V b is .04 and
    .076, and the bounds are .4, .14 and −.094 at δ = .4, against .3, .27 and .24. Where A pushes back, none is lost."""
    old, new = torch.full((1, 3), 0.2).log(), torch.full((1, 3), 0.5).log()
    x = inputs(new, old, torch.tensor([[1.0, 1.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert LOSSES["cppo"](x, threshold=0.4).clipped_by.tolist() == [[0, 1, 1]]
    assert LOSSES["cppo"](replace(x, advantages=-x.advantages), threshold=0.4).clipped_by.tolist() == [[0, 0, 0]]
    assert LOSSES["cppo"](x, threshold=0.25, budget=0.5).clipped_by.tolist() == [[1, 1, 0]]  # .3, .27 and .24 > .25


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("high, key", [(math.inf, "areal/a3po"), (1.05, "areal/a3po.high")])
def test_a3po_is_areals(case, high, key):
    """At lags of 0, 1, 2 and 4 in turn, as the peer's note says. At lags of at most 1 it is GRPO."""
    lag = np.resize([0.0, 1, 2, 4], peers.case(case)["mask"].shape)
    found = ours(case, "a3po", lag=lag, high=high)
    agree(found, peers.expected(case, key))
    assert "wide" not in case or not np.allclose(found[1], ours(case, "grpo", clip_high=0.2)[1])
    fresh = ours(case, "a3po", lag=np.minimum(lag, 1), clip_low=0.2, clip_high=0.2)
    np.testing.assert_array_equal(fresh[1], ours(case, "grpo", clip_low=0.2, clip_high=0.2)[1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "base, options", [("grpo", {"clip_high": 0.2}), ("gspo", {"clip_low": 0.02, "clip_high": 0.03})]
)
def test_the_mask_of_entropies_is_trls(case, base, options):
    """A token's loss times that mask, over all tokens."""
    advantages, mask, log_ratio, x = of_case(case)
    kept = peers.output(case, "trl/entropy_mask") > 0
    assert 0.25 < kept.sum() / mask.sum() < 0.35
    found = ours(case, "high_entropy", share=0.3, base=base, options=options, entropy=x["entropy"])
    agree(found, (lambda o, g: (o.loss.item(), g))(*ours(case, base, weights=kept / mask.sum(), **options)))
    whole = ours(case, "high_entropy", share=1.0, base=base, options=options, entropy=x["entropy"])
    np.testing.assert_array_equal(whole[1], ours(case, base, **options)[1])
    if base == "grpo":
        ratio = np.exp(log_ratio)
        plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.2)
        agree(
            found,
            (
                (kept * np.maximum(plain, clipped)).sum() / mask.sum(),
                np.where(kept & (plain >= clipped), plain, 0) / mask.sum(),
            ),
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cap", [1.05, 2.0])
def test_reinforce_with_corrections_of_the_policy_is_verls_bypass_mode(case, cap):
    x = peers.case(case)
    mask, logprobs = x["mask"], torch.tensor(x["logprobs"], requires_grad=True)
    text = f"bypass+corrections=current(options={{cap:{cap}}})+advantage=none"
    output = policy_loss(
        text,
        logprobs=logprobs,
        old_logprobs=torch.tensor(x["old_logprobs"]),
        rollout_logprobs=torch.tensor(np.where(mask, x["rollout_logprobs"], 0)),
        advantages=torch.tensor(x["advantages"]),
        mask=torch.tensor(mask),
    )
    output.loss.backward()
    agree((output, logprobs.grad.numpy()), peers.expected(case, f"verl/bypass.{cap}"))


@pytest.mark.parametrize(
    "rule, options",
    [
        (truncated, {"cap": 1.1, "level": "product"}),
        (masked, {"high": 1.1, "low": 0.9}),
        (rejected, {"high": 1.01, "low": 0.99}),
    ],
)
def test_a_correction_of_the_policy_is_the_rule_of_other_log_probs(rule, options):
    """As if π_θ were π_old, under either anchor; it has no gradient."""
    x = peers.loss_inputs("main-wide-0")
    expected = rule(replace(x, old_logprobs=x.logprobs), **options)
    for old in (x.old_logprobs, x.rollout_logprobs):
        found = current(
            replace(x, old_logprobs=old, logprobs=x.logprobs.clone().requires_grad_()),
            rule=rule.__name__,
            options=options,
        )
        assert not found.requires_grad and torch.allclose(found[x.mask], expected[x.mask], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "text, said",
    [
        ("high_entropy(base=sat)", "needs log-probs only"),
        ("high_entropy(base=grpo,options={clip:1})", "no option"),
        ("grpo+current(rule=m2po)", "rule='m2po'"),
        ("grpo+current(options={cap:-1})", "cap=-1"),
        ("grpo+current(rule=masked)", "needs high"),
        ("grpo+current(options={batch_normalized:true})", "batch_normalized"),
        ("grpo+filters=current(options={cap:2})", "reads π_θ"),
    ],
)
def test_options_that_are_wrong_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        objective_of(arm(text))


def test_inputs_that_are_not_there_are_asked_for():
    x = peers.case("main-wide-0")
    given = {name: torch.tensor(x[name]) for name in ("logprobs", "old_logprobs", "advantages", "mask")}
    for text, said in (("a3po", "lag"), ("high_entropy", "entropy")):
        with pytest.raises(ConfigError, match=said):
            policy_loss(f"{text}+advantage=none", **given, rollout_logprobs=given["old_logprobs"])
