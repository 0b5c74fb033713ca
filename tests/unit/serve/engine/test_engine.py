from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.products.row_steps import row_steps
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.sampling.params import SamplingParams
from tests.round_calls import calls
from tests.stand_in_drafts import Knowing, Uncached

PROMPT = [5, 60, 7, 200, 9, 33]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Broken(Uncached):
    """Fails in one way; `failure` names it."""

    def __init__(self, failure: str, vocab_size: int):
        self.failure, self.vocab_size = failure, vocab_size

    def propose(self, inputs: DraftInputs) -> Proposal:
        size, depth = len(inputs.num_draft), int(inputs.num_draft.max())
        tokens, lengths, logits = (
            torch.zeros(size, depth, dtype=torch.int64),
            inputs.num_draft,
            None,
        )
        if self.failure == "raises":
            raise RuntimeError("the draft is broken")
        if self.failure == "nan":
            logits = torch.full((size, depth, self.vocab_size), torch.nan)
        elif self.failure == "no mass":
            logits = torch.full((size, depth, self.vocab_size), -torch.inf)
        elif self.failure == "outside":
            tokens = tokens + self.vocab_size
        elif self.failure == "too long":
            lengths = lengths + 1
        return Proposal(tokens=tokens, lengths=lengths, logits=logits)


@pytest.mark.parametrize("failure, cause", [
    ("raises", "raised"), ("nan", "nan"), ("no mass", "nan"), ("outside", "invalid"),
    ("too long", "invalid"),
])  # fmt: skip
def test_a_broken_drafter_costs_nothing_but_speed(
    failure: str, cause: str, target: Target, greedy_text: Callable[[list[int], int], list[int]]
) -> None:
    engine = build_engine(target, Broken(failure, target.vocab_size), EngineConfig(k=3))
    completions = engine.generate([PROMPT, PROMPT[:3]], GREEDY)
    assert completions[0].tokens == greedy_text(PROMPT, 12)
    assert completions[1].tokens == greedy_text(PROMPT[:3], 12)
    assert engine.stats.fallbacks[cause] >= 2
    # It is left alone for longer and longer, instead of failing every round.
    assert engine.stats.fallbacks[cause] < engine.stats.num_rounds - 2


def test_without_speculation_no_drafter_code_runs(target: Target, fixed_drafter: Callable) -> None:
    drafter = fixed_drafter()
    engine = build_engine(target, drafter, EngineConfig(k=3))
    engine.generate([PROMPT], SamplingParams(max_tokens=8, k=0, ignore_eos=True))
    assert drafter.calls == 0
    engine.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    assert drafter.calls > 0


