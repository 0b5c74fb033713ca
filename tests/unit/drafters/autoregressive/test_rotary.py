"""Rotary frequencies of a draft: where the draft is, with their digits, and its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.options import (
    DflashOptions,
    DsparkOptions,
    Eagle1Options,
    Eagle3Options,
    MtpOptions,
    PeagleOptions,
)
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target

WITH_ROTARY = {
    "eagle3": Eagle3Options(),
    "eagle1": Eagle1Options(),
    "mtp": MtpOptions(),
    "p-eagle": PeagleOptions(),
    "dflash": DflashOptions(block_size=4),
    "dspark": DsparkOptions(block_size=4, markov_rank=4),
}


@pytest.mark.parametrize("family", WITH_ROTARY)
def test_frequencies_follow_the_draft_and_keep_their_digits(
    family: str, tiny_target: Callable[..., str]
) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    draft: Any = FAMILIES[family].create(WITH_ROTARY[family], target, seed=0)
    (rotary,), before = draft._rotary, draft._rotary[0].inv_freq.clone()
    draft.to(torch.bfloat16)
    assert torch.equal(rotary.inv_freq, before) and rotary.inv_freq.dtype == torch.float32
    assert not any("inv_freq" in name for name in draft.state_dict())
    draft.to("meta")
    assert {one.device.type for one in rotary.buffers()} == {"meta"}
