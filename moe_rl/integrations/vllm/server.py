"""Rollouts from a vLLM or SGLang server: the same `Rollout`s as from the engines in this process.

A server is spoken to in one of three dialects: `openai` is `/v1/completions`, as vLLM extends it with token ids and
routes; `vllm` its token-in, token-out endpoint, there with `--enable-scale-out`; `sglang` is `/generate`. The first two
are tested against a vLLM 0.30.0 server on loopback. SGLang does not install without a GPU, and its dialect is tested
only on payloads written after its documentation: no SGLang server has answered this client. With which options servers
are started, and what to mind, is in docs/engines.md.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_rl.config import ModelConfig, RunConfig
from moe_rl.errors import ConfigError, MoeRlError, RunError
from moe_rl.integrations.vllm.answers import Answer, Reader, common_settings, vllm_settings
from moe_rl.integrations.vllm.push import Receipt
from moe_rl.models.load import LoadedModel, skeleton
from moe_rl.models.shards import SHARD, Shards, describe, write_shards
from moe_rl.registry import checked, needs
from moe_rl.rollouts.engine import check_dtype, check_request, check_routes, context_length, warn_without_mask
from moe_rl.rollouts.turns import generate_by_turns
from moe_rl.seeds import derive
from moe_rl.types import Prompt, Reply, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETRIED = {408, 429, 500, 502, 503, 504}
"""HTTP states that may pass. Any other refusal is final."""
Place = tuple[int, ...]
"""Of a completion, from which its noise is derived: key, prompt, sample."""
CONCURRENCY = 64
"""Requests in flight to a server."""
LARGEST_ANSWER = 2**29
"""Bytes of an answer. Routes are most of one: 8 experts (int32) in 64 layers of 100,000 tokens are 270 MB of base64."""
FIRST_WAIT = 0.5
"""Seconds before a request is tried again; doubled each time."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the environment's proxies, which would be asked for loopback too."""


class BatchIncomplete(RunError):
    """Some completions could not be had. `rollouts` are the others, in their places, None where one is missing."""

    def __init__(self, message: str, rollouts: list[Rollout | None]):
        super().__init__(message)
        self.rollouts = rollouts


STOPS_OF_OPENAI = 4
"""Most stop strings of a request to `/v1/completions`; vLLM refuses more."""


def _check_dialect(dialect: str) -> None:
    if dialect not in DIALECTS:
        raise ConfigError(f"engine.dialect is {dialect!r}; choose {', '.join(DIALECTS)}.")


def _check(
    run: RunConfig, *, url: str | Sequence[str], dialect: str = "openai", routes: str = "raise",
    dtype: str | None = None, concurrency: int = CONCURRENCY,
) -> None:  # fmt: skip
    addresses = _addresses(url)
    if not addresses or not all(str(one).startswith(("http://", "https://")) for one in addresses):
        raise ConfigError(f"engine.url={url!r} must be the address of a server, e.g. http://127.0.0.1:8000, or a list "
                          "of addresses")
    if len({*addresses}) < len(addresses):
        raise ConfigError(f"engine.url={url!r} names an address twice. Give every server once.")
    if concurrency < 1:
        raise ConfigError(f"engine.concurrency={concurrency}: the number of requests at a time must be at least 1")
    _check_dialect(dialect)
    if dialect == "openai" and len(run.stop) > STOPS_OF_OPENAI:
        raise ConfigError(f"stop has {len(run.stop)} texts, but /v1/completions takes at most {STOPS_OF_OPENAI}. Set "
                          "engine.dialect=vllm (or sglang), or give fewer.")
    check_dtype("engine.dtype", dtype)
    check_routes(run, routes)
    warn_without_mask(run, "a server does not say what it kept")


