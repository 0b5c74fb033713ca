"""The target's laws as `generate --top-logprobs` stored them: the likeliest tokens and the tail, an entry a trained token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopLaw
from draftsmith.train.data.dataset import load_rows
from draftsmith.train.data.pieces import Lists

COLUMNS = ("loss_mask", "top_ids", "top_logprobs", "tail")


class StoredLaws:
    """A token is found by its place, its number among all tokens of the folder."""

    def __init__(self, folder: Path, *, provenance: dict[str, Any], revision: str):
        rows = load_rows(folder)
        if any(name not in rows.column_names for name in COLUMNS):
            raise UserError(
                f"data {str(folder)!r} holds neither laws nor taps of the target; generate it with --top-logprobs 64 or "
                "--store-taps, or train with --teacher live"
            )
        if provenance.get("target_revision") != revision:
            raise UserError(f"data {str(folder)!r} holds the laws of other weights than this target's; train with --teacher live")
        self.rows = rows.with_format("arrow", columns=list(COLUMNS))
        sizes = [Lists(table["loss_mask"]).lengths for table in self.rows.iter(batch_size=1000)]
        self.ends = np.concatenate(sizes).cumsum()

    def read(self, places: torch.Tensor) -> TopLaw:
        """Of the tokens at `places` [R], which must all be trained ones."""
        wanted = places.cpu().numpy()
        texts = np.searchsorted(self.ends, wanted, side="right")
        parts: dict[int, tuple[np.ndarray, TopLaw]] = {text: self._of(int(text)) for text in np.unique(texts)}
        entries = [parts[text][0][place - self._begin(text)] for text, place in zip(texts, wanted, strict=True)]
        first = np.cumsum([0, *(len(law.tail) for _, law in parts.values())])
        offset = dict(zip(parts, first, strict=False))
        chosen = torch.tensor([offset[text] + entry for text, entry in zip(texts, entries, strict=True)], dtype=torch.int64)
        joined = (torch.cat(column) for column in zip(*(law for _, law in parts.values()), strict=True))
        return TopLaw(*(column[chosen].to(places.device) for column in joined))

    def _begin(self, text: int) -> int:
        return int(self.ends[text - 1]) if text else 0

    def _of(self, text: int) -> tuple[np.ndarray, TopLaw]:
        """(number of the law of each token, its laws)"""
        table = self.rows[text : text + 1]
        numbers = Lists(table["loss_mask"]).values.astype(np.int64).cumsum() - 1
        tail = pc.list_flatten(table["tail"]).to_numpy()
        ids, logprobs = (
            pc.list_flatten(pc.list_flatten(table[name])).to_numpy().reshape(len(tail), -1)
            for name in ("top_ids", "top_logprobs")
        )
        return numbers, TopLaw(
            torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs.copy()), torch.from_numpy(tail.copy())
        )
