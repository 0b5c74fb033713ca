"""Texts of which a server is asked the target's states, and its answers, as bodies of requests:
safetensors, with settings in their metadata.

N tokens of B texts, one text after another, without padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from draftsmith.errors import UserError

FORMAT = 1
TARGET_PATH = "/v1/target"
WEIGHTS_PATH = f"{TARGET_PATH}/weights"
STATES_PATH = f"{TARGET_PATH}/states"
REVISION_HEADER = "x-draftsmith-revision"
BODY_TYPE = "application/octet-stream"
HEADER_BYTES = 8  # of a safetensors body: the length of its JSON
# Numbers that states may travel in.
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}

SETTINGS = {"width", "taps", "dtype", "apart", "top"}  # of `Texts`, beside its tensors
# Raised for bytes that are no `Texts`; the last one for JSON that is nested too deep.
MALFORMED = (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Right-padded texts [B, `width`], or texts that are read each in a pass of its own."""

    ids: torch.Tensor  # [N] int64
    lengths: torch.Tensor  # [B] int64
    width: int
    segments: torch.Tensor | None = None  # [N], as in `drafters/target/segments.py`
    taps: tuple[int, ...] = ()  # raw layers alone
    dtype: str = "float32"
    apart: bool = False
    top: int = 0  # likeliest tokens in place of the final states; 0: the states

    @property
    def num_positions(self) -> int:
        """Positions that the passes read, padding included."""
        return len(self.ids) if self.apart else len(self.lengths) * self.width

    @property
    def mask(self) -> torch.Tensor:
        """[B, width] bool"""
        return torch.arange(self.width) < self.lengths[:, None]

    def in_parts(self, most: int) -> list[Texts]:
        """Rows in order, as many together as have `most` positions; at least one."""
        lengths = self.lengths.split(max(1, most // self.width))
        sizes = [int(part.sum()) for part in lengths]
        ids = self.ids.split(sizes)
        segments = [None] * len(ids) if self.segments is None else self.segments.split(sizes)
        return [
            replace(self, ids=own, lengths=counts, segments=numbers)
            for own, counts, numbers in zip(ids, lengths, segments, strict=True)
        ]

    def padded(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """[N] -> [B, width]"""
        rows = values.new_full((len(self.lengths), self.width), fill)
        rows[self.mask] = values
        return rows


class StatesOfTexts(NamedTuple):
    """States of N tokens, or the likeliest tokens after each of them."""

    taps: torch.Tensor | None = None  # [N, n * H]
    hidden: torch.Tensor | None = None  # [N, H], for the target's head
    top_ids: torch.Tensor | None = None  # [N, k] int32
    top_logprobs: torch.Tensor | None = None  # [N, k]
    tail: torch.Tensor | None = None  # [N]


def body_of_texts(texts: Texts) -> bytes:
    tensors = {"ids": texts.ids.int(), "lengths": texts.lengths.int()}
    if texts.segments is not None:
        tensors["segments"] = texts.segments.int()
    settings = {
        "format": FORMAT,
        "width": texts.width,
        "taps": list(texts.taps),
        "dtype": texts.dtype,
        "apart": texts.apart,
        "top": texts.top,
    }
    return save(tensors, {"texts": json.dumps(settings)})


def texts_of_body(body: bytes) -> Texts:
    """Raises `UserError` for a body that holds no texts."""
    try:
        tensors, settings = load(body), json.loads(_metadata(body)["texts"])
        if settings.pop("format") != FORMAT:
            raise ValueError("another format")
        if settings.keys() != SETTINGS:
            raise ValueError(f"settings other than {', '.join(sorted(SETTINGS))}")
        settings["taps"] = tuple(settings["taps"])
        own = {name: _numbers(name, tensor) for name, tensor in tensors.items()}
        texts = Texts(**own, **settings)
        _check_shape(texts)
    except MALFORMED as error:
        raise UserError(
            f"the body holds no texts of format {FORMAT} ({error}); send one as draftsmith "
            "--target-server does, of the same version"
        ) from error
    return texts


def _numbers(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[n] int64"""
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is no list of whole numbers of 32 or 64 bits")
    return tensor.long()


def _check_shape(texts: Texts) -> None:
    numbers = (texts.width, texts.top, *texts.taps)
    if not all(type(number) is int for number in numbers) or type(texts.apart) is not bool:
        raise ValueError("settings of another type")
    if texts.dtype not in DTYPES:
        raise ValueError(f"dtype {texts.dtype!r}")
    if texts.top < 0 or not len(texts.lengths):
        raise ValueError("no list of texts")
    if int(texts.lengths.min()) < 1 or int(texts.lengths.max()) > texts.width:
        raise ValueError("lengths outside 1 to width")
    parts = [texts.ids] if texts.segments is None else [texts.ids, texts.segments]
    if any(len(part) != int(texts.lengths.sum()) for part in parts):
        raise ValueError("lengths that are not those of the texts")
    if texts.apart and texts.segments is not None:
        raise ValueError("packed texts apart")


def body_of_states(states: StatesOfTexts) -> bytes:
    held = {name: part for name, part in states._asdict().items() if part is not None}
    return save({name: part.contiguous() for name, part in held.items()})


def states_of_body(body: bytes, texts: Texts, hidden_size: int) -> StatesOfTexts:
    """The answer for `texts`. Raises one of `MALFORMED` for a body that is none."""
    found, count = load(body), len(texts.ids)
    wanted: dict[str, tuple[int, ...]] = {}
    if texts.taps:
        wanted["taps"] = (count, len(texts.taps) * hidden_size)
    if texts.top:
        # Fewer than were asked for where the vocabulary has no more.
        pairs = (count, *found["top_ids"].shape[1:2])
        wanted |= {"top_ids": pairs, "top_logprobs": pairs, "tail": (count,)}
    else:
        wanted["hidden"] = (count, hidden_size)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != wanted:
        raise ValueError(f"it has tensors of shapes {shapes}, not {wanted}")
    return StatesOfTexts(**found)


def body_of_weights(weights: Mapping[str, torch.Tensor]) -> bytes:
    # Names that share memory are written each by itself.
    return save({name: part.detach().cpu().contiguous().clone() for name, part in weights.items()})


def _metadata(body: bytes) -> dict[str, str]:
    size = int.from_bytes(body[:HEADER_BYTES], "little")
    return json.loads(body[HEADER_BYTES : HEADER_BYTES + size])["__metadata__"]
