from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.prompts import published, suites
from draftsmith.prompts.published import SUITES, TRAINING, Published, Suite, located
from draftsmith.prompts.suites import (
    MT_BENCH,
    Question,
    SuiteOptions,
    check_suite,
    read_suite,
    shared,
)

ROWS = [{"question_id": n, "category": "qa", "turns": [f"Question {n}?"]} for n in range(3)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def written(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def of_file(path: Path) -> list[Question]:
    return read_suite(SuiteOptions(suite=str(path))).questions


@pytest.mark.parametrize(
    ("row", "question"),
    [
        (
            {"category": "writing", "turns": ["Write.", "Again."], "reference": ["x"]},
            Question({"messages": [user("Write.")]}, (user("Again."),), "writing"),
        ),
        (
            {"category": "", "turns": '["Write.", "Again."]'},
            Question({"messages": [user("Write.")]}, (user("Again."),), "rows"),
        ),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"},
            Question({"messages": [user("def f():\n")]}, (), "rows"),
        ),
        (
            {"turns": ["Hi.", "And then?"], "system": "Be brief.", "task": "chat"},
            Question(
                {"messages": [{"role": "system", "content": "Be brief."}, user("Hi.")]},
                (user("And then?"),),
                "chat",
            ),
        ),
        (
            {
                "task": "chat",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    user("Hi."),
                    {"role": "assistant", "content": "An answer of another model."},
                    user("And then?"),
                ],
            },
            Question(
                {"messages": [{"role": "system", "content": "Be brief."}, user("Hi.")]},
                (user("And then?"),),
                "chat",
            ),
        ),
    ],
)
def test_rows_are_conversations_without_their_answers(
    row: dict, question: Question, tmp_path: Path
) -> None:
    assert of_file(written(tmp_path / "rows.jsonl", [row])) == [question]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "no question"}, "line 1 of .* asks nothing"),
        ({"turns": ["", "Then?"]}, "line 1 of .* an empty turn"),
        ({"turns": []}, "line 1 of"),
        ({"turns": "[" * 100_000}, "line 1 of"),
        ({"messages": [{"role": "assistant", "content": "Hello."}]}, "asks nothing"),
        ({"number": 1}, "line 1 of .* holds number"),
    ],
)
def test_rows_that_ask_nothing_are_refused_by_their_line(
    row: dict, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        of_file(written(tmp_path / "rows.jsonl", [row]))


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no question"):
        of_file(written(tmp_path / "empty.jsonl", []))
    with pytest.raises(UserError, match="are no file"):
        of_file(tmp_path / "missing.jsonl")


def test_mt_bench_is_one_task_beside_others_and_eight_alone(tmp_path: Path) -> None:
    rows = [{"category": one, "turns": ["?"]} for one in sorted(MT_BENCH)]
    alone = of_file(written(tmp_path / "alone.jsonl", rows))
    assert {one.task for one in alone} == MT_BENCH
    beside = of_file(written(tmp_path / "beside.jsonl", [*rows, *ROWS]))
    assert Counter(one.task for one in beside) == {"mt_bench": 8, "qa": 3}
    # Some of its names do not make a suite hold it.
    few = of_file(written(tmp_path / "few.jsonl", [{"category": "math", "turns": ["?"]}, *ROWS]))
    assert [one.task for one in few] == ["math", "qa", "qa", "qa"]


@pytest.mark.parametrize(
    ("share", "taken"),
    [
        (0.2, [0, 5, 10, 15]),
        (0.1, [0, 10]),
        (0.001, [0]),
        (0.75, [0, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19]),
        (1.0, list(range(20))),
    ],
)
def test_a_share_is_taken_evenly_of_each_task(share: float, taken: list[int]) -> None:
    questions = [Question({"n": n}, (), task) for n in range(20) for task in ("a", "b")]
    found = shared(questions, share)
    for task in ("a", "b"):
        assert [one.fields["n"] for one in found if one.task == task] == taken


def test_every_suite_is_pinned_and_named() -> None:
    for suite in (*SUITES.values(), *TRAINING):
        assert suite.licence in ("MIT", "Apache-2.0")
        for file in suite.files:
            assert len(file.sha256) == 64 and file.url.startswith("https://")
            assert len(file.url.split("/")[5]) == 40  # a commit


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A suite of one file, at a file URL, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(suites.FOLDER, raising=False)
    path = written(tmp_path / "published" / "question.jsonl", ROWS)
    file = Published(path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest())
    made = Suite("somebody/Suite", "MIT", (file,))
    monkeypatch.setitem(published.SUITES, "gsm8k", made)
    return made


def test_a_suite_is_fetched_once_and_told_of(
    suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    asked = read_suite(SuiteOptions(suite="gsm8k"))
    assert asked.about == "gsm8k (somebody/Suite, MIT): 3 of 3 prompts"
    assert "somebody/Suite (MIT): fetching file://" in capsys.readouterr().err
    (tmp_path / "published" / "question.jsonl").unlink()
    assert read_suite(SuiteOptions(suite="gsm8k")) == asked
    assert capsys.readouterr().err == ""


def test_a_damaged_copy_is_fetched_again(suite: Suite) -> None:
    path = located(suite.files[0], suite, None)
    path.write_text("{", encoding="utf-8")
    assert len(read_suite(SuiteOptions(suite="gsm8k")).questions) == 3


def test_another_file_than_published_is_not_kept(suite: Suite, tmp_path: Path) -> None:
    written(tmp_path / "published" / "question.jsonl", ROWS[:1])
    for _ in range(2):
        with pytest.raises(UserError, match="gave another file than published"):
            read_suite(SuiteOptions(suite="gsm8k"))


def test_a_suite_that_cannot_be_fetched_says_where_it_may_lie(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "published" / "question.jsonl").unlink()
    with pytest.raises(UserError, match=r"cannot be fetched .* in DRAFTSMITH_SUITES"):
        read_suite(SuiteOptions(suite="gsm8k"))


def test_a_cache_that_cannot_be_written_is_named(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cache of suites cannot be used .* in DRAFTSMITH_SUITES"):
        located(suite.files[0], suite, None)


def test_a_folder_takes_the_place_of_the_net(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under whatever path the file lies, as in a clone, beside others of its name."""
    (tmp_path / "published" / "question.jsonl").unlink()
    folder = tmp_path / "clones"
    written(folder / "a" / "question.jsonl", ROWS[:1])
    written(folder / "b" / "data" / "question.jsonl", ROWS)
    options = SuiteOptions(suite="gsm8k")
    monkeypatch.setenv(suites.FOLDER, str(folder))
    assert len(read_suite(options).questions) == 3
    (folder / "b" / "data" / "question.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds no question\.jsonl of somebody/Suite"):
        read_suite(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "x.jsonl"}, "no file and none of spec-bench"),
        ({"suite_share": 0.2}, "give suite, too"),
    ],
)
def test_options_that_do_not_go_together(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_suite(SuiteOptions(**options), ())


def test_a_system_turn_behind_the_first_question_is_refused(tmp_path: Path) -> None:
    turns = [user("Hi."), {"role": "system", "content": "Be brief."}, user("And then?")]
    path = written(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(UserError, match="turn of the system behind its first question"):
        of_file(path)
