"""An OpenAI-compatible server: the models it serves, one streamed request, and its counters of speculation."""

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

TIMEOUT = httpx2.Timeout(600, connect=10)  # seconds; under load a first token may take minutes
MAX_REASON = 200  # characters of a server's error message that we repeat
DONE = "[DONE]"

# A line of Prometheus' text format: name{label="value",…} number
_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=\s|$)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_VLLM = "vllm:spec_decode_num_"
_SGLANG = "sglang:spec_accept_"


@dataclass(frozen=True)
class StreamedAnswer:
    """The answer to one streamed request; times are seconds since it was sent."""

    arrivals_s: list[float]
    """When each event with text arrived, which may hold several tokens; without any text, the end."""
    total_s: float
    tokens: int
    prompt_tokens: int
    finish_reason: str | None
    text: str
    speculation: dict[str, Any] | None = None
    """The server's counts for this request alone: vLLM with --enable-per-request-metrics and
    --per-request-spec-decode-metrics summary."""
    token_ids: list[int] = field(default_factory=list)
    """The ids of the new tokens, if the request set vLLM's return_token_ids."""


@dataclass(frozen=True)
class Counters:
    """Counters of speculation since the server's start."""

    iterations: float = 0
    drafted: float = 0
    accepted: float = 0
    by_position: dict[int, float] = field(default_factory=dict)
    tar: float | None = None
    """A recent mean, which SGLang reports in place of counters."""

    def since(self, before: "Counters") -> dict[str, Any]:
        """Return the increase since `before`, as a record."""
        by_position = sorted(self.by_position.items())
        return {
            "num_spec_steps": self.iterations - before.iterations,
            "num_draft_tokens": self.drafted - before.drafted,
            "num_accepted_draft_tokens": self.accepted - before.accepted,
            "accepted_by_position": {str(i): count - before.by_position.get(i, 0) for i, count in by_position},
            "recent_tar": self.tar,
        }


class Endpoint:
    """A server and the model that is asked of it."""

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        address = url.rstrip("/").removesuffix("/v1")
        self.url = masked_url(address)
        """The server's address without a user and password."""
        self.model = model
        self.engine: str | None = None
        """The owner of the model, where vLLM, SGLang and llama.cpp put their names."""
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise OptionError("the API key holds characters that no HTTP header may have, like a line break; check it")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._client = httpx2.Client(base_url=address, headers=headers, timeout=TIMEOUT, limits=limits)
        except (httpx2.InvalidURL, ValueError) as error:
            reason = masked_url(str(error))
            raise OptionError(f"--url is {self.url}, which is not a URL ({reason}); write http://host:port") from None

    def check(self) -> None:
        """Raise if the server is not there, refuses the key or does not serve the model."""
        with _server_errors(self.url):
            response = self._client.get("/v1/models")
            self._check_status(response)
            owners = {model["id"]: model.get("owned_by") for model in response.json()["data"]}
        if self.model not in owners:
            raise OptionError(f"{self.url} does not serve {self.model}; it serves {', '.join(owners) or 'nothing'}")
        self.engine = owners[self.model]

    def ask(
        self, request: dict[str, Any], *, chat: bool, keep_going: Callable[[], bool] = lambda: True
    ) -> StreamedAnswer:
        """Stream the answer to a request; drop it as soon as `keep_going` returns False."""
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **request}
        arrivals_s: list[float] = []
        token_ids: list[int] = []
        text, usage, reason, speculation = "", None, None, None
        with _server_errors(self.url):
            begin_s = time.perf_counter()
            for event in self._events(path, body):
                if not keep_going():
                    raise ServerError("the request was given up")
                for choice in event.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content") if chat else choice.get("text")
                    if piece:
                        arrivals_s.append(time.perf_counter() - begin_s)
                        text += piece
                    token_ids += choice.get("token_ids") or ()
                    reason = choice.get("finish_reason") or reason
                usage = event.get("usage") or usage
                speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
            total_s = time.perf_counter() - begin_s
            if usage is None:
                raise ServerError(f"{self.url} does not count tokens (no usage in the stream), so there is no speed")
            counts = usage["completion_tokens"], usage["prompt_tokens"]
        return StreamedAnswer(arrivals_s or [total_s], total_s, *counts, reason, text, speculation, token_ids)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the objects of a stream of server-sent events, which must end with [DONE]."""
        with self._client.stream("POST", path, json=body) as response:
            self._check_status(response)
            for event in httpx2.EventSource(response):
                if event.data == DONE:
                    return
                content = json.loads(event.data)
                if "error" in content:
                    raise ServerError(f"{self.url} broke off: {_reason(event.data)}")
                yield content
        raise ServerError(f"{self.url} broke off: the stream has no end")

    def counters(self) -> Counters | None:
        """Read the counters of speculation; None if the server has none."""
        with _server_errors(self.url):
            response = self._client.get("/metrics")
        return parse_counters(response.text) if response.status_code == httpx2.codes.OK else None

    def close(self) -> None:
        self._client.close()

    def _check_status(self, response: httpx2.Response) -> None:
        if response.status_code in (401, 403):
            raise OptionError(f"{self.url} refuses the key; give --api-key, or set OPENAI_API_KEY")
        if response.status_code != httpx2.codes.OK:
            response.read()
            raise ServerError(f"{self.url} answers {response.status_code}: {_reason(response.text)}")


@contextmanager
def _server_errors(url: str) -> Iterator[None]:
    """Turn errors of the connection and of the protocol into a ServerError of one line."""
    try:
        yield
    except httpx2.ConnectError:
        raise ServerError(f"{url}: no server answers there; start it, or check the address") from None
    except httpx2.TimeoutException:
        raise ServerError(f"{url}: no answer in {TIMEOUT.read:.0f} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerError(f"{url}: {_reason(str(error)) or type(error).__name__}") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ServerError(f"{url} does not speak OpenAI's protocol ({error!r})") from None


def _reason(text: str) -> str:
    """Return the message of an error response, shortened and in one line."""
    with suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(str(text).split())[:MAX_REASON]


def parse_counters(page: str) -> Counters | None:
    """Read vLLM's or SGLang's counters from a page of Prometheus; None if it has none.

    The counters of several engines behind one server are added up.
    """
    totals: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for name, labels, value in _METRIC.findall(page):
        if name == _VLLM + "accepted_tokens_per_pos_total" and (label := _POSITION.search(labels)):
            position = int(label[1])
            by_position[position] = by_position.get(position, 0) + float(value)
        elif name.startswith(_VLLM):
            totals[name] = totals.get(name, 0) + float(value)
        elif name.startswith(_SGLANG):
            totals[name] = float(value)
    if not totals:
        return None
    return Counters(
        totals.get(_VLLM + "drafts_total", 0),
        totals.get(_VLLM + "draft_tokens_total", 0),
        totals.get(_VLLM + "accepted_tokens_total", 0),
        by_position,
        totals.get(_SGLANG + "length"),
    )
