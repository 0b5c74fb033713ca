from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.prompts import suites
from draftsmith.prompts.published import TRAINING, Published, Suite
from draftsmith.prompts.suites import published_rows, rows_to_train

WORDS = [f"word{n}" for n in range(400)]


def text(seed: int, words: int = 20) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(suites.FOLDER, str(tmp_path))
    return tmp_path


def suite_of(folder: Path, name: str, rows: list, most: int | None = None) -> Suite:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Suite("somebody/Set", "MIT", (Published(path.as_uri(), digest),), most)


def prompts(training: list[Suite], evaluation: list[Suite]) -> list[str]:
    return [row["prompt"] for _, row in published_rows(training, evaluation)]


def test_prompts_of_every_shape_come_without_the_answers_of_others(folder: Path) -> None:
    one = suite_of(
        folder,
        "one.jsonl",
        [
            {"instruction": "Add.", "input": "1 2", "response": "3"},
            {"question": "How many?", "answer": "4"},
            {"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
        ],
    )
    two = suite_of(folder, "two.jsonl", ["Why?"])
    rows = [row for _, row in published_rows([one, two], [])]
    assert all(list(row) == ["prompt"] for row in rows)
    assert sorted(row["prompt"] for row in rows) == [
        "Add.\n\n1 2",
        "How many?",
        "Sort.\n\nb a",
        "Why?",
    ]


def test_a_prompt_that_a_suite_holds_in_part_is_left_out(folder: Path) -> None:
    asked, other = text(1), text(2)
    part = asked.split()
    copied = " ".join([*text(3).split(), *part[5:13], *text(4).split()])
    nearly = " ".join([*text(5).split(), *part[5:12], *text(6).split()])
    loud = asked.upper().replace(" ", ",  ")
    training = suite_of(folder, "t.jsonl", [asked, loud, copied, nearly, other, "Hello there"])
    evaluation = suite_of(
        folder, "e.jsonl", [{"turns": [text(7), asked]}, {"question": "Hello, there!"}]
    )
    assert sorted(prompts([training], [evaluation])) == sorted([nearly, other])


def test_each_prompt_once_in_an_order_that_no_file_decides(folder: Path) -> None:
    texts = [text(seed) for seed in range(40)]
    forth = suite_of(folder, "forth.jsonl", [*texts, texts[0].upper()])
    back = suite_of(folder, "back.jsonl", texts[::-1])
    found = prompts([forth], [])
    assert len(found) == 40 and found != texts
    assert [one.lower() for one in found] == [one.lower() for one in prompts([back, forth], [])]


def test_no_set_outweighs_the_others(folder: Path) -> None:
    large = suite_of(folder, "large.jsonl", [text(seed) for seed in range(50)], most=10)
    small = suite_of(folder, "small.jsonl", [text(seed) for seed in range(100, 110)])
    found = prompts([large, small], [])
    assert len(found) == 20
    assert 2 <= sum(one in prompts([large], []) for one in found[:10]) <= 8


def test_a_set_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"holds no codegen-instruct\.json .* as published"):
        next(published_rows(TRAINING, []))


def test_other_sources_are_read_as_ever(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Hi."}) + "\n", encoding="utf-8")
    assert [row for _, row in rows_to_train(str(path))] == [{"prompt": "Hi."}]


def test_tasks_of_the_library_ask_about_long_texts_and_are_always_the_same() -> None:
    rows = list(rows_to_train("stdlib:tasks"))
    asked = [row["prompt"] for _, row in rows]
    assert len(asked) == len(set(asked)) > 2000
    assert asked == [row["prompt"] for _, row in rows_to_train("stdlib:tasks")]
    assert sum(map(len, asked)) > 1000 * len(asked)
    # The first ones are of every kind.
    for words in ("Summarize: ", "three sentences.", "What is ", "for a beginner:", "main points"):
        assert sum(words in prompt for prompt in asked[:100]) >= 5, words
