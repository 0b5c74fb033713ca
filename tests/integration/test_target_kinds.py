"""Every kind of causal LM of transformers, served or refused as docs/targets.md has it."""

from __future__ import annotations

import pytest
import transformers

from tests.target_kinds import KINDS, PAGE, outcome_of, page, read

VERSION, OUTCOMES = read()
# The goal; more may be served, fewer never.
LEAST_SERVED = 130


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text() == page(VERSION, OUTCOMES)
    assert sum(outcome.is_served for outcome in OUTCOMES.values()) >= LEAST_SERVED
    assert {outcome.status for outcome in OUTCOMES.values()} == {"served", "refused", "not built"}


# One served, one by chunks, one with states, one refused, one that cannot be built.
@pytest.mark.parametrize("kind", ["gemma2", "llama4_text", "jamba", "xglm", "gemma3n"])
def test_a_handful_is_as_in_the_table(kind):
    status = outcome_of(kind).status  # raises where a text is wrong
    assert status == OUTCOMES[kind].status or transformers.__version__ != VERSION


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_as_in_the_table(kind):
    """Of another version of transformers, whatever is served is served with its own text."""
    outcome = outcome_of(kind)
    if transformers.__version__ == VERSION:
        assert outcome == OUTCOMES[kind]
