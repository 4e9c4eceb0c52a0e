"""Broken engines are named, honest ones are not accused, and bad files are answered in a sentence.

A small share of tests/benchmarks/broken_engines.py, which has every fault in every family and 200 honest files.
"""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_rl import cli
from moe_rl.analysis.diagnose import diagnose
from moe_rl.analysis.diagnose.explanations import Explanation, Gap
from moe_rl.analysis.diagnose.hypotheses import (
    cast_to,
    change_routers,
    list_hypotheses,
    make_runnable,
    round_routers,
    switch_experts,
    take_weights,
)
from moe_rl.analysis.diagnose.report import write_page
from moe_rl.analysis.diagnose.responses import Rollouts, hash_sets
from moe_rl.analysis.diagnose.scoring import TEMPERATURES, Fit, Scorer, choose_temperatures, compute_left
from moe_rl.errors import ConfigError
from moe_rl.models.load import save_checkpoint
from moe_rl.models.tokens import byte_tokenizer
from moe_rl.routing import RoutingTrace, layout_of, record_routing
from tests.analysis.broken_engines import ALSO, Bench, expected, logits_of, picked, with_gates

ON = {"layer_shift": "deepseek_v3", "overwritten_layer": "mixtral", "stale_prefix": "glm4_moe",
      "zero_rows": "deepseek_v3", "swapped_responses": "qwen3_moe", "sorted_ids": "mixtral", "router_int8": "qwen3_moe",
      "gates": "mixtral", "temperature": "qwen3_moe", "special_tokens": "deepseek_v3",
      "head_not_pushed": "qwen3_moe"}  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    made = {}
    return lambda family: made.setdefault(family, Bench(family, count=8))


def answer(bench, entries, **settings):
    return diagnose(entries, bench.model, tokenizer=bench.tokenizer, **settings)


@pytest.mark.parametrize("fault", ON)
def test_a_broken_engine_is_named(bench, fault):
    engine = bench(ON[fault])
    also = {"older": engine.older()} if fault in ALSO else None
    found = answer(engine, getattr(engine, fault)(), also=also)
    assert found.causes[0] == expected(fault, engine) and found.fault and not found.equally, found.verdict
    assert found.evidence and found.fits[0].name == "natural"


def test_the_response_furthest_apart_is_shown_token_by_token(bench, tmp_path):
    """The engine's ids and log-probs, the natural ones and those under replay, as traces and as a page."""
    engine = bench("deepseek_v3")
    found = answer(engine, engine.lost_bias())
    write_page(found, tmp_path / "x.html", rollouts="r", checkpoint="c")
    assert 'href="x-response.html"' in (tmp_path / "x.html").read_text()
    assert "x-traces/replayed" in (tmp_path / "x-response.html").read_text()
    response, read = found.example.response, RoutingTrace.load
    traces = [read(tmp_path / "x-traces" / f"{name}.safetensors") for name in ("engine", "natural", "replayed")]
    assert traces[0].tokens[0].tolist() == list(response.tokens)
    assert traces[2].agreement(traces[0]) == 1 > traces[1].agreement(traces[0])
    beside = RoutingTrace.load_beside(tmp_path / "x-traces" / "engine.safetensors")
    own = beside["logprobs"][0][beside["response"][0]]
    assert own.tolist() == pytest.approx(list(response.logprobs)) and beside["logprobs"][0].isnan().any()
    assert answer(engine, engine.honest()).example is None


@pytest.mark.parametrize("family, temperature", [("qwen3_moe", 1.0), ("deepseek_v3", 0.7), ("mixtral", 1.0)])
def test_an_honest_engine_is_not_accused(bench, family, temperature):
    engine = bench(family)
    found = answer(engine, engine.honest(temperature))
    assert found.causes == () and not found.fault and found.fits[0].mean < 1e-9


