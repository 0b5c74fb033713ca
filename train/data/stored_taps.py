"""Hidden states of the target, stored beside the shards of a data folder: one safetensors file a
shard, every text checksummed.

    part-00003.parquet -> taps-00003.safetensors
    ends   [rows] int64                   tokens of the shard up to the end of each text
    crc    [rows] int64                   CRC-32 of the bytes of each text, final then taps then
    scales
    final  [T, H] bfloat16                what the target's head multiplies: its distributions, as
    exactly as bfloat16 has them
    taps   [T, n, H] bfloat16, or float8_e4m3 with scales [T, n] float32: the states of the raw
    layer ids in the metadata

T tokens of the shard, H the target's width.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from draftsmith.errors import UserError
from draftsmith.files import atomic_path

SCHEMA = "1"
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
NAMES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class TapLayout:
    taps: tuple[int, ...]  # raw layer ids, see drafters/target/taps.py
    hidden_size: int
    precision: str  # of the taps, "bf16" or "fp8"

    @property
    def bytes_a_token(self) -> int:
        each = self.tensors(tokens=1, rows=0).values()
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in each)

    def tensors(self, tokens: int, rows: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor in the order of the file: wide numbers first, so that each
        stands at a multiple of its size."""
        shape = (tokens, len(self.taps), self.hidden_size)
        is_fp8 = self.precision == "fp8"
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "ends": (torch.int64, (rows,)),
            "crc": (torch.int64, (rows,)),
        }
        if is_fp8:
            found["scales"] = (torch.float32, shape[:2])
        found["final"] = (torch.bfloat16, (tokens, self.hidden_size))
        return found | {"taps": (torch.float8_e4m3fn if is_fp8 else torch.bfloat16, shape)}


def tap_file(part: Path) -> Path:
    return part.with_name(part.stem.replace("part", "taps", 1) + ".safetensors")


