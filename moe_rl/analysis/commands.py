"""The commands on checkpoints and rollout files: what they take, and what they do."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_rl.cli.verbs import DEVICE, DTYPE, SET, SETTINGS, TRUST_CODE, argument, verb
from moe_rl.errors import ConfigError

SAMPLING = "temperature top_p top_k min_p sampling_mask max_new_tokens stop"
EVALUATED = (*SAMPLING.split(), "model.device", "model.dtype", "model.router_dtype")
"""Settings of a run that an evaluation has, too, beside the engine's."""


CHECKPOINTS = argument(
    "checkpoints", nargs="+", metavar="CHECKPOINT", help="folders, hub names, or a folder of several"
)


@verb(
    CHECKPOINTS,
    argument("--data", required=True, help="JSONL: prompt and response, chat messages, or text"),
    argument("--out", type=Path, default=Path("volatility"), help="folder to write (default: volatility)"),
    DEVICE,
    DTYPE,
    argument("--max-tokens", type=int, default=2048, metavar="N", help="longer texts are cut (default: 2048)"),
    argument("--batch-tokens", type=int, default=4096, metavar="N", help="tokens in one forward (default: 4096)"),
    argument("--traces", action="store_true", help="store the routing, for `moe-rl checkpoint view`"),
    argument("--ratios", action="store_true", help="also measure token ESS and KL, with and without replay"),
    TRUST_CODE,
    examples="""
  moe-rl checkpoint compare sft/ rl-step-500/ --data responses.jsonl
  moe-rl checkpoint compare runs/x/gspo/base/seed=0 --data texts.jsonl   a run's
A line of the file: {"prompt": "2+2=", "response": "4"}, {"text": "…"} or
{"messages": [{"role": "user", "content": "2+2="}, …]}. The same command goes on.""",
)
def compare(options: argparse.Namespace) -> int:
    """Compare checkpoints; tables and figures into `--out`."""
    from rich.console import Console

    from moe_rl.analysis.checkpoints.measure import Comparison, make_series, measure_volatility
    from moe_rl.analysis.checkpoints.report import print_report, print_series
    from moe_rl.analysis.folders import checkpoints_of

    where = {"device": options.device, "keep_traces": options.traces, "trust_remote_code": options.trust_remote_code}
    names = [name for folder in options.checkpoints for name in checkpoints_of(folder)]
    if len(names) < 2:
        raise ConfigError(f"{names[0]} is one checkpoint. Give two or more.")
    settings = {name: getattr(options, name) for name in ("dtype", "max_tokens", "batch_tokens", "ratios")}
    comparison = Comparison(tuple(names), options.data, **settings)
    frames = measure_volatility(comparison, options.out, **where)
    if len(names) == 2:
        print_report(Console(), frames[0, 1], options.out)
    else:
        print_series(Console(), make_series(comparison, frames, options.out), options.out)
    return 0


@verb(
    CHECKPOINTS,
    argument("--data", action="append", default=[], metavar="FILE", help="JSONL, gsm8k or gsm8k=FILE; may be repeated"),
    argument("--task", action="append", default=[], metavar="TASK", help="task (docs/tasks.md); may be repeated"),
    argument("-k", type=int, default=16, metavar="N", help="completions per problem (default: 16)"),
    argument("--greedy", action="store_true", help="also sample the greedy completion"),
    argument("--problems", type=int, metavar="N", help="problems per benchmark (default: all of a file)"),
    argument("--match", default="math", help="how answers of a file match: math, integer or exact (default: math)"),
    argument("--temperature", type=float, default=1.0, metavar="T", help="sampling temperature (default: 1)"),
    argument("--max-tokens", type=int, default=2048, metavar="N", help="longest completion (default: 2048)"),
    argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)"),
    DEVICE,
    DTYPE,
    SET,
    SETTINGS,
    argument("--out", type=Path, default=Path("evaluation"), help="folder to write (default: evaluation)"),
    TRUST_CODE,
    examples="""
  moe-rl checkpoint evaluate sft/ rl-500/ --data a.jsonl --data b.jsonl -k 16
  moe-rl checkpoint evaluate runs/x/gspo/base/seed=0 --data aime.jsonl   a run's
  moe-rl checkpoint evaluate rl-500/ --task running_sums --problems 100
  moe-rl checkpoint evaluate rl-500/ --data gsm8k --data math500=copy.parquet
A line of a file: {"question": "…", "answer": "…"}. By name: gsm8k, math500,
aime2024, aime2025. After an interruption the same command goes on.""",
)
def evaluate(options: argparse.Namespace) -> int:
    """Evaluate checkpoints; completions and tables into `--out`."""
    from rich.console import Console

    from moe_rl.analysis.benchmarks import print_evaluation
    from moe_rl.analysis.evaluation import Plan, benchmark, measure_evaluations
    from moe_rl.analysis.folders import checkpoints_of
    from moe_rl.config import Arm, ModelConfig, RunConfig, parse_settings
    from moe_rl.registry import Component
    from moe_rl.tasks.published import PUBLISHED

    data = [(text, *text.partition("=")[::2]) for text in options.data]
    files = [
        (file or name, {"benchmark": name}) if name in PUBLISHED else (text, {"match": options.match})
        for text, name, file in data
    ]
    tasks = [Component(f"jsonl:{file}", **how) for file, how in files] + [*map(Component, options.task)]
    if not tasks:
        raise ConfigError("no problems were given. Use --data FILE.jsonl, or --task NAME with --problems N.")
    run = RunConfig(
        arm=Arm(name="evaluate"),
        seed=options.seed,
        temperature=options.temperature,
        max_new_tokens=options.max_tokens,
        engine=Component("hf", routes="off"),
        model=ModelConfig(device=options.device, dtype=options.dtype),
    )
    changes = parse_settings(run, options.settings, options.file)
    if idle := [key for key in changes if key not in EVALUATED and not key.startswith("engine.")]:
        raise ConfigError(f"--set {idle[0]} has no effect here. Set one of {', '.join(EVALUATED)} or engine.….")
    run = run.replace(**changes)
    names = [name for folder in options.checkpoints for name in checkpoints_of(folder)]
    summary = measure_evaluations(
        names,
        [benchmark(task, options.problems) for task in tasks],
        Plan(run, options.k, options.greedy),
        options.out,
        trust_remote_code=options.trust_remote_code,
    )
    print_evaluation(Console(), summary)
    print(f"tables {options.out}/evaluations.parquet, {options.out}/summary.parquet; completions {options.out}/samples")
    return 0


