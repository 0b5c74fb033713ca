"""An engine of others: its name in records and status files, options of one request, and the log of
everything that runs inside its processes."""

from __future__ import annotations

import functools
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("draftsmith.fleet")
_logged: set[str] = set()
DEFAULT_PORT = 8000
FALSE = ("false", "off", "no", "0")


def once(sentence: str, level: int = logging.WARNING) -> None:
    """Log a sentence the first time in this process, and never again."""
    if sentence not in _logged:
        _logged.add(sentence)
        logger.log(level, "draftsmith: %s", sentence)


def engine_name(name: str, port: int, replica: int = 0) -> str:
    """`name`, else host name and port; data-parallel replicas behind one port get their number.

    Characters other than letters, digits, dots and dashes become dashes, since the name is part of
    file names."""
    full = name or f"{socket.gethostname()}-{port}"
    return re.sub(r"[^A-Za-z0-9.-]+", "-", f"{full}-{replica}" if replica else full)


def port_of(arguments: Sequence[str]) -> int:
    """Port in the command line of a server, which its worker processes have as well."""
    for option, value in zip(arguments, [*arguments[1:], ""]):
        name, _, joined = option.partition("=")
        if name == "--port" and (joined or value).isdigit():
            return int(joined or value)
    return DEFAULT_PORT


def replica_in(parallel: Any) -> int:
    """Number of a worker's data-parallel replica in its parallel configuration. Its rank is 0 in
    all replicas of a dense target."""
    rank = getattr(parallel, "data_parallel_rank", 0)
    return int(getattr(parallel, "data_parallel_index", rank) or 0)


Act = Callable[..., None] | None


def around(
    owner: Any, name: str, *, before: Act = None, after: Act = None, failed: Act = None
) -> None:
    """Let calls of a method of one object or class, where it has it, be surrounded by acts, which
    get its arguments. Their errors are logged and do not reach the engine. A repeated call changes
    nothing."""
    method = getattr(owner, name, None)
    if not callable(method) or hasattr(method, "draftsmith"):
        return

    @functools.wraps(method)
    def extended(*args: Any, **kwargs: Any) -> Any:
        quietly(before, *args, **kwargs)
        try:
            result = method(*args, **kwargs)
        except BaseException:
            quietly(failed, *args, **kwargs)
            raise
        quietly(after, *args, **kwargs)
        return result

    extended.draftsmith = True  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def quietly(act: Act, *args: Any, **kwargs: Any) -> None:
    try:
        if act is not None:
            act(*args, **kwargs)
    except Exception:
        logger.exception("draftsmith: the engine goes on without it")


@dataclass(frozen=True)
class EngineRequestOptions:
    """Options of one request that a client sends beside its sampling parameters.

    In vLLM they stand in `vllm_xargs`: `{"draftsmith_record": false, "draftsmith_class": "code",
    "draftsmith_share": 0.1}`. A value of the wrong type is no reason to refuse a request: the
    request is not recorded.
    """

    record: bool = True
    request_class: str = ""
    share: float | None = None  # None: the engine's own share


def request_options(extra: Mapping[str, Any] | None) -> EngineRequestOptions:
    """Options among the free arguments of a request."""
    given = extra or {}
    record, share = given.get("draftsmith_record", True), given.get("draftsmith_share")
    if isinstance(record, str):
        record = record.strip().lower() not in FALSE
    try:
        number = None if share is None else float(share)
    except (OverflowError, TypeError, ValueError):
        return EngineRequestOptions(record=False)
    if number is not None and not 0 <= number <= 1:
        return EngineRequestOptions(record=False)
    return EngineRequestOptions(bool(record), str(given.get("draftsmith_class", "")), number)
