"""The request bodies that the server accepts.

An unknown field, or a value that would have no effect, is refused; null is the same as a field left out. Validation of
a list stops at the first error: a body of a megabyte has room for half a million of them.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shallowdraft.errors import PromptError

MAX_SHOWN_NAME = 40  # characters of an unknown field that a message repeats

T = TypeVar("T")
NonEmptyList = Annotated[list[T], Field(min_length=1, fail_fast=True)]
NonEmptyText = Annotated[str, Field(min_length=1)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
TokenCount = Annotated[StrictInt, Field(ge=1, lt=2**31)]
OnlyZero = Annotated[StrictFloat, Field(ge=0, le=0)]
OnlyOne = Annotated[StrictFloat, Field(ge=1, le=1)]


def _type_tag(value: Any) -> str | None:
    """Return the tag of the union member to validate a field as."""
    return "string" if isinstance(value, str) else "list" if isinstance(value, list) else None


def _element_type_tag(value: Any) -> str | None:
    """Return the tag of the union member, which for a list depends on its first element."""
    by_element = {"string": "strings", "list": "lists"}
    return by_element.get(_type_tag(value[0]) or "", "list") if isinstance(value, list) and value else _type_tag(value)


def _discriminator(accepted: str, tag: Callable[[Any], str | None] = _type_tag) -> Discriminator:
    """Choose one union member by its tag, so that an error is about that one alone."""
    return Discriminator(tag, custom_error_type="form", custom_error_message=f"send {accepted}")


PromptField = Annotated[
    Annotated[NonEmptyText, Tag("string")]
    | Annotated[NonEmptyList[TokenId], Tag("list")]
    | Annotated[NonEmptyList[NonEmptyText], Tag("strings")]
    | Annotated[NonEmptyList[NonEmptyList[TokenId]], Tag("lists")],
    _discriminator("text, token ids, or a list of either", _element_type_tag),
]
StopField = Annotated[
    Annotated[NonEmptyText, Tag("string")]
    | Annotated[list[NonEmptyText], Field(max_length=4, fail_fast=True), Tag("list")],
    _discriminator("a string, or a list of up to four"),
]


class Schema(BaseModel):
    """A JSON object that refuses unknown fields and drops those that are null."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None}
        unknown = next((name for name in fields if name not in cls.model_fields), None)
        if unknown is not None:
            shown = unknown[:MAX_SHOWN_NAME].encode(errors="replace").decode()
            raise PydanticCustomError("unknown_field", "this server does not take {name}", {"name": shown})
        return fields


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: StrictBool = False


class EmptyObject(Schema):
    """An object without fields."""


class PlainText(Schema):
    """The only format of an answer."""

    type: Literal["text"]


class GenerationRequest(Schema):
    """The fields that completions and chats have in common.

    A field of OpenAI's or vLLM's API that the server does not implement is accepted with the value that has no effect.
    """

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[StrictFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    """0 and -1 stand for every token, as in vLLM."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] | None = None
    stop: StopField | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False
    """Whether to continue after a stop token, as in vLLM."""
    user: str | None = None
    """The client's own label, ignored."""
    n: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    frequency_penalty: OnlyZero | None = None
    presence_penalty: OnlyZero | None = None
    repetition_penalty: OnlyOne | None = None
    min_p: OnlyZero | None = None
    logit_bias: EmptyObject | None = None
    response_format: PlainText | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest):
    """Text or token ids to continue, or a list of them, each answered by one choice."""

    prompt: PromptField
    echo: Literal[False] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None

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


ContentField = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("list")],
    _discriminator("text, or a list of text parts"),
]


class ChatMessage(Schema):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: ContentField

    def as_template_input(self) -> dict[str, str]:
        """Return the message for a chat template, which knows the role developer as system."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    messages: NonEmptyList[ChatMessage]
    max_completion_tokens: TokenCount | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = None

    @property
    def new_tokens(self) -> int | None:
        """The limit of new tokens, by either of its names."""
        limits = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(limits) > 1:
            raise PromptError("max_tokens and max_completion_tokens differ; send one of them")
        return next(iter(limits), None)
