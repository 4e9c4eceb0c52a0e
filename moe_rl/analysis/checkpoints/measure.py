"""How far the routing of one's own checkpoints moved: `moe-rl checkpoint compare BEFORE AFTER --data FILE.jsonl`.

Each checkpoint is loaded once, one at a time, and its routing of the texts is traced into files. The traces are then
compared: two checkpoints into `out`; of a series each one with the first and with the previous one, into `out/<i>-<j>`.
An interrupted command traces the batches that it lacks.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from moe_rl.analysis.checkpoints import tables
from moe_rl.analysis.checkpoints.tables import Frames, Tally
from moe_rl.analysis.checkpoints.texts import Texts
from moe_rl.analysis.checkpoints.traces import ITSELF, NOISE_EVERY, Traced, file_of, trace
from moe_rl.analysis.folders import (
    check_new,
    check_same,
    describe,
    fingerprint,
    make_absolute,
    progress,
    step_of,
    versions,
)
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.load import load, load_tokenizer, no_progress_bars, placement
from moe_rl.routing.trace import Layout
from moe_rl.storage import folder as runs
from moe_rl.storage.links import require_inside
from moe_rl.storage.lock import Lock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "comparison.json"


@dataclass(frozen=True)
class Comparison:
    """Everything that decides the numbers."""

    checkpoints: tuple[str, ...]
    """Hugging Face checkpoints, two or more: folders, or names on the hub."""
    data: str
    """A JSONL file; see `Texts`."""
    dtype: str = "float32"
    max_tokens: int = 2048
    """Longer lines are cut, and counted."""
    batch_tokens: int = 4096
    """Most tokens in one forward, padding included."""
    ratios: bool = False
    """Score the responses, too: without replay, and with the routes of the checkpoints that it is compared with."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Which are compared: each with the first and with the previous one."""
        return [(i, j) for j in range(1, len(self.checkpoints)) for i in dict.fromkeys((0, j - 1))]


def measure_volatility(
    comparison: Comparison,
    out: Path,
    *,
    device: str = "cpu",
    keep_traces: bool = False,
    trust_remote_code: bool = False,
) -> dict[tuple[int, int], Frames]:
    """Compare checkpoints, or go on with it. Writes tables into `out` and returns them by pair and name.

    With `keep_traces`, `out/traces` keeps a trace file per checkpoint and batch, for `moe-rl checkpoint view`. Raises
    ConfigError or RunError, before a model is loaded, for a missing file, a line without text, a dense model,
    checkpoints of different architectures or tokenizers, and a folder that holds another comparison or is being
    written by another process.
    """
    names = tuple(make_absolute(name) for name in comparison.checkpoints)
    if len(names) < 2 or len(names) > 2 and len(set(names)) < len(names):
        raise ConfigError(f"give two or more different checkpoints, not {', '.join(names) or 'none'}")
    comparison = Comparison(names, make_absolute(comparison.data), *[*asdict(comparison).values()][2:])
    placement(ModelConfig(device=device, dtype=comparison.dtype))
    tokenizer, layout = _same_model(names, trust_remote_code)
    texts = Texts(comparison.data, tokenizer, max_tokens=comparison.max_tokens, batch_tokens=comparison.batch_tokens)
    require_inside(out)
    with Lock(out / runs.LOCK):
        wanted = identity(comparison)
        finished = _claim(out, wanted)
        two = len(names) == 2
        folders = {(i, j): out if two else out / f"{i:02d}-{j:02d}" for i, j in comparison.pairs}
        sides = [out / "traces" / (("before", "after")[j] if two else f"{j:02d}") for j in range(len(names))]
        frames = {pair: tables.read(folder) for pair, folder in folders.items()}
        traced = [all(file_of(side, i).exists() for i in range(len(texts.sizes))) for side in sides]
        if finished and all(frames.values()) and (all(traced) or not keep_traces):
            return {pair: tables_of_pair for pair, tables_of_pair in frames.items() if tables_of_pair}
        with progress() as bars:
            for j, name in enumerate(names):
                bar = bars.add_task(Path(name).name, total=sum(texts.sizes))
                references = [sides[i] for i, other in comparison.pairs if other == j]
                if not traced[j]:
                    with no_progress_bars():
                        config = ModelConfig(name=name, device=device, dtype=comparison.dtype)
                        model = load(config, seed=0, trust_remote_code=trust_remote_code).model
                    how: dict[str, Any] = {"ratios": comparison.ratios, "noise": j < len(names) - 1}
                    trace(model, sides[j], texts, references, **how, advance=partial(bars.advance, bar))
                    del model  # its memory is given back before the next one is loaded
                    gc.collect()
                    torch.cuda.empty_cache()
        written = {}
        for (i, j), folder in folders.items():
            written[i, j] = _compare(texts, layout, sides[i], sides[j])
            tables.write(written[i, j], folder)
        counts = {"lines": texts.lines, "cut_lines": texts.cut, "lost_lines": texts.lost, "tokens": sum(texts.sizes)}
        counts |= {"batches": len(texts.sizes), "noise_batches": len(range(0, len(texts.sizes), NOISE_EVERY))}
        runs.write_json(out / MANIFEST, wanted | {"finished": counts})
        if keep_traces:
            tokenizer.save_pretrained(out / "traces" / "tokenizer")
        else:
            shutil.rmtree(out / "traces", ignore_errors=True)
    return written


