"""The parts that are installed only where they are used, and the sentence for a command that lacks
one."""

from __future__ import annotations

import importlib.util

from draftsmith.errors import UserError

RECORDS = ("pyarrow", "fsspec", "httpx", "prometheus_client")
# What a command of the extra cannot begin without, as it is imported.
NEEDED = {"serve": ("fastapi", "uvicorn", *RECORDS), "train": ("accelerate", "datasets", *RECORDS)}
# What is imported on the way, where an option asks for it.
OPTIONAL = {
    "serve": ("starlette", "pydantic"),
    "train": ("peft", "deepspeed", "matplotlib"),
    "grammar": ("llguidance",),
}


def check_extra(command: str, extra: str | None) -> None:
    """A `UserError` where a package that `extra` brings and `command` needs is missing. Nothing is
    imported."""
    for package in NEEDED.get(extra or "", ()):
        if importlib.util.find_spec(package) is None:
            raise missing(command, package, extra or "")


def missing(command: str, package: str, extra: str) -> UserError:
    return UserError(
        f"{command} needs {package}, which is not installed; pip install 'draftsmith[{extra}]'"
    )


def extra_of(module: str | None) -> str | None:
    """The extra that brings `module`, the dotted name of one that was not found; None for one that
    no extra brings."""
    package = (module or "").split(".")[0]
    return next(
        (
            extra
            for table in (NEEDED, OPTIONAL)
            for extra, names in table.items()
            if package in names
        ),
        None,
    )
