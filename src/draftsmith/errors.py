"""The one exception that users see as a sentence instead of a traceback, what others say, and
packages that are installed only where they are used, by extra."""

from __future__ import annotations

import importlib.util


class UserError(ValueError):
    """Bad input. The message is one sentence that names the offending value and the mend; the CLI
    prints it and exits 2."""


def first_line(error: BaseException) -> str:
    """First line of what an error says; its type where it says nothing."""
    return str(error).strip().split("\n")[0].rstrip(" \r.;") or type(error).__name__


RECORDS = ("pyarrow", "fsspec", "httpx", "prometheus_client")
# Packages, by import name, that a command of the extra cannot begin without.
NEEDED = {
    "serve": ("fastapi", "uvicorn", *RECORDS),
    "train": ("accelerate", "datasets", *RECORDS),
    "fleet": ("pyarrow", "fsspec"),
}
# Packages that are imported only where an option needs them.
OPTIONAL = {
    "serve": ("starlette", "pydantic", "scipy"),
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
