"""What is refused before a request is looked at: strangers, and bodies that are too large."""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from shallowdraft.serving.errors import refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = "/health"  # asked by those who have no key


class Guard:
    """Asks for the key, if there is one, and counts bytes."""

    def __init__(self, app: App, api_key: str | None, body_bytes: int) -> None:
        self._app, self._body_bytes = app, body_bytes
        self._wanted = api_key.encode() if api_key else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if self._wanted and scope["path"] != OPEN and not hmac.compare_digest(_key_in(headers), self._wanted):
            return await refusal(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")(
                scope, receive, send
            )
        if int(headers.get(b"content-length", b"0")) > self._body_bytes:
            return await refusal(413, self._too_large)(scope, receive, send)
        return await self._app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._body_bytes:,} bytes"

    def _counted(self, receive: Receive) -> Receive:
        """For bodies that do not say how large they are."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted


def _key_in(headers: dict[bytes, bytes]) -> bytes:
    """The key that a request comes with; the scheme before it may be written in any case."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key if scheme.lower() == b"bearer" else b""