class TapWriter:
    """Fills the file of one shard, text by text in any order; what is in memory is one text."""

    def __init__(
        self, path: Path, layout: TapLayout, lengths: Sequence[int], metadata: dict[str, str]
    ):
        self.layout = layout
        self.ends = np.cumsum(lengths, dtype=np.int64)
        entries: dict[str, dict] = {}
        offset = 0
        for name, (dtype, shape) in layout.tensors(int(self.ends[-1]), len(lengths)).items():
            end = offset + math.prod(shape) * dtype.itemsize
            entries[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        header = json.dumps({"__metadata__": metadata, **entries}).encode()
        header += b" " * (-len(header) % 8)
        with open(path, "wb") as handle:
            handle.write(struct.pack("<Q", len(header)) + header)
            # Room for all of it: a full disk fails here, and no write to memory later.
            handle.flush()
            os.posix_fallocate(handle.fileno(), 0, 8 + len(header) + offset)
        memory = np.memmap(path, np.uint8, "r+", offset=8 + len(header))
        self._parts = {key: memory[slice(*entry["data_offsets"])] for key, entry in entries.items()}
        self._store("ends", 0, torch.from_numpy(self.ends))

    def put(self, row: int, taps: torch.Tensor, final: torch.Tensor) -> None:
        """Stores the states of one text: taps [n, taps * H] in the layout's order, final [n, H]."""
        begin = int(self.ends[row - 1]) if row else 0
        crc = self._store("final", begin, final.to(torch.bfloat16))
        states = taps.reshape(len(final), len(self.layout.taps), self.layout.hidden_size)
        if self.layout.precision == "bf16":
            crc = self._store("taps", begin, states.to(torch.bfloat16), crc)
        else:
            scales = (
                states.abs().amax(dim=-1).float().clamp(min=torch.finfo(torch.float32).tiny)
                / LARGEST_FP8
            )
            crc = self._store(
                "taps", begin, (states / scales[..., None]).to(torch.float8_e4m3fn), crc
            )
            crc = self._store("scales", begin, scales, crc)
        self._store("crc", row, torch.tensor([crc]))

    def _store(self, name: str, begin: int, values: torch.Tensor, crc: int = 0) -> int:
        """Writes values at entry `begin` of a tensor. Returns `crc` continued by what was
        stored."""
        stored = bytes_of(values)
        size = math.prod(values.shape[1:]) * values.element_size()
        self._parts[name][begin * size : begin * size + len(stored)] = stored
        return zlib.crc32(stored, crc)

    def flush(self) -> None:
        for part in self._parts.values():
            part.flush()


@contextmanager
def writing(
    part: Path, layout: TapLayout, lengths: Sequence[int], *, revision: str
) -> Iterator[TapWriter]:
    """The file appears whole at the end."""
    metadata = {
        "schema": SCHEMA,
        "taps": json.dumps(layout.taps),
        "precision": layout.precision,
        "target_revision": revision,
        "part_bytes": str(part.stat().st_size),
    }
    with atomic_path(tap_file(part)) as temporary:
        writer = TapWriter(temporary, layout, lengths, metadata)
        yield writer
        writer.flush()


def bytes_of(values: torch.Tensor) -> np.ndarray:
    return values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


class StatesOf:
    """The file of one shard, read a text at a time."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"stored taps {str(path)!r} cannot be read ({error}); delete the file and store "
                "it again"
            ) from error
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.taps = tuple(json.loads(self.metadata.get("taps", "[]")))
        self.precision = self.metadata.get("precision", "")
        self.ends: torch.Tensor = self._file.get_tensor("ends")
        self._crc: torch.Tensor = self._file.get_tensor("crc")
        stored = set(self._file.keys())
        self._names = [name for name in ("final", "taps", "scales") if name in stored]
        self._intact: set[int] = set()

    def is_of(self, part: Path, *, revision: str) -> bool:
        """True where these are the states of that target over that shard."""
        wanted = {
            "schema": SCHEMA,
            "target_revision": revision,
            "part_bytes": str(part.stat().st_size),
        }
        return wanted.items() <= self.metadata.items()

    def read(self, row: int, begin: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`length` tokens of a text from its `begin` on -> (taps [length, n, H], final [length,
        H]), both float32."""
        first, end = int(self.ends[row - 1]) if row else 0, int(self.ends[row])
        if row not in self._intact:
            self._check(row, first, end)
        wanted = slice(first + begin, first + begin + length)
        parts = {name: self._file.get_slice(name)[wanted] for name in self._names}
        taps = parts["taps"].float()
        return taps if "scales" not in parts else taps * parts["scales"][..., None], parts[
            "final"
        ].float()

    def _check(self, row: int, first: int, end: int) -> None:
        crc = 0
        for name in self._names:
            crc = zlib.crc32(bytes_of(self._file.get_slice(name)[first:end]), crc)
        if crc != int(self._crc[row]):
            raise UserError(
                f"stored taps {str(self.path)!r} are damaged at text {row}; delete the file and "
                "run draftsmith generate "
                "--store-taps again"
            )
        self._intact.add(row)


class StoredTaps:
    """Stored states of whole data folders. A token is found by its index among all tokens of the
    folders."""

    def __init__(self, folders: Sequence[Path], *, revision: str):
        parts = [part for folder in folders for part in sorted(folder.glob("part-*.parquet"))]
        missing = [part for part in parts if not tap_file(part).is_file()]
        if missing:
            raise UserError(
                f"data {str(missing[0].parent)!r} has no {tap_file(missing[0]).name}; finish "
                "draftsmith generate --store-taps, or train with --teacher live"
            )
        self.files = [StatesOf(tap_file(part)) for part in parts]
        self.taps = self.files[0].taps
        for file, part in zip(self.files, parts, strict=True):
            if not file.is_of(part, revision=revision):
                raise UserError(
                    f"stored taps {str(file.path)!r} are of another {part.name} or of other "
                    "weights than this target's; delete "
                    "them and run draftsmith generate --store-taps again"
                )
            if file.taps != self.taps:
                raise UserError(
                    f"data {str(part.parent)!r} stores taps {', '.join(map(str, file.taps))} and "
                    f"{str(parts[0].parent)!r} {', '.join(map(str, self.taps))}; store the same in "
                    "both"
                )
        # The tokens of all texts before and up to each, and where each file's texts begin.
        sizes = [np.diff(file.ends.numpy(), prepend=0) for file in self.files]
        self._text_ends = np.concatenate(sizes).cumsum()
        self._first_texts = np.cumsum([0, *map(len, sizes)])
        self.num_tokens = int(self._text_ends[-1])

    def read(self, token_index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps and final states of tokens of one text, as `StatesOf.read`."""
        text = int(np.searchsorted(self._text_ends, token_index, side="right"))
        begin = token_index - (int(self._text_ends[text - 1]) if text else 0)
        at = int(np.searchsorted(self._first_texts, text, side="right")) - 1
        return self.files[at].read(text - int(self._first_texts[at]), begin, length)
