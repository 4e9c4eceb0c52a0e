"""Verbs that make checkpoints, look at them, and at what an engine says it did with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from moe_rl.cli.verbs import DEVICE, DTYPE, TRUST_CODE, argument, verb
from moe_rl.registry import import_component


@verb(
    "pretrain",
    "A small MoE from nothing, until its routers and its loss have settled.",
    argument("folder", type=Path, metavar="FOLDER", help="where the checkpoint goes"),
    argument("--task", action="append", default=[], metavar="TASK",
             help="what it learns; repeated, a mixture (default: running_sums)"),
    argument("--model", default="qwen3_moe-tiny", help="a preset (default: qwen3_moe-tiny)"),
    argument("--seed", type=int, default=0, help="of weights and examples (default: 0)"),
    argument("--set", action="append", default=[], metavar="K=V", dest="settings",
             help="another setting, e.g. load_balance=0.02: docs/settings.md"),
    examples="""
  moe-rl pretrain base --task running_sums --task reasoning_gym:spell_backward
  moe-rl pretrain fine --model qwen3_moe-fine --set max_steps=2000
  moe-rl run my_study.py --set model.name=base --set cold_start.target=0
The same command goes on after a kill. Exit code 1: steps ran out before loss or load had settled.""",
)
def pretrain(options: argparse.Namespace) -> int:
    """Train, measure, save."""
    from moe_rl.config import ModelConfig, Pretraining, parse_settings
    from moe_rl.models.supervised import pretrain as train
    from moe_rl.registry import Component

    tasks = tuple(options.task)
    task = Component("mixture", tasks=tasks) if len(tasks) > 1 else Component(*tasks or ("running_sums",))
    settings = Pretraining(task=task, model=ModelConfig(name=options.model), seed=options.seed)
    settings = settings.replace(**parse_settings(settings, options.settings))
    rows, goals = train(settings, options.folder)
    missed = [goal for goal, met in goals.items() if not met]
    print(f"{options.folder}: {rows[-1]['step']} steps" + (f"; not {' and not '.join(missed)}" if missed else ""))
    return bool(missed)


@verb(
    "volatility",
    "How far routing moved between checkpoints, on your own texts.",
    argument("checkpoints", nargs="+", metavar="CHECKPOINT",
             help="Hugging Face checkpoints: two, or a series; folders, names on the hub, or a folder of several, such "
                  "as a run's"),
    argument("--data", required=True, help="JSONL: prompt and response, chat messages, or text"),
    argument("--out", type=Path, default=Path("volatility"), help="folder to write (default: volatility)"),
    DEVICE,
    DTYPE,
    argument("--max-tokens", type=int, default=2048, metavar="N", help="longer texts are cut, counted (default: 2048)"),
    argument("--batch-tokens", type=int, default=4096, metavar="N", help="tokens in one forward (default: 4096)"),
    argument("--traces", action="store_true", help="keep the routes of both, for `moe-rl view`"),
    argument("--ratios", action="store_true",
             help="score the responses, too: token ESS and KL, natural and replayed"),
    TRUST_CODE,
    examples="""
  moe-rl volatility sft/ rl-step-500/ --data responses.jsonl
  moe-rl volatility sft/ rl-500/ rl-1000/ --data responses.jsonl   a curve
  moe-rl volatility runs/x/gspo/base/seed=0 --data responses.jsonl   a run's hf_checkpoints
