"""A finished study as a few small files that can be committed: what its figures and its tables are made from.

    studies/results/<study>/
        study.json        the declaration
        runs.parquet      a row per run: full configuration, code and package versions, processor, commit, digests of
                          the study file and of other inputs, when it was made, seconds, digest of the weights
        <table>.parquet   each table of the data dictionary that has rows: the columns KEPT, floats as float32
        <name>.parquet    a table that the study's own trainer wrote into its runs, whole

`frames.load_study` reads such a folder as it reads a folder of runs.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moe_rl.errors import ConfigError
from moe_rl.storage import folder as runs
from moe_rl.storage.columns import TABLES, pooled
from moe_rl.storage.commits import read_parquet
from moe_rl.storage.folder import DECLARATION
from moe_rl.storage.frames import LABELS, REPLACING, Frames, load_study
from moe_rl.storage.lock import Lock
from moe_rl.study.declaration import read_declaration

KEPT = {
    "steps": (
        "reward",
        "exact",
        "eval_*",
        "zero_variance_groups",
        "response_tokens",
        "truncated",
        "entropy",
        "grad_norm",
        "grad_clipped",
        "token_log_ratio_var",
        "token_log_ratio_kurtosis",
        "token_log_ratio_max",
        "sequence_log_ratio_var",
        "token_ess",
        "token_kl_k3",
        "clip_tokens",
        "clip_tokens_all",
        "clip_sequences",
        "clip_sequences_all",
        "expert_change_rate",
        "any_change_rate",
        "any_layer_change",
        "layers_changed",
        "jaccard_distance",
        "gate_mass_moved",
        "router_shift",
        "response_set_change",
        "replay_gap_mean",
        "replay_gap_std",
        "pull",
        "noise_floor_*",
        "push_gap_max",
        "engine_*",
        "first_update_log_ratio_max",
        "grad_cosine",
        "lag_*",
        "sampled_*",
        "own_*",
    ),
    "updates": (
        "attribution_*",
        "fresh_expert_change_rate",
        "fresh_any_change_rate",
        "expert_change_rate",
        "clip_tokens",
        "clip_tokens_all",
        "token_log_ratio_var",
        "sequence_log_ratio_var",
        "own_*",
    ),
    "layers": (
        "layer",
        "expert_change_rate",
        "any_change_rate",
        "load_entropy",
        "load_max_violation",
        "load_dead_experts",
        "margin_q50",
        "engine_*",
        "noise_floor_*",
        "own_*",
    ),
    "lags": ("lag_*", "stale_*", "token_log_ratio_var", "token_ess", "token_kl_k3", "clip_tokens*", "own_*"),
}
"""Columns of each table, beside its keys, as patterns; the rest stays with the runs. A table without an entry is kept
whole."""


def collect(folder: Path, out: Path, *, also: Sequence[str] = (), without: Sequence[str] = (),
            mix_code: bool = False) -> dict[Path, int]:
    """Write the finished runs of the study in `folder` into `out`; returns the files and their sizes in bytes.

    `also` names further columns, by pattern, wherever they appear, `without` those to leave out; a pattern may name a
    table, `layers:engine_*`, and a table of which nothing but keys would be left is left out whole. The columns of the
    declared endpoints and metrics are kept, too. Unfinished runs are left out, and named in `study.json`.

    Raises ConfigError for a pattern that no column matches and for a folder `out` that holds other things or another
    study's tables, or where the tables would hide runs; RunError where nothing has finished. A kill leaves the tables
    of an earlier time as they are, or, between two renames, says so to whoever reads them.
    """
    beside = out.absolute().parent / f".{out.absolute().name}.collect.lock"
    with Lock(beside):  # two studies at once would each find nothing there
        try:
            return _collect(folder, out, also, without, mix_code)
        finally:
            for file in (beside, beside.with_suffix(".holder")):
                file.unlink(missing_ok=True)


def _collect(folder: Path, out: Path, also: Sequence[str], without: Sequence[str], mix_code: bool) -> dict[Path, int]:
    declared = read_declaration(folder, trust=True)  # it is copied, and nothing that it names is called
    _check_out(folder, out, declared["name"])
    frames = load_study(folder, mix_code=mix_code)
    for option, patterns in (("also", also), ("without", without)):
        for pattern in patterns:
            if not any(_matches(name, c, (pattern,)) for name in pooled() for c in frames[name]):
                raise ConfigError(f"--{option} {pattern}: no column of this study matches. See docs/columns.md.")
    endpoints = (declared["endpoint"], *declared["further_endpoints"], *declared["metrics"])
    drawn = (name.split(":")[2] for name in declared["figures"] if name.count(":") == 2)  # against:FACTOR:METRIC
    also = [*also, *(f"steps:{one.partition(',')[0]}" for one in (*endpoints, *drawn))]
    tables = {name: _select(name, frames[name], also, without) for name in pooled()}
    nothing = [name for name in tables if name != "steps" and _says_nothing(name, tables[name])]
    tables = {name: table for name, table in tables.items() if name not in nothing} | _own(frames)
    tables["runs"] = _runs(frames)  # last: without it a first collection is none
    left_out = [text.replace(f"{folder}/", "") for text in frames.left_out]
    aside = out / ".tmp-tables"
    shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
    aside.mkdir(parents=True)
    runs.write_json(aside / DECLARATION, declared | {"left_out": left_out}, durable=False)
    for name, table in tables.items():
        _write(table, aside / f"{name}.parquet")
    (out / REPLACING).touch()  # until all are of one time
    for name in nothing:
        (out / f"{name}.parquet").unlink(missing_ok=True)  # of an earlier time
    written = [out / DECLARATION, *(out / f"{name}.parquet" for name in tables)]
    for file in written:
        (aside / file.name).rename(file)
    aside.rmdir()
    (out / REPLACING).unlink()
    return {file: file.stat().st_size for file in written}


def _check_out(folder: Path, out: Path, name: str) -> None:
    """Tables stand for every run below them, also for those that are still to come; and for those of one study."""
    if folder.resolve().is_relative_to(out.resolve()) or any(runs.run_folders(out)):
        raise ConfigError(f"--out {out}: tables there would hide the runs of {folder}. Give another folder, e.g. --out "
                          "results.")
    there = runs.read_json(out / DECLARATION, ("name",))
    if there is None and (other := sorted(p.name for p in out.glob("*") if not p.name.startswith("."))):
        raise ConfigError(f"--out {out} contains {', '.join(other[:3])} but no {DECLARATION}, so it is not a folder of "
                          f"tables. Give another folder, e.g. --out {out / name}.")
    if there is not None and there["name"] != name:
        raise ConfigError(f"--out {out} contains the tables of the study {there['name']!r}, and those of {name!r} "
                          f"would overwrite them. Give another folder, e.g. --out {out.parent / name}.")


def _select(name: str, frame: pd.DataFrame, also: Sequence[str], without: Sequence[str]) -> pd.DataFrame:
    first = [*LABELS, *TABLES[name]]
    kept = [c for c in frame if c not in first and _matches(name, c, (*KEPT.get(name, "*"), *also))
            and not _matches(name, c, without)]
    return _narrow(frame.reindex(columns=[*first, *kept]))


def _says_nothing(name: str, table: pd.DataFrame) -> bool:
    return table.empty or len(table.columns) == len(LABELS) + len(TABLES[name])


def _matches(table: str, column: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(f"{table}:{column}" if ":" in p else column, p) for p in patterns)


def _narrow(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype({c: "float32" for c in frame.select_dtypes("float64")})


def _own(frames: Frames) -> dict[str, pd.DataFrame]:
    """The tables beside the usual ones, of all runs, with the labels of each."""
    found: dict[str, list[pd.DataFrame]] = {}
    for run in frames.runs.itertuples():
        for file in sorted(Path(run.path).glob("*.parquet")):
            if file.stem not in TABLES:
                labels = {label: getattr(run, label) for label in LABELS}
                rows = read_parquet(file).to_pandas()
                found.setdefault(file.stem, []).append(rows.assign(**labels)[[*LABELS, *rows.columns]])
    return {name: _narrow(pd.concat(parts, ignore_index=True)) for name, parts in found.items()}


def _runs(frames: Frames) -> pd.DataFrame:
    """Paths within the study: where it lay on somebody's machine says nothing."""
    parts = frames.runs[["arm", "factors", "seed"]].itertuples(index=False)
    paths = [f"{arm}/{factors}/seed={seed}" for arm, factors, seed in parts]
    return frames.runs.assign(path=paths, threads=frames.runs["threads"].map(str, na_action="ignore"))


def _write(frame: pd.DataFrame, file: Path) -> None:
    """Every column in the encoding that is smaller: bytes of floats apart, since exponents repeat, or a dictionary."""
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()

    def size(name: str, apart: Sequence[str]) -> int:
        _compressed(table.select([name]), alone := io.BytesIO(), apart)
        return alone.tell()

    floats = [name for name in frame if frame[name].dtype == "float32"]
    _compressed(table, file, [name for name in floats if size(name, [name]) < size(name, [])])


def _compressed(table: pa.Table, to: Path | io.BytesIO, apart: Sequence[str]) -> None:
    pq.write_table(table, to, compression="zstd", compression_level=19,
                   use_dictionary=[name for name in table.column_names if name not in apart],
                   column_encoding=dict.fromkeys(apart, "BYTE_STREAM_SPLIT") or None)
