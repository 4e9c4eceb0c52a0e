"""Files of rollouts, one JSON object per line: the one format that engines and trainers write and our tools read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from moe_rl.errors import ConfigError
from moe_rl.registry import unknown
from moe_rl.tasks.json_lines import objects

Message = dict[str, Any]
Id = Annotated[int, Field(ge=0)]
LogProb = Annotated[float, Field(gt=-1e6, le=1e-4)]
"""In nats; above 0 only by rounding."""
FORMS = ("tokens", "response_tokens", "messages", "response", "text")


class RolloutLine(BaseModel):
    """One response with its prompt: as token ids (`tokens` with `prompt_length`, or `prompt_tokens` with
    `response_tokens`), as two texts, as `messages` of which the last is the response, or as one `text`."""

    model_config = ConfigDict(frozen=True, strict=True)

    tokens: list[Id] | None = None
    """Prompt and response."""
    prompt_length: int | None = Field(None, ge=0)
    prompt_tokens: list[Id] | None = None
    response_tokens: list[Id] | None = None
    prompt: str | list[Message] | None = Field(None, validation_alias=AliasChoices("prompt", "input"))
    response: str | list[Message] | None = Field(
        None, validation_alias=AliasChoices("response", "completion", "output")
    )
    messages: list[Message] | None = None
    text: str | None = None
    logprobs: list[LogProb | None] | None = None
    """Of the response tokens, by the engine; null where it did not sample the token."""
    routes: Any = Field(None, validation_alias=AliasChoices("routes", "routed_experts"))
    """A payload: `integrations.vllm.payloads`."""
    routes_start: int | None = None
    routes_dtype: str | None = None
    gates: Any = None
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    weight_version: str | int | None = None
    cached_tokens: int | None = Field(None, ge=0)
    """Prompt tokens from a prefix cache."""
    score: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, line: dict[str, Any]) -> dict[str, Any]:
        line = {key: value for key, value in line.items() if value is not None}
        if isinstance(line.get("messages"), list):
            line |= {"prompt": line["messages"][:-1], "response": line["messages"][-1:]}
        elif isinstance(line.get("prompt_tokens"), list) and isinstance(line.get("response_tokens"), list):
            line["tokens"] = line["prompt_tokens"] + line["response_tokens"]
            line["prompt_length"] = len(line["prompt_tokens"])
        elif "text" in line and not {"prompt", "response"} & line.keys():
            line |= {"prompt": "", "response": line["text"]}
        return line

    @model_validator(mode="after")
    def _has_a_response(self) -> RolloutLine:
        if self.tokens is not None:
            if self.prompt_length is None or self.prompt_length >= len(self.tokens):
                raise ValueError(f"prompt_length is {self.prompt_length} of {len(self.tokens)} tokens")
            if self.logprobs is not None and len(self.logprobs) != len(self.tokens) - self.prompt_length:
                raise ValueError(
                    f"{len(self.logprobs)} log-probs for {len(self.tokens) - self.prompt_length} response tokens"
                )
            return self
        if not self.response or self.prompt is None:
            raise ValueError(f"no response. Give one of the keys {', '.join(FORMS)}")
        if isinstance(self.response, list) and not (self.prompt and isinstance(self.prompt, list)):
            raise ValueError("the response is a list of messages, so the prompt must be one, too")
        if isinstance(self.response, list) and self.response[-1].get("role") != "assistant":
            raise ValueError("the last message is not from the assistant, so there is no response. Remove the line")
        return self


class StrictRolloutLine(RolloutLine):
    """The same, where an unknown key is an error: a misspelt `temperature` would be left out silently."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


def read_rollouts(
    source: Path | Iterable[Mapping[str, Any]], *, unknown_keys: bool = True
) -> Iterator[tuple[str, int, RolloutLine]]:
    """Every line of a file that is not empty, or every object, one at a time: its place for errors, its number from 1,
    and its content; null is as good as an absent key. Raises ConfigError for the first line of another form, and for a
    file without lines."""
    model, count = RolloutLine if unknown_keys else StrictRolloutLine, 0
    entries = objects(source) if isinstance(source, Path) else ((f"rollout {n}", n, x) for n, x in enumerate(source, 1))
    for count, (where, n, entry) in enumerate(entries, start=1):  # noqa: B007
        try:
            line = model.model_validate(entry)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            message = first["msg"].removeprefix("Value error, ")
            value = "" if isinstance(first["input"], Mapping) else f"{first['input']!r:.200}: "
            keys = f"The keys are {', '.join(map(repr, entry)) or 'none'}."
            if first["type"] == "extra_forbidden":
                aliases = (f.validation_alias for f in model.model_fields.values())
                more = [name for a in aliases if isinstance(a, AliasChoices) for name in map(str, a.choices)]
                unknown(f"key of {where}", key, {*model.model_fields, *more})
            raise ConfigError(f"{where}: {key and f'{key}: '}{value}{message}. {keys}") from error
        yield where, n, line
    if not count:
        raise ConfigError(f"{source} is empty. Write one JSON object per line, with one of {', '.join(FORMS)}.")
