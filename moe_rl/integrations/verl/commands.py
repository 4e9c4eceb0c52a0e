"""`moe-rl runs import`: a run of verl that no study declares, as a folder that `plot`, `report` and `runs` read."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from moe_rl.cli.verbs import argument, verb
from moe_rl.errors import ConfigError
from moe_rl.integrations.verl.log import read_log
from moe_rl.integrations.verl.rollouts import read_rollouts
from moe_rl.storage.folder import DECLARATION, RunFolder, write_json
from moe_rl.storage.frames import labels_of


@verb(
    argument("log", type=Path, nargs="+", help="files of verl's logger `file`, in order"),
    argument("--rollouts", type=Path, metavar="FOLDER", help="verl's rollout_data_dir, to use `moe-rl runs read`"),
    argument("--to", type=Path, required=True, metavar="FOLDER", help="new folder STUDY/ARM/CONDITION/seed=N"),
    examples="""
  moe-rl runs import verl_examples/gsm8k.jsonl --to runs/mine/gspo/base/seed=0
  moe-rl plot runs/mine""",
)
def import_run(options: argparse.Namespace) -> int:
    """Write the rows of a log to a run folder, which has no settings, versions and machine. Raises ConfigError for a
    missing log, and for a folder that exists."""
    if missing := [str(file) for file in options.log if not file.is_file()]:
        raise ConfigError(f"log {missing[0]} not found")
    if options.to.exists():
        raise ConfigError(f"{options.to} already exists. Give a new folder.")
    rows, labels = read_log(options.log), labels_of(options.to)
    steps = rows["steps"][-1]["step"]
    if options.rollouts:
        rows["rollouts"] = read_rollouts(options.rollouts, steps)
    config = {"arm": {"name": labels["arm"]}, "seed": labels["seed"], "steps": steps}
    digest = hashlib.sha256(json.dumps(config).encode() + b"".join(file.read_bytes() for file in options.log))
    with RunFolder.open(options.to, config, digest.hexdigest()[:16]) as folder:
        folder.manifest |= {"packages": {}, "git": None, "device": "not recorded", "threads": "not recorded"}
        for table, of_table in rows.items():
            folder.add(table, of_table)
        folder.commit(steps, lambda target: write_json(target / "logs.json", {"logs": [*map(str, options.log)]}))
        folder.finish()
    declaration = options.to.absolute().parents[2] / DECLARATION
    if not declaration.exists():
        texts = {"name": labels["study"], "question": "", "hypothesis": "", "trainer": "imported"}
        figures = {"arms": [], "figures": ["learning", "expert_change"], "endpoint": "reward, second half"}
        write_json(declaration, texts | figures)
    print(f"{steps} steps in {options.to}")
    return 0