@pytest.mark.parametrize("temperature", [0.25, 0.75, 0.85, 0.97, 1.8, 2.5])
def test_a_temperature_beside_those_that_all_are_tried_at_is_named_as_it_is(bench, temperature):
    """The nearest of them (0.8 for 0.75, 1.5 for 1.8) explains most of the gap, too."""
    engine = bench("qwen3_moe")
    found = answer(engine, [entry | {"temperature": 1.0} for entry in engine.honest(temperature)])
    assert found.causes == ("temperature",) and f"are at temperature {temperature}, where" in found.verdict


def test_further_temperatures_are_tried_where_a_parabola_in_their_inverse_is_low():
    def gaps(*, lowest, rest):
        return {t: 3 * (1 / t - 1 / lowest) ** 2 + rest for t in TEMPERATURES}

    assert choose_temperatures(gaps(lowest=0.87, rest=0.01), most=0.02) == [0.85, 0.86, 0.87, 0.88, 0.89]
    assert choose_temperatures(gaps(lowest=2, rest=0.0), most=0.1) == [1.98, 1.99, 2.0, 2.01, 2.02]
    assert choose_temperatures(gaps(lowest=0.25, rest=0.0), most=0.1) == [0.23, 0.24, 0.25, 0.26, 0.27]
    assert choose_temperatures(gaps(lowest=0.9, rest=0.0), most=0.1) == [0.88, 0.89, 0.91, 0.92], "0.9 is known"
    assert choose_temperatures(gaps(lowest=0.87, rest=0.03), most=0.02) == []
    falling = {t: 1 / t**0.5 for t in TEMPERATURES[:3]} | {1.0: -3.0}
    assert choose_temperatures(falling, most=9.0) == [], "no lowest point"


def test_an_honest_engine_in_bfloat16_is_rounding():
    engine = Bench("qwen3_moe", count=8, dtype=torch.bfloat16)
    found = answer(engine, engine.honest())
    assert not found.fault and found.causes in (("rounding",), ("dtype",)) and found.fits[0].mean > 1e-6


def test_a_fault_that_is_larger_than_rounding_is_named_beside_it():
    """An engine in bfloat16 under a trainer in float32: what its rounding leaves of the gap is no reason to keep quiet
    where the gap is several times that."""
    engine = Bench("olmoe", dtype=torch.bfloat16)
    found = answer(engine, engine.top_k())
    natural, _, rounding = found.fits[:3]
    assert 4 < natural.mean / rounding.mean < 8 and natural.distance.mean() < 3 * rounding.distance.mean()
    assert found.causes == ("top_k",) and not found.equally


def test_a_router_in_fp8_is_named_within_rounding():
    """An engine in bfloat16, whose gap is no larger than rounding can make it: tokens that come nearer tell."""
    engine = Bench("qwen3_moe", dtype=torch.bfloat16)
    found = answer(engine, engine.router_fp8())
    natural, _, rounding = found.fits[:3]
    assert natural.mean < 8 * rounding.mean and found.causes == ("router_fp8",) and found.fault
    (best,) = [r for r in found.fits if r.name == "routers in fp8, by tensor"]
    others = [r.nearer.mean() for r in found.fits if "fp8, by row" in r.name or "unscaled" in r.name]
    assert best.nearer.mean() > 0.3 and max(others) < 0 and "nearer to the engine's" in " ".join(found.evidence)


