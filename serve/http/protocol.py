"""Request bodies of OpenAI's API. A parameter that is not honoured exactly is refused with 400."""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from draftsmith.serve.http.bodies import (
    ConversationBody,
    FormatFields,
    JsonObject,
    Many,
    Off,
    StrictModel,
    Text,
    ToolFields,
)
from draftsmith.serve.sampling.params import LIMITS, SamplingParams


def bounds(name: str) -> Any:
    """Those that the engine has for a parameter."""
    low, high, ends = LIMITS[name]
    given: dict[str, Any] = {
        "ge" if ends[0] == "[" else "gt": low,
        "le" if ends[1] == "]" else "lt": high,
    }
    return Field(**given)


TokenIds = Many[Annotated[int, Field(ge=0, lt=2**31)]]
# What is looked through for every token.
MOST_STOPS, LONGEST_STOP, MOST_WORDS = 128, 1024, 1024
Stop = Annotated[Text, Field(max_length=LONGEST_STOP)]
# Parameters that the engine has by the same names; one that is not given has its default there.
SAMPLED = (
    "temperature", "top_p", "min_p", "min_tokens", "seed", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "allowed_token_ids",
)  # fmt: skip
SEED_STEP = 0x9E3779B97F4A7C15  # between the choices of a request


class Speculation(StrictModel):
    """Extension of OpenAI's API: draft length and temperature of this request, and whether the
    response reports what was accepted."""

    k: Annotated[int, bounds("k")] | None = None
    draft_temperature: Annotated[float, bounds("draft_temperature")] | None = None
    report: bool = False


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as vLLM: every chunk carries the usage so far
    include_obfuscation: Off | None = None


class AnswerFields(StrictModel):
    """Parameters that are the same in all endpoints that answer."""

    model: Text | None = None  # default: the one that is served
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    speculation: Speculation = Field(default_factory=Speculation)
    request_class: Annotated[Text, Field(max_length=128)] = ""
    # Bookkeeping of the client, and hints about caches, speed and price: to ignore them is to
    # honour them.
    user: Text | None = None
    safety_identifier: Text | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: Text | None = None


class Generation(FormatFields, AnswerFields):
    """Parameters shared by completions and chat completions."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MOST_WORDS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    logit_bias: dict[Text, Annotated[float, Field(ge=-100, le=100)]] | None = None
    bad_words: (
        Annotated[Many[Annotated[Text, Field(min_length=1)]], Field(max_length=MOST_WORDS)] | None
    ) = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    # as vLLM: of the prompt's tokens, this many alternatives each
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool = True
    # Fast tokenizers put no spaces there, whatever it says.
    spaces_between_special_tokens: bool | None = None
    # keep the prompt's last tokens; -1: as many as leave room for the answer
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    # the lowest is admitted first, among requests of the same class or key
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    # cached prefixes are shared with requests of the same salt alone
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    stream_options: StreamOptions | None = None
    # as vLLM: the response also carries the tokens of prompt and answer
    return_token_ids: bool | None = None
    # as vLLM: tokens of logprobs are named "token_id:17"
    return_tokens_as_token_ids: bool | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_some(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("it is 0, which keeps no token; give at least 1, or -1")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_names_ids(cls, value: Any) -> Any:
        """Stops at the first that is wrong, as a list's members do."""
        for key, bias in value.items() if isinstance(value, dict) else ():
            if not (key.isascii() and key.isdigit() and len(key) < 19):
                raise ValueError(f"{reprlib.repr(key)} is no token id; name tokens by their ids")
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                said = reprlib.repr(bias)
                raise ValueError(f"the bias of token {key} is {said}; give one from -100 to 100")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError(
                "stream_options is given without stream; set stream to true or leave it out"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError(
                "prompt_logprobs is given with stream; leave one of them out, or use echo"
            )
        if self.most_tokens() == 0 and not self.echoes():
            raise ValueError(
                "max_tokens is 0; ask for at least 1, or for the echo of a completion's prompt"
            )
        return self

    def api_name(self, name: str) -> str:
        """Name in this API of the engine's parameter `name`."""
        if name == "grammar":
            return self.format_name()
        return name

    @abstractmethod
    def alternatives(self) -> int | None:
        """Number of logprobs beside each emitted token; None for no logprobs."""

    def _prompt_alternatives(self) -> int | None:
        asked = [self.prompt_logprobs, self.alternatives() if self.echoes() else None]
        return max((count for count in asked if count is not None), default=None)

    def most_tokens(self) -> int | None:
        return self.max_tokens

    def within(self, params: SamplingParams, room: int) -> SamplingParams:
        """The parameters for an answer that has room for so many tokens."""
        return params

    def echoes(self) -> bool:
        """True when the prompt is part of the answer."""
        return False

    def sampling(self, bad_words: tuple[tuple[int, ...], ...] = ()) -> list[SamplingParams]:
        """Sampling parameters of the n choices, each of which draws from its own streams.
        `bad_words` are the tokens of the words asked for."""
        given = {name: getattr(self, name) for name in SAMPLED}
        first = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            top_k=max(self.top_k or 0, 0),
            # An echo of nothing but the prompt: the engine gives one token, which is not shown.
            max_tokens=1 if self.most_tokens() == 0 else self.most_tokens(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=self.alternatives(),
            prompt_logprobs=self._prompt_alternatives(),
            k=self.speculation.k,
            draft_temperature=self.speculation.draft_temperature,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            bad_words=bad_words,
            grammar=self.answer_grammar(),
        )
        if self.seed is None:
            return [first] * (self.n or 1)
        return [replace(first, seed=self.seed + index * SEED_STEP) for index in range(self.n or 1)]


class CompletionRequest(Generation):
    prompt: (
        Text
        | Annotated[Many[Text], Field(min_length=1)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[Many[TokenIds], Field(min_length=1)]
    )
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _names_every_form(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        """Name all four forms in the error; pydantic's own names only the first."""
        try:
            return validate(value)
        except ValidationError as error:
            if isinstance(value, str):
                raise
            refused = f"{reprlib.repr(value)} is no prompt"
            raise ValueError(
                f"{refused}; give a text, token ids, or a list of texts or of lists of ids"
            ) from error

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(
                f"best_of is {self.best_of} but n is {self.n or 1}; only best_of equal to n is "
                "supported"
            )
        return self

    def num_prompts(self) -> int:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return len(self.prompt) if several else 1

    def alternatives(self) -> int | None:
        return self.logprobs

    def most_tokens(self) -> int:
        # OpenAI's default
        return max(16, self.min_tokens or 0) if self.max_tokens is None else self.max_tokens

    def within(self, params: SamplingParams, room: int) -> SamplingParams:
        bounded = self.max_tokens is not None or room >= self.most_tokens()
        return params if bounded else replace(params, max_tokens=None)

    def echoes(self) -> bool:
        return bool(self.echo)


class ChatRequest(Generation, ConversationBody, ToolFields):
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None
    include_reasoning: bool | None = None  # as vLLM: false leaves the reasoning out of the answer
    reasoning_effort: Text | None = None
    verbosity: Text | None = None
    modalities: Many[Literal["text"]] | None = None
    prediction: JsonObject | None = None  # of the answer's text, a hint about speed

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs is given without logprobs; set logprobs to true or leave it out"
            )
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        return self

    def api_name(self, name: str) -> str:
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if name == "grammar" and self.answer_grammar() is None:
            return "tools"
        return "messages" if name == "prompt" else super().api_name(name)

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
