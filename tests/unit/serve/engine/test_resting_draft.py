"""A draft that fails rests, text drafts in front of one, k of a running request is changed."""

from __future__ import annotations

from collections.abc import Callable

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.drafters.text.text_first import TextFirst
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.stats import TEXT

PROMPT = [5, 60, 7, 200, 9, 33]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
CONFIG = EngineConfig(k=3, compile="off")


class Failing:
    """An EAGLE head that fails in its first rounds."""

    def __init__(self, drafter: Eagle3, failures: int):
        self.drafter, self.failures = drafter, failures
        self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
        self.cached_after = drafter.cached_after
        self.starts: list[int] = []

    def propose(self, inputs: DraftInputs) -> Proposal:
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("not yet")
        self.starts += inputs.starts.tolist()
        return self.drafter.propose(inputs)


def test_nobody_drafts_while_the_draft_rests(
    target: Target, head: Eagle3, greedy_text: Callable, records: list[RoundRecord]
) -> None:
    drafter, answer = Failing(head, 4), greedy_text(PROMPT, 60)
    engine = build_engine(target, drafter, CONFIG, sink=records, draft_version="7")
    (completion,) = engine.generate([PROMPT], GREEDY)
    assert completion.tokens == answer
    # 1 + 3 + 7 rounds of rest between the failures; the head then reads everything from the
    # beginning.
    assert engine.stats.fallbacks["raised"] == 4 and drafter.starts[0] == 0
    assert len(records[0].context) == len(PROMPT) + 1 + 4 + 11, "a token in each of these rounds"
    drafted = len([record for record in records if record.drafted])
    assert drafted == engine.stats.by_version["7"].rounds == engine.stats.num_drafts > 0
    told = [token for record in records for token in record.context + record.committed]
    assert told == PROMPT + answer


def test_what_text_drafts_in_front_of_a_draft_is_not_the_drafts(
    target: Target, head: Eagle3, records: list[RoundRecord]
) -> None:
    drafter = TextFirst(head, Suffix())
    engine = build_engine(target, drafter, CONFIG, sink=records, draft_version="7")
    engine.generate([[7, 8, 9] * 5], GREEDY)
    own, text = engine.stats.by_version["7"], engine.stats.by_version[TEXT]
    assert own.rounds > 0 < text.rounds and own.rounds + text.rounds == engine.stats.num_drafts
    assert sum(text.accepted) > 0
    assert len([record for record in records if record.drafted]) == own.rounds


def test_a_request_stops_drafting_and_starts_again(
    target: Target, head: Eagle3, greedy_text: Callable
) -> None:
    drafter = Failing(head, 0)
    engine = build_engine(target, drafter, CONFIG)
    request = engine.submit(PROMPT, GREEDY)
    calls = []
    for k in (3, 0, 2):
        engine.set_k(request, k)
        before = len(drafter.starts)
        for _ in range(8):
            engine.step()
        calls.append(len(drafter.starts) - before)
    while engine.busy:
        engine.step()
    assert calls[0] > 0 == calls[1] < calls[2]
    assert request.output == greedy_text(PROMPT, 60)
    assert request.speculation.offered[0] == 3 and set(request.speculation.offered[calls[0] :]) <= {
        1,
        2,
    }
    assert not engine.stats.fallbacks
