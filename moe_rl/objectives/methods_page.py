"""Methods and components as text: the page `docs/methods.md`, and what `moe-rl methods` prints."""

from __future__ import annotations

from collections.abc import Iterator

from moe_rl.config import Arm
from moe_rl.objectives import methods as table
from moe_rl.objectives.spelling import FIELDS, SEVERAL, read_table
from moe_rl.registry import Component

KINDS = {"loss": "Losses", "aggregation": "Aggregations", "correction": "Corrections", "term": "Terms",
         "advantage": "Steps to advantages", "routes": "Routes"}


def markdown() -> str:
    """The page `docs/methods.md`."""
    tables = (_method_tables(), _preset_table(), _component_tables(), _list_of_refusals())
    return "\n".join([read_table()["intro"], *(line for lines in tables for line in lines)]) + "\n"


def list_methods() -> list[tuple[str, str, str]]:
    """Name, setting and source of every method and preset."""
    return [(m.name, m.arm, m.source) for m in (*table.methods().values(), *_presets())]


def describe(name: str) -> list[str]:
    """A method, preset or arm in lines: its components, their equations, its source, and where it is not its
    paper's."""
    made = table.arm(name)
    lines = [name, ""]
    for field in FIELDS[1:]:
        if value := getattr(made, field):
            uses = value if field in SEVERAL else (value,)
            lines.append(f"  {field:<12} {' + '.join(map(str, uses))}")
    lines += ["", *_equations(made)]
    if name in table.methods() or name in table.presets():
        found = table.entry(name)
        lines += ["", f"  source: {found.source}", *([f"  {found.note}"] if found.note else [])]
        lines += [f"  belongs to it: --set {key}={value}" for key, value in found.run.items()]
        if found.of and found.name != f"paper:{found.of}":
            lines += ["", f"  unlike paper:{found.of}:", *(f"    {line}" for line in _differences(found))]
    return lines


def row(*cells: str) -> str:
    """A row of a table in Markdown, on one line."""
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _equations(made: Arm) -> list[str]:
    """A line for each component of an arm."""
    found: list[Component] = []
    for field in FIELDS[1:]:
        value = getattr(made, field)
        if field != "anchor" and value:
            found += value if field in SEVERAL else [value]
    return [f"  {use.name}: {table.read_equation(use.name)}" for use in found if use.name in table.components()]


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
    yield from ("", "## Defaults of other frameworks", "",
                "`moe-rl methods trl:gspo` prints how a default differs from the paper."
                f" Remarks name differences that no component has. Versions: {read_from}.", "",
                *head("preset", "setting", "remarks"))
    yield from (row(f"`{p.name}`", f"`{p.arm}`", p.note) for p in _presets())


def _component_tables() -> Iterator[str]:
    yield from ("", "## Components and their formulas", "",
                "Options with their defaults; an option with … must be given.")
    for kind, title in KINDS.items():
        yield from ("", f"### {title}", "", *head("component", "formula"))
        yield from (row(f"`{_signature(name)}`", table.read_equation(name)) for name in table.registries()[kind])


def _list_of_refusals() -> Iterator[str]:
    yield from ("", "## Methods that are not available", "")
    yield from (f"- `{name}`{why.removeprefix(name)}." for name, why in table.refusals().items())


def _presets() -> list[table.Method]:
    """Those of frameworks, and of a paper where the method of that name is another."""
    return [p for p in table.presets().values() if p.arm != table.methods()[p.of].arm or p.name[:6] != "paper:"]


def _differences(preset: table.Method) -> list[str]:
    return table.differences(table.arm(preset.name), table.arm(f"paper:{preset.of}")) or ["no component differs"]


def _signature(name: str) -> str:
    options = ",".join(f"{option}={default if default is table.REQUIRED else repr(default)}"
                        for option, default in table.read_options(name).items())
    return f"{name}({options})" if options else name


def head(*titles: str) -> tuple[str, str]:
    """The first two lines of a table in Markdown."""
    return "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)
