"""The target sharded over two processes by transformers' own plan answers as one process does, with
every kind of drafting."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftsmith.drafters.checkpoint import save
from draftsmith.drafters.options import Eagle3Options, MtpOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.parallel import join
from tests import forked
from tests.forked import Forked, cli, free_port, one_thread
from tests.waiting import wait_for, wait_until

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(20, 60)), [9]]
REQUEST = {"prompt": PROMPTS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def target_folder(tiny_target: Callable[..., str]) -> str:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafts(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Families that read the target's embedding, its head, and both, while they draft."""
    target = Target.load(target_folder, dtype="float32")
    folders = {}
    for family, options in (("eagle3", Eagle3Options()), ("mtp", MtpOptions())):
        folders[family] = tmp_path_factory.mktemp("draft") / family
        save(FAMILIES[family].create(options, target, seed=0), folders[family], target)
    return folders


@pytest.fixture
def serve(
    target_folder: str,
) -> Iterator[Callable[[int, Sequence[str]], tuple[str, Forked]]]:
    """`serve(processes, options)` -> the URL of a server that is up, started by itself or by
    torchrun."""
    running: list[Forked] = []

    def start(
        processes: int, options: Sequence[str], *, torchrun: bool = False
    ) -> tuple[str, Forked]:
        port = free_port()
        command = cli("serve", "--target", target_folder, "--port", port, "--dtype", "float32")
        command += [*options, "--tensor-parallel", str(processes)]
        if torchrun:
            command = forked.torchrun(processes, *command[1:])
        # The processes that share the target are started in any case.
        server = Forked(command, env=one_thread(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        running.append(server)
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server, server.stdout.read, timeout_s=180)
        return url, server

    yield start
    for server in running:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)


def answers(url: str, max_tokens: int = 24) -> list[list[int]]:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = (
        httpx.post(
            f"{url}/v1/completions",
            json=REQUEST | {"model": model, "max_tokens": max_tokens},
            timeout=60,
        )
        .raise_for_status()
        .json()
    )
    return [choice["token_ids"] for choice in body["choices"]]


def is_running(url: str) -> bool:
    return any(
        line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0")
        for line in metrics(url)
    )


def metrics(url: str) -> list[str]:
    return httpx.get(f"{url}/metrics").text.splitlines()


def drafted(url: str) -> float:
    return sum(
        float(line.split()[-1])
        for line in metrics(url)
        if line.startswith("vllm:spec_decode_num_draft_tokens_total")
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "family, torchrun",
    [("eagle3", False), ("mtp", False), (None, True)],
)
def test_two_processes_answer_as_one(
    family: str | None, torchrun: bool, target_folder: str, drafts: dict[str, Path], serve: Callable
) -> None:
    options = [] if family is None else ["--draft", str(drafts[family]), "--k", "3"]
    url, server = serve(2, options, torchrun=torchrun)
    assert answers(url) == Target.load(target_folder, dtype="float32").answer(
        PROMPTS, max_new_tokens=24, ignore_eos=True
    )
    assert (drafted(url) > 0) == (family is not None)
    # A signal reaches all processes at once; the answer under way is finished all the same.
    with ThreadPoolExecutor() as pool:
        late = pool.submit(answers, url, 64)  # so many that it is seen running
        wait_until(lambda: is_running(url), 10)
        server.send_signal(signal.SIGTERM)
        assert len(late.result()) == len(PROMPTS)
    said, _ = server.communicate(timeout=60)
    # torchrun itself ends with a traceback and 1 when it is signalled, whatever its processes do.
    assert torchrun or (server.returncode == 0 and "Traceback" not in said)


