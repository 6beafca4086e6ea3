"""The HTTP side: OpenAI's completions and chats, metrics and health."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from shallowdraft.decoding.options import Settings
from shallowdraft.decoding.prompt_tokens import token_ids
from shallowdraft.errors import PromptError, ShallowdraftError
from shallowdraft.models.model import Model
from shallowdraft.serving.errors import body as error_body
from shallowdraft.serving.errors import mistaken, refusal
from shallowdraft.serving.guard import Guard
from shallowdraft.serving.metrics import Metrics
from shallowdraft.serving.scheduler import QueueFullError, Scheduler, StoppingError, Ticket, Update
from shallowdraft.serving.schemas import ChatRequest, CompletionRequest, Request

DEFAULT_TOKENS = 16  # of completions, as OpenAI's
CLIENT_GONE = 499


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    longest: int
    """Tokens of a prompt and its answer."""
    prompt_tokens: int
    tokens: int
    """New ones."""
    prompts: int
    body_bytes: int


Kind = Literal["completion", "chat"]


def new_app(target: Model, scheduler: Scheduler, metrics: Metrics, limits: Limits, api_key: str | None) -> FastAPI:
    app = FastAPI(title="shallowdraft", docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_key=api_key, body_bytes=limits.body_bytes)
    _refuse_kindly(app)
    begun_s = int(time.time())
    rendering = asyncio.Lock()  # one chat at a time: however slow its template, it keeps one thread of many

    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: HttpRequest) -> Response:
        _require(asked, target.name)
        if len(asked.prompts) > limits.prompts:
            raise PromptError(f"there are {len(asked.prompts)} prompts in a request; send at most {limits.prompts}")
        prompts = await run_in_threadpool(lambda: [_within(limits, token_ids(target, text)) for text in asked.prompts])
        tokens = asked.max_tokens or min(DEFAULT_TOKENS, limits.tokens)
        return await answer("completion", asked, prompts, tokens, request)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: HttpRequest) -> Response:
        _require(asked, target.name)
        messages = [message.plain() for message in asked.messages]
        async with rendering:
            ids = await run_in_threadpool(lambda: _within(limits, token_ids(target, target.encode_chat(messages))))
        return await answer("chat", asked, [ids], asked.limit, request)

    async def answer(
        kind: Kind, asked: Request, prompts: list[list[int]], tokens: int | None, request: HttpRequest
    ) -> Response:
        if tokens is not None and tokens > limits.tokens:
            raise PromptError(f"{tokens:,} new tokens are asked for; ask for at most {limits.tokens:,}")
        if asked.stops:
            target.require_tokenizer()
        settings = [_settings(asked, min(tokens or limits.tokens, limits.longest - len(ids))) for ids in prompts]
        found = Answer(scheduler, prompts, settings)
        form = Form(kind, target.name, sum(map(len, prompts)))
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return StreamingResponse(form.events(found, usage=usage), media_type="text/event-stream")
        whole = await _unless_gone(request, form.whole(found))
        return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)

    card = {"id": target.name, "object": "model", "created": begun_s, "owned_by": "shallowdraft"}
    card |= {"max_model_len": limits.longest}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _require_model(name, target.name)
        return card

    @app.get("/metrics")
    async def counts() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if scheduler.healthy else refusal(503, "the server is stopping")

    return app


class Answer:
    """What comes of a request's prompts, as it comes; whoever stops reading cancels the rest."""

    def __init__(self, scheduler: Scheduler, prompts: list[list[int]], settings: list[Settings]) -> None:
        self._scheduler, self._updates = scheduler, asyncio.Queue[tuple[int, Update]]()
        loop = asyncio.get_running_loop()

        def notify(index: int) -> Callable[[Update], None]:
            def send(update: Update) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(self._updates.put_nowait, (index, update))

            return send

        jobs = enumerate(zip(prompts, settings, strict=True))
        self._tickets = [Ticket(ids, options, index, notify(index)) for index, (ids, options) in jobs]
        scheduler.submit(self._tickets)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        unfinished = len(self._tickets)
        try:
            while unfinished:
                index, update = await self._updates.get()
                if update.error is not None:
                    raise HTTPException(500, update.error)
                unfinished -= update.finish_reason is not None
                yield index, update
        finally:
            self._scheduler.cancel(self._tickets)


