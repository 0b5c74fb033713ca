"""Stand-ins of a fleet's processes: an engine without a model, with the real recorder, writer and
follower, a learner and a publisher. `python -m tests.integration.fleet_stand_ins ROLE ...` is one."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.forked import Forked

VOCAB = 48
NAMES = {"engine": "standin-server", "writer": "standin-writer"}
# Of the writers here, so that little is lost in a storm of seconds.
FLUSH_S = 0.1


def next_token(tokens: list[int]) -> int:
    """Greedy token of the target: any fixed function of the text, never the token 0 that ends it."""
    digest = hashlib.blake2b(bytes(tokens), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "big") % (VOCAB - 1)


def answer_to(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Draft:
    """In place of `fleet.swaps.swap.Swaps`: the served draft is the bytes of a file."""

    def __init__(self) -> None:
        self.version, self.served, self.staged, self.staged_version = "", b"", b"", ""
        self.before: tuple[str, bytes] = ("", b"")

    def status(self) -> dict[str, Any]:
        return {
            "state": "idle", "version": self.version, "staged": self.staged_version,
            "matches": bool(self.version), "last_swap": {"pause_ms": 0.1},
        }  # fmt: skip

    def stage(self, folder: str, version: str) -> dict[str, Any]:
        self.staged = (Path(folder) / "model.safetensors").read_bytes()
        self.staged_version = version
        return self.status()

    def apply(self, version: str) -> dict[str, Any]:
        self.before = self.version, self.served
        self.version, self.served = version, self.staged
        return self.status()

    def take_back(self) -> dict[str, Any]:
        self.version, self.served = self.before
        return self.status()

    def prepare(self, version: str = "") -> dict[str, Any]:
        return self.status()

    trial = compare = look = keep = prepare


class Writer:
    """In place of `subprocess.Popen` for a writer: a fork, which has everything imported."""

    def __init__(self, command: list[str], **_: Any):
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(reading, 0)
            sys.stdin = os.fdopen(0)
            # As `Popen` does: a client's connection ends with its engine.
            ring = int(command[-2])
            os.closerange(3, ring)
            os.closerange(ring + 1, 4096)
            be(NAMES["writer"])
            os.setsid()
            with suppress(BaseException):
                write(*command[-2:])
            os._exit(0)
        os.close(reading)
        self.stdin = os.fdopen(writing, "wb")

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline_s = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self.returncode or 0


def be(name: str) -> None:
    """Short name of this process, by which it is found."""
    Path("/proc/self/comm").write_text(name)


def write(descriptor: str, job: str) -> None:
    from draftsmith.fleet.recording import writer

    writer.BufferWriter = functools.partial(writer.BufferWriter, flush_s=FLUSH_S)  # type: ignore[misc]
    writer.main(descriptor, job)


class Engine:
    """A worker with the recorder, whose steps are computed by `next_token`."""

    def __init__(self, name: str, versions: str, buffer: str, cache: str):
        from draftsmith import child_process as child
        from draftsmith.fleet.vllm import plugin
        from draftsmith.fleet.vllm.worker import Settings, WorkerState
        from tests.unit.fleet.recording.stand_ins import FirstSampler, Worker

        child.LOOK_S = 0.05
        child.subprocess = SimpleNamespace(  # type: ignore[assignment]
            Popen=Writer, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
        )
        self.settings = Settings(
            versions=versions, buffer=buffer, engine=name, cache=cache, poll_s=0.1
        )
        self.worker: Any = Worker(FirstSampler())
        self.draft = Draft()
        self.worker.draftsmith = WorkerState(self.settings, swaps=self.draft)
        plugin.begin(self.worker, self.worker.draftsmith)
        parallel = SimpleNamespace(data_parallel_size=1, world_size=1, data_parallel_rank=0)
        self.vllm_config = self.worker.vllm_config
        self.vllm_config.parallel_config = parallel
        self.steps = threading.Lock()

    async def collective_rpc(
        self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        from draftsmith.fleet.vllm.worker import draftsmith_status, draftsmith_swap

        function = draftsmith_swap if method == "draftsmith_swap" else draftsmith_status
        with self.steps:
            return [function(self.worker, *args, **(kwargs or {}))]

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Rounds of two drafted tokens, of which the second is wrong now and then."""
        from tests.unit.fleet.recording.stand_ins import new_request, scheduled

        name, prompt, count = f"{body['id']}-0-00000001", body["prompt"], body["max_tokens"]
        tokens = [*prompt, next_token(prompt)]
        new = new_request(name, prompt, temperature=0.0, max_tokens=count)
        self._step(scheduled([new]), {name: tokens[-1:]})
        while len(tokens) - len(prompt) < count:
            await asyncio.sleep(0.01)
            right = answer_to(tokens, 3)
            wrong = tokens[-1] % 3 == 0
            drafted = [right[0], 1 + right[1] % (VOCAB - 1) if wrong else right[1]]
            kept = right[: 1 + next((n for n in (0, 1) if drafted[n] != right[n]), 2)]
            self._step(scheduled(), {name: kept}, verify_of(drafted, right))
            tokens += kept
        self._step(scheduled(finished=(name,)), {})
        made = tokens[len(prompt) :][:count]
        return {
            "id": body["id"], "tokens": made, "version": self.draft.version,
            "sha256": hashlib.sha256(self.draft.served).hexdigest(),
        }  # fmt: skip

    def _step(self, *given: Any) -> None:
        with self.steps:
            self.worker.step(*given)

    async def serve(self, address: str) -> None:
        from draftsmith.fleet.vllm.endpoint import Beside

        beside = Beside(self, self.settings, 0)
        await beside.start()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if line := await reader.readline():
                found = await self.answer(json.loads(line))
                writer.write(json.dumps(found).encode() + b"\n")
                await writer.drain()
            writer.close()

        with suppress(FileNotFoundError):
            os.unlink(address)
        server = await asyncio.start_unix_server(handle, address)
        await server.serve_forever()


