"""Checkpoints evaluated on benchmarks: `moe-rl checkpoint evaluate CHECKPOINT … --data FILE.jsonl -k 16`.

    out/
        evaluation.json                          settings, versions, digests of problems, scorers and checkpoints
        samples/<checkpoint>/<benchmark>.jsonl   a line per problem, with every completion: what a kill leaves, too
        evaluations.parquet, summary.parquet     a row per completion; per benchmark, checkpoint and metric
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rl.analysis.benchmarks import summarise
from moe_rl.analysis.folders import (
    check_checkpoint,
    check_new,
    check_same,
    fingerprint,
    make_absolute,
    step_of,
    versions,
)
from moe_rl.build import ENGINES, build_engine
from moe_rl.config import RunConfig, leaves, plain
from moe_rl.errors import ConfigError, RunError
from moe_rl.models.load import load, no_progress_bars
from moe_rl.models.tokens import encode_prompts
from moe_rl.policies.hf import HFPolicy
from moe_rl.recorder import GREEDY, evaluate
from moe_rl.registry import Component, check_component, lookup
from moe_rl.rollouts.engine import RolloutEngine, check_request, context_length
from moe_rl.rollouts.hf import HFEngine
from moe_rl.seeds import HELD_OUT
from moe_rl.storage import folder as runs
from moe_rl.storage.lock import Lock
from moe_rl.storage.provenance import DATA, LIBRARY, inputs_of
from moe_rl.tasks.base import AnyTask, held_out, load_task, once
from moe_rl.tasks.jsonl import JsonlTask
from moe_rl.trainer import sampling_of
from moe_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from moe_rl.rollouts.engine import Sampler

Engine = tuple["Sampler", "PreTrainedTokenizerBase", int | None]
"""What samples, with its tokenizer and the length of its context."""
MANIFEST = "evaluation.json"
GROWING = ("benchmarks", "checkpoints")
"""What there may be more of, by name, than a command asks for."""


def _number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reward": (lambda value: _number(value, 1), "a number in [0, 1]"),
    "response_tokens": (lambda value: _number(value, 2**53), "a number of tokens"),
    "truncated": (lambda value: _number(value, 1) and value in (0, 1), "0 or 1"),
    "vote": (lambda value: value is None or type(value) is int, "a whole number or null"),
}
"""What a completion's row of `evaluations` has beside its place, and what is valid there."""


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
    packages: Mapping[str, str]
    """Versions of the packages that may decide its rewards, by name."""

    @property
    def digest(self) -> str:
        """Of the questions and answers."""
        texts = json.dumps([(prompt.text, prompt.answer) for prompt in self.prompts])
        return hashlib.sha256(texts.encode()).hexdigest()

    @property
    def entry(self) -> dict[str, Any]:
        """What a folder says of it."""
        return {"digest": self.digest, "problems": len(self.prompts), "scored": self.scored,
                "inputs": dict(self.inputs), "packages": dict(self.packages)}


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

    @property
    def numbers(self) -> list[int]:
        """Of a problem's completions, in their order."""
        return [GREEDY] * self.greedy + [*range(1, self.samples + 1)]

    def settings(self) -> dict[str, Any]:
        """All that decides the numbers, beside checkpoints and problems."""
        run = self.run
        return json.loads(json.dumps({
            "samples": self.samples, "greedy": self.greedy, "at_once": self.at_once, "seed": run.seed,
            "sampling": asdict(sampling_of(run)), "engine": plain(run.engine), "dtype": run.model.dtype,
            **({} if run.model.router_dtype is None else {"router_dtype": run.model.router_dtype})}))


def benchmark(use: Component, problems: int | None = None) -> Benchmark:
    """The benchmark of a task. Of a file every question is asked, once, in the order of the lines, or with `problems`
    those that a run with as many `eval_prompts` holds out; of any other task these. Raises ConfigError for a file of
    fewer questions."""
    task, (kind, _, name) = load_task(use), use.name.partition(":")
    inputs = {} if use.name.startswith(DATA) else inputs_of({"task": plain(use)})
    packages = _packages(use, own=bool(inputs))
    if isinstance(task, JsonlTask):
        scored = str(Component(kind, **{"match": "exact"} | dict(use.options)))
        if problems is not None and problems > len(task):
            raise ConfigError(f"--problems {problems} is too many: {name} has {len(task)} different questions")
        asked = once(task.lines) if problems is None else held_out(task, problems)
        return Benchmark(Path(name).stem, task, asked, scored, inputs, packages)
    if problems is None:
        raise ConfigError(f"{use.name} can give any number of prompts. Choose the number with --problems.")
    return Benchmark(re.sub(r"[^\w.-]+", "_", name or kind), task, held_out(task, problems), str(use), inputs,
                     packages)


