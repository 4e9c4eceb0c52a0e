"""The notebooks run from top to bottom, and what they print is what they say."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

ROOT = Path(__file__).parents[1]


def run(name: str, monkeypatch) -> dict:
    """The names that a notebook's code leaves behind, its cells run one after the other as Jupyter would."""
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT / "notebooks")
    names: dict = {}
    for cell in json.loads((ROOT / "notebooks" / name).read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), names)
    return names


def test_watch_routes_move(monkeypatch, capsys):
    names = run("watch_routes_move.ipynb", monkeypatch)
    assert 0 < names["row"]["expert_change_rate"] < names["row"]["any_layer_change"]
    assert "→" in capsys.readouterr().out
    b, t, s = names["b"], names["t"], names["s"]
    assert set(names["before"].ids()[b, t, s].tolist()) != set(names["after"].ids()[b, t, s].tolist())


def test_router_noise(monkeypatch, capsys):
    table = run("router_noise.ipynb", monkeypatch)["table"]
    assert len(table) == 10 and "replayed: ESS" in capsys.readouterr().out
    for (form, sigma), row in table.items():
        kl, of_sets = row["unconstrained"]["token_kl_k3"], row["replayed"]["token_kl_k3"]
        assert of_sets < kl if sigma else of_sets == kl == row["expert_change_rate"] == 0
        assert of_sets == 0 or form == "weights", "replay is immune to moved sets, bit for bit"


def test_read_a_study(monkeypatch, capsys):
    names = run("read_a_study.ipynb", monkeypatch)
    assert names["result"].n == 3 and names["result"].p_smallest == 0.25
    assert len(names["ax"].lines) == 9
    assert "gspo_short − grpo: " in capsys.readouterr().out
