"""Shapes of drafts from the configuration of their targets."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.drafters.draft_shape import rope_of


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_older_files_name_the_rotary_embedding_otherwise(config: dict[str, Any]) -> None:
    found = rope_of(config)
    assert found["rope_theta"] == 5e5 and found["rope_scaling"]["factor"] == 2.0
    assert rope_of({"rope_theta": 5e5}) == {"rope_theta": 5e5, "rope_scaling": None}
