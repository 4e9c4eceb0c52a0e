"""How the servers are spoken to that `integrations/vllm/server.py` samples from: bodies, answers, pushes of weights.

`openai` is `/v1/completions`, as vLLM extends it with token ids and routes; `vllm` its token-in, token-out endpoint,
there with `--enable-scale-out`; `sglang` is `/generate`. The first two are tested against a vLLM 0.30.0 server on
loopback. SGLang does not install without a GPU, and its dialect is tested only on payloads written after its
documentation: no SGLang server has answered this client.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from moe_rl.errors import RunError
from moe_rl.integrations.vllm.answers import Answer
from moe_rl.integrations.vllm.push import Receipt
from moe_rl.models.shards import Shards
from moe_rl.types import Sampling


@runtime_checkable
class Server(Protocol):
    """What a dialect uses of a `ServerEngine`."""

    url: str
    folder: Path
    pushes: int

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that the server answers."""


@dataclass(frozen=True)
class Dialect:
    """How one kind of server is spoken to."""

    path: str
    request: Callable[[tuple[int, ...], Sampling, int, list[int], bool], dict[str, Any]]
    """(prompt, sampling, seed, end tokens, routes wanted) → the body."""
    answer: Callable[[Server, Any], Answer]
    push: Callable[[Server, Shards], list[Receipt]]
    """Make the server take over the files of weights; what each of its workers says of them, if anything."""
    taken: Callable[[Server], int | None]
    """Pushes that the server has taken over since it started; None where it cannot say."""


def _settings(sampling: Sampling, ends: list[int]) -> dict[str, Any]:
    """What vLLM and SGLang call alike. Everything is said, since a server fills gaps from the model's generation
    config."""
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "stop": list(sampling.stop),
        "stop_token_ids": ends,
        "skip_special_tokens": False,  # a stop string is looked for in the text that the scorer will see
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
    }


def vllm_settings(sampling: Sampling, seed: int, ends: list[int]) -> dict[str, Any]:
    """vLLM's `SamplingParams`, as its servers take them, too."""
    return {**_settings(sampling, ends), "max_tokens": sampling.max_new_tokens, "seed": seed, "logprobs": 0}


def _openai_request(prompt: tuple[int, ...], sampling: Sampling, seed: int, ends: list[int], _: bool) -> dict:
    return {"prompt": list(prompt), "return_token_ids": True, **vllm_settings(sampling, seed, ends)}


def _vllm_request(prompt: tuple[int, ...], sampling: Sampling, seed: int, ends: list[int], _: bool) -> dict:
    return {"token_ids": list(prompt), "sampling_params": vllm_settings(sampling, seed, ends)}


def _choice(server: Server, reply: Any) -> Answer:
    """Both of vLLM's endpoints; log-probs lie where OpenAI puts those of completions, or those of chats."""
    choice = reply["choices"][0]
    found = choice["logprobs"]
    logprobs = [token["logprob"] for token in found["content"]] if "content" in found else found["token_logprobs"]
    finished = _finished(choice["finish_reason"])
    return Answer(choice["token_ids"], logprobs, finished, choice.get("routed_experts"))


def _finished(reason: str | None) -> bool:
    if reason not in ("stop", "length"):
        raise RunError(f"the server ended a completion with {reason!r} instead of 'stop' or 'length'.")
    return reason == "stop"


def _vllm_push(server: Server, weights: Shards) -> list[Receipt]:
    reply = server.post("/collective_rpc", {"method": "moe_rl_push", "args": [weights.files]})
    server.post("/reset_prefix_cache", {})
    server.pushes = max(server.pushes, *(found["pushes"] for found in reply["results"]))  # sent again if no answer came
    return [
        Receipt(found["pushes"], {name: (dtype, value) for name, (dtype, value) in found["checksums"].items()})
        for found in reply["results"]
    ]


def _vllm_taken(server: Server) -> int:
    """Least over the workers, so that one that missed a push is noticed."""
    return min(int(count) for count in server.post("/collective_rpc", {"method": "moe_rl_pushes"})["results"])


def _sglang_request(prompt: tuple[int, ...], sampling: Sampling, seed: int, ends: list[int], routes: bool) -> dict:
    """The seed takes effect under `--enable-deterministic-inference` only."""
    return {
        "input_ids": list(prompt),
        "return_logprob": True,
        "return_routed_experts": routes,
        "sampling_params": {
            **_settings(sampling, ends),
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "sampling_seed": seed % 2**31,
        },
    }


def _sglang_answer(server: Server, reply: Any) -> Answer:
    meta = reply["meta_info"]
    if server.pushes and meta.get("weight_version") != str(server.pushes):
        raise RunError(
            f"{server.url} answers with weights {meta.get('weight_version')!r}, but push {server.pushes} was sent: it "
            "was restarted, or is too old to name its weights. Load the weights again."
        )
    pairs = meta["output_token_logprobs"]  # [log-prob, id, text or null]
    routes = meta if meta.get("routed_experts") is not None else None
    return Answer([p[1] for p in pairs], [p[0] for p in pairs], _finished(meta["finish_reason"]["type"]), routes)


def _sglang_push(server: Server, weights: Shards) -> list[Receipt]:
    body = {"model_path": str(server.folder.resolve()), "weight_version": str(server.pushes), "flush_cache": True}
    reply = server.post("/update_weights_from_disk", body)
    if not reply.get("success"):
        raise RunError(f"{server.url} did not take over the weights: {json.dumps(reply)[:300]}.")
    return []


DIALECTS = {
    "vllm": Dialect("/inference/v1/generate", _vllm_request, _choice, _vllm_push, _vllm_taken),
    "openai": Dialect("/v1/completions", _openai_request, _choice, _vllm_push, _vllm_taken),
    "sglang": Dialect("/generate", _sglang_request, _sglang_answer, _sglang_push, lambda server: None),
}
