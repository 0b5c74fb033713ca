"""A buffer and a fleet's versions in an S3 bucket: no rename, no append, no locks. The store is
moto's server, the file system s3fs."""

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
from draftsmith.distill.buffer.folder import ShardFolder, retain
from draftsmith.distill.buffer.folder import forget
from draftsmith.record import Distribution, RoundRecord, hashed

URL = "s3://traffic/served"
BASE = RoundRecord(
    "", target="t", target_revision="rev", draft_version="1", round=0, time_s=1.0, position=2,
    context=[5, 6], drafted=[7], accepted=1, committed=[7, 8], emitted=8, last=True,
    p=[Distribution([7, 9], [-0.1, -3.0], 0.05)], q=[Distribution([7], [0.0], 0.0)],
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
assert kept.deleted and kept.unread == 0 and folder.shards() == []
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

FLEET = """
import subprocess, sys, time
from pathlib import Path
import fsspec
from draftsmith.drafters import versions
from draftsmith.fleet.store.mirror import LayoutWriter
from draftsmith.fleet.store.mirror import Mirror
from draftsmith.fleet.rollout.show import view_of
from draftsmith.fleet.store.layout import EngineStatus
from draftsmith.fleet.store.layout import StoreError, StoreUnreachable
from draftsmith.fleet.store.store import VersionStore

URL, HERE = "s3://drafts/llama", Path(__file__).parent
root = HERE / "versions"
mirror = lambda: Mirror(root, VersionStore(URL), LayoutWriter(root, []), keep=3)
if sys.argv[1:] == ["publisher"]:
    print("begins", flush=True)
    while True:
        mirror().step()

def learn(text):
    def save(folder):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(text * 1000)
    versions.publish(root, save, family="f", target={}, parent=versions.latest(root), data_range={}, gate={})

fsspec.filesystem("s3").mkdir("drafts")
store = VersionStore(URL, cache=HERE / "cache")
assert store.current() is None and store.wanted("a") is None and store.engines() == []
learn("one")
assert mirror().step() and not mirror().step()
assert (store.fetch(1) / "model.safetensors").read_text() == "one" * 1000

# Killed while it puts: what is current is whole.
for turn in range(3):
    publisher = subprocess.Popen([sys.executable, __file__, "publisher"], stdout=subprocess.PIPE, text=True)
    publisher.stdout.readline()
    for number in range(3):
        learn(f"{turn}{number}")
    time.sleep(0.05 * turn)
    publisher.kill(), publisher.wait()
    assert store.fetch(store.current())
mirror().step()
assert store.current() == versions.latest(root) == 10 and max(store.versions()) == 10
assert len(store.versions()) <= 5, store.versions()

# Overwritten, cut, gone: refused, and not for want of the store.
for data in (b"x" * len("22" * 1000), b"2", None):
    name = "v000010/model.safetensors"
    store.objects.put(name, data) if data else store.objects.delete(name)
    try:
        VersionStore(URL).fetch(10)
        raise SystemExit("it was taken")
    except StoreUnreachable:
        raise
    except StoreError as error:
        print(error)
store.put_engine(EngineStatus(engine="host:8000", version=9, refused={10: "cut"}, at_s=time.time()))
assert [row["engine"] for row in view_of(store)["engines"]] == ["host:8000"]
store.put_current(9 if 9 in store.versions() else store.versions()[0])
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
        yield {
            "PYTHONPATH": str(packages),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
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


def test_a_fleets_versions_hold_their_promises_in_a_bucket(
    store: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "fleet.py"
    script.write_text(FLEET)
    done = subprocess.run(
        [sys.executable, script], env=os.environ | store, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("held\n"), done.stdout + done.stderr