@needs("pushes")
@checked(_check)
def server(
    run: RunConfig, start: LoadedModel, folder: Path, *, url: str | Sequence[str], dialect: str = "openai",
    routes: str = "raise", dtype: str | None = None, concurrency: int = CONCURRENCY,
) -> ServerEngine:  # fmt: skip
    """The engine `server`. `url`: its address, e.g. `http://127.0.0.1:8000`, or a list of addresses of servers of the
    same model, which share the requests; `concurrency`: requests in flight to each server; `dialect`: `openai` (vLLM's
    completions), `vllm` (its `--enable-scale-out` endpoint) or `sglang`; `routes`: `raise`, `unknown` or `off`;
    `dtype`: in which it computes (default: the policy's), in which weights are pushed, and by which pushes are checked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    describe(start.model, start.tokenizer, folder)
    return ServerEngine(url, folder, start.tokenizer, dialect=dialect, routes=routes, dtype=dtype,
                        concurrency=concurrency)


class ServerEngine:
    """A server, or several of the same model, as a `CheckpointReceiver`: one request per completion, to each server in
    turn, `concurrency` at a time to each. An answer is decoded as soon as it comes.

    `folder` holds the model's config and tokenizer, and servers must be able to read it under the same path: weights
    are written there, in files of at most `shard` bytes. A request is tried 1 + `retries` times, waiting 0.5, 1, 2, … s
    in between, each `timeout` seconds without a byte at most. What was received before a failure is kept: the same
    `generate` again asks for the rest only. Noise is the server's own, seeded per completion from (key, prompt,
    sample).
    """

    def __init__(
        self,
        url: str | Sequence[str],
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dialect: str = "openai",
        routes: str = "raise",
        dtype: str | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        concurrency: int = CONCURRENCY,
        shard: int = SHARD,
    ):
        _check_dialect(dialect)
        self.clients = [Client(one.rstrip("/"), folder, timeout, retries) for one in _addresses(url)]
        self.dialect, self.concurrency = DIALECTS[dialect], concurrency
        self.shard, self.dtype = shard, dtype
        self.folder, self.model = folder, skeleton(ModelConfig(name=str(folder)))
        self.context, self.reader = context_length(self.model.config), Reader(tokenizer, self.model, routes)
        self.reports_routes = routes != "off"
        self.received: dict[tuple, Rollout] = {}
        """Completions of a batch that is not complete yet."""

    # ------------------------------------------------------------------ the verbs
    def generate(
        self, prompts: list[Prompt], group_size: int, *, key: tuple[int, ...], sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Rollout]:  # fmt: skip
        """`group_size` completions of every prompt, prompt-major; see `RolloutEngine.generate`.

        Raises BatchIncomplete, which carries what was received, when the server stays away or refuses a request, and
        RunError when it no longer holds the pushed weights.
        """
        check_request(prompts, group_size, sampling, self.context)
        rollouts = generate_by_turns(partial(self._turn, sampling), self.reader.tokenizer, self.reader.ends, prompts,
                                     group_size, key=key, sampling=sampling, reply=reply)
        self._check_pushes()
        self.received.clear()
        return rollouts

    @property
    def name(self) -> str:
        return ", ".join(client.url for client in self.clients)

    @property
    def pushes(self) -> int:
        """Of the first server; receipts of the others count from the same number."""
        return self.clients[0].pushes

    def hold(self, weights: Iterable[tuple[str, Tensor]]) -> Shards:
        """Weights in files of `folder`, written as they come."""
        return write_shards(self.folder, weights, self.shard)

    def push(self, weights: Mapping[str, Tensor]) -> list[Receipt]:
        """Let all servers take over the files that `hold` wrote. See `CheckpointReceiver.push`; SGLang hands out no
        receipts, but names the push in every answer."""
        assert isinstance(weights, Shards), "what `hold` gave"
        self.received.clear()
        with ThreadPoolExecutor(len(self.clients)) as pool:
            found = list(pool.map(lambda client: self._push(client, weights), self.clients))
        return [replace(receipt, pushes=receipt.pushes - client.pushes + self.pushes)
                for client, receipts in zip(self.clients, found, strict=True) for receipt in receipts]

    def close(self) -> None:
        """Nothing to give back: the server belongs to whoever started it."""

    # ------------------------------------------------------------------ how
    def _push(self, client: Client, weights: Shards) -> list[Receipt]:
        taken = self.dialect.taken(client)  # by earlier runs too: a server may outlive its clients
        client.pushes = (client.pushes if taken is None else taken) + 1
        return self.dialect.push(client, weights)

    def _turn(
        self, sampling: Sampling, prompts: list[Prompt], noise: list[tuple[int, ...]], most: list[int]
    ) -> list[Rollout]:
        """A completion of every prompt; see `turns.Draw`. What was received is kept, in case others fail."""
        jobs = [(position, prompt, replace(self.reader.asked(prompt, sampling), max_new_tokens=room))
                for position, prompt, room in zip(noise, prompts, most, strict=True)]  # fmt: skip
        names = [(position, prompt.tokens, asked) for position, prompt, asked in jobs]
        missing = {name: job for name, job in zip(names, jobs, strict=True) if name not in self.received}
        refused = self.reader.refused
        failures = self._collect(missing, sampling)
        placed = [self.received.get(name) for name in names]
        rollouts = [rollout for rollout in placed if rollout is not None]
        self.reader.warn(rollouts, self.reader.refused - refused)
        if failures:
            raise BatchIncomplete(
                f"{len(rollouts)} of {len(jobs)} completions were received from {self.name} and are kept. Generate "
                f"with the same key to request the other {len(failures)}; the first failure was: {failures[0]}",
                placed,
            ) from failures[0]
        return rollouts

    def _collect(self, jobs: Mapping[tuple, tuple[Place, Prompt, Sampling]], sampling: Sampling) -> list[MoeRlError]:
        """Ask for all jobs at once, decode and store every answer as it comes, and return which requests failed. Once
        all have come, raises what is wrong with an answer."""
        failures: list[MoeRlError] = []
        wrong: list[MoeRlError] = []
        with ExitStack() as stack:
            pools = [stack.enter_context(ThreadPoolExecutor(self.concurrency)) for _ in self.clients]
            lost = [threading.Event() for _ in self.clients]  # it is gone: the others need not find out one by one
            futures = {}
            for number, (name, job) in enumerate(jobs.items()):
                at = number % len(self.clients)
                futures[pools[at].submit(self._ask, self.clients[at], *job, lost[at])] = name
            for future in as_completed(futures):
                name = futures[future]
                try:
                    answer = future.result()
                except MoeRlError as error:
                    failures.append(error)
                    continue
                try:
                    self.received[name] = self.reader.decode(jobs[name][1], answer, sampling)
                except MoeRlError as error:
                    wrong.append(error)
        if wrong:
            raise wrong[0]
        return sorted(failures, key=lambda error: str(error).startswith("not asked"))

    def _ask(
        self, client: Client, noise: Place, prompt: Prompt, sampling: Sampling, lost: threading.Event
    ) -> Answer:
        ends = sorted(self.reader.ends)
        body = self.dialect.request(prompt.tokens, sampling, derive(*noise), ends, self.reports_routes)
        reply = client.post(self.dialect.path, body, lost)
        try:
            return self.dialect.answer(client, reply)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RunError(
                f"{client.url}{self.dialect.path} answered without {error}: {json.dumps(reply)[:300]}. Does it have "
                "another dialect?"
            ) from error

    def _check_pushes(self) -> None:
        """A server that crashed and came back serves the weights it was started with."""
        for client in self.clients:
            taken = self.dialect.taken(client) if client.pushes else None
            if taken is not None and taken != client.pushes:
                raise RunError(
                    f"{client.url} has push {taken}, but this run sent push {client.pushes}: it was restarted, or "
                    "another run pushes to it. Load the weights again."
                )


def _addresses(url: str | Sequence[str]) -> list[str]:
    return [url] if isinstance(url, str) else list(url)


@dataclass
class Client:
    """What speaks to one server."""

    url: str
    folder: Path
    timeout: float
    retries: int
    pushes: int = 0
    """The number that its last push must have."""

    def post(self, path: str, body: dict[str, Any], lost: threading.Event | None = None) -> Any:
        """The JSON that the server answers. Raises ConfigError when it refuses, RunError when it cannot be reached."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        for attempt in range(self.retries + 1):
            if lost is not None and lost.is_set():
                raise RunError("not requested, because the server had stopped answering")
            if attempt:
                time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                with DIRECT.open(request, timeout=self.timeout) as response:
                    text = _bounded(response, self.url + path)
                return json.loads(text) if text.strip() else {}
            except urllib.error.HTTPError as error:
                said = error.read(300).decode(errors="replace")
                failure = f"HTTP {error.code}: {said}"
                if error.code not in RETRIED:
                    raise ConfigError(f"{self.url}{path} refused the request ({failure})") from error
            except (OSError, HTTPException, ValueError) as error:  # no connection, timeout, half an answer
                failure = repr(error)
        if lost is not None:
            lost.set()
        raise RunError(f"{self.url}{path} gave no answer in {self.retries + 1} tries; the last failure was {failure}")


