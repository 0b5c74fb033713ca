"""`draftsmith eval` on a tiny target whose draft is the target itself, slightly spoiled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from draftsmith import cli
from draftsmith.drafters import checkpoint
from draftsmith.errors import UserError
from draftsmith.files import read_json
from draftsmith.prompts.suites import Question
from draftsmith.train.config import EvalConfig
from draftsmith.train.evaluate.answers import suite_texts
from tests.data_folders import rows_of, sampled_from
from tests.stand_in_drafts import near

PROMPTS = [[5 + n, 40, 200, 11] for n in range(10)]


@pytest.fixture(scope="module")
def spoiled(target, tmp_path_factory) -> Path:
    """The target with noise in its weights: kept often, not always."""
    folder = tmp_path_factory.mktemp("spoiled") / "draft"
    checkpoint.save(near(target, 0.01), folder, target)
    return folder


@pytest.fixture
def draft(spoiled, tmp_path) -> str:
    return str(shutil.copytree(spoiled, tmp_path / "draft"))


@pytest.fixture(scope="module")
def answers(target) -> list[list[int]]:
    return target.answer(PROMPTS, max_new_tokens=12, temperature=1.0, ignore_eos=True)


@pytest.fixture
def data(target, answers, write_data) -> str:
    rows = rows_of(PROMPTS, answers, held_out=range(len(PROMPTS)))
    rows.append({"name": "seen", "split": "train", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    return str(write_data(rows, provenance=sampled_from(target)))


def evaluate(capsys, target, draft, data, *options: str, tokens: int = 8, k: int = 3):
    """What is printed, as `capsys` gives it."""
    command = ["eval", "--target", target.name, "--draft", draft, "--data", data]
    status = cli.main([*command, "--max-tokens", f"{tokens}", "--k", f"{k}", *options])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured


def test_both_temperatures_are_measured_shown_and_stored(target, draft, data, tmp_path, capsys):
    out = tmp_path / "figures.json"
    said = evaluate(capsys, target, draft, data, "--out", str(out), "--store").out
    greedy, sampled = read_json(out)["evaluation"]
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 1.0)
    # Fresh greedy answers (an early end of text shortens them); the sampled ones are the data's own
    # 12 tokens of 10 prompts.
    assert greedy["tokens"] <= 80 and sampled["tokens"] == 120 and sampled["documents"] == 10
    for found in (greedy, sampled):
        assert 1.5 < found["tau"]["low"] <= found["tau"]["value"] <= found["tau"]["high"] <= 4.0
        assert 0 < found["mbsu"] < found["tau"]["value"]
        assert 0.3 < found["alpha"][0]["value"] < 1.0
        (context,) = found["by_context"]
        assert (context["begin"], context["end"]) == (0, 256)
        assert context["tau"]["value"] == pytest.approx(found["tau"]["value"])
        assert context["alpha"] == found["alpha"] and context["rounds"] == pytest.approx(
            found["rounds"]
        )
        assert f"{found['tau']['value']:.2f} [" in said
    assert checkpoint.read_metadata(draft)["evaluation"] == [greedy, sampled]


def test_as_many_tokens_are_drafted_as_the_draft_was_trained_for(
    target, draft, data, tmp_path, capsys
):
    options = ["eval", target.name, "--draft", draft, "--data", data, "--temperature", "0"]
    options += ["--prompts", "1", "--max-tokens", "3"]
    record = tmp_path / "draft" / "draftsmith.json"
    for training, k in (({}, 4), ({"config": {"unroll": {"steps": 2}}}, 2)):
        record.write_text(json.dumps(read_json(record) | {"training": training}))
        assert cli.main(options) == 0
        said = capsys.readouterr().out
        assert f"{k} drafted tokens per round" in said
        assert f"alpha_{k} " in said and f"alpha_{k + 1}" not in said


def test_several_folders_are_measured_together_and_each(
    target, draft, data, write_data, tmp_path, capsys
):
    """One at temperature 1, one greedy: each text counts at its own temperature alone."""
    answers = target.answer(PROMPTS[:4], max_new_tokens=6, temperature=0.0, ignore_eos=True)
    rows = [{**row, "name": f"g{n}"} for n, row in enumerate(rows_of(PROMPTS[:4], answers))]
    provenance = {"target_revision": target.revision, "temperature": 0.0}
    greedy = str(write_data(rows, name="greedy", provenance=provenance))
    out = tmp_path / "figures.json"
    said = evaluate(
        capsys, target, draft, data, "--data", greedy, "--out", str(out), "--temperature", "1",
        "--held-out", "1",
    ).out  # fmt: skip
    found = read_json(out)["evaluation"][0]
    own = found["folders"]
    assert set(own) == {data, greedy} and f"| {greedy} |" in said
    assert own[data]["tokens"] == 122 and 0 < own[greedy]["tokens"] <= 32
    assert found["tokens"] == own[data]["tokens"] + own[greedy]["tokens"]
    assert found["rounds"] == pytest.approx(own[data]["rounds"] + own[greedy]["rounds"])


def test_texts_of_a_folder_of_several_temperatures_are_kept_at_their_own(
    target, draft, write_data, tmp_path, capsys
):
    rows = []
    for n, temperature in enumerate([0.7, 1.0, 0.7, 1.0]):
        (answer,) = target.answer(
            [PROMPTS[n]], max_new_tokens=12, temperature=temperature, ignore_eos=True
        )
        (row,) = rows_of(PROMPTS[n : n + 1], [answer])
        rows.append(row | {"name": f"{n}", "temperature": float(np.float32(temperature))})
    provenance = sampled_from(target) | {"temperature": [0.7, 1.0]}
    folder = str(write_data(rows, name="several", provenance=provenance))
    out = tmp_path / "figures.json"
    options = ("--temperature", "0.7", "1", "--held-out", "1", "--out", str(out))
    evaluate(capsys, target, draft, folder, *options, tokens=1)
    # Two of 12 tokens are the folder's own, and two of one token are new answers.
    assert [one["tokens"] for one in read_json(out)["evaluation"]] == [26, 26]


def test_prompts_and_temperatures_are_chosen(target, draft, data, tmp_path, capsys):
    """Stored figures at other temperatures, and of drafts drawn another way, stay."""
    out = tmp_path / "figures.json"
    others = [{"temperature": 0.0}, {"temperature": 0.5, "draft_sampling": "greedy"}]
    checkpoint.store_evaluation(draft, [*others, {"temperature": 0.5}])
    evaluate(
        capsys, target, draft, data, "--temperature", "0.5", "--prompts", "3", "--out", str(out),
        "--store",
    )  # fmt: skip
    (found,) = read_json(out)["evaluation"]
    assert found["temperature"] == 0.5 and found["documents"] == 3
    assert checkpoint.read_metadata(draft)["evaluation"] == [found, *others]


def test_filtered_samples_are_not_taken_for_the_distribution(target, draft, data, tmp_path, capsys):
    """Text sampled with top-p is answered again: it would flatter the draft."""
    path = tmp_path / "data" / "provenance.json"
    path.write_text(json.dumps(read_json(path) | {"top_p": 0.5}))
    out = tmp_path / "figures.json"
    evaluate(capsys, target, draft, data, "--temperature", "1", "--out", str(out))
    assert read_json(out)["evaluation"][0]["tokens"] <= 80


@pytest.fixture
def suite(tmp_path) -> str:
    rows = [{"category": "chat", "turns": ["for name in", "and then"]}] * 3
    rows += [{"category": "qa", "turns": ["abc abc abc"]}] * 2
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_a_suite_is_answered_and_measured_by_task(target, draft, suite, tmp_path, capsys):
    out = tmp_path / "figures.json"
    options = ["--target", target.name, "--draft", draft, "--suite", suite, "--k", "2"]
    options += ["--max-tokens", "6", "--out", str(out), "--store"]
    assert cli.main(["eval", *options, "--temperature", "0", "1"]) == 0
    page = out.with_suffix(".html").read_text(encoding="utf-8")
    assert "draftsmith eval" in page and "<td>chat<td>" in page and "image/png" in page
    found = read_json(out)["evaluation"]
    for one in found:
        assert one["data"] == suite and one["documents"] == 5
        own = one["folders"]
        assert {task: figures["documents"] for task, figures in own.items()} == {"chat": 3, "qa": 2}
        assert 3 < own["chat"]["tokens"] <= 36 and 2 <= own["qa"]["tokens"] <= 12
        assert one["rounds"] == pytest.approx(own["chat"]["rounds"] + own["qa"]["rounds"])
    assert checkpoint.read_metadata(draft)["evaluation"] == found
    said = capsys.readouterr()
    assert "suite.jsonl: 5 of 5 prompts" in said.err
    # Of the first turns.
    assert "answers at T=1: 30/30 tokens" in said.err and ", 5/5 answers" in said.err
    assert "rounds of qa at T=1: 2/2 answers" in said.err
    assert "| questions" in said.out
    table = [line for line in said.out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table[2:8]]
    assert rows == [
        [t, *own] for t in ("0", "1") for own in (("chat", "3"), ("qa", "2"), ("all", "5"))
    ]


def test_the_second_turn_of_a_suite_is_asked_behind_the_answer_to_the_first(target):
    config = EvalConfig(target=target.name, draft="", max_tokens=5, suite="x")
    first, second = ({"role": "user", "content": text} for text in ("for name in", "and then"))
    question = Question({"messages": [first]}, (second,), "chat")
    one, other = suite_texts(config, 0.0, target, [question])["chat"]
    tokenizer = target.tokenizer()
    said = tokenizer.decode(one.input_ids[one.loss_mask], skip_special_tokens=True)
    asked = [first, {"role": "assistant", "content": said}, second]
    expected = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(other.input_ids[~other.loss_mask]) == expected
    assert one.name == other.name and int(other.loss_mask.sum()) <= 5


def test_a_conversation_that_outgrows_the_target_is_left_out_from_there_on(target, capsys):
    most = target.max_positions - 5
    config = EvalConfig(target=target.name, draft="", max_tokens=5, suite="x")
    short, long = ({"role": "user", "content": text} for text in ("for name in", "ab " * most))
    questions = [
        Question({"messages": [short]}, (long, short), "a"),
        Question({"messages": [long]}, (), "b"),
    ]
    found = suite_texts(config, 0.0, target, questions)
    assert {task: len(own) for task, own in found.items()} == {"a": 1}
    said = capsys.readouterr().err
    assert f"2 conversations do not fit into the target's {target.max_positions} tokens" in said


def test_texts_of_a_suite_are_cut_at_the_longest_length(target, capsys):
    config = EvalConfig(target=target.name, draft="", max_tokens=8, suite="x", max_length=6)
    question = Question({"messages": [{"role": "user", "content": "for name in"}]}, (), "chat")
    with pytest.raises(
        UserError, match="every prompt of the suite is as long; give a larger max_length"
    ):
        suite_texts(config, 1.0, target, [question])
    assert "1 texts are longer than max_length (6)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "'data' is not given; give folders of data, or a suite"),
        (("--suite", "gsm8k", "--data", "x"), "data is ('x',) and chooses other prompts"),
        (("--suite", "x"), "suite is 'x', no file and none of"),
    ],
)
def test_data_or_a_suite_is_given(options, said, target, draft, capsys):
    assert cli.main(["eval", "--target", target.name, "--draft", draft, *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--draft", "no/such/draft"), "no/such/draft"),
        (("--temperature", "warm"), "'warm'"),
        (("--k", "0"), "option 'k' is 0"),
        (("--data", "no/such"), "not a folder"),
        (("--out", "."), "option 'out' is '.', a folder"),
        (("--out", "a.html"), "option 'out' is 'a.html', the page"),
    ],
)
def test_bad_input_is_one_sentence(options, said, target, draft, data, capsys):
    arguments = {"--target": target.name, "--draft": draft, "--data": data, options[0]: options[1]}
    assert cli.main(["eval", *(text for pair in arguments.items() for text in pair)]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.count("\n") == 0


def test_figures_without_a_record_to_keep_them_are_not_worked_out(target, data, capsys):
    arguments = ["eval", "--target", target.name, "--draft", target.name, "--data", data, "--store"]
    assert cli.main(arguments) == 2
    assert "draftsmith.json' does not exist" in capsys.readouterr().err


def test_text_that_the_draft_was_trained_on_is_told(target, draft, write_data, tmp_path, capsys):
    """The default share of `eval` need not be that of the training."""
    rows = [
        {"name": f"{n}", "input_ids": prompt, "loss_mask": [0, 1, 1, 1]}
        for n, prompt in enumerate(PROMPTS)
    ]
    record, provenance = tmp_path / "draft" / "draftsmith.json", {"prompts_hash": "abc"}
    folder = str(write_data(rows, name="same", provenance=provenance))
    for kept_back, held_out, told in (
        (0.1, "0.4", "the draft has seen the rest; give --held-out 0.1"),
        (0.5, "0.4", None),
        (0.5, "0", "nothing of"),
    ):
        training = {"config": {"held_out": kept_back}, "data": provenance}
        record.write_text(json.dumps(read_json(record) | {"training": training}))
        options = ("--temperature", "0", "--held-out", held_out)
        said = evaluate(capsys, target, draft, folder, *options, tokens=1, k=2).err
        assert told in said if told else "the draft has seen" not in said


def test_a_draft_for_another_vocabulary_is_refused(tiny_target, draft, data, capsys):
    command = ["eval", "--target", tiny_target("other_vocab"), "--draft", draft, "--data", data]
    assert cli.main(command) == 2
    assert "288" in capsys.readouterr().err
