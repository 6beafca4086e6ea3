"""Connections that are not let open for nothing: a request must be whole in time, and there are not too many."""

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

WHOLE_S = 20  # that a request may take to arrive
UNHEARD = (h11.IDLE, h11.SEND_BODY)  # states of a client whose request has not begun, or not ended


def most_connections() -> int:
    """Half of the files that the process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class Connection(H11Protocol):
    """uvicorn's, with a limit to its patience."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        """Behind a request another may have come, of which nothing more does."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """While the client owes something: from its first byte on, or the connection's beginning."""
        if self.conn.their_state not in UNHEARD:
            self._wait_no_more()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(WHOLE_S, self.transport.abort)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
