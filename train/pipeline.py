"""Stages in order, each a process of its own: a kill of the run or of a stage costs what the
command itself would lose, and memory is given back between stages. The report has their times, and
the acceptance that evaluations found."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

from draftsmith.client import with_key
from draftsmith.config import (
    build,
    merge,
    option,
    parse_override,
    parse_yaml,
    read_yaml,
    unknown_key,
)
from draftsmith.errors import UserError
from draftsmith.files import (
    Signature,
    markdown_table,
    plain,
    read_json,
    signature,
    write_json,
    write_text,
)
from draftsmith.lock import folder_lock, note_holder
from draftsmith.progress import duration
from draftsmith.train.data.folders import folders_of

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
    with folder_lock(out, "run") as lock, terminable():
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
    print(f"report: {out / 'report.md'}")


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
        f"{tau['value']:.2f} ({tau['low']:.2f}-{tau['high']:.2f})",
        "-" if found.get("mbsu") is None else f"{found['mbsu']:.2f}",
        " ".join("-" if one is None else f"{one['value']:.3f}" for one in found["alpha"]),
    )


NAME = re.compile(r"[a-z][a-z0-9_]*")
# Files and folders beside the results of stages.
RESERVED = ("logs", "replaced", "run", "report")
# Commands that end by themselves, and the option that names the result of each, which the pipeline
# sets; None: it only prints.
RESULTS = {
    "plan": None, "doctor": None, "generate": "out", "train": "out", "eval": "out", "bench": "out",
    "distill": "versions", "export": "out",
}  # fmt: skip
FILES = ("eval", "bench")  # whose result is a JSON file
# Neither printed nor recorded, nor a word of a command line, which every user of a machine may
# list.
SECRET = "api_key"


class CommandOptions(NamedTuple):
    """Options of one command: their dataclass, and a check that raises a `UserError` for values
    that no run could use."""

    config: type
    check: Callable[[Any], object]


OptionsOf = Callable[[str], CommandOptions]


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    name: str = option(help="name of the stage, and of its result for later ones")
    command: str = option(help="a command of draftsmith", choices=tuple(RESULTS))
    recipe: str | None = option(
        None, "a recipe of that command, from the pipeline's folder, under `options`"
    )
    launch: str | None = option(
        None, "a launcher such as torchrun --nproc_per_node 8, in place of one process"
    )
    options: dict = option(factory=dict, help="options of the command, as in its recipes")


@dataclass(frozen=True)
class Recipe:
    path: Path
    settings: dict[str, Any]
    stages: tuple[RecipeStage, ...]


@dataclass(frozen=True)
class Stage:
    """A stage whose names are replaced and whose options are checked."""

    name: str
    command: str
    launch: tuple[str, ...]
    options: dict[str, Any]
    # the same without a result, and `${name}` for those of others, so that a folder may be moved
    recorded: dict[str, Any]
    needs: tuple[str, ...]  # earlier stages whose results it reads
    positional: tuple[str, ...]  # options that the command takes without their names
    result: Path | None

    def words(self) -> list[str]:
        """Arguments of `draftsmith`, without secrets."""
        first = [str(self.options[name]) for name in self.positional if name in self.options]
        left_out = (*self.positional, SECRET)
        named = {name: value for name, value in self.options.items() if name not in left_out}
        return [self.command, *first, *assignments(named)]

    def process(self) -> list[str]:
        first = [program(self.launch[0]), *self.launch[1:]] if self.launch else [sys.executable]
        return [*first, "-m", "draftsmith.cli", *self.words()]

    def environment(self) -> dict[str, str]:
        """Environment of the process, which has the secret."""
        key = self.options.get(SECRET)
        return with_key(None if key is None else str(key))

    def shown(self) -> str:
        launch = [*self.launch, "-m", "draftsmith.cli"] if self.launch else ["draftsmith"]
        return shlex.join([*launch, *self.words()])


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe at `path` with the `key=value` of `--set`; a UserError names what is wrong."""
    values = read_yaml(path)
    for key in values:
        if key not in ("settings", "stages"):
            raise UserError(f"recipe {str(path)!r}: {unknown_key(key, ['settings', 'stages'])}")
    settings, listed = values.get("settings") or {}, values.get("stages") or []
    if not isinstance(settings, dict) or not isinstance(listed, list) or not listed:
        raise UserError(
            f"recipe {str(path)!r} has no list of stages; it needs a mapping 'settings' and a list "
            "'stages', each with name, command and options"
        )
    stages = [_stage(one, number, Path(path).parent) for number, one in enumerate(listed, start=1)]
    _check_names([*settings, *(stage.name for stage in stages)])
    for change in changes:
        settings, stages = _changed(settings, stages, change)
    return Recipe(Path(path), settings, tuple(stages))


def _stage(values: Any, number: int, folder: Path) -> RecipeStage:
    """A stage with the options of the command's recipe under its own."""
    if not isinstance(values, dict):
        raise UserError(
            f"stage {number} is {values!r}; it must be a mapping of name, command and options"
        )
    try:
        stage = build(RecipeStage, values)
        if stage.recipe is None:
            return stage
        return replace(stage, options=merge(read_yaml(folder / stage.recipe), stage.options))
    except UserError as error:
        raise UserError(f"stage {values.get('name', number)!r}: {error}") from error