def test_a_tie_that_the_engine_breaks_otherwise_is_no_fault_of_its_routes():
    """Of two experts of equal score an engine in bfloat16 may take either; a replay of it moves log-probs that agree by
    more than their noise, and by less than rounding."""
    engine = Bench("mixtral", count=8, dtype=torch.bfloat16)
    trainer, tied = engine.engine(), False
    entries = [e | {"logprobs": picked(logits_of(trainer, e), e)} for e in engine.honest()]
    entries = [{k: v for k, v in e.items() if k != "gates"} for e in with_gates(trainer, entries)]
    for e in entries:
        with torch.no_grad(), record_routing(trainer, scores=True) as recording:
            trainer(torch.tensor([e["tokens"][:-1]]))
        scores = recording.scores(1)
        t, site = np.argwhere(scores.margins[0].numpy() == scores.margins[0].min().item())[0]
        if not tied and (tied := scores.margins[0, t, site] == 0):
            e["routes"][t, site] = scores.all_log_probs[site][0, t].argsort(descending=True)[[0, 2]].numpy()
    found = diagnose(entries, trainer, tokenizer=engine.tokenizer)
    kl = {r.name: r.mean for r in found.fits}
    assert 10 * 4 * kl["noise floor"] < kl["ids of the prompt forced"] < kl["rounding"]
    assert found.causes == () and not found.fault, found.verdict


@pytest.mark.parametrize(("dtype", "causes"), [(torch.bfloat16, ()), (torch.float32, ("rounding",))])
def test_a_gap_as_small_as_another_order_of_summation_makes_is_none(dtype, causes):
    """Log-probs 7e-4 nats apart, a KL of 2.5e-7, where two orders in bfloat16 may leave (33 · √(2⁻⁷ · 2⁻²³) · 3)² / 2,
    about 5e-6, and in float32 about 7e-11: 33 roundings of four layers and the head, of log-probs of about 3."""
    engine = Bench("mixtral", count=8, dtype=dtype)
    trainer = engine.engine()
    found = diagnose([e | {"logprobs": [x - 7e-4 for x in picked(logits_of(trainer, e), e)], "routes": None}
                      for e in engine.honest()], trainer, tokenizer=engine.tokenizer)
    assert found.causes == causes and not found.fault, found.verdict


def test_two_faults_are_both_named(bench):
    """Of log-probs and of routes; and two of log-probs, neither of which is enough."""
    engine = bench("deepseek_v3")
    lost = engine.lost_bias()
    shifted = [e | {"routes": np.roll(e["routes"], -1, axis=1)} for e in lost]
    assert answer(engine, shifted).causes == ("lost_bias", "layer_shift")
    twice = engine.engine(lambda m: [r.e_score_correction_bias.zero_() for r in engine.routers(m)])
    hot = [e | {"logprobs": picked(logits_of(twice, e) / 0.7, e), "routes": None} for e in lost]
    assert set(answer(engine, hot).causes) == {"lost_bias", "temperature"}


def test_a_fault_of_some_responses_is_found_in_these(bench):
    engine = bench("glm4_moe")
    mixed = [a if i % 2 else b for i, (a, b) in enumerate(zip(engine.honest(), engine.lost_bias(), strict=True))]
    found = answer(engine, [{k: v for k, v in e.items() if k != "routes"} for e in mixed])
    assert found.causes == ("lost_bias",) and "of 4 responses with a gap" in " ".join(found.evidence)


def test_what_it_does_not_know_is_unexplained(bench):
    engine = bench("qwen3_moe")
    found = answer(engine, engine.weight_version())
    assert found.causes == ("unexplained",) and "--also" in found.verdict
    draw = np.random.default_rng(0)
    noisy = [e | {"routes": np.sort(draw.integers(0, 4, (*e["routes"].shape[:2], 1)) * 2 + [0, 1], -1)}
             for e in engine.honest()]
    found = answer(engine, noisy)
    assert found.causes == ("unexplained",) and found.fault and "in no way that is known" in found.verdict


def test_only_some_weight_versions_have_the_gap(bench):
    engine = bench("qwen3_moe")
    mixed = [e | {"weight_version": "7" if i % 2 else "6"} for i, (a, b) in enumerate(
        zip(engine.honest(), engine.weight_version(), strict=True)) for e in [a if i % 2 else b]]
    found = answer(engine, [{k: v for k, v in e.items() if k != "routes"} for e in mixed])
    assert found.causes == ("weight_version",) and "weight version 6" in found.verdict


