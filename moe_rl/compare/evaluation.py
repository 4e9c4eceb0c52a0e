"""Checkpoints evaluated on benchmarks: `moe-rl evaluate CHECKPOINT … --data FILE.jsonl -k 16`.

    out/
        evaluation.json                          settings, versions, digests of problems and checkpoints
        samples/<checkpoint>/<benchmark>.jsonl   a line per problem, with every completion: what a kill leaves, too
        evaluations.parquet, summary.parquet     a row per completion; per benchmark, checkpoint and metric
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rl.compare.checkpoints.measure import fingerprint, located
from moe_rl.compare.checkpoints.series import step_of
from moe_rl.config import EngineConfig, RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.evaluate import evaluate
from moe_rl.lookup import Use
from moe_rl.models.checkpoints import check_weights
from moe_rl.models.load import load, no_progress_bars
from moe_rl.models.presets import PRESETS
from moe_rl.models.tokens import encode_prompts
from moe_rl.policies.hf import HFPolicy
from moe_rl.results.benchmarks import summarise
from moe_rl.rollouts.choose import check_engine, engine_of
from moe_rl.rollouts.request import check_request, context_length
from moe_rl.runs import folder as runs
from moe_rl.runs.lease import Lease
from moe_rl.runs.versions import code_version, package_versions
from moe_rl.seeds import HELD_OUT
from moe_rl.tasks.base import AnyTask, held_out, load_task, once
from moe_rl.tasks.jsonl import JsonlTask
from moe_rl.trainer import sampling_of
from moe_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moe_rl.rollouts.base import Sampler

MANIFEST = "evaluation.json"
Engine = tuple["Sampler", "PreTrainedTokenizerBase", int | None]
"""What samples, with its tokenizer and the length of its context."""


@dataclass(frozen=True)
class Benchmark:
    """A task and the problems that are asked, in their order."""

    name: str
    task: AnyTask
    prompts: Sequence[Prompt]
    scored: str
    """The task as it is written, with the options that decide its rewards; of a file without its place."""

    @property
    def digest(self) -> str:
        """Of the questions and answers."""
        texts = json.dumps([(prompt.text, prompt.answer) for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """How every problem is asked. `run` has the model's device and dtype, the engine, sampling and seed."""

    run: RunConfig
    samples: int
    """Completions that are drawn of every problem: the k of avg@k."""
    greedy: bool = False
    """Whether the greedy completion is had, too."""
    at_once: int = 1
    """Problems that an engine is asked at once, and that a kill loses."""

    def settings(self) -> dict[str, Any]:
        """All that decides the numbers, beside checkpoints and problems."""
        run = self.run
        return json.loads(json.dumps({
            "samples": self.samples, "greedy": self.greedy, "at_once": self.at_once, "seed": run.seed,
            "sampling": asdict(sampling_of(run)), "engine": asdict(run.engine), "dtype": run.model.dtype,
            **({} if run.model.router_dtype is None else {"router_dtype": run.model.router_dtype})}))


def benchmark(use: Use, problems: int | None = None) -> Benchmark:
    """The benchmark of a task. Of a file every question is asked, once, in the order of the lines, or with `problems`
    those that a run with as many `eval_prompts` holds out; of any other task these. Raises ConfigError for a file of
    fewer questions."""
    task, (kind, _, name) = load_task(use), use.name.partition(":")
    if isinstance(task, JsonlTask):
        scored = str(Use(kind, **{"match": "exact"} | dict(use.options)))
        if problems is not None and problems > len(task):
            raise ConfigError(f"--problems {problems}: {name} has {len(task)} different questions")
        asked = once(task.lines) if problems is None else held_out(task, problems)
        return Benchmark(Path(name).stem, task, asked, scored)
    if problems is None:
        raise ConfigError(f"{use.name} has no end: say with --problems how many of its prompts are asked")
    return Benchmark(re.sub(r"[^\w.-]+", "_", name or kind), task, held_out(task, problems), str(use))


def measure_evaluations(checkpoints: Sequence[str], benchmarks: Sequence[Benchmark], plan: Plan, out: Path, *,
                        trust_remote_code: bool = False, console: Console | None = None) -> pd.DataFrame:
    """Evaluate checkpoints, or go on with it: a kill loses the problems in flight. Writes the tables into `out` and
    returns the summary. Further checkpoints and benchmarks may be added to a folder later.

    Raises ConfigError or RunError, before anything is sampled, for a checkpoint that cannot be read, an engine that
    does not fit, two benchmarks of one name, and a folder that holds other settings, problems or checkpoints, or that
    another process is writing.
    """
    names = [located(name) for name in checkpoints]
    _check(names, [b.name for b in benchmarks], plan)
    folders = {name: out / "samples" / f"{_safe(Path(name).name)}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
               for name in names}
    files = {(name, b.name): folders[name] / f"{b.name}.jsonl" for name in names for b in benchmarks}
    with Lease(out / runs.LEASE), _progress(console or Console(stderr=True)) as bars:
        left = {(name, b.name): len(b.prompts) - resumed(files[name, b.name], plan.at_once, len(b.prompts))[0]
                for name in names for b in benchmarks}
        _claim(out, names, benchmarks, plan, complete=not any(left.values()))
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
                    bar = bars.add_task(f"{Path(name).name} {b.name}", total=len(prompts),
                                        completed=len(prompts) - left[name, b.name])
                    ask(sampler, b.task, prompts, plan, files[name, b.name], partial(bars.advance, bar))
        rows = pd.DataFrame([{"checkpoint": name, "step": step_of(name), "benchmark": b.name, **row}
                             for b in benchmarks for name in names for row in _rows(files[name, b.name])])
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
    if run.engine == EngineConfig(routes="off"):
        sampler = engine_of(run, loaded, _never, folder)
    else:
        policy = HFPolicy(loaded.model, run.optimizer, temperature=run.temperature)
        sampler = engine_of(run, loaded, policy.score, folder)
        sampler.load(policy.weights())
    try:
        yield sampler, loaded.tokenizer, context_length(loaded.model.config)
    finally:
        sampler.close()


