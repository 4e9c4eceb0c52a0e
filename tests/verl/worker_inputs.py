"""Batches, engines and losses as verl's workers have them."""

from __future__ import annotations

import functools

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss

PROMPTS, RESPONSES = (4, 3, 4, 2), (5, 9, 1, 6)
"""Lengths of four sequences."""
SINGLE = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(vocabulary, seed=0, prompts=PROMPTS, responses=RESPONSES, packed=True, dynamic=False, **tensors):
    """A batch as verl's trainers hand it to an actor. The second half of the sequences has prompts of its own."""
    draw = torch.Generator().manual_seed(seed)
    given = [torch.randint(2, vocabulary, (n,), generator=draw) for n in prompts]
    written = [torch.randint(2, vocabulary, (n,), generator=draw) for n in responses]
    whole = [torch.cat(pair) for pair in zip(given, written, strict=True)]
    masks = [torch.ones(n, dtype=torch.int64) for n in responses]
    data = TensorDict(
        {
            "input_ids": jagged(whole),
            "position_ids": jagged([torch.arange(len(x)) for x in whole]),
            "prompts": jagged(given),
            "responses": jagged(written),
            "response_mask": jagged(masks),
            "loss_mask": jagged(masks),
            "advantages": jagged([(-1.0) ** i * m for i, m in enumerate(masks)]),
            **tensors,
        },
        batch_size=[len(whole)],
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=packed,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=24,
        temperature=1.0,
        global_batch_size=len(whole),
        use_fused_kernels=False,
        calculate_entropy=True,
        pad_token_id=0,
    )
    return data


def engine(
    path,
    replay=None,
    checkpointing=False,
    learning_rate=1e-2,
    strategy="fsdp2",
    lora=0,
    forward_only=False,
    attention="sdpa",
    optimizer=None,
    fused=False,
    **settings,
):
    """The engine that verl's registry gives for a checkpoint."""
    model = HFModelConfig(
        path=str(path),
        load_tokenizer=False,
        use_remove_padding=True,
        lora_rank=lora,
        target_modules=["q_proj", "v_proj"],
        enable_gradient_checkpointing=checkpointing,
        override_config={"attn_implementation": attention},
        use_fused_kernels=fused,
        fused_kernel_options={"impl_backend": "torch"},
    )
    config = FSDPEngineConfig(
        strategy=strategy,
        use_torch_compile=False,
        model_dtype="fp32",
        forward_only=forward_only,
        **({"router_replay": replay} if replay else {}),
        **{"mixed_precision": SINGLE} | settings,
    )
    optimizer = FSDPOptimizerConfig(
        **{"lr": learning_rate, "total_training_steps": 10, "lr_warmup_steps": 0, **(optimizer or {})}
    )
    made = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=model,
        engine_config=config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def actor_loss(mode="vanilla", aggregation="token-mean", **settings):
    """verl's loss of an actor, as its workers bind it."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=aggregation,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        **settings,
    )
    return functools.partial(ppo_loss, config=config)


def score(made, data):
    """verl's pass for the log-probs of the old policy."""
    with made.eval_mode():
        return made.infer_batch(data)["model_output"]


def response_part(logprobs, data):
    """Log-probs of the response tokens, jagged, as verl keeps them between its passes."""
    rows = [row[len(p) - 1 : len(row) - 1] for row, p in zip(logprobs.unbind(), data["prompts"].unbind(), strict=True)]
    return jagged(rows)


def with_old_policy(data, found):
    """The batch with what the pass of the old policy gave, ready for an update."""
    data = data.copy()
    data["old_log_probs"] = response_part(found["log_probs"], data)
    if "routed_experts" in found:
        data["routed_experts"] = found["routed_experts"]
    return data


def update(made, data, loss=None):
    """One update; the metrics that verl would log."""
    with made.train_mode():
        return made.train_batch(data, loss or actor_loss())["metrics"]
