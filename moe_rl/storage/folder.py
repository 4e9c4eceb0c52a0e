"""Runs on disk: a folder per run that survives a SIGKILL at any instant (`frames` reads many of them at once).

    runs/<study>/<arm>/<condition>/seed=<n>/
        manifest.json     configuration and its hash, seed, code and package versions, processor, commit, digests of
                          what it is made from and of the study file, device, dates, seconds
        progress.json     state, step, seconds per step; replaced at every step
        tables/, commit/  rows, and the checkpoint of the last commit, complete or absent after a kill: see `commits`
        lock              held by the process that works in the folder: see `lock`

No torch here: listing, plotting and comparing runs stays instant.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_rl.config import LATER, hash_of, same_value
from moe_rl.errors import ConfigError, RunError, Stopped
from moe_rl.ranks import from_rank_0
from moe_rl.storage import commits
from moe_rl.storage.columns import TABLES
from moe_rl.storage.commits import Row, fsync, last_step, latest_commit
from moe_rl.storage.links import replaced, require_inside
from moe_rl.storage.lock import Lock, is_held
from moe_rl.storage.provenance import (
    code_version,
    declared_by,
    digest,
    git_state,
    inputs_of,
    instruction_set,
    merged,
    merged_git,
    package_versions,
    processor,
)

DIVERGED, DIGEST = "diverged", "checkpoint.sha256"
"""The files of a commit that say how the run diverged, and what its checkpoint was when it was written."""
ENDED = ("finished", "diverged")
"""States of a run that is not run again."""
LOCK = "lock"
"""The file of a run that the process at work on it locks."""
DECLARATION = "study.json"
"""What declares a study, in its folder."""


class RunFolder:
    """One run's folder, whose lock this object holds while it is open. Use `with RunFolder.open(...) as folder`."""

    def __init__(self, path: Path, lock: Lock, manifest: dict[str, Any]) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the run was told to stop: then its next step is committed, which raises Stopped."""
        self._opened = time.time()
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}

    @classmethod
    def open(
        cls, path: Path, config: Mapping[str, Any], hash: str, *, trainer: str = "", study_file: Path | None = None
    ) -> RunFolder:
        """Create the folder of a run, or go on with it; `trainer` names what carries it out, `study_file` what declares
        it.

        Raises RunError when the folder holds another configuration (naming the keys that differ; those of LATER may),
        something that is not a run, or a link out of its study, and when another process is running it. Nothing is
        overwritten then.
        """
        require_unlinked(path)
        check(path, config, hash)
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(Lock(path / LOCK))
            for leftover in [*path.glob(".tmp-*"), *path.glob("commit/.tmp-*")]:
                is_folder = leftover.is_dir() and not leftover.is_symlink()
                shutil.rmtree(leftover) if is_folder else leftover.unlink()
            manifest = read_manifest(path) or {
                "created": time.time(),
                "hash": hash,
                "seed": config.get("seed"),
                "code": [],
            }
            config = dict(config)
            config["steps"] = max(config.get("steps", 0), manifest.get("config", config).get("steps", 0))
            codes = [*manifest["code"], *({code_version()} - set(manifest["code"]))]
            trainer = trainer or manifest.get("trainer", "")
            inputs = merged(manifest.get("inputs", {}), inputs_of(config, trainer))
            made_by = package_versions() | {"processor": processor(), "instruction_set": instruction_set()}
            went_on = manifest.get("went_on", {})
            for key, (old, new) in differing(manifest.get("config", config), config).items():
                went_on[key] = [*went_on.get(key, [old]), new]
            manifest |= {
                "config": config,
                "hash": hash,
                "went_on": went_on,
                "code": codes,
                "git": merged_git(manifest.get("git"), git_state()),
                "packages": merged(manifest.get("packages", {}), made_by),
                "trainer": trainer,
                "inputs": inputs,
                "declared": declared_by(study_file, manifest.get("declared")),
                "device": config.get("model", {}).get("device", "cpu"),
                "threads": os.environ.get("OMP_NUM_THREADS") or os.cpu_count(),
            }
            folder = cls(path, lock, manifest)
            write_json(path / "manifest.json", manifest)
            undo.pop_all()
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @property
    def step(self) -> int:
        """Of the last commit; 0 before the first."""
        return last_step(self.path)

    def latest(self) -> tuple[int, Path | None]:
        """The step of the last commit and the folder of its checkpoint. (0, None) before the first.

        Raises RunError for a checkpoint that is no longer what was written.
        """
        commit = latest_commit(self.path)
        if commit is None:
            if "finished" in self.manifest:
                raise RunError(
                    f"{self.path} has finished, but its checkpoint is missing. Restore it, or delete the run."
                )
            return 0, None
        if digest(commit / "checkpoint") != (commit / DIGEST).read_text(encoding="utf-8"):
            raise RunError(f"{commit / 'checkpoint'} is not what the run wrote. Restore it, or delete {self.path}.")
        return self.step, commit / "checkpoint"

    def add(self, table: str, rows: Iterable[Row]) -> None:
        """Rows for the next commit; their `step` is later than that of the last one.

        Raises RunError for a table or a column that the data dictionary does not explain.
        """
        rows = list(rows)
        commits.check_rows(table, rows)
        self._rows[table] += rows

    def diverged(self) -> str | None:
        """How the run diverged, where its last commit says so: then there is nothing to go on with."""
        commit = latest_commit(self.path)
        marker = None if commit is None else commit / DIVERGED
        return marker.read_text(encoding="utf-8") if marker is not None and marker.exists() else None

    def commit(self, step: int, save: Callable[[Path], None], diverged: str | None = None) -> None:
        """The rows added since the last commit and the checkpoint of `step`, in one atomic change.

        `save` writes the checkpoint into the folder it gets; `diverged` says that its weights are those in which a
        later step broke off. A kill at any instant leaves either the previous commit or this one. A step that is
        committed already is left as it is.

        Raises RunError, and leaves the run as it is, when another process has taken it over; Stopped, after the commit,
        where the run is `stopping`.
        """
        folder = self.path / "commit"
        aside, final = folder / f".tmp-{step}", folder / f"step={step:06d}"
        if final.exists():
            return self._stop(step)
        (aside / "checkpoint").mkdir(parents=True)
        save(aside / "checkpoint")
        (aside / DIGEST).write_text(digest(aside / "checkpoint"), encoding="utf-8")
        if diverged is not None:
            (aside / DIVERGED).write_text(diverged, encoding="utf-8")
        for file in aside.rglob("*"):
            fsync(file)
        fsync(aside)
        commits.add_parts(self.path, step, self._rows)
        aside.rename(final)
        fsync(folder)
        fsync(self.path)
        commits.drop_commits(self.path, but=final)
        self._rows = {name: [] for name in TABLES}
        self._stop(step)

    def _stop(self, step: int) -> None:
        if self.stopping():
            raise Stopped(f"{self.path} was told to stop; step {step} is committed. Repeat the command to continue.")

    def progress(self, step: int, **values: Any) -> None:
        """Where the run is, for `list` and the live display: atomically replaced, not fsynced."""
        steps, now = self.manifest["config"]["steps"], time.time()
        state = {"step": step, "steps": steps, "started": self._opened, "updated": now, "pid": os.getpid(), **values}
        write_json(self.path / "progress.json", state, durable=False)

    def finish(self, diverged: str | None = None) -> None:
        """Mark the run as finished at its last commit, or say how it diverged.

        The manifest gains the step, the seconds of all steps and a digest of the final checkpoint.
        """
        commit = latest_commit(self.path)
        if commit is None:
            raise RunError(f"{self.path} has no checkpoint, but must have one to end. {diverged or ''}".strip())
        rows = commits.read_rows(self.path, "steps")
        seconds = sum(s or 0 for s in rows["seconds_step"].to_pylist()) if "seconds_step" in rows.column_names else None
        self.manifest |= {
            "finished": self.step,
            "finished_at": time.time(),
            "seconds": seconds,
            "checkpoint": (commit / DIGEST).read_text(encoding="utf-8"),
        }
        self.manifest.pop("diverged", None)
        if diverged is not None:
            self.manifest["diverged"] = diverged
        write_json(self.path / "manifest.json", self.manifest)
        commits.drop_commits(self.path, but=commit)  # a kill may have left an earlier one


def check(path: Path, config: Mapping[str, Any], hash: str) -> None:
    """Raise RunError where the folder cannot become, or go on with, a run of this configuration. Changes nothing."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, but a run needs a folder. Choose another --out.")
    commits.require_parts(path)
    manifest = read_manifest(path)
    if manifest is None:
        names = {p.name for p in path.iterdir() if not p.name.startswith(".tmp-")} if path.is_dir() else set()
        if foreign := sorted(names - {LOCK, "lock.holder", "log.txt"}):
            raise RunError(f"{path} contains {', '.join(foreign[:3])}, so it is not a run. Choose another --out.")
    elif manifest["hash"] != hash:
        there, changed = manifest["config"], differing(manifest["config"], config)
        passed = [n for n in config.get("hf_checkpoints", ()) if n <= last_step(path)]
        if {*passed} <= {*there.get("hf_checkpoints", ())}:  # else some would be missing without a word
            changed.pop("hf_checkpoints", None)
        changes = "; ".join(f"{k}: {a!r} there, {b!r} now" for k, (a, b) in changed.items() if k not in LATER)
        if changes or manifest["hash"] != hash_of(there):
            raise RunError(
                f"{path} contains a run of another configuration ({changes or 'another version of moe_rl wrote it'}). "
                "Choose another --out."
            )


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The run's manifest, or None where there is none. Raises RunError for a file that is not one."""
    return read_json(path / "manifest.json", ("hash", "config", "code"))


