"""Every defect that doctor knows is planted, found under its name, and gone when the thing is
sound."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import template_hash
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.check.data import (
    Row,
    chats_of,
    check_after_end,
    check_ends,
    check_masks,
    check_start,
    marked,
)
from draftsmith.train.check.doctor import check_folder, in_brief, run, show_data
from draftsmith.train.check.finding import ok
from draftsmith.train.check.memory import compare
from draftsmith.train.check.models import check_compiler, check_draft
from draftsmith.train.config import DoctorConfig
from scripts.paths import ROOT
from tests.conftest import make_tokenizer
from tests.data_folders import sampled_from, write_rows


@pytest.fixture
def diagnose(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, dict[str, str]]]:
    """Findings by check; the exit status must agree with them."""

    def examine(**options: Any) -> dict[str, dict[str, str]]:
        capsys.readouterr()
        status = run(DoctorConfig(**{"target": target.name, "json": True, **options}))
        told = capsys.readouterr()
        report = json.loads(told.out)
        assert ("comparing the texts" in told.err) == ('"data.distribution"' in told.out)
        assert status == (1 if report["fail"] else 0)
        assert len(report["findings"]) == report["ok"] + report["warn"] + report["fail"]
        assert all(finding["mend"] for finding in report["findings"] if finding["status"] != "ok")
        return {finding["check"]: finding for finding in report["findings"]}

    return examine


@pytest.fixture
def judge(target: Target) -> Callable[..., dict[str, dict[str, str]]]:
    """Findings about a folder alone, by check."""

    def examine(folder: str, **options: Any) -> dict[str, dict[str, str]]:
        config = DoctorConfig(target=target.name, data=(folder,), **options)
        findings = check_folder(config, folder, target)
        assert all(finding.mend for finding in findings if finding.status != "ok")
        return {finding.check: finding._asdict() for finding in findings}

    return examine


@pytest.fixture
def make_data(tmp_path: Path, target: Target) -> Callable[..., str]:
    """A folder as `generate` writes it: the target's own answers, unless rows are given."""

    def make(rows: list[Row] | None = None, temperature: float = 1.0, **provenance: Any) -> str:
        rows = own_rows(target, temperature) if rows is None else rows
        columns = [
            {"input_ids": row.input_ids, "loss_mask": [int(bit) for bit in row.loss_mask]}
            for row in rows
        ]
        template = template_hash(target.tokenizer().chat_template)
        own = {"template_hash": template, "temperature": temperature, "complete": True}
        folder = tmp_path / f"data-{len(list(tmp_path.iterdir()))}"
        return str(write_rows(folder, columns, sampled_from(target) | own | provenance))

    return make


