"""Edits in place give what a server writes without those members, in any style of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.fleet.observe.enrich import applied, edits_of, items, members

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
STYLES: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    {"indent": 2},
    {"ensure_ascii": False},
]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), VALUES, min_size=1, max_size=5), st.data())
def test_members_are_cut_and_set_to_null(body: dict[str, Any], data: Any) -> None:
    cut = data.draw(st.sets(st.sampled_from(list(body)), max_size=len(body) - 1))
    nulled = data.draw(st.sets(st.sampled_from(list(body)))) - cut
    ways = dict.fromkeys(nulled, "null") | dict.fromkeys(cut, "cut")
    left = {
        name: None if name in nulled else value for name, value in body.items() if name not in cut
    }
    for style in STYLES:
        text = json.dumps(body, **style)
        edits = list(edits_of(text, 0, lambda one: ways.get(one.name)))
        assert applied(text, edits) == json.dumps(left, **style)


def test_an_object_may_lose_all_its_members() -> None:
    text = '{"a": 1, "b": [2]}'
    assert applied(text, list(edits_of(text, 0, lambda one: "cut"))) == "{}"


def test_places_of_items() -> None:
    text = '[ {"a":[1,2]} ,"]", 3]'
    assert [text[at] for at in items(text, 0)] == ["{", '"', "3"]
    assert list(items("[]", 0)) == []
    with pytest.raises(ValueError):
        list(members(text, 0))
