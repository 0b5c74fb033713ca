"""The pipeline equals transformers' own processors, row by row, with the drafted tokens before each
row."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from draftsmith.errors import UserError
from draftsmith.serve.sampling.adjustments import Adjustments, check_processors
from draftsmith.serve.sampling.params import SamplingParams, check_vocabulary
from draftsmith.serve.sampling.state import SamplingState
from draftsmith.serve.sampling.tables import AdjustmentTables
from tests.adjusting import apply, chain_prefixes

VOCAB = 12
EOS = (0,)
CPU = torch.device("cpu")
NO_REPEATED_PAIR = NoRepeatNGramLogitsProcessor(2)

tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=7)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    biases = draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.7, 0.3, 100.0]), max_size=3))
    words = draw(
        st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4, unique=True)
    )
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -0.4, 1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.6, -1.9])),
        logit_bias=tuple(biases.items()),
        bad_words=tuple(word for word in words if word not in [(token,) for token in EOS]),
        allowed_token_ids=draw(st.none() | st.lists(tokens, min_size=1, unique=True).map(tuple)),
        min_tokens=draw(st.integers(0, 6)),
        stop_token_ids=tuple(draw(st.lists(st.integers(1, 2), max_size=1))),
        logits_processors=draw(st.sampled_from([(), (NO_REPEATED_PAIR,)])),
    )


def state_of(asked: SamplingParams, num_prompt: int, device: torch.device = CPU) -> SamplingState:
    return SamplingState(
        asked, num_prompt=num_prompt, vocab_size=VOCAB, eos_token_ids=EOS, device=device
    )


def batch(*requests: tuple[SamplingParams, list[int], list[int]]) -> Adjustments | None:
    """Each (params, prompt, output)."""
    made = [
        SimpleNamespace(
            tokens=prompt + output,
            sampling_state=state_of(asked, len(prompt)) if asked.adjusts else None,
        )
        for asked, prompt, output in requests
    ]
    return Adjustments.of([one.sampling_state for one in made], [one.tokens for one in made])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(params(), st.lists(tokens, min_size=1, max_size=6), texts, texts),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_every_row_equals_transformers_processors_with_its_drafted_tokens(
    adjusted: Callable[..., torch.Tensor], rows: list, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    adjust = batch(*[(asked, prompt, output) for asked, prompt, output, _ in rows])
    owners, prefixes = chain_prefixes(*[chain for *_, chain in rows])
    logits = 3 * torch.randn(
        len(owners), VOCAB, dtype=dtype, generator=torch.Generator().manual_seed(len(owners))
    )
    raw = logits.clone()
    found = raw if adjust is None else apply(adjust, logits, owners, prefixes)
    assert torch.equal(raw, logits)
    for row, (owner, prefix) in enumerate(zip(owners, prefixes)):
        asked, prompt, output, _ = rows[owner]
        if not set(prefix).isdisjoint([*EOS, *asked.stop_token_ids]):
            continue
        expected = adjusted(asked, prompt + output + prefix, len(prompt), EOS, raw[row])
        # A float32 bias is what transformers adds, to whichever type.
        torch.testing.assert_close(
            found[row], expected, rtol=0, atol=0 if dtype == torch.float32 else 1e-6
        )


def test_counts_follow_the_text_as_it_grows(adjusted: Callable[..., torch.Tensor]) -> None:
    asked = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    request = SimpleNamespace(tokens=[3, 4], sampling_state=state_of(asked, 2))
    raw = torch.linspace(-1, 1, VOCAB)
    for fresh in ([], [5, 5], [6], [5, 3]):
        request.tokens += fresh
        adjust = Adjustments.of([request.sampling_state], [request.tokens])
        for prefix in ([], [7, 5]):
            found = adjust(raw[None], torch.tensor([0]), torch.tensor([prefix]).long())[0]
            expected = adjusted(asked, request.tokens + prefix, 2, EOS, raw)
            assert torch.equal(found, expected)


def test_rows_that_the_host_has_not_are_penalised_alike(
    adjusted: Callable[..., torch.Tensor],
) -> None:
    """As drafting on a device has them; a text that is shorter, whose padding is drafted, and one
    without a penalty."""
    asked = SamplingParams(
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        presence_penalty=0.3,
        logit_bias=((0, 0.4), (9, -1.5)),
    )
    requests = [
        (asked, [4, 2, 3, 1], [6, 1]), (SamplingParams(min_tokens=1), [1], [7]), (asked, [3], [7])
    ]  # fmt: skip
    adjust = batch(*requests)
    assert adjust is not None
    owners = [0, 1, 2, 2, 0]
    rows, logits = torch.tensor(owners), torch.randn(5, VOCAB)
    drafted = torch.tensor([[7, 3, 7], [7, 7, 1], [0, 7, -1], [-1, -1, -1], [9, 6, -1]])
    tables = AdjustmentTables.of(adjust.states, CPU)
    of_none, of_owners = logits.clone(), logits.clone()
    tables.apply(of_none, rows, drafted, None)
    tables.apply(of_owners, rows, drafted, owners)
    assert torch.equal(of_none, of_owners)
    for row, owner in enumerate(owners):
        params, prompt, output = requests[owner]
        text = prompt + output + [token for token in drafted[row].tolist() if token >= 0]
        assert torch.equal(of_none[row], adjusted(params, text, len(prompt), EOS, logits[row]))


def test_a_request_that_asks_for_nothing_has_no_adjustment_and_its_neighbour_changes_no_row_of_it() -> (
    None
):
    assert batch((SamplingParams(), [1], [2])) is None
    adjust = batch((SamplingParams(), [1], [2]), (SamplingParams(presence_penalty=2.0), [1], [2]))
    logits = torch.randn(4, VOCAB)
    found = apply(adjust, logits, [0, 0, 1, 1], [[], [3], [], [3]])
    assert torch.equal(found[:2], logits[:2])
    assert not torch.equal(found[2:], logits[2:])


def test_a_least_number_of_tokens_bans_nothing_of_a_request_without_ends() -> None:
    endless = SamplingParams(min_tokens=5, ignore_eos=True)
    ending = SamplingParams(min_tokens=5, ignore_eos=True, stop_token_ids=(9,))
    adjust = batch((endless, [1], [2]), (ending, [1], [2]))
    logits = torch.randn(2, VOCAB)
    found = apply(adjust, logits, [0, 1], [[], []])
    assert torch.equal(found[0], logits[0])
    assert (found[1] == -torch.inf).nonzero().tolist() == [[9]]


@pytest.mark.gpu
def test_rows_on_a_device_are_those_on_the_cpu() -> None:
    asked = SamplingParams(
        repetition_penalty=1.3,
        frequency_penalty=0.6,
        presence_penalty=-0.4,
        logit_bias=((3, 1.7),),
        bad_words=((4, 5), (6,)),
        allowed_token_ids=tuple(range(1, 10)),
        min_tokens=4,
        logits_processors=(NO_REPEATED_PAIR,),
    )
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    owners, prefixes = chain_prefixes([7, 4, 8])
    found = []
    for device in (CPU, torch.device("cuda")):
        adjust = Adjustments.of([state_of(asked, 2, device)], [[3, 2, 7, 4]])
        found.append(apply(adjust, logits.to(device), owners, prefixes).cpu())
    # A division on the device may round otherwise.
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "token 3 twice"),
        ({"min_tokens": 4.5}, "min_tokens is 4.5; give a whole number"),
        ({"temperature": "0.7"}, "temperature is '0.7'; give a number"),
        ({"stop": None}, "stop is None; give a list of texts"),
        ({"grammar": "x"}, "grammar is 'x'; give a .*Grammar"),
        ({"logit_bias": [5]}, r"logit_bias is \(5,\); give a list of pairs"),
        ({"bad_words": ["x"]}, r"bad_words is \('x',\); give a list"),
        ({"skip_special_tokens": 1}, "skip_special_tokens is 1; give True or False"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(wrong: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"bad_words": ((1, 99),)}, "bad_words names token 99"),
        ({"bad_words": [[0]]}, "bans the end-of-sequence token 0"),
    ],
)
def test_token_ids_are_held_against_the_vocabulary(wrong: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_vocabulary(SamplingParams(**wrong), VOCAB, EOS)


class Counting:
    """Remembers how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + self.calls


