"""`draftsmith export --push` against a hub on this machine that speaks the parts of the Hub's HTTP
interface an upload needs."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from draftsmith.cli import main
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.export.command import push
from tests.forked import free_port


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded; refuses other tokens than `hf_good`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.uploads = 0
        # Paths that answer with a status instead, so many times each.
        self.failing: dict[str, tuple[int, int]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def failed(self) -> bool:
        for part, (status, times) in self.server.failing.items():
            if part in self.path and times > 0:
                self.server.failing[part] = (status, times - 1)
                self.answer({"error": "the test says so"}, status)
                return True
        return False

    def do_PUT(self) -> None:
        body = self.body()
        if self.failed():
            return
        oid = self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.large[oid] = body
        self.server.uploads += 1
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body, url = self.body(), f"{self.server.url}/ann/draft"
        if self.headers.get("Authorization") != "Bearer hf_good":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.failed():
            pass
        elif self.path == "/api/repos/create" and self.server.created:
            there = {"error": "You already created this model repo", "url": url}
            self.answer(there, 409)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": url, "name": "ann/draft"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            ways = ["lfs" if path.endswith("safetensors") else "regular" for path in paths]
            keys = ("path", "uploadMode", "shouldIgnore")
            files = [dict(zip(keys, (*file, False))) for file in zip(paths, ways)]
            self.answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [self.place(wanted) for wanted in json.loads(body)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.commit(body)
            made = {"commitUrl": f"{url}/commit/1", "commitOid": "1" * 40, "hookOutput": ""}
            self.answer(made)
        else:
            self.answer({"error": f"unexpected {self.path}"}, 400)

    def place(self, wanted: dict) -> dict:
        """Where a large file goes; nowhere if it is here already."""
        if wanted["oid"] in self.server.large:
            return wanted
        place = {"href": f"{self.server.url}/large/{wanted['oid']}"}
        return {**wanted, "actions": {"upload": place}}

    def commit(self, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits.append(value["summary"])
            elif entry["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.large[value["oid"]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def draft(tmp_path: Path, tiny_target: Callable[..., str]) -> Path:
    folder = tmp_path / "draft"
    AutoModelForCausalLM.from_pretrained(tiny_target("llama", seed=1)).save_pretrained(folder)
    target = {"name": tiny_target("llama"), "vocab_size": 288}
    record = {"schema": 1, "family": "draft-lm", "target": target, "training": {}}
    write_json(folder / "draftsmith.json", record | {"evaluation": {}})
    return folder


@pytest.fixture
def client(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client in this process that knows the hub: it reads the environment once only."""
    settings = {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def export(draft: Path, *options: str) -> int:
    return main(["export", str(draft), "--to", "hf", "--out", str(draft.parent / "out"), *options])


def test_push_uploads_the_whole_export(
    draft: Path, hub: Hub, client: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(draft, "--push", "ann/draft", "--private") == 0
    assert f"{hub.url}/ann/draft" in capsys.readouterr().out
    # "visibility" since huggingface_hub 2, "private" before.
    [created] = hub.created
    assert created.get("visibility") == "private" or created.get("private") is True
    assert len(hub.commits) == 1 and "draft-lm draft" in hub.commits[0]
    out = draft.parent / "out"
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    files = "README.md config.json model.safetensors draftsmith.json tokenizer.json"
    assert set(files.split()) <= written.keys()
    assert hub.files == written
    assert list(hub.large) == [hashlib.sha256(written["model.safetensors"]).hexdigest()]
    front = yaml.safe_load(written["README.md"].decode().split("---")[1])
    assert "speculative-decoding" in front["tags"]
    assert "base_model" not in front, "a local path is not a Hub id"
    name = Path(read_json(draft / "draftsmith.json")["target"]["name"]).name
    assert f"draftsmith serve {name} --draft ann/draft" in written["README.md"].decode()
    assert str(draft.parent) not in written["README.md"].decode()


def test_a_refused_push_keeps_the_export_and_says_so(
    draft: Path,
    hub: Hub,
    client: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    assert export(draft, "--push", "ann/draft") == 2
    said = capsys.readouterr().err
    assert "the upload to 'ann/draft' failed" in said and "401" in said
    assert "Traceback" not in said
    assert (draft.parent / "out" / "model.safetensors").is_file()
    assert hub.files == {}


@pytest.fixture
def folder(client: None, tmp_path: Path) -> Path:
    """An export, as small as can be."""
    path = tmp_path / "export"
    path.mkdir()
    (path / "README.md").write_text("---\ntags: [draft-model]\n---\n# A draft\n")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return path


def pushed(folder: Path) -> str:
    return push(folder, "ann/draft", private=False, message="a draft")


def test_a_second_push_goes_into_the_repository_that_is_there(folder: Path, hub: Hub) -> None:
    for _ in range(2):
        assert pushed(folder) == f"{hub.url}/ann/draft"
        (folder / "README.md").write_text("---\ntags: [draft-model]\n---\n# The same draft\n")
    # The Hub answered 409 to its creation, and held the weights already.
    assert len(hub.created) == 1 and len(hub.commits) == 2 and hub.uploads == 1


# What fails, and the status it fails with.
FAILURES = {
    "create": ("/api/repos/create", 403),
    "storage": ("/large/", 403),
    "conflict": ("/commit/", 409),
    "gone": ("/preupload/", 404),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_push_that_fails_is_one_sentence_and_goes_on_later(
    what: str, folder: Path, hub: Hub
) -> None:
    path, status = FAILURES[what]
    hub.failing[path] = (status, 99)
    with pytest.raises(UserError) as caught:
        pushed(folder)
    told = str(caught.value)
    assert told.startswith("the upload to 'ann/draft' failed (") and str(status) in told
    assert "run --push again" in told
    assert "\n" not in told
    assert hub.files == {}, "nothing is shown before all of it is there"
    sent = hub.uploads
    hub.failing.clear()
    pushed(folder)
    # What was sent is not sent again.
    assert hub.uploads == 1 and (sent == 1) == (what == "conflict")
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_hub_that_is_not_there_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match="the upload to 'ann/draft' failed") as caught:
        pushed(folder)
    assert "\n" not in str(caught.value)


def test_a_malformed_repository_name_is_refused_before_any_work(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(draft, "--push", "ann/draft/extra") == 2
    assert "'ann/draft/extra' is not a Hub repository name" in capsys.readouterr().err
    assert not (draft.parent / "out").exists()