def test_the_model_is_as_before(bench):
    engine = bench("glm4_moe")
    before = {n: x.clone() for n, x in engine.model.state_dict().items()}
    modules, implementation = dict(engine.model.named_modules()), engine.model.config._experts_implementation
    older = {"older": engine.older()}
    for hypothesis in list_hypotheses(engine.model, [], engine.tokenizer, older):
        with hypothesis.model(engine.model):
            pass
        after = engine.model.state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before), hypothesis.name
        assert dict(engine.model.named_modules()) == modules, hypothesis.name
    assert engine.model.config._experts_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules.values())


# ---------------------------------------------------------------------- its parts, by hand
def test_a_scope_does_what_it_says(bench):
    engine = bench("qwen3_moe")
    model, entry = engine.model, engine.honest()[0]
    tokens = torch.tensor([entry["tokens"]])
    with torch.no_grad():
        natural = model(tokens).logits
        with round_routers(torch.zeros_like)(model), record_routing(model, scores=True) as recording:
            model(tokens)
            assert torch.allclose(recording.scores(1).gates, torch.tensor(0.5)), "equal logits, equal weights"
        with change_routers(lambda spec: setattr(spec.module, "top_k", 3))(model):
            assert layout_of(model).top_k == 3
        with cast_to(torch.bfloat16)(model) as twin:
            assert twin(tokens).logits.dtype == torch.bfloat16 and model(tokens).logits.dtype == torch.float32
        with take_weights(engine.older(), lambda n: n.startswith("lm_head."))(model):
            assert model.lm_head.weight is not model.model.embed_tokens.weight
        with switch_experts("eager")(model):
            assert torch.allclose(model(tokens).logits, natural, atol=1e-5)
        assert torch.equal(model(tokens).logits, natural)


def test_experts_too_narrow_for_grouped_products_run_one_by_one():
    """Rows of 20 numbers are 80 bytes in float32 and 40 in bfloat16; of 6, never a multiple of 16."""
    engine, narrow = (Bench("qwen3_moe", count=2, moe_intermediate_size=width) for width in (20, 6))
    found = answer(engine, engine.honest())
    assert found.causes == () and found.fits[2].name == "rounding" and found.fits[2].mean > 1e-7
    tokens = torch.tensor([[5, 6, 7]])
    with make_runnable(narrow.model) as model, torch.no_grad():
        assert torch.isfinite(model(tokens).logits).all()
        with pytest.raises(ConfigError, match="multiple of 16 bytes"), switch_experts("grouped_mm")(model):
            pass
    assert narrow.model.config._experts_implementation == engine.model.config._experts_implementation == "grouped_mm"


def test_k3_by_hand(bench):
    engine = bench("qwen3_moe")
    honest = engine.honest()
    for entry in honest:
        entry["logprobs"] = [x - 0.1 for x in picked(logits_of(engine.model, entry), entry)]
    found = answer(engine, honest)
    assert found.fits[0].mean == pytest.approx(np.expm1(0.1) - 0.1, rel=1e-4)
    assert found.fits[0].beyond_2.max() == 0 and found.tokens == sum(len(e["logprobs"]) for e in honest)


def test_what_is_left_is_a_ratio_of_means_with_an_interval():
    base, half = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 1.0, 1.5, 2.0])
    fits = [Fit("", x, x, x, x, x) for x in (half, base, half[:1], base[:1])]
    assert compute_left(*fits[:2]) == (0.5, pytest.approx(0.5), pytest.approx(0.5)), "paired: every resample halves"
    assert compute_left(*fits[2:]) == (0.5, 0.5, 0.5)


