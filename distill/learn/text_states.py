"""Hidden states of the target on served texts, each text read once.

A text is trained on several times, fresh and replayed, and scored at every gate decision; its
states under one target never change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from draftsmith.distill.config import LearnConfig
from draftsmith.drafters.target.packed_pass import stretches_of
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import Signature, signature
from draftsmith.kernels.dispatch import autocast
from draftsmith.train.data.batches import padded, rows_of

Key = tuple[tuple[int, ...], bytes]  # taps, token ids


class TextState(NamedTuple):
    """States of one text of n tokens, on the CPU."""

    taps: torch.Tensor | None  # [n, len(taps) * H]
    hidden: torch.Tensor  # [n, H], for the target's head

    @property
    def num_bytes(self) -> int:
        return self.hidden.nbytes + (0 if self.taps is None else self.taps.nbytes)


def read_text(target: Target, ids: torch.Tensor, taps: tuple[int, ...]) -> TextState:
    """States of a text [n], in a pass of its own: padding and company change bits."""
    tapped, hidden = target.states(ids[None], torch.ones_like(ids[None]), taps)
    return TextState(None if tapped is None else _kept(tapped[0]), _kept(hidden[0]))


def _kept(part: torch.Tensor) -> torch.Tensor:
    """Copy on the CPU that holds no other memory of the pass."""
    return part.cpu().clone()


class TextStates:
    """States of texts under `target`, kept up to `limit_bytes`; those not read for longest are
    dropped first.

    A text is read so that its states depend on nothing else: not on the batch it is trained in, nor
    on what a learner has read before it was started again, nor on whether a step in bfloat16 or a
    score asks for them.
    """

    def __init__(self, target: Target, limit_bytes: float):
        self.target, self.limit_bytes = target, limit_bytes
        self.num_bytes = self.num_read = 0
        self._known: dict[Key, TextState] = {}  # the latest read last

    def states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        taps: tuple[int, ...],
        segments: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `Target.states`, with 0 at padding."""
        rows = [
            [ids[begin:end] for begin, end, is_text in stretches if is_text]
            for ids, stretches in zip(
                input_ids,
                stretches_of(attention_mask - 1 if segments is None else segments),
                strict=True,
            )
        ]
        states = iter(self._of([ids for row in rows for ids in row], tuple(taps)))
        found = [[next(states) for _ in row] for row in rows]
        device = input_ids.device
        hidden = padded(rows_of([[one.hidden for one in row] for row in found])).to(device)
        tapped = [[one.taps for one in row if one.taps is not None] for row in found]
        return padded(rows_of(tapped)).to(device) if all(tapped) else None, hidden

    def _of(self, texts: Sequence[torch.Tensor], taps: tuple[int, ...]) -> list[TextState]:
        keys = [(taps, ids.cpu().numpy().tobytes()) for ids in texts]
        unknown = {key: ids for key, ids in zip(keys, texts, strict=True) if key not in self._known}
        with autocast(self.target.device, enabled=False):
            states = [read_text(self.target, ids, taps) for ids in unknown.values()]
        found = dict(zip(unknown, states, strict=True))
        self.num_read += len(found)
        self.num_bytes += sum(one.num_bytes for one in found.values())
        wanted = {key: found.get(key) or self._known.pop(key) for key in dict.fromkeys(keys)}
        self._known |= wanted
        self._drop()
        return [wanted[key] for key in keys]

    def _drop(self) -> None:
        while self._known and self.num_bytes > self.limit_bytes:
            oldest = next(iter(self._known))
            self.num_bytes -= self._known.pop(oldest).num_bytes

    def forget(self) -> None:
        """Drops all states."""
        self._known, self.num_bytes = {}, 0


def states_of(target: Target, config: LearnConfig) -> TextStates:
    """States of no text yet, within `learn.taps_gib`."""
    return TextStates(target, config.taps_gib * 2**30)


# Beside the weights: the engine's name of them, as records have it.
WEIGHT_VERSION = "weight_version"
FILES = "*.safetensors"
SETTLED_S = 0.2


class TargetFolder:
    """`--target` of a learner.

    Writers replace a folder by one rename, or write a new folder and then its name into the file. A
    copy that is still growing is left alone: files must look alike for `SETTLED_S`. A newly named
    folder is whole, and the next may be named before it is looked at twice.
    """

    def __init__(self, target: str):
        self.target = target
        self.folder = self._folder()
        self.loaded = self.seen = signature(self.folder, FILES)
        self.seen_s = time.monotonic()
        self.weight_version = self._weight_version()

    def _folder(self) -> str:
        """The folder, or the Hub id, that `target` is or names. Raises `UserError` for a file that
        names nothing."""
        path = Path(self.target)
        if not path.is_file():
            return self.target
        named = path.read_text(encoding="utf-8").strip()
        if not named:
            raise UserError(f"target {self.target!r} is an empty file; write a folder's name in it")
        return str(path.parent / named)

    def _weight_version(self) -> str:
        path = Path(self.folder) / WEIGHT_VERSION
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def _look(self) -> Signature:
        try:
            return signature(self._folder(), FILES)
        except (OSError, UserError):
            return []  # in the middle of a replacement

    @property
    def is_new(self) -> bool:
        """True where other weights lie there than were loaded, whole or not."""
        found = self._look()
        return bool(found) and found != self.loaded

    def has_settled(self) -> bool:
        """True where other weights than were loaded lie there and change no more."""
        found, now_s = self._look(), time.monotonic()
        if found != self.seen:
            self.seen, self.seen_s = found, now_s
        if not found or found == self.loaded:
            return False
        is_named = Path(found[0][0]).parent != Path(self.folder)
        return is_named or now_s - self.seen_s >= SETTLED_S