def _check_names(names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        if not NAME.fullmatch(str(name)) or name in RESERVED:
            raise UserError(
                f"{name!r} cannot name a setting or stage; use lower-case letters, digits and _, "
                f"and not {', '.join(RESERVED)}"
            )
        if name in names[:at]:
            raise UserError(f"{name!r} names two settings or stages; rename one of them")


def _changed(
    settings: dict[str, Any], stages: list[RecipeStage], change: str
) -> tuple[dict[str, Any], list[RecipeStage]]:
    ((name, value),) = parse_override(change).items()
    if name in settings:
        return settings | {name: value}, stages
    names = [stage.name for stage in stages]
    if name not in names:
        problem = unknown_key(name, [*settings, *names]).replace("option", "setting or stage")
        raise UserError(f"--set {change}: {problem}")
    if not isinstance(value, dict):
        raise UserError(f"--set {change} names a stage; write {name}.OPTION=VALUE")
    return settings, [
        replace(one, options=merge(one.options, value)) if one.name == name else one
        for one in stages
    ]


def resolve(recipe: Recipe, out: Path, options_of: OptionsOf) -> list[Stage]:
    """Every stage of the recipe, checked before the first one starts.

    Raises:
        UserError: names the stage, the option and the mend.
    """
    stages: list[Stage] = []
    for one in recipe.stages:
        results = {stage.name: str(stage.result) for stage in stages if stage.result is not None}
        try:
            stages.append(_resolved(one, recipe.settings, results, out, options_of(one.command)))
        except UserError as error:
            raise UserError(f"stage {one.name!r} ({one.command}): {error}") from error
    return stages


def _resolved(
    one: RecipeStage,
    settings: Mapping[str, Any],
    results: Mapping[str, str],
    out: Path,
    known: CommandOptions,
) -> Stage:
    names_result = RESULTS[one.command]
    result = None
    options = substitute(one.options, {**settings, **results})
    if names_result is not None:
        result = out / f"{one.name}{'.json' if one.command in FILES else ''}"
        if names_result in options:
            raise UserError(
                f"option {names_result!r} is given, and a pipeline decides it: {result}; remove it"
            )
        options[names_result] = str(result)
    if one.command == "distill" and not {"until_idle_s", "max_updates"} & options.keys():
        raise UserError("distill would never end; give until_idle_s or max_updates")
    launch = tuple(_words(str(substitute(one.launch or "", settings))))
    known.check(build(known.config, options))
    if launch:
        program(launch[0])
    positional = tuple(
        field.name for field in dataclasses.fields(known.config) if field.metadata.get("positional")
    )
    needs = tuple(dict.fromkeys(name for name in _names_in(one.options) if name in results))
    recorded = substitute(one.options, {**settings, **{name: f"${{{name}}}" for name in results}})
    return Stage(one.name, one.command, launch, options, recorded, needs, positional, result)


def _words(launch: str) -> list[str]:
    try:
        return shlex.split(launch)
    except ValueError as error:
        raise UserError(f"launch is {launch!r} ({error}); mend its quotes") from error


def substitute(value: Any, names: Mapping[str, Any]) -> Any:
    """`value` with names replaced, in nested mappings and lists too. Text that is one name alone
    becomes its value, a number or list included.

    Raises:
        UserError: a name is no setting or earlier stage, or has no value.
    """
    if isinstance(value, dict):
        return {key: substitute(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [substitute(item, names) for item in value]
    if not isinstance(value, str):
        return value
    found = list(_names_in(value))
    for name in found:
        if name not in names:
            problem = unknown_key(name, list(names)).replace("option", "name")
            raise UserError(f"{value!r} is of no setting or earlier stage: {problem}")
        if names[name] is None:
            raise UserError(f"setting {name!r} has no value; give --set {name}=VALUE")
    if len(found) == 1 and value in (f"${{{found[0]}}}", f"${found[0]}"):
        return names[found[0]]
    return Template(value).substitute(names)


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _names_in(item)
    if not isinstance(value, str):
        return
    for match in Template.pattern.finditer(value):
        if match["invalid"] is not None:
            raise UserError(f"{value!r} has a $ without a name; write $$ for a dollar sign")
        if name := match["named"] or match["braced"]:
            yield name


def assignments(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`a.b=c` of every option, which every command reads as YAML."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from assignments(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_written(value)}"


def _written(value: Any) -> str:
    """YAML of one line that is read as `value` again."""
    if isinstance(value, str) and value.strip() == value:
        try:
            if value and parse_yaml(value) == value:
                return value
        except yaml.YAMLError:
            pass
    return json.dumps(value, ensure_ascii=False)


def program(name: str) -> str:
    """Path of a launcher, which may lie beside our Python only."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if found is None:
        raise UserError(f"launcher {name!r} is not installed; install it or remove 'launch'")
    return found
