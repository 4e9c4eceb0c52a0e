"""What the command `moe-rl` takes: its commands, their options and examples."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

EXAMPLES = {
    "run": """examples:
  moe-rl run studies/routing_replay.py --dry-run          what would run, what it costs, what would make it void
  moe-rl run studies/routing_replay.py                    all arms and seeds; the same command goes on after a kill
  moe-rl run studies/routing_replay.py --seeds 8          seeds 0 to 7; finished runs are skipped
  moe-rl run studies/routing_replay.py --steps 200        extends finished runs from their last checkpoint
  moe-rl run studies/routing_replay.py --out trial --seeds 0 --steps 20 \\
      --task reasoning_gym:spell_backward --set max_new_tokens=24 --set optimizer.lr=1e-4
  torchrun --nproc-per-node 2 -m moe_rl run studies/routing_replay.py --policy megatron --ep 2
                                                          on Megatron-core, all processes together on run after run
  moe-rl run my_study.py                                  your own study, from any folder""",
    "plot": """examples:
  moe-rl plot runs/routing_replay                         PNG and SVG into runs/routing_replay/figures
  moe-rl plot studies/results/routing_replay              the same from committed tables
  moe-rl plot runs/routing_replay --unfinished            with what running and interrupted runs have so far
  moe-rl plot runs/my_sweep --cells                       every combination of factors by itself, too""",
    "report": """examples:
  moe-rl report runs/routing_replay                       runs/routing_replay/report.html, one file to read or print
  moe-rl report studies/results/routing_replay --out page.html""",
    "collect": """examples:
  moe-rl collect runs/routing_replay --out studies/results/routing_replay
  moe-rl collect runs/my_study --out results/my_study --also 'margin_*' --also grad_norm
plot, report, list, show, export and rerun read the folder it writes as they read a folder of runs.""",
    "rerun": """examples:
  moe-rl rerun studies/results/routing_replay/gspo/base/seed=0 --out again
  moe-rl rerun studies/results/routing_replay --out again     every run of the study
  moe-rl rerun studies/results/why_gspo --out again --trust   with the losses of studies/, which its rows name""",
    "list": """examples:
  moe-rl list                                             every run below runs/
  moe-rl list runs/routing_replay/gspo                    one arm""",
    "show": """examples:
  moe-rl show runs/routing_replay/gspo/base/seed=0        configuration, versions and the last rows""",
    "diff": """examples:
  moe-rl diff runs/routing_replay/gspo/base/seed=0 again/routing_replay/gspo/base/seed=0
exit code: 0 when every value is equal (seconds_* and memory_* are ignored), 1 when the runs part""",
    "volatility": """examples:
  moe-rl volatility sft/ rl-step-500/ --data responses.jsonl
  moe-rl volatility sft/ rl-step-500/ --data responses.jsonl --out moved --traces --device cuda --dtype bfloat16
a line of the file: {"prompt": "2+2=", "response": "4"}, {"messages": [{"role": "user", "content": "2+2="}, …]}
or {"text": "…"}. Every metric comes with its noise floor; the same command goes on after a kill.""",
    "view": """examples:
  moe-rl view volatility/traces/before/000000.safetensors volatility/traces/after/000000.safetensors
  moe-rl view before.safetensors after.safetensors --row 3 --tokenizer sft/ --out flips.html
trace files come from `moe-rl volatility --traces`, or from RoutingTrace.save(path, {"gates": gates}).""",
    "export": """examples:
  moe-rl export runs/routing_replay --to csv              csv/steps.csv, updates.csv, layers.csv, runs.csv""",
}


Command = Callable[[str, str], argparse.ArgumentParser]
"""command(name, help) → a parser to which the command's options are added."""


def parser() -> argparse.ArgumentParser:
    """The command line. What it parses names its `command`."""
    top = argparse.ArgumentParser(prog="moe-rl", description="A microscope for Mixture-of-Experts routing during RL.")
    commands = top.add_subparsers(required=True, metavar="|".join(EXAMPLES))

    def command(name: str, help: str) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=help, description=help, epilog=EXAMPLES[name],
                                formatter_class=argparse.RawDescriptionHelpFormatter)
        p.set_defaults(command=name)
        return p

    _running(command)
    _studies(command)
    _runs(command)
    _checkpoints(command)
    return top


