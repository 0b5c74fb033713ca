"""Target logits of stored states over a draft's vocabulary alone.

All other tokens of the target count as one, whose logit stays the same for a stored token. The
first time it is computed, by the whole head, and kept; from then on the head multiplies the rows of
the draft's tokens only: 8,192 of 49,152, say. Loss and gradients are the same to rounding.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from draftsmith.drafters.target.target import Target
from draftsmith.kernels.dispatch import reads_freely

# Whose logits are read at once: few stay in a processor's cache.
HOST_ROWS, DEVICE_ROWS = 8, 256


class NarrowLogits:
    """`vocab_map` [Vd] ascending target ids of the draft's tokens; `num_tokens` are stored;
    processes that train together share the file at `kept`, which a resumed run reads again."""

    def __init__(self, target: Target, vocab_map: torch.Tensor, num_tokens: int, kept: Path):
        self.target, self.vocab_map = target, vocab_map
        self.num_tokens, self.kept = num_tokens, kept
        self.narrow = target.part_of_head(vocab_map)
        self._rest: np.ndarray | None = None

    def __call__(self, states: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """States [d, H] behind the stored tokens `index` [d] -> (logits [d, V], False) or (logits
        [d, Vd + 1], the last of all other tokens together, True)."""
        at = index.cpu().numpy()
        rest = self._known()[at]
        if self.narrow is not None and (rest != 0).all():
            logits = self.narrow(states)
            logits[:, -1] = torch.from_numpy(rest).to(logits)
            return logits, True
        logits = self.target.head(states)
        rows = HOST_ROWS if reads_freely(logits.device) else DEVICE_ROWS
        others = torch.cat(
            [
                part.float().index_fill(-1, self.vocab_map, -torch.inf).logsumexp(dim=-1)
                for part in logits.split(rows)
            ]
        )
        # 0 stands for an unknown one.
        found = others.where(others != 0, torch.finfo(others.dtype).tiny).cpu().numpy()
        self._known()[at] = found
        return logits, False

    def _known(self) -> np.ndarray:
        """[num_tokens] float32, 0 where none is known yet; in memory alone where the disk is
        full."""
        if self._rest is None:
            try:
                self.kept.parent.mkdir(parents=True, exist_ok=True)
                # Never emptied: another process may have filled it in the meantime.
                with open(self.kept, "ab") as handle:
                    os.posix_fallocate(handle.fileno(), 0, 4 * self.num_tokens)
                self._rest = np.memmap(self.kept, np.float32, "r+")
            except OSError:
                self._rest = np.zeros(self.num_tokens, np.float32)
        return self._rest