def _bounded(response: HTTPResponse, where: str) -> bytes:
    """The body. Raises RunError, since another try would be as long, when it is larger than LARGEST_ANSWER."""
    said = response.length
    if said is None or said <= LARGEST_ANSWER:
        text = response.read(LARGEST_ANSWER + 1)
        if response.length:  # announced, but broken off: `read` with a bound does not notice
            raise IncompleteRead(text, response.length)
        if len(text) <= LARGEST_ANSWER:
            return text
    raise RunError(
        f"{where} answers with {(f'{said:,}' if said else f'more than {LARGEST_ANSWER:,}')} bytes, but the limit is "
        f"{LARGEST_ANSWER:,}. Check the address."
    )


# ---------------------------------------------------------------------- dialects
@dataclass(frozen=True)
class Dialect:
    """How one kind of server is spoken to."""

    path: str
    request: Callable[[tuple[int, ...], Sampling, int, list[int], bool], dict[str, Any]]
    """(prompt, sampling, seed, end tokens, routes wanted) → the body."""
    answer: Callable[[Client, Any], Answer]
    push: Callable[[Client, Shards], list[Receipt]]
    """Make the server take over the files of weights; what each of its workers says of them, if anything."""
    taken: Callable[[Client], int | None]
    """Pushes that the server has taken over since it started; None where it cannot say."""


