"""A draft LM with another tokenizer than its target's: it reads the text token by token in its own
ids and drafts tokens of both vocabularies.

The draft's distribution is taken over the tokens both have (token-level intersection, Timor et al.,
arXiv 2502.05202), and reported as such: q is what was sampled, so speculation is as lossless as
with any other draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from draftsmith.drafters.autoregressive.state import HeadStep
from draftsmith.drafters.interface import UnrollBatch, UnrolledStep
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.target.load import load_model, load_tokenizer
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import SharedTokens, shared_tokens
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass


class ForeignLm(DraftLm):
    """Served, and judged by `doctor`; what it is trained for is its own vocabulary."""

    def __init__(
        self, model: PreTrainedModel, name: str, shared: SharedTokens, max_length: int | None = None
    ):
        super().__init__(model, name, max_length)
        self.vocab_size = len(shared.to_draft)
        for key, ids in shared._asdict().items():
            # Worked out from the tokenizers, no part of a checkpoint.
            self.register_buffer(key, ids, persistent=False)
        self.to(model.device)

    @property
    def vocab_map(self) -> torch.Tensor:  # type: ignore[override]
        return self.target_ids

    @classmethod
    def load(cls, folder: Path, target: Target) -> ForeignLm:
        read_weights(folder)  # for what it refuses
        trust = target.trust_remote_code
        model = load_model(folder, trust_remote_code=trust, device=target.device)
        size = model.get_output_embeddings().weight.shape[0]
        own = load_tokenizer(folder, trust_remote_code=trust)
        shared = shared_tokens(
            own, target.tokenizer(), draft_size=size, target_size=target.vocab_size
        )
        if len(shared.target_ids) == 0:
            raise UserError(
                f"draft {str(folder)!r} shares no token with {target.name!r}; use another draft"
            )
        return cls(model, str(folder), shared, target.max_length)

    def head_weight(self) -> torch.Tensor:
        return super().head_weight()[self.draft_ids]

    def unroll(self, batch: UnrollBatch) -> Iterator[UnrolledStep]:
        return super().unroll(replace(batch, input_ids=self.to_draft[batch.input_ids]))

    def read_committed(
        self, tokens: torch.Tensor, taps: torch.Tensor | None, context: PagedPass
    ) -> HeadStep:
        return super().read_committed(self.to_draft[tokens], taps, context)

    def draft_logits(self, head_input: torch.Tensor) -> torch.Tensor:
        return super().draft_logits(head_input)[..., self.draft_ids]
