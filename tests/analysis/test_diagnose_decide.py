"""The rule of a diagnosis, by hand: ten responses of ten tokens, whose rounding is 0.01 nats at every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.analysis.diagnose.decide import Evidence, Fit, beats, brings_nearer, compute_left, decide

OWNER = np.repeat(np.arange(10), 10)
ROUNDING = 0.01
ONE = np.arange(100) == 37
SIGNS = np.where(np.arange(100) % 2, 1.0, -1.0)


def fit(times, *causes, at=True):
    """A forward whose |log r| is `times` the rounding, at some tokens; one sign follows the other."""
    return Fit("+".join(causes), np.where(at, times * ROUNDING, 0.0) * SIGNS, OWNER, causes)


def evidence(base, *tried, **settings):
    return Evidence(base, fit(1.0), 1e-9, tried, **settings)


def test_k3_and_the_mean_distance_by_hand():
    one = Fit("", np.array([0.1, 0.1, -0.2]), np.array([0, 0, 1]))
    assert one.kl == pytest.approx([np.expm1(0.1) - 0.1, np.expm1(-0.2) + 0.2])
    assert one.distance == pytest.approx(0.15)


def test_what_is_left_is_a_ratio_of_means_with_the_wider_of_two_errors():
    assert compute_left(fit(0.5), fit(1.0)) == pytest.approx((0.5, 0.5, 0.5)), "every token halves"
    a, b = np.array([0.2, *[0.02] * 9]), np.array([1.0, *[0.01] * 9])
    ratio, low, high = compute_left(*(Fit("", x, np.zeros(10, int)) for x in (a, b)))
    error = 1.96 * np.sqrt(((a - ratio * b) ** 2).sum()) / b.sum()
    assert ratio == pytest.approx(0.38 / 1.09) and (low, high) == pytest.approx((ratio - error, ratio + error))
    assert compute_left(fit(0), fit(0)) == (1, 1, 1)


def test_log_probs_agree_up_to_the_noise():
    assert decide(evidence(fit(4e-3))).kind == "agrees"  # 4e-5 nats: a KL of 8e-10
    assert decide(evidence(fit(6e-3))).kind == "rounding"


@pytest.mark.parametrize(
    ("base", "left", "kind"),
    [
        (20.0, 1.9, "explained"),  # within twice the rounding
        (20.0, 2.9, "explained"),  # 14.5 % of the gap
        (20.0, 3.1, "unexplained"),  # 15.5 %, and more than rounding leaves
        (5.0, 1.9, "explained"),  # 38 %
        (5.0, 2.1, "unexplained"),  # 42 %
    ],
)
def test_a_name_needs_most_of_the_gap(base, left, kind):
    decision = decide(evidence(fit(base), fit(left, "top_k")))
    assert decision.kind == kind and [x.causes for x in decision.best] == [("top_k",)] * (kind == "explained")


def test_a_fault_beats_every_dtype():
    tried = [fit(1.0, "top_k"), fit(1.2, "dtype")]
    assert decide(evidence(fit(5.0), *tried)).best == (tried[1],)
    tried[1] = fit(1.3, "dtype")
    assert decide(evidence(fit(5.0), *tried)).best == (tried[0],)


def test_what_fits_equally_well_is_told_apart_in_its_dtype():
    tried = [fit(1.0, "temperature"), fit(1.1, "kept_set"), fit(4.0, "dtype")]
    assert decide(evidence(fit(5.0), *tried)).best == tuple(tried[:2])
    tried += [fit(0.6, "temperature", "dtype"), fit(0.2, "kept_set", "dtype")]
    assert decide(evidence(fit(5.0), *tried)).best == (tried[1],)


def test_one_token_alone_explains_nothing():
    """A tie between experts: 1 nat at one token, which a fault takes away, and a small gap elsewhere."""
    base = replace(fit(1.5), log_ratio=np.where(ONE, 3.0, 0.015))
    assert decide(evidence(base, replace(fit(1.0, "top_k"), log_ratio=np.where(ONE, 0.0, 0.015)))).kind == "unexplained"
    assert decide(evidence(base, replace(fit(1.0, "top_k"), log_ratio=np.where(ONE, 0.0, 0.003)))).kind == "explained"


@pytest.mark.parametrize(("at", "kind"), [(True, "explained"), (OWNER == 0, "rounding")])
def test_below_rounding_a_fault_is_everywhere(at, kind):
    """What takes the whole gap away is a cause if most responses have a gap; that of one response may be a tie."""
    assert decide(evidence(fit(0.5, at=at), fit(0.0, "router_int8"))).kind == kind


@pytest.mark.parametrize(("places", "fault_named"), [(1, False), (3, True)])
@pytest.mark.parametrize("dtype", [0.05, 1.0])
def test_a_fault_beats_a_dtype_in_more_than_a_tenth_of_the_responses(dtype, places, fault_named):
    """Routers in another precision undo ties, and change nothing else: at five tokens of one response of ten, or of
    three."""
    ties = (places > OWNER) & (np.arange(100) % 10 > 4)
    alone, fault = fit(dtype, "dtype"), fit(dtype, "router_int8", "dtype")
    alone = replace(alone, log_ratio=np.where(ties, 0.1, alone.log_ratio))
    assert fault.distance < 0.8 * alone.distance, "of all tokens"
    decision = decide(evidence(fit(2.0), alone, fault))
    assert any(x.fault for x in decision.best) is fault_named


def test_a_lead_is_counted_without_the_responses_of_the_largest_gain():
    base, one, noise = fit(1.0), replace(fit(1.0), log_ratio=np.where(OWNER == 0, 0.0, fit(1.0).log_ratio)), 1e-9
    assert not beats(one, base, noise)
    assert beats(fit(0.79), base, noise) and not beats(fit(0.81), base, noise)
    assert not beats(fit(0.1), base, 1.0), "below the noise none leads"
    alone = [replace(x, owner=np.zeros(100, int)) for x in (base, one, fit(0.79))]
    assert not beats(alone[1], alone[0], noise), "ten tokens of a hundred, of one response"
    assert beats(alone[2], alone[0], noise)


def test_a_lead_that_may_be_chance_is_none():
    """Ties that a fit undoes in three responses of ten, or in nine."""
    for places, named in ((3, False), (9, True)):
        tied = replace(fit(1.0), log_ratio=np.where((places > OWNER) & (np.arange(100) % 10 == 0), 0.2, 0.01))
        left = compute_left(fit(1.0), tied)
        assert left[0] < 0.8 and (left[2] <= 0.8) is named
        assert beats(fit(1.0), tied, 1e-9) is named


@pytest.mark.parametrize("engine", [None, "float32"])
def test_a_near_tie_of_an_honest_engine_is_no_fault(engine):
    """One token of a hundred: whatever happens to undo it is no cause, nor is its dtype."""
    tie = fit(20.0, at=ONE)
    decision = decide(evidence(tie, fit(1.0, "dtype"), fit(0.1, "router_bf16"), engine_dtype=engine))
    assert decision.kind == "rounding" and not decision.best


@pytest.mark.parametrize(
    ("dtype", "engine", "base", "kind"),
    [
        ("float32", None, 1.2, "rounding"),
        ("float32", None, 1.5, "unexplained"),  # of 100 tokens 1 + 4 / √100 times rounding
        ("float32", "bfloat16", 0.9, "rounding"),
        ("float32", "float32", 0.9, "unexplained"),
        ("float32", "float16", 0.9, "unexplained"),  # whose rounding is an eighth
        ("bfloat16", "bfloat16", 1.5, "rounding"),  # two sides round
        ("bfloat16", "float16", 1.5, "unexplained"),
        ("bfloat16", None, 2.9, "unexplained"),
    ],
)
def test_rounding_needs_no_evidence_up_to_its_size(dtype, engine, base, kind):
    assert decide(evidence(fit(base), trainer_dtype=dtype, engine_dtype=engine)).kind == kind


@pytest.mark.parametrize(("at", "kind"), [(OWNER == 0, "rounding"), (np.arange(100) % 10 == 0, "unexplained")])
def test_rounding_is_granted_what_responses_differ(at, kind):
    """Ten tokens have a gap of 5 times rounding: those of one response, or one of each."""
    gap = replace(fit(1.1), log_ratio=np.where(at, 0.05, 0.011))
    assert gap.distance == pytest.approx(1.49 * ROUNDING), "4 / √100 allows 1.4"
    assert decide(evidence(gap)).kind == kind


def test_rounding_has_the_size_of_rounding_in_kl_too():
    """A mean |log r| of 1.2 times that of rounding, on a quarter of the tokens: the KL is 5.8 times."""
    gap = fit(4.8, at=np.arange(100) % 4 == 1)
    assert gap.distance == pytest.approx(1.2 * ROUNDING) and gap.mean > 5 * fit(1.0).mean
    assert decide(evidence(gap)).kind == "unexplained"


@pytest.mark.parametrize(
    ("base", "left", "evident"),
    [(1.6, 0.9, True), (1.6, 1.5, False), (1.9, 1.3, False)],  # a part taken away; too little; more than rounding left
)
def test_a_dtype_is_evidence_of_rounding(base, left, evident):
    decision = decide(evidence(fit(base), fit(left, "dtype")))
    assert decision.evident is evident or decision.kind == "unexplained"
    assert (decision.kind == "rounding") is evident


def test_what_hides_within_rounding_brings_most_tokens_nearer():
    base = replace(fit(1.0), log_ratio=0.01 * np.random.default_rng(0).normal(size=100))
    some = np.arange(100) % 10 < 7 + OWNER % 3  # 70 to 90 % of the tokens of a response
    half = replace(base, log_ratio=base.log_ratio * np.where(some, 0.5, 1.1), causes=("router_fp8",))
    assert brings_nearer(half, base, 1e-9) and decide(evidence(base, half)).best == (half,)
    assert not brings_nearer(base, half, 1e-9) and not brings_nearer(half, half, 1e-9)
    assert not brings_nearer(half, base, 1.0), "below the noise none is nearer"
    one = replace(half, log_ratio=np.where(OWNER == 0, 0.0, base.log_ratio))
    assert not brings_nearer(one, base, 1e-9), "one response of ten"


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_a_gap_of_nats_over_few_tokens_is_not_rounding(tokens):
    owner = np.zeros(tokens, int)
    base = Fit("", np.linspace(1, 3, tokens), owner)
    decision = decide(Evidence(base, Fit("", np.full(tokens, ROUNDING), owner), 1e-9))
    assert decision.kind == ("few_tokens" if tokens < 8 else "unexplained")
