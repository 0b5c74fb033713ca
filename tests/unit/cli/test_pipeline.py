"""`draftsmith run`: recipes are checked whole before anything starts, and a stage is run again only
where something that it is made of changed. Stages are a stand-in that a launcher puts in place of
the commands."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cli import main
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.run import read_stages
from draftsmith.commands.table import COMMANDS, load
from draftsmith.config import build, read_yaml
from draftsmith.drafters.checkpoint import locate
from draftsmith.drafters.versions import CURRENT
from draftsmith.errors import UserError

SHIPPED = sorted((Path(__file__).parents[3] / "recipes" / "pipelines").glob("*.yaml"))
# Appends its stage to `calls`, makes the result, and fails where a file `broken` lies.
STAND_IN = """#!/bin/sh
for word; do case "$before" in --out|--versions) out="$word";; esac; before="$word"; done
echo "$3 $(basename "$out")" >>calls
echo "$DRAFTSMITH_API_KEY: $*" >>words
if [ -e broken ]; then echo "draftsmith: error: no room; make some" >&2; exit 2; fi
case "$out" in
*.json) echo '{"evaluation": [{"temperature": 1.0, "k": 2, "alpha": [{"value": 0.5}, null],
  "tau": {"value": 1.75, "low": 1.5, "high": 2.0}}]}' >"$out";;
*) mkdir -p "$out"; echo made >>"$out/made";;
esac
"""
RECIPE = """
settings: {target: null, prompts: prompts.jsonl, steps: 2}
stages:
  - name: data
    command: generate
    launch: ./stand-in
    options: {target: "${target}", prompts: "${prompts}", count: 8}
  - name: draft
    command: train
    launch: ./stand-in
    options: {family: eagle3, target: "${target}", data: "${data}", steps: "${steps}", optim: {lr: 1.0e-5}}
  - name: figures
    command: eval
    launch: ./stand-in
    options: {target: "${target}", draft: "${draft}", data: "${data}", temperature: [0, 1]}
