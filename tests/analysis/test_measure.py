"""The volatility of one's own checkpoints: numbers against an oracle, resumption, memory, and what is refused."""

from __future__ import annotations

import gc
import io
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
from rich.console import Console
from safetensors.torch import save_file

from moe_rl import cli
from moe_rl.analysis.checkpoints import measure
from moe_rl.analysis.checkpoints.measure import Comparison, Observer, measure_series, measure_volatility
from moe_rl.analysis.checkpoints.report import _layers, _tenth, by_layer, conclusion, print_report
from moe_rl.analysis.checkpoints.tables import METRICS, RATIOS, TABLES, top_share
from moe_rl.analysis.checkpoints.texts import Texts
from moe_rl.analysis.folders import checkpoints_of, step_of
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.load import load, no_progress_bars, save_checkpoint
from moe_rl.results.plots import save
from moe_rl.routing import RoutingTrace, record_routing, replay_routing
from moe_rl.storage.lock import Held, Lock
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


def compare(there, out, before="before", after="after", keep_traces=False, **settings):
    comparison = Comparison(str(there / before), str(there / after), str(there / "data.jsonl"),
                            **{"batch_tokens": 200} | settings)
    return measure_volatility(comparison, out, keep_traces=keep_traces, console=Console(quiet=True))


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
            moved.append([sum(float(g) for e, g in zip(old[t, s].tolist(), gates[s], strict=True) if e not in kept[s])
                          for s in range(len(kept))])
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
    assert np.allclose(frames["layers"]["margin_q50_before"], np.median(margins, 0), rtol=0.05)
    assert frames["layers_changed"]["tokens"].tolist() == np.bincount(layers, minlength=7).tolist()
    found = frames["responses"].set_index("line")["expert_change_rate"]
    assert np.allclose(found, [per_line[line] for line in found.index]) and len(found) == LINES


def test_tables_agree_with_each_other(frames):
    summary = frames["summary"].set_index("metric")["response"]
    tokens, sites = summary["tokens"], len(frames["layers"])
    use = frames["experts"]
    assert (use["before"] - use["left"] + use["entered"] == use["after"]).all()
    assert use["before"].sum() == tokens * sites * 2
    assert use["left"].sum() / use["before"].sum() == pytest.approx(summary["expert_change_rate"])
    pairs = frames["pairs"]
    assert pairs["before"].sum() == pairs["after"].sum() == tokens * sites  # k = 2: one pair per token and site
    assert (pairs["a"] < pairs["b"]).all() and pairs["b"].max() < 16
    for name in ("positions", "tokens"):
        frame = frames[name]
        assert frame["n"].sum() == tokens
        assert np.average(frame["expert_change_rate"], weights=frame["n"]) == pytest.approx(
            summary["expert_change_rate"]
        )
    assert frames["positions"]["n"].iloc[0] == LINES
    margins = frames["margins"]
    assert margins["before"].sum() == margins["after"].sum() == tokens * sites
    assert margins["changed"].sum() / margins["before"].sum() == pytest.approx(summary["any_change_rate"])
    small = margins["low"] < 1e-2
    rate = [part["changed"].sum() / part["before"].sum() for part in (margins[small], margins[~small])]
    assert rate[0] > rate[1]


def test_equal_weights_change_nothing_and_so_does_other_company(there, tmp_path, frames):
    same = compare(there, tmp_path / "same", after="before")["summary"].set_index("metric")
    counts = ["tokens", "unknown_rows", "router_shift_ratio"]
    assert (same["response"].drop(counts) == 0).all()
    floor = frames["summary"].set_index("metric")["noise_floor"]
    assert floor["router_shift"] < 1e-5 and (floor.drop([*counts, "router_shift"]) == 0).all()
    assert floor["tokens"] > 0


def test_the_batching_changes_no_number(there, tmp_path, frames):
    margins = frames["margins"]
    assert not margins.loc[margins["high"] < 1e-6, ["before", "after"]].any(axis=None), "rounding would decide a route"
    other = compare(there, tmp_path / "other", batch_tokens=77)
    for name in ("summary", "layers", "experts", "pairs", "positions", "tokens"):
        kept = [c for c in frames[name] if "noise" not in c]
        pd.testing.assert_frame_equal(frames[name][kept], other[name][kept], rtol=1e-5)


