"""Prints the page `docs/methods.md`, every method and component: `make docs/methods.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from moe_rl.objectives import methods as table
from moe_rl.objectives.methods_page import distinct_presets, head, row
from moe_rl.objectives.spelling import REQUIRED, read_table

KINDS = {
    "loss": "Losses",
    "aggregation": "Aggregations",
    "correction": "Corrections",
    "term": "Terms",
    "advantage": "Steps to advantages",
    "routes": "Routes",
}


def format_page() -> str:
    """The page."""
    tables = (_method_tables(), _preset_table(), _component_tables(), _list_of_refusals())
    return "\n".join([read_table()["intro"], *(line for lines in tables for line in lines)]) + "\n"


def read_options(name: str) -> dict[str, Any]:
    """The options of a component and their defaults, `REQUIRED` where there is none."""
    return {
        p.name: REQUIRED if p.default is p.empty else p.default
        for p in inspect.signature(table.components()[name]).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


def _method_tables() -> Iterator[str]:
    family = ""
    for m in table.methods().values():
        if m.family != family:
            family = m.family
            yield from ("", f"## {family}", "", *head("method", "setting", "source", "remarks"))
        settings = "; ".join(f"`{key}={value}`" for key, value in m.run.items())
        remarks = " ".join(filter(None, (m.note, settings)))
        yield row(f"`{m.name}`", f"`{m.arm}`", m.source, remarks)


def _preset_table() -> Iterator[str]:
    versions = [version for name, version in table.frameworks().items() if name != "paper"]
    read_from = ", ".join(version.replace(", commit", "").replace(", version", "") for version in versions)
    yield from (
        "",
        "## Defaults of other frameworks",
        "",
        f"Remarks name differences that no component has. Versions: {read_from}.",
        "",
        *head("preset", "setting", "remarks"),
    )
    yield from (row(f"`{p.name}`", f"`{p.arm}`", p.note) for p in distinct_presets())


def _component_tables() -> Iterator[str]:
    yield from (
        "",
        "## Components and their formulas",
        "",
        "Options with their defaults; an option with … must be given.",
    )
    for kind, title in KINDS.items():
        yield from ("", f"### {title}", "", *head("component", "formula"))
        yield from (row(f"`{_signature(name)}`", table.read_equation(name)) for name in table.registries()[kind])


def _list_of_refusals() -> Iterator[str]:
    yield from ("", "## Methods that are not available", "")
    yield from (f"- `{name}`{why.removeprefix(name)}." for name, why in table.refusals().items())


def _signature(name: str) -> str:
    options = ",".join(
        f"{option}={default if default is REQUIRED else repr(default)}"
        for option, default in read_options(name).items()
    )
    return f"{name}({options})" if options else name


if __name__ == "__main__":
    print(format_page(), end="")
