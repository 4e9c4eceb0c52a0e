"""How far the routing of one's own checkpoints moved: `moe-rl checkpoint compare BEFORE AFTER --data FILE.jsonl`.

Three passes over the same batches, with one model in memory at a time. The first keeps BEFORE's routes on disk. The
second, BEFORE still loaded, sees every eighth batch again in other company: the noise floor. The third compares AFTER's
routes with those on disk. Each goes on where it was killed.

Every pair of a series is a comparison of its own, in `out/<i>-<j>`, so that a series can grow. Its cost is two forwards
of every text per pair of neighbours and one per pair with the first, whose routes are kept until the end.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Bool, Int64
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from moe_rl.analysis.checkpoints import tables
from moe_rl.analysis.checkpoints.tables import Observed, PerToken, Tally
from moe_rl.analysis.checkpoints.texts import TextBatch, Texts, check_file
from moe_rl.analysis.folders import check_new, check_same, describe, fingerprint, make_absolute, step_of, versions
from moe_rl.config import ModelConfig
from moe_rl.errors import ConfigError, RoutingError
from moe_rl.models.load import load, load_tokenizer, no_progress_bars, placement
from moe_rl.routing.hooks import record_routing, replay_routing
from moe_rl.routing.trace import Layout, RoutingTrace
from moe_rl.storage import folder as runs
from moe_rl.storage.lock import Lock
from moe_rl.storage.terminal import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOISE_EVERY = 8
"""Every how many batches one is seen again for the noise floor."""
SAVE_SECONDS = 30.0
"""Between two saves of the sums."""
MANIFEST = "comparison.json"
SERIES = "series.json"
LOGITS = 2**24
"""Logits that are normalised at once."""

Advance = Callable[[str, int], None]

Ids = Int64[Tensor, "batch time"]
Mask = Bool[Tensor, "batch time"]


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
    `moe-rl checkpoint view`; else BEFORE's are deleted at the end. `shared`: a folder that keeps BEFORE's routes and
    noise floor for further comparisons of the same BEFORE, data and settings, which then do not load it again. Raises
    ConfigError or RunError, before a model is loaded, for a missing file, a line without text, a dense model,
    checkpoints of different architectures or tokenizers, and a folder that holds another comparison, lacks a table of
    this one, or is being written by another process.
    """
    c = comparison
    comparison = replace(c, before=make_absolute(c.before), after=make_absolute(c.after), data=make_absolute(c.data))
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
    with Lock(out / runs.LOCK):
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


def measure_series(
    checkpoints: Sequence[str], data: str, out: Path, *, console: Console | None = None, keep_traces: bool = False,
    settings: dict[str, Any], **where: Any,
) -> pd.DataFrame:
    """Compare neighbours, and all with the first; or go on with it. Returns the table `series`, which it writes into
    `out`: a row per checkpoint from the second on, `since` ("previous" or "first") and metric.

    `settings` are those of a `Comparison`, `where` further ones of `measure_volatility`. Raises as that does, and
    ConfigError for fewer than three checkpoints or one that comes twice.
    """
    names = [make_absolute(name) for name in checkpoints]
    if len(names) < 3 or len(set(names)) < len(names):
        raise ConfigError(f"a series needs three different checkpoints or more, but got {', '.join(names) or 'none'}")
    if not (out / SERIES).exists():
        check_new(out)
    with Lock(out / runs.LOCK):
        runs.write_json(out / SERIES, {"checkpoints": names, "data": make_absolute(data), **settings})
        console = console or Console(stderr=True)
        first = Comparison(names[0], names[0], make_absolute(data), **settings)
        decided = json.dumps(identity(first, check_file(Path(first.data))), sort_keys=True)
        shared = None if keep_traces else out / f".first-{hashlib.sha256(decided.encode()).hexdigest()[:16]}"
        rows = []
        for j in range(1, len(names)):
            for i in dict.fromkeys((0, j - 1)):
                pair = out / f"{i:02d}-{j:02d}"
                say(console, (pair.name, "bold"), f" {names[i]} → {names[j]}", wrap=True)
                frames = measure_volatility(Comparison(names[i], names[j], data, **settings), pair, console=console,
                                            keep_traces=keep_traces, shared=shared if i == 0 else None, **where)
                for since in ("first", "previous") if j == 1 else ("first" if i == 0 else "previous",):
                    place = {"index": j, "since": since, "step": step_of(names[j]), "checkpoint": names[j]}
                    rows.append(frames["summary"].assign(**place))
        for folder in out.glob(".first-*"):  # what was kept of others, too
            shutil.rmtree(folder, ignore_errors=True)
    table = pd.concat(rows, ignore_index=True)
    table = table[["index", "step", "checkpoint", "since", *(c for c in frames["summary"] if c in table)]]
    table.to_parquet(out / "series.parquet", index=False)
    return table


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


