"""HTTP connections that time out while a request is incomplete, and that are limited in number."""

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 20  # in which a request must have arrived completely
UNFINISHED = (h11.IDLE, h11.SEND_BODY)  # states of a client whose request has not begun, or not ended


def max_connections() -> int:
    """Return half of the number of files that the process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class Connection(H11Protocol):
    """A connection of uvicorn that is closed if the client is slow to send its request."""

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._update_timeout()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timeout()

    def on_response_complete(self) -> None:
        """Start the timeout if a pipelined request is half received: no further data may ever arrive."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        super().connection_lost(exc)

    def _update_timeout(self) -> None:
        """Run the timeout while a request is incomplete, from the previous answer or the connection's start on."""
        if self.conn.their_state not in UNFINISHED:
            self._stop_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
