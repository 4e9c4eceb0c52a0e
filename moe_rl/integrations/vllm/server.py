"""Rollouts from a vLLM server: the same `Rollout`s as from the engines in this process.

Requests go to `/v1/completions`, which vLLM extends with token ids and routes. This is tested against a vLLM
0.30.0 server on loopback. docs/engines.md says with which options a server is started.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_rl.config import RunConfig
from moe_rl.errors import ConfigError, MoeRlError, RoutingError, RunError
from moe_rl.integrations.shards import SHARD, describe, write_shards
from moe_rl.integrations.vllm.answers import Answer, CompletionEngine, is_finished, vllm_settings
from moe_rl.models.load import LoadedModel
from moe_rl.registry import checked, needs
from moe_rl.rollouts.engine import check_dtype, check_routes, warn_without_mask
from moe_rl.seeds import derive
from moe_rl.types import Prompt, Rollout, Sampling

try:  # whichever huggingface_hub brings
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[import-not-found, no-redef]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATH = "/v1/completions"
MOST_STOPS = 4
"""Most stop strings of a request; vLLM refuses more."""
RETRIED = {408, 429, 500, 502, 503, 504}
"""HTTP states that may pass. Any other refusal is final."""
CONCURRENCY = 64
"""Requests in flight."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Hosts to which no proxy leads."""
Request = tuple[tuple[int, ...], tuple[int, ...], Sampling]
"""Its place among the noise, its prompt's tokens, and how to sample."""
FIRST_WAIT = 0.5
"""Seconds before a request is tried again; doubled each time."""
HEADERS = "MOE_RL_SERVER_HEADERS"
"""The environment variable with headers of every request, as JSON. No configuration and no record contains them."""


def _check(
    run: RunConfig, *, url: str, routes: str = "raise", dtype: str | None = None, concurrency: int = CONCURRENCY
) -> None:
    _check_address(url)
    read_headers()
    if concurrency < 1:
        raise ConfigError(f"engine.concurrency={concurrency}: the number of requests at a time must be at least 1")
    if len(run.stop) > MOST_STOPS:
        raise ConfigError(f"stop has {len(run.stop)} texts, but a server takes at most {MOST_STOPS}. Give fewer.")
    check_dtype("engine.dtype", dtype)
    check_routes(run, routes)
    warn_without_mask(run, "a server does not say what it kept")


