"""An OpenAI-compatible server: what it serves, one streamed request, and its counters of speculation."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from shallowdraft.errors import OptionError, ServerError
from shallowdraft.records import masked_url

PATIENCE = httpx2.Timeout(600, connect=10)  # seconds; under load a first token may take minutes
DONE = "[DONE]"

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=\s|$)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_VLLM = "vllm:spec_decode_num_"
_SGLANG = "sglang:spec_accept_"


@dataclass(frozen=True)
class Answer:
    """One streamed completion; times are seconds since it was asked for."""

    arrivals_s: list[float]
    """Of each piece of text, however many tokens that has; of the end where there is none."""
    total_s: float
    tokens: int
    prompt_tokens: int
    finish_reason: str | None
    text: str
    speculation: dict[str, Any] | None = None
    """What the server says about this request alone: vLLM with --enable-per-request-metrics and
    --per-request-spec-decode-metrics summary."""
    token_ids: list[int] = field(default_factory=list)
    """Where they were asked for: vLLM's return_token_ids."""


@dataclass(frozen=True)
class Counters:
    """Of speculation, since the server began."""

    iterations: float = 0
    drafted: float = 0
    accepted: float = 0
    by_position: dict[int, float] = field(default_factory=dict)
    tar: float | None = None
    """Of servers that tell a recent mean instead (SGLang)."""

    def since(self, before: "Counters") -> dict[str, Any]:
        """What happened in between, as a record."""
        positions = {str(at): count - before.by_position.get(at, 0) for at, count in sorted(self.by_position.items())}
        return {
            "num_spec_steps": self.iterations - before.iterations,
            "num_draft_tokens": self.drafted - before.drafted,
            "num_accepted_draft_tokens": self.accepted - before.accepted,
            "accepted_by_position": positions,
            "recent_tar": self.tar,
        }


class Endpoint:
    """A server and the model asked of it."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        address = url.rstrip("/").removesuffix("/v1")
        self.url = masked_url(address)
        """Where it is, without a user and a password."""
        self.model = model
        self.engine: str | None = None
        """Who owns the model, as the server says: vLLM, SGLang and llama.cpp put their names there."""
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise OptionError("the API key holds characters that no header may have, like a line break; check it")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._client = httpx2.Client(base_url=address, headers=headers, timeout=PATIENCE, limits=limits)
        except (httpx2.InvalidURL, ValueError) as error:
            reason = masked_url(str(error))
            raise OptionError(f"--url is {self.url}, which is none ({reason}); write http://host:port") from None

    def check(self) -> None:
        """Refuse a server that is not there, a wrong key, an unknown model."""
        with _said(self.url):
            listed = self._client.get("/v1/models")
            self._require(listed)
            owners = {one["id"]: one.get("owned_by") for one in listed.json()["data"]}
        if self.model not in owners:
            raise OptionError(f"{self.url} does not serve {self.model}; it serves {', '.join(owners) or 'nothing'}")
        self.engine = owners[self.model]

    def ask(self, request: dict[str, Any], *, chat: bool, go_on: Callable[[], bool] = lambda: True) -> Answer:
        """Stream a completion; it is given up when `go_on` says no."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **request}
        arrivals: list[float] = []
        token_ids: list[int] = []
        text, usage, reason, speculation = "", None, None, None
        with _said(self.url):
            begun = time.perf_counter()
            for event in self._events(path, body):
                if not go_on():
                    raise ServerError("the request was given up")
                for choice in event.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content") if chat else choice.get("text")
                    if piece:
                        arrivals.append(time.perf_counter() - begun)
                        text += piece
                    token_ids += choice.get("token_ids") or ()
                    reason = choice.get("finish_reason") or reason
                usage = event.get("usage") or usage
                speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
            total = time.perf_counter() - begun
            if usage is None:
                raise ServerError(f"{self.url} does not count tokens (no usage in the stream), so there is no speed")
            counts = usage["completion_tokens"], usage["prompt_tokens"]
        return Answer(arrivals or [total], total, *counts, reason, text, speculation, token_ids)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Objects of a stream that ends as it should."""
        with self._client.stream("POST", path, json=body) as response:
            self._require(response)
            for event in httpx2.EventSource(response):
                if event.data == DONE:
                    return
                content = json.loads(event.data)
                if "error" in content:
                    raise ServerError(f"{self.url} broke off: {_reason(event.data)}")
                yield content
        raise ServerError(f"{self.url} broke off: the stream has no end")

    def counters(self) -> Counters | None:
        """None where the server tells none."""
        with _said(self.url):
            response = self._client.get("/metrics")
        return parse_counters(response.text) if response.status_code == httpx2.codes.OK else None

    def close(self) -> None:
        self._client.close()

    def _require(self, response: httpx2.Response) -> None:
        if response.status_code in (401, 403):
            raise OptionError(f"{self.url} refuses the key; give --api-key, or set OPENAI_API_KEY")
        if response.status_code != httpx2.codes.OK:
            response.read()
            raise ServerError(f"{self.url} answers {response.status_code}: {_reason(response.text)}")


@contextmanager
def _said(url: str) -> Iterator[None]:
    """What goes wrong between us and a server, in a line."""
    try:
        yield
    except httpx2.ConnectError:
        raise ServerError(f"{url}: no server answers there; start it, or check the address") from None
    except httpx2.TimeoutException:
        raise ServerError(f"{url}: no answer in {PATIENCE.read:.0f} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerError(f"{url}: {_reason(str(error)) or type(error).__name__}") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ServerError(f"{url} does not speak OpenAI's protocol ({error!r})") from None


def _reason(text: str) -> str:
    """The message of an error, in one line that is not too long."""
    with suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(str(text).split())[:200]


def parse_counters(text: str) -> Counters | None:
    """From Prometheus' text format, by the names that vLLM and SGLang use; several engines are added up."""
    found: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name == _VLLM + "accepted_tokens_per_pos_total" and (at := _POSITION.search(labels)):
            positions[int(at[1])] = positions.get(int(at[1]), 0) + float(value)
        elif name.startswith(_VLLM):
            found[name] = found.get(name, 0) + float(value)
        elif name.startswith(_SGLANG):
            found[name] = float(value)
    if not found:
        return None
    return Counters(
        found.get(_VLLM + "drafts_total", 0),
        found.get(_VLLM + "draft_tokens_total", 0),
        found.get(_VLLM + "accepted_tokens_total", 0),
        positions,
        found.get(_SGLANG + "length"),
    )
