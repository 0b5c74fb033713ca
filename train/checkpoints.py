"""Run folder of a training: its record, checkpoints and best draft under OUT/training/.
Torch-free."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from draftsmith.errors import UserError, first_line
from draftsmith.files import atomic_folder, atomic_path, read_json, write_json, write_text
from draftsmith.train.config import TrainConfig
from draftsmith.train.resolve import different_from

if TYPE_CHECKING:
    from draftsmith.drafters.interface import TrainedDrafter

# Written last into a checkpoint; one without it was cut short and is not resumed from.
MARKER = "complete.json"


class Checkpoint(NamedTuple):
    path: Path
    step: int
    elapsed_s: float  # of training until then
    processes: int  # that wrote it
    # forward passes of an optimizer step, over all of them: what the position in the data is
    # counted in
    passes: int
    files: Mapping[str, int] = MappingProxyType({})  # bytes of each, but the marker
    kept_s: float = 0.0  # of the minutes, for the last evaluation

    def check(self) -> None:
        """Raises a `UserError` for one that has lost a file, or a part of one, since it was
        written."""
        if reason := damage(self.path, self.files):
            raise torn(self.path, reason)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file but the marker, by its path in the folder."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }


def damage(folder: Path, files: Mapping[str, int]) -> str | None:
    """First difference from what `sizes` found; None where all is as it was."""
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is {'not whole' if path.is_file() else 'missing'}"
        if path.suffix == ".json":
            try:
                read_json(path)
            except UserError as error:
                return first_line(error)
    return None


def torn(checkpoint: str | Path, reason: object) -> UserError:
    return UserError(
        f"checkpoint {str(checkpoint)!r} cannot be read ({reason}); delete this folder and start "
        "again: the run goes on from the one before"
    )


@contextmanager
def whole(checkpoint: str | Path | None) -> Iterator[None]:
    """Raises a `UserError` where a file of the checkpoint is damaged."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # what readers of torch and Python raise differs by the damage
        if "out of memory" in str(error):  # of a device
            raise
        raise torn(str(checkpoint), first_line(error)) from error


class RunFolder:
    """The draft folder `out` and what lies beside the draft in it."""

    def __init__(self, out: str | Path):
        self.out = Path(out)
        self.training = self.out / "training"
        self.metrics = self.out / "metrics.jsonl"
        self.curves = self.out / "curves.png"

    def check(self, config: TrainConfig) -> None:
        """A `UserError` when `out` is no folder or holds another run that `config` would go on
        with."""
        if self.out.is_file():
            raise UserError(f"out {str(self.out)!r} is a file; give a folder")
        newest = self.newest()
        if not config.resume or newest is None:
            return
        if change := different_from(
            config, read_json(self.training / "run.json", "record of the run")
        ):
            raise UserError(
                f"out {str(self.out)!r} holds another run ({change}); give the same options, "
                "another --out, or --no-resume"
            )
        self._check_processes(config, newest, int(os.environ.get("WORLD_SIZE", "1")))
        newest.check()
        BestDraft(self.training).check(newest.step)

    def _check_processes(self, config: TrainConfig, newest: Checkpoint, processes: int) -> None:
        """Allows another number of processes where optimizer steps stay as large as they were, and
        no process has a part of DeepSpeed's state."""
        if config.deepspeed is not None and processes != newest.processes:
            raise UserError(
                f"out {str(self.out)!r} holds a run of {newest.processes} processes with "
                f"DeepSpeed, and {processes} run; start as many as wrote it"
            )
        if processes * config.accumulate != newest.passes:
            mend = (
                f"give --accumulate {newest.passes // processes}"
                if newest.passes % processes == 0
                else f"start a number of processes that divides {newest.passes}"
            )
            raise UserError(
                f"out {str(self.out)!r} holds a run of {newest.passes} batches an optimizer step, "
                f"and {processes} x accumulate "
                f"{config.accumulate} are {processes * config.accumulate}; {mend}"
            )

    def open(self, config: TrainConfig) -> None:
        """Prepares the folder: everything after the checkpoint to go on from is dropped."""
        newest = self.newest() if config.resume else None
        if newest is None:
            shutil.rmtree(self.training, ignore_errors=True)
            self.metrics.unlink(missing_ok=True)
        else:
            keep_until(self.metrics, newest.step)
            self._drop_unfinished()
        write_json(self.training / "run.json", asdict(config))

    def keep_data(self, lengths: np.ndarray) -> None:
        """Records the texts of the run, by their lengths [N]: the batches are a function of these.
        A `UserError` for a run that would go on with others."""
        texts = {"sequences": len(lengths), "tokens": int(lengths.sum())}
        data = texts | {"lengths_crc": zlib.crc32(lengths.astype(np.int64).tobytes())}
        if before := self._other("data", data):
            raise UserError(
                f"out {str(self.out)!r} holds a run on other texts ({before['sequences']} of "
                f"{before['tokens']} tokens, now {len(lengths)} of {texts['tokens']}); give the "
                "same data, another --out, or --no-resume"
            )

    def keep_target(self, revision: str) -> None:
        """Records the target of the run. A `UserError` for a run that would go on with another."""
        if before := self._other("target", {"revision": revision}):
            raise UserError(
                f"out {str(self.out)!r} holds a run for a target of revision {before['revision']}, "
                f"and this one's is {revision}; give the same target, another --out, or --no-resume"
            )

    def _other(self, name: str, now: dict[str, Any]) -> dict[str, Any] | None:
        """Record that a run which would go on has in place of `now`, else written."""
        path = self.training / f"{name}.json"
        before = read_json(path, f"record of the {name}") if path.is_file() else now
        if self.newest() is not None and before != now:
            return before
        write_json(path, now)
        return None

    def _drop_unfinished(self) -> None:
        """Removes what a kill cut short. The Trainer would count it among its newest checkpoints
        and delete a whole one for it."""
        whole = {marker.parent for marker in self.training.glob(f"checkpoint-*/{MARKER}")}
        for path in {*self.training.glob("checkpoint-*")} - whole | {
            *self.training.glob(".best-*")
        }:
            shutil.rmtree(path)

    def newest(self) -> Checkpoint | None:
        found = []
        for marker in self.training.glob(f"checkpoint-*/{MARKER}"):
            with whole(marker.parent):
                found.append(Checkpoint(marker.parent, **read_json(marker, "checkpoint marker")))
        return max(found, key=lambda checkpoint: checkpoint.step, default=None)

    def complete(
        self, *, step: int, elapsed_s: float, processes: int, passes: int, kept_s: float = 0.0
    ) -> None:
        """Marks checkpoint-`step` as whole."""
        folder = self.training / f"checkpoint-{step}"
        record = {"step": step, "elapsed_s": elapsed_s, "processes": processes, "passes": passes}
        write_json(folder / MARKER, record | {"files": sizes(folder), "kept_s": kept_s})


