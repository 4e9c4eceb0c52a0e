"""Our objectives as verl's policy losses: equal in value and gradient to verl's own, however a mini-batch is cut."""

from __future__ import annotations

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig

from moe_rl.errors import ConfigError
from moe_rl.integrations.verl.losses import register, register_named
from tests.verl.worker_inputs import actor_loss

MEAN, TOKENS = "seq-mean-token-mean", "token-mean"
PAIRS = [  # our arm, verl's loss, how tokens weigh, verl's settings
    (
        "grpo(clip_low=0.2,clip_high=0.28,dual=3.0,log_clamp=20.0)+token_mean",
        "vanilla",
        TOKENS,
        dict(clip_ratio_high=0.28),
    ),
    ("grpo(clip_low=0.2,clip_high=0.2,dual=3.0,log_clamp=20.0)", "vanilla", MEAN, {}),
    ("grpo(clip_low=0.2,clip_high=0.2,dual=3.0)+seq_mean_token_sum", "vanilla", "seq-mean-token-sum", {}),
    (
        "grpo(clip_low=0.2,clip_high=0.2,dual=3.0)+seq_mean_token_sum_norm(horizon=16)",
        "vanilla",
        "seq-mean-token-sum-norm",
        dict(loss_scale_factor=16),
    ),
    ("grpo(clip_low=0.2,clip_high=0.2,dual=3.0)+token_sum", "vanilla", "token-sum", {}),
    ("verl:grpo", "vanilla", TOKENS, {}),
    ("gspo(clip_low=0.02,clip_high=0.03)", "gspo", MEAN, dict(clip_ratio_low=0.02, clip_ratio_high=0.03)),
    ("gspo_token(clip_low=0.02,clip_high=0.03)", "gspo", MEAN, dict(clip_ratio_low=0.02, clip_ratio_high=0.03)),
    ("verl:gspo", "gspo", MEAN, {}),
    ("sapo(tau_neg=1.05)", "sapo", MEAN, {}),
    ("sapo(tau_pos=2.0,tau_neg=3.0)", "sapo", MEAN, dict(tau_pos=2.0, tau_neg=3.0)),
    ("cispo(clip_low=0.1,clip_high=0.2)", "cispo", TOKENS, dict(clip_ratio_low=0.1)),
    ("gmpo(clip_low=0.1,clip_high=0.15)", "geo_mean", MEAN, dict(clip_ratio_low=0.1, clip_ratio_high=0.15)),
    (
        "dppo(kind=tv,low=0.02,high=0.03,cap=1.2)+anchor=policy",
        "dppo_tv",
        TOKENS,
        dict(clip_ratio_low=0.02, clip_ratio_high=0.03, clip_ratio_c=1.2),
    ),
    (
        "dppo(kind=kl,low=0.001,high=0.002,cap=1.2)+anchor=policy",
        "dppo_kl",
        TOKENS,
        dict(clip_ratio_low=0.001, clip_ratio_high=0.002, clip_ratio_c=1.2),
    ),
    ("reinforce+aggregate=token_mean", "gpg", TOKENS, {}),
    ("reinforce+kl(coef=0.5,estimator=k2,against=old)+aggregate=token_mean", "dro", TOKENS, {}),
]
OTHER_VALUES = {"cispo", "dppo_tv", "dppo_kl"}
"""The values of these are those of another function with the same gradient."""


def inputs(seed=0):
    """Log-probs of eight responses of up to twelve tokens, ratios well beyond every clip range."""
    draw = torch.Generator().manual_seed(seed)
    old = (torch.randn(8, 12, generator=draw) - 2).clamp(max=-0.1)
    new = (old + 0.3 * torch.randn(8, 12, generator=draw)).clamp(max=-0.01)
    mask = torch.arange(12)[None] < torch.tensor([12, 3, 7, 1, 12, 5, 9, 4])[:, None]
    advantages = torch.randn(8, 1, generator=draw).expand(8, 12) * mask
    return old, new, advantages, mask


