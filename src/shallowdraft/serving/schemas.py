"""What clients may send. A field that is not here, or a value that would not be honoured, is refused.

A list is looked at up to its first mistake: a body of a megabyte has room for half a million.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

LONGEST_NAME = 40  # that a message repeats

T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Stop = Annotated[list[Text], Field(max_length=4, fail_fast=True)]
Count = Annotated[StrictInt, Field(ge=1, lt=2**31)]


class Schema(BaseModel):
    """Strict about names."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        names = given if isinstance(given, dict) else ()
        unknown = next((name for name in names if name not in cls.model_fields), None)
        if unknown is not None:
            shown = unknown[:LONGEST_NAME].encode(errors="replace").decode()
            raise PydanticCustomError("unknown_field", "there is no field {name} here", {"name": shown})
        return given


class StreamOptions(Schema):
    """How to stream."""

    include_usage: StrictBool = False


class Request(Schema):
    """What completions and chats have in common; null is the default."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    """0 or -1: every token, as in vLLM."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] | None = None
    stop: Text | Stop | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False
    """As in vLLM: go on behind a stop token."""
    n: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Request):
    """Text or token ids to continue, or a list of either, which gives a choice each."""

    prompt: Text | Some[TokenId] | Some[Text] | Some[Some[TokenId]]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


class TextPart(Schema):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Schema):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatRequest(Request):
    """A conversation to answer."""

    messages: Some[Message]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = None
