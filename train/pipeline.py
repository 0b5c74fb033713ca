"""Stages in order, each a process of its own: a kill of the run or of a stage costs what the
command itself would lose, and memory is given back between stages. The report has their times, and
the acceptance that evaluations found."""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.files import (
    Signature,
    markdown_table,
    plain,
    read_json,
    signature,
    with_interval,
    write_json,
    write_page,
    write_text,
)
from draftsmith.lock import folder_lock, note_holder, on_signals
from draftsmith.progress import duration
from draftsmith.train.data.folders import folders_of
from draftsmith.train.stages import Stage

SCHEMA_VERSION = 1
STOP_S = 600.0  # for a stage that saves its work when it is stopped
# Options, or last parts of nested ones, that name what a stage reads, a folder with all in it.
INPUTS = ("target", "prompts", "data", "draft", "init", "deepspeed")
NEW, RESUMED, ANEW, KEPT = "new", "resumed", "anew, its options or what it reads changed", "kept"


@dataclass
class Done:
    """Record of a stage in `run.json`."""

    # its command, when each stage that it reads finished, and the state of files from elsewhere
    made_of: dict[str, Any]
    begun: int = 0  # starts of the stage, those after a kill included
    seconds: float = 0.0  # of starts that came to an end
    finished: float | None = None  # time.time()
    status: int | None = None  # exit status of the last start; None while it runs, and after a kill


Record = dict[str, Done]  # by stage


def read_record(out: Path) -> Record:
    path = out / "run.json"
    if not path.is_file():
        return {}
    values = read_json(path, "record of the pipeline")
    if values.get("schema") != SCHEMA_VERSION:
        raise UserError(
            f"record {str(path)!r} is of schema {values.get('schema')!r} and this version reads "
            f"{SCHEMA_VERSION}; give another --out"
        )
    return {name: Done(**one) for name, one in values["stages"].items()}


def write_record(record: Record, out: Path) -> None:
    stages = {name: asdict(one) for name, one in record.items()}
    write_json(out / "run.json", {"schema": SCHEMA_VERSION, "stages": stages})


def made_of(stage: Stage, record: Record) -> dict[str, Any]:
    return {
        "words": [*stage.launch, *replace(stage, options=stage.recorded).words()],
        "needs": {name: record[name].finished if name in record else None for name in stage.needs},
        "files": plain(dict(files_of(stage.recorded))),
    }


