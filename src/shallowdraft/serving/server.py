"""The server around a target and a draft: models, scheduler, HTTP application, sockets and shutdown."""

import ipaddress
import os
import socket
from functools import partial
from types import FrameType

import uvicorn

from shallowdraft.decoding.batch import Batch
from shallowdraft.errors import OptionError
from shallowdraft.models.model import Model
from shallowdraft.serving.app import RequestLimits, new_app
from shallowdraft.serving.connection import Connection
from shallowdraft.serving.metrics import Metrics
from shallowdraft.serving.scheduler import Scheduler
from shallowdraft.serving.worker import Worker

SHUTDOWN_S = 20  # for clients to read the last of their answers


class ApiServer(uvicorn.Server):
    """An HTTP server that a signal ends after all accepted requests are answered, and a second signal at once.

    The worker must be the one that loaded the models (worker.py).
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
        limits: RequestLimits,
        api_key: str | None = None,
    ) -> None:
        metrics = Metrics(target.name, lookahead if draft else 0)

        def new_batch() -> Batch:
            batch = Batch(target, draft, lookahead, limits.max_model_len, rows)
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
                use_colors=False,  # stderr prints control characters as text (display/printable.py)
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )

    def serve_on(self, listening: socket.socket) -> None:
        """Serve on a listening socket until the server has ended; raise the error that ended it, if one did."""
        self.scheduler.start(self._worker, self._end)
        self.run(sockets=[listening])
        if self.scheduler.error:
            raise self.scheduler.error

    def stop(self) -> None:
        """Take no more requests, and end when all are answered."""
        self.scheduler.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.scheduler.stopping:
            os._exit(128 + sig)  # sys.exit would wait for the running iteration
        self.stop()

    def _end(self) -> None:
        self.should_exit = True


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """Open a listening socket; refuse an address that other machines can reach without an API key."""
    if not 0 <= port < 2**16:
        raise OptionError(f"port is {port}; it must be 0 to 65535")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        if not api_key and not ipaddress.ip_address(address[0]).is_loopback:
            raise OptionError(f"host {host} can be reached from other machines; give an API key, or use 127.0.0.1")
        listening = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"cannot listen on {host}:{port} ({error}); use another host or port") from None
    # Without it the second part of an answer waits 40 ms, until the client acknowledges the first. Connections inherit
    # it; asyncio sets it only on sockets whose protocol is given as TCP, and for these it is not.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