def make_series(comparison: Comparison, frames: Mapping[tuple[int, int], Frames], out: Path) -> pd.DataFrame:
    """The table `series`, which is written into `out`: a row per checkpoint from the second on, `since` ("previous" or
    "first") and metric."""
    rows = []
    for (i, j), tables_of_pair in frames.items():
        name = make_absolute(comparison.checkpoints[j])
        for since in ("first", "previous") if j == 1 else ("first" if i == 0 else "previous",):
            place = {"index": j, "step": step_of(name), "checkpoint": name, "since": since}
            rows.append(tables_of_pair["summary"].assign(**place))
    table = pd.concat(rows, ignore_index=True)
    table = table[[*place, *(name for name in table if name not in place)]]
    table.to_parquet(out / "series.parquet", index=False)
    return table


def identity(comparison: Comparison) -> dict[str, Any]:
    """What a folder must contain to hold this comparison."""
    with Path(comparison.data).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    checkpoints = [f"{name} {fingerprint(name)}" for name in comparison.checkpoints]
    return asdict(comparison) | {"checkpoints": checkpoints, "data_digest": digest} | versions()


def _claim(out: Path, wanted: Mapping[str, Any]) -> bool:
    """Whether the folder holds this comparison to its end. Raises RunError if it holds anything else."""
    there = runs.read_json(out / MANIFEST, ())
    if there is None:
        check_new(out)
        runs.write_json(out / MANIFEST, wanted)
        return False
    finished = there.pop("finished", None) is not None
    if finished:  # of the code that wrote it nothing is needed any more
        there |= {key: wanted[key] for key in ("code", "packages")}
    check_same(out, "another comparison", there, wanted)
    return finished


def _compare(texts: Texts, layout: Layout, before: Path, after: Path) -> Frames:
    noise, change = Tally(layout), Tally(layout)
    for i, batch in enumerate(texts.batches()):
        first = Traced.load(file_of(before, i))
        change.add(batch, i, first, Traced.load(file_of(after, i)), before.name)
        if i % NOISE_EVERY == 0:
            noise.add(batch, i, first, Traced.load(file_of(before, i), again=True), ITSELF)
    return tables.tables(change, noise)


def _same_model(names: Sequence[str], trust: bool) -> tuple[PreTrainedTokenizerBase, Layout]:
    """The tokenizer and the routing layout that all checkpoints share, from their configurations alone."""
    layout, tokenizer = describe(names[0], trust)[0], load_tokenizer(names[0], trust)
    for name in names[1:]:
        try:
            layout.require(describe(name, trust)[0], name)
        except RoutingError as error:
            raise ConfigError(f"{name} is no version of {names[0]}: {error}") from error
        vocabularies = (x.get_vocab().items() for x in (tokenizer, load_tokenizer(name, trust)))
        if differing := len(set.symmetric_difference(*map(set, vocabularies))):
            raise ConfigError(f"the tokenizers of {names[0]} and {name} differ in {differing} entries. Use one.")
    return tokenizer, layout
