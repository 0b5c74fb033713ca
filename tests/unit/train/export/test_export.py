"""The export command around the layouts: where it reads and writes, its model card, its
refusals."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCardData, constants, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers import AutoModelForCausalLM

from draftsmith.drafters.layouts import hub
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.config import LAYOUTS, ExportConfig, OptimConfig, TrainConfig
from draftsmith.train.export.start import run
from draftsmith.train.export.table import REASONS, WRITERS, writer_name
from tests.conftest import save_adapter, small_files


@pytest.fixture
def draft(tmp_path: Path, tiny_target: Callable[..., str]) -> Path:
    folder = tmp_path / "draft"
    AutoModelForCausalLM.from_pretrained(tiny_target("llama", seed=1)).save_pretrained(folder)
    set_record(
        folder,
        family="draft-lm",
        target={"name": tiny_target("llama")},
        training={"steps": 7},
        evaluation=[],
    )
    return folder


def set_record(folder: Path, **values: Any) -> None:
    record = folder / "draftsmith.json"
    known = read_json(record) if record.is_file() else {"schema": 1}
    write_json(record, {**known, **values})


def export(source: Path, out: str = "out", **options: Any) -> Path:
    folder = source.parent / out
    run(ExportConfig(**{"draft": str(source), "to": "hf", "out": str(folder), **options}))
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        export(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_layout_that_is_not_written_is_refused_with_a_reason() -> None:
    for family, writers in WRITERS.items():
        for layout in LAYOUTS:
            if layout not in writers:
                with pytest.raises(UserError, match=r"\w+; export this draft --to \w+"):
                    writer_name(family, layout)
    assert not any(layout in WRITERS[family] for family, layout in REASONS)


def test_an_earlier_export_is_replaced_and_nothing_else(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(draft)
    (out / "leftover").write_text("x")
    assert not (export(draft) / "leftover").exists()
    monkeypatch.setattr("draftsmith.train.export.start.loading", None)  # refused before it
    for name in ("mine", "other-draft"):
        (draft.parent / name).mkdir()
    (draft.parent / "mine" / "notes.txt").write_text("x")
    assert "is no earlier export" in refusal(draft, out="mine")
    assert (draft.parent / "mine" / "notes.txt").is_file()
    assert "is where the export is read from" in refusal(draft, out="draft")
    said = "the speculators library does not draft with draft-lm; export this draft --to vllm or "
    assert said + "sglang or hf" in refusal(draft, to="speculators")
    set_record(draft.parent / "other-draft", family="eagle3", target={"name": "x"})
    assert "is no earlier export" in refusal(draft, out="other-draft")


def test_bad_input_is_one_sentence(draft: Path, tmp_path: Path, tiny_target: Any) -> None:
    assert "no folder './gone'; check the path of the draft" in refusal(draft, draft="./gone")
    assert "no folder './gone'; check the path of the model" in refusal(draft, target="./gone")
    assert "option 'speculative_tokens' is 0" in refusal(draft, speculative_tokens=0)
    set_record(draft, target={})
    assert "does not say which target it is for; give --target" in refusal(draft)
    set_record(draft, target={"name": tiny_target("llama"), "tokenizer_hash": "another"})
    assert "another tokenizer" in refusal(draft)
    set_record(draft, target={"name": str(tmp_path)})
    assert "config.json" in refusal(draft)
    set_record(draft, family="suffix")
    assert "family 'suffix' has no weights to export" in refusal(draft)
    (draft / "draftsmith.json").write_text("{")
    assert "is not valid JSON" in refusal(draft)


@pytest.mark.long
def test_a_target_may_be_an_adapter(draft: Path, tiny_target: Any, tmp_path: Path) -> None:
    """Its configuration is the base's; layouts that hold weights of the target are refused."""
    adapter = save_adapter(tiny_target("llama"), tmp_path / "adapter")
    out = export(draft, target=adapter)
    assert (out / "README.md").is_file()
    assert (out / "tokenizer.json").is_file()
    set_record(draft, family="mtp", target={"name": adapter})
    assert "is an adapter of" in refusal(draft, to="vllm", out="stitched")


@pytest.mark.usefixtures("capsys")  # What is printed goes to no file.
def test_a_full_disk_is_one_sentence_and_leaves_nothing(draft: Path) -> None:
    for most_bytes in (200, 6_000):
        with small_files(most_bytes):
            said = refusal(draft, out="full")
        assert "full' cannot be written (" in said and "File too large" in said
        assert not (draft.parent / "full").exists()
    assert (export(draft, out="full") / "README.md").is_file()


