"""A real server on a real socket, in a thread of the test's process; and what learning from traffic
takes."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.config import DistillConfig, GateConfig, LearnConfig, LearnUnroll
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.state import StateFolder
from draftsmith.distill.status import Status
from draftsmith.distill.throttle import Throttle
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.options import OPTIONS as DEFAULTS
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.adapters import Adapters
from draftsmith.drafters.target.target import Target
from draftsmith.lock import bind
from draftsmith.record import Sink
from draftsmith.serve.config import EngineConfig, HttpOptions
from draftsmith.serve.engine import build
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.server import Server
from draftsmith.serve.http.streams import RequestStreams
from draftsmith.serve.listen import HttpServer, create_app
from draftsmith.serve.metrics.dashboard import History, Source
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.sampling.params import SamplingParams
from tests.data_folders import rows_of, sampled_from, write_rows
from tests.integration.served import publish

MODEL = "tiny"
OPTIONS = {name: options() for name, options in DEFAULTS.items()} | {
    "draft-lm": DraftLmOptions(num_layers=1, hidden_size=32)
}
LEARN = LearnConfig(lr=3e-3, steps=20, fresh=16, unroll=LearnUnroll(steps=3))
GATE = GateConfig(every=1, held_out=0.3)


class LiveServer:
    def __init__(self, engine: EngineCore, http: HttpOptions):
        self.engine, self.loop = engine, EngineLoop(engine).start()
        listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = Server(self.loop, http)
        # Not started: its tests look when they want to.
        self.dashboard = Source(History(engine), server.metrics.by_class, MODEL)
        app = create_app(server, self.dashboard)
        self._server = HttpServer(app, server)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        while not self._server.started:
            time.sleep(0.01)

    def complete(self, prompt: object, **parameters: object) -> httpx.Response:
        return self.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": prompt, **parameters}
        )

    def choice(self, prompt: object, **parameters: object) -> dict[str, Any]:
        """The first of an answer."""
        return self.complete(prompt, **parameters).json()["choices"][0]

    def told(self, path: str, **body: object) -> dict[str, Any]:
        return self.http.post(path, json={"model": MODEL, **body}).json()

    def chat(self, messages: object, **body: object) -> dict[str, Any]:
        return self.told("/v1/chat/completions", messages=messages, **body)

    def events(self, path: str, **body: object) -> list[dict[str, Any]]:
        """Values of a stream, which has to end as OpenAI's do."""
        whole = {"model": MODEL, "stream": True, **body}
        with self.http.stream("POST", path, json=whole) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert response.status_code == 200 and lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        raise KeyError(name)

    def slow(self, seconds: float) -> LiveServer:
        """So slow a pass that an answer of many tokens is not done while a test looks."""
        step = self.engine.step
        self.engine.step = lambda: (time.sleep(seconds), step())[1]
        return self

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module", autouse=True)
def uncaptured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forwards run as the model has them, but in modules with `CAPTURED`: to capture takes longer
    than the answers of most tests."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "CAPTURED", False):
            patch.setattr(build, "capture_forwards", lambda *given: None)
        yield


@pytest.fixture(scope="session")
def target_folder(tiny_target: Callable[..., str]) -> str:
    return tiny_target("llama")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, target_folder: str) -> Path:
    """Sampled answers of the tiny target."""
    target = Target.load(target_folder)
    generator = torch.Generator().manual_seed(0)
    sizes = [4 + number % 5 for number in range(48)]
    prompts = [torch.randint(3, 288, (size,), generator=generator).tolist() for size in sizes]
    answers = target.answer(prompts, max_new_tokens=16, temperature=1.0, batch_size=48)
    rows = rows_of(prompts, answers, held_out=range(0, len(prompts), 6))
    return write_rows(tmp_path_factory.mktemp("data"), rows, sampled_from(target))


