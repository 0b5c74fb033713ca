"""The `draftsmith` command. Torch-free until a command runs, so that `--help` answers at once."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load, start
from draftsmith.errors import UserError, first_line
from draftsmith.files import is_full
from draftsmith.progress import close_all, is_error, say, set_up_logging
from draftsmith.version import __version__

# Errors of a path that the user gave: a file where a folder has to be, one that is protected, or on
# a file system that is, or whose name is too long.
UNUSABLE = {
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENAMETOOLONG,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. A `UserError` is printed as one sentence and gives
    2. Without `argv` the process is the command's own, and takes its priority."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get("".join(words[:1]))
    saves = command is not None and command.saves
    nice = command.nice if argv is None and command is not None else 0
    try:
        try:
            with _given_way(nice) if nice else nullcontext():
                return _dispatch(words)
        finally:
            close_all()
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left, as `| head` does. Python would print another error while
        # flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except UserError as error:
        print(f"draftsmith: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if isinstance(error, RuntimeError) and (os.environ.get("WORLD_SIZE") or "1") != "1":
            # Late: torch is imported where it raised this.
            from draftsmith.drafters.target.sharded import end_if_lost

            end_if_lost(error, saves=saves)
        kept = "the run goes on from what it saved" if saves else "what was there before is kept"
        said = f"there is no room to write ({first_line(error)}); make some and start again: {kept}"
        if isinstance(error, OSError) and error.filename and error.errno in UNUSABLE:
            said = f"path {error.filename!r} cannot be used ({error.strerror}); give another"
        elif not is_full(error):
            raise
        print(f"draftsmith: error: {said}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "; what was finished is kept, run the same command to go on"
        print(f"draftsmith: interrupted{kept if saves else ''}", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"draftsmith {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise UserError(
            configuration.unknown_key(name, list(COMMANDS)).replace("option", "command")
        )
    cls = load(COMMANDS[name].config)
    parser = parser_for(name, cls)
    lines: list[str] = []  # to be said once the format of the log is known
    try:
        arguments = parse(parser, argv[1:], lines.append)
        config = configuration.build(cls, collect(cls, arguments, lines.append))
        if (form := getattr(config, "log_format", None)) is not None:
            set_up_logging(form)
    finally:
        for line in lines:
            say(line)
    # It says at import what it found, and accelerate imports it to save a model.
    logging.getLogger("DeepSpeed").addFilter(is_error)
    return start(name, config)


@contextmanager
def _given_way(by: int) -> Iterator[None]:
    """Lowers the priority of this process. Linux may share the cores out by session first (its
    autogroup): that of the session is lowered meanwhile, where it is this process's alone."""
    os.nice(by)
    group, before = Path("/proc/self/autogroup"), ""
    with suppress(OSError):  # another system, or none such
        if _has_session():
            before = group.read_text().split()[-1]
            group.write_text(str(by), encoding="ascii")
    try:
        yield
    finally:
        with suppress(OSError):
            if before:
                group.write_text(before, encoding="ascii")


def _has_session() -> bool:
    """True where nothing is in this process's session but what started it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == os.getsid(0):
                parents[int(path.parent.name)] = int(parent)
    process: int | None = os.getpid()
    while process is not None:
        process = parents.pop(process, None)
    return not parents


def overview() -> str:
    lines = ["usage: draftsmith COMMAND [options] [recipe.yaml] [key=value ...]", ""]
    lines += [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "draftsmith COMMAND --help lists the options of one command."])


if __name__ == "__main__":
    sys.exit(main())
