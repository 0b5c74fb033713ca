"""Packages that are installed only where they are used, by extra, and the error of a command that
lacks one."""

from __future__ import annotations

import importlib.util

from draftsmith.errors import UserError

RECORDS = ("pyarrow", "fsspec", "httpx", "prometheus_client")
# Packages, by import name, that a command of the extra cannot begin without.
NEEDED = {
    "serve": ("fastapi", "uvicorn", *RECORDS),
    "train": ("accelerate", "datasets", *RECORDS),
    "fleet": ("pyarrow", "fsspec"),
}
# Packages that are imported only where an option needs them.
OPTIONAL = {
    "serve": ("starlette", "pydantic"),
    "train": ("peft", "deepspeed", "matplotlib"),
    "grammar": ("llguidance",),
    "gguf": ("gguf",),
    "openvino": ("openvino", "openvino_genai", "openvino_tokenizers"),
}


def check_extra(command: str, extra: str | None) -> None:
    """Check that the packages of `extra` which `command` needs are installed; nothing is imported.

    Raises:
        UserError: a package is missing."""
    for package in NEEDED.get(extra or "", ()):
        if importlib.util.find_spec(package) is None:
            raise missing(command, package, extra or "")


def missing(command: str, package: str, extra: str) -> UserError:
    return UserError(
        f"{command} needs {package}, which is not installed; pip install 'draftsmith[{extra}]'"
    )


def extra_of(module: str | None) -> str | None:
    """Extra that installs `module`, the dotted name of a module that was not found; None where no
    extra does."""
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
