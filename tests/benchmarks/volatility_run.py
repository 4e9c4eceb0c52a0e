"""CPU-seconds, their share in forwards, and peak memory of `moe-rl checkpoint compare` of two random checkpoints.

python tests/benchmarks/volatility_run.py                    # 2,000 responses, qwen3_moe-tiny
python tests/benchmarks/volatility_run.py 250 500 1000       # each in a process of its own
python tests/benchmarks/volatility_run.py 250 --overrides '{"hidden_size": 512, "moe_intermediate_size": 256}'
"""

from __future__ import annotations

import argparse
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
from moe_rl.analysis.checkpoints import traces  # noqa: E402
from moe_rl.config import ModelConfig  # noqa: E402
from moe_rl.models.load import load, save_checkpoint  # noqa: E402

WORDS = "the a of experts route token change layer and or is not policy gradient reward ünïcode 中文".split()  # noqa: SIM905


def main(responses: int, overrides: dict[str, int]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        loaded = load(ModelConfig(overrides=overrides), seed=0)
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

        body = type(loaded.model.base_model)
        body.forward = timed("decoder", body.forward)
        traces.observe = timed("forward", traces.observe)  # with what it records and copies
        start = time.process_time()
        code = cli.main(
            [
                "checkpoint",
                "compare",
                str(root / "before"),
                str(root / "after"),
                "--data",
                str(root / "data.jsonl"),
                "--out",
                str(root / "out"),
            ]
        )
        seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        size = sum(p.numel() for p in loaded.model.parameters()) / 1e6
        decoder, forward = (100 * inside[name] / seconds for name in ("decoder", "forward"))
        print(
            f"{size:.1f} M parameters, {responses} responses: {seconds:.1f} CPU-seconds, {decoder:.0f} % of them in "
            f"the decoder, {forward:.0f} % with what is recorded of it; peak memory {peak:.3f} GB, exit code {code}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("responses", type=int, nargs="*", default=[2000])
    parser.add_argument("--overrides", type=json.loads, default={}, help="of the model's configuration, as JSON")
    options = parser.parse_args()
    if len(options.responses) > 1:
        for count in options.responses:
            command = [sys.executable, __file__, str(count), "--overrides", json.dumps(options.overrides)]
            subprocess.run(command, check=True)
    else:
        main(options.responses[0], options.overrides)