class Observer:
    """One loaded checkpoint, seen through its routers; with `ratios`, through what it says of the responses, too."""

    def __init__(self, model: nn.Module, ratios: bool = False):
        self.model, self.ratios = model, ratios
        self.device = next(model.parameters()).device
        self.decoder = getattr(model, "base_model", model)  # without the head: nobody reads logits
        self.scored = self._hands_out_scores()

    def observe(self, batch: TextBatch, reference: RoutingTrace | None = None) -> Observed:
        """One forward. `reference` names the experts whose log-probabilities are wanted: those used before. With
        `ratios` a second one replays them."""
        asked = batch.tokens, batch.attention_mask, batch.response_mask
        layout, found = self._forward(asked[0], asked[1], reference, asked[2])
        if self.ratios and reference is not None:
            with replay_routing(self.model, reference.to(self.device)):
                found["replayed_logprobs"] = self._read(*(x.to(self.device) for x in asked)).cpu()
        return _observed(batch, layout, found)

    def observe_again(self, batch: TextBatch, reference: RoutingTrace) -> Observed:
        """The same in other company: rows in reverse, in two forwards of unequal size, with three padded columns."""
        order = torch.arange(len(batch.lines) - 1, -1, -1)
        time = batch.tokens.shape[1]
        found: dict[str, Tensor] = {}
        for index in order.tensor_split([-(-len(order) // 3)]):
            if not len(index):
                continue
            tokens, mask, response = (nn.functional.pad(x[index], (0, 3)) for x in (
                batch.tokens, batch.attention_mask, batch.response_mask))
            layout, part = self._forward(tokens, mask, reference.rows(index).to(tokens.device), response)
            for name, x in part.items():
                whole = found.setdefault(name, x.new_empty((len(order), time, *x.shape[2:])))
                whole[index] = x[:, :time]
        return _observed(batch, layout, found)

    @torch.no_grad()
    def _forward(
        self, tokens: Ids, mask: Mask, reference: RoutingTrace | None, response: Mask | None = None
    ) -> tuple[Layout, dict[str, Tensor]]:
        """Experts, gates, log-probabilities and margins of one forward, on the CPU; log π of the `response`."""
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        said = {}
        with record_routing(self.model, scores=self.scored) as recording:
            if self.ratios and response is not None:
                said["logprobs"] = self._read(tokens, mask, response.to(self.device))
            else:
                self.decoder(input_ids=tokens, attention_mask=mask, use_cache=False)
        routes = recording.trace(tokens, mask)
        found = {"experts": routes.experts} | said
        if self.scored:
            scores = recording.scores(len(tokens))
            log_probs = scores.log_probs
            if reference is not None:
                ids = reference.ids().to(self.device)
                ids = nn.functional.pad(ids, (0, 0, 0, 0, 0, tokens.shape[1] - ids.shape[1]), value=-1)
                log_probs = scores.log_probs_at(ids)
            found |= {"gates": scores.gates.half().float(), "log_probs": log_probs, "margins": scores.margins}
        return routes.layout, {name: x.cpu() for name, x in found.items()}

    @torch.no_grad()
    def _read(self, tokens: Ids, mask: Mask, response: Mask) -> PerToken:
        """log π of the response tokens by one forward, head included; 0 elsewhere."""
        first = int(response.any(0).long().argmax()) or 1  # the first token of all is nobody's
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False,
                            logits_to_keep=tokens.shape[1] - first + 1).logits[:, :-1][response[:, first:]]
        size = max(1, LOGITS // logits.shape[-1])
        pieces = zip(logits.split(size), tokens[response].split(size), strict=True)
        found = [x.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0] for x, chosen in pieces]
        return torch.zeros(tokens.shape, device=self.device).masked_scatter(response, torch.cat(found))

    def _hands_out_scores(self) -> bool:
        tokens = torch.zeros(1, 2, dtype=torch.long)
        self.scored = True
        try:
            self._forward(tokens, torch.ones_like(tokens).bool(), None)
        except RoutingError:
            self.scored = False
            self._forward(tokens, torch.ones_like(tokens).bool(), None)  # raises when not the scores were at fault
        return self.scored


def _observed(batch: TextBatch, layout: Layout, found: dict[str, Tensor]) -> Observed:
    experts, tokens, mask = found.pop("experts"), batch.tokens, batch.attention_mask
    routes = RoutingTrace.from_ids(experts, layout, tokens=tokens, attention_mask=mask, check=False)
    return Observed(routes, **found)


def _same_model(comparison: Comparison, trust: bool) -> tuple[PreTrainedTokenizerBase, Layout]:
    """The tokenizer and the routing layout that both checkpoints share, from their configurations alone."""
    names = (comparison.before, comparison.after)
    layouts = [describe(name, trust)[0] for name in names]
    if layouts[0] != layouts[1]:
        before, after = (f"{len(x.sites)} MoE layers of {x.sites[0].num_experts} experts, top {x.sites[0].top_k}, "
                         f"in {x.architecture}" for x in layouts)
        raise ConfigError("the checkpoints have different architectures, so their routing cannot be compared: "
                          f"{names[0]} has {before}; {names[1]} has {after}. If only the vocab_size differs, use "
                          "resize_token_embeddings.")
    tokenizers = [load_tokenizer(name, trust) for name in names]
    vocabularies = [set(tokenizer.get_vocab().items()) for tokenizer in tokenizers]
    if apart := len(vocabularies[0] ^ vocabularies[1]):
        raise ConfigError(f"the tokenizers of {names[0]} and {names[1]} differ in {apart} entries. Use checkpoints "
                          "with the same tokenizer.")
    return tokenizers[0], layouts[0]


def identity(comparison: Comparison, digest: str) -> dict[str, Any]:
    """What a folder must say of itself to hold this comparison, of data with this digest."""
    files = {f"{side}_files": fingerprint(getattr(comparison, side)) for side in ("before", "after")}
    return asdict(comparison) | {"data_digest": digest} | versions() | files


def _finished(out: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was counted, if the folder holds this comparison to its end. Raises RunError if it holds anything else."""
    manifest = runs.read_json(out / MANIFEST, ())
    if manifest is None:
        check_new(out)
        return None
    finished = manifest.pop("finished", None)
    if finished:  # of the code that wrote it nothing is needed any more
        manifest |= {key: wanted[key] for key in ("code", "packages")}
    check_same(out, "another comparison", manifest, wanted)
    return finished


def _traced(out: Path, batches: int) -> bool:
    """Whether the folder has both traces of every batch, and what spells their tokens."""
    traces = [_file(out / "traces" / side, i) for side in ("before", "after") for i in range(batches)]
    return all(path.exists() for path in (*traces, out / "traces" / "tokenizer"))


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
