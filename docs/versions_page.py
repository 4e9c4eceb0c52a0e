"""Writes into `docs/versions.md` what passed in the environments of `make test-versions`: `make versions`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from moe_rl.objectives.methods_page import row

PAGE = Path(__file__).with_name("versions.md")
READ = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def line_of(environment: Path) -> str:
    """The row of an environment, `PACKAGE-VERSION`, from its packages and the result of its tests."""
    package, beside = environment.name.rpartition("-")[0], ("transformers", "torch")
    command = [environment / "bin/python", "-c", READ, package, *beside]
    versions = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    tested, *others = (version.partition("+")[0] for version in versions)
    suite = ElementTree.parse(environment / "result.xml").getroot()[0].attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    numbers = [f"{n:,}" for n in (int(suite["tests"]) - failed - skipped, failed, skipped)]
    return row(f"{package} {tested}", *others, suite["timestamp"][:10], *numbers)


def updated(page: str, lines: list[str]) -> str:
    """The page with these rows; of one package in one version, beside the same others, the last row is left."""
    text, rule, rows = page.partition("|---|---|---|---|---|---|---|\n")
    table = {tuple(line.split("|")[1:4]): line for line in [*rows.splitlines(), *lines]}
    return text + rule + "\n".join(sorted(table.values())) + "\n"


if __name__ == "__main__":
    environments = sorted(file.parent for file in Path(sys.argv[1]).glob("*/result.xml"))
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), [line_of(e) for e in environments]), encoding="utf-8")
