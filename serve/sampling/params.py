"""What a request may ask of its law, checked one value at a time; every error names the value and the mend. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.serve.requests.request import SamplingParams

MAX_BIAS = 100.0  # OpenAI's bounds
MAX_PENALTY = 2.0


def within(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if not (low <= value <= high) or (open_low and value == low):
        bounds = f"{'above' if open_low else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise UserError(f"{name} is {value}; it must be {bounds}")


def check_adjustments(params: SamplingParams) -> None:
    """What can be judged without the target."""
    if not 0 < params.repetition_penalty < math.inf:
        raise UserError(f"repetition_penalty is {params.repetition_penalty}; it must be above 0 and finite, 1 being none")
    within("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    within("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    for token, bias in params.logit_bias:
        within(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
    twice = _repeated(token for token, _ in params.logit_bias)
    if twice is not None:
        raise UserError(f"logit_bias names token {twice} twice; give one bias a token")
    if () in params.bad_words:
        raise UserError("bad_words holds an empty sequence; give the token ids to ban")
    if params.allowed_token_ids == ():
        raise UserError("allowed_token_ids is empty; name the tokens that may come or leave it out")
    _check_min_tokens(params)
    if params.grammar is not None and params.ignore_eos:
        raise UserError("ignore_eos goes on behind the end that a grammar sets; leave one of them out")


def _check_min_tokens(params: SamplingParams) -> None:
    within("min_tokens", params.min_tokens, 0, math.inf)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise UserError(f"min_tokens is {params.min_tokens}, more than max_tokens {params.max_tokens}; ask for fewer")
    if params.min_tokens > 0 and params.grammar is not None:
        raise UserError(
            f"min_tokens is {params.min_tokens}, but a grammar alone says where its text may end; leave one of them out"
        )


def check_vocabulary(params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
    """What takes the target to judge."""
    _check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("bad_words", (token for word in params.bad_words for token in word), vocab_size)
    for token in eos_token_ids:
        # transformers drops such a word without a word.
        if (token,) in params.bad_words:
            raise UserError(f"bad_words bans the end-of-sequence token {token}; ask for ignore_eos or min_tokens instead")


def _check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise UserError(f"{name} names token {token}; the ids of this model are 0..{vocab_size - 1}")


def _repeated(values: Iterable[int]) -> int | None:
    seen: set[int] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
