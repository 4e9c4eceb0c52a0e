"""Files of `moe_rl` that a training step and a worker enter, with their lines, in the order in which they are entered.

One run of the default study (arm grpo-replay, tiny steps), after the supervised warm-up. A file is entered when a
function of it is called; importing it does not count.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import moe_rl
from moe_rl.build import build
from moe_rl.recorder import Recorder
from moe_rl.study.declaration import Planned
from moe_rl.study.routing_replay import study
from moe_rl.study.workers import carry_out
from moe_rl.trainer import train_step

PACKAGE = Path(moe_rl.__file__).parent
TARGETS = {"step": 25, "worker": 45}
"""Most files of each."""
TINY = {
    "prompts_per_step": 2,
    "group_size": 4,
    "mini_batches": 2,
    "steps": 3,
    "save_every": 3,
    "eval_every": 3,
    "eval_prompts": 4,
    "cold_start.max_steps": 1,
    "cold_start.target": 0.0,
}


@contextmanager
def entered() -> Iterator[list[Path]]:
    """The files of the package whose functions are called in the block, in order."""
    found: dict[Path, None] = {}

    def look(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # neither a module's nor a class's body
            file = Path(code.co_filename)
            if file.is_relative_to(PACKAGE):
                found[file] = None

    files: list[Path] = []
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        files.extend(found)


def main() -> None:
    torch.set_num_threads(1)
    arm = next(arm for arm in study.runs(Path()) if arm.config.arm.name == "grpo-replay").config.arm
    run = study.base.replace(arm=arm, **TINY)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        parts = build(run, home / "step", home / "cache")
        with entered() as found["step"]:
            train_step(run, parts, 1, Recorder(run, parts.policy))
        planned = Planned(home / "worker", run)
        with entered() as found["worker"]:
            carry_out(planned, study.trainer, home / "cache")
    for what, files in found.items():
        core = [file for file in files if "integrations" not in file.parts]
        print(
            f"\n{what}: {len(files)} files, {len(core)} of them of the core (at most {TARGETS[what]}), "
            f"{sum(map(lines, files))} lines"
        )
        for file in files:
            print(f"  {lines(file):4} {file.relative_to(PACKAGE)}")


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