"""
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start("steps=3")` runs the recipe with `--set` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    Path("stand-in").write_text(STAND_IN)
    Path("stand-in").chmod(0o755)

    def run(*changes: str, more: tuple[str, ...] = ()) -> int:
        return main(["run", "recipe.yaml", "--out", "o", *more, "--set", "target=T", *changes])

    return run


def report_of(out: Path) -> str:
    """The report without the padding of its tables."""
    return re.sub(" +", " ", (out / "report.md").read_text())


def calls() -> list[str]:
    """Stages that were started since the last look."""
    file = Path("calls")
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [line.split()[1].removesuffix(".json") for line in lines]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_pipelines_are_valid(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read_yaml(path)["settings"]
    given = [f"{name}=x" for name, value in settings.items() if value is None]
    changes = ["--set", *given] if given else []
    arguments = ["run", str(path), "--dry-run", "--out", str(tmp_path / "o"), *changes]
    assert main(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    stages = read_stages(path, given, tmp_path / "o")
    assert len(lines) == len(stages) >= 3 and not (tmp_path / "o").exists()
    for line, stage in zip(lines, stages, strict=True):
        name, *words = shlex.split(line.split("draftsmith.cli ")[-1].removeprefix("draftsmith "))
        cls = load(COMMANDS[name].config)
        # What is printed, typed again, has the options of the recipe.
        typed = build(cls, collect(cls, parse(parser_for(name, cls), words)))
        assert typed == stage.config


def test_there_are_the_published_pipelines() -> None:
    names = {path.stem for path in SHIPPED}
    assert names >= {"direct-alignment", "osd", "eagle3-8b", "mtp-qwen3", "dflash-8b"}


def test_the_draft_of_the_demonstration_model_needs_no_setting_and_can_be_tried_small(
    tmp_path: Path,
) -> None:
    path = next(path for path in SHIPPED if path.stem == "eagle3-demo")
    for words, count, minutes, teacher in (
        ([], 11000, 1440, "stored"),
        (["count=24", "minutes=0.5", "teacher=live"], 24, 0.5, "live"),
    ):
        answers, long, own, draft, figures = read_stages(path, words, tmp_path)
        assert own.config.self_prompts == count and own.config.prompts == ""
        assert (draft.config.minutes, draft.config.teacher) == (minutes, teacher)
        assert draft.config.draft.draft_vocab_size == 8192
        assert draft.needs == ["answers", "long", "own"] and figures.needs == ["answers", "draft"]
        assert draft.config.data == tuple(stage.config.out for stage in (answers, long, own))


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("temperature: [", "temprature: [", "stage 'figures' (eval): unknown option 'temprature'; did you mean"),
        ("lr: 1.0e-5", "lr: -1", "stage 'draft' (train): option 'optim.lr' is -1.0; it must be above 0"),
        ("count: 8", "count: 0", "stage 'data' (generate): option 'count' is 0; it must be at least 1"),
        ("command: eval", "command: evl", "option 'stages.command' is 'evl'; it must be one of plan, doctor, generate"),
        ("command: eval", "command: serve", "option 'stages.command' is 'serve'; it must be one of"),
        ('data: "${data}", steps', 'data: "${figures}", steps', "'${figures}' is of no setting or earlier stage"),
        ('draft: "${draft}"', 'draft: "${drft}"', "unknown name 'drft'; did you mean 'draft'?"),
        ('draft: "${draft}"', 'draft: "$ x"', "a $ without a name; write $$"),
        ("target: null", "target: null, k: 1", None),
        ("name: figures", "name: data", "'data' cannot name a setting or stage; use lower-case letters, digits and _, each name once"),
        ("name: figures", "name: report", "'report' cannot name"),
        ("count: 8", "count: 8, out: x", "option 'out' is given, and a pipeline decides it"),
        ("launch: ./stand-in", "lunch: ./stand-in", "unknown option 'stages.lunch'; did you mean 'stages.launch'?"),
        ("launch: ./stand-in", "launch: ./nothing", "launcher './nothing' is not installed"),
        ("launch: ./stand-in", "launch: ${steps}", "launcher '2' is not installed"),
        ('prompts: "${prompts}", count: 8}', 'prompts: "${prompts}", count: 8}\n    options:', "option 'stages.options' is None; it must be a mapping"),
        ("stages:", "stage:", "unknown option 'stage'; did you mean 'stages'?"),
        ("command: train", "command: train\n    recipe: r.yaml", "stage 'draft' (train): recipe 'r.yaml' does not exist"),
    ],
)  # fmt: skip
def test_a_mistake_in_any_stage_is_a_sentence_before_the_first_starts(
    old: str, new: str, wanted: str | None, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RECIPE.count(old) >= 1
    Path("recipe.yaml").write_text(RECIPE.replace(old, new))
    assert start() == (2 if wanted else 0)
    shown = capsys.readouterr().err
    if wanted:
        assert wanted in shown and shown.count("\n") == 1 and calls() == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (["tagret=T"], "unknown setting or stage 'tagret'; did you mean 'target'?"),
        (["draft=3"], "--set draft=3 names a stage; write draft.OPTION=VALUE"),
        (["draft.stps=3"], "stage 'draft' (train): unknown option 'stps'"),
        (["steps=many"], "stage 'draft' (train): option 'steps' is 'many'"),
        (["prompts=null"], "stage 'data' (generate): setting 'prompts' has no value; give --set"),
    ],
)
def test_a_wrong_setting_is_a_sentence(
    changes: list[str], wanted: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*changes) == 2 and wanted in capsys.readouterr().err and calls() == []


def test_a_learner_without_an_end_is_refused(tmp_path: Path) -> None:
    path = next(path for path in SHIPPED if path.stem == "osd")
    text = path.read_text()
    assert "    until_idle_s: 5\n" in text
    (tmp_path / "osd.yaml").write_text(text.replace("until_idle_s: 5", "poll_s: 5"))
    given = ["target=T", "draft=D", "buffer=B", "prompts=P"]
    with pytest.raises(UserError, match="distill would never end; give until_idle_s or max_up"):
        read_stages(tmp_path / "osd.yaml", given, tmp_path)


def test_finished_stages_are_kept_until_what_they_are_made_of_changes(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start() == 0 and calls() == ["data", "draft", "figures"]
    assert start() == 0 and calls() == []
    # An option: that stage and what reads its result; the result before is put away.
    assert start("steps=3") == 0 and calls() == ["draft", "figures"]
    shown = capsys.readouterr().out
    assert "draft: anew" in shown and "figures: anew" in shown and "data: kept" in shown
    assert Path("o/draft/made").read_text() == "made\n"
    away = sorted(path.name for path in Path("o/replaced").iterdir())
    assert [re.sub(r"-\d+", "", name) for name in away] == ["draft", "figures.json"]
    assert start("steps=3", "figures.k=4") == 0 and calls() == ["figures"]
    assert start("figures.k=4", more=("--dry-run",)) == 0 and calls() == []
    shown = capsys.readouterr().out
    assert "# data: kept" in shown and "# draft: anew" in shown and "# figures: anew" in shown
    assert start("steps=3", "figures.k=4") == 0 and calls() == []
    # A result that is gone, and a folder that was moved with all of them.
    Path("o/figures.json").unlink()
    assert start("steps=3", "figures.k=4") == 0 and calls() == ["figures"]
    os.rename("o", "p")
    again = ["run", "recipe.yaml", "--out", "p", "--set", "target=T", "steps=3", "figures.k=4"]
    assert main(again) == 0 and calls() == []


def test_a_learner_goes_on_with_what_came(start: Start) -> None:
    learner = """
  - {name: learn, command: distill, launch: ./stand-in,
     options: {target: T, draft: d, buffer: b, until_idle_s: 1}}
