"""What clients may send. A field that is not here, or a value that would not be honoured, is refused; null never is.

A list is looked at up to its first mistake: a body of a megabyte has room for half a million.
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

LONGEST_NAME = 40  # that a message repeats

T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Count = Annotated[StrictInt, Field(ge=1, lt=2**31)]
Zero = Annotated[StrictFloat, Field(ge=0, le=0)]
One = Annotated[StrictFloat, Field(ge=1, le=1)]


def _form(given: Any) -> str | None:
    """Which of a field's forms is meant."""
    return "string" if isinstance(given, str) else "list" if isinstance(given, list) else None


def _deep_form(given: Any) -> str | None:
    """Likewise, of a list by its first element."""
    deeper = {"string": "strings", "list": "lists"}
    return deeper.get(_form(given[0]) or "", "list") if isinstance(given, list) and given else _form(given)


def _one_of(what: str, form: Callable[[Any], str | None] = _form) -> Discriminator:
    return Discriminator(form, custom_error_type="form", custom_error_message=f"send {what}")


Prompt = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[Some[TokenId], Tag("list")]
    | Annotated[Some[Text], Tag("strings")]
    | Annotated[Some[Some[TokenId]], Tag("lists")],
    _one_of("text, token ids, or a list of either", _deep_form),
]
Stop = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[Text], Field(max_length=4, fail_fast=True), Tag("list")],
    _one_of("a string, or a list of up to four"),
]


class Schema(BaseModel):
    """Strict about names; null stands for what is not said."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        said = {name: value for name, value in given.items() if value is not None}
        unknown = next((name for name in said if name not in cls.model_fields), None)
        if unknown is not None:
            shown = unknown[:LONGEST_NAME].encode(errors="replace").decode()
            raise PydanticCustomError("unknown_field", "this server does not take {name}", {"name": shown})
        return said


class StreamOptions(Schema):
    """How to stream."""

    include_usage: StrictBool = False


class Nothing(Schema):
    """An empty object."""


class PlainText(Schema):
    """The only form of an answer."""

    type: Literal["text"]


class Request(Schema):
    """What completions and chats have in common, and what has one value here: the one that does nothing."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[StrictFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    """0 or -1: every token, as in vLLM."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False
    """As in vLLM: go on behind a stop token."""
    user: str | None = None
    """For the client's own books."""
    n: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    min_p: Zero | None = None
    logit_bias: Nothing | None = None
    response_format: PlainText | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Request):
    """Text or token ids to continue, or a list of either, which gives a choice each."""

    prompt: Prompt
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


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("list")],
    _one_of("text, or a list of text parts"),
]


class Message(Schema):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def plain(self) -> dict[str, str]:
        """As chat templates take it, which have no developers: they are what systems were."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Request):
    """A conversation to answer."""

    messages: Some[Message]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = None

    @property
    def limit(self) -> int | None:
        """On new tokens, by either name."""
        given = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(given) > 1:
            raise PromptError("max_tokens and max_completion_tokens differ; send one of them")
        return next(iter(given), None)
