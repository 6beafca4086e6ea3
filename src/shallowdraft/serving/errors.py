"""Refusals in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

SHOWN = 3  # mistakes that a message names
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
CODES = {401: "invalid_api_key", 404: "not_found", 413: "body_too_large", 429: "queue_full", 503: "stopping"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}


def body(status: int, message: str) -> dict[str, Any]:
    message = message.encode(errors="replace").decode()  # it may name a field that is no valid Unicode
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": CODES.get(status)}}


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse(body(status, message), status, HEADERS.get(status))


def mistakes(found: Sequence[Any]) -> str:
    """What validation found, without a word of what was sent but the names of fields."""
    said = [f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in found[:SHOWN]]
    return "; ".join(said)
