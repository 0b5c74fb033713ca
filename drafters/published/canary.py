"""`VERSIONS/canary.json`: a version on trial, and the share of requests that servers draft for with
it. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from draftsmith import files
from draftsmith.errors import UserError

CANARY = "canary.json"


class Canary(NamedTuple):
    version: int
    share: float  # of the requests, above 0 and at most 1


def read_canary(root: str | Path) -> Canary | None:
    """Read the version on trial; None without one."""
    path = Path(root) / CANARY
    if not path.is_file():
        return None
    value = files.read_json(path, "the canary file")
    if set(value) == set(Canary._fields):
        version, share = value["version"], value["share"]
        if type(version) is int and version > 0 and type(share) in (int, float) and 0 < share <= 1:
            return Canary(version, float(share))
    raise UserError(
        f'{str(path)!r} holds {str(value)[:60]!r} instead of a trial such as {{"version": 7, '
        '"share": 0.1}; mend or delete it'
    )


def write_canary(root: str | Path, canary: Canary) -> None:
    files.write_json(Path(root) / CANARY, canary._asdict())


def remove_canary(root: str | Path) -> None:
    (Path(root) / CANARY).unlink(missing_ok=True)


def in_canary(request: str, share: float) -> bool:
    """Decided by the request alone, as records name it, and apart from the draw that decides
    whether it is recorded."""
    digest = hashlib.blake2b(request.encode(), digest_size=6, person=b"canary").digest()
    return int.from_bytes(digest, "big") < share * 2**48
