"""Sampling parameters of a request, checked one value at a time; every error names the value and
the mend. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

from draftsmith.config import AT_LEAST_1, NOT_NEGATIVE, PART, SHARE, Limits
from draftsmith.errors import UserError
from draftsmith.kernels.constants import MIN_TEMPERATURE
from draftsmith.serve.sampling.grammar import Grammar

if TYPE_CHECKING:
    import torch


MAX_LOGPROBS = 20
LOGPROBS, PENALTY = Limits(0, MAX_LOGPROBS, "[]"), Limits(-2, 2, "[]")
TEMPERATURE, BIAS = Limits(0, 100, "[]"), Limits(-100, 100, "[]")
LIMITS = {
    "temperature": TEMPERATURE,
    "top_k": NOT_NEGATIVE,
    "top_p": PART,
    "min_p": SHARE,
    "max_tokens": AT_LEAST_1,
    "min_tokens": NOT_NEGATIVE,
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "k": Limits(0, 64, "[]"),
    "draft_temperature": TEMPERATURE,
    "repetition_penalty": Limits(0, 1e18, "()"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
}
WHOLE = ("top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "k", "seed")
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
# Of each field as `is_kind` takes it, and in words.
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(LIMITS, (Real, "a number")),
    **dict.fromkeys(WHOLE, (Integral, "a whole number")),
    **dict.fromkeys(SWITCHES, (bool, "True or False")),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), ([Integral], "a list of token ids")),
    "stop": ([str], "a list of texts"),
    "logit_bias": ([(Integral, Real)], "a list of pairs, each of a token id and its bias"),
    "bad_words": ([[Integral]], "a list of words, each a list of token ids"),
    "grammar": (Grammar, "a draftsmith.serve.sampling.grammar.Grammar"),
    "logits_processors": ([Callable], "a list of functions"),
}
OF_SPECULATION = ("k", "draft_temperature")  # as requests name them


def tupled(given: Any) -> Any:
    """A list as a tuple, and lists in it too, as the checks compare."""
    return tuple(map(tupled, given)) if isinstance(given, list | tuple) else given


def is_kind(value: Any, kind: Any) -> bool:
    """True for a value of the type `kind`, for one of several in `[kind]`, for a row in a tuple."""
    if isinstance(kind, type):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not isinstance(value, tuple):
        return False
    if isinstance(kind, tuple):
        return len(value) == len(kind) and all(map(is_kind, value, kind))
    # One of each type: a list may hold a whole vocabulary.
    some = {type(one): one for one in value}.values() if isinstance(kind[0], type) else value
    return all(is_kind(one, kind[0]) for one in some)


def check_limits(params: SamplingParams) -> None:
    given = [(name, getattr(params, name), limits) for name, limits in LIMITS.items()]
    given += [(f"logit_bias of token {token}", bias, BIAS) for token, bias in params.logit_bias]
    for name, value, limits in given:
        if value is not None and not limits.hold(value):
            raise UserError(f"{shown(name)} is {value!r}; it must be {limits}")
    for name in ("temperature", "draft_temperature"):
        value = getattr(params, name)
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise UserError(
                f"{shown(name)} is {value}; give 0 for greedy or at least {MIN_TEMPERATURE}"
            )


def shown(name: str) -> str:
    return f"speculation.{name}" if name in OF_SPECULATION else name


def check_adjustments(params: SamplingParams) -> None:
    """Check the values that need no target."""
    for token, count in Counter(token for token, _ in params.logit_bias).items():
        if count > 1:
            raise UserError(f"logit_bias names token {token} twice; give one bias a token")
    if () in params.bad_words:
        raise UserError("bad_words holds an empty sequence; give the token ids to ban")
    if params.allowed_token_ids == ():
        raise UserError("allowed_token_ids is empty; name the tokens that may come or leave it out")
    _check_min_tokens(params)
    if params.grammar is not None and params.ignore_eos:
        raise UserError("ignore_eos goes on behind the end that a grammar sets; leave one out")


def _check_min_tokens(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise UserError(
            f"min_tokens is {params.min_tokens}, more than max_tokens {params.max_tokens}; ask "
            "for fewer"
        )
    if params.min_tokens > 0 and params.grammar is not None:
        raise UserError(
            f"min_tokens is {params.min_tokens}, but a grammar alone says where its text may end; "
            "leave one of them out"
        )


def check_vocabulary(params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
    """Check the values that need the target's vocabulary."""
    _check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("bad_words", (token for word in params.bad_words for token in word), vocab_size)
    for token in eos_token_ids:
        # transformers silently ignores a banned word that equals EOS.
        if (token,) in params.bad_words:
            raise UserError(
                f"bad_words bans the end-of-sequence token {token}; ask for ignore_eos or "
                "min_tokens instead"
            )


def _check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{name} names token {token}; the ids of this model are 0..{vocab_size - 1}"
            )


# A transformers `LogitsProcessor`: (input_ids [1, n], scores [1, V]) -> scores [1, V], a pure
# function of both.
LogitsProcessor = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class DrawOptions(NamedTuple):
    """Temperature and filters of a request."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; every field is honoured exactly or refused here."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 switches the filter off
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None  # None: as many as the context holds
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # the text keeps the stop string that ended it
    skip_special_tokens: bool = True  # the text leaves out the model's special tokens
    # how many alternatives to report besides the emitted token; None reports nothing
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, its first one excepted
    k: int | None = None  # draft tokens per round; None: the server's
    # of the draft's own distribution, 0 for greedy drafts; None: as the server does
    draft_temperature: float | None = None

    # Applied to raw logits, at every position with the tokens before it, drafted ones included
    # (serve/sampling/adjustments.py).
    repetition_penalty: float = 1.0  # transformers': of the tokens in prompt and output
    presence_penalty: float = 0.0  # OpenAI's: of the tokens in the output
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias), added
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences, none of which comes about
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    min_tokens: int = 0  # what would end the answer is banned until then
    grammar: Grammar | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        for name, (kind, words) in KINDS.items():
            object.__setattr__(self, name, value := tupled(getattr(self, name)))
            # A field may be left out as None only where that is its default.
            if not (value is getattr(type(self), name) or is_kind(value, kind)):
                raise UserError(f"{shown(name)} is {value!r}; give {words}")
        check_limits(self)
        if "" in self.stop:
            raise UserError("stop holds an empty string; give the text to stop at")
        check_adjustments(self)

    @cached_property
    def draw_options(self) -> DrawOptions:
        """Made once, as every round asks for them."""
        return DrawOptions(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def adjusts(self) -> bool:
        """True when the distribution differs from the target's under temperature and filters."""
        return (
            (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
            != (1.0, 0.0, 0.0)
            or bool(self.logit_bias or self.bad_words or self.min_tokens or self.logits_processors)
            or self.allowed_token_ids is not None
            or self.grammar is not None
        )