@pytest.mark.parametrize("name", ["ann/target", "ann/target@v1"])
def test_a_target_on_the_hub_is_not_downloaded_for_its_configuration(
    draft: Path, tiny_target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    asked: list[Any] = []
    (tmp_path / "models--ann--target" / "snapshots").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def snapshot(
        name: str, *, ignore_patterns: list[str] | None, revision: str | None = None
    ) -> str:
        asked.append((name, ignore_patterns))
        return tiny_target("llama")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    set_record(draft, target={"name": name})
    card = (export(draft) / "README.md").read_text()
    assert [(name, "*.safetensors" in files) for name, files in asked] == [("ann/target", True)]
    assert "base_model: ann/target\n" in card and "@v1" not in card


def test_a_draft_made_elsewhere_needs_no_record(draft: Path, tiny_target: Any) -> None:
    (draft / "draftsmith.json").unlink()
    assert "does not say which target" in refusal(draft)
    out = export(draft, target=tiny_target("llama"))
    card = (out / "README.md").read_text()
    assert "Nothing was measured for this checkpoint" in card and "alpha_1" not in card
    assert "carries no training record" in card
    assert read_json(out / "draftsmith.json")["family"] == "draft-lm"
    shutil.copy(Path(tiny_target("other_vocab")) / "tokenizer.json", draft)
    shutil.copy(Path(tiny_target("other_vocab")) / "tokenizer_config.json", draft)
    said = refusal(draft, target=tiny_target("llama"))
    assert "the draft's tokenizer is not the target's" in said


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def evaluation(temperature: float, tau: float) -> dict[str, Any]:
    return {
        "temperature": temperature, "k": 3, "documents": 5, "tokens": 1234, "rounds": 500.0,
        "tau": estimate(tau),
        "alpha": [estimate(0.71), estimate(0.62), None],
        "unlikely": 0.0, "method": "by a test",
    }  # fmt: skip


def tight(card: str) -> str:
    """Tables without the blanks that make their columns even."""
    return re.sub(" +", " ", card)


def test_the_card_shows_what_was_measured(draft: Path) -> None:
    tasks = {"qa": {"tau": estimate(2.5)}, "runs/data/math": {"tau": estimate(2.1)}}
    found = [evaluation(t, 2.4 - t / 4) | {"data": "x", "folders": tasks} for t in (1.0, 0.0)]
    set_record(draft, evaluation=found)
    (draft / "curves.png").write_bytes(b"\x89PNG")
    out = export(draft)
    card = tight((out / "README.md").read_text())
    assert "| prompts | tau, T = 0 | tau, T = 1 |" in card
    assert "| math | 2.10 [2.09, 2.11] | 2.10 [2.09, 2.11] |" in card
    assert "| all | 2.40 [2.39, 2.41] | 2.15 [2.14, 2.16] |" in card
    assert "T = 0: 0.710 0.620 -; T = 1: 0.710 0.620 -." in card
    assert "95 % interval over 5 prompts" in card
    set_record(draft, evaluation=[{**one, "documents": 1} for one in found])
    assert "of one prompt, without an interval" in (export(draft) / "README.md").read_text()
    assert "Method: by a test." in card and "`draftsmith.json` holds the whole record" in card
    assert card.index("## Serving") < card.index("## Measured") < card.index("## Training")
    shown = re.findall(r"!\[.*\]\((.*)\)", card)
    assert shown == ["results.png", "curves.png"]
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in shown)


