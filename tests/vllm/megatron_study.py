"""Three steps of R3 on a model that a vLLM server on a CPU can serve, without a cold start: for `test_server.py`, on
two ranks of Megatron-core, or with `--policy fsdp` of FSDP2.

    torchrun --nproc-per-node 2 -m moe_rl run tests/vllm/megatron_study.py --policy "megatron(ep=2)" \\
        --set engine=server --set engine.url=http://127.0.0.1:8000
"""

from dataclasses import replace

from moe_rl.config import Arm, Measure, ModelConfig
from tests.integrations.megatron_study import study

study = replace(
    study,
    name="megatron_vllm",
    arms=(Arm(name="r3", routes="rollout"),),
    base=study.base.replace(
        model=ModelConfig(overrides={"head_dim": 32}),  # as conftest.py serves it
        measure=Measure(responses=8, detail_every=1),
        save_every=1,
        eval_every=1,
        hf_checkpoints=(),
    ),
)