def measure_evaluations(checkpoints: Sequence[str], benchmarks: Sequence[Benchmark], plan: Plan, out: Path, *,
                        trust_remote_code: bool = False, console: Console | None = None) -> pd.DataFrame:
    """Evaluate checkpoints, or go on with it: a kill loses the problems in flight. Writes the tables into `out` and
    returns the summary. Further checkpoints and benchmarks may be added to a folder later.

    Raises ConfigError or RunError, before anything is sampled, for a checkpoint that cannot be read, an engine that
    does not fit, two benchmarks of one name, and a folder that holds other settings, problems, scorers or checkpoints,
    that was damaged, or that another process is writing.
    """
    names = [make_absolute(name) for name in checkpoints]
    _check(names, [b.name for b in benchmarks], plan)
    folders = {name: out / "samples" / f"{_safe(Path(name).name)}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
               for name in names}
    files = {(name, b.name): folders[name] / f"{b.name}.jsonl" for name in names for b in benchmarks}
    with Lock(out / runs.LOCK), _progress(console or Console(stderr=True)) as bars:
        left = {(name, b.name): len(b.prompts) - count_whole(files[name, b.name], plan.at_once, len(b.prompts))[0]
                for name in names for b in benchmarks}
        claim(out, _wanted(names, benchmarks, plan), complete=not any(left.values()))
        for name in names:
            for b in benchmarks:
                read_rows(files[name, b.name], len(b.prompts) - left[name, b.name], b.prompts, plan.numbers)
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
        found = pd.DataFrame([{"checkpoint": name, "step": step_of(name), "benchmark": b.name, **row}
                              for b in benchmarks for name in names
                              for row in read_rows(files[name, b.name], len(b.prompts), b.prompts, plan.numbers)])
        found["vote"] = found["vote"].astype("float64")
        summary = summarise(found)
        for table, frame in (("evaluations", found), ("summary", summary)):
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


def ask(sampler: Sampler, task: AnyTask, prompts: list[Prompt], plan: Plan, file: Path,
        done: Callable[[int], None]) -> None:
    """Write the lines that `file` lacks, those of `at_once` problems in one piece. The noise of a problem depends on
    its place alone: checkpoints share it, and so does whoever goes on."""
    start, size = count_whole(file, plan.at_once, len(prompts))
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


# ---------------------------------------------------------------------- the folder
def claim(out: Path, wanted: Mapping[str, Any], complete: bool) -> None:
    """Write what the folder holds, and will: `settings`, `versions`, `benchmarks` and `checkpoints`. Raises RunError if
    it holds anything else; of one that is `complete`, having all that is asked for, moe_rl and packages may have been
    others."""
    there = _manifest(out, tuple(wanted))
    if there is None:
        check_new(out)
    if not any(out.glob("samples/*/*.jsonl")):
        there = None  # nothing was sampled under what it says
    before: Mapping[str, Any] = there or wanted
    for part in wanted:
        old, new = before[part], wanted[part]
        both = old.keys() & new.keys() if part in GROWING else new.keys()
        if part == "benchmarks" and complete:
            old = {name: {**old[name], "packages": new[name]["packages"]} for name in both}
        if part != "versions" or not complete:
            check_same(out, f"an evaluation with other {part}", {key: old.get(key) for key in both},
                       {key: new[key] for key in both})
    if there is None or not complete:
        out.mkdir(parents=True, exist_ok=True)
        runs.write_json(out / MANIFEST, {**wanted, **{part: before[part] | wanted[part] for part in GROWING}})


def _manifest(out: Path, parts: tuple[str, ...]) -> dict[str, Any] | None:
    """What the folder says, if anything. Raises RunError where nothing can be compared with it."""
    there = runs.read_json(out / MANIFEST, parts)
    if there is not None:
        said = {part: there[part] for part in parts}
        if isinstance(there["benchmarks"], dict):
            said |= {f"benchmarks.{name}": entry for name, entry in there["benchmarks"].items()}
        for name, value in said.items():
            if not isinstance(value, dict):
                raise RunError(f"{out / MANIFEST} is damaged: {name} is {repr(value)[:80]}, but should map names to "
                               f"values. Restore it from a copy, or delete {out}.")
    return there


