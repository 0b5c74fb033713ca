"""`draftsmith run`: the stages of a recipe in order, each a command in a process of its own. All
are checked before the first one starts; a kill costs what the command itself would lose. The report
has what ran, the times, and the acceptance that evaluations found."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from draftsmith.client import with_key
from draftsmith.commands.table import COMMANDS, load
from draftsmith.config import (
    SECRET,
    build,
    command_words,
    merge,
    option,
    parse_override,
    read_yaml,
    shipped,
    unknown_key,
)
from draftsmith.errors import UserError, check_extra
from draftsmith.files import (
    markdown_table,
    plain,
    read_json,
    with_interval,
    write_json,
    write_page,
    write_text,
)
from draftsmith.lock import folder_lock, on_signals
from draftsmith.progress import duration
from draftsmith.train.config import RunConfig

SCHEMA_VERSION = 1
NAME = re.compile(r"[a-z][a-z0-9_]*")
RESERVED = ("replaced", "run", "report")  # files and folders beside the results of stages
# Commands that end by themselves, and the option that names the result of each, which the pipeline
# sets; None: it only prints.
RESULTS = {
    "plan": None, "doctor": None, "generate": "out", "train": "out", "eval": "out", "bench": "out",
    "distill": "versions", "export": "out",
}  # fmt: skip
FILES = ("eval", "bench")  # whose result is a JSON file
NEW, RESUMED, ANEW, KEPT = "new", "resumed", "anew, its options or what it reads changed", "kept"
STAGES = ("stage", "command", "state", "time", "result")
FIGURES = ("stage", "T", "k", "tau", "alpha_1, ...")


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    name: str  # of its result for later stages, too
    command: str = option(choices=tuple(RESULTS))
    recipe: str | None = None  # of that command, from the pipeline's folder, under `options`
    launch: str = ""  # torchrun --nproc_per_node 8, say, in place of one process
    options: dict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    settings: dict = field(default_factory=dict)  # None: to be given
    stages: tuple[RecipeStage, ...] = ()


@dataclass(frozen=True)
class Stage:
    """A stage whose names are replaced and whose options are checked."""

    name: str
    command: str
    launch: list[str]
    config: Any  # of its command
    # options as given, with `${name}` for the results of others, so that a folder may be moved
    recorded: dict[str, Any]
    needs: list[str]  # earlier stages whose results it reads
    result: Path | None

    def shown(self) -> str:
        launch = [*self.launch, "-m", "draftsmith.cli"] if self.launch else ["draftsmith"]
        return shlex.join([*launch, *command_words(self.command, self.config)])


@dataclass
class Done:
    """Record of a stage in `run.json`."""

    made_of: dict[str, Any]  # its options, and when each stage that it reads finished
    seconds: float = 0.0  # of the last start
    finished: float | None = None  # time.time()
    status: int | None = None  # exit status of the last start; None while it runs, and after a kill


Record = dict[str, Done]  # by stage


def run(config: RunConfig) -> int:
    path = Path(config.recipe)
    out = Path(config.out or Path("runs") / path.stem)
    stages = read_stages(path, config.set, out)
    if config.dry_run:
        record = read_record(out)
        for stage in stages:
            decision = decide(stage, record)
            if decision != KEPT:
                record.pop(stage.name, None)
            print(f"# {stage.name}: {decision}\n{stage.shown()}")
        return 0
    # SIGTERM ends the run as Ctrl-C does, the running stage first.
    with folder_lock(out, "run"), on_signals(interrupt, signal.SIGTERM):
        run_stages(stages, out, path.stem)
    print(f"report: {out / 'report.html'}, and as text {out / 'report.md'}")
    return 0


def interrupt() -> None:
    raise KeyboardInterrupt


def read_stages(path: Path, changes: Sequence[str], out: Path) -> list[Stage]:
    """The stages of a recipe with the `key=value` of `--set`, all checked.

    Raises:
        UserError: names the stage, the option and the mend.
    """
    recipe = build(Pipeline, read_yaml(path))
    if not recipe.stages:
        raise UserError(
            f"recipe {str(path)!r} has no stages; give a list of them, each with name, command and "
            "options"
        )
    check_names([*recipe.settings, *(one.name for one in recipe.stages)])
    settings, own = dict(recipe.settings), {one.name: one.options for one in recipe.stages}
    for change in changes:
        ((name, value),) = parse_override(change).items()
        if name not in settings | own:
            problem = unknown_key(name, [*settings, *own]).replace("option", "setting or stage")
            raise UserError(f"--set {change}: {problem}")
        if name in settings:
            settings[name] = value
        elif isinstance(value, dict):
            own[name] = merge(own[name], value)
        else:
            raise UserError(f"--set {change} names a stage; write {name}.OPTION=VALUE")
    stages: list[Stage] = []
    for one in recipe.stages:
        try:
            base = {} if one.recipe is None else read_yaml(shipped(path).parent / one.recipe)
            stages.append(checked(one, merge(base, own[one.name]), settings, stages, out))
        except UserError as error:
            raise UserError(f"stage {one.name!r} ({one.command}): {error}") from error
    return stages


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(str(name)) or name in RESERVED or names.count(name) > 1:
            raise UserError(
                f"{name!r} cannot name a setting or stage; use lower-case letters, digits and _, "
                f"each name once and none of {', '.join(RESERVED)}"
            )


def checked(
    one: RecipeStage,
    given: dict[str, Any],
    settings: Mapping[str, Any],
    before: Sequence[Stage],
    out: Path,
) -> Stage:
    """A stage of its `given` options, as far as these can be checked before it starts."""
    results = {stage.name: str(stage.result) for stage in before if stage.result is not None}
    names_result, result = RESULTS[one.command], None
    options = substitute(given, {**settings, **results})
    if names_result is not None:
        result = out / f"{one.name}{'.json' if one.command in FILES else ''}"
        if names_result in options:
            raise UserError(
                f"option {names_result!r} is given, and a pipeline decides it: {result}; remove it"
            )
        options[names_result] = str(result)
    if one.command == "distill" and not {"until_idle_s", "max_updates"} & options.keys():
        raise UserError("distill would never end; give until_idle_s or max_updates")
    launch = str(substitute(one.launch, settings)).split()
    if launch:
        program(launch[0])
    recorded = substitute(given, {**settings, **{name: f"${{{name}}}" for name in results}})
    needs = [name for name in results if f"${{{name}}}" in str(recorded)]
    config = config_of(one.command, options)
    return Stage(one.name, one.command, launch, config, recorded, needs, result)


def config_of(name: str, options: dict[str, Any]) -> Any:
    """Options of a command, after the check that it makes of them before it begins."""
    command = COMMANDS[name]
    check_extra(name, command.extra)
    config = build(load(command.config), options)
    if command.check:
        load(command.check)(config)
    return config


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
    given = {name: one for name, one in names.items() if one is not None}
    try:
        text = Template(value).substitute(given)
    except KeyError as error:
        name = str(error.args[0])
        if name in names:
            raise UserError(f"setting {name!r} has no value; give --set {name}=VALUE") from error
        problem = unknown_key(name, list(names)).replace("option", "name")
        raise UserError(f"{value!r} is of no setting or earlier stage: {problem}") from error
    except ValueError as error:
        raise UserError(f"{value!r} has a $ without a name; write $$ for a dollar sign") from error
    alone = Template.pattern.fullmatch(value)
    return given.get(alone["named"] or alone["braced"], text) if alone else text


def program(name: str) -> str:
    """Path of a launcher, which may lie beside our Python only."""
    found = shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)
    if found is None:
        raise UserError(f"launcher {name!r} is not installed; install it or remove 'launch'")
    return found


def read_record(out: Path) -> Record:
    path = out / "run.json"
    if not path.is_file():
        return {}
    values = read_json(path, "record of the pipeline")
    try:
        if values["schema"] == SCHEMA_VERSION:
            return {name: Done(**one) for name, one in values["stages"].items()}
    except (AttributeError, KeyError, TypeError):
        pass
    raise UserError(
        f"record {str(path)!r} is not one that this version reads (schema {SCHEMA_VERSION}); give "
        "another --out"
    )


def write_record(record: Record, out: Path) -> None:
    stages = {name: asdict(one) for name, one in record.items()}
    write_json(out / "run.json", {"schema": SCHEMA_VERSION, "stages": stages})


def made_of(stage: Stage, record: Record) -> dict[str, Any]:
    options = {name: value for name, value in stage.recorded.items() if name != SECRET}
    needs = {name: record[name].finished if name in record else None for name in stage.needs}
    command = [*stage.launch, stage.command]
    return plain({"command": command, "options": options, "needs": needs})


def decide(stage: Stage, record: Record) -> str:
    done = record.get(stage.name)
    if done is None:
        return NEW
    if stage.command == "distill":
        return RESUMED  # a learner goes on with what was recorded meanwhile
    if done.made_of != made_of(stage, record):
        return ANEW
    is_there = stage.result is None or stage.result.exists()
    return KEPT if done.finished is not None and is_there else RESUMED


def run_stages(stages: Sequence[Stage], out: Path, title: str) -> None:
    """Runs what is not finished, and writes the report after every stage.

    Raises:
        UserError: a stage failed; those before it are kept.
    """
    record = read_record(out)
    for place, stage in enumerate(stages, start=1):
        decision = decide(stage, record)
        print(f"[{place}/{len(stages)}] {stage.name}: {decision}", flush=True)
        if decision == KEPT:
            continue
        print(f"  $ {stage.shown()}", flush=True)
        if decision == ANEW and stage.result is not None and stage.result.exists():
            put_away(stage.result, out / "replaced")
        done = record[stage.name] = Done(made_of(stage, record))
        write_record(record, out)
        try:
            run_stage(stage, done)
        finally:
            write_record(record, out)
            write_report(stages, record, out, title)
    write_report(stages, record, out, title)


def put_away(result: Path, folder: Path) -> None:
    """Moves a result of other options to where it may be deleted."""
    folder.mkdir(exist_ok=True)
    place = folder / f"{result.stem}-{time.time_ns()}{result.suffix}"
    shutil.move(result, place)
    print(f"  the earlier result is in {place}", flush=True)


def run_stage(stage: Stage, done: Done) -> None:
    """Raises `UserError` where the stage fails."""
    begun_s = time.monotonic()
    launch = [program(stage.launch[0]), *stage.launch[1:]] if stage.launch else [sys.executable]
    words = [*launch, "-m", "draftsmith.cli", *command_words(stage.command, stage.config)]
    process = subprocess.Popen(words, env=with_key(getattr(stage.config, SECRET, None)))
    try:
        status = done.status = process.wait()
    finally:
        # One that still runs saves its work first.
        process.terminate()
        process.wait()
    done.seconds = time.monotonic() - begun_s
    if status != 0:
        ended = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
        raise UserError(
            f"stage {stage.name!r} ({stage.command}) {ended}, its last lines are above; mend that "
            "and run the same command again"
        )
    done.finished = time.time()
    print(f"  took {duration(done.seconds)}", flush=True)


def write_report(stages: Sequence[Stage], record: Record, out: Path, title: str) -> None:
    rows = [stage_row(stage, record.get(stage.name), out) for stage in stages]
    lines = [f"# {title}", "", *markdown_table(STAGES, rows), ""]
    figures = [
        figures_row(stage.name, found)
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
    return (stage.name, stage.command, state, duration(one.seconds), result)


def figures_row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Figures of one temperature."""
    return (
        name,
        f"{found['temperature']:g}",
        str(found["k"]),
        with_interval(**found["tau"]),
        " ".join("-" if one is None else f"{one['value']:.3f}" for one in found["alpha"]),
    )
