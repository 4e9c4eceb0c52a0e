"""CPU-seconds and peak memory of `moe-rl volatility` on 2,000 responses and two tiny checkpoints, one thread.

    python tests/benchmarks/volatility_run.py
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402

from moe_rl import cli  # noqa: E402
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
        start = time.process_time()
        code = cli.main(["volatility", str(root / "before"), str(root / "after"), "--data", str(root / "data.jsonl"),
                         "--out", str(root / "out")])
        seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{responses} responses: {seconds:.0f} CPU-seconds, peak memory {peak:.2f} GB, exit code {code}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