def ask(sampler: Sampler, task: AnyTask, prompts: list[Prompt], plan: Plan, file: Path,
        done: Callable[[int], None]) -> None:
    """Write the lines that `file` lacks, those of `at_once` problems in one piece. The noise of a problem depends on
    its place alone: checkpoints share it, and so does whoever goes on."""
    start, size = resumed(file, plan.at_once, len(prompts))
    if file.exists():
        os.truncate(file, size)
    for first in range(start, len(prompts), plan.at_once):
        part, lines, key = prompts[first : first + plan.at_once], [], (plan.run.seed, HELD_OUT, first // plan.at_once)
        found = evaluate(sampler, task, part, sampling_of(plan.run), key=key, samples=plan.samples, greedy=plan.greedy,
                         first=first)
        for i, prompt in enumerate(part, start=first):
            samples = [row | {"text": rollout.text} for row, rollout in found if row["problem"] == i]
            line = {"problem": i, "question": prompt.text, "answer": prompt.answer, "samples": samples}
            lines.append(json.dumps(line) + "\n")
        with file.open("a") as out:
            out.write("".join(lines))
            out.flush()
            os.fsync(out.fileno())
        done(len(part))


def resumed(file: Path, at_once: int, problems: int) -> tuple[int, int]:
    """How many problems a file has to the end, and in how many bytes: the rest is what a kill left of others. Raises
    RunError for a file that holds anything else."""
    if not file.exists():
        return 0, 0
    lines = file.read_bytes().splitlines(keepends=True)
    whole = sum(line.endswith(b"\n") for line in lines)
    whole = whole if whole == problems else whole // at_once * at_once
    for i, line in enumerate(lines[:whole]):
        try:
            found = json.loads(line)["problem"]
        except (ValueError, KeyError, TypeError):
            found = None
        if found != i:
            raise RunError(f"{file}, line {i + 1}, is not problem {i}: the file was damaged; remove it, and its "
                           "problems are asked again")
    return whole, sum(map(len, lines[:whole]))


def _check(names: Sequence[str], benchmarks: Sequence[str], plan: Plan) -> None:
    for what, given in (("checkpoint", names), ("benchmark", benchmarks)):
        if twice := {name for name in given if given.count(name) > 1}:
            raise ConfigError(f"the {what} {sorted(twice)[0]} was given twice; each needs a name of its own")
    if plan.samples < 1 or plan.at_once < 1:
        raise ConfigError(f"-k {plan.samples}, --at-once {plan.at_once}: at least one of each is needed")
    for name in names:
        if name in PRESETS:
            raise ConfigError(f"{name!r} is a preset, whose weights are random; give the folder of a checkpoint.")
        check_weights(name)
    check_engine(plan.run)


def _claim(out: Path, names: Sequence[str], benchmarks: Sequence[Benchmark], plan: Plan, complete: bool) -> None:
    """Write what the folder holds, and will. Raises RunError if it holds anything else; of one that has all that is
    asked for, code and packages may have been others."""
    wanted: dict[str, Any] = {
        "settings": plan.settings(), "versions": {"code": code_version("compare"), "packages": package_versions()},
        "benchmarks": {b.name: {"digest": b.digest, "problems": len(b.prompts), "scored": b.scored}
                       for b in benchmarks},
        "checkpoints": {name: fingerprint(name) for name in names}}
    there = runs.read_json(out / MANIFEST, tuple(wanted))
    if there is None and any(file.name != runs.LEASE for file in out.iterdir()):
        raise RunError(f"--out {out} has other files in it; give a folder that is new or empty.")
    if not any(out.glob("samples/*/*.jsonl")):
        there = None  # nothing was sampled under what it says
    before: Mapping[str, Any] = there or wanted
    for part in wanted:
        old, new = before[part], wanted[part]
        if part == "benchmarks":  # older ones do not say how they were scored
            old = {name: {"scored": new.get(name, {}).get("scored"), **entry} for name, entry in old.items()}
        both = old.keys() & new.keys() if part in ("benchmarks", "checkpoints") else new.keys()
        different = runs.differing({key: old.get(key) for key in both}, {key: new[key] for key in both})
        if different and not (part == "versions" and complete):
            listed = "; ".join(f"{key}: {a!r} there, {b!r} now" for key, (a, b) in different.items())
            raise RunError(f"{out} holds an evaluation with other {part} ({listed}); give another --out, or delete it.")
    if there is None or not complete:
        out.mkdir(parents=True, exist_ok=True)
        runs.write_json(out / MANIFEST, wanted | {part: before[part] | wanted[part]
                                                  for part in ("benchmarks", "checkpoints")})


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    with file.open() as lines:
        for line in lines:
            for sample in json.loads(line)["samples"]:
                yield {key: value for key, value in sample.items() if key != "text"}


def _safe(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", name)


def _never(*_: object) -> Any:
    raise AssertionError("an engine that is the model itself is not compared with it")


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(30), MofNCompleteColumn(),
                    TimeRemainingColumn(), console=console)
