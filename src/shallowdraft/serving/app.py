"""The HTTP application: OpenAI's completions and chat completions, the list of models, metrics and health."""

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

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
from shallowdraft.serving.errors import error_response, validation_error
from shallowdraft.serving.guard import Guard
from shallowdraft.serving.metrics import Metrics
from shallowdraft.serving.responses import Kind, OpenAIResponse, RequestUpdates, unless_disconnected
from shallowdraft.serving.scheduler import QueueFullError, Scheduler, StoppingError
from shallowdraft.serving.schemas import ChatRequest, CompletionRequest, GenerationRequest

DEFAULT_NEW_TOKENS = 16  # of a completion, as in OpenAI's API
CLIENT_CLOSED_REQUEST = 499  # nginx's status; nobody reads it


@dataclass(frozen=True)
class RequestLimits:
    """The most that one request may ask for."""

    max_model_len: int
    """Tokens of a prompt and its new tokens together."""
    max_prompt_tokens: int
    max_new_tokens: int
    max_prompts: int
    max_body_bytes: int


def new_app(
    target: Model, scheduler: Scheduler, metrics: Metrics, limits: RequestLimits, api_key: str | None
) -> FastAPI:
    """Build the application; the scheduler is started elsewhere."""
    app = FastAPI(title="shallowdraft", docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=limits.max_body_bytes)
    _add_error_handlers(app)
    generation = GenerationRoutes(target, scheduler, limits)
    app.post("/v1/completions")(generation.complete)
    app.post("/v1/chat/completions")(generation.chat)
    _add_model_routes(app, target.name, limits.max_model_len)
    _add_monitoring_routes(app, scheduler, metrics)
    return app


class GenerationRoutes:
    """The routes that generate text with one target."""

    def __init__(self, target: Model, scheduler: Scheduler, limits: RequestLimits) -> None:
        self._target, self._scheduler, self._limits = target, scheduler, limits
        # One chat at a time, so that a slow template occupies one thread of the pool and not all of them.
        self._rendering = asyncio.Lock()

    async def complete(self, body: CompletionRequest, http_request: HttpRequest) -> Response:
        """Answer POST /v1/completions."""
        _check_request(body, self._target.name)
        max_prompts = self._limits.max_prompts
        if len(body.prompts) > max_prompts:
            raise PromptError(f"the request has {len(body.prompts)} prompts; send at most {max_prompts}")
        prompts = await run_in_threadpool(lambda: [self._encode(text) for text in body.prompts])
        new_tokens = body.max_tokens or min(DEFAULT_NEW_TOKENS, self._limits.max_new_tokens)
        return await self._generate("completion", body, prompts, new_tokens, http_request)

    async def chat(self, body: ChatRequest, http_request: HttpRequest) -> Response:
        """Answer POST /v1/chat/completions."""
        _check_request(body, self._target.name)
        messages = [message.as_template_input() for message in body.messages]
        async with self._rendering:
            prompt = await run_in_threadpool(lambda: self._encode(self._target.encode_chat(messages)))
        return await self._generate("chat", body, [prompt], body.new_tokens, http_request)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """Return the token ids of a prompt that is not too long."""
        ids, most = token_ids(self._target, prompt), self._limits.max_prompt_tokens
        if len(ids) > most:
            raise PromptError(f"the prompt has {len(ids):,} tokens; send at most {most:,}")
        return ids

    async def _generate(
        self,
        kind: Kind,
        body: GenerationRequest,
        prompts: list[list[int]],
        new_tokens: int | None,
        http_request: HttpRequest,
    ) -> Response:
        """Queue the prompts and answer, as a stream if that is asked for."""
        limits, most = self._limits, self._limits.max_new_tokens
        if new_tokens is not None and new_tokens > most:
            raise PromptError(f"the request asks for {new_tokens:,} new tokens; ask for at most {most:,}")
        if body.stop_strings:
            self._target.require_tokenizer()
        settings = [_settings(body, min(new_tokens or most, limits.max_model_len - len(prompt))) for prompt in prompts]
        updates = RequestUpdates(self._scheduler, prompts, settings)
        response = OpenAIResponse(kind, self._target.name, sum(map(len, prompts)))
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(response.events(updates, with_usage=with_usage), media_type="text/event-stream")
        content = await unless_disconnected(http_request, response.content(updates))
        return Response(status_code=CLIENT_CLOSED_REQUEST) if content is None else JSONResponse(content)


def _add_model_routes(app: FastAPI, model: str, max_model_len: int) -> None:
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "shallowdraft"}
    card |= {"max_model_len": max_model_len}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model_card(name: str) -> dict[str, Any]:
        _check_model(name, model)
        return card


def _add_monitoring_routes(app: FastAPI, scheduler: Scheduler, metrics: Metrics) -> None:
    @app.get("/metrics")
    async def prometheus_page() -> Response:
        return Response(metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if scheduler.healthy else error_response(503, "the server is stopping")


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's format."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        return validation_error(error.errors())

    @app.exception_handler(ShallowdraftError)
    async def _refused(_: HttpRequest, error: ShallowdraftError) -> Response:
        return error_response(400, str(error))

    @app.exception_handler(HTTPException)
    async def _http(_: HttpRequest, error: HTTPException) -> Response:
        return error_response(error.status_code, error.detail)

    @app.exception_handler(QueueFullError)
    async def _full(_: HttpRequest, __: QueueFullError) -> Response:
        return error_response(429, "the queue is full; try again later")

    @app.exception_handler(StoppingError)
    async def _stopping(_: HttpRequest, __: StoppingError) -> Response:
        return error_response(503, "the server is stopping; try another one")


def _check_model(name: str, model: str) -> None:
    if name != model:
        raise HTTPException(404, f"there is no such model; this server has {model}")


def _check_request(body: GenerationRequest, model: str) -> None:
    _check_model(body.model, model)
    if body.stream_options is not None and not body.stream:
        raise PromptError("stream_options need stream: true")


def _settings(body: GenerationRequest, new_tokens: int) -> Settings:
    return Settings(
        max_new_tokens=new_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        top_p=body.top_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop=body.stop_strings,
        stop_tokens=() if body.ignore_eos else None,
    )