FAILING = """
import sys
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.drafters.target.sharded import LEADER, Channel
from draftsmith.serve.parallel import LeadingTarget, follow, join
from draftsmith.serve.requests.request import SamplingParams
import threading

folder, failing = sys.argv[1], int(sys.argv[2])
place = join(2, "cpu")
target = (LeadingTarget if place.rank == LEADER else Target).load(folder, dtype="float32", device="cpu", shards=2)
channel, passes = Channel(), [0]

def fail(*_):
    passes[0] += 1
    if passes[0] == 8:
        raise RuntimeError(f"rank {place.rank} is out of memory")

if place.rank == failing:
    target.layers[2].register_forward_pre_hook(fail)
if place.rank != LEADER:
    follow(target, channel)
    sys.exit(0)
loop = EngineLoop(build_engine(target.lead(channel), None, EngineConfig(compile="off", prefix_cache=False))).start()
for max_tokens in (4, 24):
    done = threading.Event()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    loop.submit([5, 6, 7], params, lambda request, update: update.finish_reason and done.set())
    done.wait()
    print("answered", max_tokens, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_in_a_pass_ends_all(
    failing: int, target_folder: str, tmp_path: Path
) -> None:
    """Left alone, the others would wait in that pass's sum for good."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING, encoding="utf-8")
    command = forked.torchrun(2, script, target_folder, failing)
    ended = forked.run(command, env=one_thread(), capture_output=True, timeout=90)
    assert ended.returncode != 0
    assert ended.stdout.split("\n")[:-1] == ["answered 4"]
    assert (
        f"rank {failing} is out of memory" in ended.stderr
        and "failed in a call that all ranks make" in ended.stderr
    )


GRAPHS = """
import json
import sys
from pathlib import Path
from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target.sharded import LEADER, Channel, leave_group
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.graphs import PassGraphs
from draftsmith.serve.parallel import LeadingTarget, follow, join
from draftsmith.serve.sampling.params import SamplingParams

class Graph:
    def __init__(self, run):
        self.replay = run

class Capturer:
    captures = 0

    def capture(self, run):
        Capturer.captures += 1
        return Graph(run), run()

folder, draft, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
place = join(2, "cpu")
kind = LeadingTarget if place.rank == LEADER else Target
target = kind.load(folder, dtype="float32", device="cpu", shards=2)
channel = Channel()
if place.rank != LEADER:
    follow(target, channel, lambda device: Capturer())
    found = {"follower": Capturer.captures}
else:
    drafter = load(draft, target.lead(channel))
    engine = build_engine(target, drafter, EngineConfig(compile="auto", k=3, max_length=128))
    engine.runner.graphs = graphs = PassGraphs(
        target, engine.runner.pool, max_batch=8, max_blocks=engine.tables.host.shape[1],
        capturer=Capturer(), per_row=4, taps=drafter.taps, ranks=target,
    )
    for shape in graphs.shapes:
        graphs.prepare(shape)
    sent, send = [0], channel._broadcast
    channel._broadcast = lambda values: (sent.__setitem__(0, sent[0] + 1), send(values))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = [answer.tokens for answer in engine.generate(prompts, params, text=False)]
    target.stop()
    found = {
        "leader": Capturer.captures, "shapes": len(graphs.shapes), "tokens": tokens,
        "messages": sent[0] - 1, "rounds": engine.stats.num_rounds,
    }
Path(sys.argv[4], f"{place.rank}.json").write_text(json.dumps(found))
leave_group()
"""


@pytest.mark.long
def test_two_processes_replay_graphs_in_step(
    target_folder: str, drafts: dict[str, Path], tmp_path: Path
) -> None:
    """By capturers of the test's own, on both; one message a round, whatever is drafted."""
    script = tmp_path / "graphs.py"
    script.write_text(GRAPHS, encoding="utf-8")
    words = (script, target_folder, drafts["eagle3"], json.dumps(PROMPTS), tmp_path)
    ended = forked.run(
        forked.torchrun(2, *words), env=one_thread(), capture_output=True, timeout=90
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = {}
    for rank in range(2):
        found |= json.loads((tmp_path / f"{rank}.json").read_text())
    assert found["leader"] == found["follower"] == found["shapes"] > 10
    assert found["messages"] == found["rounds"]
    assert found["tokens"] == Target.load(target_folder, dtype="float32").answer(
        PROMPTS, max_new_tokens=24, ignore_eos=True
    )


def test_a_server_that_torchrun_did_not_start_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="1 process runs; start the server with"):
        join(2, "cpu")
