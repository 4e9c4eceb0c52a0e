"""CPU-seconds, their share in forwards, and peak memory of `moe-rl volatility` of two tiny checkpoints, one thread.

    python tests/benchmarks/volatility_run.py                    # 2,000 responses
    python tests/benchmarks/volatility_run.py 250 500 1000       # each in a process of its own
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402

from moe_rl import cli  # noqa: E402
from moe_rl.compare.checkpoints.observed import Observer  # noqa: E402
from moe_rl.config import ModelConfig  # noqa: E402
from moe_rl.models.load import load, save_checkpoint  # noqa: E402

WORDS = "the a of experts route token change layer and or is not policy gradient reward ünïcode 中文".split()  # noqa: SIM905


def main(responses: int = 2000) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        loaded = load(ModelConfig(), seed=0)
        save_checkpoint(loaded.model, loaded.tokenizer, root / "before")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in loaded.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.1 * p.std())
        save_checkpoint(loaded.model, loaded.tokenizer, root / "after")
        draw = random.Random(0)
        with (root / "data.jsonl").open("w") as file:
            for _ in range(responses):
                prompt, response = (" ".join(draw.choices(WORDS, k=draw.randint(a, b))) for a, b in ((3, 8), (5, 35)))
                file.write(json.dumps({"prompt": prompt, "response": " " + response}) + "\n")
        inside = {"decoder": 0.0, "forward": 0.0}

        def timed(name: str, call: Callable) -> Callable:
            def run(*arguments, **settings):
                began = time.process_time()
                try:
                    return call(*arguments, **settings)
                finally:
                    inside[name] += time.process_time() - began

            return run

        decoder = type(loaded.model.base_model)
        decoder.forward = timed("decoder", decoder.forward)
        Observer._forward = timed("forward", Observer._forward)  # with what it records and copies
        start = time.process_time()
        code = cli.main(["volatility", str(root / "before"), str(root / "after"), "--data", str(root / "data.jsonl"),
                         "--out", str(root / "out")])
        seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{responses} responses: {seconds:.1f} CPU-seconds, {100 * inside['decoder'] / seconds:.0f} % of them in "
              f"the decoder, {100 * inside['forward'] / seconds:.0f} % with what is recorded of it; peak memory "
              f"{peak:.3f} GB, exit code {code}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        for count in sys.argv[1:]:
            subprocess.run([sys.executable, __file__, count], check=True)
    else:
        main(*map(int, sys.argv[1:]))