a line of the file: {"prompt": "2+2=", "response": "4"}, {"text": "…"}
or {"messages": [{"role": "user", "content": "2+2="}, …]}. Every metric comes with its noise floor; the same command \
goes on after a kill.""",
)
def volatility(options: argparse.Namespace) -> int:
    """Compare checkpoints; tables and figures into `--out`."""
    return import_component("command", "volatility", "moe_rl.analysis.commands:volatility")(options)


@verb(
    "evaluate",
    "avg@k, pass@k, maj@k of checkpoints on your own problems, with intervals.",
    argument("checkpoints", nargs="+", metavar="CHECKPOINT",
             help="Hugging Face checkpoints, the first being what others are compared with; folders, names on the hub, "
                  "or a folder of several, such as a run's"),
    argument("--data", action="append", default=[], metavar="FILE",
             help="JSONL with question and answer; may be repeated"),
    argument("--task", action="append", default=[], metavar="TASK",
             help="another task, e.g. reasoning_gym:gsm_symbolic; may be repeated: docs/tasks.md"),
    argument("-k", type=int, default=16, metavar="N", help="completions drawn of each problem (default: 16)"),
    argument("--greedy", action="store_true", help="the greedy completion, too"),
    argument("--problems", type=int, metavar="N", help="so many of each, as runs hold out (default: all of a file)"),
    argument("--match", default="math", help="when an answer of a file is right: math or exact (default: math)"),
    argument("--temperature", type=float, default=1.0, metavar="T", help="of sampling (default: 1)"),
    argument("--max-tokens", type=int, default=2048, metavar="N", help="of a completion (default: 2048)"),
    argument("--seed", type=int, default=0, metavar="N", help="of the sampling noise (default: 0)"),
    argument("--at-once", type=int, default=1, metavar="N",
             help="problems asked at once: faster, but as many are lost by a kill (default: 1)"),
    DEVICE,
    DTYPE,
    argument("--set", action="append", default=[], metavar="K=V", dest="settings",
             help="another setting, e.g. engine.name=vllm: docs/settings.md"),
    argument("--out", type=Path, default=Path("evaluation"), help="folder to write (default: evaluation)"),
    TRUST_CODE,
    examples="""
  moe-rl evaluate sft/ rl-500/ --data aime.jsonl --data math.jsonl -k 16
  moe-rl evaluate runs/x/gspo/base/seed=0 --data aime.jsonl   a run's hf_checkpoints: a curve
  moe-rl evaluate rl-500/ --task reasoning_gym:gsm_symbolic --problems 100
  moe-rl evaluate rl-500/ --data aime.jsonl --set engine.name=vllm --at-once 32
a line of a file: {"question": "…", "answer": "…"}. The same command goes on after a kill, and ends identical.""",
)
def evaluate(options: argparse.Namespace) -> int:
    """Evaluate checkpoints; completions, tables and the curve into `--out`."""
    return import_component("command", "evaluate", "moe_rl.analysis.commands:evaluate")(options)


@verb(
    "view",
    "A web page of one response: where its routes differ between trace files.",
    argument("traces", type=Path, nargs="+", metavar="TRACE",
             help="trace files of the same tokens, in order of their weights: two, or more to choose two of"),
    argument("--row", type=int, help="which response, from 0 (default: what changed most)"),
    argument("--tokenizer", metavar="DIR", help="checkpoint that spells the tokens (default: beside traces)"),
    argument("--out", type=Path, default=Path("view.html"), help="page to write (default: view.html)"),
    examples="""
  moe-rl view volatility/traces/before/000000.safetensors volatility/traces/after/000000.safetensors
  moe-rl view engine.safetensors natural.safetensors replayed.safetensors
  moe-rl view before.safetensors after.safetensors --row 3 --tokenizer sft/ --out flips.html
trace files come from `moe-rl volatility --traces`, or from RoutingTrace.save: docs/volatility.md.""",
)
def view(options: argparse.Namespace) -> int:
    """Write the page."""
    return import_component("command", "view", "moe_rl.analysis.commands:view")(options)


@verb(
    "diagnose",
    "Why an engine's log-probs are not the trainer's: who broke them.",
    argument("rollouts", help="JSONL: tokens, prompt_length and logprobs per response, routes if there are any"),
    argument("checkpoint", help="what the trainer believes sampled them: a folder, or a name on the hub"),
    argument("--also", action="append", default=[], metavar="CHECKPOINT",
             help="another version that the engine may have had, whole or in part; may be repeated"),
    DEVICE,
    argument("--dtype", default="float32", help="the trainer's (default: float32)"),
    argument("--router-dtype", help="the trainer's, of its routers (default: as --dtype)"),
    argument("--responses", type=int, default=128, help="most responses looked at, drawn at random (default: 128)"),
    argument("--batch-tokens", type=int, default=4096, help="tokens in one forward (default: 4096)"),
    argument("--out", type=Path, default=Path("diagnosis.html"), help="page to write (default: diagnosis.html)"),
    TRUST_CODE,
    examples="""
  moe-rl diagnose rollouts.jsonl step-500/
  moe-rl diagnose rollouts.jsonl step-500/ --also step-499/ --device cuda --dtype bfloat16
a line of the file: {"tokens": [ids], "prompt_length": 5, "logprobs": […], "temperature": 1.0,
  "routes": …}, see docs/diagnose.md. The exit code is 1 where something is to be mended.""",
)
def diagnose(options: argparse.Namespace) -> int:
    """Print the verdict and its evidence; write the page."""
    return import_component("command", "diagnose", "moe_rl.analysis.commands:diagnose")(options)