def state(path: Path, steps: int | None = None) -> dict[str, Any]:
    """What a run is doing: its progress and `state`: waiting, running, failed, interrupted, finished or diverged.

    `steps` is the length asked for, by default the one in the manifest. A diverged run has ended: its numbers stopped
    being finite, which is a result.
    """
    manifest, progress = read_manifest(path), {"step": last_step(path)}
    with contextlib.suppress(RunError):  # it is not fsynced, so a power cut may leave half of one
        progress = read_json(path / "progress.json", ("step",)) or progress
    if manifest is None:
        return {**progress, "state": "waiting", "steps": steps}
    steps, ended = steps or manifest["config"]["steps"], manifest.get("finished", -1)
    if is_held(path / LOCK):
        name = "running"
    elif "diverged" in manifest and (ended < steps or ended == manifest["config"]["steps"]):
        name, progress["step"] = "diverged", ended  # before the end, or in the evaluation after the last step
    elif ended >= steps:
        name, progress["step"] = "finished", ended
    else:
        name = "failed" if "error" in progress else "interrupted"
    left = (steps - progress["step"]) * progress["seconds_per_step"] if progress.get("seconds_per_step") else None
    return {**progress, "state": name, "steps": steps, "seconds_left": 0.0 if name in ENDED else left}