@pytest.mark.long
def test_the_ways_that_this_processor_is_fastest_in_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a target that is large enough for a choice; the next line of one is the same."""
    options = {"target": str(ROOT / "scripts" / "quickstart_target"), "json": True}
    told = []
    for _ in range(2):
        assert run(DoctorConfig(**options)) == 0
        findings = json.loads(capsys.readouterr().out)["findings"]
        told.append([one["what"] for one in findings if one["check"] == "cpu.ways"])
    assert told[0] == told[1]
    assert sum(line.startswith("many rows, ") for line in told[0]) >= 3
    assert all(re.search(r"\d\.\d\d ms \(", line) for line in told[0])


def test_a_table_has_one_line_for_all_ways() -> None:
    sound = [ok("target.loads", "it does"), ok("draft.loads", "it does")]
    ways = [ok("cpu.ways", f"many rows, {rows}") for rows in range(20)]
    first, brief, last = in_brief([sound[0], *ways, sound[1]])
    assert [first, last] == sound and brief.what.startswith("for 20 shapes of work")
    assert in_brief(sound) == sound


def own_rows(target: Target, temperature: float) -> list[Row]:
    prompts = [[5 + index, 9, 14] for index in range(12)]
    answers = target.answer(prompts, max_new_tokens=24, temperature=temperature)
    return [
        Row(p + a, [False] * len(p) + [True] * len(a))
        for p, a in zip(prompts, answers, strict=True)
    ]


def save_eagle3(folder: Path, target: Target, **options: Any) -> str:
    counts = torch.arange(target.vocab_size, 0, -1)
    drafter = Eagle3.create(
        Eagle3Options(taps=(1, 2, 3), **options), target, seed=0, token_counts=counts
    )
    checkpoint.save(drafter, folder, target)
    return str(folder)


def test_sound_input_has_no_complaint(
    target: Target, diagnose: Callable[..., Any], make_data: Callable[..., str], tmp_path: Path
) -> None:
    found = diagnose(draft=save_eagle3(tmp_path / "draft", target), data=make_data())
    complaints = {check for check, finding in found.items() if finding["status"] != "ok"}
    # The answers of a target with random weights end nowhere.
    assert complaints == {"data.ends"}, found
    assert {
        "target.loads",
        "kernels.compiler",
        "draft.taps",
        "memory.serving",
        "memory.training",
        "data.target",
        "data.distribution",
    } <= found.keys()
    assert "raw layer ids [1, 2, 3] of 4" in found["draft.taps"]["what"]


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DoctorConfig(target=str(tmp_path / "gone"))) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("fail  target.loads  there is no folder ")
    assert "-> check the path of the model" in shown and shown.endswith("0 ok, 0 warn, 1 fail\n")


def test_a_target_that_holds_nan_fails(
    diagnose: Callable[..., Any], target: Target, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target.name, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][200:] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    found = diagnose(target=str(broken))
    assert any(finding["status"] == "fail" for finding in found.values()), found


def test_other_weights_taps_out_of_order_and_too_few_positions_are_warned_of(
    target: Target, tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    other = Target.load(tiny_target("llama", seed=1))
    draft = Path(save_eagle3(tmp_path / "draft", other))
    config = read_json(draft / "config.json")
    changes = {"eagle_aux_hidden_state_layer_ids": [3, 2, 1], "max_position_embeddings": 128}
    write_json(draft / "config.json", config | changes)
    asked = DoctorConfig(target=target.name, draft=str(draft))
    findings = check_draft(asked, checkpoint.load_draft(asked, target), target)
    found = {finding.check: finding for finding in findings}
    assert {found[f"draft.{one}"].status for one in ("target", "taps", "positions")} == {"warn"}
    assert "[3, 2, 1]" in found["draft.taps"].what and "128" in found["draft.positions"].what


@pytest.mark.long
def test_text_of_another_model_is_noticed(
    judge: Callable[..., Any], make_data: Callable[..., str], tiny_target: Callable[..., str]
) -> None:
    other = Target.load(tiny_target("llama", seed=1))
    for temperature in (0.0, 1.0):
        own = judge(make_data(temperature=temperature))
        assert own["data.distribution"]["status"] == "ok"
        foreign = make_data(
            own_rows(other, temperature), temperature=temperature, target_revision=other.revision
        )
        found = judge(foreign)
        assert found["data.distribution"]["status"] == "warn", found["data.distribution"]
        assert found["data.target"]["status"] == "warn"
    filtered = judge(make_data(own_rows(other, 1.0), top_p=0.5))
    assert "data.distribution" not in filtered, (
        "the distribution of filtered text is not the target's"
    )


FOREIGN = {"tokenizer_hash": "x", "template_hash": "x", "complete": False}


@pytest.mark.parametrize(
    ("rows", "provenance", "checks"),
    [
        (
            [
                Row([5, 6, 288], [False, True, True]),
                Row([5, 6, 7], [True, True, True]),
                Row([5] * 60, [False] * 59 + [True]),
            ],
            {},
            {"data.ids": "fail", "data.masks": "warn", "data.length": "warn"},
        ),
        ([Row([5, 6, 7], [True, False, False])] * 2, {}, {"data.masks": "fail", "data.ids": "ok"}),
        ([Row([5, 6, 7], [False, True, True])], {"target_revision": None}, {"data.target": "ok"}),
        ([Row([5, 6, 7], [False, True, True])], {"target_revision": "x"}, {"data.target": "warn"}),
        (
            [Row([5, 6, 7], [False, True])] * 2,
            FOREIGN,
            {
                "data.ids": "fail",
                "data.tokenizer": "fail",
                "data.template": "warn",
                "data.complete": "warn",
            },
        ),
    ],
)
def test_rows_and_provenance(
    judge: Callable[..., Any],
    make_data: Callable[..., str],
    rows: list[Row],
    provenance: dict[str, Any],
    checks: dict[str, str],
) -> None:
    found = judge(make_data(rows, **provenance), max_length=50)
    assert {check: found[check]["status"] for check in checks} == checks


def test_unreadable_data_fails(judge: Callable[..., Any], make_data: Callable[..., str]) -> None:
    broken = Path(make_data([Row([5, 6], [False, True])]))
    (broken / "part-00000.parquet").write_bytes(b"PAR1 broken")
    for folder in ("gone", make_data([]), str(broken)):
        assert judge(folder)["data.reads"]["status"] == "fail", folder


def test_doubled_beginnings() -> None:
    doubled, single = Row([2, 2, 7], [False, False, True]), Row([2, 7, 2], [False, True, True])
    assert check_start([doubled, single], 2).status == "fail"
    assert check_start([single], 2).status == "ok" and check_start([doubled], None).status == "ok"
    # a template's own, behind a system prompt
    inside = Row([5, 2, 2, 7], [False, False, False, True])
    assert check_start([inside], 2).status == "fail"
    assert check_masks([single, Row([3], [True])]).status == "warn"


def test_masks_that_go_on_behind_the_end_of_an_answer() -> None:
    """What a mask of whole rendered turns does: the line break behind the end of text is the
    template's."""
    through = Row([7, 8, 0, 9, 5], [False, True, True, True, False])
    ended = Row([7, 8, 0, 9, 5], [False, True, True, False, False])
    two_answers = Row([7, 8, 0, 9, 5, 0], [False, True, True, False, True, True])
    assert check_after_end([ended, through], (0,)).status == "warn"
    assert check_after_end([ended, two_answers], (0,)).status == "ok"


