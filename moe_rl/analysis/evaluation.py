"""Checkpoints evaluated on benchmarks: `moe-rl checkpoint evaluate CHECKPOINT … --data FILE.jsonl -k 16`.

out/
    evaluation.json                          settings, versions, digests of problems, scorers and checkpoints
    samples/<checkpoint>/<benchmark>.jsonl   a line per problem, with every completion: what a kill leaves, too
    evaluations.parquet, summary.parquet     a row per completion; per benchmark, checkpoint and metric
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from moe_rl.analysis.benchmarks import summarise
from moe_rl.analysis.folders import (
    check_checkpoint,
    check_new,
    check_same,
    fingerprint,
    make_absolute,
    progress,
    step_of,
    versions,
)
from moe_rl.build import ENGINES, build_engine
from moe_rl.config import RunConfig, plain
from moe_rl.errors import ConfigError
from moe_rl.models.load import load, no_progress_bars
from moe_rl.models.tokens import encode_prompts
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import evaluate
from moe_rl.registry import Component, check_component, lookup
from moe_rl.rollouts.engine import RolloutEngine, check_request, context_length
from moe_rl.rollouts.hf import HFEngine
from moe_rl.seeds import HELD_OUT
from moe_rl.storage import folder as runs
from moe_rl.storage.links import require_inside
from moe_rl.storage.lock import Lock
from moe_rl.storage.provenance import DATA, inputs_of
from moe_rl.tasks.base import AnyTask, held_out, load_task, once
from moe_rl.tasks.jsonl import JsonlTask
from moe_rl.tasks.matching import verified
from moe_rl.trainer import sampling_of
from moe_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moe_rl.rollouts.engine import Sampler

Engine = tuple["Sampler", "PreTrainedTokenizerBase", int | None]
"""What samples, with its tokenizer and the length of its context."""
MANIFEST = "evaluation.json"
SCORERS = ("math-verify", "reasoning-gym")
"""Packages that may decide rewards."""
ROWS = 512
"""Completions that are sampled in one call, as `HFEngine` holds them in one pass."""


@dataclass(frozen=True)
class Benchmark:
    """A task and the problems that are asked, in their order."""

    name: str
    task: AnyTask
    prompts: Sequence[Prompt]
    scored: str
    """The task as it is written, with the options that decide its rewards; of a file without its place."""
    inputs: Mapping[str, str]
    """Digests of code and files of one's own that the task is made from, by name; of a file of questions, `digest`."""

    @property
    def entry(self) -> dict[str, Any]:
        """Its part of a folder's manifest."""
        texts = json.dumps([(prompt.text, prompt.answer) for prompt in self.prompts])
        digest = hashlib.sha256(texts.encode()).hexdigest()
        return {"digest": digest, "problems": len(self.prompts), "scored": self.scored, "inputs": dict(self.inputs)}