def verify_of(drafted: list[int], right: list[int]) -> tuple[Any, ...]:
    """Call of a verification whose greedy tokens are `right`."""
    from tests.unit.fleet.recording.stand_ins import first_call

    metadata, q, logits = first_call([drafted])
    logits.zero_()
    for row, token in enumerate(right):
        logits[row, token] = 20.0
    return metadata, q, logits, None


def engine(name: str, address: str, versions: str, buffer: str, cache: str) -> None:
    be(NAMES["engine"])
    made = Engine(name, versions, buffer, cache)
    asyncio.run(made.serve(address))


def learner(root: str, every_s: str) -> None:
    from draftsmith.drafters import versions
    from draftsmith.lock import folder_lock

    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(uuid.uuid4().hex * 64)

    with folder_lock(root, "learner"):
        while True:
            parent = versions.latest(root)
            versions.publish(
                root, save, family="fake", target={}, parent=parent, data_range={}, gate={}
            )
            time.sleep(float(every_s))


def publisher(root: str, url: str) -> None:
    from draftsmith.fleet.rollout.command import loop
    from draftsmith.fleet.store.mirror import Mirror
    from draftsmith.fleet.store.store import VersionStore
    from draftsmith.lock import folder_lock
    from tests.unit.fleet.store.test_mirror import Copies

    mirror = Mirror(Path(root), VersionStore(url), Copies(Path(root)), keep=1000)
    config: Any = SimpleNamespace(once=False, poll_s=0.05)
    with folder_lock(root, "publisher"):
        loop([mirror.step], config, threading.Event())


ROLES = {"engine": engine, "learner": learner, "publisher": publisher}


def started(log: Any, role: str, *arguments: Any) -> Forked:
    return Forked([sys.executable, "-m", __name__, role, *arguments], stdout=log, stderr=log)


def end_with(parent: int) -> None:
    """Nothing outlives the test, however that ends."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def listens(address: str) -> bool:
    """True for an engine that answers; a killed one leaves its socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(address) == 0


def ask(address: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Answer of an engine, None where it was not whole."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        try:
            connection.connect(address)
            connection.sendall(json.dumps(body).encode() + b"\n")
            data = b""
            while part := connection.recv(1 << 16):
                data += part
            found: dict[str, Any] = json.loads(data)
        except (OSError, ValueError):
            return None
    return found


def main(role: str, *arguments: str) -> None:
    import torch

    torch.set_num_threads(1)
    os.setsid()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    ROLES[role](*arguments)  # type: ignore[operator]


if __name__ == "__main__":
    main(*sys.argv[1:])
