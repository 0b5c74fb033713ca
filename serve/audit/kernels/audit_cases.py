"""What the kernel audit tests: every law, drafted and verified in every way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from draftsmith.kernels.verify.block import verify_block
from draftsmith.serve.audit.kernels.process import Chains, Procedure, Trees
from draftsmith.serve.audit.kernels.world import Law
from draftsmith.serve.requests.request import SamplingParams

PENALTIES = SamplingParams(frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.3, logit_bias=((1, 0.5),))
PLAIN = Law(name="temperature 1")
PENALISED = Law(name="penalties and a bias", penalties=PENALTIES)
UNFILTERED_DRAFT = Law(name="top-k 3, draft without filters", top_k=3, draft_filtered=False)
LAWS = (
    PLAIN,
    Law(name="temperature 0.7, top-k 3", temperature=0.7, top_k=3),
    Law(name="top-p 0.8", top_p=0.8),
    Law(name="temperature 1.3, min-p 0.1", temperature=1.3, min_p=0.1),
    UNFILTERED_DRAFT,
    PENALISED,
    Law(name="draft at temperature 0.5", draft_temperature=0.5),
    Law(name="greedy draft, one-hot law told", draft_temperature=0.0),
    Law(name="deterministic draft, no law told", deterministic=True),
)
FEW_LAWS = (PLAIN, UNFILTERED_DRAFT, PENALISED)


def end_by_guess(lengths: torch.Tensor, drafts: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """Rounds end where a guess of survival falls low, made of what is known before each draft is drawn: the largest chance in its
    law, known by the drafts before it. (The same of the drafted token's own chance is a negative control.)"""
    guesses = q_logits.softmax(dim=-1).amax(dim=-1)  # [B, K]
    return torch.minimum(lengths, (guesses.cumprod(dim=1) > 0.2).long().sum(dim=1))


BLOCKS = Chains(verify=verify_block)
PROCEDURES: dict[str, Procedure] = {
    "chain": Chains(),
    "block": BLOCKS,
    "tree": Trees(),
    "chain, ended by a guess": Chains(truncate=end_by_guess),
    "block, ended by a guess": replace(BLOCKS, truncate=end_by_guess),
}


@dataclass(frozen=True)
class Case:
    way: str
    law: Law
    procedure: Procedure


def cases() -> list[Case]:
    """Every law drafted and verified in every way; a block without laws is a chain and is not repeated. What ends a round knows
    nothing of filters and temperatures, so a few laws do for it."""
    ways = [(way, law, run) for way, run in PROCEDURES.items() for law in (FEW_LAWS if "ended" in way else LAWS)]
    return [Case(*way) for way in ways if not (way[0] == "block" and way[1].deterministic)]
