"""Error responses in OpenAI's format."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

MAX_SHOWN = 3  # validation errors that a message names
UNION_TAGS = ("string", "strings", "list", "lists")  # pydantic puts them into the path of a field (schemas.py)
TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
CODES = {401: "invalid_api_key", 404: "not_found", 413: "body_too_large", 429: "queue_full", 503: "stopping"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}


def error_content(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Build the JSON object of an error."""
    message = message.encode(errors="replace").decode()  # it may name a field that is not valid Unicode
    error_type = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": error_type, "param": param, "code": CODES.get(status)}}


def error_response(status: int, message: str, param: str | None = None) -> JSONResponse:
    """Build the response to a request that is refused or has failed."""
    return JSONResponse(error_content(status, message, param), status, HEADERS.get(status))


def validation_error(errors: Sequence[Any]) -> JSONResponse:
    """Build the response to an invalid body; it repeats names of fields, never values."""
    shown = errors[:MAX_SHOWN]
    paths = [".".join(str(part) for part in error["loc"][1:] if part not in UNION_TAGS) for error in shown]
    messages = [_message(error, path) for error, path in zip(shown, paths, strict=True)]
    has_field = errors[0]["type"] != "json_invalid"  # for invalid JSON the path is a position in the text
    return error_response(400, "; ".join(messages), paths[0] if has_field and paths[0] else None)


def _message(error: Any, path: str) -> str:
    if error["type"] == "json_invalid":
        return f"the body is not valid JSON: {error['ctx']['error']} at character {path}"
    if not path and error["type"] != "unknown_field":
        return "send a JSON object, with Content-Type: application/json"
    return f"{path}: {error['msg']}" if path else str(error["msg"])