@dataclass(frozen=True)
class Plan:
    """How problems are sampled. `run` has the model's device and dtype, the engine, sampling and seed."""

    run: RunConfig
    samples: int
    """Completions that are drawn of every problem: the k of avg@k."""
    greedy: bool = False
    """Whether the greedy completion is sampled, too."""

    @property
    def block(self) -> int:
        """Problems of one call of the engine, which an interruption loses."""
        return max(1, ROWS // self.samples)

    def settings(self) -> dict[str, Any]:
        """All that decides the numbers, beside checkpoints and problems."""
        run, router = self.run, self.run.model.router_dtype
        settings = {
            "samples": self.samples,
            "greedy": self.greedy,
            "at_once": self.block,
            "seed": run.seed,
            "sampling": asdict(sampling_of(run)),
            "engine": plain(run.engine),
            "dtype": run.model.dtype,
        }
        return json.loads(json.dumps(settings | ({} if router is None else {"router_dtype": router})))


def benchmark(use: Component, problems: int | None = None) -> Benchmark:
    """The benchmark of a task. A file gives each of its questions once, in the order of the lines, or with `problems`
    those that a run with as many `eval_prompts` holds out; any other task gives these. Raises ConfigError for a file of
    fewer questions."""
    task, (kind, _, name) = load_task(use), use.name.partition(":")
    inputs = {} if use.name.startswith(DATA) else inputs_of({"task": plain(use)})
    if isinstance(task, JsonlTask):
        scored = str(Component(kind, **{"match": task.match} | dict(use.options)))
        if problems is not None and problems > len(task):
            raise ConfigError(f"--problems {problems} is too many: {name} has {len(task)} different questions")
        asked = once(task.lines) if problems is None else held_out(task, problems)
        return Benchmark(use.options.get("benchmark", Path(name).stem), task, asked, scored, inputs)
    if problems is None:
        raise ConfigError(f"{use.name} can give any number of prompts. Choose the number with --problems.")
    return Benchmark(re.sub(r"[^\w.-]+", "_", name or kind), task, held_out(task, problems), str(use), inputs)


def measure_evaluations(
    checkpoints: Sequence[str],
    benchmarks: Sequence[Benchmark],
    plan: Plan,
    out: Path,
    *,
    trust_remote_code: bool = False,
) -> pd.DataFrame:
    """Evaluate checkpoints, or go on with it: a kill loses the problems in flight. Writes the tables into `out` and
    returns the summary. Further checkpoints and benchmarks may be added to a folder later.

    Raises ConfigError or RunError, before anything is sampled, for a checkpoint that cannot be read, an engine that
    does not fit, two benchmarks of one name, and a folder that holds other settings, problems, scorers or checkpoints,
    or that another process is writing.
    """
    names = [make_absolute(name) for name in checkpoints]
    _check(names, [b.name for b in benchmarks], plan)
    folders = {
        name: out / "samples" / f"{_safe(Path(name).name)}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        for name in names
    }
    files = {(name, b.name): folders[name] / f"{b.name}.jsonl" for name in names for b in benchmarks}
    require_inside(out)
    with Lock(out / runs.LOCK), progress() as bars:
        left = {
            (name, b.name): len(b.prompts) - count_whole(files[name, b.name], plan.block, len(b.prompts))[0]
            for name in names
            for b in benchmarks
        }
        claim(out, _wanted(names, benchmarks, plan), complete=not any(left.values()))
        for name in names:
            todo = [b for b in benchmarks if left[name, b.name]]
            if not todo:
                continue
            folders[name].mkdir(parents=True, exist_ok=True)
            with engine(name, plan.run, folders[name] / "engine", trust_remote_code) as (sampler, tokenizer, context):
                asked = [list(encode_prompts(b.prompts, tokenizer)) for b in todo]
                for prompts in asked:
                    check_request(prompts, plan.samples, sampling_of(plan.run), context)
                for b, prompts in zip(todo, asked, strict=True):
                    bar = bars.add_task(
                        f"{Path(name).name} {b.name}", total=len(prompts), completed=len(prompts) - left[name, b.name]
                    )
                    ask(sampler, b.task, prompts, plan, files[name, b.name], partial(bars.advance, bar))
        rows = pd.DataFrame(
            [
                {"checkpoint": name, "step": step_of(name), "benchmark": b.name, **row}
                for b in benchmarks
                for name in names
                for row in read_rows(files[name, b.name])
            ]
        )
        rows["vote"] = rows["vote"].astype("float64")
        summary = summarise(rows)
        for table, frame in (("evaluations", rows), ("summary", summary)):
            frame.to_parquet(out / f"{table}.parquet", index=False)
    return summary


@contextmanager
def engine(name: str, run: RunConfig, folder: Path, trust: bool) -> Iterator[Engine]:
    """What samples from a checkpoint, in the engine that the run's settings name, given the checkpoint's weights."""
    run = run.replace(**{"model.name": name})
    with no_progress_bars():
        loaded = load(run.model, 0, trust)
    if run.engine == Component("hf", routes="off"):
        sampler: RolloutEngine = HFEngine(loaded.model, loaded.tokenizer, record_routes=False)
    else:
        policy = HFPolicy(loaded.model, run.optimizer, temperature=run.temperature)
        sampler = build_engine(run, loaded, policy, folder, spread=False)
        sampler.load(policy.weights())
    try:
        yield sampler, loaded.tokenizer, context_length(loaded.model.config)
    finally:
        sampler.close()


def ask(
    sampler: Sampler, task: AnyTask, prompts: list[Prompt], plan: Plan, file: Path, done: Callable[[int], None]
) -> None:
    """Append the lines that `file` lacks, those of one call in one piece. Sampling seeds depend only on the problem's
    index, so checkpoints and resumed evaluations use the same ones."""
    start, size = count_whole(file, plan.block, len(prompts))
    if file.exists():
        os.truncate(file, size)
    for first in range(start, len(prompts), plan.block):
        part, lines, key = prompts[first : first + plan.block], [], (plan.run.seed, HELD_OUT, first // plan.block)
        completions = evaluate(
            sampler, task, part, sampling_of(plan.run), key=key, samples=plan.samples, greedy=plan.greedy, first=first
        )
        for i, prompt in enumerate(part, start=first):
            samples = [row | {"text": rollout.text} for row, rollout in completions if row["problem"] == i]
            if isinstance(task, JsonlTask) and task.match != "exact" and importlib.util.find_spec("math_verify"):
                samples = [
                    sample | {"math_verify": float(verified(prompt.answer or "", sample["text"]))} for sample in samples
                ]
            line = {"problem": i, "question": prompt.text, "answer": prompt.answer, "samples": samples}
            lines.append(json.dumps(line) + "\n")
        with file.open("a", encoding="utf-8") as out:
            out.write("".join(lines))
            out.flush()
            os.fsync(out.fileno())
        done(len(part))


# ---------------------------------------------------------------------- the folder
def claim(out: Path, wanted: Mapping[str, Any], complete: bool) -> None:
    """Write the manifest, or add benchmarks and checkpoints to it. Raises RunError if the folder holds anything else,
    but for the versions where it is `complete`, so that nothing is to be sampled."""
    there = runs.read_json(out / MANIFEST, tuple(wanted))
    if there is None:
        check_new(out)
    if there is None or not any(out.glob("samples/*/*.jsonl")):  # nothing was sampled yet
        there = dict(wanted)
    for part, new in wanted.items():
        if not (complete and part == "versions"):
            keys = new.keys() if part in ("settings", "versions") else there[part].keys() & new.keys()
            old = {key: there[part].get(key) for key in keys}
            check_same(out, f"an evaluation with other {part}", old, {key: new[key] for key in keys})
    if not complete:
        out.mkdir(parents=True, exist_ok=True)
        runs.write_json(out / MANIFEST, {part: there[part] | wanted[part] for part in wanted})


def count_whole(file: Path, block: int, problems: int) -> tuple[int, int]:
    """How many problems a file has to the end, and in how many bytes: the rest is what a kill left of others."""
    if not file.exists():
        return 0, 0
    lines = file.read_bytes().splitlines(keepends=True)
    complete = min(problems, sum(line.endswith(b"\n") for line in lines))
    complete = complete if complete == problems else complete // block * block
    return complete, sum(map(len, lines[:complete]))


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of the table `evaluations`, but for checkpoint and benchmark, of a complete file."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            for sample in json.loads(line)["samples"]:
                yield {key: value for key, value in sample.items() if key != "text"}


# ---------------------------------------------------------------------- small parts
def _check(names: Sequence[str], benchmarks: Sequence[str], plan: Plan) -> None:
    if twice := {name for name in (*names, *benchmarks) if (*names, *benchmarks).count(name) > 1}:
        raise ConfigError(f"{sorted(twice)[0]} was given twice. Give each checkpoint and each benchmark once.")
    if plan.samples < 1:
        raise ConfigError(f"-k {plan.samples} must be at least one")
    for name in names:
        check_checkpoint(name)
    check_component(lookup("engine", plan.run.engine, ENGINES), plan.run)


def _wanted(names: Sequence[str], benchmarks: Sequence[Benchmark], plan: Plan) -> dict[str, Any]:
    """The manifest of a folder that holds this evaluation."""
    scorers = {name: metadata.version(name) for name in SCORERS if any(metadata.distributions(name=name))}
    return {
        "settings": plan.settings(),
        "versions": versions() | {"scorers": scorers},
        "benchmarks": {b.name: b.entry for b in benchmarks},
        "checkpoints": {name: fingerprint(name) for name in names},
    }


def _safe(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", name)