def test_a_request_may_choose_its_own_draft_length(target: Target, fixed_drafter: Callable) -> None:
    engine = build_engine(target, fixed_drafter(), EngineConfig(k=3, max_batch=8))
    params = [SamplingParams(max_tokens=20, ignore_eos=True, k=k, seed=1) for k in (0, 1, 5, None)]
    requests = [engine.submit(PROMPT, p) for p in params]
    while engine.busy:
        engine.step()
    deepest = [max(request.speculation.offered, default=0) for request in requests]
    assert deepest == [0, 1, 5, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_without_drafts_calls_few_functions(temperature: float, target: Target) -> None:
    """A third of a small model's round is Python."""
    if row_steps(torch.float32) is None:
        pytest.skip("there is no C++ compiler, so a pass is many calls")
    engine = build_engine(target, None, EngineConfig())
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
    assert calls(engine, [PROMPT], params) <= 240


def test_unseeded_requests_differ(target: Target) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    texts = build_engine(target, None, EngineConfig()).generate([PROMPT] * 4, params)
    assert len({tuple(text.tokens) for text in texts}) == 4


def ends(text: list[int], words: list[str], at: int, kind: str) -> bool:
    """True where the text can end by what it holds there and not before."""
    if kind != "stop string":
        return text[at] not in text[:at]
    word = words[at]
    return word.isascii() and bool(word.strip()) and word not in "".join(words[:at])


@pytest.mark.parametrize("kind", ["stop token", "end of sequence", "stop string"])
def test_an_end_inside_accepted_drafts_ends_the_answer(
    kind: str, target: Target, greedy_text: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything after the end is dropped, though the target had accepted it."""
    text = greedy_text(PROMPT, 12)
    words = [target.tokenizer().decode([token]) for token in text]
    begin = 2 if kind == "stop string" else 3
    at = next(at for at in range(begin, 8) if ends(text, words, at, kind))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=kind != "end of sequence",
        stop_token_ids=(text[at],) if kind == "stop token" else (),
        stop=(words[at],) if kind == "stop string" else (),
    )
    if kind == "end of sequence":
        monkeypatch.setattr(target, "eos_token_ids", (text[at],))
    engine = build_engine(target, Knowing(PROMPT + text), EngineConfig(k=8))
    (completion,) = engine.generate([PROMPT], params)
    assert completion.tokens == text[: at + 1] and completion.finish_reason is FinishReason.STOP
    assert kind != "stop string" or words[at] not in completion.text
    assert engine.stats.acceptance.accepted[at] == 1, "the token behind the end was accepted too"
    # The request tells what became of its drafts as the engine does: of what was kept, not of what
    # would have been.
    kept = engine.stats.num_accepted_tokens
    assert sum(completion.speculation.accepted) == kept <= len(completion.tokens)
    assert sum(engine.stats.acceptance.accepted) > kept
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_usable


def test_logprobs_are_the_targets_own(target: Target, greedy_text: Callable) -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, max_tokens=6, logprobs=2, seed=3, ignore_eos=True
    )
    for drafter in (None, Knowing(PROMPT + greedy_text(PROMPT, 6))):
        completion = build_engine(target, drafter, EngineConfig(k=3)).generate([PROMPT], params)[0]
        tokens = torch.tensor([PROMPT + completion.tokens])
        _, hidden = target.states(tokens, torch.ones_like(tokens), ())
        logprobs = torch.log_softmax(target.head(hidden[0, len(PROMPT) - 1 : -1]).float(), -1)
        assert [entry.token for entry in completion.logprobs] == completion.tokens
        for row, entry in zip(logprobs, completion.logprobs):
            assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
            assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("prompt, params, words", [
    ([], {}, "empty"),
    ([288], {}, "outside 0..287"),
    ([-1], {}, "outside"),
    ([5] * 256, {}, "256 tokens"),
    ([5] * 250, {"max_tokens": 7}, "leave 6"),
    ([5], {"k": 2}, "no drafter"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused(
    prompt: list[int], params: dict, words: str, target: Target
) -> None:
    with pytest.raises(UserError, match=words):
        build_engine(target, None, EngineConfig()).submit(prompt, SamplingParams(**params))


@pytest.mark.parametrize("params", [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": 1e-9}, {"top_p": 0.0},
    {"top_p": 1.1}, {"min_p": -0.1},
    {"top_k": -1}, {"max_tokens": 0}, {"logprobs": 21}, {"k": -1}, {"stop": ("",)},
])  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused(params: dict) -> None:
    with pytest.raises(UserError):
        SamplingParams(**params)


@pytest.mark.parametrize("config", [
    {"max_batch": 0}, {"k": -1}, {"max_length": 1}, {"max_length": 257}, {"num_blocks": 1},
    {"memory_gib": 1e-9},
])  # fmt: skip
def test_engine_sizes_that_cannot_work_are_refused(config: dict, target: Target) -> None:
    with pytest.raises(ValueError):
        build_engine(target, None, EngineConfig(**config))


def test_sampling_without_drafts_uses_the_streams_of_batched_answers(target: Target) -> None:
    """Same seed, same draws: the engine and `Target.answer` decide a position with the same
    random stream."""
    params = SamplingParams(temperature=1.0, top_k=20, max_tokens=12, seed=77, ignore_eos=True)
    served = build_engine(target, None, EngineConfig()).generate([PROMPT], params)[0].tokens
    assert (
        served
        == target.answer(
            [PROMPT], max_new_tokens=12, temperature=1.0, top_k=20, seeds=[77], ignore_eos=True
        )[0]
    )
