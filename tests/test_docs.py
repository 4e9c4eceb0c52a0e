"""What README and docs name is there: files, modules, commands, settings; and their Python runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_rl import cli
from moe_rl.config import Arm, RunConfig, parse_settings
from moe_rl.study.declaration import load_study_file
from tests.conftest import build, perturb, python_block

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "tests" / "benchmarks" / "README.md",
    *(page for folder in ("docs", "studies") for page in sorted((ROOT / folder).rglob("*.md"))),
]
README, DOCS = ROOT / "README.md", ROOT / "docs"
YOURS = {"my_study.py", "mine.py", "progress.json"}


def commands(page: Path, sections: str = "") -> list[list[str]]:
    """The arguments of every moe-rl in its blocks of commands, or in those of the sections of that name."""
    texts = [page.read_text()] if not sections else re.split(r"^##+ ", page.read_text(), flags=re.MULTILINE)
    text = "\n".join(text for text in texts if re.match(sections, text))
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = re.findall(r"^.*?(?:moe-rl|-m moe_rl) (.*)$", blocks, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines if " | " not in line]


COMMANDS = [pytest.param(words, id=f"{p.stem}: {' '.join(words)[:50]}") for p in PAGES for words in commands(p)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text()
    for path in set(re.findall(r"[\w./-]*\w+\.(?:py|md|ipynb)\b", text)) - YOURS:
        beside = any((ROOT / "moe_rl").rglob(path)) if "/" not in path else False
        folders = (page.parent, page.parent.parent, ROOT, ROOT / "moe_rl")
        assert beside or any((folder / path).exists() for folder in folders), path
    for link in re.findall(r"\]\((?!http|#)(.*?)(?:#.*?)?\)", text):
        assert (page.parent / link).exists(), link
    for name in set(re.findall(r"\bmoe_rl(?:\.\w+)+", text)):
        parts = name.split(".")
        file = next(
            f
            for n in range(len(parts), 0, -1)
            for f in [ROOT.joinpath(*parts[:n])]
            if f.is_dir() or f.with_suffix(".py").exists()
        )
        source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
        rest = parts[len(file.relative_to(ROOT).parts) :]
        assert not rest or re.search(rf"\b{rest[0]}\b", source), name


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_understood_with_their_settings(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = cli.parser_of(words).parse_args(words)
    settings = [text for text in getattr(options, "settings", []) if not text.startswith(("launcher.", "verl."))]
    known = bool(settings) and "study" in options and Path(options.study).exists()
    base = load_study_file(options.study).base if known else RunConfig(arm=Arm(name="any"), max_new_tokens=256)
    assert len(parse_settings(base, settings)) == len(settings)


def test_the_arms_of_the_readme_are_read():
    from moe_rl.objectives import advantage_of, objective_of
    from moe_rl.objectives.methods import arm

    table = re.search(r"^\| algorithm \| text \|\n\|.*\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE).group(1)
    found = [text for row in table.splitlines() for text in re.findall(r"`(.*?)`", row)]
    assert all(objective_of(arm(text)) and advantage_of(arm(text)) for text in found) and len(found) > 10


def test_the_first_example_of_the_readme_records_and_replays(monkeypatch, capsys):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: build("olmoe", vocab_size=1000))
    exec(python_block(README.read_text(), "replay_routing").replace("lr=1e-5", "lr=1e-2"), {})
    assert 0 < float(capsys.readouterr().out) < 1, "routing has changed"


def test_the_monitor_of_the_readme_prints_a_row(tokens, capsys):
    model = build("qwen3_moe")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names = {
        "model": model,
        "optimizer": optimizer,
        "probe": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
    }
    names["train_one_step"] = lambda: model(tokens).logits.log_softmax(-1)[..., 0].mean().backward()
    exec(python_block(README.read_text(), "moe_rl.monitor"), names)
    assert "'expert_change_rate': " in capsys.readouterr().out


def test_the_first_steps_record_a_change_and_replay_all_of_it(capsys):
    exec(python_block((DOCS / "quickstart.md").read_text(), "replay_routing"), {})
    shape, change, coverage = capsys.readouterr().out.splitlines()
    assert shape == "torch.Size([2, 8, 6, 2])" and 0 < float(change) < 1 and coverage == "1.0"


def test_the_tables_of_a_study_are_frames_and_latex(monkeypatch, capsys):
    monkeypatch.chdir(ROOT / "studies")
    exec(python_block((DOCS / "studies.md").read_text(), "to_latex"), {})
    assert "gspo\\_short & lag=2 & $" in (out := capsys.readouterr().out) and "2.0" in out


RUN = {"run", "methods", "plot", "report"}
"""Other commands are run by tests of their own."""
SHOWN = [
    *commands(README),
    *commands(DOCS / "quickstart.md"),
    *commands(DOCS / "studies.md", "Run a study|Read the results|Read responses"),
]
RUN_HERE = [words for words in SHOWN if words[0] in RUN and not YOURS & {*words}]


@pytest.mark.parametrize("words", RUN_HERE, ids=" ".join)
def test_a_command_does_what_its_page_says(words, tmp_path, monkeypatch, capsys):
    """Long ones as a dry run, those that read a study on committed tables."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/routing_replay", "runs/routing_replay-quick"):
        shutil.copytree(ROOT / "studies/routing_replay", folder)
    lines = (json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a in range(20) for b in range(10))
    Path("pairs.jsonl").write_text("\n".join(lines))
    words = [*words, *["--dry-run"] * (words[0] == "run" and "--dry-run" not in words)]
    if words[0] in ("plot", "report"):  # as users have it, without the types that these tests check
        done = subprocess.run([sys.executable, "-m", "moe_rl", *words], env=os.environ | {"PYTHONPATH": str(ROOT)})
        suffix = "pdf" if "--style" in words else "svg"
        written = {"plot": f"figures/learning.{suffix}", "report": "report.html"}[words[0]]
        assert done.returncode == 0 and (Path(words[1]) / written).exists()
        return
    assert cli.main(words) == 0
    said = {"run": "steps to go", "methods": "source:"}
    assert said[words[0]] in capsys.readouterr().out


def test_the_page_of_a_response_reads_what_the_documented_block_writes(tokens, tmp_path, monkeypatch):
    from moe_rl.analysis.response_page import write_response_page
    from moe_rl.routing import RoutingTrace

    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/checkpoints.md").read_text()
    block = python_block(page, "record_routing")
    mask = torch.ones_like(tokens).bool()
    names = {
        "model": build("qwen3_moe"),
        "tokens": tokens,
        "attention_mask": mask,
        "response_mask": torch.arange(tokens.shape[1]).expand_as(tokens) >= 4,
    }
    exec(block, names)
    beside = RoutingTrace.load_beside("before.safetensors")
    assert beside["gates"].shape == names["routes"].ids().shape and beside["response"].sum() == 4 * 5
    perturb(names["model"])
    exec(block.replace("before", "after"), names)
    write_response_page([Path("before.safetensors"), Path("after.safetensors")], Path("page.html"))
    assert Path("page.html").stat().st_size > 10_000