@pytest.mark.parametrize("to, drawn, how", [
    ("vllm", 1.0, "that the target wrote at temperature 1 to prompts from"), ("gguf", None, "of"),
    ("hf", [0.0, 0.7], "that the target wrote at temperature 0, 0.7 to prompts from"),
])  # fmt: skip
def test_the_card_is_read_at_a_glance_and_by_the_hub(
    draft: Path, to: str, drawn: Any, how: str
) -> None:
    """With all that a card can hold, but the target's Hub id and the three lines of a licence."""
    tasks = {f"{draft.parent}/task-{n}": {"tau": estimate(2.5)} for n in range(13)}
    more = {"data": f"{draft.parent}/one {draft.parent}/two", "folders": tasks}
    found = [evaluation(t, 2.4) | more | {"measured": evaluation(t, 2.3)} for t in (0.0, 1.0)]
    data = {"prompts": "org/chats", "answers": 24, "tokens": 1130, "temperature": drawn}
    trained = TrainConfig(
        family="draft-lm", target=read_json(draft / "draftsmith.json")["target"]["name"],
        data=(str(draft.parent / "answers"),), out=str(draft), optim=OptimConfig(lr=1e-3),
        deepspeed=str(draft / "zero.json"), target_server="http://user:pw@10.0.0.5:8000",
    )  # fmt: skip
    training = {"steps": 300, "data": data, "config": asdict(trained)}
    set_record(draft, evaluation=found, training=training)
    (draft / "curves.png").write_bytes(b"\x89PNG")
    path = export(draft, to=to) / "README.md"
    written = path.read_text()
    assert len(written.splitlines()) <= 60 - 4
    assert f"draftsmith train draft-lm {trained.target} optim" in written
    assert f"300 steps, on 24 answers (1130 tokens) {how} `org/chats`. " in written
    # Commands alone name places, those of the target and of the export.
    card = written.replace(trained.target, "TARGET").replace(str(path.parent), "OUT")
    assert not re.search(r"(?<![\w:/.])/\w", card) and str(draft.parent) not in card
    assert "10.0.0.5" not in card
    record = read_json(path.parent / "draftsmith.json")
    assert record["training"]["config"]["target_server"] == "http://10.0.0.5:8000"
    assert record["training"]["config"]["data"] == ["answers"]
    assert str(draft.parent) not in str([record["training"], record["evaluation"]])
    front = metadata_load(path)
    assert front is not None and front["datasets"] == ["org/chats"]
    name, results = model_index_to_eval_results(front["model-index"])
    assert name == path.parent.name and {one.dataset_name for one in results} == {"one, two"}
    assert [(one.metric_name, one.metric_value) for one in results] == [
        (f"tau, temperature {t}, k = 3", 2.4) for t in (0, 1)
    ]
    ModelCardData(**front, ignore_metadata_errors=False)
    assert (
        "draftsmith train draft-lm TARGET optim.lr=0.001 --data answers --out draft "
        "--deepspeed zero.json" in card
    )
    assert "| 5 more in `draftsmith.json` |" in tight(card)


def test_the_card_has_the_targets_licence(draft: Path, tmp_path: Path) -> None:
    target = tmp_path / "licensed"
    shutil.copytree(read_json(draft / "draftsmith.json")["target"]["name"], target)
    for head, found in (("license: mit", "mit"), ("license: [", None)):
        (target / "README.md").write_text(f"---\n{head}\n---\n# A target\n")
        front = metadata_load(export(draft, target=str(target)) / "README.md")
        assert front is not None and front.get("license") == found


def test_the_card_shows_decoded_beside_predicted(draft: Path) -> None:
    decoded = evaluation(1.0, 2.25) | {"measured": {"tau": estimate(2.31)}}
    set_record(draft, evaluation=[decoded, evaluation(0.0, 2.5)])
    card = tight((export(draft) / "README.md").read_text())
    assert "| prompts | tau, T = 0 | tau, T = 1 | tau decoded, T = 1 |" in card
    assert "| all | 2.50 [2.49, 2.51] | 2.25 [2.24, 2.26] | 2.31 [2.30, 2.32] |" in card
    assert "counted in lossless decoding" in card


def test_the_card_drafts_as_many_tokens_as_the_training(draft: Path) -> None:
    for training, k in (({}, 3), ({"config": {"unroll": {"steps": 5}}}, 5)):
        set_record(draft, training=training)
        assert f" --k {k}\n" in (export(draft) / "README.md").read_text()


def test_the_card_says_how_to_serve_in_each_engine(
    draft: Path, tiny_target: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = export(draft, speculative_tokens=4)
    card, target = (out / "README.md").read_text(), tiny_target("llama")
    assert f'vllm serve {target} --speculative-config \'{{"method": "draft_model"' in card
    assert '"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"' in card
    assert "vLLM's default drafts its likeliest token" in card
    lossy = (
        "vLLM 0.21 to 0.28 with its V2 model runner and draft_sample_method probabilistic does not"
    )
    assert lossy in card and lossy in capsys.readouterr().out
    assert "--speculative-algorithm STANDALONE" in card
    assert "--speculative-num-draft-tokens 5" in card
    assert "assistant_model=" in card
    assert f"draftsmith serve {target} --draft {out} --k 4" in card
