"""What a run reports while it goes, and when it stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from draftsmith.errors import UserError
from draftsmith.kernels.divergence.kind import FORWARD_KL
from draftsmith.progress import close_all
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.objective.unrolled_loss import StepSums, UnrolledLoss
from draftsmith.train.optim import Clock
from draftsmith.train.reporting import MetricWindow, Reporter


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


def test_the_bar_shows_the_mean_since_the_last_line_of_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    window, clock = MetricWindow(1, FORWARD_KL), Clock(total_steps=30, budget_s=None)
    reporter = Reporter(
        RunFolder(tmp_path), clock, steps_per_epoch=1.0, label="train", window=window
    )
    state = TrainerState(max_steps=30, is_world_process_zero=True)
    told = (SimpleNamespace(world_size=1), state, TrainerControl())
    reporter.on_train_begin(*told)
    for step, loss, alpha in ((1, 8.0, 0.1), (2, 2.0, 0.3), (3, 4.0, 0.5)):
        state.global_step = step
        sums = StepSums(*(torch.tensor([value]) for value in (1.0, loss, alpha, 0.0)))
        value = torch.tensor(loss)
        window.add(UnrolledLoss(value, 1.0, sums, None), torch.ones(1, 1), value)
        reporter.on_step_end(*told)
        if step == 1:
            logs = {"loss": loss} | window.drain(lambda sums, reduction: sums)
            reporter.on_log(*told, logs=logs)
    close_all()
    assert capsys.readouterr().err.strip().endswith("loss 3.000, alpha 0.40]")
