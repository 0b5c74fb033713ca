"""A draft is tried on what the engine's recent steps had, and on fixed inputs in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.fleet.swaps.checks import DraftRefused
from draftsmith.fleet.swaps.proposer import NUM_KEPT, V2, Given, Recent, SwappedProposer
from draftsmith.fleet.swaps.staging import NUM_TOKENS, Staging, trial
from tests.unit.fleet.swaps.stand_in import VOCAB, WIDTH, tensors_of_seed

# Finite times a draft's weights of 1e20, infinite times those.
LARGE = 1e20


def step(worker: Any, states: torch.Tensor) -> torch.Tensor:
    """A call as the first runner makes it."""
    return worker.model_runner.drafter.propose(
        target_token_ids=torch.arange(len(states)) % VOCAB, target_hidden_states=states
    )


def loaded(proposer: SwappedProposer, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    staging = Staging(proposer)
    proposer.load(staging.model, iter(tensors.items()))
    return staging.model


@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_a_draft_that_explodes_on_a_recorded_row_alone_is_refused(
    worker: Any, num_tokens: int
) -> None:
    proposer = SwappedProposer(worker)
    exploding = tensors_of_seed(2)
    exploding["values.weight"] *= LARGE
    models = [loaded(proposer, tensors_of_seed(2)), loaded(proposer, exploding)]
    assert all(trial(proposer, model) for model in models)  # before any traffic
    states = torch.ones(num_tokens, WIDTH)
    states[0, 0] = LARGE
    assert step(worker, states).shape == (num_tokens,)
    assert trial(proposer, models[0])
    with pytest.raises(DraftRefused, match="not finite"):
        trial(proposer, models[1])


def test_states_in_which_the_target_is_not_finite_refuse_no_draft(worker: Any) -> None:
    proposer = SwappedProposer(worker)
    model = loaded(proposer, tensors_of_seed(2))
    fixed = trial(proposer, model)
    step(worker, torch.full((3, WIDTH), torch.nan))
    assert trial(proposer, model)
    step(worker, torch.ones(3, WIDTH))
    assert trial(proposer, model) != fixed


def put(recent: Recent) -> tuple[list[int], list[float]]:
    """Tokens, and the first of each state, where 7 and 0.5 are the fixed ones."""
    tokens = torch.full((NUM_TOKENS,), 7, dtype=torch.int32)
    states = torch.full((NUM_TOKENS, WIDTH), 0.5)
    recent.put(tokens, states, vocab_size=VOCAB)
    return tokens.tolist(), states[:, 0].tolist()


def test_a_short_step_is_kept_before_the_rest_of_a_long_one() -> None:
    recent = Recent(lambda *_: None)
    fixed = ([7] * NUM_TOKENS, [0.5] * NUM_TOKENS)
    assert put(recent) == fixed
    recent.keep(Given(torch.arange(40) % VOCAB, torch.arange(40.0)[:, None].expand(40, WIDTH)))
    recent.keep(Given(torch.tensor([12, -1, VOCAB]), torch.full((3, WIDTH), 9.0)))
    tokens, states = put(recent)
    assert recent.num_tokens == NUM_KEPT
    # Ids that the draft does not have are left out.
    assert tokens == [12, 7, 7, *range(3, NUM_KEPT), *fixed[0][NUM_KEPT:]]
    assert states == [9.0, 9.0, 9.0, *map(float, range(3, NUM_KEPT)), *fixed[1][NUM_KEPT:]]


def test_states_of_another_width_leave_the_fixed_ones() -> None:
    recent = Recent(lambda *_: None)
    recent.keep(Given(torch.tensor([3]), torch.ones(1, WIDTH + 1)))
    tokens, states = put(recent)
    assert tokens[:2] == [3, 7] and set(states) == {0.5}


def test_what_is_kept_is_a_copy() -> None:
    recent = Recent(lambda *_: None)
    given = Given(torch.tensor([3]), torch.ones(1, WIDTH))
    recent.keep(given)
    given.tokens.zero_()
    given.states.zero_()
    assert put(recent)[0][0] == 3 and put(recent)[1][0] == 1.0


def test_an_error_of_the_copy_reaches_no_step() -> None:
    def fail(*_: Any, **__: Any) -> Given | None:
        raise TypeError("another propose")

    assert Recent(fail).watched(lambda *args, **named: (args, named))(1, a=2) == ((1,), {"a": 2})


@pytest.mark.parametrize("num_layers", [0, 3])
def test_the_second_runners_call_is_read(num_layers: int) -> None:
    batch = SimpleNamespace(num_tokens=2, input_ids=torch.arange(5))
    last, taps = torch.randn(5, 4), [torch.randn(5, 4) for _ in range(num_layers)]
    found = V2.given(batch, None, None, last, taps or None, "counts", mm_inputs=None)
    assert found is not None and found.tokens.tolist() == [0, 1]
    assert torch.equal(found.states, torch.cat(taps, -1)[:2] if taps else last[:2])
    named = {"last_hidden_states": last, "aux_hidden_states": None, "dummy_run": True}
    assert V2.given(batch, attn_metadata=None, slot_mappings=None, **named) is None
