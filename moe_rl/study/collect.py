"""A finished study as a few small files that can be committed: what its figures and its tables are made from.

    study.json        the declaration
    runs.parquet      a row per run: configuration, code and package versions, processor, commit, digests of the study
                      file and of other inputs, dates, seconds, digest of the weights
    <table>.parquet   each table of the data dictionary that has rows: the columns KEPT, floats as float32

`frames.load_study` reads such a folder as it reads a folder of runs.
"""

from __future__ import annotations

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
from moe_rl.storage.folder import DECLARATION
from moe_rl.storage.frames import LABELS, Frames, load_study
from moe_rl.storage.links import replaced
from moe_rl.study.declaration import read_declaration

KEPT = {
    "steps": "reward exact eval_* zero_variance_groups response_tokens truncated entropy grad_norm grad_clipped "
    "token_log_ratio_var token_log_ratio_kurtosis token_log_ratio_max sequence_log_ratio_var token_ess token_kl_k3 "
    "clip_tokens clip_tokens_all clip_sequences clip_sequences_all expert_change_rate any_change_rate "
    "any_layer_change layers_changed jaccard_distance gate_mass_moved router_shift response_set_change "
    "replay_gap_mean replay_gap_std pull noise_floor_* push_gap_max engine_* first_update_log_ratio_max grad_cosine "
    "weights_changed lag_* sampled_* own_*",
    "updates": "attribution_* fresh_expert_change_rate fresh_any_change_rate expert_change_rate corrected_tokens pull "
    "clip_tokens clip_tokens_all token_log_ratio_var sequence_log_ratio_var own_*",
    "layers": "layer expert_change_rate any_change_rate load_entropy load_max_violation load_dead_experts margin_q50 "
    "engine_* noise_floor_* own_*",
    "lags": "lag_* stale_* token_log_ratio_var token_ess token_kl_k3 clip_tokens* own_*",
}
"""Columns of each table beside its keys, as patterns; the other columns stay with the runs. All columns of a table
without an entry are kept."""


def collect(folder: Path, out: Path, *, also: Sequence[str] = (), mix_code: bool = False) -> dict[Path, int]:
    """Write the finished runs of the study in `folder` into `out`; returns the files and their sizes in bytes.

    `also` names further columns, by pattern, in every table; a pattern may name a table, `layers:engine_*`. A table
    without any column but keys is left out. The columns of the declared endpoints and metrics are kept, too. Unfinished
    runs are left out, and named in `study.json`.

    Raises ConfigError for a pattern that no column matches and for a folder `out` that contains other things or another
    study's tables, or where the tables would hide runs; RunError where nothing has finished. After a kill `out` may
    lack `runs.parquet`, and cannot be read until the study is collected again.
    """
    declared = read_declaration(folder, trust=True)  # it is copied, and nothing that it names is called
    _check_out(folder, out, declared["name"])
    frames = load_study(folder, mix_code=mix_code)
    for pattern in also:
        if not any(_matches(name, c, (pattern,)) for name in pooled() for c in frames[name]):
            raise ConfigError(f"--also {pattern}: no column of this study matches. See docs/columns.md.")
    endpoints = (declared["endpoint"], *declared["further_endpoints"], *declared["metrics"])
    drawn = (name.split(":")[2] for name in declared["figures"] if name.count(":") == 2)  # against:FACTOR:METRIC
    also = [*also, *(f"steps:{name.partition(',')[0]}" for name in (*endpoints, *drawn))]
    tables = {name: _select(name, frames[name], also) for name in pooled()}
    keys = {name: len(LABELS) + len(TABLES[name]) for name in tables}
    empty = [n for n, table in tables.items() if n != "steps" and (table.empty or len(table.columns) == keys[n])]
    tables = {name: table for name, table in tables.items() if name not in empty}
    tables["runs"] = _runs(frames)
    content = {key: value for key, value in declared.items() if key not in ("folder", "untrusted")}
    left_out = [text.replace(f"{folder}/", "") for text in frames.left_out]
    aside = replaced(out / ".tmp-tables")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir(parents=True)
    runs.write_json(aside / DECLARATION, content | {"left_out": left_out}, durable=False)
    for name, table in tables.items():
        _write(table, aside / f"{name}.parquet")
    for name in ("runs", *empty):  # without runs.parquet it is no collected study: tables of two times are never read
        (out / f"{name}.parquet").unlink(missing_ok=True)
    written = [out / DECLARATION, *(out / f"{name}.parquet" for name in tables)]
    for file in written:
        (aside / file.name).rename(file)
    aside.rmdir()
    return {file: file.stat().st_size for file in written}


def _check_out(folder: Path, out: Path, name: str) -> None:
    """Tables stand for every run below them, also for those that are still to come; and for those of one study."""
    if folder.resolve().is_relative_to(out.resolve()) or any(runs.run_folders(out)):
        raise ConfigError(f"--out {out}: tables there would hide the runs of {folder}. Give another folder.")
    there = runs.read_json(out / DECLARATION, ("name",))
    if there is None and (other := sorted(p.name for p in out.glob("*") if not p.name.startswith("."))):
        raise ConfigError(f"--out {out} contains {', '.join(other[:3])} but no {DECLARATION}. Use {out / name}.")
    if there is not None and there["name"] != name:
        raise ConfigError(f"--out {out} contains the tables of {there['name']!r}, not of {name!r}. Use another folder.")


def _select(name: str, frame: pd.DataFrame, also: Sequence[str]) -> pd.DataFrame:
    """The keys of a table and the columns that are kept, floats as float32."""
    keys = [*LABELS, *TABLES[name]]
    patterns = (*KEPT.get(name, "*").split(), *also)
    columns = [c for c in frame if c not in keys and _matches(name, c, patterns)]
    chosen = frame.reindex(columns=[*keys, *columns])
    return chosen.astype({c: "float32" for c in chosen.select_dtypes("float64")})


def _matches(table: str, column: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(f"{table}:{column}" if ":" in p else column, p) for p in patterns)


def _runs(frames: Frames) -> pd.DataFrame:
    """Paths within the study: where it lay on somebody's machine says nothing."""
    parts = frames.runs[["arm", "condition", "seed"]].itertuples(index=False)
    paths = [f"{arm}/{condition}/seed={seed}" for arm, condition, seed in parts]
    return frames.runs.assign(path=paths, threads=frames.runs["threads"].map(str, na_action="ignore"))


def _write(frame: pd.DataFrame, file: Path) -> None:
    """The bytes of floats apart, since exponents repeat; all other columns by a dictionary."""
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()
    floats = [name for name in frame if frame[name].dtype == "float32"]
    pq.write_table(
        table,
        file,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in table.column_names if name not in floats],
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") or None,
    )
