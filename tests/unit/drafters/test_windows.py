"""Sliding windows of drafts: what they hide, in training, in packed rows, on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.draft_shape import rope_of, windows_config, windows_in
from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.noise import noisy

TARGET_DTYPE = torch.float64
WINDOW, LENGTH, DEPTHS = 7, 250, 3  # several chunks of the unroll
FAMILIES_OF_ONE_LAYER = ["eagle3", "p-eagle", "mtp", "eagle1", "draft-lm"]
SMALL = {"p-eagle": {"num_hidden_layers": 1}, "draft-lm": {"num_layers": 1}}


def create(family: str, target: Target, window: int | None = WINDOW) -> Any:
    options = OPTIONS[family](window=window, **SMALL.get(family, {}))
    drafter = FAMILIES[family].create(options, target, seed=0).to(torch.float64)
    return noisy(drafter, 2)


def batch_of(drafter: Any, target: Target, **more: Any) -> UnrollBatch:
    """Random states, so that a state says nothing of the tokens before it."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, target.vocab_size, (1, LENGTH), generator=generator)
    width = len(drafter.taps) * target.hidden_size
    taps = torch.randn(1, LENGTH, width, generator=generator, dtype=torch.float64)
    return UnrollBatch(
        input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps if drafter.taps else None,
        num_steps=DEPTHS, **more,
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES_OF_ONE_LAYER)
@pytest.mark.parametrize("window", [WINDOW, None])
def test_a_draft_sees_its_window_and_no_more(
    family: str, window: int | None, target: Target
) -> None:
    """One layer: what stands at column c reaches the columns from c to c + window - 1, and one more
    at each further depth, whose state is that of the depth before. Without a window, all."""
    drafter = create(family, target, window)
    batch = batch_of(drafter, target)
    changed = 140
    other = batch_of(drafter, target)
    other.input_ids[0, changed] = (other.input_ids[0, changed] + 1) % target.vocab_size
    if other.taps is not None:
        other.taps[0, changed] += 1
    steps = zip(drafter.unroll(batch), drafter.unroll(other), strict=True)
    for depth, (one, two) in enumerate(steps):
        moved = (one.hidden - two.hidden).abs().amax(dim=-1)[0] > 1e-9
        last = int(moved.nonzero().max())
        if window is None:
            assert last == LENGTH - 1
        else:
            assert changed + window - 1 <= last <= changed + window - 1 + depth


def test_windows_stand_in_a_config_as_vllm_reads_them() -> None:
    values = {"num_hidden_layers": 2, "sliding_window": 5}
    assert windows_in(values) == ()  # a width without layers that have it
    assert windows_in({**values, "layer_types": ["full_attention"] * 2}) == ()
    mixed = {**values, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert windows_in(mixed) == (5, None)
    assert windows_in({**values, **windows_config((None, 5))}) == (None, 5)
    assert windows_config(()) == {}
    with pytest.raises(UserError, match="sliding_window=None; restore"):
        windows_in({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})


def test_layers_of_the_target_have_no_window(
    target: Target, tiny_target: Callable[..., str]
) -> None:
    with pytest.raises(UserError, match="starts from"):
        options = OPTIONS["draft-lm"](window=4, target_layers=(0, 1))
        FAMILIES["draft-lm"].create(options, target, seed=0)
    with pytest.raises(UserError, match=r"'draft.window' is 4 .* layers of its own"):
        other = Target.load(tiny_target("ernie4_5_moe"))
        FAMILIES["mtp"].create(OPTIONS["mtp"](window=4), other, seed=0)


# Rotary embeddings


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