@pytest.mark.parametrize("after_calls", [1, 4, 7, 11])
def test_a_killed_comparison_goes_on_and_ends_the_same(there, tmp_path, frames, monkeypatch, after_calls):
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0.0)
    forward, calls = Observer._forward, []

    def dies(self, *arguments):
        calls.append(1)
        if len(calls) > after_calls:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    with monkeypatch.context() as killed:
        killed.setattr(Observer, "_forward", dies)
        with pytest.raises(KeyboardInterrupt):
            compare(there, tmp_path / "out")
    calls.clear()
    monkeypatch.setattr(Observer, "_forward", lambda self, *a: calls.append(1) or forward(self, *a))
    again = compare(there, tmp_path / "out")
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(frame, again[name])
    before, calls[:] = len(calls), []
    compare(there, tmp_path / "out")
    assert not calls and before  # a finished one is only read


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


def traces_of(out):
    return [[f.name for f in sorted((out / "traces" / side).glob("*"))] for side in ("before", "after")]


def test_traces_asked_for_later_are_those_of_every_batch(there, tmp_path, frames, monkeypatch):
    """Killed without them, finished without them, killed while they were made: in the end all are there."""
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0.0)
    forward, calls, last = Observer._forward, [], 99

    def dies(self, *arguments):
        calls.append(1)
        if len(calls) > last:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Observer, "_forward", dies)
        whole = compare(there, tmp_path / "whole", keep_traces=True)
    expected, last = traces_of(tmp_path / "whole"), len(calls) - 2  # two batches before the end

    def killed(out, **settings):
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Observer, "_forward", dies)
            compare(there, out, **settings)

    killed(tmp_path / "half")
    again = compare(there, tmp_path / "half", keep_traces=True)
    assert traces_of(tmp_path / "half") == expected
    compare(there, tmp_path / "done")
    killed(tmp_path / "done", keep_traces=True)
    compare(there, tmp_path / "done", keep_traces=True)
    assert traces_of(tmp_path / "done") == expected
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(frame, again[name])
        pd.testing.assert_frame_equal(frame, whole[name])


def test_a_response_that_was_cut_off_whole_has_no_change_and_is_counted(there, tmp_path):
    with (tmp_path / "data.jsonl").open("w") as file:
        file.write(json.dumps({"prompt": "abc </>abc </>", "response": "abc"}) + "\n")
        for _ in range(3):
            file.write(json.dumps({"prompt": "ab", "response": "c </>abc "}) + "\n")
    comparison = Comparison(str(there / "before"), str(there / "after"), str(tmp_path / "data.jsonl"), max_tokens=9)
    found = measure_volatility(comparison, tmp_path / "out", console=Console(quiet=True))
    assert found["responses"]["line"].tolist() == [2, 3, 4]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["finished"]["lost_lines"] == 1
    said = Console(width=200, record=True, file=io.StringIO())
    print_report(said, found, tmp_path / "out")
    assert "1 of them to nothing but prompt" in said.export_text()


def test_without_them_nothing_but_tables_is_left(there, tmp_path):
    compare(there, tmp_path / "out")
    assert {f.suffix for f in (tmp_path / "out").iterdir() if f.stem != "lock"} == {".parquet", ".json"}


def test_a_folder_is_one_comparison(there, tmp_path, frames):
    compare(there, tmp_path / "out")
    with pytest.raises(RunError, match="contains another comparison .max_tokens: 2048 there, 9 now"):
        compare(there, tmp_path / "out", max_tokens=9)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "traces").write_text("precious")
    with pytest.raises(RunError, match="is not empty"):
        compare(there, tmp_path / "mine")