def test_texts_without_the_tokens_of_a_template_are_no_chats() -> None:
    tokenizer = make_tokenizer()
    chat, text = (Row([*ids, 9], [False, False, True]) for ids in ([2, 8], [7, 8]))
    assert chats_of([chat, text], tokenizer) == [chat, text]  # of a template of plain text
    tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    tokenizer.chat_template = "<|user|>{{ messages[0].content }}"
    mark = tokenizer.convert_tokens_to_ids("<|user|>")
    chat = Row([mark, 8, 9], [False, False, True])
    assert chats_of([chat, text], tokenizer) == [chat]
    tokenizer.chat_template = None
    assert chats_of([chat, text], tokenizer) == []


def test_answers_that_mostly_do_not_end_are_warned_of() -> None:
    ended, cut = Row([7, 8, 0], [False, True, True]), Row([7, 0, 9], [False, True, True])
    found = check_ends([ended, cut, cut], (0,))
    assert (found.status, found.what) == ("warn", "1 of 3 answers end by themselves")
    assert check_ends([ended, cut], (0,)).status == "ok"


def test_the_first_rows_are_shown_whole_with_their_masks(
    target: Target, make_data: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    ids = target.tokenizer()("def f(x):\n", add_special_tokens=False)["input_ids"]
    rows = [Row(ids, [False] * 2 + [True] * (len(ids) - 2)) for _ in range(3)]
    data = (make_data(rows),)
    config = DoctorConfig(target=target.name, data=data, show=2, max_length=len(ids) - 1)
    show_data(config, [ok("data.masks", "they are sound")])
    out = capsys.readouterr().out
    text = target.tokenizer().decode
    line = (
        f"--- row 1: {len(ids) - 1} tokens, cut from {len(ids)}, {len(ids) - 3} "
        f"trained\n{text(ids[:2])}[[{text(ids[2:-1])}]]"
    )
    assert line in out and "--- row 2" in out and "--- row 3" not in out


def test_data_alone_is_judged_with_the_target_it_names(
    diagnose: Callable[..., Any], make_data: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="target"):
        diagnose(target=None, data=make_data(target=None))
    with pytest.raises(UserError, match="provenance"):
        diagnose(target=None, data=str(tmp_path / "gone"))


def test_text_cannot_steer_the_terminal() -> None:
    class Letters:
        def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(map(chr, ids))

    assert marked([97, 27, 98], [False, True, True], Letters()) == "a[[\ufffdb]]"


def test_a_machine_without_a_compiler_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = check_compiler()
    assert found.status == "warn" and "install g++" in found.mend


def test_memory_beyond_the_machine_is_warned_of() -> None:
    assert compare("memory.serving", "much", 2**60, torch.device("cpu"), "less").status == "warn"
    assert compare("memory.serving", "little", 2**20, torch.device("cpu"), "less").status == "ok"


def test_a_model_that_ignores_the_attention_interface_fails(
    diagnose: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import GitConfig

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    vision = sizes | {"image_size": 32, "patch_size": 16}
    config = GitConfig(vocab_size=288, vision_config=vision, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "git")
    assert diagnose(target=str(tmp_path / "git"))["target.loads"]["status"] == "fail"


def test_every_folder_is_examined_and_named(make_data, capsys):
    good, bad = make_data(), make_data([Row([5, 9, 14], [False, False, False])])
    # Of the target that the first of them names.
    status = run(DoctorConfig(data=(f"{good}:2", bad), json=True))
    findings = json.loads(capsys.readouterr().out)["findings"]
    masks = {one["what"].split(": ")[0]: one for one in findings if one["check"] == "data.masks"}
    assert status == 1
    assert {path: one["status"] for path, one in masks.items()} == {good: "ok", bad: "fail"}
    assert {one["status"] for one in findings if one["check"] == "data.target"} == {"ok"}