"""
    Path("recipe.yaml").write_text(f"settings: {{target: null}}\nstages:{learner}")
    assert start() == 0 and calls() == ["learn"]
    assert start() == 0 and calls() == ["learn"] and not Path("o/replaced").exists()


def test_a_failed_stage_is_resumed_where_it_stopped(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start() == 0 and calls()
    Path("broken").touch()
    assert start("steps=3") == 2 and calls() == ["draft"]
    own, shown = capfd.readouterr().err.splitlines()[-2:]
    assert own == "draftsmith: error: no room; make some"
    assert "stage 'draft' (train) ended with status 2, its last lines are above; mend" in shown
    assert start("steps=3") == 2 and calls() == ["draft"]
    assert "| draft | train | ended with status 2 |" in report_of(Path("o"))
    Path("broken").unlink()
    assert start("steps=3") == 0 and calls() == ["draft", "figures"]
    assert "draft: resumed" in capfd.readouterr().out


def test_the_report_has_stages_and_figures(start: Start) -> None:
    assert start() == 0
    page = Path("o/report.html").read_text(encoding="utf-8")
    assert "<td>figures<td>eval<td>finished<td>" in page and "draftsmith.cli train eagle3 T" in page
    report = report_of(Path("o"))
    assert "# recipe" in report and "| draft | train | finished |" in report
    assert "| figures | 1 | 2 | 1.75 [1.50, 2.00] | 0.500 - |" in report


@pytest.mark.parametrize("record", ['{"schema": 1, "stages": {"data": {"begun": 2}}}', "[1]", "{"])
def test_a_record_that_cannot_be_read_is_a_sentence(
    start: Start, record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("o").mkdir()
    Path("o/run.json").write_text(record)
    assert start() == 2 and re.search("error: .*o/run.json'", capsys.readouterr().err)


def test_a_run_beside_another_is_refused(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    Path("o").mkdir()
    with open("o/run.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write('{"pid": 4711, "host": "here"}')
        held.flush()
        assert start() == 2 and calls() == []
    assert (
        "'o' is in use by another run (process 4711 on here); wait until it"
        in capsys.readouterr().err
    )
    assert start() == 0


def test_a_key_is_neither_printed_nor_recorded_nor_listed(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("data.url=http://h", "data.api_key=sesame") == 0
    assert "sesame" not in capsys.readouterr().out
    assert "sesame" not in Path("o/run.json").read_text()
    # Nor is it a word of a process, which every user of the machine may list.
    data, *others = Path("words").read_text().splitlines()
    assert data.startswith("sesame: ") and "sesame" not in data.removeprefix("sesame: ")
    assert "--url http://h" in data and not any("sesame" in line for line in others)


def test_a_folder_of_versions_stands_for_its_live_draft(tmp_path: Path) -> None:
    assert locate(tmp_path) == tmp_path
    (tmp_path / CURRENT).write_text("2\n")
    assert locate(tmp_path) == tmp_path / "v000002"