def test_a_finished_comparison_is_read_whole_or_not_at_all(there, tmp_path, frames):
    out = tmp_path / "out"
    compare(there, out)
    again = compare(there, out)
    assert tuple(frames) == TABLES
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(frame, again[name])
    for name in ("layers", "summary", "responses"):
        file = out / f"{name}.parquet"
        kept = file.read_bytes()
        file.write_bytes(b"")
        with pytest.raises(RunError, match=rf"{name}.parquet cannot be read .*Restore it from a copy, or delete .*out"):
            compare(there, out)
        file.unlink()
        with pytest.raises(RunError, match=rf"{name}.parquet is missing, although the comparison has finished. Restore "
                                           "it from a copy, or delete .*out and compare again"):
            compare(there, out)
        file.write_bytes(kept)


def test_a_request_that_is_refused_leaves_the_folder_free_for_the_right_one(there, tmp_path):
    with pytest.raises(ConfigError, match="--max-tokens 1 must be at least 2"):
        compare(there, tmp_path / "out", max_tokens=1)
    with pytest.raises(ConfigError, match="--batch-tokens 0 must be at least 1"):
        compare(there, tmp_path / "out", batch_tokens=0)
    assert not (tmp_path / "out").exists()


def test_the_top_share_by_hand():
    assert top_share(np.array([1.0, 4.0, 3.0, 2.0]), 0.5) == 0.7
    assert top_share(np.array([0.0, 1.0, 5.0]), 0.2, np.array([6, 3, 1])) == 6 / 8
    assert np.isnan(top_share(np.zeros(3), 0.1))


def test_every_share_has_its_yardstick(frames):
    """16 experts, top 2, in 6 layers: what random routes would show."""
    chance = frames["summary"].set_index("metric")["chance"]
    assert chance["expert_change_rate"] == chance["gate_mass_moved"] == 1 - 2 / 16
    assert chance["any_change_rate"] == pytest.approx(1 - 1 / 120) and chance["any_layer_change"] == pytest.approx(1)
    assert chance[[m for m in METRICS if not m.startswith("router_shift")]].notna().all()
    measured = frames["summary"].set_index("metric")["response"]
    assert (measured < chance)[["expert_change_rate", "any_change_rate", "jaccard_distance", "layers_changed"]].all()


def test_a_comparison_ends_with_a_sentence(frames):
    said = conclusion(frames["summary"])
    slots = frames["summary"].set_index("metric").loc["expert_change_rate", "response"]
    assert said.startswith(f"{100 * slots:.3g} % of the experts") and "random routes would change 87.5 %" in said
    assert "the noise floor is 0" in said and said.count(".") - said.count(" %") <= 4
    of = frames["summary"].set_index("metric")
    of.loc["expert_change_rate", ["response", "noise_floor"]] = 0.02, 0.01
    assert "2 times the noise floor" in conclusion(of.reset_index())
    of.loc["expert_change_rate", "noise_floor"] = 0.03
    assert "no more than the noise floor" in conclusion(of.reset_index())
    of.loc["expert_change_rate", "response"] = 0
    assert conclusion(of.reset_index()) == "no expert of any response token changed."


def test_a_tenth_of_three_is_one():
    assert _tenth(3, "site") == "the most changed one of 3 sites holds"
    assert _tenth(48, "site") == "the 5 most changed of 48 sites hold"


