from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from draftsmith.drafters.options import DraftOptions, Eagle3Options
from draftsmith.errors import UserError
from draftsmith.train import resolve
from draftsmith.train.config import OptimConfig, TrainConfig, UnrollConfig


def config(family: str = "eagle3", **changes: object) -> TrainConfig:
    return TrainConfig(family=family, target="t", data="d", out="o", **changes)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 25),  # one epoch of 100 batches, 2 ranks, 2 passes a step
        ({"epochs": 2.0}, 50),
        ({"steps": 7}, 7),
        ({"steps": 70, "epochs": 2.0}, 50),
        ({"steps": 7, "minutes": 1.0}, 7),
        ({"epochs": 0.0001}, 1),
    ],
)
def test_the_first_bound_that_runs_out_counts(changes, steps):
    assert resolve.total_steps(config(accumulate=2, **changes), 100, 2) == steps


@pytest.mark.parametrize(
    ("changes", "steps", "every"),
    [
        ({}, 5000, 1000),
        ({}, 900, 200),  # few in a short run
        ({"minutes": 9.0}, 10_000_000, 0),
        ({"minutes": 9.0, "eval_every": 30}, 10_000_000, 30),
        ({"eval_every": 0}, 5000, 0),
        ({"target_offload": "disk"}, 5000, 0),
    ],
)
def test_a_run_is_evaluated_a_few_times_unless_told_otherwise(changes, steps, every):
    assert resolve.eval_interval(config(**changes), steps) == every


def test_modules_deeper_than_the_unroll_are_refused():
    def steps(count: int) -> TrainConfig:
        return config("mtp", draft=DraftOptions(modules=3), unroll=UnrollConfig(steps=count))

    resolve.check(steps(3))
    with pytest.raises(UserError, match=r"draft\.modules' is 3 but 'unroll\.steps' is 2"):
        resolve.check(steps(2))


def test_time_alone_leaves_the_steps_open():
    assert resolve.total_steps(config(minutes=1.0), 100, 2) >= 10**6


def test_checkpoints_fall_on_log_lines():
    assert resolve.save_interval(config(save_every=25, log_every=10)) == 30
    assert resolve.save_interval(config(save_every=30, log_every=10)) == 30
    assert resolve.save_interval(config(save_every=1, log_every=10)) == 10


def test_options_of_the_chosen_family_and_no_other():
    assert resolve.drafter_options(config()) == Eagle3Options()
    chosen = DraftOptions(draft_vocab_size=7, train_head=False)
    wanted = Eagle3Options(draft_vocab_size=7, train_head=False)
    assert resolve.drafter_options(config(draft=chosen)) == wanted
    with pytest.raises(UserError, match=r"option 'draft\.train_head' is none of family 'mtp'"):
        resolve.drafter_options(config("mtp", draft=DraftOptions(train_head=False)))


def test_a_record_read_back_is_the_same_run_but_for_what_may_change():
    first = config(draft=DraftOptions(taps=(1, 2)), steps=5)
    recorded = json.loads(json.dumps(asdict(first)))
    assert resolve.different_from(first, recorded) is None
    assert (
        resolve.different_from(
            config(draft=DraftOptions(taps=(1, 2)), steps=9, log_every=1), recorded
        )
        is None
    )
    assert (
        resolve.different_from(config(draft=DraftOptions(taps=(1, 3)), steps=5), recorded)
        == "draft.taps: [1, 2] -> [1, 3]"
    )
    gone = resolve.different_from(config(steps=5), recorded)
    assert gone.startswith("draft.") and gone.endswith("-> None")
    assert resolve.different_from(
        config(draft=DraftOptions(taps=(1, 2)), optim=OptimConfig(lr=1.0)), recorded
    ).startswith("optim.lr")


def test_a_divergence_that_is_none_is_named_before_anything_loads():
    resolve.check(config(divergence="jsd:0.3"))
    with pytest.raises(UserError, match="did you mean 'lk-alpha'"):
        resolve.check(config(divergence="lk_alpha"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"held_out": 1.0}, "option 'held_out' is 1.0"),  # there would be no batch, ever
        ({"eval_tokens": 0}, "option 'eval_tokens' is 0"),  # would be found out after the last step
        ({"minutes": float("nan")}, "option 'minutes' is nan"),
        ({"optim": OptimConfig(lr=-1.0)}, "option 'optim.lr' is -1.0"),
        ({"unroll": UnrollConfig(steps=0)}, "option 'unroll.steps' is 0"),
    ],
)
def test_numbers_that_no_run_could_use_are_refused_before_anything_loads(changes, said):
    resolve.check(config())
    with pytest.raises(UserError, match=said):
        resolve.check(config(**changes))


def test_a_wrong_weight_of_a_folder_is_refused_before_anything_loads():
    with pytest.raises(UserError, match="gives 'd' the weight 0"):
        resolve.check(replace(config(), data=("d:0",)))
