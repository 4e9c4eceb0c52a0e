"""Arms as text: what is read, what is written, and what is refused with which words."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from docs.methods_page import read_options
from moe_rl.config import Arm
from moe_rl.errors import ConfigError
from moe_rl.objectives import spelling
from moe_rl.objectives.methods import (
    arm,
    components,
    read_equation,
    registries,
    spell,
    spell_out,
    spellings,
)
from moe_rl.objectives.spelling import REQUIRED, known_components, parse
from moe_rl.registry import Component

METHODS = {
    "gspo": "gspo",
    "grpo": "grpo",
    "replay": "grpo+old_policy",
    "crossed": "crossed(weigh=none)+truncated",
    "their:grpo": "grpo(clip_high=0.2)+truncated(cap=3.0)+kl(coef=0.1)",
}


@pytest.mark.parametrize(
    "text, fields",
    {
        "gspo": {"loss": "gspo"},
        " gspo + old_policy ": {"loss": "gspo", "routes": "old_policy", "name": "gspo+old_policy"},
        "replay": {"routes": "old_policy"},
        "replay(clip_high=.3)": {"loss": Component("grpo", clip_high=0.3), "routes": "old_policy"},
        "their:grpo(clip_low=inf)+entropy(coef=1e-2)": {
            "loss": Component("grpo", clip_high=0.2, clip_low=math.inf),
            "corrections": (Component("truncated", cap=3.0),),
            "terms": (Component("kl", coef=0.1), Component("entropy", coef=0.01)),
        },
        "their:grpo+corrections=none+terms=entropy(coef=-1)": {
            "loss": Component("grpo", clip_high=0.2),
            "terms": (Component("entropy", coef=-1),),
        },
        "replay+routes=rollout": {"routes": "rollout"},
        "gspo+random_share(share=0.5, seed=3)": {
            "loss": "gspo",
            "routes": Component("random_share", share=0.5, seed=3),
            "name": "gspo+random_share(share=0.5,seed=3)",
        },
        "crossed(weigh=sequence,clip='token')": {
            "loss": Component("crossed", weigh="sequence", clip="token"),
            "corrections": ("truncated",),
        },
        "loss=crossed(clip=token)": {"loss": Component("crossed", clip="token")},
        "grpo+filters=truncated(cap=2)+truncated+ratio_routes=live+anchor=engine+name=mine": {
            "filters": (Component("truncated", cap=2),),
            "corrections": ("truncated",),
            "ratio_routes": "live",
            "anchor": "engine",
            "name": "mine",
        },
        "grpo+group": {"advantage": ("group",)},
        "grpo+advantage=mine:centred(at=[1,{a:None}])+group": {
            "advantage": (Component("mine:centred", at=[1, {"a": None}]), "group")
        },
        "mine.own:loss(a=true,b=-inf)+name='a + b'": {
            "loss": Component("mine.own:loss", a=True, b=-math.inf),
            "name": "a + b",
        },
    }.items(),
)
def test_texts_are_arms(text, fields):
    assert parse(text, METHODS) == Arm(**{"name": text.strip(), **fields})


@pytest.mark.parametrize(
    "text, words",
    [
        ("gpso", "did you mean gspo"),
        ("old_policy", "no method, preset or loss"),
        ("terms=kl(coef=1)", "Begin with a method"),
        ("grpo+old_polic", "did you mean old_policy"),
        ("grpo+gspo", "more than one loss"),
        ("grpo+anchor=nobody", "nobody"),
        ("grpo+name=a+name=b", "more than one name"),
        ("replay+rollout", "write routes=rollout"),
        ("gspo+replay", "replay is the method grpo+old_policy"),
        ("grpo(clip_hihg=1)", "did you mean clip_high"),
        ("grpo+truncated(cup=1)", "did you mean cap"),
        ("grpo+kl", "needs coef"),
        ("grpo+mine:stay", "name the field of mine:stay"),
        ("grpo+terms=truncated", "truncated goes into corrections, not into terms"),
        ("grpo+therms=kl(coef=1)", "did you mean terms"),
        ("grpo(0.2)", "name=value, and no name may appear twice"),
        ("grpo(clip_low=1,clip_low=2)", "name=value, and no name may appear twice"),
        ("grpo+", "'' cannot be read"),
        ("grpo(clip_low=0.1)(clip_high=0.3)", "'grpo(clip_low=0.1)(clip_high=0.3)'"),
        ("grpo(clip_low=1 2)", "a blank before '2)'"),
        ("grpo+name=x(cap=1)", "Write name=x"),
        (r"grpo+name='\x'", r"name='\\x'"),
        ("grpo+kl(coef=1)+terms=none", "terms=none replaces terms"),
        ("their:grpo+entropy(coef=1)+terms=kl(coef=2)", "terms=kl(coef=2) replaces terms"),
        ("", "cannot be read"),
    ],
)
def test_what_cannot_be_an_arm_is_refused_with_what_to_do(text, words):
    with pytest.raises(ConfigError) as refused:
        parse(text, METHODS)
    assert words in str(refused.value)


def test_advantage_steps_without_a_baseline_are_refused_unless_they_are_said_to_be_all():
    with pytest.raises(ConfigError, match="Write group"):
        parse("grpo+clipped(at=2.0)", METHODS)
    assert parse("grpo+advantage=clipped(at=2.0)", METHODS).advantage == (Component("clipped", at=2.0),)
    assert parse("grpo+group+clipped(at=2.0)", METHODS).advantage == (Component("group"), Component("clipped", at=2.0))


OPTIONS = st.dictionaries(
    st.sampled_from(["share", "cap", "at", "of"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
        max_leaves=4,
    ),
)


def of_kind(*kinds):
    """Parts of a kind with the options they need, and somebody's own with any."""
    known = [
        Component(name, **dict.fromkeys(known.required, 0.5))
        for name, known in known_components().items()
        if known.kind in kinds
    ]
    return st.sampled_from(known) | OPTIONS.map(lambda options: Component("mine.own:part", **options))


