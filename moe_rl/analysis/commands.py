"""What the commands on checkpoints and rollout files do; `cli/checkpoints.py` has their arguments."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from rich.console import Console

from moe_rl.analysis.benchmarks import show
from moe_rl.analysis.checkpoints.measure import Comparison, measure_series, measure_volatility
from moe_rl.analysis.checkpoints.report import print_report, print_series
from moe_rl.analysis.diagnose.diagnosis import diagnose_checkpoint
from moe_rl.analysis.diagnose.report import print_diagnosis, write_page
from moe_rl.analysis.evaluation import Plan, benchmark, measure_evaluations
from moe_rl.analysis.folders import checkpoints_of, step_of
from moe_rl.analysis.response_page import write_response_page
from moe_rl.config import Arm, ModelConfig, RunConfig, parse_settings
from moe_rl.errors import ConfigError
from moe_rl.registry import Component

EVALUATED = ("temperature", "top_p", "top_k", "min_p", "sampling_mask", "max_new_tokens", "stop", "model.device",
             "model.dtype", "model.router_dtype")
"""Settings of a run that an evaluation has, too, beside the engine's."""


def volatility(options: argparse.Namespace) -> int:
    """Compare checkpoints; tables and figures into `--out`."""
    settings = {"dtype": options.dtype, "max_tokens": options.max_tokens, "batch_tokens": options.batch_tokens,
                "ratios": options.ratios}
    where = {"device": options.device, "keep_traces": options.traces, "trust_remote_code": options.trust_remote_code}
    names = [name for given in options.checkpoints for name in checkpoints_of(given)]
    if len(names) < 2:
        raise ConfigError(f"{names[0]} is one checkpoint; give two or more to compare")
    if len(names) > 2:
        print_series(Console(), measure_series(names, options.data, options.out, settings=settings, **where),
                     options.out)
        return 0
    before, after = names
    frames = measure_volatility(Comparison(before, after, options.data, **settings), options.out, **where)
    print_report(Console(), frames, options.out)
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate checkpoints; completions, tables and the curve into `--out`."""
    tasks = [Component(f"jsonl:{file}", match=options.match) for file in options.data] + [
        Component(task) for task in options.task
    ]
    if not tasks:
        raise ConfigError("give the problems: --data FILE.jsonl, or --task NAME with --problems N")
    run = RunConfig(arm=Arm(name="evaluate"), seed=options.seed, temperature=options.temperature,
                    max_new_tokens=options.max_tokens, engine=Component("hf", routes="off"),
                    model=ModelConfig(device=options.device, dtype=options.dtype))
    given = parse_settings(run, options.settings)
    if idle := [key for key in given if key not in EVALUATED and not key.startswith("engine.")]:
        raise ConfigError(f"--set {idle[0]}: an evaluation has settings of sampling, model and engine alone: "
                          f"{', '.join(EVALUATED)} and engine.…; a task has the options it comes with")
    run = run.replace(**given)
    names = [name for folder in options.checkpoints for name in checkpoints_of(folder)]
    found = measure_evaluations(names, [benchmark(task, options.problems) for task in tasks],
                                Plan(run, options.k, options.greedy, options.at_once), options.out,
                                trust_remote_code=options.trust_remote_code)
    show(Console(), found, {name: step_of(name) for name in found["checkpoint"].unique()}, options.out)
    return 0


def view(options: argparse.Namespace) -> int:
    """Write the page."""
    _require_page(options.out)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        row = write_response_page(options.traces, options.out, row=options.row, tokenizer=options.tokenizer)
    for warning in heard:
        print(f"warning: {warning.message}", file=sys.stderr)
    print(f"{options.out}: response {row}; open it in any browser")
    return 0


def diagnose(options: argparse.Namespace) -> int:
    """Print the verdict and its evidence; write the page."""
    _require_page(options.out)
    found = diagnose_checkpoint(options.rollouts, options.checkpoint, also=options.also, device=options.device,
                                dtype=options.dtype, router_dtype=options.router_dtype, responses=options.responses,
                                batch_tokens=options.batch_tokens, trust_remote_code=options.trust_remote_code)
    print_diagnosis(Console(), found)
    write_page(found, options.out, rollouts=options.rollouts, checkpoint=options.checkpoint)
    print(f"{options.out}: every rung; open it in any browser")
    return int(found.fault)


def _require_page(out: Path) -> None:
    """Raise ConfigError, before anything is done, where a page has the name of a folder."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name the page in it, such as {out / 'page.html'}.")
