"""A small draft of each family, and of what its options change most."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from draftsmith.drafters.options import (
    DflashOptions,
    DrafterOptions,
    DraftLmOptions,
    DsparkOptions,
    Eagle1Options,
    Eagle3Options,
    MedusaOptions,
    MlpOptions,
    MtpOptions,
    PeagleOptions,
)
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from tests.noise import noisy

SmallLm = partial(DraftLmOptions, num_layers=2, hidden_size=24, num_attention_heads=2)
KINDS: dict[str, tuple[str, DrafterOptions]] = {
    "eagle3": ("eagle3", Eagle3Options()),
    "eagle3 subset": ("eagle3", Eagle3Options(draft_vocab_size=120, num_key_value_heads=4)),
    "eagle3.1": (
        "eagle3",
        Eagle3Options(norm_before_residual=True, fc_norm=True, norm_output=True),
    ),
    "p-eagle subset": ("p-eagle", PeagleOptions(num_hidden_layers=2, draft_vocab_size=200)),
    "mtp": ("mtp", MtpOptions()),
    "eagle1": ("eagle1", Eagle1Options()),
    "medusa": ("medusa", MedusaOptions(num_heads=5, num_layers=2)),
    "mlp": ("mlp", MlpOptions(num_predict=5, inner_size=40)),
    "dflash": ("dflash", DflashOptions(block_size=6)),
    "dspark": ("dspark", DsparkOptions(block_size=5, markov_rank=12)),
    "draft-lm": ("draft-lm", SmallLm()),
    "eagle3 window": ("eagle3", Eagle3Options(window=9)),
    "eagle3 narrow": ("eagle3", Eagle3Options(window=2)),  # shorter than the drafts
    "p-eagle window": ("p-eagle", PeagleOptions(num_hidden_layers=2, window=7)),
    "p-eagle narrow": ("p-eagle", PeagleOptions(num_hidden_layers=2, window=2)),
    "mtp window": ("mtp", MtpOptions(window=9)),
    "eagle1 window": ("eagle1", Eagle1Options(window=9)),
    "draft-lm window": ("draft-lm", SmallLm(window=9)),
    "p-eagle": ("p-eagle", PeagleOptions(num_hidden_layers=2)),
    "dflash, seeing all": ("dflash", DflashOptions(block_size=6, causal=False)),
}


def small_draft(kind: str, target: Target) -> Any:
    """In the target's type, with large random weights: a draft that ignored part of its input
    would otherwise still look right."""
    family, options = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 1000, (target.vocab_size,), generator=generator)
    made = FAMILIES[family].create(options, target, seed=0, token_counts=counts)
    return noisy(made.to(device=target.device, dtype=target.dtype), 2)
