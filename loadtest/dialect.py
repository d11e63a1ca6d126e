"""What a server understands: its model's name, its endpoint, and how it can be told to write a fixed number of tokens.

OpenAI's API cannot force a length: a model that ends early makes every run different. Most servers have extensions
for it (`ignore_eos`, `min_tokens`) and others refuse the very names, so the first request finds out.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from loadtest.client import Client, RequestFailed
from loadtest.records import RequestRecord

Endpoint = Literal["completions", "chat"]
Message = dict[str, str]

NUM_PREFLIGHT_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How to write a request for this server."""

    model: str
    endpoint: Endpoint = "completions"
    has_ignore_eos: bool = True
    has_min_tokens: bool = True
    has_usage: bool = True
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)  # merged into every request

    @property
    def path(self) -> str:
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

    def body(self, prompt: str | list[int] | list[Message], output_len: int, more: dict[str, Any]) -> bytes:
        """Return the JSON of a streaming request for exactly output_len tokens, or as near as the server can be told.

        Args:
            prompt: Text or token ids for completions, messages for chat.
            output_len: Tokens at most; at least, too, where the server has the means.
            more: Fields of the request's class; they win.
        """
        request: dict[str, Any] = {
            "model": self.model,
            "prompt" if self.endpoint == "completions" else "messages": prompt,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.has_usage:
            request["stream_options"] = {"include_usage": True}
        if self.has_ignore_eos:
            request["ignore_eos"] = True
        if self.has_min_tokens:
            request["min_tokens"] = output_len
        return msgspec.json.encode({**request, **self.extra, **more})


class ServerUnusable(Exception):
    """The server cannot be reached or refuses even the plainest request; the message says which."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def find_model(client: Client) -> str:
    """Return the name of the server's first model.

    Raises:
        ServerUnusable: If it tells none.
    """
    try:
        answer = await client.call("GET", "/v1/models")
        if answer.status != 200:
            raise ServerUnusable(f"/v1/models answers with status {answer.status}; name the model with --model")
        models = msgspec.json.decode(answer.body, type=_Models).data
    except RequestFailed as failure:
        raise ServerUnusable(f"the server does not answer ({failure.kind})") from failure
    except msgspec.DecodeError as error:
        raise ServerUnusable("/v1/models tells no models; name one with --model") from error
    if not models:
        raise ServerUnusable("the server has no model")
    return models[0].id


async def try_out(client: Client, wanted: Dialect, prompt: str | list[int]) -> Dialect:
    """Return wanted, less what the server refuses, after one request that it accepted.

    Raises:
        ServerUnusable: If even the plainest request fails.
    """
    content: Any = prompt if wanted.endpoint == "completions" else [{"role": "user", "content": prompt}]
    plainer = (
        wanted,
        replace(wanted, has_min_tokens=False),
        replace(wanted, has_min_tokens=False, has_ignore_eos=False),
        replace(wanted, has_min_tokens=False, has_ignore_eos=False, has_usage=False),
    )
    record = RequestRecord(index=-1)
    for dialect in plainer:  # Where two are the same, the second failure costs one request more; so be it.
        record = RequestRecord(index=-1)
        await client.stream(dialect.path, dialect.body(content, NUM_PREFLIGHT_TOKENS, {}), record)
        if record.is_ok:
            return dialect
        if not record.error.startswith(("http_400", "http_422")):
            break
    raise ServerUnusable(f"the first request failed: {record.error}")
