"""Evaluations of a run keep to their share of its minutes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.train.config import TrainConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.measured import HeldOut


@pytest.mark.parametrize(
    ("minutes", "prompts"),
    [
        # The clock goes on by a second from look to look, and a tenth of the minutes counts.
        (None, 12),
        pytest.param(10.0, 12, marks=pytest.mark.long),
        (0.75, 3),
        (0.01, 1),
    ],
)
def test_as_many_prompts_are_measured_as_there_is_time_for(
    minutes: float | None,
    prompts: int,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = TrainConfig(
        family="eagle3", target="t", data=("d",), out=str(tmp_path), minutes=minutes,
        batch_size=12, eval_tokens=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    texts = [
        TokenSequence(f"t{number}", ids, torch.arange(9) > 4)
        for number, ids in enumerate(torch.randint(3, 288, (12, 9), generator=generator))
    ]
    ticks = itertools.count()
    held_out = HeldOut(config, target, texts, lambda: float(next(ticks)))
    drafter = Eagle3.create(Eagle3Options(), target, seed=0).eval()
    expected_s = held_out.expected_s(drafter)
    assert expected_s == pytest.approx(0.0 if minutes is None else min(12.0, minutes * 6))
    figures = held_out(drafter, 1)
    assert figures is not None and figures.prompts == prompts
    shown = capsys.readouterr().err
    assert "evaluate: " in shown and " answers" in shown
    told = f"only {prompts} of 12 prompts: it may take a tenth of --minutes"
    assert (told in shown) == (prompts < 12)
    # Later evaluations are of the same prompts, so that drafts can be compared.
    again = held_out(drafter, 2)
    assert again is not None and again.prompts == prompts and again.tau == figures.tau
