"""Names that are no folder: one question to the Hub, and a sentence where it does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from draftsmith.drafters.checkpoint import locate
from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.drafters.layouts.hub import check_named
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.load import load_tokenizer
from draftsmith.errors import UserError

READERS: tuple[Callable[[str], Any], ...] = (
    lambda name: load_target(name, trust_remote_code=False),
    lambda name: load_tokenizer(name, trust_remote_code=False),
    lambda name: locate(name, "target"),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Paths asked of a Hub that breaks down for `ann/broken` and has nothing else."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            self.send_response(503 if "broken" in self.path else 404)
            if "absent" in self.path:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield paths
    server.shutdown()
    server.server_close()


def test_a_hub_that_does_not_answer_is_asked_once(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    begun_s = time.monotonic()
    for read in READERS:
        with pytest.raises(UserError, match=r"no folder here and the Hub does not answer \(.*503"):
            read("ann/broken")
    assert asked == ["/ann/broken/main/config.json"]
    said = capsys.readouterr().err
    assert said.count("no folder ann/broken here; asking the Hub\n") == 1
    assert time.monotonic() - begun_s < 20, "nothing is tried again"


def test_no_hub_is_a_sentence_with_both_mends(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    with pytest.raises(UserError, match="check the path, or the connection to the Hub") as caught:
        locate("nofolder")
    assert "draft 'nofolder' is no folder here" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_hub_has_not_is_refused_at_once(asked: list[str]) -> None:
    with pytest.raises(UserError, match="'ann/absent' is neither a folder here nor on the Hub"):
        model_folder("ann/absent")


@pytest.mark.parametrize("path", ["/nofolder/x", "./nofolder", "~/nofolder", "a/b/nofolder"])
def test_what_can_only_be_a_path_is_not_asked_for(path: str, asked: list[str]) -> None:
    for read in (*READERS, locate):
        with pytest.raises(UserError, match=r"there is no folder '.*nofolder.*'; check the path"):
            read(path)
    with pytest.raises(UserError, match=r"holds no adapter_config.json; give that of a LoRA"):
        check_named(SimpleNamespace(lora=[f"sql={Path(__file__).parent}"]))
    assert asked == []


def test_what_the_hub_or_the_cache_may_have_is_left_to_the_loaders(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model_folder("ann/gone") == "ann/gone" and len(asked) == 1
    (tmp_path / "models--ann--kept" / "snapshots").mkdir(parents=True)
    capsys.readouterr()
    assert model_folder("ann/kept") == "ann/kept" and len(asked) == 1
    assert capsys.readouterr().err == ""


def test_a_revision_is_that_of_the_cache(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--ann--kept"
    for name, commit in (("main", "a" * 40), ("v1.0", "b" * 40)):
        (kept / "refs").mkdir(parents=True, exist_ok=True)
        (kept / "refs" / name).write_text(commit)
        (kept / "snapshots" / commit).mkdir(parents=True)
        (kept / "snapshots" / commit / "config.json").write_text("{}")
    assert model_folder("ann/kept@v1.0") == kept / "snapshots" / ("b" * 40)
    with pytest.raises(UserError, match="model 'ann/kept' of revision 'v2' is neither"):
        model_folder("ann/kept@v2")


def test_a_folder_whose_name_has_the_sign_is_itself(asked: list[str], tmp_path: Path) -> None:
    (folder := tmp_path / "ann@v1").mkdir()
    assert model_folder(str(folder)) == str(folder) and asked == []
