"""Dataset folder that `generate` fills: Parquet shards and a provenance record. A kill loses
nothing that was finished.

Shard n holds the prompts `n * size .. (n + 1) * size - 1`. Until it is complete, some answers at a
time are a file of their own (`.batch-...`); the last one turns them into `part-....parquet` by one
rename.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from draftsmith import files
from draftsmith.distill.config_checks import started
from draftsmith.drafters.target.sharded import leave_group
from draftsmith.errors import UserError

SCHEMA_VERSION = 1
PROVENANCE = "provenance.json"
LOCK = "generate"  # role of the process that writes the folder
SELF_PROMPTS = "self-prompts"  # folder in it
COLUMNS = [
    ("index", pa.int64()),
    ("name", pa.string()),
    ("split", pa.string()),
    ("input_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.int8())),
]
DISTRIBUTION_COLUMNS = [
    ("top_ids", pa.list_(pa.list_(pa.int32()))),
    ("top_logprobs", pa.list_(pa.list_(pa.float32()))),
    ("tail", pa.list_(pa.float32())),
]
# What may differ between a run and its continuation.
UNSETTLED = ("complete", "answers", "tokens", "left_out", "versions", "tokenizer")


class AnswerFolder:
    """Folder for `total` prompts in shards of `size`. `provenance` is how the answers are made, and
    must be the same to go on."""

    def __init__(
        self,
        path: str | Path,
        *,
        total: int,
        size: int,
        has_distributions: bool,
        provenance: dict[str, Any],
        columns: Sequence[tuple[str, pa.DataType]] = (),
    ):
        """`columns` beside those of every folder."""
        self.path, self.total, self.size = Path(path), total, size
        self.schema = pa.schema(
            [*COLUMNS, *columns, *(DISTRIBUTION_COLUMNS if has_distributions else [])],
            metadata={"draftsmith.answers": str(SCHEMA_VERSION)},
        )
        self.provenance = {"schema": SCHEMA_VERSION, **provenance, "complete": False}
        with self.writing():
            self._open()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a full disk into a sentence."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"answers cannot be written to {str(self.path)!r} ({error.strerror or error}); "
                "make room and start again: the run goes on from what was written"
            ) from error

    def _open(self) -> None:
        record = self.path / PROVENANCE
        if record.is_file():
            started = files.read_json(record, "data provenance")
            settled = [key for key in self.provenance if key not in UNSETTLED]
            for key in settled:
                if started.get(key) != self.provenance[key]:
                    raise UserError(
                        f"{str(self.path)!r} was started with {key} {started.get(key)!r}, now it "
                        f"is {self.provenance[key]!r}; "
                        "give the same options or another --out"
                    )
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
        elif {entry.name for entry in self.path.glob("*")} - {f"{LOCK}.lock", SELF_PROMPTS}:
            raise UserError(
                f"{str(self.path)!r} holds files but no {PROVENANCE}; give an empty or new folder "
                "as --out"
            )
        else:
            files.write_json(record, self.provenance)

    @property
    def num_shards(self) -> int:
        return -(-self.total // self.size)

    def prompts_of(self, shard: int) -> range:
        return range(shard * self.size, min(self.total, (shard + 1) * self.size))

    def part(self, shard: int) -> Path:
        return self.path / f"part-{shard:05d}.parquet"

    def batches(self, shard: int) -> list[Path]:
        return sorted(self.path.glob(f".batch-{shard:05d}-*.parquet"))

    def done(self, shard: int) -> set[int]:
        """Indices of the answered prompts of this shard. A damaged file counts as absent."""
        if _num_rows(self.part(shard)) == len(self.prompts_of(shard)):
            return set(self.prompts_of(shard))
        return {index for path in self.batches(shard) for index in _indices(path)}

    def add(self, shard: int, rows: list[dict[str, Any]]) -> None:
        path = self.path / f".batch-{shard:05d}-{rows[0]['index']:09d}.parquet"
        with self.writing(), files.atomic_path(path) as temporary:
            pq.write_table(pa.Table.from_pylist(rows, schema=self.schema), temporary)

    def finish(self, shard: int) -> None:
        """Joins the batches of a fully answered shard."""
        if _num_rows(self.part(shard)) != len(self.prompts_of(shard)):
            batches = [path for path in self.batches(shard) if _indices(path)]
            table = pa.concat_tables([pq.read_table(path) for path in batches]).sort_by("index")
            with self.writing(), files.atomic_path(self.part(shard)) as temporary:
                pq.write_table(table, temporary, compression="zstd")
        for path in self.batches(shard):
            path.unlink(missing_ok=True)

    def answers(self) -> Iterator[pa.Table]:
        for shard in range(self.num_shards):
            yield pq.read_table(self.part(shard), columns=["input_ids", "loss_mask"])

    def close(self) -> dict[str, Any]:
        """Counts answers and tokens and marks the folder complete."""
        tokens = sum(
            sum(sum(mask) for mask in table["loss_mask"].to_pylist()) for table in self.answers()
        )
        self.provenance |= {"complete": True, "answers": self.total, "tokens": tokens}
        with self.writing():
            files.write_json(self.path / PROVENANCE, self.provenance)
        return self.provenance


class Arrivals:
    """Rows of some shards in the order in which they are finished, written at least `size` at a
    time, and where they complete a shard."""

    def __init__(self, folder: AnswerFolder, size: int, shards: Iterable[int]):
        self.folder, self.size, self.shards = folder, size, shards
        self.rows: dict[int, list[dict[str, Any]]] = {}  # by shard
        self.left: dict[int, int] = {}

    def unanswered(self) -> list[int]:
        """Indices of the prompts that have no row yet; joins the shards that have all."""
        found = []
        for shard in self.shards:
            done = self.folder.done(shard)
            left = [index for index in self.folder.prompts_of(shard) if index not in done]
            self.left[shard] = len(left)
            found += left
            if not left:
                self.folder.finish(shard)
        return found

    def add(self, row: dict[str, Any]) -> None:
        shard = row["index"] // self.folder.size
        self.rows.setdefault(shard, []).append(row)
        self.left[shard] -= 1
        if self.left[shard] == 0:
            self.folder.add(shard, self.rows.pop(shard))
            self.folder.finish(shard)
        elif sum(map(len, self.rows.values())) >= self.size:
            self.write()

    def write(self) -> None:
        while self.rows:
            self.folder.add(*self.rows.popitem())


def _num_rows(path: Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowInvalid):
        return -1


def _indices(path: Path) -> list[int]:
    try:
        return pq.read_table(path, columns=["index"])["index"].to_pylist()
    except (OSError, pa.ArrowInvalid):
        return []


Made = TypeVar("Made")
# One process may have many answers more to make than another, which waits for it.
PATIENCE = datetime.timedelta(days=3650)


class Processes:
    """This process among `count`; process `rank` writes the shards rank, rank + count, ..."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def shards(self, folder: AnswerFolder) -> range:
        return range(self.rank, folder.num_shards, self.count)

    def wait(self) -> None:
        """Return when all processes are here. Raises `UserError` where one has ended."""
        if self.count == 1:
            return
        try:
            dist.barrier()
        except RuntimeError as error:
            reason = str(error).split(". ")[0]  # advice of the library follows
            raise UserError(
                f"process {self.rank} of {self.count} ends because another one has ({reason}); "
                "what was answered is kept, so start the command again once its message is dealt "
                "with"
            ) from error

    def leader_first(self, make: Callable[[], Made]) -> Made:
        """Result of `make`, called by the others when the first process has called it, and used by
        none before all have."""
        if not self.leads:
            self.wait()
        made = make()
        if self.leads:
            self.wait()
        self.wait()
        return made


@contextmanager
def joined() -> Iterator[Processes]:
    """Processes that were started together; all but the first one print nothing."""
    if (count := started()) == 1:
        yield Processes()
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    with ExitStack() as stack:
        processes = Processes(dist.get_rank(), count)
        if not processes.leads:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield processes
        processes.wait()
    leave_group()