def require_unlinked(path: Path) -> None:
    """Raise RunError where a run's folder, or anything in it, is a link out of its study, whose folder may be one. Its
    log is replaced."""
    require_inside(path, path.parents[2] if path.name.startswith("seed=") else path, but="log.txt")


def run_folders(root: Path) -> Iterator[Path]:
    """Every run below a root, a study, an arm, or the run itself, in the order of their paths."""
    patterns = ("manifest.json", *(f"{'*/' * depth}seed=*/manifest.json" for depth in range(4)))
    yield from sorted({m.parent for pattern in patterns for m in Path(root).glob(pattern)})


def differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys at which two nested configurations differ, with both values (None where one has no such key)."""
    values: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*a, *b]):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            values |= differing(x, y, f"{prefix}{key}.")
        elif not same_value(x, y):
            values[prefix + key] = (x, y)
    return values


def folder_name(kind: str, label: Any) -> str:
    """The label of a run, which is the name of a folder. It may come from a table: raises ConfigError for a path, which
    could lead elsewhere, and for what would steer a terminal."""
    if not isinstance(label, str) or label in ("", ".", "..") or re.search(r"[/\\]", label) or not label.isprintable():
        raise ConfigError(f"{kind} {label!r} becomes the name of a folder: no path, and only what can be printed")
    return label


def read_json(file: Path, keys: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):  # also for numbers of thousands of digits, and what is nested too deeply
        content = None
    if not isinstance(content, dict) or not set(keys) <= set(content):
        raise RunError(f"{file} is damaged, or moe_rl did not write it. Delete it, or choose another folder.")
    return content


def write_json(file: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    write_text(replaced(file), json.dumps(content, indent=1, sort_keys=True) + "\n", durable)


def write_text(file: Path, text: str, durable: bool = False) -> None:
    """Write a file as UTF-8, whole or not at all; half a surrogate pair, which UTF-8 lacks, is escaped. A link, or a
    terminal, is written as it stands."""
    beside = not file.is_symlink() and (file.is_file() or not file.exists())
    aside = replaced(file.with_name(f".tmp-{file.name}")) if beside else file
    aside.write_bytes(text.encode(errors="backslashreplace"))
    if durable:
        fsync(aside)
    aside.rename(file)
    if durable:
        fsync(file.parent)


class SharedFolder:
    """A run's folder as all ranks see it. Rank 0 has the real one; the others learn its values, and take part in
    writing checkpoints into it, so it must be on a file system that all ranks see."""

    def __init__(self, folder: RunFolder | None):
        self.folder = folder
        self.path: Path = from_rank_0(lambda: self._real().path)
        self.stopping_here: Callable[[], bool] = folder.stopping if folder else lambda: False
        """Whether rank 0 was told to stop."""
        self._stopping = False
        if folder is not None:
            folder.stopping = lambda: self._stopping  # the value that all ranks have

    def latest(self) -> tuple[int, Path | None]:
        return from_rank_0(lambda: self._real().latest())

    def _real(self) -> RunFolder:
        assert self.folder is not None, "this is called on rank 0"
        return self.folder

    def add(self, table: str, rows: Iterable[Row]) -> None:
        if self.folder is not None:
            self.folder.add(table, rows)

    def diverged(self) -> str | None:
        return from_rank_0(lambda: self._real().diverged())

    def commit(self, step: int, save: Callable[[Path], None], diverged: str | None = None) -> None:
        """Rank 0 commits; when it comes to the checkpoint, every rank saves its part."""
        if self.folder is None:
            if (target := from_rank_0(lambda: None)) is not None:
                save(target)
            if self._stopping:
                raise Stopped(f"{self.path} was told to stop")
            return
        announced = []

        def together(target: Path) -> None:
            announced.append(from_rank_0(lambda: target))
            save(target)

        try:
            self.folder.commit(step, together, diverged)
        finally:
            if not announced:  # this step was committed before, or the folder is somebody else's now
                from_rank_0(lambda: None)

    def stopping(self) -> bool:
        self._stopping = from_rank_0(self.stopping_here)
        return self._stopping

    def finish(self, diverged: str | None = None) -> None:
        if self.folder is not None:
            self.folder.finish(diverged)