def test_what_hides_within_rounding_brings_many_responses_nearer_by_hand():
    """Of 16 responses 75 to 85 % of the tokens come nearer; left is half of what rounding makes, or 30 times."""
    half, much = (Fit("", *np.full((4, 16), x), nearer=0.5 + 0.1 * (np.arange(16) % 3)) for x in (5e-5, 3e-3))
    gap = Gap(object.__new__(Scorer), half, Fit("", *np.full((5, 16), 1e-4)))

    def named(fit, *causes):
        return gap.moves_nearer(Explanation(causes, "", fit, (0, 0, 0), True))

    assert named(half, "router_fp8") and named(half, "router_int8")
    assert not named(half, "lost_bias") and not named(half, "router_fp8", "temperature")
    assert not named(much, "router_fp8")
    few = replace(half, nearer=half.nearer - 0.45)
    one = replace(half, nearer=np.array([5.0, *[-0.05] * 15]))
    assert not named(few, "router_fp8") and not named(one, "router_fp8"), "sure but small; large but of one response"
    assert not named(replace(half, nearer=np.full(16, 0.5)), "router_fp8"), "no spread, no interval"


def test_keys_are_those_of_sets():
    ids = np.array([[[0, 3]], [[3, 0]], [[1, 2]], [[-1, -1]]], dtype=np.int8)
    a, b, c, none = hash_sets(ids)[:, 0]
    assert a == b != c and none == -1


# ---------------------------------------------------------------------- files
def lines_of(entries):
    """As JSON: routes as the base64 of a .npy file."""
    for e in entries:
        file = io.BytesIO()
        np.save(file, e["routes"].astype(np.uint8))
        yield json.dumps(e | {"routes": base64.b64encode(file.getvalue()).decode()})


@pytest.fixture(scope="module")
def there(bench, tmp_path_factory):
    folder, engine = tmp_path_factory.mktemp("diagnose"), bench("qwen3_moe")
    save_checkpoint(engine.model, engine.tokenizer, folder / "step")
    (folder / "good.jsonl").write_text("\n".join(lines_of(engine.honest())) + "\n")
    (folder / "shifted.jsonl").write_text("\n".join(lines_of(engine.row_shift())) + "\n")
    return folder