def value_and_gradient(name, cuts, aggregation, settings, weights=None):
    """The loss of a mini-batch that is cut into micro-batches, and its gradient, on one of two ranks."""
    old, new, advantages, mask = inputs()
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(dro_beta=0.5),
        **{"clip_ratio_c": 3.0} | settings,
    )
    config.global_batch_info.update(
        dp_size=2,
        batch_num_tokens=2 * int(mask.sum()),
        global_batch_size=2 * len(mask),
        loss_scale_factor=settings.get("loss_scale_factor"),
    )
    logprobs, total = new.clone().requires_grad_(), 0.0
    for cut in cuts:
        loss, metrics = get_policy_loss_fn(name)(
            old_log_prob=old[cut],
            log_prob=logprobs[cut],
            advantages=advantages[cut],
            response_mask=mask[cut],
            loss_agg_mode=aggregation,
            config=config,
            rollout_is_weights=None if weights is None else weights[cut],
        )
        assert {"actor/ppo_kl", "actor/pg_clipfrac"} <= metrics.keys() or name in ("gpg", "dro")
        loss.backward()
        total += loss.item()
    return total, logprobs.grad


@pytest.mark.parametrize("arm, theirs, aggregation, settings", PAIRS)
@pytest.mark.parametrize("weighed", [False, True])
def test_equal_to_verl_s_own(arm, theirs, aggregation, settings, weighed):
    name = f"moe_rl:{arm}"
    register(name)
    weights = None
    if weighed and theirs not in ("geo_mean", "dro") and not arm.startswith("gspo("):  # whose weights are otherwise
        weights = torch.rand(8, 12, generator=torch.Generator().manual_seed(1)) + 0.5
    parts = [slice(0, 3), slice(3, 8)]
    mine, my_gradient = value_and_gradient(name, parts, aggregation, settings, weights)
    other, gradient = value_and_gradient(  # verl's GMPO adds the means of micro-batches up
        theirs, [slice(0, 8)] if theirs == "geo_mean" else parts, aggregation, settings, weights
    )
    if theirs not in OTHER_VALUES:
        assert mine == pytest.approx(other, abs=1e-6, rel=1e-6)
    torch.testing.assert_close(my_gradient, gradient, atol=1e-7, rtol=2e-6)
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize(
    "arm, theirs, settings, lower",
    [
        (PAIRS[1][0], "vanilla", {}, 4),
        (PAIRS[1][0].replace("dual=3.0", "dual=1.25"), "vanilla", {"clip_ratio_c": 1.25}, 21),
        ("gspo_token(clip_low=0.02,clip_high=0.03)", "gspo", dict(clip_ratio_low=0.02, clip_ratio_high=0.03), 0),
    ],
)
def test_clip_fractions_mean_what_verl_means_by_them(arm, theirs, settings, lower):
    """The lower one counts what the dual clip took, where A < 0 and the ratio is large."""
    register(f"moe_rl:{arm}")
    old, new, advantages, mask = inputs()
    new[advantages < 0] += 0.8 * bool(lower)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, **{"clip_ratio_c": 3.0} | settings
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=len(mask))
    mine, other = (
        get_policy_loss_fn(name)(
            old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, loss_agg_mode=MEAN, config=config
        )[1]
        for name in (f"moe_rl:{arm}", theirs)
    )
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"):
        assert mine[name] == pytest.approx(other[name], abs=1e-6), name
    assert round(mine["actor/pg_clipfrac_lower"] * int(mask.sum())) == lower and mine["actor/pg_clipfrac"] > 0


def test_another_aggregation_than_verl_s_is_refused():
    register("moe_rl:sapo")
    with pytest.raises(ConfigError, match="aggregate=token_mean"):
        value_and_gradient("moe_rl:sapo", [slice(0, 8)], TOKENS, {})


def test_the_loss_that_an_actor_names_is_registered_when_it_is_asked_for():
    with pytest.raises(ValueError, match="sapo"):
        get_policy_loss_fn("moe_rl:sapo(tau_neg=1.5)")
    register_named(actor_loss("moe_rl:sapo(tau_neg=1.5)"))
    register_named(actor_loss("vanilla"))
    register_named(None)
    assert get_policy_loss_fn("moe_rl:sapo(tau_neg=1.5)") is not None
