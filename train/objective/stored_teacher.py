"""Sources that read what was stored of the target: distributions, or taps and final states. The
target runs only for what was not stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.packed_pass import stretches_of
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import reads_freely
from draftsmith.kernels.divergence.fused import TargetLogits
from draftsmith.kernels.sampling.top_tokens import TopProbs
from draftsmith.train.data.dataset import Lists, load_rows
from draftsmith.train.data.stored_taps import StoredTaps
from draftsmith.train.objective.teacher import (
    Head,
    LiveSource,
    TargetSignals,
    TargetSource,
    logits_at,
    whole_head,
)

# Whose logits are read at once: few stay in a processor's cache.
HOST_ROWS, DEVICE_ROWS = 8, 256
COLUMNS = ("loss_mask", "top_ids", "top_logprobs", "tail")


def stored_source(
    target: Target,
    provenance: Mapping[str, dict[str, Any]],
    taps: tuple[int, ...],
    vocab_map: torch.Tensor | None = None,
    kept: Path | None = None,
) -> TargetSource:
    """Source over data folders with their provenance by path, which must all store the same: taps,
    which give everything, or distributions, which leave taps to the target's body. `vocab_map` and
    `kept` as in `NarrowLogits`, of a draft with a vocabulary of its own."""
    folders = [Path(path) for path in provenance]
    named = ", ".join(map(repr, provenance))
    tapped = [any(folder.glob("taps-*.safetensors")) for folder in folders]
    if all(tapped):
        stored_taps = StoredTaps(folders, revision=target.revision)
        head = whole_head(target)
        if vocab_map is not None and kept is not None:
            head = NarrowLogits(target, vocab_map, stored_taps.num_tokens, kept)
        return TapSource(target, stored_taps, taps, head)
    if any(tapped):
        raise UserError(
            f"some of the folders {named} store taps and others distributions; store the same in "
            "all, or train with --teacher live"
        )
    stored = StoredDistributions(provenance, revision=target.revision)
    sizes = [record.get("top_logprobs") for record in provenance.values()]
    if len(set(sizes)) > 1:
        raise UserError(
            f"the folders {named} store {', '.join(map(str, sizes))} likeliest tokens; store as "
            "many in all, or train with --teacher live"
        )
    return DistributionSource(target, stored)


class NarrowLogits:
    """Target logits of stored states over a draft's vocabulary alone.

    All other tokens of the target count as one, whose logit stays the same for a stored token. The
    first time it is computed, by the whole head, and kept; from then on the head multiplies the
    rows of the draft's tokens only: 8,192 of 49,152, say. Loss and gradients are the same to
    rounding.

    Args:
        vocab_map: [Vd] ascending target ids of the draft's tokens.
        num_tokens: how many are stored.
        kept: file that processes which train together share, and a resumed run reads again.
    """

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


class TapSource:
    """Distributions by the target's own head over stored states. `taps` are those that will be
    asked for."""

    def __init__(self, target: Target, stored: StoredTaps, taps: tuple[int, ...], head: Head):
        self.live, self.stored, self.head = LiveSource(target), stored, head
        missing = [tap for tap in taps if tap != FINAL and tap not in stored.taps]
        if missing:
            raise UserError(
                f"the draft reads tap {missing[0]} and stored are "
                f"{', '.join(map(str, stored.taps))}; train with --teacher live, or delete the "
                "stored taps and run draftsmith generate --store-taps "
                f"{stored.files[0].precision} --taps "
                f"{' '.join(map(str, sorted({*stored.taps, *taps} - {FINAL})))}"
            )

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        if text.token_index is None:
            return self.live.read(text, taps)
        tapped, final = self._stored_states(text, taps)
        index = text.token_index.flatten()
        distributions = logits_at(final, lambda states, at: self.head(states, index[at]))
        return TargetSignals(tapped if taps else None, distributions)

    def _stored_states(
        self, text: TextBatch, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(taps [B, L, n * H], final [B, L, H]) of the texts; zeros in padding."""
        assert text.token_index is not None  # `read` asks the target for other texts
        target, shape = self.live.target, text.token_index.shape
        tapped = torch.zeros(*shape, len(taps), target.hidden_size, dtype=target.dtype)
        final = torch.zeros(*shape, target.hidden_size, dtype=target.dtype)
        chosen = [self.stored.taps.index(tap) for tap in taps if tap != FINAL]
        is_final = torch.tensor([tap == FINAL for tap in taps], dtype=torch.bool)
        token_index = text.token_index.cpu()
        segments = torch.where(
            token_index >= 0, 0 if text.segments is None else text.segments.cpu(), -1
        )
        for row, stretches in enumerate(stretches_of(segments)):
            for begin, end, is_text in stretches:
                if is_text:
                    states, last = self.stored.read(int(token_index[row, begin]), end - begin)
                    final[row, begin:end] = last.to(final)
                    tapped[row, begin:end, ~is_final] = states[:, chosen].to(tapped)
                    tapped[row, begin:end, is_final] = last[:, None].to(tapped)
        return tapped.flatten(2).to(target.device), final.to(target.device)


