"""Names of before 0.2: they mean the same as the new ones, and warn."""

import pandas as pd
import pytest
import torch

from moe_rl import cli, routing
from moe_rl.objectives import policy_loss
from moe_rl.objectives.losses import LossOutput
from moe_rl.routing import Layout, MoeLayer
from moe_rl.storage.frames import Frames
from moe_rl.study import Study
from moe_rl.study.routing_replay import study


def test_old_names_of_classes_attributes_and_arguments_warn_and_mean_the_same():
    with pytest.deprecated_call(match="MoeLayer"):
        assert routing.Site is MoeLayer
    with pytest.deprecated_call(match="moe_layers"):
        assert Layout((), "x").sites == ()
    with pytest.deprecated_call(match="conditions"):
        old = Study(**{{"conditions": "cells"}.get(name, name): value for name, value in vars(study).items()})
    assert old == study
    with pytest.deprecated_call(match="conditions"):
        assert old.cells == study.conditions
    frames = Frames(pd.DataFrame({"condition": ["a", "b"]}), {})
    with pytest.deprecated_call(match="conditions"):
        assert frames.cells == ["a", "b"]
    with pytest.deprecated_call(match="condition "):
        assert frames.cell("b").conditions == ["b"]
    zeros = torch.zeros(1, 3)
    with pytest.deprecated_call(match="batch_statistics"):
        output = LossOutput(zeros.sum(), zeros, zeros.to(torch.int8), marks=zeros)
    assert output.batch_statistics is zeros


def test_an_old_argument_of_the_loss_is_the_new_one():
    x = {name: torch.zeros(2, 3) for name in ("logprobs", "old_logprobs")} | {"mask": torch.ones(2, 3).bool()}
    x |= {"advantages": torch.ones(2), "weights": torch.full((2, 3), 1 / 6)}
    half = torch.full((2, 3), 0.5)
    with pytest.deprecated_call(match="importance_weights"):
        old = policy_loss("grpo", **x, trust=half)
    assert old.loss == policy_loss("grpo", **x, importance_weights=half).loss


@pytest.mark.parametrize("old", cli.MOVED)
def test_old_names_of_commands_say_the_new_one_and_do_the_same(old, tmp_path, capsys):
    ends = [(cli.main([*words, str(tmp_path)]), capsys.readouterr()) for words in ([old], cli.MOVED[old].split())]
    assert ends[0][0] == ends[1][0] == 2
    assert cli.MOVED[old] in ends[0][1].err and ends[0][1].err.endswith(ends[1][1].err)