def test_the_command_prints_a_verdict_and_writes_a_page(there, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = there / "page.html"
    assert cli.main(["diagnose", str(there / "shifted.jsonl"), str(there / "step"), "--out", str(out)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "off by 1" in said and "natural" in said and "ids forced, row_shift mended" in said
    page = out.read_text()
    assert "<script" not in page and "default-src 'none'" in page and "off by 1" in page
    assert cli.main(["diagnose", str(there / "good.jsonl"), str(there / "step"), "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    ((limit, floor),) = re.findall(
        r"No gap: .*? up to (\S+) log-probs agree \(the largest of 1e-09 and 4 times the noise floor of (\S+)\)", said)
    (row,) = re.findall(r"noise floor │ (\S+)", said)
    assert floor == row and float(limit) == max(1e-9, 4 * float(floor)), "that of the table"


def test_an_unexplained_gap_ends_with_exit_code_1(there, bench, tmp_path, capsys):
    file = tmp_path / "other.jsonl"
    file.write_text("\n".join(lines_of(bench("qwen3_moe").weight_version())) + "\n")
    assert cli.main(["diagnose", str(file), str(there / "step"), "--out", str(tmp_path / "page.html")]) == 1
    assert "times the rounding" in " ".join(capsys.readouterr().out.split())


def test_text_reaches_the_page_as_text(bench, tmp_path):
    found = answer(bench("qwen3_moe"), bench("qwen3_moe").honest())
    write_page(found, tmp_path / "x.html", rollouts="<script>alert(1)</script>", checkpoint="&")
    assert "<script>" not in (tmp_path / "x.html").read_text()


GOOD = {"tokens": [5, 6, 7, 8], "prompt_length": 2, "logprobs": [-1.0, -2.0]}
ROWS = [[[0, 1]] * 4] * 3


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"tokens": [5, 6', "expected a JSON object"),
        (json.dumps(GOOD | {"logprobs": [-1.0, float("nan")]}), "nan is not a log-probability"),
        (json.dumps(GOOD | {"logprobs": [-1.0, 0.5]}), "0.5 is not a log-probability"),
        (json.dumps(GOOD | {"logprobs": [-1.0]}), "1 log-probs for a response of 2 tokens"),
        (json.dumps(GOOD | {"logprobs": [None, None]}), "every log-prob is null"),
        (json.dumps(GOOD | {"tokens": [5, 6], "logprobs": []}), "the response has no tokens. Remove the line"),
        (json.dumps(GOOD | {"temprature": 0.7}), "the key 'temprature' is unknown: did you mean 'temperature'?"),
        (json.dumps(GOOD | {"prompt_length": 0}), "2 log-probs for a response of 4 tokens"),
        (json.dumps(GOOD | {"prompt_length": "2"}), "needs \"prompt_length\""),
        (json.dumps(GOOD | {"tokens": [5, 6, 7, 48]}), "token id 48, but the ids of the model run from 0 to 47"),
        (json.dumps(GOOD | {"tokens": "5678"}), "tokens must be a list of ids"),
        (json.dumps({"logprobs": [-1.0]}), "neither token ids nor text"),
        (json.dumps({"tokens": [1]}), "no list \"logprobs\""),
        (json.dumps({"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 1}),
         "verl's rollout_data_dir contains no log-probs"),
        (json.dumps(GOOD | {"temperature": 0}), "temperature is 0; expected a number above 0"),
        (json.dumps(GOOD | {"top_p": 1.5}), "top_p is 1.5"),
        (json.dumps(GOOD | {"cached_tokens": 9}), "cached_tokens is 9"),
        (json.dumps(GOOD | {"routes": [[[0, 8]] * 4] * 3}), "ids run from 0 to 7"),
        (json.dumps(GOOD | {"routes": [[[-2**63, -2**63]] * 4] * 3}), "ids run from 0 to 7"),
        (json.dumps(GOOD | {"routes": ROWS, "gates": {"data": "AAAA", "dtype": "f4,(((("}}), "line 1"),
        (json.dumps(GOOD)[:-1] + ', "routes": ' + '{"data": ' * 900 + "1" + "}" * 901, "line 1"),
        (json.dumps(GOOD | {"routes": [[[0, 1]] * 6] * 3}), "expected [3 rows, 4 layers, 2]"),
        (json.dumps(GOOD | {"routes": ROWS[:1]}), "expected [3 rows, 4 layers, 2]"),
        (json.dumps(GOOD | {"routes": "!!"}), "neither base64 nor another known text"),
        (json.dumps(GOOD | {"routes": ROWS, "gates": [[[0.5]]]}), "gates do not fit the ids"),
        (json.dumps(GOOD | {"routes": ROWS, "routes_start": "a"}), "routes_start is 'a'; expected the number"),
        (json.dumps(GOOD | {"routes": "AAAA", "routes_dtype": 8}), "routes_dtype is 8; expected a name such as uint8"),
        (json.dumps(GOOD | {"temperature": "x" * 900}), f"temperature is '{'x' * 199}…; expected a number"),
        (json.dumps({"prompt": "ab", "response": "cd", "logprobs": [-1.0] * 9}), "Write token ids"),
        ("", "is empty"),
    ],
)
def test_a_bad_line_is_a_sentence(there, tmp_path, capsys, line, says):
    (tmp_path / "bad.jsonl").write_text(line)
    assert cli.main(["diagnose", str(tmp_path / "bad.jsonl"), str(there / "step")]) == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.startswith("moe-rl: ") and printed.count("\n") == 1, printed


@pytest.mark.parametrize("words, says", [
    (["none.jsonl", "step"], "there is no such file"), (["good.jsonl", "none"], "there is no checkpoint folder"),
    (["good.jsonl", "qwen3_moe-tiny"], "is a preset"), (["good.jsonl", "step", "--responses", "0"], "at least one"),
    (["good.jsonl", "step", "--batch-tokens", "0"], "must be at least 1"),
    (["good.jsonl", "step", "--dtype", "int7"], "model.dtype='int7' is unknown"),
    (["good.jsonl", "step", "--router-dtype", "int4"], "--router-dtype 'int4' is unknown"),
    (["good.jsonl", "step", "--out", "."], "--out . is a folder"),
])  # fmt: skip
def test_a_bad_request_is_a_sentence(there, capsys, monkeypatch, words, says):
    monkeypatch.chdir(there)
    assert cli.main(["diagnose", *words]) == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1, printed


def test_a_file_of_another_model_is_refused(there, bench, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text("\n".join(lines_of(bench("deepseek_v3").honest())) + "\n")
    assert cli.main(["diagnose", str(tmp_path / "other.jsonl"), str(there / "step")]) == 2
    assert "expected" in capsys.readouterr().err


def test_a_large_file_is_drawn_from(bench):
    engine = bench("qwen3_moe")
    entry = engine.honest()[0]
    read = [Rollouts((entry for _ in range(500)), layout_of(engine.model), vocabulary=48, limit=8, seed=s)
            for s in (0, 0, 1)]
    drawn = [sorted(r.line for r in x.responses) for x in read]
    assert read[0].count == 500 and len(drawn[0]) == 8
    assert drawn[0] == drawn[1] != drawn[2] and max(drawn[0]) > 100


def test_text_is_cut_by_the_tokenizer_and_gets_its_end_token(bench):
    engine = bench("qwen3_moe")
    read = Rollouts([{"prompt": "12", "response": "34", "logprobs": [-1.0, -1.0, -1.0]}], layout_of(engine.model),
                    vocabulary=48, tokenizer=engine.tokenizer)
    (response,) = read.responses
    assert response.prompt == 2 and response.tokens[-1] == engine.tokenizer.eos_token_id


@pytest.mark.parametrize("text", ["ab", "<|pad|>ab"])
def test_a_prompt_as_text_has_the_special_tokens_that_its_trainer_gave_it(bench, text):
    """One BOS, which a rendered chat template brings along, and no end before the response."""
    engine, tokenizer = bench("qwen3_moe"), byte_tokenizer()
    tokenizer.bos_token = "<|pad|>"
    tokenizer.encode = lambda text, add_special_tokens=True: (
        [257] * (add_special_tokens + text.startswith("<|pad|>")) + list(text.removeprefix("<|pad|>").encode())
        + [256] * add_special_tokens)
    read = Rollouts([{"prompt": text, "response": "c", "logprobs": [-1.0]}], layout_of(engine.model),
                    vocabulary=258, tokenizer=tokenizer)
    assert read.responses[0].tokens == (257, 97, 98, 99) and read.responses[0].prompt == 3


def test_tokens_of_an_environment_do_not_count(bench):
    engine = bench("qwen3_moe")
    entries = engine.honest()
    for e in entries:
        e["logprobs"][0] = None
    found = answer(engine, entries)
    assert found.causes == () and found.tokens == sum(len(e["logprobs"]) - 1 for e in entries)


def test_combine_weights_are_forced_with_the_ids(bench):
    """Both of an engine whose routers are rounded take the whole gap away; ids alone leave some of it."""
    engine = bench("qwen3_moe")
    twin = engine.engine(lambda m: [r.weight.mul_(0.9) for r in engine.routers(m)])
    found = answer(engine, with_gates(twin, engine.honest(change=lambda m: [
        r.weight.mul_(0.9) for r in engine.routers(m)])))
    kl = {r.name: r.mean for r in found.fits}
    assert kl["ids and combine weights forced"] < 1e-9 < kl["ids forced"] < kl["natural"]
    assert found.causes == ("combine_weights",)
