"""The verb that begins a study of one's own."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import sys
from importlib import resources
from pathlib import Path

from moe_rl.cli.verbs import argument, verb
from moe_rl.errors import ConfigError

TEMPLATE = "my_study"
"""What the files of `new_study/` call themselves, in their names and inside."""


@verb(
    argument("folder", type=Path, metavar="NAME", help="new folder, and name of the study, e.g. my_study"),
    examples="""
  moe-rl new my_study                study, task, loss and route source
  cd my_study
  moe-rl run my_study.py --quick     runs unchanged: docs/studies.md""",
)
def new(options: argparse.Namespace) -> int:
    """Write the folder. Nothing that is there is touched."""
    folder, name = options.folder, options.folder.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a module. Use letters, digits and '_' only, and begin with a letter."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty ({folder.absolute()}). Choose another name.")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"a module {name!r} is already installed, and the study would hide it. Choose another name.")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted((resources.files("moe_rl.cli") / "new_study").iterdir(), key=lambda f: f.name):
        if file.is_file():
            written = folder / file.name.replace(TEMPLATE, name)
            written.write_text(file.read_text(encoding="utf-8").replace(TEMPLATE, name), encoding="utf-8")
            print(written)
    print(f"next: cd {folder} && moe-rl run {name}.py --dry-run")
    return 0