def keep_until(metrics: Path, step: int) -> None:
    """Drops the lines that the resumed run will write again, and a line cut short by a kill."""
    if not metrics.is_file():
        return
    kept = [line for line in _lines(metrics) if _step_of(line) <= step]
    write_text(metrics, "".join(line + "\n" for line in kept))


def is_evaluated(metrics: Path, step: int) -> bool:
    """True where the metrics have figures of held-out prompts at the step."""
    lines = _lines(metrics) if metrics.is_file() else []
    return any("eval_tau" in line and _step_of(line) == step for line in lines)


def _lines(metrics: Path) -> list[str]:
    # A crash of the machine leaves any bytes.
    return metrics.read_text(encoding="utf-8", errors="replace").split("\n")


def _step_of(line: str) -> float:
    try:
        step: float = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
    return step


class KeptCheckpoint(NamedTuple):
    """A draft on disk; it is saved elsewhere by copying its files."""

    family: str
    path: Path
    step: int
    tau: float
    evaluation: list[dict[str, Any]]
    files: Mapping[str, int]  # as `sizes` has them

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.path.iterdir()):
            with atomic_path(folder / path.name) as temporary:
                shutil.copyfile(path, temporary)


class BestDraft:
    """Best draft of a run so far, with its record. Used on rank 0 alone."""

    def __init__(self, training: Path):
        self.training = training
        self.record = training / "best.json"

    def offer(
        self, drafter: TrainedDrafter, *, step: int, tau: float, evaluation: list[dict[str, Any]]
    ) -> None:
        """Keeps the draft if none before it was better; of equals the later one, which has seen
        more."""
        old = self.read()
        if old is not None and (old.tau > tau or old.step == step):
            return
        path = self.training / f"best-{step}"
        with atomic_folder(path) as temporary:
            drafter.save(temporary)
        values = {
            "family": drafter.family,
            "folder": path.name,
            "step": step,
            "tau": tau,
            "evaluation": evaluation,
            "files": sizes(path),
        }
        write_json(self.record, values)
        for other in self.training.glob("best-*"):
            if other != path:
                shutil.rmtree(other)

    def read(self) -> KeptCheckpoint | None:
        if not self.record.is_file():
            return None
        found = read_json(self.record, "record of the best draft")
        path = self.training / found.pop("folder")
        return KeptCheckpoint(path=path, **found) if path.is_dir() else None

    def check(self, step: int) -> None:
        """Raises a `UserError` where the best draft until `step`, or a part of it, is lost."""
        found = self.read()
        if found is not None:
            reason = damage(found.path, found.files)
        else:
            # A kill leaves the folder of a later step without its record.
            kept = [int(path.name[5:]) for path in self.training.glob("best-[0-9]*")]
            lost = self.record.is_file() or any(one <= step for one in kept)
            reason = "its folder or its record is missing" if lost else None
        if reason:
            raise UserError(
                f"the best draft in {str(self.training)!r} cannot be read ({reason}); restore it, "
                f"or delete best-* and {self.record.name} there to go on without"
            )
