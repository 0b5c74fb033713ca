"""Stages in order, each a process of its own: a kill of the run or of a stage costs what the
command itself would lose, and memory is given back between stages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.errors import UserError
from draftsmith.lock import folder_lock, note_holder
from draftsmith.progress import duration
from draftsmith.train.pipeline.changes import Made, difference, made_of
from draftsmith.train.pipeline.record import Record, StageRecord
from draftsmith.train.pipeline.report import write_report
from draftsmith.train.pipeline.stage import Stage

STOP_S = 600.0  # for a stage that saves its work when it is stopped


class Decision(NamedTuple):
    """Treatment of a stage by a run. `anew`: its earlier result is moved away first."""

    words: str
    is_kept: bool = False
    anew: bool = False


def decide(stage: Stage, record: StageRecord | None, now: Made) -> Decision:
    if record is None:
        return Decision("new")
    changed = difference(now, record.made_of)
    if changed is not None:
        if stage.kind().goes_on:
            return Decision(f"goes on, {changed}")
        return Decision(f"anew, {changed}", anew=True)
    if record.finished is None:
        return Decision("resumed")
    if stage.result is not None and not stage.result.exists():
        return Decision("again, its result is gone")
    return Decision("kept", is_kept=True)


def show(stages: list[Stage], out: Path) -> None:
    """Prints every command, and what a run would do with it now."""
    record = Record.read(out)
    finished = record.finished()
    for stage in stages:
        made = made_of(stage, finished)
        decision = decide(stage, record.stages.get(stage.name), made)
        if not decision.is_kept:
            finished.pop(stage.name, None)
        print(f"# {stage.name}: {decision.words}")
        print(stage.shown())


def run_stages(stages: list[Stage], out: Path, title: str) -> None:
    """Runs what is not finished, and writes the report after every stage.

    Raises:
        UserError: a stage failed; those before it are kept.
    """
    with folder_lock(out, "run") as lock, terminable():
        record = Record.read(out)
        for place, stage in enumerate(stages, start=1):
            label = f"[{place}/{len(stages)}] {stage.name}"
            made = made_of(stage, record.finished())
            decision = decide(stage, record.stages.get(stage.name), made)
            if decision.is_kept:
                print(f"{label}: kept", flush=True)
                continue
            print(f"{label}: {decision.words}\n  $ {stage.shown()}", flush=True)
            if decision.anew:
                put_away(stage, out)
            begin(record, stage, made, decision)
            try:
                run_stage(stage, record, out, lock)
            finally:
                write_report(stages, record, out, title)
        write_report(stages, record, out, title)
    print(f"report: {out / 'report.md'}")


def begin(record: Record, stage: Stage, made: Made, decision: Decision) -> None:
    before = record.stages.get(stage.name)
    if before is None or decision.anew:
        before = record.stages[stage.name] = StageRecord(made)
    before.made_of = made
    before.begun += 1
    before.finished = before.status = None
    record.write()


def put_away(stage: Stage, out: Path) -> None:
    """Moves the result of other options to `replaced/`, where it may be deleted."""
    if stage.result is None or not stage.result.exists():
        return
    folder = out / "replaced"
    folder.mkdir(exist_ok=True)
    places = (folder / f"{stage.name}-{number}{stage.kind().suffix}" for number in count(1))
    place = next(place for place in places if not place.exists())
    shutil.move(stage.result, place)
    print(f"  the earlier result is in {place}", flush=True)


def run_stage(stage: Stage, record: Record, out: Path, lock: int) -> None:
    one, begun_s = record.stages[stage.name], time.monotonic()
    log = out / "logs" / f"{stage.name}.log"
    log.parent.mkdir(exist_ok=True)
    status, last = run_process(stage.process(), stage.environment(), log, lock)
    one.seconds += time.monotonic() - begun_s
    one.status = status
    one.finished = time.time() if status == 0 else None
    record.write()
    if status == 0:
        print(f"  took {duration(one.seconds)}", flush=True)
        return
    ended = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
    raise UserError(
        f"stage {stage.name!r} ({stage.command}) {ended}: {last}; mend that and run the same "
        f"command again, its output is in {log}"
    )


def run_process(
    command: list[str], environment: Mapping[str, str], log: Path, lock: int
) -> tuple[int, str]:
    """Status and last line of a process whose output is shown and kept in `log`. A pipe, so that a
    process whose run was killed ends when it prints next."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        # As a user would see it: Python holds back what it prints into a pipe.
        env={**environment, "PYTHONUNBUFFERED": "1"},
    )
    note_holder(lock, process.pid)
    last = b""
    assert process.stdout is not None
    try:
        with open(log, "ab") as kept:
            for line in process.stdout:
                kept.write(line)
                kept.flush()
                sys.stdout.write("    " + line.decode(errors="replace"))
                sys.stdout.flush()
                last = line.strip() or last
        process.wait()
    finally:
        stop(process)
        note_holder(lock, os.getpid())
    words = last.decode(errors="replace").removeprefix("draftsmith: error: ")
    return process.returncode, words or "no output"


def stop(process: subprocess.Popen) -> None:
    """Ends a process that still runs, and waits for what it saves."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM end the run as Ctrl-C does, the running stage first."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
