"""A request's own transformers `LogitsProcessor`s: which can be honoured, and how they are called.

Demanded is a pure function of (input_ids [1, n], scores [1, V]). It is called once for every
position of every round, in drafting and in verifying, on texts that grow by drafted tokens and
shrink again when those fall; what it returns for a text must not depend on what it was called with
before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import sent_tensor
from draftsmith.serve.sampling.params import LogitsProcessor
from draftsmith.serve.sampling.state import RowContext, SamplingState


def check_processors(
    processors: Sequence[LogitsProcessor],
    prompt: Sequence[int],
    *,
    vocab_size: int,
    device: torch.device,
) -> None:
    """Calls each on a text, a longer one and the first again; a `UserError` for one that raises or
    answers otherwise then."""
    scores = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    text = torch.tensor([list(prompt)], device=device)
    longer = torch.cat([text, text[:, -1:]], dim=1)
    for processor in processors:
        name = type(processor).__name__
        try:
            first, _, again = (
                processor(ids.clone(), scores.clone()) for ids in (text, longer, text)
            )
        except Exception as error:
            # Code of a caller: whatever it raises, the request cannot be honoured.
            raise UserError(
                f"logits processor {name} raised {type(error).__name__}: {error}; mend or leave "
                "it out"
            ) from error
        if not isinstance(first, torch.Tensor) or first.shape != scores.shape:
            raise UserError(
                f"logits processor {name} must return scores of shape {list(scores.shape)} for "
                "input_ids of one row"
            )
        if not torch.equal(first.nan_to_num(), again.nan_to_num()):
            raise UserError(
                f"logits processor {name} gave two answers to one text; speculation needs a pure "
                "function of input_ids and scores"
            )


def run_processors(logits: torch.Tensor, contexts: Sequence[RowContext]) -> bool:
    """Row by row in place, with the exact text before each; False when there are none.

    A row whose processor raises is left without any token. Behind drafted tokens that says nothing
    about the rows before it.
    """
    own = [context for context in contexts if context.state.params.logits_processors]
    for context in own:
        scores = torch.full_like(logits[context.row], -math.inf)
        with context.state.owning("a logits processor", context.prefix):
            scores = _processed(logits[context.row], context.state, context.prefix)
        logits[context.row] = scores
    return bool(own)


def _processed(scores: torch.Tensor, state: SamplingState, prefix: Sequence[int]) -> torch.Tensor:
    input_ids = sent_tensor(scores.device, torch.tensor([[*state.tokens, *prefix]]))
    processed = scores[None].clone()
    for processor in state.params.logits_processors:
        processed = processor(input_ids, processed)
    return processed[0].to(scores.dtype)
