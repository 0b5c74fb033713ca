"""What was drawn with a request's own seed must not teach the draft that answers it again
(invariant 2, and invariant 6).

Seeded answers are recorded, a draft learns them, and the same requests are sent again: their second
tokens have another distribution than the target's. So the recorder leaves such requests out; the
tests below bypass that for their control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.traffic import OpenRequests
from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.kernels.statistics import chi_square_survival
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Uncached

ALLOWED = (40, 41, 42, 43)
# one of the four is likely and one rare, whatever the tiny target thinks
BIAS = (2.7, 1.8, 1.0, 0.0)
PARAMS = SamplingParams(
    temperature=1.0,
    max_tokens=4,
    allowed_token_ids=ALLOWED,
    logit_bias=tuple(zip(ALLOWED, BIAS)),
    ignore_eos=True,
)
PROMPT_TOKENS = 6
FALSE_ALARM = 1e-6
NUM_REQUESTS = 1600
Learn = Callable[[EngineCore, Sequence[list[int]]], None]


def prompts(count: int) -> list[list[int]]:
    return torch.randint(
        50, 288, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1)
    ).tolist()


def engine_of(
    target: Target, drafter: ServingDrafter, folder: Path
) -> tuple[EngineCore, BufferWriter]:
    writer = BufferWriter(str(folder), flush_s=60.0, queue_records=10**6)
    config = EngineConfig(
        k=3, max_batch=64, max_length=32, max_round_tokens=2048, max_queue=10**4, seed=1
    )
    return build_engine(target, drafter, config, sink=writer), writer


def answers(engine: EngineCore, count: int, *, seeded: bool) -> list[list[int]]:
    requests = [
        engine.submit(
            prompt,
            replace(PARAMS, seed=seed) if seeded else PARAMS,
            options=RequestOptions(text=False),
        )
        for seed, prompt in enumerate(prompts(count))
    ]
    while engine.busy:
        engine.step()
    return [request.tokens for request in requests]


def recorded(writer: BufferWriter, folder: Path) -> list[list[int]]:
    """Texts as a learner gets them."""
    writer.close()
    texts = OpenRequests(BufferReader(str(folder)).read(max_records=10**9).records)
    return [text.tokens for text in texts.take(idle_s=0.0)]


def second_token_fits(target: Target, texts: Sequence[list[int]]) -> float:
    """p-value of the second tokens, counted by their rank in the exact conditional distribution of
    each request."""
    known = torch.tensor([text[: PROMPT_TOKENS + 1] for text in texts])
    with torch.no_grad():
        _, hidden = target.states(known, torch.ones_like(known), ())
        logits = target.head(hidden[:, -1]).double()[:, list(ALLOWED)] + torch.tensor(BIAS)
        probs = torch.softmax(logits, -1)  # [N, 4]
    ranks = probs.argsort(descending=True).argsort()
    drawn = torch.tensor([ALLOWED.index(text[PROMPT_TOKENS + 1]) for text in texts])
    counts = torch.bincount(ranks.gather(1, drawn[:, None])[:, 0], minlength=4).double()
    probs = probs.sort(descending=True).values
    # Sums of unlike multinomials: one cell is left out, since the four add up to N.
    off = (counts - probs.sum(0))[:3]
    covariance = (torch.diag(probs.sum(0)) - probs.T @ probs)[:3, :3]
    return chi_square_survival(float(off @ torch.linalg.solve(covariance, off)), 3)


class ByHeart(Uncached):
    """A table of what followed each text: what cross-entropy comes to where nothing has to be
    generalised."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.next: dict[tuple[int, ...], int] = {}

    def learn(self, texts: Sequence[list[int]]) -> None:
        for text in texts:
            self.next |= {tuple(text[:end]): text[end] for end in range(PROMPT_TOKENS, len(text))}

    def propose(self, inputs: DraftInputs) -> Proposal:
        depth, positions = int(inputs.num_draft.max()), inputs.starts + inputs.lengths
        histories = [list(history) for history in inputs.histories]
        distributions = []
        for step in range(depth):
            q = torch.full((len(histories), self.vocab_size), -torch.inf)
            q[:, list(ALLOWED)] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
            for row, history in enumerate(histories):
                if (known := self.next.get(tuple(history))) is not None:
                    q[row, known] = 6.0
            distributions.append(process(q, inputs.sampling))
            drawn = sample(
                distributions[-1], inputs.seeds, positions + step, Purpose.DRAFT
            ).tolist()
            for history, token in zip(histories, drawn, strict=True):
                history.append(token)
        tokens = torch.tensor([history[len(history) - depth :] for history in histories])
        return Proposal(
            tokens=tokens, lengths=inputs.num_draft, logits=torch.stack(distributions, dim=1)
        )


def passes(
    target: Target, drafter: ServingDrafter, learn: Learn, folder: Path, count: int, *, seeded: bool
) -> tuple[float, float, int]:
    """p-values of two passes of the same requests, between which the draft learns what was
    recorded; and how much was."""
    engine, writer = engine_of(target, drafter, folder)
    first = answers(engine, count, seeded=seeded)
    texts = recorded(writer, folder)
    learn(engine, texts)
    engine.recorder.sink = None
    second = answers(engine, count, seeded=seeded)
    assert engine.stats.num_accepted_tokens > count
    return second_token_fits(target, first), second_token_fits(target, second), len(texts)


def passes_by_heart(target: Target, folder: Path, *, seeded: bool) -> tuple[float, float, int]:
    drafter = ByHeart(target.vocab_size)
    return passes(
        target, drafter, lambda _, texts: drafter.learn(texts), folder, NUM_REQUESTS, seeded=seeded
    )


@pytest.mark.long
def test_answers_asked_for_again_have_the_targets_distribution(
    target: Target, tmp_path: Path
) -> None:
    """With seeds nothing is learned; without, everything is, and the draws are others."""
    for seeded in (True, False):
        first, second, num_learned = passes_by_heart(target, tmp_path / str(seeded), seeded=seeded)
        assert min(first, second) > FALSE_ALARM and num_learned == (0 if seeded else NUM_REQUESTS)


def test_learning_seeded_answers_would_bias_them(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the exclusion bypassed."""
    monkeypatch.setattr(Request, "repeatable", False)
    first, second, num_learned = passes_by_heart(target, tmp_path, seeded=True)
    assert first > FALSE_ALARM > second and num_learned == NUM_REQUESTS
