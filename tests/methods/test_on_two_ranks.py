"""Two ranks of Megatron-core train the methods as one process does: one launch for all of them."""

from __future__ import annotations

import pytest

from moe_rl.runs.frames import read_table
from tests.methods.megatron_study import study
from tests.methods.test_training import carried_out
from tests.policies.test_megatron import launched_once, torchrun

pytest.importorskip("megatron", reason="pip install 'moe_rl[megatron]'")
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What two ranks wrote."""
    folder = tmp_path_factory.mktemp("methods")
    words = ("tests/methods/megatron_study.py", "--policy", "megatron", "--ep", "2", "--out", folder / "runs")
    said = launched_once(folder, "methods", *torchrun(2), "-m", "moe_rl", "run", *words)
    assert said["code"] == 0, said["err"][-5000:]
    return folder / "runs" / study.name


@pytest.mark.parametrize("made", study.arms, ids=lambda made: made.name)
def test_two_ranks_train_as_one_process_does(made, launched, tmp_path):
    theirs, _ = carried_out(study.base.replace(arm=made), tmp_path)
    ours = read_table(launched / made.name / "base" / "seed=0", "updates")
    assert len(ours) == len(theirs) == 4
    for column in ("loss", "grad_norm"):
        for mine, one in zip(ours[column], theirs, strict=True):
            assert mine == pytest.approx(one[column], rel=1e-3, abs=1e-5), column
