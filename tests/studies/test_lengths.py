"""What `lengths` makes of gradients, and what its rule says of tables that are known."""

from __future__ import annotations

import lengths_trainer
import lengths_verdicts as verdicts
import pandas as pd
import pytest
import torch
from gradient_quality_trainer import Gradients
from lengths_trainer import CELLS, Cell, moments

from moe_rl.errors import ConfigError
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder
from tests.test_trainer import TINY


def test_the_variance_of_mini_batch_gradients_by_hand():
    """Two batches with means (2, 0) and (0, 2): ‖E g‖² is their product, 0; E‖g‖² = (9 + 1 + 0 + 16) / 4."""
    found = Gradients()
    for batch in ([[3.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]):
        found.add([torch.tensor(g) for g in batch])
    assert moments(found) == {"variance": 6.5, "square": 0.0, "mini_batches": 4, "idle": 1}


def test_equal_tokens_are_equal_within_three_percent():
    assert {(cell.length, cell.equal) for cell in CELLS} == set(verdicts.CELLS)
    tokens = {cell.length: cell.length * cell.times for cell in CELLS if cell.equal in ("tokens", "both")}
    assert tokens == pytest.approx(dict.fromkeys(tokens, 120), rel=0.03)


def test_every_cell_draws_responses_of_its_own_length(tmp_path, monkeypatch):
    cells = (Cell(6, "both", 1), Cell(3, "tokens", 2))
    for name, value in {"CELLS": cells, "STEPS": 1, "STALE": 2, "TOKENS": 6, "SEQUENCES": 4}.items():
        monkeypatch.setattr(lengths_trainer, name, value)
    run = TINY.replace(task=Component("lengths_task:ContinuedSums", tokens=8), max_new_tokens=8, steps=1,
                       prompts_per_step=2, mini_batches=2, eval_prompts=2, eval_every=1)
    with RunFolder.open(tmp_path / "run", run.to_dict(), run.hash) as folder:
        lengths_trainer.execute(run, folder, cache=tmp_path)
    ratios = pd.read_parquet(tmp_path / "run" / "ratios.parquet")
    assert ratios.response_tokens.tolist() == [6, 3] and ratios.n.tolist() == [16, 32]


def tables(power: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """GRPO's variance grows as a power of length, all others stay; seeds differ by 1 % either way."""
    cells = verdicts.CELLS
    gradients = pd.DataFrame([
        {"seed": seed, "length": n, "equal": equal, "compared": name, "apart": 0.0,
         "variance": n ** (power * (name == "grpo")) * (1 + 0.01 * (seed % 2 if n == 13 else (seed // 2) % 2))}
        for seed in verdicts.study.seeds for n, equal in cells for name in verdicts.OBJECTIVES])
    ratios = pd.DataFrame([{"seed": seed, "length": n, "equal": equal, "response_tokens": 0.99 * n,
                            "token_var": 0.1 + 0.001 * (seed % 2 == (n > 13))}
                           for seed in verdicts.study.seeds for n, equal in cells])
    return gradients, ratios


@pytest.mark.parametrize(("power", "said"), [(1.0, "reproduced"), (-1.0, "reversed"), (0.0, "undetermined")])
def test_the_rule_reads_a_slope_over_the_log_of_length(power, said):
    lines = verdicts.verdict(*tables(power))
    assert len(lines) == 6 and "undetermined" in lines[0] and "void" in lines[1]
    assert all(said in line for line in lines[2:])


def test_a_study_of_which_something_is_missing_or_wrong_is_void():
    """Nothing is said of its questions then."""
    gradients, ratios = tables(1.0)
    first = gradients.index == 0
    for wrong in ((gradients.assign(apart=0.1), ratios), (gradients, ratios.assign(response_tokens=1.0)),
                  (gradients, ratios[ratios["seed"] > verdicts.study.seeds[0]]), (gradients[~first], ratios),
                  (gradients.assign(variance=gradients["variance"].mask(first)), ratios),
                  (gradients, ratios.assign(response_tokens=ratios["response_tokens"].mask(ratios.index == 0)))):
        (line,) = verdicts.verdict(*wrong)
        assert line.startswith("void")


def test_the_figure_shows_the_means_that_the_page_prints():
    """Up a logarithmic axis means and intervals are of logs: 1 and 100 have the mean 10."""
    ratios = pd.DataFrame([{"seed": seed, "length": n, "equal": equal, "token_var": 100.0**seed / n,
                            "sequence_var": 1.0 / n} for seed in range(2)
                           for n, equal in {(cell.length, cell.equal) for cell in CELLS}])
    gradients = pd.DataFrame([{"seed": seed, "length": cell.length, "equal": cell.equal, "compared": name,
                               "variance": 1.0 + seed} for seed in range(2) for cell in CELLS
                              for name in verdicts.OBJECTIVES])
    axis = verdicts.draw(gradients, ratios).axes[0]
    (mean,) = (line for line in axis.lines if line.get_gid() == "tokens, equal responses mean")
    assert mean.get_ydata() == pytest.approx([10 / n for n in verdicts.LENGTHS])
    with pytest.raises(ConfigError, match="one is 0"):
        verdicts.draw(gradients.assign(variance=0.0), ratios)
