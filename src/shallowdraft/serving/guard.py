"""Middleware that refuses a request without the API key, or with a body that is too large, before it is parsed."""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from shallowdraft.serving.errors import error_response

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]

KEYLESS_PATH = "/health"  # load balancers ask for it without a key


class Guard:
    """An ASGI middleware that checks the API key, if there is one, and counts the bytes of bodies."""

    def __init__(self, app: App, api_key: str | None, max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._api_key = (api_key or "").encode()

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        needs_key = self._api_key and scope["path"] != KEYLESS_PATH
        if needs_key and not hmac.compare_digest(_sent_key(headers), self._api_key):
            response = error_response(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
            return await response(scope, receive, send)
        if int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            return await error_response(413, self._too_large)(scope, receive, send)
        return await self._app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body_bytes:,} bytes"

    def _counted(self, receive: Receive) -> Receive:
        """Count the bytes of a chunked body, which has no Content-Length."""
        received_bytes = 0

        async def counted() -> AsgiMessage:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted


def _sent_key(headers: dict[bytes, bytes]) -> bytes:
    """Return the key of a request's Authorization header; the scheme may be in any case."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else b""
