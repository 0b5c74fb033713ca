"""What a redaction hook masks is neither stored nor trained on, wherever in the rounds it lies."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.distill.buffer.redaction import Redactor, load_hook, masked_tokens
from draftsmith.distill.buffer.traffic import Role, branched, stitch
from draftsmith.errors import UserError
from draftsmith.record import RoundRecord
from tests.round_records import Distribution, each, logged, round_record
from tests.tokenizer_kinds import FALLBACKS

MASK = 1


class Letters:
    """A token is a character."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        return "".join(map(chr, token_ids))


def rounds(text: str, prompt: int, accepted: Sequence[int], drafted: str) -> list[RoundRecord]:
    """A request of several rounds of 3 drafts; a rejected draft is a letter of `drafted`, a last
    record ends it."""
    tokens, records, at = [ord(one) for one in text], [], 0
    for kept in [*accepted, None]:
        begin = prompt if at == 0 else at
        if kept is None or begin + kept + 1 > len(tokens):
            records.append(make(len(records), len(tokens), tokens[at:], [], 0, [], last=True))
            break
        committed = tokens[begin : begin + kept + 1]
        drafts = [*committed[:kept], *[ord(drafted)] * (3 - kept)]
        records.append(make(len(records), begin, tokens[at:begin], drafts, kept, committed))
        at = begin + kept + 1
    return records


def make(
    number: int,
    position: int,
    context: list,
    drafted: list,
    accepted: int,
    committed: list,
    last: bool = False,
) -> RoundRecord:
    distributions = logged(*(Distribution([token], [0.0], 0.0) for token in drafted))
    return round_record(
        request="a-0", round=number, position=position, context=context, drafted=drafted,
        accepted=accepted, committed=committed, p=distributions, q=distributions, last=last,
    )  # fmt: skip


def secrets(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer("[0-9]+", text)]


def redacted(records: list[RoundRecord], hook: Callable = secrets) -> list[RoundRecord]:
    screen = Redactor(hook, Letters(), mask_id=MASK)
    return [ready for record in records for ready in screen(record)]


@settings(max_examples=150, deadline=None)
@given(
    st.text("abc019", min_size=4, max_size=24),
    st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_no_secret_is_left_in_any_record_and_the_text_stays_whole(
    text: str, prompt: int, accepted: list[int]
) -> None:
    told = rounds(text, prompt, accepted, "b")
    kept = redacted(told)
    stored = stitch(kept)
    assert stored is not None and len(kept) == len(told)
    assert stored.tokens == [MASK if one.isdigit() else ord(one) for one in text]
    for record in kept:
        tokens = [
            *record.context,
            *record.drafted,
            *record.committed,
            *[distribution.ids[0] for distribution in (*each(record.p), *each(record.q))],
        ]
        assert not any(chr(token).isdigit() for token in tokens)
    assert all(
        role == Role.CONTEXT
        for token, role in zip(stored.tokens, stored.roles, strict=True)
        if token == MASK
    )
    first = min((index for index, one in enumerate(text) if one.isdigit()), default=None)
    if first is None:
        assert kept == told
    else:
        # A distribution says what stood at its own position: none may lie behind the first secret.
        assert all(record.position + len(record.p) <= first for record in kept if record.p)
        assert all(len(one.tokens) <= first for _, one in branched(stored))


def test_text_behind_a_secret_is_still_learned_from() -> None:
    stored = stitch(redacted(rounds("ab12cabcabca", 5, [2, 3], "b")))
    assert stored is not None and Role.ACCEPTED in stored.roles and not stored.is_scorable


def test_nothing_leaves_before_the_last_record_nor_with_a_gap() -> None:
    told = rounds("abcabcabc", 2, [2, 1], "b")
    assert redacted(told[:-1]) == [] and len(redacted(told)) == len(told)
    assert redacted([told[0], *told[2:]]) == []


@pytest.mark.parametrize("result", [ValueError("no"), None, [(1, 2, 3)], [("a", "b")]])
def test_a_hook_that_fails_costs_the_records_and_nothing_else(result: object) -> None:
    def hook(text: str) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    assert redacted(rounds("abcabc", 2, [1], "b"), hook) == []


def test_a_token_that_ends_no_character_goes_with_the_next_one() -> None:
    assert masked_tokens([1, 1, 2, 3], [(1, 2)]) == [False, True, True, False]
    assert masked_tokens([1, 2], [(0, 0)]) == [False, False]
    assert masked_tokens([1, 1], [(1, 2)]) == [False, True]


@pytest.mark.parametrize("reference", ["nowhere:hook", "json", "json:nothing", "json:__name__"])
def test_a_hook_that_is_none_is_one_sentence(reference: str) -> None:
    with pytest.raises(UserError, match="module:function"):
        load_hook(reference)


@pytest.mark.parametrize("kind", sorted(FALLBACKS))
def test_a_hook_sees_the_true_text_where_characters_are_many_tokens(kind: str) -> None:
    tokenizer, seen = FALLBACKS[kind], list[str]()
    secret = "😀" * 15
    text = f"a {secret} x"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]

    def hook(shown: str) -> list[tuple[int, int]]:
        seen.append(shown)
        at = shown.index(secret)
        return [(at, at + len(secret))]

    record = make(0, len(tokens), tokens, [], 0, [], last=True)
    (kept,) = Redactor(hook, tokenizer, mask_id=MASK)(record)
    assert seen == [text]
    left = [token for token in kept.context if token != MASK]
    assert tokenizer.decode(left) == "a  x" and len(left) < 8
