"""Adapters that FSDP2 cuts over two CPU ranks (gloo), against those of the Hugging Face policy of one process."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from moe_rl import ranks
from moe_rl.build import execute
from moe_rl.config import Arm, ModelConfig
from moe_rl.integrations.fsdp import fsdp
from moe_rl.models.load import load
from moe_rl.policies.hf import hf
from moe_rl.registry import Component
from moe_rl.storage.folder import RunFolder, read_json
from moe_rl.storage.frames import diff
from tests.integrations.fsdp_on_ranks import (
    GRPO,
    PARTS,
    RUN,
    SETTINGS,
    carry_out,
    equal_weights,
    example,
    far,
    killed,
    on_ranks,
)
from tests.integrations.test_fsdp import require_alike
from tests.policies.test_hf import part_of

pytestmark = pytest.mark.ranks
ADAPTERS = {"lora": 4, "lora_alpha": 16.0, "lora_targets": ("q_proj", "v_proj")}
ADAPTED = RUN.replace(
    arm=Arm(name="kl", routes="old_policy", terms=(Component("kl", coef=0.1),)),
    policy=Component("fsdp", **ADAPTERS),
    optimizer=SETTINGS.replace(lr=1e-2, router_lr_scale=1.0),
    hf_checkpoints=(3,),
)
DTYPES = {"float32": 1e-5, "bfloat16": 2**-7}
"""With the bound on gradients, in units of the largest entry: some roundings."""


def verbs(folder: Path, dtype: str) -> dict:
    """What both policies give for the same calls."""
    run = ADAPTED.replace(**{"model.dtype": dtype})
    alone = hf(run, load(run.model, 0), False, **ADAPTERS)
    ours, resumed = (fsdp(run, load(run.model, 0) if ranks.rank() == 0 else None, False, **ADAPTERS) for _ in range(2))
    batch, facts = example(), {"begins": equal_weights(ours, alone)}
    facts["share"] = max(p.to_local().numel() / p.numel() for p in ours.model.parameters())
    old = alone.score(batch, scores=True)
    part = PARTS.attach_weights(part_of(batch, old, old.routes))
    gradients = [policy.gradient(part, GRPO) for policy in (alone, ours)]
    facts["gradient"] = far(*gradients) / gradients[0].abs().max().item()
    one, two = (policy.update(part, GRPO) for policy in (alone, ours))
    facts["norm"], facts["clipped"] = abs(one.grad_norm / two.grad_norm - 1), one.grad_clipped and two.grad_clipped
    facts["routes"] = one.routes == two.routes and one.preferred == two.preferred
    stepped = [policy.score(batch).logprobs for policy in (alone, ours)]
    facts["stepped"], facts["moved"] = far(*stepped), far(stepped[0], old.logprobs)
    ranks.from_rank_0((folder / dtype).mkdir)
    ours.save(folder / dtype)
    facts["saved"] = sorted(FileSystemReader(folder / dtype).read_metadata().state_dict_metadata)
    resumed.load(folder / dtype)
    for policy in (ours, resumed):
        policy.update(part, GRPO)
    after = dict(resumed.weights())
    facts["goes on"] = all(torch.equal(x, after[name]) for name, x in ours.weights())
    return facts


def two(folder: Path) -> dict:
    facts: dict = {dtype: verbs(folder, dtype) for dtype in DTYPES}
    for name in ("whole", "killed"):
        carry_out(ADAPTED, folder / name, folder)
    same = ranks.from_rank_0(lambda: diff(folder / "whole", folder / "killed") is None)
    digests = [read_json(folder / name / "manifest.json", ())["checkpoint"] for name in ("whole", "killed")]
    return facts | {"tables": same, "weights": digests[0] == digests[1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def facts(folder):
    """With a run that was killed in its second step, and went on."""
    codes = killed(2, folder, "killed", "update", 4, {1}, ADAPTED)
    return on_ranks(2, folder, two) | {"codes": codes}


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_over_two_ranks_are_trained_as_in_one_process(facts, dtype):
    """In bfloat16 every rank rounds the gradient of its rows, and small entries of a step may change their sign."""
    ours, bound = facts[dtype], DTYPES[dtype]
    assert ours["begins"] and ours["share"] == 0.5
    assert max(ours["gradient"], ours["norm"]) < bound and ours["clipped"] and ours["routes"]
    assert ours["moved"] > 0.5 and (dtype == "bfloat16" or ours["stepped"] < bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_holds_adapters_alone_and_leads_on_to_the_bit(facts, dtype):
    saved = [name for name in facts[dtype]["saved"] if name != "updates" and "param_groups" not in name]
    assert saved and all(".lora_" in name for name in saved) and facts[dtype]["goes on"]


def test_a_run_with_adapters_that_was_killed_ends_identical_and_as_in_one_process(facts, folder):
    """It exports a whole model, with adapters merged."""
    assert -SIGKILL in facts["codes"] and facts["tables"] and facts["weights"]
    run = ADAPTED.replace(policy=Component("hf", **ADAPTERS))
    with RunFolder.open(folder / "alone", run.to_dict(), run.hash) as opened:
        execute(run, opened, cache=folder)
    require_alike(folder / "whole", folder / "alone")
    exported = [
        load(ModelConfig(name=str(folder / name / "checkpoints" / "step=000003")), 0).model.state_dict()
        for name in ("whole", "alone")
    ]
    start = load(ADAPTED.model, 0).model.state_dict()
    for name, tensor in exported[0].items():
        assert far(tensor, exported[1][name]) < 1e-5
        assert torch.equal(tensor, start[name]) is not any(f".{target}." in name for target in ADAPTERS["lora_targets"])