class DistributionSource:
    def __init__(self, target: Target, stored: StoredDistributions):
        self.live, self.stored = LiveSource(target), stored

    def read(self, text: TextBatch, taps: tuple[int, ...]) -> TargetSignals:
        if text.token_index is None:
            return self.live.read(text, taps)
        token_index = text.token_index

        def distributions(row: torch.Tensor, position: torch.Tensor) -> TargetLogits | TopProbs:
            return self.stored.read(token_index[row, position])

        return TargetSignals(self.live.read(text, taps).taps if taps else None, distributions)


class StoredDistributions:
    """Stored top tokens of data folders with their provenance by path. A token is found by its
    index among all tokens of the folders."""

    def __init__(self, provenance: Mapping[str, dict[str, Any]], *, revision: str):
        # Late: its import takes a second.
        from datasets import concatenate_datasets

        parts: list[Any] = []
        for folder, record in provenance.items():
            rows = load_rows(Path(folder))
            if any(name not in rows.column_names for name in COLUMNS):
                raise UserError(
                    f"data {folder!r} holds neither distributions nor taps of the target; generate "
                    "it with --top-logprobs 64 or --store-taps, or train with --teacher live"
                )
            if record.get("target_revision") != revision:
                raise UserError(
                    f"data {folder!r} holds the distributions of other weights than this target's; "
                    "train with --teacher live"
                )
            rows = rows.select_columns(list(COLUMNS))
            is_alike = not parts or rows.features == parts[0].features
            parts.append(rows if is_alike else rows.cast(parts[0].features))
        self.rows = concatenate_datasets(parts).with_format("arrow")
        sizes = [Lists(table["loss_mask"]).lengths for table in self.rows.iter(batch_size=1000)]
        self.ends = np.concatenate(sizes).cumsum()

    def read(self, token_index: torch.Tensor) -> TopProbs:
        """Distributions of the tokens `token_index` [R], which must all be trained ones."""
        wanted = token_index.cpu().numpy()
        texts = np.searchsorted(self.ends, wanted, side="right")
        places, parts = [], []
        for text in np.unique(texts).tolist():
            places.append(np.flatnonzero(texts == text))
            numbers, known = self._of(text)
            begin = int(self.ends[text - 1]) if text else 0
            chosen = numbers[wanted[places[-1]] - begin]
            parts.append([column[chosen] for column in known])
        back = np.concatenate(places).argsort()
        joined = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return TopProbs(*(column[back].to(token_index.device) for column in joined))

    def _of(self, text: int) -> tuple[np.ndarray, TopProbs]:
        """(number of the distribution of each token, its distributions)"""
        table = self.rows[text : text + 1]
        numbers = Lists(table["loss_mask"]).values.astype(np.int64).cumsum() - 1
        tail = pc.list_flatten(table["tail"]).to_numpy()
        ids, logprobs = (
            pc.list_flatten(pc.list_flatten(table[name])).to_numpy().reshape(len(tail), -1)
            for name in ("top_ids", "top_logprobs")
        )
        return numbers, TopProbs(
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(logprobs.copy()),
            torch.from_numpy(tail.copy()),
        )