class Form:
    """An answer as OpenAI's clients read it."""

    def __init__(self, kind: Kind, model: str, prompt_tokens: int) -> None:
        self._kind, self._prompt_tokens = kind, prompt_tokens
        prefix = "cmpl" if kind == "completion" else "chatcmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    async def whole(self, answer: Answer) -> dict[str, Any]:
        texts: dict[int, str] = {}
        ends: dict[int, Update] = {}
        async for index, update in answer:
            texts[index] = texts.get(index, "") + update.text
            ends[index] = update
        choices = []
        for index, text in sorted(texts.items()):
            said = {"text": text} if self._kind == "completion" else {"message": {"role": "assistant", "content": text}}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": _reason(ends[index])})
        kind = "text_completion" if self._kind == "completion" else "chat.completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(ends)}

    async def events(self, answer: Answer, *, usage: bool) -> AsyncIterator[str]:
        """Server-sent events; one that says [DONE] is the last, unless something went wrong."""
        kind = "text_completion" if self._kind == "completion" else "chat.completion.chunk"
        head = {**self._head, "object": kind} | ({"usage": None} if usage else {})
        begun: set[int] = set()
        ends: dict[int, Update] = {}
        try:
            async for index, update in answer:
                ends[index] = update
                if update.text or update.finish_reason:
                    delta = {"content": update.text} | ({} if index in begun else {"role": "assistant"})
                    begun.add(index)
                    said = {"text": update.text} if self._kind == "completion" else {"delta": delta}
                    choice = {"index": index, **said, "logprobs": None, "finish_reason": _reason(update)}
                    yield _event({**head, "choices": [choice]})
        except HTTPException as error:
            yield _event(error_body(error.status_code, error.detail))
            return
        if usage:
            yield _event({**head, "choices": [], "usage": self._usage(ends)})
        yield "data: [DONE]\n\n"

    def _usage(self, ends: dict[int, Update]) -> dict[str, int]:
        new = sum(update.tokens for update in ends.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self._prompt_tokens + new,
        }


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _reason(update: Update) -> str | None:
    return "length" if update.finish_reason == "context" else update.finish_reason


def _require_model(asked: str, model: str) -> None:
    if asked != model:
        raise HTTPException(404, f"there is no such model; this server has {model}")


def _require(asked: Request, model: str) -> None:
    _require_model(asked.model, model)
    if asked.stream_options is not None and not asked.stream:
        raise PromptError("stream_options are for stream: true")


def _within(limits: Limits, ids: list[int]) -> list[int]:
    if len(ids) > limits.prompt_tokens:
        raise PromptError(f"the prompt has {len(ids):,} tokens; send at most {limits.prompt_tokens:,}")
    return ids


def _settings(asked: Request, tokens: int) -> Settings:
    return Settings(
        max_new_tokens=tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=asked.top_k if asked.top_k and asked.top_k > 0 else None,
        top_p=asked.top_p,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        stop=asked.stops,
        stop_tokens=() if asked.ignore_eos else None,
    )


async def _unless_gone(request: HttpRequest, work: Any) -> dict[str, Any] | None:
    """What comes of it; None if the client leaves before, which ends it."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse_kindly(app: FastAPI) -> None:
    """Every refusal in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        return mistaken(error.errors())

    @app.exception_handler(ShallowdraftError)
    async def _refused(_: HttpRequest, error: ShallowdraftError) -> Response:
        return refusal(400, str(error))

    @app.exception_handler(HTTPException)
    async def _http(_: HttpRequest, error: HTTPException) -> Response:
        return refusal(error.status_code, error.detail)

    @app.exception_handler(QueueFullError)
    async def _full(_: HttpRequest, __: QueueFullError) -> Response:
        return refusal(429, "the queue is full; try again later")

    @app.exception_handler(StoppingError)
    async def _stopping(_: HttpRequest, __: StoppingError) -> Response:
        return refusal(503, "the server is stopping; try another one")
