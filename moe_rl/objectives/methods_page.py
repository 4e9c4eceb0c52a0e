"""Methods and components as text for `moe-rl methods`, and rows of tables in Markdown."""

from __future__ import annotations

from moe_rl.objectives import methods as table
from moe_rl.objectives.spelling import FIELDS, SEVERAL, fill_in


def describe(name: str) -> list[str]:
    """A method, preset or arm in lines: its components, their equations, and its source."""
    made = table.arm(name)
    lines, equations = [name, ""], [""]
    for field in FIELDS[1:]:
        if value := getattr(made, field):
            uses = value if field in SEVERAL else (value,)
            lines.append(f"  {field:<12} {' + '.join(str(use if field == 'anchor' else fill_in(use)) for use in uses)}")
            own = () if field == "anchor" else (use.name for use in uses)
            equations += [f"  {part}: {table.read_equation(part)}" for part in own if part in table.components()]
    lines += equations
    if name in table.methods() or name in table.presets():
        method = table.entry(name)
        lines += ["", f"  source: {method.source}", *([f"  {method.note}"] if method.note else [])]
        lines += [f"  belongs to it: --set {key}={value}" for key, value in method.run.items()]
    return lines


def row(*cells: str) -> str:
    """A row of a table in Markdown, on one line."""
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def distinct_presets() -> list[table.Method]:
    """The presets of frameworks, and of papers that differ from the method of that name."""
    return [p for p in table.presets().values() if p.arm != table.methods()[p.of].arm or p.name[:6] != "paper:"]


def head(*titles: str) -> tuple[str, str]:
    """The first two lines of a table in Markdown."""
    return "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)
