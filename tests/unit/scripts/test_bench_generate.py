"""The measurement of answers written offline: its row with drafts."""

from __future__ import annotations

import argparse

import pytest

from draftsmith.commands.generate import GenerateConfig
from draftsmith.errors import UserError
from scripts.bench.engine.generate import with_drafts

PLAIN = GenerateConfig(target="t", prompts="stdlib:code", out="", temperature=(0.0,))


@pytest.mark.parametrize(
    ("named", "option"), [("folder", "draft"), ("ngram", "ngram"), ("suffix", "suffix")]
)
def test_drafts_are_named_as_a_folder_or_as_text(named: str, option: str) -> None:
    drafted = with_drafts(PLAIN, argparse.Namespace(draft=named, k="3"))
    assert drafted.drafting() == option and drafted.speculation.k == "3"
    assert drafted.temperature == PLAIN.temperature


def test_a_k_that_generate_refuses_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match="k is 'much'"):
        with_drafts(PLAIN, argparse.Namespace(draft="folder", k="much"))
