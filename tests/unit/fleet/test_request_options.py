from __future__ import annotations

import pytest

from draftsmith.fleet.engine import EngineRequestOptions, engine_name, request_options


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        (None, EngineRequestOptions()),
        ({"top_n": 3}, EngineRequestOptions()),
        ({"draftsmith_record": False}, EngineRequestOptions(record=False)),
        ({"draftsmith_record": "off"}, EngineRequestOptions(record=False)),
        ({"draftsmith_record": 0}, EngineRequestOptions(record=False)),
        ({"draftsmith_class": "code"}, EngineRequestOptions(request_class="code")),
        ({"draftsmith_share": "0.25"}, EngineRequestOptions(share=0.25)),
        ({"draftsmith_share": "much"}, EngineRequestOptions(record=False)),
        ({"draftsmith_share": 2}, EngineRequestOptions(record=False)),
    ],
)
def test_options_of_a_request(extra: dict | None, options: EngineRequestOptions) -> None:
    assert request_options(extra) == options


def test_names_of_engines_are_parts_of_file_names() -> None:
    assert engine_name("a/b c", 1) == "a-b-c"
    assert engine_name("a", 1, 3) == "a-3"
    assert engine_name("", 8000).endswith("-8000") and "/" not in engine_name("", 8000)
