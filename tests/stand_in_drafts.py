"""Drafts that stand in for trained ones, and trained ones that have learned nothing."""

from __future__ import annotations

import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, TrainedDrafter
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.ngram import Ngram


class Uncached:
    """What a drafter is that reads no states and keeps nothing."""

    family: str = "stand-in"
    taps: tuple[int, ...] = ()

    def new_pool(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        return None

    def cached_after(self, last: int, drafted: int, accepted: int) -> int:
        return last + 1


class Knowing(Uncached):
    """Drafts the text, prompt and answer, and one token behind its end."""

    def __init__(self, text: list[int]):
        self.text = text

    def propose(self, inputs: DraftInputs) -> Proposal:
        width = int(inputs.num_draft.max())
        drafts = [(self.text + [9] * width)[len(history) :][:width] for history in inputs.histories]
        return Proposal(tokens=torch.tensor(drafts), lengths=inputs.num_draft, logits=None)


class Junk(Ngram):
    """Drafts of tokens that the target hardly ever keeps, so that rounds end in rejections."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        width = int(inputs.num_draft.max())
        rows = [
            [(7 * len(history) + place) % 96 for place in range(width)]
            for history in inputs.histories
        ]
        return Proposal(
            tokens=torch.tensor(rows).view(len(rows), width),
            lengths=inputs.num_draft.clone(),
            logits=None,
        )


class Offering(Uncached):
    """Drafts one token everywhere."""

    def __init__(self, token: int):
        self.token = token

    def propose(self, inputs: DraftInputs) -> Proposal:
        size, depth = len(inputs.num_draft), int(inputs.num_draft.max())
        tokens = torch.full((size, depth), self.token)
        return Proposal(tokens=tokens, lengths=inputs.num_draft, logits=None)


def near(target: Target, noise: float = 0.02) -> DraftLm:
    """Close to the target, so that many drafts are kept: its weights with some noise."""
    drafter = DraftLm.create(DraftLmOptions(init=target.name), target, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            own = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.add_(noise * own)
    return drafter.eval()


def unlike(target: Target, seed: int, family: str = "eagle3", **options: object) -> TrainedDrafter:
    """Unlike that of any other seed; new drafts are much alike, most repeating the target's state
    through the target's head."""
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    drafter = FAMILIES[family].create(
        OPTIONS[family](**options), target, seed=seed, token_counts=counts
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=generator),
                alpha=float(weight.float().square().mean().sqrt()),
            )
    return drafter.eval()
