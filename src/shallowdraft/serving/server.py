"""From models to a listening server, and its orderly end."""

import ipaddress
import os
import socket
from functools import partial
from types import FrameType

import uvicorn

from shallowdraft.decoding.batch import Batch
from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model
from shallowdraft.serving.app import Limits, new_app
from shallowdraft.serving.connection import Connection
from shallowdraft.serving.metrics import Metrics
from shallowdraft.serving.scheduler import Scheduler
from shallowdraft.serving.worker import Worker

PATIENCE_S = 20  # for clients that do not read what is left to send


class Server(uvicorn.Server):
    """Ends with a signal: what was accepted is answered, more is refused. A second signal ends it at once.

    The worker is the one that loaded the models.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        lookahead: int,
        worker: Worker,
        *,
        rows: int,
        queue: int,
        limits: Limits,
        api_key: str | None = None,
    ) -> None:
        metrics = Metrics(target.name, lookahead if draft else 0)

        def new_batch() -> Batch:
            batch = Batch(target, draft, lookahead, limits.longest, rows)
            batch.warm()
            return batch

        self._worker = worker
        self.scheduler = worker.do(partial(Scheduler, new_batch, rows, queue, metrics))
        app = new_app(target, self.scheduler, metrics, limits, api_key)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                use_colors=False,  # stderr shows escape sequences, whoever writes them
                timeout_graceful_shutdown=PATIENCE_S,
            )
        )

    def serve_on(self, listening: socket.socket) -> None:
        self.scheduler.start(self._worker, self._end)
        self.run(sockets=[listening])
        if self.scheduler.error:
            raise self.scheduler.error

    def stop(self) -> None:
        self.scheduler.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.scheduler.stopping:
            os._exit(128 + sig)  # an orderly end would wait for the iteration that runs
        self.stop()

    def _end(self) -> None:
        self.should_exit = True


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """A socket; an address that others can reach needs a key."""
    if not 0 <= port < 2**16:
        raise OptionError(f"port is {port}; it must be 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        if not api_key and not ipaddress.ip_address(address[0]).is_loopback:
            raise OptionError(f"host {host} can be reached by others; give an API key, or use 127.0.0.1")
        listening = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"cannot listen on {host}:{port} ({error}); use another host or port") from None
    # Connections have it from here (asyncio sets it only for sockets that say TCP, which these do not): else the second
    # part of an answer waits for the client to acknowledge the first, 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
