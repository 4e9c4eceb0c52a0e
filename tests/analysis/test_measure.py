"""The volatility of one's own checkpoints: numbers against an oracle, resumption, memory, and what is refused."""

from __future__ import annotations

import gc
import json
import math
import random
import shutil
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from moe_rl import cli
from moe_rl.analysis.checkpoints import measure, traces
from moe_rl.analysis.checkpoints.measure import Comparison, make_series, measure_volatility
from moe_rl.analysis.checkpoints.tables import RATIOS
from moe_rl.analysis.checkpoints.texts import Texts
from moe_rl.analysis.folders import checkpoints_of, step_of
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.load import load, no_progress_bars, save_checkpoint
from moe_rl.routing import RoutingTrace, record_routing, replay_routing
from tests.conftest import perturb

LINES = 40


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Two checkpoints, the second one sharded, and a file of prompts and responses."""
    root = tmp_path_factory.mktemp("checkpoints")
    loaded = load(ModelConfig(name="qwen3_moe-tiny"), 0)
    perturb(loaded.model, 0.3)  # fresh routers are nearly undecided: two experts 4e-8 apart change places by rounding
    save_checkpoint(loaded.model, loaded.tokenizer, root / "before")
    perturb(loaded.model, 0.05)
    with no_progress_bars():
        loaded.model.save_pretrained(root / "after", max_shard_size="900KB")
    loaded.tokenizer.save_pretrained(root / "after")
    assert len(list((root / "after").glob("*.safetensors"))) > 1
    draw = random.Random(0)
    with (root / "data.jsonl").open("w") as file:
        for _ in range(LINES):
            prompt, response = ("".join(draw.choices("abc </>", k=draw.randint(2, n))) for n in (9, 25))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")
    return root


def compare(there, out, before="before", after="after", **settings):
    further = {name: settings.pop(name) for name in ("keep_traces",) if name in settings}
    names = (str(there / before), str(there / after))
    comparison = Comparison(names, **{"batch_tokens": 200, "data": str(there / "data.jsonl")} | settings)
    return measure_volatility(comparison, out, **further)[0, 1]


@pytest.fixture(scope="module")
def frames(there, tmp_path_factory):
    return compare(there, tmp_path_factory.mktemp("out") / "volatility")


def one_by_one(there, name):
    """Every line through the whole model by itself, hooks and head included; (line, ids, response rows)."""
    loaded = load(ModelConfig(name=str(there / name)), 0)
    texts = Texts(there / "data.jsonl", loaded.tokenizer, max_tokens=2048, batch_tokens=1)
    for batch in texts.batches():
        with torch.no_grad(), record_routing(loaded.model, scores=True) as recording:
            loaded.model(batch.tokens)
        yield batch.lines[0], recording.trace(batch.tokens).ids()[0], batch.response_rows[0], recording.scores(1)


def test_the_tables_say_what_a_loop_over_single_lines_says(there, frames):
    slots, sets, moved, layers, per_line, margins = [], [], [], [], {}, []
    both_checkpoints = zip(one_by_one(there, "before"), one_by_one(there, "after"), strict=True)
    for (line, old, rows, scores), (_, new, _, _) in both_checkpoints:
        mine = []
        for t in rows.nonzero()[:, 0].tolist():
            kept = [set(a.tolist()) & set(b.tolist()) for a, b in zip(old[t], new[t], strict=True)]
            slots.append([1 - len(both) / 2 for both in kept])
            sets.append([len(both) < 2 for both in kept])
            gates = scores.gates[0, t]
            moved.append(
                [
                    sum(float(g) for e, g in zip(old[t, s].tolist(), gates[s], strict=True) if e not in kept[s])
                    for s in range(len(kept))
                ]
            )
            layers.append(sum(sets[-1]))
            margins.append(scores.margins[0, t].numpy())
            mine.append(np.mean(slots[-1]))
        per_line[line] = np.mean(mine)
    summary = frames["summary"].set_index("metric")["response"]
    assert summary["tokens"] == len(slots)
    assert summary["expert_change_rate"] == pytest.approx(np.mean(slots)) and np.mean(slots) > 0.05
    assert summary["any_change_rate"] == pytest.approx(np.mean(sets))
    assert summary["gate_mass_moved"] == pytest.approx(np.mean(moved), rel=1e-3)  # gates are kept in half precision
    assert summary["layers_changed"] == pytest.approx(np.mean(layers))
    assert summary["any_layer_change"] == pytest.approx(np.mean(np.array(layers) > 0))
    assert np.allclose(frames["layers"]["expert_change_rate"], np.mean(slots, 0))
    assert np.allclose(frames["layers"]["margin_q50_before"], np.median(margins, 0))
    found = frames["responses"].set_index("line")["expert_change_rate"]
    assert np.allclose(found, [per_line[line] for line in found.index]) and len(found) == LINES


def test_equal_weights_change_nothing_and_so_does_other_company(there, tmp_path, frames):
    same = compare(there, tmp_path / "same", after="before")["summary"].set_index("metric")
    counts = ["tokens", "unknown_rows", "router_shift_ratio"]
    assert (same["response"].drop(counts) == 0).all()
    floor = frames["summary"].set_index("metric")["noise_floor"]
    assert floor["router_shift"] < 1e-5 and (floor.drop([*counts, "router_shift"]) == 0).all()
    assert floor["tokens"] > 0


@pytest.mark.parametrize("side", ["before", "after"])
def test_routers_without_finite_scores_are_named_and_not_compared(there, tmp_path, side, capsys):
    loaded = load(ModelConfig(name=str(there / "before")), 0)
    loaded.model.model.layers[1].mlp.gate.weight.data.fill_(math.nan)
    save_checkpoint(loaded.model, loaded.tokenizer, tmp_path / "broken")
    names = {"before": str(there / "before"), "after": str(there / "after")} | {side: str(tmp_path / "broken")}
    words = ["--data", str(there / "data.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(["checkpoint", "compare", names["before"], names["after"], *words]) == 2
    assert "model.layers.1.mlp.gate" in capsys.readouterr().err


def observing(monkeypatch, last=10**9):
    """A list that grows with every forward; the forward after the `last` is interrupted."""
    calls, observe = [], traces.observe

    def counted(*arguments, **named):
        calls.append(1)
        if len(calls) > last:
            raise KeyboardInterrupt
        return observe(*arguments, **named)

    monkeypatch.setattr(traces, "observe", counted)
    return calls


@pytest.mark.parametrize("last", [1, 6, 9])
def test_a_killed_comparison_goes_on_and_ends_the_same(there, tmp_path, frames, monkeypatch, last):
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        observing(killed, last)
        compare(there, tmp_path / "out")
    calls = observing(monkeypatch)
    again = compare(there, tmp_path / "out")
    assert last + len(calls) <= 13, "5 batches of two checkpoints, and one again in two forwards"
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(frame, again[name])
    assert {f.suffix for f in (tmp_path / "out").iterdir() if f.stem != "lock"} == {".parquet", ".json"}
    calls.clear()
    compare(there, tmp_path / "out")
    assert not calls, "a finished one is only read"


def test_one_model_is_in_memory_at_a_time(there, tmp_path, monkeypatch):
    real, loaded, alive = measure.load, [], []

    def watched(*arguments, **settings):
        gc.collect()
        alive.append(sum(model() is not None for model in loaded))
        found = real(*arguments, **settings)
        loaded.append(weakref.ref(found.model))
        return found

    monkeypatch.setattr(measure, "load", watched)
    compare(there, tmp_path / "out")
    assert alive == [0, 0]


def test_kept_traces_are_traces_with_gates_of_both(there, tmp_path, frames):
    compare(there, tmp_path / "out", keep_traces=True)
    files = [sorted((tmp_path / "out" / "traces" / side).iterdir()) for side in ("before", "after")]
    assert [f.name for f in files[0]] == [f.name for f in files[1]]
    changed = total = 0
    for a, b in zip(*files, strict=True):
        before, after = RoutingTrace.load(a), RoutingTrace.load(b)
        beside = RoutingTrace.load_beside(b)
        assert beside["gates"].shape == after.shape and beside["response"].any(1).all()
        rows = torch.nn.functional.pad(beside["response"][:, 1:], (0, 1))
        changed += int((~before.same_sets(after))[rows].sum())
        total += int(rows.sum()) * before.shape[2]
    assert changed / total == frames["summary"].set_index("metric")["response"]["any_change_rate"]


def test_a_folder_is_one_comparison(there, tmp_path, frames):
    compare(there, tmp_path / "out")
    with pytest.raises(RunError, match="max_tokens: 2048 there, 9 now"):
        compare(there, tmp_path / "out", max_tokens=9)
    with pytest.raises(RunError, match="checkpoints"):
        compare(there, tmp_path / "out", before="after")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "traces").write_text("precious")
    with pytest.raises(RunError, match="mine"):
        compare(there, tmp_path / "mine")
    for setting in ({"max_tokens": 1}, {"batch_tokens": 0}):
        with pytest.raises(ConfigError, match="must be at least"):
            compare(there, tmp_path / "refused", **setting)
    assert not (tmp_path / "refused").exists()


# ---------------------------------------------------------------------- the command
def run(capsys, *arguments):
    code = cli.main(["checkpoint", "compare", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_command_prints_its_tables_and_draws(there, tmp_path, capsys):
    out, data = tmp_path / "[red]", there / "data.jsonl"
    arguments = (there / "before", there / "after", "--data", data, "--out", out, "--max-tokens", 25, "--ratios")
    code, printed = run(capsys, *arguments)
    shown = " ".join(printed.out.replace("│", " ").split())
    assert code == 0 and "cut at 25 tokens" in shown
    summary = pd.read_parquet(out / "summary.parquet").set_index("metric")["response"]
    for name in RATIOS:
        assert f"{name} {summary[name]:.3g} " in shown
    assert (out / "by_layer.png").stat().st_size > 1000 and (out / "by_layer.svg").exists()


@pytest.fixture(scope="module")
def bad(there):
    """Checkpoints that cannot be compared with `before`."""
    loaded = load(ModelConfig(name="qwen3_moe-tiny", overrides={"num_local_experts": 8}), 0)
    save_checkpoint(loaded.model, loaded.tokenizer, there / "fewer")
    loaded = load(ModelConfig(name=str(there / "before")), 0)
    loaded.model.resize_token_embeddings(320)
    save_checkpoint(loaded.model, loaded.tokenizer, there / "longer")
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    save_checkpoint(dense, loaded.tokenizer, there / "dense")
    shutil.copytree(there / "before", there / "renamed")
    tokenizer = json.loads((there / "renamed" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (there / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copytree(there / "after", there / "torn")
    shard = sorted((there / "torn").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:999])
    return there


@pytest.mark.parametrize(
    "after, says",
    [
        ("none", "none"),
        ("torn", "model-00002-of-"),
        ("fewer", "num_experts=8"),
        ("longer", "longer"),
        ("dense", "dense"),
        ("renamed", "differ in 4 entries"),
    ],
)
def test_bad_input_is_named_before_a_model_is_loaded(bad, tmp_path, capsys, monkeypatch, after, says):
    monkeypatch.setattr(measure, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    code, printed = run(capsys, bad / "before", bad / after, "--data", bad / "data.jsonl", "--out", tmp_path / "out")
    assert code == 2
    assert says in printed.err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- a series
@pytest.fixture(scope="module")
def series(there, tmp_path_factory):
    """The same three checkpoints as a run would save them, and what a comparison of all says."""
    root = tmp_path_factory.mktemp("series")
    folder = root / "run" / "checkpoints"
    for name, step in (("before", 9), ("after", 10)):
        shutil.copytree(there / name, folder / f"step={step:06d}")
    loaded = load(ModelConfig(name=str(there / "after")), 0)
    perturb(loaded.model, 0.05, seed=2)
    save_checkpoint(loaded.model, loaded.tokenizer, folder / "step=000100")
    return root, measured(there, root)


def measured(there, root, names=None, **further):
    names = tuple(names or checkpoints_of(str(root / "run")))
    comparison = Comparison(names, str(there / "data.jsonl"), batch_tokens=200)
    frames = measure_volatility(comparison, root / "out", **further)
    return make_series(comparison, frames, root / "out")


def test_a_series_is_its_comparisons_of_neighbours_and_with_the_first(there, tmp_path, series):
    root, table = series
    names = checkpoints_of(str(root / "run"))
    assert [Path(n).name for n in names] == ["step=000009", "step=000010", "step=000100"]
    at = table.set_index(["index", "since", "metric"])
    pairs = {(1, "previous"): (0, 1), (1, "first"): (0, 1), (2, "previous"): (1, 2), (2, "first"): (0, 2)}
    for place, (i, j) in pairs.items():
        alone = compare(Path("/"), tmp_path / f"{i}{j}", names[i], names[j], data=str(there / "data.jsonl"))
        for column in ("response", "noise_floor"):
            mine = at.loc[place, column]
            pd.testing.assert_series_equal(mine, alone["summary"].set_index("metric")[column], check_names=False)
    changed = at["response"].xs("expert_change_rate", level="metric")
    assert changed[2, "first"] > changed[1, "first"] > 0
    folders = {file.parent.name for file in (root / "out").rglob("summary.parquet")}
    assert folders == {"00-01", "00-02", "01-02"} and not list((root / "out").rglob("traces"))


def test_a_series_loads_each_checkpoint_once_and_goes_on(there, series, tmp_path, monkeypatch, capsys):
    root, table = series
    shutil.copytree(root / "run", tmp_path / "run")
    loads, real = [], measure.load
    monkeypatch.setattr(measure, "load", lambda *a, **k: loads.append(1) or real(*a, **k))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        observing(killed, 10)
        measured(there, tmp_path)
    again = measured(there, tmp_path)
    pd.testing.assert_frame_equal(again.drop(columns="checkpoint"), table.drop(columns="checkpoint"))
    assert len(loads) == 4, "the second one twice, because it was interrupted"
    arguments = (tmp_path / "run", "--data", there / "data.jsonl", "--batch-tokens", 200, "--out", tmp_path / "out")
    monkeypatch.setenv("COLUMNS", "200")
    code, printed = run(capsys, *arguments)
    assert code == 0 and "step=000100" in printed.out and (tmp_path / "out/series.svg").exists()
    with pytest.raises(RunError, match="checkpoints"):
        measured(there, tmp_path, [*checkpoints_of(str(tmp_path / "run")), str(there / "before")])


def test_what_an_engine_reads_is_no_checkpoint_of_a_run(tmp_path):
    """`engine/` has a configuration and, for a server, the weights of the last push; elsewhere it is any name."""
    for folder in ("engine", "checkpoints/step=000010", "checkpoints/step=000002"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    steps = [str(tmp_path / "checkpoints" / f"step={n:06d}") for n in (2, 10)]
    assert checkpoints_of(str(tmp_path)) == [str(tmp_path / "engine"), *steps]
    (tmp_path / "manifest.json").write_text("{}")
    assert checkpoints_of(str(tmp_path)) == steps
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        checkpoints_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("runs/a/checkpoints/step=20", 20),
        ("iter_0000100", 100),
        ("step500-merged", 500),
        ("Qwen2.5-7B", None),
    ],
)
def test_a_step_is_read_from_a_name_and_a_size_is_none(name, step):
    assert step_of(name) == step


# ---------------------------------------------------------------------- what it says of the responses
@pytest.fixture(scope="module")
def scored(there, tmp_path_factory):
    """A comparison that scores the responses, and its folder."""
    out = tmp_path_factory.mktemp("ratios") / "out"
    return compare(there, out, ratios=True), out


def log_ratios(there, order):
    """log r of every response token, lines in `order`: without replay, and with the routes of before; each by itself,
    all logits at once."""
    before, after = (load(ModelConfig(name=str(there / name)), 0) for name in ("before", "after"))
    texts = Texts(there / "data.jsonl", before.tokenizer, max_tokens=2048, batch_tokens=1)
    found = {}
    for batch in texts.batches():

        def said(model, batch=batch):
            with torch.no_grad():
                logits = model(batch.tokens).logits.double()
            return [
                logits[0, t - 1].log_softmax(-1)[batch.tokens[0, t]].item()
                for t in range(1, batch.tokens.shape[1])
                if batch.response_mask[0, t]
            ]

        with record_routing(before.model) as recording:
            old = np.array(said(before.model))
        unconstrained = np.array(said(after.model))
        with replay_routing(after.model, recording.trace(batch.tokens)):
            replayed = np.array(said(after.model))
        found[batch.lines[0]] = unconstrained - old, replayed - old
    return (np.concatenate(x) for x in zip(*(found[line] for line in order), strict=True))


def test_ess_and_kl_are_those_of_single_lines_without_replay_and_replayed(there, scored):
    frames, _ = scored
    order = [int(line) for line in frames["responses"].sort_values(["batch", "row"])["line"]]
    summary = frames["summary"].set_index("metric")
    said = {}
    for suffix, d in zip(("", "_replayed"), log_ratios(there, order), strict=True):
        r = np.exp(d)
        ess = r.sum() ** 2 / (len(r) * (r**2).sum())
        said[suffix] = ess, np.mean(r - 1 - d)
        assert summary.loc[f"token_ess{suffix}", "response"] == pytest.approx(ess, rel=1e-4)
        assert summary.loc[f"token_kl_k3{suffix}", "response"] == pytest.approx(said[suffix][1], rel=1e-4)
    assert said[""][1] > 1.05 * said["_replayed"][1] > 0 and said[""][0] < said["_replayed"][0] < 1
    floor = summary["noise_floor"]
    assert floor["token_kl_k3"] < 1e-9 and np.isnan(floor["token_ess_replayed"])


def test_scoring_the_responses_changes_no_other_number(scored, frames):
    for name, frame in frames.items():
        own = scored[0][name]
        own = own[~own["metric"].str.contains("token_")].reset_index(drop=True) if name == "summary" else own
        pd.testing.assert_frame_equal(own, frame)
