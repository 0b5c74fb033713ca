"""A learnable draft of a few parameters, and a server of a few lines that records its rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from draftsmith.distill.buffer.traffic import OpenRequests, ServedText
from draftsmith.distill.config import LearnConfig, LearnUnroll
from draftsmith.distill.learn.learner import Learner
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows, process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.kernels.verify.chain import verify_chain
from draftsmith.record import RoundRecord
from tests.round_records import of_logits


class Bigram(torch.nn.Module):
    """q depends on the last token alone; an eagle-like interface with a language model's single
    step."""

    family = "bigram"
    taps: tuple[int, ...] = ()
    vocab_map = None

    def __init__(self, vocab_size: int, width: int = 48, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.states = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Parameter(torch.randn(vocab_size, width) * 0.1)

    def head_weight(self) -> torch.Tensor:
        return self.head

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        yield UnrolledStep(
            hidden=self.states(batch.input_ids), valid=batch.attention_mask.bool(), offset=1
        )

    def logits(self, token: int) -> torch.Tensor:
        return (self.head @ self.states.weight[token]).detach()


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the requests of `serve` have in common."""

    depth: int = 3
    max_tokens: int = 24
    temperature: float = 1.0
    top_k: int = 0
    version: str = "1"
    prefix: str = "r"


def serve(
    target: Target, drafter: Bigram, prompts: list[list[int]], traffic: Traffic
) -> list[RoundRecord]:
    records = []
    for number, prompt in enumerate(prompts):
        records += serve_one(target, drafter, prompt, f"{traffic.prefix}{number}", traffic)
    return records


@torch.no_grad()
def serve_one(
    target: Target, drafter: Bigram, prompt: list[int], request: str, traffic: Traffic
) -> list[RoundRecord]:
    tokens, recorded, records = list(prompt), 0, []
    seed = int.from_bytes(request.encode()[-6:], "big")
    rows = SamplingRows.of([traffic.temperature], top_k=[traffic.top_k])
    while len(tokens) < len(prompt) + traffic.max_tokens:
        position, drafted, q_rows = len(tokens), [], []
        for _ in range(traffic.depth):
            logits = process(drafter.logits((tokens + drafted)[-1])[None], rows)
            at = torch.tensor([position + len(drafted)])
            drafted.append(int(sample(logits, torch.tensor([seed]), at, Purpose.DRAFT)))
            q_rows.append(logits[0])
        raw = target.model(torch.tensor([tokens + drafted])).logits[0, position - 1 :].float()
        p_rows = process(
            raw, SamplingRows.of([traffic.temperature] * len(raw), top_k=[traffic.top_k] * len(raw))
        )
        verdict = verify_chain(
            p_rows, torch.tensor([drafted]), torch.tensor([len(drafted)]),
            torch.stack(q_rows)[None], torch.tensor([seed]),
            torch.tensor([position]),
        )  # fmt: skip
        accepted = int(verdict.accepted)
        committed = verdict.tokens[0, : accepted + 1].tolist()
        records.append(
            RoundRecord(
                request=request, round=len(records), request_class="", target=target.name,
                target_revision=target.revision,
                draft_version=traffic.version, time_s=float(len(records)),
                temperature=traffic.temperature, top_k=traffic.top_k,
                top_p=1.0, min_p=0.0, position=position, context=tokens[recorded:], drafted=drafted,
                accepted=accepted,
                committed=committed, emitted=committed[-1], p=of_logits(raw[: len(drafted)]),
                q=of_logits(torch.stack(q_rows)),
            )
        )  # fmt: skip
        tokens += committed
        recorded = len(tokens)
    return records


def make_prompts(
    count: int, *, seed: int = 0, length: int = 6, low: int = 3, high: int = 288
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count, length), generator=generator).tolist()


@pytest.fixture(scope="session")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("llama"))


@pytest.fixture(scope="session")
def bigram() -> Callable[..., Bigram]:
    return Bigram


@pytest.fixture(scope="session")
def texts_by() -> Callable[..., list[ServedText]]:
    """`texts_by(target, drafter, count, ...)`: what a lossless server wrote; options are those of
    `Traffic`."""
    return lambda target, drafter, count, **options: stitched(
        serve(target, drafter, make_prompts(count), Traffic(**options))
    )


@pytest.fixture(scope="session")
def served_texts(target: Target) -> Callable[[int], list[ServedText]]:
    """`served_texts(count)`: texts of a new `Bigram`, at most 24, each served once a session."""

    @functools.cache
    def records(number: int) -> list[RoundRecord]:
        prompt = make_prompts(24)[number]
        return serve_one(target, Bigram(target.vocab_size), prompt, f"r{number}", Traffic())

    return lambda count: stitched([one for number in range(count) for one in records(number)])


@pytest.fixture
def new_learner(target: Target) -> Callable[..., Learner]:
    """`new_learner(lr=2e-2, ...)`: a learner of a `Bigram`, one step of the unroll at a time."""

    def make(drafter: Bigram | None = None, **changes: Any) -> Learner:
        config = LearnConfig(**{"unroll": LearnUnroll(steps=1)} | changes)
        return Learner(drafter or Bigram(target.vocab_size), target, config, seed=0)

    return make


def stitched(records: list[RoundRecord]) -> list[ServedText]:
    """The texts of records, in the order of their first ones."""
    return OpenRequests(records).take(idle_s=0.0)