def _running(command: Command) -> None:
    p = command("run", "Run a study, or go on with it; ends with a summary table and figures.")
    p.add_argument("study", help="a Python file with `study = Study(...)`, or a module")
    p.add_argument("--dry-run", action="store_true", help="print runs, cost and warnings, and start nothing")
    p.add_argument("--seeds", help="which seeds: a list 0,1,2 or a number N for 0 … N-1 (default: the study's)")
    p.add_argument("--steps", type=int, help="length of every run (default: the study's)")
    p.add_argument("--quick", action="store_true",
                   help="one seed and three steps of every run, as <study>-quick: minutes, to see that all of it works")
    p.add_argument("--out", type=Path, default=Path("runs"), help="where runs live (default: runs)")
    p.add_argument("--jobs", type=int, help="runs at a time, one thread each (default: all cores)")
    p.add_argument("--task", help="another task: reasoning_gym:spell_backward, jsonl:pairs.jsonl, pkg.module:Class")
    p.add_argument("--policy", choices=("hf", "megatron"), help="training engine (default: the study's)")
    for size, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert-tensor")):
        p.add_argument(f"--{size}", type=int, help=f"{what} parallel size, for --policy megatron under torchrun")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                   help="another setting, dotted, e.g. optimizer.lr=1e-4; may be repeated")
    _pooling(p)
    p = command("rerun", "Runs made again from the configuration in their own rows, and compared.")
    p.add_argument("folder", type=Path, help="a study's tables, or the path of an arm, a cell or a run in them")
    p.add_argument("--out", type=Path, default=Path("again"), help="where the new runs live (default: again)")
    p.add_argument("--jobs", type=int, help="runs at a time, one thread each (default: all cores)")
    p.add_argument("--trust", action="store_true",
                   help="run code from outside this package that rows name: tasks, losses, sources, a trainer")


def _studies(command: Command) -> None:
    p = command("plot", "Draw a study's figures and print its summary, from tables alone.")
    p.add_argument("folder", type=Path, help="the study's folder, e.g. runs/routing_replay")
    p.add_argument("--unfinished", action="store_true", help="include the last commits of unfinished runs")
    p.add_argument("--cells", action="store_true", help="tables and figures of every combination of factors, too")
    _pooling(p)
    p = command("report", "A study as one web page: tables, figures, settings, versions, cost.")
    p.add_argument("folder", type=Path, help="the study's folder, of runs or of collected tables")
    p.add_argument("--out", type=Path, help="page to write (default: report.html in the folder)")
    _pooling(p)
    p = command("collect", "The tables of a finished study as a few small files, to be committed.")
    p.add_argument("folder", type=Path, help="the study's folder, e.g. runs/routing_replay")
    p.add_argument("--out", type=Path, required=True, help="folder to write")
    p.add_argument("--also", action="append", default=[], metavar="PATTERN",
                   help="further columns, e.g. 'margin_*'; may be repeated")
    _pooling(p)


def _runs(command: Command) -> None:
    p = command("list", "Every run below a folder: state, age, time left.")
    p.add_argument("folder", type=Path, nargs="?", default=Path("runs"))
    p = command("show", "One run: its manifest and its last rows.")
    p.add_argument("run", type=Path)
    p = command("diff", "The first row in which two runs part, and the settings in which they differ.")
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p = command("export", "The tables of all runs below a folder as CSV.")
    p.add_argument("folder", type=Path)
    p.add_argument("--to", type=Path, default=Path("csv"), help="folder to write (default: csv)")
    p.add_argument("--unfinished", action="store_true", help="include the last commits of unfinished runs")
    _pooling(p)


def _checkpoints(command: Command) -> None:
    p = command("volatility", "How far routing moved between two checkpoints, on your own texts.")
    p.add_argument("before", help="a Hugging Face checkpoint: a folder, or a name on the hub")
    p.add_argument("after", help="another of the same architecture and tokenizer")
    p.add_argument("--data", required=True, help="JSONL: prompt and response, chat messages, or text per line")
    p.add_argument("--out", type=Path, default=Path("volatility"), help="folder to write (default: volatility)")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<index> (default: cpu)")
    p.add_argument("--dtype", default="float32", help="of the weights (default: float32)")
    p.add_argument("--max-tokens", type=int, default=2048, help="longer texts are cut, and counted (default: 2048)")
    p.add_argument("--batch-tokens", type=int, default=4096, help="tokens in one forward (default: 4096)")
    p.add_argument("--traces", action="store_true", help="keep the routes of both, for `moe-rl view`")
    p.add_argument("--trust-remote-code", action="store_true", help="run code that a checkpoint brings along")
    p = command("view", "A web page of one response: where its routes differ between two trace files.")
    p.add_argument("before", type=Path, help="a trace file")
    p.add_argument("after", type=Path, help="a trace file of the same tokens")
    p.add_argument("--row", type=int, help="which response of the files, from 0 (default: the one that changed most)")
    p.add_argument("--tokenizer", help="checkpoint whose tokenizer spells the tokens (default: beside the traces)")
    p.add_argument("--out", type=Path, default=Path("view.html"), help="page to write (default: view.html)")


def _pooling(p: argparse.ArgumentParser) -> None:
    p.add_argument("--mix-code", action="store_true", help="pool runs written by different versions of the code")
