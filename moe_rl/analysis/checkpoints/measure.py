"""How far the routing of one's own checkpoints moved: `moe-rl volatility BEFORE AFTER --data FILE.jsonl`.

Three passes over the same batches, with one model in memory at a time. The first keeps BEFORE's routes on disk. The
second, BEFORE still loaded, sees every eighth batch again in other company: the noise floor. The third compares AFTER's
routes with those on disk. Each goes on where it was killed.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from moe_rl.analysis.checkpoints import tables
from moe_rl.analysis.checkpoints.observed import Observed, Observer
from moe_rl.analysis.checkpoints.tally import Tally
from moe_rl.analysis.checkpoints.texts import TextBatch, Texts, check_file
from moe_rl.config import SHIPPED, ModelConfig, folder_of
from moe_rl.errors import ConfigError, RoutingError, RunError
from moe_rl.models.load import PRESETS, check_weights, load, load_tokenizer, no_progress_bars, placement, skeleton
from moe_rl.routing.sites import layout_of
from moe_rl.routing.trace import Layout
from moe_rl.storage import folder as runs
from moe_rl.storage.lease import Lease
from moe_rl.storage.terminal import say
from moe_rl.storage.versions import code_version, package_versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOISE_EVERY = 8
"""Every how many batches one is seen again for the noise floor."""
SAVE_SECONDS = 30.0
"""Between two saves of the sums."""
MANIFEST = "comparison.json"
PATHS = ("before", "after", "data")
Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Comparison:
    """Everything that decides the numbers."""

    before: str
    """A Hugging Face checkpoint: a folder, or a name on the hub."""
    after: str
    data: str
    """A JSONL file; see `Texts`."""
    dtype: str = "float32"
    max_tokens: int = 2048
    """Longer lines are cut, and counted."""
    batch_tokens: int = 4096
    """Most tokens in one forward, padding included."""
    ratios: bool = False
    """Score the responses, too: by AFTER naturally and with BEFORE's routes, against BEFORE. A forward more."""


