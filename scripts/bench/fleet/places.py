"""Places of a fleet's versions and records: a folder, or a bucket of moto's S3 server. Both can
be away for some seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from scripts.bench.fleet.door import Door, free_port, leads


class Place(Protocol):
    """`path` is a folder on the import path of processes that use it, "" for none."""

    path: str

    def url(self, name: str) -> str: ...

    def is_away(self) -> bool:
        """True while nothing can be read there."""
        ...

    def leave(self) -> None:
        """Be away: every call fails from now on."""

    def come_back(self) -> None: ...


class FolderPlace:
    """A link to a folder. While it is away the link leads to a file, so that nothing can be read or
    written through it, by no user."""

    def __init__(self, root: Path):
        self.path = ""
        self.link, self.there, self.away = root / "shared", root / "there", root / "away"
        self.there.mkdir()
        self.away.touch()
        self.come_back()

    def url(self, name: str) -> str:
        return str(self.link / name)

    def is_away(self) -> bool:
        return not self.link.is_dir()

    def leave(self) -> None:
        self._lead_to(self.away)

    def come_back(self) -> None:
        self._lead_to(self.there)

    def _lead_to(self, path: Path) -> None:
        new = self.link.with_name("shared.new")
        new.symlink_to(path)
        new.replace(self.link)


class BucketPlace:
    """A bucket behind a door. This process and those that it starts find the server, and s3fs,
    which is in moto's environment."""

    def __init__(self, door: Door, packages: Path, folder: Path):
        self.door = door
        # Of this run alone: its writers are found by it.
        self.bucket = f"fleet-{door.port}"
        later = folder / "s3"
        later.mkdir()
        # Behind an environment's own packages, none of which it replaces.
        (later / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(packages)!r})\n")
        self.path = str(later)
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([self.path, os.environ.get("PYTHONPATH", "")]),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{door.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        sys.path.append(str(packages))
        door.open()

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def is_away(self) -> bool:
        return not leads(self.door.port)

    def leave(self) -> None:
        self.door.shut()

    def come_back(self) -> None:
        self.door.open()


@contextmanager
def place_of(kind: str, folder: Path) -> Iterator[Place]:
    """A place of one kind, `folder` or `s3`, empty. The environment is as before afterwards."""
    if kind == "folder":
        yield FolderPlace(folder)
        return
    home = Path(os.environ.get("DRAFTSMITH_CLIENTS") or ".venv-clients") / "moto"
    if not (home / "bin" / "moto_server").exists():
        sys.exit(
            f"bench_fleet: {str(home)!r} has no moto_server; scripts/test --all makes it, or name "
            "the folder above it in DRAFTSMITH_CLIENTS"
        )
    port, before, path = free_port(), dict(os.environ), list(sys.path)
    command = [str(home / "bin" / "moto_server"), "-p", str(port)]
    with (
        (folder / "moto.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            wait_for_port(port, server)
            (packages,) = home.glob("lib/python*/site-packages")
            place = BucketPlace(Door(port), packages.resolve(), folder)
            import fsspec

            bucket = fsspec.filesystem("s3")
            # One of an earlier place leads to another port.
            bucket.clear_instance_cache()
            fsspec.filesystem("s3").mkdir(place.bucket)
            yield place
            place.door.close()
        finally:
            server.kill()
            os.environ.clear()
            os.environ.update(before)
            sys.path[:] = path


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        if leads(port):
            return
        time.sleep(0.1)
    sys.exit("bench_fleet: moto_server did not start")