def count_whole(file: Path, at_once: int, problems: int) -> tuple[int, int]:
    """How many problems a file has to the end, and in how many bytes: the rest is what a kill left of others."""
    if not file.exists():
        return 0, 0
    lines = file.read_bytes().splitlines(keepends=True)
    whole = sum(line.endswith(b"\n") for line in lines)
    whole = whole if whole == problems else whole // at_once * at_once
    return whole, sum(map(len, lines[:whole]))


def read_rows(file: Path, count: int, asked: Sequence[Prompt], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of the table `evaluations`, but for checkpoint and benchmark, of the first `count` lines of a file; what
    a kill left behind them is passed over. Raises RunError, which names the line, unless these are as many of the
    problems that are `asked`, each with the completions of these numbers."""
    rows = []
    for i, line in enumerate(_first(file, count)):
        wrong = (_wrong(line, i, asked[i], numbers) if i < len(asked) else
                 f"is one too many for {len(asked)} problems")
        if wrong:
            raise RunError(f"{file}, line {i + 1}, {wrong}, so the file was damaged. Delete it to sample its problems "
                           "again.")
        rows += [{key: sample[key] for key in ("problem", "sample", *FIELDS)} for sample in json.loads(line)["samples"]]
    return rows


def _first(file: Path, count: int) -> Iterator[bytes]:
    if count:
        with file.open("rb") as lines:
            yield from islice(lines, count)


def _wrong(line: bytes, problem: int, prompt: Prompt, numbers: Sequence[int]) -> str | None:
    """What a line says that one of this problem does not, as the end of a sentence."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("problem") != problem:
        return f"is not problem {problem}"
    for key, wanted in (("question", prompt.text), ("answer", prompt.answer)):
        if (said := content.get(key)) != wanted:
            return f"is of the {key} {repr(said)[:80]}, not {repr(wanted)[:80]}"
    samples = content.get("samples")
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        return "has no list of samples"
    if (found := [sample.get("sample") for sample in samples]) != [*numbers]:
        return f"has the samples {str(found)[:80]}, not {numbers[0]} to {numbers[-1]}"
    for sample in samples:
        if sample.get("problem") != problem:
            return f"has a sample {sample['sample']} of the problem {sample.get('problem')!r}, not {problem}"
        for key, (valid, form) in FIELDS.items():
            if not valid(value := sample.get(key, "missing")):
                return f"has a sample {sample['sample']} whose {key} is {repr(value)[:80]}, not {form}"
    return None


# ---------------------------------------------------------------------- small parts
def _check(names: Sequence[str], benchmarks: Sequence[str], plan: Plan) -> None:
    for what, given in (("checkpoint", names), ("benchmark", benchmarks)):
        if twice := {name for name in given if given.count(name) > 1}:
            raise ConfigError(f"the {what} {sorted(twice)[0]} was given twice. Give each one once.")
    if plan.samples < 1 or plan.at_once < 1:
        raise ConfigError(f"-k {plan.samples} and --at-once {plan.at_once} must be at least one")
    for name in names:
        check_checkpoint(name)
    check_component(lookup("engine", plan.run.engine, ENGINES), plan.run)


def _packages(use: Component, own: bool) -> dict[str, str]:
    """Versions of the scoring packages that a task uses; of code of one's `own`, of all that it could import."""
    said = [(key, str(value)) for key, value in leaves(plain(use))]
    used = {"math-verify": any(key.endswith("match") and text == "math" for key, text in said),
            "reasoning-gym": any(text.startswith(LIBRARY) for _, text in said)}
    found = {}
    for name in (name for name, named in used.items() if named or own):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _wanted(names: Sequence[str], benchmarks: Sequence[Benchmark], plan: Plan) -> dict[str, Any]:
    """What a folder must say of itself to hold this evaluation."""
    return {"settings": plan.settings(), "versions": versions(),
            "benchmarks": {b.name: b.entry for b in benchmarks},
            "checkpoints": {name: fingerprint(name) for name in names}}


def _safe(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", name)


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(30), MofNCompleteColumn(),
                    TimeRemainingColumn(), console=console)
