"""The server as users start and stop it: a process of its own."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from draftsmith.cli import main
from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.serve.bench import command as bench
from draftsmith.serve.config import HttpOptions
from tests.forked import Forked, cli, free_port
from tests.waiting import wait_for

TIMEOUT_S = 90


@pytest.fixture(autouse=True)
def servers_of_bench_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"Popen": Forked, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(**kept))


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[Forked, str]]:
    port = free_port()
    flags = ("--port", port, "--compile", "off")  # to capture takes longer than the answers
    process = Forked(cli("serve", *arguments, *flags), stderr=subprocess.PIPE)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", process, process.stderr.read, timeout_s=TIMEOUT_S)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_connections_stay_open_as_told_and_sigterm_lets_requests_finish_and_flushes_records(
    target_folder: str, tmp_path: Path
) -> None:
    buffer = tmp_path / "buffer"
    options = shlex.split("--suffix --name tiny --keep-alive-s 1")
    arguments = ("--target", target_folder, *options, "--learn", str(buffer))
    with serving(*arguments) as (process, url):
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=4) as connection:
            connection.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            assert connection.recv(4096) == b""
        body = {"prompt": [7, 8, 9] * 4, "max_tokens": 200, "ignore_eos": True, "stream": True}
        body |= {"model": "tiny", "return_token_ids": True}
        answers: list[int] = []
        begun = threading.Event()

        def ask() -> None:
            tokens = 0
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S
            ) as response:
                for line in response.iter_lines():
                    begun.set()
                    if line.startswith("data: {"):
                        tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
            answers.append(tokens)

        client = threading.Thread(target=ask)
        client.start()
        assert begun.wait(TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
        client.join()
    assert answers == [200]
    records = BufferReader(str(buffer)).read().records
    assert sum(len(record.context) + len(record.committed) for record in records) == 12 + 200


def test_sigterm_tells_those_who_do_not_finish_and_those_who_come(target_folder: str) -> None:
    """`slow` loads so large a batch that no answer is done in time."""
    body = {"prompt": [7, 8, 9], "max_tokens": 250, "ignore_eos": True, "stream": True}
    arguments = ("--target", target_folder, "--drain-s", "1", "--max-batch", "1")
    lines: list[str] = []
    begun = threading.Event()

    def ask(url: str) -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"n": 100}, timeout=TIMEOUT_S
        ) as response:
            for line in response.iter_lines():
                begun.set()
                lines.append(line)

    with serving(*arguments) as (process, url), httpx.Client(base_url=url) as late:
        assert late.get("/health").status_code == 200
        client = threading.Thread(target=ask, args=(url,))
        client.start()
        assert begun.wait(TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        # On a connection that was open and on a new one.
        clients = (late, httpx)
        refused = [one.post(f"{url}/v1/completions", json=body) for one in clients]
        assert process.wait(TIMEOUT_S) == 0
        client.join()
        told = process.communicate()[1]
    for response in refused:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
    events = [line for line in lines if line]
    assert json.loads(events[-2][6:])["error"]["code"] == "shutting_down"
    assert events[-1] == "data: [DONE]"
    assert "Traceback" not in told and "rror" not in told
    assert told.count("stopping: requests that run get 1 s to finish") == 1


def test_clients_close_their_connections_before_the_server_does() -> None:
    assert HttpOptions().keep_alive_s > 60  # which usual proxies keep theirs; httpx 5 s


def test_a_port_in_use_is_one_sentence(target_folder: str, capsys: pytest.CaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--target", target_folder, "--port", port]) == 2
    assert_one_sentence(capsys, port)


def assert_one_sentence(capsys: pytest.CaptureFixture, *words: str) -> None:
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("draftsmith: error: ")
    for word in words:
        assert word in last


@pytest.mark.parametrize("arguments, words", [
    (["--target", "{llama}", "--suffix", "--draft", "{llama}", "--learn", "y"], ["suffix"]),
    (["--target", "{llama}", "--versions", "{empty}"], ["no version"]),
    (["--target", "{llama}", "--max-length", "9999"], ["9999"]),
])  # fmt: skip
def test_what_cannot_be_served_is_one_sentence(
    arguments: list[str],
    words: list[str],
    target_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    places = {"llama": target_folder, "empty": str(tmp_path)}
    assert (
        main(["serve", *[argument.format(**places) for argument in arguments], "--port", "0"]) == 2
    )
    assert_one_sentence(capsys, *words)


def test_bench_starts_a_server_and_compares_off_with_on(
    tiny_target: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    chat = [{"role": "user", "content": "for name in name in name"}]
    lines = [{"prompt": "abcabcabcabc"}, {"messages": chat}]
    prompts.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    places = f"--target {tiny_target('llama')} --prompts {prompts} --out {out}"
    sizes = "--suffix --k 3 --num-prompts 2 --max-tokens 8 --repeats 2 --concurrency 2"
    assert main(["bench", *places.split(), *sizes.split()]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    cases = [(case["temperature"], case["mode"]) for case in found["cases"]]
    assert cases == [(0, "off"), (0, "on"), (1, "off"), (1, "on")]
    assert all(
        case["num_tokens"] == 2 * 2 * 8 and case["tokens_per_s"] > 0 for case in found["cases"]
    )
    assert found["cases"][0]["acceptance"] is None and found["cases"][1]["acceptance"]["rounds"] > 0
    shown = capsys.readouterr()
    assert len(found["ratios"]) == 2 and "speculation on / off" in shown.out
    assert f"draftsmith: loading {tiny_target('llama')}\n" in shown.err


@pytest.mark.parametrize("arguments, words", [
    ([], ["url"]),
    (["--url", "http://127.0.0.1:9", "--target", "x"], ["url"]),
    (["--url", "http://127.0.0.1:9"], ["/v1/models"]),
    (["--url", "http://127.0.0.1:9", "--prompts", "/nowhere.txt"], ["/nowhere.txt"]),
    (["--url", "http://127.0.0.1:9", "--modes", "sideways"], ["sideways"]),
    (["--url", "http://127.0.0.1:9", "--draft", "x"], ["draft is for a server started here"]),
    (["--target", ".", "--heterogeneous-vocab"], ["heterogeneous_vocab is given without a draft"]),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", *arguments]) == 2
    assert_one_sentence(capsys, *words)
