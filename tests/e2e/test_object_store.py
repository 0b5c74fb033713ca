"""A buffer in an S3 bucket: no rename, no append, no locks. The store is moto's server, the file
system s3fs. Versions of a fleet are kept by the same objects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

# In a process of its own, which alone sees s3fs.
STEPS = """
import dataclasses, os, subprocess, sys, time
import fsspec
from draftsmith.distill.buffer.folder import unread_bytes
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.buffer.folder import ShardFolder, is_unread, retain
from draftsmith.distill.buffer.folder import forget
from tests.round_records import Distribution, logged
from draftsmith.record import RoundRecord, hashed

URL = "s3://traffic/served"
BASE = RoundRecord(
    "", target="t", target_revision="rev", draft_version="1", round=0, time_s=1.0, position=2,
    context=[5, 6], drafted=[7], accepted=1, committed=[7, 8], emitted=8, last=True,
    p=logged(Distribution([7, 9], [-0.1, -3.0], 0.05)), q=logged(Distribution([7], [0.0], 0.0)),
)

def put(writer, answer, count):
    for number in range(count):
        writer.put(dataclasses.replace(BASE, request=hashed(f"{answer}-{number}")))

def eventually(holds):
    deadline_s = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert holds()

if sys.argv[1:] == ["killed"]:
    writer = BufferWriter(URL, flush_s=0.02, flush_records=10)
    for wave in range(10**6):
        put(writer, f"cmpl-{os.getpid()}-{wave}", 10)
        time.sleep(0.01)
        print(writer.written, flush=True)

fsspec.filesystem("s3").mkdir("traffic")
reader, late = BufferReader(URL), BufferReader(URL)
assert reader.read().records == []
writers = [BufferWriter(URL, flush_s=0.05) for _ in range(3)]
for wave in range(4):
    for index, writer in enumerate(writers):
        put(writer, f"cmpl-{index}-{wave}", 20)
    eventually(lambda: sum(writer.written for writer in writers) == 60 * (wave + 1))
    assert len(reader.read().records) == 60, "what is there is seen at once, and once"
assert len(late.read(max_records=10**6).records) == 240

# Forgotten: shards are put again in place; marks are seen by writers and readers.
folder = ShardFolder(URL)
assert forget(folder, "cmpl-1-2", settle_s=0.0) == 20 and forget(folder, "cmpl-1-2", settle_s=0.0) == 0
assert len(BufferReader(URL).read(max_records=10**6).records) == 220
assert unread_bytes(folder, folder.names()) >= 0 and any(name.startswith("reader-") for name in folder.names())

# Retention: read ones first, and unread ones only for room.
kept = retain(folder, reader.cursor, max_bytes=1 << 30, max_age_s=-1)
assert kept and not any(is_unread(shard, reader.cursor) for shard in kept) and folder.shards() == []
for writer in writers:
    writer.close()

# Killed while it puts: a shard is whole or absent.
for _ in range(3):
    server = subprocess.Popen([sys.executable, __file__, "killed"], stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if int(line) >= 100:
            break
    server.kill(), server.wait()
reading = reader.read(max_records=10**6)
names = [record.request for record in reading.records]
assert reading.damaged == 0 and len(names) == len(set(names)) >= 300, (reading.damaged, len(names))
print("held")
"""


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """What a process needs in its environment to find the bucket."""
    home = Path(os.environ["DRAFTSMITH_CLIENTS"]) / "moto"
    port = free_port()
    with subprocess.Popen(
        [home / "bin/moto_server", "-p", str(port)], stderr=subprocess.DEVNULL
    ) as server:
        wait_until(lambda: listens(port), 60)
        (packages,) = home.glob("lib/python*/site-packages")
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        yield {"PYTHONPATH": f"{packages}:{Path(__file__).parents[2]}", **keys, **place}
        server.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_buffer_holds_its_promises_in_a_bucket(store: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    done = subprocess.run(
        [sys.executable, script], env=os.environ | store, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("held\n"), done.stdout + done.stderr