def files_of(value: Any, name: str = "") -> Iterator[tuple[str, Signature]]:
    """(path, state) of the files and folders outside the pipeline that options name; models of the
    Hub are known by their names alone."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from files_of(item, key)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from files_of(item, name)
    elif isinstance(value, str) and name in INPUTS and "${" not in value:
        path = Path(folders_of(value)[0].path if name == "data" else value)
        if os.path.isdir(path):
            yield str(path), signature(path, "**/*")
        elif os.path.exists(path):
            yield str(path), signature(path.parent, glob.escape(path.name))


def decide(stage: Stage, record: Record, now: dict[str, Any]) -> str:
    done = record.get(stage.name)
    if done is None:
        return NEW
    if done.made_of != now and stage.command != "distill":
        return ANEW
    # A learner goes on with what was recorded meanwhile.
    is_whole = done.finished is not None and stage.command != "distill"
    return KEPT if is_whole and (stage.result is None or stage.result.exists()) else RESUMED


def show(stages: list[Stage], out: Path) -> None:
    """Prints every command, and what a run would do with it now."""
    record = read_record(out)
    for stage in stages:
        decision = decide(stage, record, made_of(stage, record))
        if decision != KEPT:
            record.pop(stage.name, None)
        print(f"# {stage.name}: {decision}\n{stage.shown()}")


def run_stages(stages: list[Stage], out: Path, title: str) -> None:
    """Runs what is not finished, and writes the report after every stage.

    Raises:
        UserError: a stage failed; those before it are kept.
    """
    # SIGTERM ends the run as Ctrl-C does, the running stage first.
    with folder_lock(out, "run") as lock, on_signals(interrupt, signal.SIGTERM):
        record = read_record(out)
        for place, stage in enumerate(stages, start=1):
            now = made_of(stage, record)
            decision = decide(stage, record, now)
            print(f"[{place}/{len(stages)}] {stage.name}: {decision}", flush=True)
            if decision == KEPT:
                continue
            print(f"  $ {stage.shown()}", flush=True)
            if decision == ANEW:
                put_away(stage, out)
                del record[stage.name]
            done = record.setdefault(stage.name, Done(now))
            done.made_of, done.begun = now, done.begun + 1
            done.finished = done.status = None
            write_record(record, out)
            try:
                run_stage(stage, record, out, lock)
            finally:
                write_report(stages, record, out, title)
        write_report(stages, record, out, title)
    print(f"report: {out / 'report.html'}, and as text {out / 'report.md'}")


def put_away(stage: Stage, out: Path) -> None:
    """Moves the result of other options to `replaced/`, where it may be deleted."""
    if stage.result is None or not stage.result.exists():
        return
    folder = out / "replaced"
    folder.mkdir(exist_ok=True)
    places = (folder / f"{stage.name}-{number}{stage.result.suffix}" for number in count(1))
    place = next(place for place in places if not place.exists())
    shutil.move(stage.result, place)
    print(f"  the earlier result is in {place}", flush=True)


def run_stage(stage: Stage, record: Record, out: Path, lock: int) -> None:
    done, begun_s = record[stage.name], time.monotonic()
    log = out / "logs" / f"{stage.name}.log"
    log.parent.mkdir(exist_ok=True)
    status, last = run_process(stage.process(), stage.environment(), log, lock)
    done.seconds += time.monotonic() - begun_s
    done.status = status
    done.finished = time.time() if status == 0 else None
    write_record(record, out)
    if status == 0:
        print(f"  took {duration(done.seconds)}", flush=True)
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


def interrupt() -> None:
    raise KeyboardInterrupt


STAGES = ("stage", "command", "state", "time", "result")
FIGURES = ("stage", "draft", "data", "T", "k", "tau", "MBSU", "alpha_1, ...")


def write_report(stages: Sequence[Stage], record: Record, out: Path, title: str) -> None:
    rows = [stage_row(stage, record.get(stage.name), out) for stage in stages]
    lines = [f"# {title}", "", *markdown_table(STAGES, rows), ""]
    figures = [
        figures_row(stage, found)
        for stage in stages
        if stage.command == "eval" and stage.result is not None and stage.result.is_file()
        for found in read_json(stage.result, f"result of stage {stage.name!r}")["evaluation"]
    ]
    if figures:
        lines += ["## Acceptance", "", *markdown_table(FIGURES, figures), ""]
    write_text(out / "report.md", "\n".join(lines))
    commands = "\n".join(stage.shown() for stage in stages)
    curves = [stage.result / "curves.png" for stage in stages if stage.result is not None]
    write_page(out / "report.html", title, commands, "\n".join(lines[1:]), curves)


def stage_row(stage: Stage, one: Done | None, out: Path) -> tuple[str, ...]:
    result = "-" if stage.result is None else f"`{stage.result.relative_to(out)}`"
    if one is None:
        return (stage.name, stage.command, "not begun", "-", result)
    ended = f"ended with status {one.status}" if one.status else "not finished"
    state = ended if one.finished is None else "finished"
    state += f", start {one.begun}" if one.begun > 1 else ""
    return (stage.name, stage.command, state, duration(one.seconds), result)


def figures_row(stage: Stage, found: dict[str, Any]) -> tuple[str, ...]:
    """Figures of a draft, data and temperature; results of stages by their names."""
    tau, read = found["tau"], stage.recorded
    several = read["data"] if isinstance(read["data"], list) else [read["data"]]
    return (
        stage.name,
        *(re.sub(r"[${}]", "", one) for one in (read["draft"], ", ".join(several))),
        f"{found['temperature']:g}",
        str(found["k"]),
        with_interval(**tau),
        "-" if found.get("mbsu") is None else f"{found['mbsu']:.2f}",
        " ".join("-" if one is None else f"{one['value']:.3f}" for one in found["alpha"]),
    )
