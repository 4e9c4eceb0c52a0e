"""A configuration as data: what a table says of a run is enough to make it again."""

from __future__ import annotations

import json

import pytest

from moe_rl.config import Arm, EngineConfig, ModelConfig, Optimizer, Parallel, RunConfig
from moe_rl.errors import ConfigError
from moe_rl.lookup import Use

CONFIGS = [
    RunConfig(arm=Arm(name="grpo")),
    RunConfig(
        arm=Arm(name="gspo", loss=Use("gspo", clip_low=0.01, clip_high=0.013)), seed=3,
        task=Use("running_sums", digits=12, names=["a", "b"]),
        model=ModelConfig(overrides={"num_experts": 32}), optimizer=Optimizer(lr=1e-4, betas=(0.9, 0.95)),
        engine=EngineConfig(dtype="bfloat16"), parallel=Parallel(dp=2, etp=1), stop=("\n",), hf_checkpoints=(10, 20),
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_survives_json_with_its_hash(config):
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.hash == config.hash and again.to_dict() == config.to_dict()
    assert again.arm == config.arm and again.optimizer == config.optimizer and again.stop == config.stop


def test_settings_that_came_later_take_their_defaults_and_lost_ones_are_named():
    old = CONFIGS[0].to_dict()
    del old["engine"], old["optimizer"]["router_lr_scale"]
    assert RunConfig.from_dict(old) == CONFIGS[0]
    old["optimizer"]["nesterov"] = True
    with pytest.raises(ConfigError, match="Optimizer has no setting nesterov"):
        RunConfig.from_dict(old)
