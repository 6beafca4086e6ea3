"""The answer to one request: updates of its prompts as the scheduler hands them back, in OpenAI's format."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException

from shallowdraft.decoding.options import Settings
from shallowdraft.serving.errors import error_content
from shallowdraft.serving.scheduler import Scheduler, ServedPrompt, Update

Kind = Literal["completion", "chat"]


class RequestUpdates:
    """The updates of all prompts of a request in the order they arrive.

    Each update comes with the number of its prompt. A reader that stops early cancels the prompts.
    """

    def __init__(self, scheduler: Scheduler, prompts: list[list[int]], settings: list[Settings]) -> None:
        self._scheduler, self._updates = scheduler, asyncio.Queue[tuple[int, Update]]()
        loop = asyncio.get_running_loop()

        def sender(index: int) -> Callable[[Update], None]:
            def send(update: Update) -> None:
                with suppress(RuntimeError):  # the loop is closed, so nobody is waiting
                    loop.call_soon_threadsafe(self._updates.put_nowait, (index, update))

            return send

        pairs = enumerate(zip(prompts, settings, strict=True))
        self._prompts = [ServedPrompt(ids, options, index, sender(index)) for index, (ids, options) in pairs]
        scheduler.submit(self._prompts)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        unfinished = len(self._prompts)
        try:
            while unfinished:
                index, update = await self._updates.get()
                if update.error is not None:
                    raise HTTPException(500, update.error)
                unfinished -= update.finish_reason is not None
                yield index, update
        finally:
            self._scheduler.cancel(self._prompts)


class OpenAIResponse:
    """The JSON of an answer, as one object or as server-sent events."""

    def __init__(self, kind: Kind, model: str, prompt_tokens: int) -> None:
        self._kind, self._prompt_tokens = kind, prompt_tokens
        prefix = "cmpl" if kind == "completion" else "chatcmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    async def content(self, updates: RequestUpdates) -> dict[str, Any]:
        """Wait for all updates and return the answer as one object."""
        texts: dict[int, str] = {}
        last: dict[int, Update] = {}
        async for index, update in updates:
            texts[index] = texts.get(index, "") + update.text
            last[index] = update
        is_completion = self._kind == "completion"
        choices = []
        for index, text in sorted(texts.items()):
            output = {"text": text} if is_completion else {"message": {"role": "assistant", "content": text}}
            choices.append({"index": index, **output, "logprobs": None, "finish_reason": _finish_reason(last[index])})
        object_type = "text_completion" if is_completion else "chat.completion"
        return {**self._head, "object": object_type, "choices": choices, "usage": self._usage(last)}

    async def events(self, updates: RequestUpdates, *, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events; the last is [DONE], or an error."""
        is_completion = self._kind == "completion"
        object_type = "text_completion" if is_completion else "chat.completion.chunk"
        head = {**self._head, "object": object_type} | ({"usage": None} if with_usage else {})
        begun: set[int] = set()
        last: dict[int, Update] = {}
        try:
            async for index, update in updates:
                last[index] = update
                if update.text or update.finish_reason:
                    delta = {"content": update.text} | ({} if index in begun else {"role": "assistant"})
                    begun.add(index)
                    output = {"text": update.text} if is_completion else {"delta": delta}
                    choice = {"index": index, **output, "logprobs": None, "finish_reason": _finish_reason(update)}
                    yield _event({**head, "choices": [choice]})
        except HTTPException as error:
            yield _event(error_content(error.status_code, error.detail))
            return
        if with_usage:
            yield _event({**head, "choices": [], "usage": self._usage(last)})
        yield "data: [DONE]\n\n"

    def _usage(self, last: dict[int, Update]) -> dict[str, int]:
        new_tokens = sum(update.tokens for update in last.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": self._prompt_tokens + new_tokens,
        }


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _finish_reason(update: Update) -> str | None:
    """Return OpenAI's finish reason, which has no word for a full context."""
    return "length" if update.finish_reason == "context" else update.finish_reason


async def unless_disconnected(
    http_request: HttpRequest, work: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the result of `work`; if the client disconnects first, cancel it and return None."""
    result = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(http_request))
    try:
        await asyncio.wait((result, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        result.cancel()
        disconnected.cancel()


async def _wait_for_disconnect(http_request: HttpRequest) -> None:
    while (await http_request.receive())["type"] != "http.disconnect":
        pass
