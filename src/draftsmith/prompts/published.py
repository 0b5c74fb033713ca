"""Suites of prompts as their authors publish them: where each file lies, and its hash. Files are
fetched into the user's cache; none is shipped."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

from draftsmith.errors import UserError
from draftsmith.files import atomic_path, cache_folder

RAW = "https://raw.githubusercontent.com"
SPEC_BENCH = f"{RAW}/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
EAGLE = f"{RAW}/SafeAILab/EAGLE/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b"
HUMAN_EVAL = f"{RAW}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
SCHOOL_MATH = f"{RAW}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
TEACHER = f"{RAW}/teknium1/GPTeacher/481075123c29854bddb82655badeef6a438f2436"
SELF_INSTRUCT = f"{RAW}/yizhongw/self-instruct/0b26ccaa415992100fa32df62d41b994cf928e23"
ASSISTANT = f"{RAW}/LAION-AI/Open-Assistant/f1e6ed9526f5817531f3ab85441a40b3671ddccb"
WAIT_S = 60.0  # for a server that sends nothing


class Published(NamedTuple):
    """A file of a suite."""

    url: str
    sha256: str
    task: str = ""  # of all its prompts; "" where the rows have theirs

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class Suite(NamedTuple):
    source: str
    licence: str
    files: tuple[Published, ...]
    most: int | None = None  # of its prompts, where it would outweigh the others


def _suite(source: str, licence: str, *files: Published, most: int | None = None) -> Suite:
    return Suite(source, licence, files, most)


def _of_eagle(task: str, sha256: str) -> Published:
    return Published(f"{EAGLE}/eagle/data/{task}/question.jsonl", sha256, task)


MT_BENCH = _of_eagle("mt_bench", "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7")
SUITES = {
    "spec-bench": _suite(
        "hemingkx/Spec-Bench",
        "Apache-2.0",
        Published(
            f"{SPEC_BENCH}/data/spec_bench/question.jsonl",
            "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        ),
    ),
    "mt-bench": _suite("SafeAILab/EAGLE", "Apache-2.0", MT_BENCH._replace(task="")),
    "humaneval": _suite(
        "openai/human-eval",
        "MIT",
        Published(
            f"{HUMAN_EVAL}/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            "humaneval",
        ),
    ),
    "gsm8k": _suite(
        "openai/grade-school-math",
        "MIT",
        Published(
            f"{SCHOOL_MATH}/grade_school_math/data/test.jsonl",
            "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            "gsm8k",
        ),
    ),
    "eagle": _suite(
        "SafeAILab/EAGLE",
        "Apache-2.0",
        MT_BENCH,
        _of_eagle("humaneval", "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e"),
        _of_eagle("gsm8k", "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27"),
        _of_eagle("alpaca", "8ad3e5a7fc61b88d8e25edb81a52a2ce00a04494d5694c122cb11a5cc26a00df"),
        _of_eagle("sum", "916876f0c42f938a944de96eed16e51425f29f27438cca5c9ef4737c0fedf771"),
        _of_eagle("qa", "04252e41ab00bcc03b11940b4a3766cf40ae0b76a09c4f56968ba952f0b029f3"),
    ),
}

# Prompts to train on.
TRAINING = (
    _suite(
        "teknium1/GPTeacher",
        "MIT",
        Published(
            f"{TEACHER}/Codegen/codegen-instruct.json",
            "8b0be81f22b86bccab30f573351b62efb3391da229d2ee817a65ce0abb08b29d",
        ),
    ),
    _suite(
        "openai/grade-school-math",
        "MIT",
        Published(
            f"{SCHOOL_MATH}/grade_school_math/data/train.jsonl",
            "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        ),
        most=3000,
    ),
    _suite(
        "yizhongw/self-instruct",
        "Apache-2.0",
        Published(
            f"{SELF_INSTRUCT}/data/seed_tasks.jsonl",
            "7779004fa198fdf27cf70a159363879d8a26c53329e11b436af17b3941875f48",
        ),
        Published(
            f"{SELF_INSTRUCT}/human_eval/user_oriented_instructions.jsonl",
            "81d60a117db495cecedecd9193504fd07c5b5a42f6699ef6b0f9da10fc22f42e",
        ),
    ),
    _suite(
        "LAION-AI/Open-Assistant",
        "Apache-2.0",
        Published(
            f"{ASSISTANT}/model/model_eval/manual/data/en_100_text.jsonl",
            "96ea33eb2fc670b3638887eee4ec85d8c840927dbd2c2293816cccde27d6cc5f",
        ),
        Published(
            f"{ASSISTANT}/model/model_eval/manual/data/prompt_lottery_en_250_text.jsonl",
            "c5c706385a8166d308920e6a2e53b4ffa340d6dda5027cf57e2c39533f4d52f3",
        ),
    ),
)


def located(file: Published, suite: Suite, folder: str | None) -> Path:
    """The file in `folder`, under any path, or without one in the user's cache, fetched where it
    is not there.

    Raises:
        UserError: it is not in the folder, cannot be fetched, or is another file by now.
    """
    if folder is not None:
        return _in_folder(file, suite, Path(folder).expanduser())
    try:
        return _in_cache(file, suite, cache_folder() / "suites" / file.sha256[:12] / file.name)
    except OSError as error:
        raise UserError(
            f"the cache of suites cannot be used ({error}); name a folder that holds "
            f"{file.name} in DRAFTSMITH_SUITES"
        ) from error


def _in_cache(file: Published, suite: Suite, path: Path) -> Path:
    if not (path.is_file() and _hash(path.read_bytes()) == file.sha256):
        print(
            f"prompts of {suite.source} ({suite.licence}): fetching {file.url} into {path}",
            file=sys.stderr,
            flush=True,
        )
        _fetch(file, path)
    return path


def _in_folder(file: Published, suite: Suite, folder: Path) -> Path:
    for path in sorted(folder.rglob(file.name)):
        if path.is_file() and _hash(path.read_bytes()) == file.sha256:
            return path
    raise UserError(
        f"suite folder {str(folder)!r} holds no {file.name} of {suite.source} as published (sha256 "
        f"{file.sha256[:12]}...); copy {file.url} into it, or give another file as the suite"
    )


def _fetch(file: Published, path: Path) -> None:
    import http.client  # late, as both take a fifth of the time of `--help`
    import urllib.request

    try:
        with urllib.request.urlopen(file.url, timeout=WAIT_S) as response:
            content = response.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{file.url} cannot be fetched ({error}); name a folder that holds it in "
            "DRAFTSMITH_SUITES"
        ) from error
    if _hash(content) != file.sha256:
        raise UserError(
            f"{file.url} gave another file than published (sha256 {_hash(content)[:12]}...); name "
            "a folder that holds the suite's in DRAFTSMITH_SUITES, or give this one as the suite"
        )
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