# ---------------------------------------------------------------------- the command
def run(capsys, *arguments):
    code = cli.main(["checkpoint", "compare", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_command_prints_a_summary_and_draws_figures(there, tmp_path, capsys):
    out = tmp_path / "out"
    code, printed = run(capsys, there / "before", there / "after", "--data", there / "data.jsonl", "--out", out,
                        "--max-tokens", 25)
    assert code == 0
    for words in (
        "How far routing moved",
        "expert_change_rate",
        "noise floor",
        "By layer",
        "texts were cut at 25 tokens",
        "by position:",
        "by expert:",
        "by token id",
        "chance",
        "In short:",
    ):
        assert words in printed.out.replace("\n", " ")
    for name in ("by_layer", "concentration", "experts"):
        assert (out / f"{name}.png").stat().st_size > 1000 and (out / f"{name}.svg").exists()


@pytest.mark.parametrize("margin", [math.nan, math.inf])
def test_a_model_whose_margins_are_unknown_or_infinite_is_drawn(frames, tmp_path, margin):
    """Routers that hand out no scores (Llama 4, DBRX, JetMoE), or use all experts."""
    layers = frames["layers"].copy()
    layers[[name for name in layers if name.startswith("margin_q")]] = margin
    none = frames["margins"].iloc[:0] if math.isnan(margin) else frames["margins"]
    save(by_layer({**frames, "layers": layers, "margins": none}), tmp_path, "by_layer")
    assert (tmp_path / "by_layer.png").stat().st_size


def test_brackets_in_a_path_are_printed_as_they_stand(there, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "[red]"
    folder.mkdir()
    data = folder / "[INST].jsonl"
    data.write_text("\n".join((there / "data.jsonl").read_text().splitlines()[:3]) + "\n")
    code, printed = run(capsys, there / "before", there / "after", "--data", data, "--out", folder / "out")
    assert code == 0 and str(data) in printed.err and str(folder / "out" / "by_layer.png") in printed.out


def test_a_number_that_finds_no_room_is_wrapped_and_not_cut(frames):
    said = Console(width=60, file=io.StringIO())
    said.print(_layers(frames["layers"].assign(load_dead_experts_before=224.0, load_dead_experts_after=211.0)))
    assert "…" not in (shown := said.file.getvalue()) and shown.count("224") == len(frames["layers"])


@pytest.fixture(scope="module")
def bad(there):
    """Checkpoints that cannot be compared with `before`."""
    loaded = load(ModelConfig(name="qwen3_moe-tiny", overrides={"num_local_experts": 8}), 0)
    save_checkpoint(loaded.model, loaded.tokenizer, there / "fewer")
    loaded = load(ModelConfig(name=str(there / "before")), 0)
    loaded.model.resize_token_embeddings(320)
    save_checkpoint(loaded.model, loaded.tokenizer, there / "longer")
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = LlamaForCausalLM(LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2))
    save_checkpoint(dense, loaded.tokenizer, there / "dense")
    shutil.copytree(there / "before", there / "renamed")
    tokenizer = json.loads((there / "renamed" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (there / "renamed" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (there / "empty.jsonl").touch()
    (there / "bad.jsonl").write_text('{"text": "ab"}\n{"question": 1}\n')
    shutil.copytree(there / "after", there / "torn")
    shard = sorted((there / "torn").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:999])
    (there / "adapter").mkdir()
    (there / "adapter" / "adapter_config.json").write_text("{}")
    (there / "adapter" / "adapter_model.safetensors").touch()
    return there


@pytest.mark.parametrize(
    "after, data, says",
    [
        ("none", "data.jsonl", "there is no checkpoint folder"),
        ("torn", "data.jsonl", "model-00002-of-"),
        ("adapter", "data.jsonl", "Merge it into its base"),
        ("after", "none.jsonl", "there is no such file"),
        ("after", ".", "is a folder; give one JSONL file"),
        ("after", "empty.jsonl", "is empty"),
        ("after", "bad.jsonl", "line 2: no text; the keys are 'question'"),
        ("fewer", "data.jsonl", "different architectures"),
        ("longer", "data.jsonl", "resize_token_embeddings"),
        ("dense", "data.jsonl", "has no MoE layer: it is dense"),
        ("renamed", "data.jsonl", "differ in 4 entries"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_a_model_is_loaded(
    bad, tmp_path, capsys, monkeypatch, after, data, says
):
    monkeypatch.setattr(measure, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    code, printed = run(capsys, bad / "before", bad / after, "--data", bad / data, "--out", tmp_path / "out")
    assert code == 2
    assert says in printed.err and printed.err.count("\n") == 1 and printed.err.startswith("moe-rl: ")
    assert not (tmp_path / "out").exists()


def test_code_of_a_checkpoint_runs_only_on_request(there, tmp_path, capsys):
    folder, ran = tmp_path / "custom", tmp_path / "ran"
    shutil.copytree(there / "before", folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "custom_moe", "auto_map": {"AutoConfig": "custom.CustomConfig",
                                                         "AutoModelForCausalLM": "custom.CustomForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(settings))
    own = load(ModelConfig(name=str(there / "before")), 0).model.state_dict()  # under the names of the class
    save_file({k: v for k, v in own.items() if k != "lm_head.weight"}, folder / "model.safetensors", {"format": "pt"})
    (folder / "custom.py").write_text(
        f"open({str(ran)!r}, 'a').write('x')\n"
        "from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM\n"
        "class CustomConfig(Qwen3MoeConfig):\n    model_type = 'custom_moe'\n"
        "class CustomForCausalLM(Qwen3MoeForCausalLM):\n    config_class = CustomConfig\n"
    )
    arguments = (folder, folder, "--data", there / "data.jsonl", "--out", tmp_path / "out")
    code, printed = run(capsys, *arguments)
    assert code == 2 and "--trust-remote-code" in printed.err
    assert not ran.exists()
    comparison = Comparison(str(folder), str(folder), str(there / "data.jsonl"))
    measure_volatility(comparison, tmp_path / "out", trust_remote_code=True, console=Console(quiet=True))
    assert ran.exists()


def test_the_documentation_names_every_table_and_metric(frames):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    columns = (c for f in ("positions", "experts", "pairs", "responses") for c in frames[f])
    for name in (*frames, *METRICS, *RATIOS, *columns):
        assert f"`{name}`" in page or name in ("site", "layer", "expert", "position", "line"), name


def test_bars_by_margin_are_those_of_the_table_between_the_margins_that_they_span(frames):
    margins, bars = frames["margins"], by_layer(frames).axes[2].patches
    for bar in bars:
        low, high = bar.get_x() * 0.999, (bar.get_x() + bar.get_width()) * 0.999  # an edge is no exact power
        inside = margins[(margins["low"] >= low) & (margins["low"] < high)]
        assert bar.get_height() == pytest.approx(inside["changed"].sum() / inside["before"].sum())
    assert len(bars) > 3


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
    names = names or checkpoints_of(str(root / "run"))
    return measure_series(names, str(there / "data.jsonl"), root / "out", console=Console(quiet=True),
                          settings={"batch_tokens": 2000}, **further)


def test_a_series_is_its_comparisons_of_neighbours_and_with_the_first(there, tmp_path, frames, series):
    root, table = series
    names = checkpoints_of(str(root / "run"))
    assert [Path(n).name for n in names] == ["step=000009", "step=000010", "step=000100"]
    at = table.set_index(["index", "since", "metric"])["response"]
    alone = {}
    for i, j in ((0, 1), (1, 2), (0, 2)):
        comparison = Comparison(names[i], names[j], str(there / "data.jsonl"), batch_tokens=2000)
        found = measure_volatility(comparison, tmp_path / f"{i}{j}", console=Console(quiet=True))["summary"]
        alone[i, j] = found.set_index("metric")
    for (j, since), pair in {(1, "previous"): (0, 1), (1, "first"): (0, 1), (2, "previous"): (1, 2),
                             (2, "first"): (0, 2)}.items():
        pd.testing.assert_series_equal(at[j, since], alone[pair]["response"], check_names=False)
        floor = table.set_index(["index", "since", "metric"])["noise_floor"][j, since]
        pd.testing.assert_series_equal(floor, alone[pair]["noise_floor"], check_names=False)
    assert at[2, "first", "expert_change_rate"] > at[1, "first", "expert_change_rate"] > 0
    whole = frames["summary"].set_index("metric")["response"]
    assert at[1, "first", "expert_change_rate"] == pytest.approx(whole["expert_change_rate"])
    assert not list((root / "out").glob(".first*")) and not list((root / "out").rglob("traces"))


def test_a_series_goes_on_and_grows_without_looking_again(there, series, tmp_path, monkeypatch, capsys):
    root, table = series
    shutil.copytree(root, tmp_path / "again")
    pairs = {f: f.stat().st_mtime_ns for f in (tmp_path / "again" / "out").glob("*/summary.parquet")}
    monkeypatch.setattr(Observer, "observe", lambda *_: pytest.fail("a finished pair is looked at again"))
    names = checkpoints_of(str(root / "run"))
    pd.testing.assert_frame_equal(measured(there, tmp_path / "again", names), table)
    assert pairs == {f: f.stat().st_mtime_ns for f in pairs} and len(pairs) == 3
    where = str(tmp_path / "again" / "out")
    arguments = ["--data", str(there / "data.jsonl"), "--batch-tokens", "2000", "--out", where]
    assert cli.main(["checkpoint", "compare", str(root / "run"), *arguments]) == 0
    out = capsys.readouterr().out
    assert "step=000100" in out and (tmp_path / "again/out/series.svg").exists()
    monkeypatch.undo()
    seen = []
    observe = Observer.observe
    monkeypatch.setattr(Observer, "observe", lambda self, batch, reference=None: seen.append(
        reference is None) or observe(self, batch, reference))
    grown = measured(there, tmp_path / "again", [*names, str(there / "before")])
    assert grown["index"].max() == 3 and len(list((tmp_path / "again" / "out").glob("*-*"))) == 5
    batches = len(seen) // 4
    assert seen.count(True) == 2 * batches, "routes of the first and of the third, once each"
    assert grown.set_index(["index", "since", "metric"])["response"][3, "first", "expert_change_rate"] == 0


def test_what_is_kept_of_the_first_checkpoint_is_not_taken_for_another_that_came_in_its_place(
        there, series, tmp_path, monkeypatch):
    names = [str(tmp_path / name) for name in ("first", "second", "third")]
    for name, source in zip(names, ("after", "before", "after"), strict=True):
        shutil.copytree(there / source, name)
    with monkeypatch.context() as patch:
        patch.setattr(pd, "concat", lambda *_, **__: pytest.fail("killed"))
        patch.setattr(shutil, "rmtree", lambda folder, **_: None)
        with pytest.raises(pytest.fail.Exception, match="killed"):
            measured(there, tmp_path, names)
    shutil.rmtree(names[0])
    shutil.copytree(there / "before", names[0])
    for pair in (tmp_path / "out").glob("00-*"):  # as the refusal of another comparison says
        shutil.rmtree(pair)
    at = measured(there, tmp_path, names).set_index(["index", "since", "metric"])["response"]
    assert at[1, "first", "expert_change_rate"] == 0 < at[2, "first", "expert_change_rate"]
    assert not list((tmp_path / "out").glob(".first*"))


def test_sums_that_were_damaged_after_a_kill_are_named(there, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(measure.tables, "write", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            compare(there, tmp_path / "out")
    for name, content in (("change", b""), ("noise", (tmp_path / "out/sums/noise.safetensors").read_bytes()[:-9])):
        file = tmp_path / "out" / "sums" / f"{name}.safetensors"
        file.write_bytes(content)
        with pytest.raises(RunError, match=f"{name}.safetensors is damaged .*Delete it"):
            compare(there, tmp_path / "out")
        file.unlink()
    assert compare(there, tmp_path / "out")["summary"]["response"].notna().any()


def test_a_folder_that_another_process_writes_is_refused_and_left_as_it_is(there, tmp_path):
    names = [str(there / "before"), str(there / "after"), str(tmp_path / "third")]
    shutil.copytree(there / "after", names[2])
    with Lock(tmp_path / "pair" / "lock"), pytest.raises(Held, match="another process is running .*pair"):
        compare(there, tmp_path / "pair")
    with Lock(tmp_path / "out" / "lock"), pytest.raises(Held, match="another process is running .*out"):
        measured(there, tmp_path, names)
    for folder in ("pair", "out"):
        assert {file.stem for file in (tmp_path / folder).iterdir()} == {"lock"}


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


@pytest.mark.parametrize(("name", "step"), [
    ("runs/a/checkpoints/step=20", 20), ("global_step_200", 200), ("checkpoint-1500", 1500), ("iter_0000100", 100),
    ("step500-merged", 500), ("7", 7), ("model-v2", 2), ("Qwen3-30B-A3B", None), ("Qwen2.5-7B", None), ("base", None)])
def test_a_step_is_read_from_a_name_and_a_size_is_none(name, step):
    assert step_of(name) == step


def test_what_is_no_series_is_refused(there, tmp_path, capsys):
    with pytest.raises(ConfigError, match="contains no checkpoint .*hf_checkpoints"):
        checkpoints_of(str(tmp_path))
    assert checkpoints_of(str(there / "before")) == [str(there / "before")]
    assert checkpoints_of("somebody/model") == ["somebody/model"]
    with pytest.raises(ConfigError, match="three different checkpoints or more"):
        measured(there, tmp_path, [str(there / n) for n in ("before", "after", "before")])
    data = ["--data", str(there / "data.jsonl")]
    assert cli.main(["checkpoint", "compare", str(there / "before"), *data]) == 2
    assert "is one checkpoint" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other").touch()
    with pytest.raises(RunError, match="is not empty"):
        measured(there, tmp_path, [str(there / "before"), str(there / "after"), "third"])


def test_a_finished_comparison_is_found_under_any_spelling_of_its_paths(there, tmp_path, frames, monkeypatch):
    compare(there, tmp_path / "out")
    monkeypatch.chdir(there)
    manifest = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert manifest["before"] == str(there / "before") and manifest["data"] == str(there / "data.jsonl")
    monkeypatch.setattr(Observer, "observe", lambda *_: pytest.fail("it is finished"))
    measure_volatility(Comparison("before", "after", "data.jsonl", batch_tokens=200), tmp_path / "out")


# ---------------------------------------------------------------------- what it says of the responses
@pytest.fixture(scope="module")
def scored(there, tmp_path_factory):
    """A comparison that scores the responses, and its folder."""
    out = tmp_path_factory.mktemp("ratios") / "out"
    return compare(there, out, ratios=True), out


def log_ratios(there, order):
    """log r of every response token, lines in `order`: naturally, and with the routes of before; each by itself, all
    logits at once."""
    before, after = (load(ModelConfig(name=str(there / name)), 0) for name in ("before", "after"))
    texts = Texts(there / "data.jsonl", before.tokenizer, max_tokens=2048, batch_tokens=1)
    found = {}
    for batch in texts.batches():
        def said(model, batch=batch):
            with torch.no_grad():
                logits = model(batch.tokens).logits.double()
            return [logits[0, t - 1].log_softmax(-1)[batch.tokens[0, t]].item()
                    for t in range(1, batch.tokens.shape[1]) if batch.response_mask[0, t]]

        with record_routing(before.model) as recording:
            old = np.array(said(before.model))
        natural = np.array(said(after.model))
        with replay_routing(after.model, recording.trace(batch.tokens)):
            replayed = np.array(said(after.model))
        found[batch.lines[0]] = natural - old, replayed - old
    return (np.concatenate(x) for x in zip(*(found[line] for line in order), strict=True))


def test_ess_and_kl_are_those_of_single_lines_naturally_and_replayed(there, scored):
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


def test_ratios_are_of_their_tokens_whatever_the_batches_and_kills(there, tmp_path, scored, monkeypatch):
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0.0)
    forward, calls = Observer._forward, []

    def dies(self, *arguments):
        calls.append(1)
        if len(calls) > 9:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Observer, "_forward", dies)
        compare(there, tmp_path / "out", ratios=True, batch_tokens=300)
    again = compare(there, tmp_path / "out", ratios=True, batch_tokens=300)
    whole, mine = (x["summary"].set_index("metric")["response"].filter(like="token_") for x in (scored[0], again))
    pd.testing.assert_series_equal(whole, mine, rtol=1e-5)


def test_ratios_are_printed_where_responses_were_scored(there, scored, capsys):
    arguments = ("checkpoint", "compare", str(there / "before"), str(there / "after"),
                 "--data", str(there / "data.jsonl"), "--batch-tokens", "200", "--ratios", "--out", str(scored[1]))
    assert cli.main(list(arguments)) == 0
    out = " ".join(capsys.readouterr().out.split())
    summary = scored[0]["summary"].set_index("metric")["response"]
    for name in measure.tables.RATIOS:
        assert f"{name} {summary[name]:.2g} " in out
    with pytest.raises(RunError, match="ratios: True there, False now"):
        compare(there, scored[1])
