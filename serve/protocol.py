"""The OpenAI wire format: what a request may say. A parameter that is not honoured exactly is refused with 400."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from draftsmith.serve.request import SamplingParams


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair, which is no text; mend its encoding") from error
    return value


Text = Annotated[str, AfterValidator(_is_text)]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Speculation(Wire):
    """Ours: the draft length of this request and whether the response reports what became of the drafts."""

    k: Annotated[int, Field(ge=0, le=64)] | None = None
    report: bool = False


class StreamOptions(Wire):
    include_usage: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text"]


class Generation(Wire):
    """What completions and chat completions share."""

    model: Text
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    speculation: Speculation = Field(default_factory=Speculation)
    request_class: Text = ""
    return_token_ids: bool | None = None  # as vLLM: each choice also carries its tokens
    return_tokens_as_token_ids: bool | None = None  # as vLLM: tokens of logprobs are named "token_id:17"

    presence_penalty: Literal[0, 0.0] | None = None
    frequency_penalty: Literal[0, 0.0] | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _no_penalty(cls, value: Any) -> Any:
        if value not in (None, 0):
            raise ValueError("penalties are not supported; leave it out or give 0")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value:
            raise ValueError("logit_bias is not supported; leave it out")
        return value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; set stream to true or leave it out")
        return self

    def alternatives(self) -> int | None:
        """How many logprobs beside each emitted token; None for no logprobs."""
        raise NotImplementedError

    def most_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, index: int) -> SamplingParams:
        """Of the `index`-th of n choices: each draws from its own streams."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            max_tokens=self.most_tokens(),
            seed=None if self.seed is None else self.seed + index * 0x9E3779B97F4A7C15,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.alternatives(),
            k=self.speculation.k,
        )


class CompletionRequest(Generation):
    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of is {self.best_of} but n is {self.n or 1}; only best_of equal to n is supported")
        return self

    def alternatives(self) -> int | None:
        return self.logprobs

    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class TextPart(Wire):
    type: Literal["text"]
    text: Text


class Message(Wire):
    role: Text
    content: Text | list[TextPart]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true or leave it out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