def measure_volatility(
    comparison: Comparison,
    out: Path,
    *,
    device: str = "cpu",
    keep_traces: bool = False,
    trust_remote_code: bool = False,
    shared: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Compare two checkpoints, or go on with it. Writes tables into `out` and returns them by name (see `tables`).

    With `keep_traces`, `out/traces/before` and `out/traces/after` keep a trace file per batch, gates included, for
    `moe-rl view`; else BEFORE's are deleted at the end. `shared`: a folder that keeps BEFORE's routes and noise floor
    for further comparisons of the same BEFORE, data and settings, which then do not load it again. Raises ConfigError
    or RunError, before a model is loaded, for a missing file, a line without text, a dense model, checkpoints of
    different architectures or tokenizers, and a folder that holds another comparison, lacks a table of this one, or is
    being written by another process.
    """
    c = comparison
    comparison = replace(c, before=located(c.before), after=located(c.after), data=located(c.data))
    data = Path(comparison.data)
    placement(ModelConfig(device=device, dtype=comparison.dtype))
    digest = check_file(data)
    tokenizer, layout = _same_model(comparison, trust_remote_code)
    wanted = identity(comparison, digest)
    finished = _finished(out, wanted)
    if finished and (not keep_traces or _traced(out, finished["batches"])):
        return tables.read(out)
    console = console or Console(stderr=True)
    say(console, f"reading {data}")
    texts = Texts(data, tokenizer, max_tokens=comparison.max_tokens, batch_tokens=comparison.batch_tokens)
    with Lease(out / runs.LEASE):
        _finished(out, wanted)  # another process may have begun something else since
        if not (out / MANIFEST).exists():  # the folder is claimed once nothing in the request can be wrong any more
            runs.write_json(out / MANIFEST, wanted)
        passes = _Passes(comparison, out, texts, layout, max(tokenizer.get_vocab().values()) + 1, keep_traces,
                         shared or out)
        with _progress(console, texts) as advance:
            noise, tally = passes.run(lambda name: _observer(name, comparison, device, trust_remote_code), advance)
        frames = tables.tables(tally, noise, tokenizer)
        tables.write(frames, out)
        if keep_traces:
            tokenizer.save_pretrained(out / "traces" / "tokenizer")
        counts = {"lines": texts.lines, "cut_lines": texts.cut, "lost_lines": texts.lost, "tokens": sum(texts.sizes),
                  "batches": len(texts.sizes), "noise_batches": noise.done}
        runs.write_json(out / MANIFEST, (runs.read_json(out / MANIFEST, ()) or wanted) | {"finished": counts})
        for folder in (out / "sums", *(() if keep_traces else (out / "traces",))):
            shutil.rmtree(folder)
    return frames


class _Passes:
    """The three passes of one comparison, each of which goes on where it was killed."""

    def __init__(
        self, comparison: Comparison, out: Path, texts: Texts, layout: Layout, vocabulary: int, keep_after: bool,
        first: Path,
    ):
        self.comparison, self.texts, self.keep_after = comparison, texts, keep_after
        self.layout, self.vocabulary = layout, vocabulary
        self.before, self.after = first / "traces" / "before", out / "traces" / "after"
        self.sums = {"noise": first / "sums", "change": out / "sums"}
        for folder in (self.before, self.after, *self.sums.values()):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, load: Callable[[str], Observer], advance: Advance) -> tuple[Tally, Tally]:
        """The noise floor and the comparison. `load` makes an observer of a checkpoint's name."""
        count = len(self.texts.sizes)
        noise, change = (Tally(name, self.layout, self.comparison.max_tokens, self.vocabulary)
                         for name in ("noise", "change"))
        for tally in (noise, change):
            tally.restore(self.sums[tally.name])
        if noise.done < -(-count // NOISE_EVERY):
            model = load(self.comparison.before)
            self._keep_routes(model, advance)
            self._fill(noise, lambda i, batch, first: model.observe_again(batch, first.routes), advance)
            del model  # its memory is given back before the next one is loaded
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        untraced = {i for i in range(count) if self.keep_after and not _file(self.after, i).exists()}
        if change.done < count or untraced:
            model = load(self.comparison.after)

            def observe(i: int, batch: TextBatch, first: Observed) -> Observed:
                seen = model.observe(batch, first.routes)
                if self.keep_after:
                    seen.save(_file(self.after, i), batch)
                return seen

            self._fill(change, observe, advance, untraced)
        return noise, change

    def _keep_routes(self, model: Observer, advance: Advance) -> None:
        for i, batch in enumerate(self.texts.batches()):
            if not _file(self.before, i).exists():
                model.observe(batch).save(_file(self.before, i), batch)
            advance("before", self.texts.sizes[i])

    def _fill(
        self,
        tally: Tally,
        observe: Callable[[int, TextBatch, Observed], Observed],
        advance: Advance,
        again: Collection[int] = (),
    ) -> None:
        """Add to a tally the batches that it lacks; the noise floor takes one in NOISE_EVERY. Batches in `again` are
        observed even if it has them: for their traces, which were not asked for before."""
        saved = time.monotonic()
        every = NOISE_EVERY if tally.name == "noise" else 1
        for i, batch in enumerate(self.texts.batches()):
            if i % every:
                continue
            if i // every >= tally.done:
                first = Observed.load(_file(self.before, i))
                tally.add(batch, i, first, observe(i, batch, first))
            elif i in again:
                observe(i, batch, Observed.load(_file(self.before, i)))
            if time.monotonic() - saved > SAVE_SECONDS:
                tally.save(self.sums[tally.name])
                saved = time.monotonic()
            advance(tally.name, self.texts.sizes[i])
        tally.save(self.sums[tally.name])


def _same_model(comparison: Comparison, trust: bool) -> tuple[PreTrainedTokenizerBase, Layout]:
    """The tokenizer and the routing layout that both checkpoints share, from their configurations alone."""
    names = (comparison.before, comparison.after)
    layouts = [_layout(name, trust) for name in names]
    if layouts[0] != layouts[1]:
        before, after = (f"{len(x.sites)} routing sites of {x.sites[0].num_experts} experts, top {x.sites[0].top_k}, "
                         f"in {x.architecture}" for x in layouts)
        raise ConfigError(f"the two checkpoints are of different architectures, so their routes cannot be compared: "
                          f"{names[0]} has {before}; {names[1]} has {after}, a family and a digest of its hidden size, "
                          "layers and vocab_size. Where only the last differs, resize_token_embeddings helps.")
    tokenizers = [load_tokenizer(name, trust) for name in names]
    vocabularies = [set(tokenizer.get_vocab().items()) for tokenizer in tokenizers]
    if apart := len(vocabularies[0] ^ vocabularies[1]):
        raise ConfigError(f"the tokenizers of {names[0]} and {names[1]} differ in {apart} entries, so the two "
                          "checkpoints would not read the same tokens.")
    return tokenizers[0], layouts[0]


def _layout(name: str, trust: bool) -> Layout:
    if name in PRESETS:
        raise ConfigError(f"{name!r} is a preset, whose weights are random; give the folder of a checkpoint.")
    check_weights(name)
    try:
        model = skeleton(ModelConfig(name=name), trust)
    except ConfigError as error:
        if "trust_remote_code" in str(error.__cause__):
            raise ConfigError(f"{name} brings its own code, which runs only with --trust-remote-code.") from error
        raise
    try:
        return layout_of(model)
    except RoutingError as error:
        raise ConfigError(f"{name}: {error}") from error


def identity(comparison: Comparison, digest: str) -> dict[str, Any]:
    """What a folder must say of itself to hold this comparison, of data with this digest."""
    versions = {"code": code_version("analysis"), "packages": package_versions()}
    files = {f"{side}_files": fingerprint(getattr(comparison, side)) for side in ("before", "after")}
    return asdict(comparison) | {"data_digest": digest} | versions | files


def _finished(out: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was counted, if the folder holds this comparison to its end. Raises RunError if it holds anything else."""
    manifest = runs.read_json(out / MANIFEST, ())
    if manifest is None:
        if out.exists() and any(file.name != runs.LEASE for file in out.iterdir()):
            raise RunError(f"--out {out} has other files in it; give a folder that is new or empty.")
        return None
    finished = manifest.pop("finished", None)
    there = {key: value for key, value in manifest.items() if not (finished and key in ("code", "packages"))}
    there.setdefault("ratios", False)  # of older code
    there |= {key: located(there[key]) for key in PATHS if isinstance(there.get(key), str)}
    different = {k: v for k, v in runs.differing(there, wanted).items() if k.split(".")[0] in there}
    if different:
        listed = "; ".join(f"{key}: {a!r} there, {b!r} now" for key, (a, b) in different.items())
        raise RunError(f"{out} holds another comparison ({listed}); give another --out, or delete it.")
    return finished


def located(name: str) -> str:
    """A file or folder by its absolute path, wherever it is read again; a name on the hub, or of what comes with the
    package, as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() and name not in SHIPPED else name


def _traced(out: Path, batches: int) -> bool:
    """Whether the folder has both traces of every batch, and what spells their tokens."""
    traces = [_file(out / "traces" / side, i) for side in ("before", "after") for i in range(batches)]
    return all(path.exists() for path in (*traces, out / "traces" / "tokenizer"))


def fingerprint(name: str) -> str:
    """Of the files of a checkpoint folder, by name, size and time; the name itself on the hub."""
    folder = folder_of(name)
    if not folder.is_dir():
        return name
    files = sorted(f for f in folder.iterdir() if f.is_file())
    listed = repr([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _observer(name: str, comparison: Comparison, device: str, trust: bool) -> Observer:
    with no_progress_bars():
        loaded = load(ModelConfig(name=name, device=device, dtype=comparison.dtype), seed=0, trust_remote_code=trust)
    return Observer(loaded.model, comparison.ratios)


def _file(folder: Path, i: int) -> Path:
    return folder / f"{i:06d}.safetensors"


@contextmanager
def _progress(console: Console, texts: Texts) -> Iterator[Advance]:
    """A bar per pass, in tokens."""
    columns = (TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.percentage:3.0f}%"),
               TextColumn("{task.completed:,.0f} tokens"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        rows = {name: bars.add_task(text, total=sum(texts.sizes[::every])) for name, text, every in (
            ("before", "routes before", 1), ("noise", "noise floor", NOISE_EVERY), ("change", "routes after", 1))}
        yield lambda name, tokens: bars.advance(rows[name], tokens)
