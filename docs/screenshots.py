"""Pictures of the pages that moe_rl writes, for the README, from committed data and weights: `make screenshots`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from moe_rl.config import SHIPPED, ModelConfig
from moe_rl.models.load import load
from moe_rl.models.tokens import encode_prompts
from moe_rl.rollouts.hf import HFEngine
from moe_rl.routing import record_routing
from moe_rl.tasks.base import draw, load_task
from moe_rl.types import Sampling

HERE = Path(__file__).parent
NAME = next(iter(SHIPPED))


def write_rollouts(file: Path) -> None:
    """Completions of the model that comes with the package, sampled at the temperature 0.7, which the lines deny."""
    loaded = load(ModelConfig(name=NAME), 0)
    prompts = encode_prompts(draw(load_task("running_sums"), 16, 0), loaded.tokenizer)
    sampling = Sampling(max_new_tokens=13, temperature=0.7)
    rollouts = HFEngine(loaded.model, loaded.tokenizer).generate(prompts, 2, key=(0,), sampling=sampling)
    lines = [
        {
            "tokens": [*r.prompt.tokens, *r.tokens],
            "prompt_length": len(r.prompt.tokens),
            "logprobs": r.logprobs.tolist(),
        }
        for r in rollouts
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def write_traces(folder: Path) -> None:
    """The routing of one text before and after a step on it."""
    loaded = load(ModelConfig(name=NAME), 0)
    tokens = torch.tensor([loaded.tokenizer.encode("481516234253=4320527957")])
    optimizer = torch.optim.SGD(loaded.model.parameters(), lr=0.001)
    for name in ("before", "after"):
        with record_routing(loaded.model) as recording:
            loaded.model(input_ids=tokens, labels=tokens).loss.backward()
        recording.trace(tokens).save(folder / f"{name}.safetensors")
        optimizer.step()


def main() -> None:
    """Write report.png, response.png and diagnosis.png beside the pages."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        write_rollouts(folder / "rollouts.jsonl")
        write_traces(folder)
        study = HERE.parent / "studies" / "routing_replay"
        for words in (
            ["report", str(study), "--out", "report.html"],
            ["diagnose", "rollouts.jsonl", NAME, "--out", "diagnosis.html"],
            [
                "checkpoint",
                "view",
                "before.safetensors",
                "after.safetensors",
                "--tokenizer",
                NAME,
                "--out",
                "response.html",
            ],
        ):
            subprocess.run([sys.executable, "-m", "moe_rl", *words], cwd=folder, stdout=subprocess.DEVNULL)
        path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        for page, height in (("report", 1000), ("diagnosis", 900), ("response", 900)):
            tab = browser.new_page(viewport={"width": 1100, "height": height})
            tab.goto((folder / f"{page}.html").as_uri())
            if page == "report":
                tab.get_by_role("heading", name="Figures").evaluate("heading => heading.scrollIntoView()")
            tab.screenshot(path=str(HERE / "img" / f"{page}.png"))
        browser.close()


if __name__ == "__main__":
    main()
