"""Name of an engine in records and status files."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Any

DEFAULT_PORT = 8000


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