def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("processor", "told"),
    [
        (Counting(), "Counting gave two answers"),
        (failing, "raised RuntimeError: out of luck"),
        (lambda input_ids, scores: scores[:, :3], "must return scores of shape"),
    ],
)
def test_a_processor_that_is_no_pure_function_is_refused(processor: object, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_processors([processor], [1, 2], vocab_size=VOCAB, device=CPU)


def test_a_pure_processor_is_taken() -> None:
    check_processors([NO_REPEATED_PAIR], [1, 2, 1], vocab_size=VOCAB, device=CPU)


def test_a_processor_that_fails_later_ends_its_own_request_only() -> None:
    adjust = batch(
        (SamplingParams(logits_processors=(failing,)), [1], [2]),
        (SamplingParams(min_tokens=3), [1], [2]),
    )
    found = apply(adjust, torch.zeros(2, VOCAB), [0, 1], [[], []])
    assert (found[0] == -torch.inf).all()
    assert (found[1, 1:] == 0).all()
    assert "out of luck" in adjust.states[0].error


def test_a_processor_cannot_give_back_a_forbidden_token() -> None:
    asked = SamplingParams(
        allowed_token_ids=(4, 5),
        logits_processors=(lambda input_ids, scores: torch.ones_like(scores),),
    )
    found = apply(batch((asked, [1], [2])), torch.zeros(1, VOCAB), [0], [[]])
    assert torch.isfinite(found[0]).nonzero()[:, 0].tolist() == [4, 5]
