"""What a run reports while it goes, and when it stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from draftsmith.errors import UserError
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.optim import Clock
from draftsmith.train.reporting import Reporter


@pytest.mark.parametrize("value, is_lost", [(1.0, False), (float("nan"), True)])
def test_an_evaluation_that_passes_the_time_saves_no_lost_weights(
    value: float, is_lost: bool, tmp_path: Path
) -> None:
    clock = Clock(total_steps=10, budget_s=1.0)
    clock.elapsed_s = 2.0
    reporter = Reporter(RunFolder(tmp_path / "out"), clock, steps_per_epoch=1.0, label=None)
    model, control = torch.nn.Linear(2, 2), TrainerControl()
    torch.nn.init.constant_(model.weight, value)
    told = (SimpleNamespace(world_size=1), TrainerState(global_step=3), control)
    if is_lost:
        with pytest.raises(UserError, match="training diverged by step 3"):
            reporter.on_evaluate(*told, model=model)
    else:
        reporter.on_evaluate(*told, model=model)
    assert control.should_save is not is_lost
