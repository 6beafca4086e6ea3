"""shallowdraft serve: an OpenAI-compatible server."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shallowdraft.commands.options import Draft, DraftCommand, Lookahead, Name, Number, Target
from shallowdraft.errors import OptionError, PromptError

if TYPE_CHECKING:
    from shallowdraft.models.model import Model
    from shallowdraft.serving.app import RequestLimits
    from shallowdraft.serving.server import ApiServer

KEY_VARIABLE = "SHALLOWDRAFT_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeCommand(DraftCommand):
    """Serve a target, and a draft if given, to OpenAI's clients: completions, chats, streaming, metrics.

    Requests join a running batch between two iterations. Example: shallowdraft serve --target DIR --draft DIR
    """

    target: Target
    draft: Draft = None
    lookahead: Lookahead = 5
    host: str = "127.0.0.1"
    """Address to listen on; any that others can reach needs an API key."""
    port: int = 8000
    """0: any free one; it is printed."""
    api_key: Name = None
    """Key of the server, which clients must send. Default: the variable
    SHALLOWDRAFT_API_KEY, which no list of processes shows."""
    chat_template: Name = None
    """File with a chat template for a model that has none, or instead of its own."""
    rows: int = 8
    """Requests that are decoded together."""
    queue: int = 64
    """Requests that may wait; more are refused with 429."""
    max_model_len: Number = None
    """Longest text in tokens, prompt and answer. Default: what target and draft take."""
    max_prompt_tokens: Number = None
    """Longest prompt. Default: what --max-model-len leaves."""
    max_new_tokens: Number = None
    """Tokens that a request may ask for, at most. Default: what --max-model-len leaves."""
    max_body_bytes: int = 2**20
    """Largest body of a request; more is refused with 413."""

    def run(self) -> int:
        try:
            from shallowdraft.serving.server import listen
        except ImportError:
            raise OptionError("the server needs fastapi; install it: pip install 'shallowdraft[serve]'") from None
        from shallowdraft.models.checkpoint import require_decoder_only

        self._check()
        self.set_threads()
        require_decoder_only(self.target, *([self.draft] if self.draft else []))
        api_key = self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)
        if api_key == "":
            raise OptionError("the API key is empty; give one of some length, or none")
        with listen(self.host, self.port, api_key) as listening:
            try:
                server = self._server(api_key)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGINT)  # an orderly end would pull the floor from under the thread that loads
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"{self.target} is served at http://{shown}:{port}/v1", flush=True)
            server.serve_on(listening)
        return 0

    def _server(self, api_key: str | None) -> "ApiServer":
        import shallowdraft as sd
        from shallowdraft.serving.server import ApiServer
        from shallowdraft.serving.worker import Worker

        worker, name = Worker(), self.draft
        target = worker.do(lambda: sd.load(self.target, self.dtype, self.device))
        draft = (
            None
            if name is None
            else worker.do(lambda: sd.load_draft(name, self.draft_dtype or self.dtype, self.device))
        )
        if self.chat_template is not None:
            target.require_tokenizer().chat_template = _read_template(Path(self.chat_template))
            _try_template(target)
        limits = self._limits(target.shape.context, draft.shape.context if draft else None)
        models = target, draft, self.lookahead, worker
        return ApiServer(*models, rows=self.rows, queue=self.queue, limits=limits, api_key=api_key)

    def _check(self) -> None:
        from shallowdraft.decoding.options import Settings

        Settings(lookahead=self.lookahead)
        for name in ("rows", "queue", "max_model_len", "max_prompt_tokens", "max_new_tokens", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name.replace('_', '-')} is {value}; it must be at least 1")

    def _limits(self, target: int, draft: int | None) -> "RequestLimits":
        """Return the limits that follow from the models' contexts.

        A text ends where the draft's context does: plain decoding beyond it would use other random numbers.
        """
        from shallowdraft.serving.app import RequestLimits

        room = target if draft is None else min(target, draft - self.lookahead)
        longest = room if self.max_model_len is None else self.max_model_len
        if not 2 <= longest <= room:
            raise OptionError(f"max-model-len is {longest}; it must be 2 to {room}, what the models take")
        most = longest - 1
        for name in ("max_prompt_tokens", "max_new_tokens"):
            if (getattr(self, name) or 0) > most:
                raise OptionError(
                    f"{name.replace('_', '-')} is {getattr(self, name)}; there is room for {most} at most"
                )
        return RequestLimits(
            max_model_len=longest,
            max_prompt_tokens=self.max_prompt_tokens or most,
            max_new_tokens=self.max_new_tokens or most,
            max_prompts=self.queue,
            max_body_bytes=self.max_body_bytes,
        )


def _read_template(file: Path) -> str:
    from shallowdraft.models.templates import LONGEST

    try:
        with file.open(encoding="utf-8") as opened:
            template = opened.read(LONGEST + 1)
    except UnicodeDecodeError:
        raise OptionError(f"{file} is not UTF-8 text; give a file with a chat template") from None
    if len(template) > LONGEST:
        raise OptionError(f"{file} is longer than {LONGEST:,} characters; give a chat template")
    return template


def _try_template(target: "Model") -> None:
    """Try the template before a client does; some templates need a system message."""
    user = {"role": "user", "content": "Hello"}
    try:
        target.encode_chat([user])
    except PromptError:
        target.encode_chat([{"role": "system", "content": "You are helpful."}, user])
