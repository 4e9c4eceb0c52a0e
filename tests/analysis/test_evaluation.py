"""Checkpoints on benchmarks, as a user would: files, a task of somebody else's data, a curve, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from moe_rl import cli
from moe_rl.errors import ConfigError
from moe_rl.models.load import save_checkpoint
from moe_rl.models.tokens import byte_tokenizer, encode_prompts
from moe_rl.recorder import evaluate, evaluation_rows
from moe_rl.registry import Component
from moe_rl.rollouts.hf import HFEngine
from moe_rl.seeds import HELD_OUT
from moe_rl.storage.folder import LOCK
from moe_rl.storage.lock import Lock
from moe_rl.tasks.base import load_task, votes_of
from moe_rl.types import Prompt, Sampling
from tests.conftest import build, perturb
from tests.even_task import EvenCharacters

SIZES = {"vocab_size": 258, "eos_token_id": 256, "pad_token_id": 257, "max_position_embeddings": 1024}
SETTINGS = ["-k", "4", "--max-tokens", "3", "--match", "exact"]


def checkpoint(folder: Path, scale: float) -> Path:
    model = build("qwen3_moe", **SIZES)
    perturb(model, scale)
    with torch.no_grad():
        model.lm_head.weight[:, :] *= 3  # surer of what it says, so that completions repeat
    save_checkpoint(model, byte_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """Three checkpoints of one run, and two files of problems, some of which the first one solves now and then."""
    folder = tmp_path_factory.mktemp("there")
    for step, scale in ((5, 0.0), (10, 0.02), (20, 0.3)):
        path = checkpoint(folder / "run" / "checkpoints" / f"step={step:06d}", scale)
        if step == 5:
            first = HFEngine(build("qwen3_moe", **SIZES), byte_tokenizer(), record_routes=False)
            first.model.load_state_dict(load(path).state_dict())
    for name, count in (("aime", 5), ("math", 3)):
        prompts = encode_prompts([Prompt(f"{name} {i}?") for i in range(count)], byte_tokenizer())
        drawn = [first.generate([p], 4, key=(0, HELD_OUT, i), sampling=Sampling(1.0, 3)) for i, p in enumerate(prompts)]
        answers = [next(filter(None, (r.text.strip() for r in said)), "0") for said in drawn]
        lines = [{"question": p.text, "answer": a} for p, a in zip(prompts, answers, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def load(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


@pytest.fixture(scope="module", autouse=True)
def one_problem_at_a_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_rl.analysis.evaluation.ROWS", 4)
        yield


def command(there: Path, out: Path, *more: str) -> list[str]:
    words = f"{there}/run --data {there}/aime.jsonl --data {there}/math.jsonl --out {out}".split()
    return ["checkpoint", "evaluate", *words, *SETTINGS, *more]


@pytest.fixture(scope="module")
def done(there, tmp_path_factory):
    out = tmp_path_factory.mktemp("done") / "out"
    assert cli.main(command(there, out, "--greedy")) == 0
    return out


def contents(out: Path) -> dict[str, bytes]:
    return {str(f.relative_to(out)): f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file() and f.stem != LOCK}


def test_three_checkpoints_of_a_run_are_a_curve(done, there):
    rows, summary = (pd.read_parquet(done / f"{name}.parquet") for name in ("evaluations", "summary"))
    assert len(rows) == 3 * (5 + 3) * (4 + 1) and rows["step"].unique().tolist() == [5, 10, 20]
    assert rows["reward"].isin([0, 1]).all() and (rows[rows["step"] == 5].groupby("problem")["reward"].max() == 1).all()
    shares = {"avg@4", "pass@2", "pass@4", "maj@4", "greedy", "truncated"}
    assert set(summary["metric"]) == shares | {"reward", "response_tokens"}
    of = rows[(rows["benchmark"] == "aime") & (rows["step"] == 10) & (rows["sample"] > 0)]
    found = summary.set_index(["benchmark", "checkpoint", "metric"])
    at = ("aime", of["checkpoint"].iloc[0])
    assert found.loc[(*at, "avg@4"), "mean"] == pytest.approx(of["reward"].mean())
    assert found.loc[(*at, "pass@4"), "mean"] == of.groupby("problem")["reward"].max().mean()
    assert found.loc[(*at, "truncated"), "mean"] == of["truncated"].mean() > 0
    settings = json.loads((done / "evaluation.json").read_text())["settings"]
    assert settings["sampling"]["temperature"] == 1.0 and settings["sampling"]["max_new_tokens"] == 3


def test_completions_are_kept_and_rewarded_as_the_task_does(done, there):
    task = load_task("jsonl:" + str(there / "aime.jsonl"))
    file = next(done.glob("samples/step=000010-*/aime.jsonl"))
    for i, line in enumerate(map(json.loads, file.read_text().splitlines())):
        prompt, drawn = task.lines[i], line["samples"][1:]
        assert (line["problem"], line["question"], line["answer"]) == (i, prompt.text, prompt.answer)
        assert [s["sample"] for s in line["samples"]] == [0, 1, 2, 3, 4] and line["samples"][0]["vote"] is None
        assert [s["reward"] for s in drawn] == [float(s["text"].strip() == prompt.answer.strip()) for s in drawn]
        texts = [s["text"].strip() for s in drawn]
        assert [s["vote"] for s in drawn] == [1 + texts.index(text) for text in texts]


def test_the_same_command_again_samples_nothing_and_one_from_scratch_is_equal(done, there, tmp_path, monkeypatch):
    again = tmp_path / "again"
    assert cli.main(command(there, again, "--greedy")) == 0
    assert contents(again) == contents(done)
    monkeypatch.setattr("moe_rl.analysis.evaluation.engine", None)
    before = contents(done)
    assert cli.main(command(there, done, "--greedy")) == 0 and contents(done) == before
    said = json.loads((again / "evaluation.json").read_text())
    assert {entry["scored"] for entry in said["benchmarks"].values()} == {"jsonl(match='exact')"}


def test_a_kill_loses_at_most_the_problem_in_flight_and_the_rest_ends_identical(done, there, tmp_path):
    """Killed for good after the third problem of the second checkpoint, in the middle of writing the fourth."""
    out = tmp_path / "out"
    code = f"""if 1:
        import os, signal
        import torch; torch.set_num_threads(1)
        import moe_rl.analysis.evaluation as e
        from moe_rl import cli
        whole, asked, e.ROWS = e.evaluate, [], 4
        def evaluate(*a, **k):
            asked.append(k["first"])
            if len(asked) == 8 + 4:
                parts = [os.path.join(r, f) for r, _, fs in os.walk({str(out / "samples")!r}) for f in fs]
                open(max(parts, key=os.path.getmtime), "a").write('{{"problem": 3, "question": "half of')
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*a, **k)
        e.evaluate = evaluate
        cli.main({command(there, out, "--greedy")!r})
    """
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    lines = [len(f.read_bytes().splitlines()) for f in out.rglob("*.jsonl")]
    assert sorted(lines) == [3, 4, 5] and not (out / "summary.parquet").exists()
    assert cli.main(command(there, out, "--greedy")) == 0
    assert contents(out) == contents(done)


def test_two_at_once_do_not_write_into_one_folder(done, there, tmp_path, capsys):
    with Lock(tmp_path / LOCK):  # of one that has not asked anything yet
        assert cli.main(command(there, tmp_path)) == 2
    assert {file.stem for file in tmp_path.iterdir()} == {LOCK}
    with Lock(done / LOCK):
        assert cli.main(command(there, done, "--greedy")) == 2
    assert "another process is running" in capsys.readouterr().err
    assert cli.main(command(there, done, "--greedy")) == 0


def test_checkpoints_and_files_may_be_added_and_settings_may_not_change(there, tmp_path, capsys):
    out, checkpoints = tmp_path / "out", sorted((there / "run" / "checkpoints").iterdir())
    data = ["--data", str(there / "math.jsonl"), "--out", str(out), *SETTINGS]
    assert cli.main(["checkpoint", "evaluate", str(checkpoints[1]), *data]) == 0
    alone = contents(out / "samples")
    both = [str(path) for path in checkpoints[:2]]
    assert cli.main(["checkpoint", "evaluate", *both, "--data", str(there / "aime.jsonl"), *data]) == 0
    assert alone.items() <= contents(out / "samples").items() and len(contents(out / "samples")) == 4
    assert len(json.loads((out / "evaluation.json").read_text())["checkpoints"]) == 2
    file = next(out.rglob("aime.jsonl"))
    file.write_text(file.read_text() + '{"problem": 5, "half')
    before = contents(out)
    for more, said in (
        (["--temperature", "0.5"], "sampling.temperature: 1.0 there, 0.5 now"),
        (["-k", "2"], "samples"),
        (["--seed", "1"], "seed"),
        (["--match", "math"], "jsonl(match='math')"),
        (["--set", "model.router_dtype=float32"], "router_dtype: None there, 'float32' now"),
    ):
        assert cli.main(["checkpoint", "evaluate", str(checkpoints[1]), *data, *more]) == 2
        assert said in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.parametrize(
    "more, said",
    [
        (["--task", "running_sums"], "--problems"),
        (["--data", "aime.jsonl", "--problems", "6"], "--problems 6"),
        (["--data", "aime.jsonl", "--data", "aime.jsonl"], "given twice"),
        (["--data", "aime.jsonl", "--max-tokens", "2000"], "max_position_embeddings"),
        (["--data", "aime.jsonl", "--set", "temperature=0"], "temperature=0: "),
        (["--task", "corrected_sums", "--problems", "2", "--set", "task.digits=3"], "--set task.digits"),
        (["--data", "aime.jsonl", "--set", "model.name=other"], "--set model.name"),
    ],
)
def test_what_cannot_be_asked_is_refused(there, tmp_path, monkeypatch, capsys, more, said):
    monkeypatch.chdir(there)
    command = ["checkpoint", "evaluate", "run", "--out", str(tmp_path / "out")]
    assert cli.main([*command, *more]) == 2
    assert said in capsys.readouterr().err
    monkeypatch.setattr("moe_rl.analysis.evaluation.engine", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main([*command, "--data", "math.jsonl", "--max-tokens", "3"]) == 130, "and nothing stands in the way"


def test_a_preset_and_a_foreign_folder_are_refused(there, tmp_path, capsys):
    data = ["--data", str(there / "aime.jsonl"), *SETTINGS]
    assert cli.main(["checkpoint", "evaluate", "qwen3_moe-tiny", *data, "--out", str(tmp_path / "a")]) == 2
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    assert cli.main(["checkpoint", "evaluate", str(there / "run"), *data, "--out", str(tmp_path / "b")]) == 2
    assert "is a preset" in (said := capsys.readouterr().err) and "is not empty" in said


# ---------------------------------------------------------------------- scorers
@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder with a task of somebody's own, whose rewards come from a module beside it."""
    (tmp_path / "own_scored.py").write_text(
        "from moe_rl.types import Prompt\nfrom moe_rl.tasks.jsonl import JsonlTask\nfrom own_rule import REWARD\n"
        "class Scored:\n"
        "    def prompts(self, count, seed): return [Prompt(f'q{i}=', answer='a') for i in range(count)]\n"
        "    def reward(self, prompt, completion): return REWARD\n"
        "class Lines(JsonlTask):\n"
        "    def reward(self, prompt, completion): return REWARD\n"
    )
    (tmp_path / "own_rule.py").write_text("REWARD = 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("own_scored", "own_rule"):
        sys.modules.pop(name, None)


def test_a_folder_has_the_rewards_of_one_scorer(there, own, capsys):
    """Else a checkpoint is better than itself by 1 as soon as the reward was edited between the two."""
    first, second = map(str, sorted((there / "run" / "checkpoints").iterdir())[:2])
    out = own / "out"
    rest = ["--task", "own_scored:Scored", "--problems", "3", "-k", "2", "--max-tokens", "3", "--out", str(out)]
    assert cli.main(["checkpoint", "evaluate", first, *rest]) == 0
    assert cli.main(["checkpoint", "evaluate", first, *rest]) == 0
    with (own / "own_scored.py").open("a") as file:
        file.write("# edited\n")
    before = contents(out)
    for names in ([first], [first, second], [second]):
        assert cli.main(["checkpoint", "evaluate", *names, *rest]) == 2
        heard = capsys.readouterr().err
        assert "Scored.inputs.own_scored" in heard
    assert contents(out) == before
    said = json.loads((out / "evaluation.json").read_text())
    assert set(said["benchmarks"]["Scored"]["inputs"]) == {"own_scored"}


def test_a_run_evaluates_by_the_same_code(there):
    """Its means are those of its rows, and its rows those of `evaluate`."""
    path = there / "run" / "checkpoints" / "step=000005"
    engine = HFEngine(load(path), byte_tokenizer(), record_routes=False)
    task = load_task("jsonl:" + str(there / "aime.jsonl"))
    prompts = encode_prompts(task.lines, byte_tokenizer())
    found = evaluation_rows(engine, task, prompts, Sampling(1.0, 3), seed=4, step=7)
    (means,), rows = found["steps"], pd.DataFrame(found["evaluations"])
    assert means["eval_n"] == 5 and set(rows["benchmark"]) == {"held_out"} and set(rows["step"]) == {7}
    for sample, name in ((0, "greedy"), (1, "sampled")):
        assert means[f"eval_exact_{name}"] == rows[rows["sample"] == sample]["reward"].mean()
    again = [row for row, _ in evaluate(engine, task, prompts, Sampling(1.0, 3), key=(4, 1 + 1, 0), samples=3)]
    sampled = [row for row in again if row["sample"] == 1]
    assert [r["reward"] for r in sampled] == rows[rows["sample"] == 1]["reward"].tolist(), "whatever else is drawn"


def test_equal_answers_vote_together():
    assert votes_of(EvenCharacters(), Prompt("?"), ["a", " a\n", "b", "", " "]) == [0, 0, 2, 3, 3]
    own = type("Own", (EvenCharacters,), {"votes": lambda self, prompt, texts: [None] * len(texts)})()
    assert votes_of(own, Prompt("?"), ["a", "b"]) == [None, None]
    for given in ([0], [0, 1, 2], ["a", "b"]):
        wrong = type("Wrong", (EvenCharacters,), {"votes": lambda self, prompt, texts, given=given: given})()
        with pytest.raises(ConfigError, match="Wrong.votes returned .* for 2 completions"):
            votes_of(wrong, Prompt("?"), ["a", "b"])


def test_answers_of_one_value_vote_together(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "What is half of 24?", "answer": "12"}))
    task = load_task(f"jsonl:{tmp_path / 'x.jsonl'}")
    assert task.votes(task.lines[0], ["12", "12 ", "12.0"]) == [0, 0, 2], "exact: text by text"
    task = load_task(Component(f"jsonl:{tmp_path / 'x.jsonl'}", match="math"))
    texts = ["So the answer is 12.", r"\boxed{\frac{1}{2}}", "0.5", "#### 12.0", "", "$1/2$", "13", "x" * 500]
    assert task.votes(task.lines[0], texts) == [0, 1, 1, 0, None, 1, 6, 7]
