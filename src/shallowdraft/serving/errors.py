"""Refusals in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

SHOWN = 3  # mistakes that a message names
FORMS = ("string", "strings", "list", "lists")  # of a field, which are no names in it
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
CODES = {401: "invalid_api_key", 404: "not_found", 413: "body_too_large", 429: "queue_full", 503: "stopping"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}


def body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    message = message.encode(errors="replace").decode()  # it may name a field that is no valid Unicode
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": CODES.get(status)}}


def refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(body(status, message, param), status, HEADERS.get(status))


def mistaken(found: Sequence[Any]) -> JSONResponse:
    """What validation found, without a word of what was sent but the names of fields."""
    places = [".".join(str(part) for part in one["loc"][1:] if part not in FORMS) for one in found[:SHOWN]]
    said = [_said(one, place) for one, place in zip(found, places, strict=False)]
    named = found[0]["type"] != "json_invalid"  # else the place is that of a character
    return refusal(400, "; ".join(said), places[0] if named and places[0] else None)


def _said(mistake: Any, place: str) -> str:
    if mistake["type"] == "json_invalid":
        return f"the body is no JSON: {mistake['ctx']['error']} at character {place}"
    if not place and mistake["type"] != "unknown_field":
        return "send a JSON object, with Content-Type: application/json"
    return f"{place}: {mistake['msg']}" if place else str(mistake["msg"])