@needs("pushes")
@checked(_check)
def server(
    run: RunConfig,
    start: LoadedModel,
    folder: Path,
    *,
    url: str,
    routes: str = "raise",
    dtype: str | None = None,
    concurrency: int = CONCURRENCY,
) -> ServerEngine:
    """The engine `server`. `url`: its address, e.g. `http://127.0.0.1:8000`; `concurrency`: requests in flight;
    `routes`: `raise`, `unknown` or `off`; `dtype`: in which it computes (default: the policy's), in which weights are
    pushed, and by which pushes are checked."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(start.model, start.tokenizer, folder)
    return ServerEngine(url, folder, start.tokenizer, routes=routes, dtype=dtype, concurrency=concurrency)


class ServerEngine(CompletionEngine):
    """A vLLM server as a `CheckpointReceiver`: one request per completion, at most `concurrency` at a time.

    `folder` has the model's config and tokenizer. Weights are written there in files of at most `shard` bytes, so the
    server must read it under the same path. `client` speaks to the server. Completions received before a failure are
    kept: the same `generate` again requests the missing ones. The server draws the noise, seeded per completion from
    (key, prompt, sample).
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        routes: str = "raise",
        dtype: str | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        concurrency: int = CONCURRENCY,
        shard: int = SHARD,
    ):
        super().__init__(folder, tokenizer, routes, dtype)
        self.client, self.name = Client(url, timeout, retries), url
        self.folder, self.concurrency, self.shard = folder, concurrency, shard
        self.received: dict[tuple, Rollout] = {}
        """Completions of a batch that is not complete yet."""

    def complete(
        self, prompts: list[Prompt], asked: list[Sampling], noise: list[tuple[int, ...]], sampling: Sampling
    ) -> list[Rollout]:
        """See `CompletionEngine.complete`. Raises RunError when the server stays away or refuses a request."""
        names = [(place, prompt.tokens, request) for place, prompt, request in zip(noise, prompts, asked, strict=True)]
        missing = {name: prompt for name, prompt in zip(names, prompts, strict=True) if name not in self.received}
        refused = self.reader.refused
        failures = self._collect(missing, sampling)
        rollouts = [self.received[name] for name in names if name in self.received]
        self.reader.warn(rollouts, self.reader.refused - refused)
        if failures:
            raise RunError(
                f"{len(rollouts)} of {len(names)} completions were received from {self.name} and are kept. Generate "
                f"with the same key to request the other {len(failures)}; the first failure was: {failures[0]}"
            ) from failures[0]
        return rollouts

    def finish(self) -> None:
        """Raises RunError when the server has lost the pushed weights."""
        if self.pushes and (count := self.count_pushes()) != self.pushes:  # one that came back has its first weights
            raise RunError(
                f"{self.name} has push {count}, but this run sent push {self.pushes}: it was restarted, or another run "
                "pushes to it. Load the weights again."
            )
        self.received.clear()

    def push(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Write weights to `folder` and let the server take them over. See `CheckpointReceiver.push`."""
        self.received.clear()
        files = write_shards(self.folder, weights, self.shard).files
        before = self.count_pushes()  # by earlier runs, too: a server may outlive its clients
        reply = self.client.post("/collective_rpc", {"method": "moe_rl_push", "args": [files]})
        self.client.post("/reset_prefix_cache", {})
        counts = [int(count) for count in reply["results"]]
        self.pushes = max(before + 1, *counts)  # a push whose answer was lost was sent twice
        return min(counts)

    def count_pushes(self) -> int:
        """Pushes that the server has taken over since it started: of the worker with the fewest."""
        return min(int(count) for count in self.client.post("/collective_rpc", {"method": "moe_rl_pushes"})["results"])

    def close(self) -> None:
        """Close the connections. The server goes on."""
        self.client.close()

    def _collect(self, missing: Mapping[Request, Prompt], sampling: Sampling) -> list[MoeRlError]:
        """Request all at once, store every answer as it comes, and return the failures. Raises RoutingError for wrong
        routes of an answer once all have come."""
        failures: list[MoeRlError] = []
        wrong: list[RoutingError] = []
        lost = threading.Event()  # the server is gone: the others need not find out one by one
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = {pool.submit(self._ask, name, lost): name for name in missing}
            for future in as_completed(futures):
                name = futures[future]
                try:
                    self.received[name] = self.reader.decode(missing[name], future.result(), sampling)
                except RoutingError as error:
                    wrong.append(error)
                except MoeRlError as error:
                    failures.append(error)
                except Exception as error:  # nothing of an answer is checked before
                    failures.append(RunError(f"an answer of {self.name} cannot be read: {error!r}"))
        if wrong:
            raise wrong[0]
        return sorted(failures, key=lambda error: str(error).startswith("not requested"))

    def _ask(self, request: Request, lost: threading.Event) -> Answer:
        noise, tokens, sampling = request
        settings = vllm_settings(sampling, derive(*noise), sorted(self.reader.ends))
        reply = self.client.post(PATH, {"prompt": list(tokens), "return_token_ids": True, **settings}, lost)
        choice = reply["choices"][0]
        finished = is_finished(choice["finish_reason"])
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], finished, choice.get("routed_experts"))


class Client:
    """Posts JSON to one server. A request is tried 1 + `retries` times, after 0.5, 1, 2, … s, and gives up after
    `timeout` seconds without a byte. Proxies are those of the environment, but for loopback; a redirection is an
    error."""

    def __init__(self, url: str, timeout: float = 600.0, retries: int = 4):
        _check_address(url)
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)  # before the server closes a connection
        direct = {f"all://{host}": httpx.HTTPTransport(limits=limits) for host in LOOPBACK}
        self._http = httpx.Client(base_url=self.url, headers=read_headers(), limits=limits, mounts=direct)

    def post(self, path: str, body: dict[str, Any], lost: threading.Event | None = None) -> Any:
        """The JSON that the server answers. Raises ConfigError when it refuses, RunError when it cannot be reached."""
        for attempt in range(self.retries + 1):
            if lost is not None and lost.is_set():
                raise RunError("not requested, because the server had stopped answering")
            if attempt:
                time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                response = self._http.post(path, json=body, timeout=self.timeout)
                if response.is_success:
                    return response.json() if response.content.strip() else {}
            except (httpx.HTTPError, ValueError, RecursionError) as error:  # no connection, half an answer
                failure = repr(error)
                continue
            failure = f"HTTP {response.status_code}: {response.text[:300]}"
            if response.status_code not in RETRIED:
                raise ConfigError(f"{self.url}{path} refused the request ({failure})")
        if lost is not None:
            lost.set()
        raise RunError(f"{self.url}{path} gave no answer in {self.retries + 1} tries; the last failure was {failure}")

    def close(self) -> None:
        self._http.close()


def _check_address(url: str) -> None:
    """Raise ConfigError for another text than an address. The message does not show it: it may contain a password."""
    with suppress(httpx.InvalidURL, TypeError):
        parts = httpx.URL(url)
        if parts.scheme in ("http", "https") and parts.host and not (parts.userinfo or parts.query or parts.fragment):
            return
    raise ConfigError(f"engine.url must be http://HOST:PORT, without a key. Keys belong in {HEADERS}.")


def read_headers() -> dict[str, str]:
    """The headers of `HEADERS`. Raises ConfigError, without their text, for what cannot be headers."""
    with suppress(ValueError, AttributeError):
        headers = json.loads(os.environ.get(HEADERS) or "{}")
        if all(text.isascii() and text.isprintable() for pair in headers.items() for text in pair):
            return headers
    raise ConfigError(f'the environment variable {HEADERS} must be JSON: {{"Authorization": "Bearer KEY"}}, in ASCII')