def _openai_request(prompt: tuple[int, ...], sampling: Sampling, seed: int, ends: list[int], _: bool) -> dict:
    return {"prompt": list(prompt), "return_token_ids": True, **vllm_settings(sampling, seed, ends)}


def _vllm_request(prompt: tuple[int, ...], sampling: Sampling, seed: int, ends: list[int], _: bool) -> dict:
    return {"token_ids": list(prompt), "sampling_params": vllm_settings(sampling, seed, ends)}


def _choice(server: Client, reply: Any) -> Answer:
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


def _vllm_push(server: Client, weights: Shards) -> list[Receipt]:
    reply = server.post("/collective_rpc", {"method": "moe_rl_push", "args": [weights.files]})
    server.post("/reset_prefix_cache", {})
    server.pushes = max(server.pushes, *(found["pushes"] for found in reply["results"]))  # sent again if no answer came
    return [
        Receipt(found["pushes"], {name: (dtype, value) for name, (dtype, value) in found["checksums"].items()})
        for found in reply["results"]
    ]


def _vllm_taken(server: Client) -> int:
    """Least over the workers, so that one that missed a push is noticed."""
    return min(int(count) for count in server.post("/collective_rpc", {"method": "moe_rl_pushes"})["results"])


def _sglang_request(prompt: tuple[int, ...], sampling: Sampling, seed: int, ends: list[int], routes: bool) -> dict:
    """The seed takes effect under `--enable-deterministic-inference` only."""
    return {
        "input_ids": list(prompt),
        "return_logprob": True,
        "return_routed_experts": routes,
        "sampling_params": {
            **common_settings(sampling, ends),
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "sampling_seed": seed % 2**31,
        },
    }


def _sglang_answer(server: Client, reply: Any) -> Answer:
    meta = reply["meta_info"]
    if server.pushes and meta.get("weight_version") != str(server.pushes):
        raise RunError(
            f"{server.url} answers with weights {meta.get('weight_version')!r}, but push {server.pushes} was sent: it "
            "was restarted, or is too old to name its weights. Load the weights again."
        )
    pairs = meta["output_token_logprobs"]  # [log-prob, id, text or null]
    routes = meta if meta.get("routed_experts") is not None else None
    return Answer([p[1] for p in pairs], [p[0] for p in pairs], _finished(meta["finish_reason"]["type"]), routes)


def _sglang_push(server: Client, weights: Shards) -> list[Receipt]:
    body = {"model_path": str(server.folder.resolve()), "weight_version": str(server.pushes), "flush_cache": True}
    reply = server.post("/update_weights_from_disk", body)
    if not reply.get("success"):
        raise RunError(f"{server.url} did not accept the weights: {json.dumps(reply)[:300]}")
    return []


DIALECTS = {
    "vllm": Dialect("/inference/v1/generate", _vllm_request, _choice, _vllm_push, _vllm_taken),
    "openai": Dialect("/v1/completions", _openai_request, _choice, _vllm_push, _vllm_taken),
    "sglang": Dialect("/generate", _sglang_request, _sglang_answer, _sglang_push, lambda server: None),
}