def several(kind):
    return st.lists(of_kind(kind), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(
        Arm,
        name=st.text("ab.:-_+() '\"\\", min_size=1),
        loss=of_kind("loss"),
        aggregate=of_kind("aggregation"),
        corrections=several("correction"),
        filters=several("correction"),
        terms=several("term"),
        advantage=several("advantage"),
        routes=of_kind("routes"),
        ratio_routes=st.none() | of_kind("routes"),
        anchor=st.sampled_from(["policy", "engine"]),
    )
)
def test_an_arm_written_is_the_arm_read(made):
    assert parse(spelling.spell(made, METHODS), METHODS) == made
    assert arm(spell(made)) == made


def test_an_arm_is_written_out_with_all_options_and_read_back():
    assert spell_out(arm("rspo(options={clip_low:0.1})+old_policy+masked(high=5.0)+name=mine")) == (
        "rspo(base=gmpo,floor=0.8,options={clip_low:0.1,clip_high:0.4,level:sequence})"
        "+masked(high=5.0,low=0.0,level=token)+old_policy"
    )
    for text in spellings():
        assert spell_out(arm(spell_out(arm(text)))) == spell_out(arm(text)), text


SIGNS = r"""grpo kl(coef=0.1) masked live mine:x name none terms= clip_low=0.1 {a:1} 1 1_0 1e999
    + ( ) , = ' \ # [ ** f'' é"""


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*SIGNS.split(), " ", "\n", "\x00"]),
        max_size=9,
    ).map("".join)
)
def test_every_text_is_an_arm_that_is_read_back_or_refused(text):
    try:
        made = arm(text)
    except ConfigError:
        return
    assert arm(spell(made)) == made and spell_out(arm(spell_out(made))) == spell_out(made)


def test_a_text_is_written_as_it_was_read():
    for text in ("gspo", "grpo(clip_high=0.3)+old_policy", "gspo+kl(coef=0.1)+name=mine"):
        assert spelling.spell(parse(text, METHODS), METHODS) == text


def test_the_table_names_the_components_of_the_registries_with_their_options():
    names = [(kind, name) for kind, functions in registries().items() for name in functions]
    assert sorted((known.kind, name) for name, known in known_components().items()) == sorted(names)
    for name, known in known_components().items():
        options = read_options(name)
        assert list(known.options.items()) == list(options.items()) and read_equation(name), name
        assert list(known.required) == [option for option, default in options.items() if default is REQUIRED], name


def test_names_are_unique_across_registries():
    """Of two components of one name, the second would hide the first."""
    assert sum(map(len, registries().values())) == len(components())


@pytest.mark.parametrize(
    "text, words",
    [
        ("tis(cap=5)", "tis+corrections=truncated(cap=5)"),
        ("mis(level=product)", "mis+corrections=masked(high=2.0,level=product)"),
        ("icepop(low=0.4)", r"masked(low=0.4,high=5.0)"),
        ("trl:gspo(level=token)", "masked(high=3.0,level=token)"),
    ],
)
def test_an_option_that_another_part_of_a_method_has_too_is_not_taken_for_the_loss_s(text, words):
    with pytest.raises(ConfigError) as error:
        arm(text)
    assert words in str(error.value)
    written = str(error.value).partition("Write ")[2].partition(", or")[0]
    assert arm(written).loss == arm(text.partition("(")[0]).loss


@pytest.mark.parametrize(
    "text, words",
    [
        ("grpo+aggregate=none", "aggregate cannot be none"),
        ("grpo+bnpo", "micro-batch"),
        ("gspo+frozen_router", "router_lr_scale=0"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(text, words):
    with pytest.raises(ConfigError, match=words):
        arm(text)
    assert arm("grpo+name=gae").name == "gae"