@verb(
    argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="TRACE",
        help="two or more trace files of the same tokens, oldest weights first, or folders of one each; or the "
        "folder that compare --traces wrote",
    ),
    argument("--row", type=int, help="number of the response (default: the largest change)"),
    argument("--tokenizer", metavar="DIR", help="checkpoint with the tokenizer (default: beside traces)"),
    argument("--out", type=Path, default=Path("view.html"), help="page to write (default: view.html)"),
    examples="""
  moe-rl checkpoint view volatility             of compare --traces
  moe-rl checkpoint view engine.safetensors unconstrained.safetensors --row 3
RoutingTrace.save writes trace files, too: docs/checkpoints.md.""",
)
def view(options: argparse.Namespace) -> int:
    """Write the page."""
    from moe_rl.analysis.response_page import write_response_page

    _require_page(options.out)
    traces = [trace for path in options.traces for trace in _traces_of(path)]
    row = write_response_page(traces, options.out, row=options.row, tokenizer=options.tokenizer)
    print(f"{options.out}: response {row}; open it in a browser")
    return 0


@verb(
    argument("rollouts", help="JSONL: tokens, prompt_length, logprobs and, if known, routes of each response"),
    argument("checkpoint", help="checkpoint that sampled them: a folder, or a name on the hub"),
    argument(
        "--also",
        action="append",
        default=[],
        metavar="CHECKPOINT",
        help="another version that the engine may have used; may be repeated",
    ),
    DEVICE,
    argument("--dtype", default="float32", help="dtype of the trainer (default: float32)"),
    argument("--router-dtype", help="dtype of the trainer's routers (default: --dtype)"),
    argument("--engine-dtype", help="dtype of the engine; then another dtype is no explanation"),
    argument("--responses", type=int, default=128, help="responses to use, chosen at random (default: 128)"),
    argument("--batch-tokens", type=int, default=4096, help="tokens in one forward (default: 4096)"),
    argument("--out", type=Path, default=Path("diagnosis.html"), help="page to write (default: diagnosis.html)"),
    TRUST_CODE,
    examples="""
  moe-rl diagnose rollouts.jsonl step-500/
  moe-rl diagnose rollouts.jsonl step-500/ --also step-499/ --device cuda
A line of the file: {"tokens": [ids], "prompt_length": 5, "logprobs": […],
"temperature": 1.0, "routes": …} (docs/diagnose.md). Exit code: 1 for a fault,
2 for wrong input.""",
)
def diagnose(options: argparse.Namespace) -> int:
    """Print the verdict and its evidence; write the page."""
    from rich.console import Console

    from moe_rl.analysis.diagnose.diagnosis import diagnose_checkpoint
    from moe_rl.analysis.diagnose.report import print_diagnosis, write_page

    _require_page(options.out)
    names = "also", "device", "dtype", "router_dtype", "engine_dtype", "responses", "batch_tokens", "trust_remote_code"
    settings = {name: getattr(options, name) for name in names}
    diagnosis = diagnose_checkpoint(options.rollouts, options.checkpoint, **settings)
    print_diagnosis(Console(), diagnosis)
    write_page(diagnosis, options.out, rollouts=options.rollouts, checkpoint=options.checkpoint)
    print(f"{options.out}: every test; open it in a browser")
    return int(diagnosis.fault)


def _traces_of(path: Path) -> list[Path]:
    """A trace file, the one in a folder, or those of both sides of a comparison. Raises ConfigError for a folder of
    none or of several."""
    if not path.is_dir():
        return [path]
    for inside in (path / "traces", path):
        if (inside / "before").is_dir() and (inside / "after").is_dir():
            return [*_traces_of(inside / "before"), *_traces_of(inside / "after")]
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise ConfigError(
            f"{path} contains {len(files) or 'no'} traces. Name a file, as {path / '000000.safetensors'}."
        )
    return files


def _require_page(out: Path) -> None:
    """Raise ConfigError, before anything is done, where a page has the name of a folder."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder. Name a page in it, such as {out / 'page.html'}.")