@pytest.fixture(scope="module")
def live_server() -> Iterator[Callable[..., LiveServer]]:
    """`live_server(target, drafter, config, sink=, adapters=)` with fields of `HttpOptions`; all are
    closed at the end of the module."""
    servers: list[LiveServer] = []

    def start(
        target: Target,
        drafter: ServingDrafter | None,
        config: EngineConfig,
        *,
        sink: Sink | None = None,
        adapters: Adapters | None = None,
        **http: Any,
    ) -> LiveServer:
        engine = build_engine(target, drafter, config, sink=sink, adapters=adapters)
        servers.append(LiveServer(engine, HttpOptions(name=MODEL, drain_s=0.0, **http)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def chat_target(tiny_target: Callable[..., str], tool_template: str) -> Target:
    target = Target.load(tiny_target("llama"))
    target.tokenizer().chat_template = tool_template
    return target


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`scripted(text)`: the text of every answer from now on, whatever the model's is."""
    rounds, text, step = RequestStreams.rounds, "", 3

    async def replaced(streams: RequestStreams) -> Any:
        last = None
        async for events in rounds(streams):
            last = events[-1]
        assert last is not None
        last.request.text, last.request.finish_reason = text, FinishReason.STOP
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        for piece in pieces:
            yield [last._replace(update=last.update._replace(text=piece, finish_reason=None))]
        yield [last._replace(update=last.update._replace(text="", finish_reason=FinishReason.STOP))]

    def script(answer: str) -> None:
        nonlocal text
        text = answer
        monkeypatch.setattr(RequestStreams, "rounds", replaced)

    return script


@pytest.fixture(scope="module")
def load(
    tiny_target: Callable[..., str], native_target: Callable[..., Path]
) -> Callable[[str], Target]:
    """`load(architecture)`: a tiny target, loaded once a module. "native glm4_moe" brings an MTP
    module along."""

    @functools.cache
    def get(arch: str) -> Target:
        native, _, kind = arch.rpartition(" ")
        return Target.load(native_target(kind) if native else tiny_target(kind))

    return get


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    """A client of the module's own `server`."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def learner_of(config: DistillConfig, log: TextIO | None = None) -> Daemon:
    """A learner whose cycles a test begins."""
    return Daemon(config, Status(config.versions, log), Throttle(1.0, threading.Event()))


class Loop:
    """A target, a draft and the three folders between server and learner."""

    def __init__(self, root: Path, target: str, family: str, **config: Any):
        """Family "perfect" is the target drafting for itself: what is done to it can
        only be harm."""
        self.root = root
        self.target = Target.load(target)
        options = DraftLmOptions(init=target) if family == "perfect" else OPTIONS[family]
        self.draft = FAMILIES["draft-lm" if family == "perfect" else family].create(
            options, self.target, seed=0
        )
        checkpoint.save(self.draft, root / "draft", self.target)
        self.config = DistillConfig(
            target=target, draft=str(root / "draft"), buffer=str(root / "buffer"),
            versions=str(root / "versions"),
            until_idle_s=0.3, poll_s=0.05, **({"learn": LEARN, "gate": GATE} | config),
        )  # fmt: skip

    # Text of a tiny random target is unlike language; at this temperature its distributions fit
    # into 64 tokens.
    sampling = SamplingParams(max_tokens=16, temperature=0.5)

    @property
    def versions(self) -> Path:
        return Path(self.config.versions)

    def serve(
        self,
        count: int,
        *,
        seed: int = 0,
        version: int = 1,
        folder: Path | None = None,
        record_taps: int = 0,
    ) -> float:
        """Accepted share of the offered tokens. `folder` is served under the name of `version`."""
        options = {"seed": seed, "version": version, "record_taps": record_taps}
        self.record(folder or self.root / "draft", self.prompts(count, seed), **options)
        everything = BufferReader(self.config.buffer).read(max_records=10**6).records
        records = [one for one in everything if one.draft_version == str(version)]
        accepted = sum(one.accepted for one in records)
        return accepted / sum(min(one.accepted + 1, len(one.drafted)) for one in records)

    def record(
        self, folder: str | Path, prompts: list[list[int]], *, version: int = 1, **options: Any
    ) -> None:
        """Answer the prompts with the draft in a folder, and write their rounds into the buffer."""
        writer = BufferWriter(self.config.buffer, flush_s=60.0, flush_records=10**6)
        draft = checkpoint.load(folder, self.target)
        config = EngineConfig(k=3, compile="off", **options)
        engine = build_engine(self.target, draft, config, sink=writer, draft_version=str(version))
        engine.generate(prompts, self.sampling, text=False)
        writer.close()

    def decisions(self, kind: str | None = None) -> list[dict[str, Any]]:
        found = versions.read_decisions(self.versions)
        return [one for one in found if kind in (None, one["decision"])]

    def status(self) -> dict[str, Any]:
        return json.loads((self.versions / "status.json").read_text())

    def state(self, root: Path | None = None) -> dict[str, Any]:
        """As the learner saved it last."""
        root = root or self.versions
        folder = root / "learner" / f"state-{StateFolder(root).numbers()[-1]:08d}"
        return json.loads((folder / "state.json").read_text()) | {
            "candidate": load_file(folder / "candidate.safetensors")
        }

    def publish(
        self, drafter: torch.nn.Module, *, parent: int = 1, decision: str = "none", **more: Any
    ) -> int:
        gate = {"decision": decision, "reason": "by hand"}
        return publish(self.versions, drafter, self.target, parent=parent, gate=gate, **more)

    @staticmethod
    def prompts(count: int, seed: int) -> list[list[int]]:
        return torch.randint(
            3, 288, (count, 6), generator=torch.Generator().manual_seed(seed)
        ).tolist()

    @staticmethod
    def shuffle(drafter: torch.nn.Module) -> None:
        """Weights of the same size that mean nothing."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in drafter.parameters():
                order = torch.randperm(parameter.numel(), generator=generator)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))


@pytest.fixture
def loop(tmp_path: Path, tiny_target: Callable[..., str]) -> Callable[..., Loop]:
    """`loop(family)`: everything of learning from traffic on a tiny target."""
    return lambda family="mtp": Loop(tmp_path, tiny_target("llama"), family)
