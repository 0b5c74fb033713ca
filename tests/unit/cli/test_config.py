"""Typed configuration: conversion, precedence, and errors that name the mend."""

from __future__ import annotations

import dataclasses
import math
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftsmith import config as configuration
from draftsmith.commands.arguments import collect, parse, parser_for
from draftsmith.commands.table import COMMANDS, load
from draftsmith.config import AT_LEAST_1, option
from draftsmith.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = option(1e-3)
    schedule: str = option("cosine", choices=("cosine", "constant"))


@dataclass(frozen=True, kw_only=True)
class Sample:
    family: str = option(help="which", positional=True, choices=("a", "b"))
    target: str = option(help="a folder")
    steps: int = option(10, limits=AT_LEAST_1)
    minutes: float | None = option(None)
    learn: bool = option(False)
    taps: list[int] = option(factory=list)
    optim: Optim = option(factory=Optim)
    port: int = option(80)
    keys: tuple[str, ...] | None = option(None)
    cache: bool = option(True)


def resolve(*argv: str) -> Sample:
    """What `draftsmith export ARGV` would build were `Sample` its configuration."""
    return configuration.build(Sample, collect(Sample, parse(parser_for("export", Sample), argv)))


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(*argv)
    return str(caught.value)


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_and_conversions() -> None:
    words = "a optim.lr=1e-4 --target t --steps 1e2 --minutes 3 --learn --taps 2 5"
    built = resolve(*words.split())
    assert built == Sample(
        family="a",
        target="t",
        steps=100,
        minutes=3.0,
        learn=True,
        taps=[2, 5],
        optim=Optim(lr=1e-4),
    )
    assert resolve("b", "--target", "t", "learn=false").optim == Optim()
    assert resolve("b", "--target", "t", "--learn").learn
    assert resolve("b", "--target=t", "minutes=null").minutes is None


def test_flags_win_over_overrides_and_overrides_over_the_recipe(tmp_path: Path) -> None:
    path = recipe(
        tmp_path,
        "target: from-recipe\nsteps: 1\nminutes: 1\noptim: {lr: 0.5, schedule: constant}\n",
    )
    built = resolve("a", path, "steps=2", "minutes=2", "optim.lr=0.25", "--minutes", "3")
    assert (built.target, built.steps, built.minutes) == ("from-recipe", 2, 3.0)
    assert built.optim == Optim(lr=0.25, schedule="constant")


def test_a_recipe_under_any_name_is_named_by_config(tmp_path: Path) -> None:
    path = recipe(tmp_path, "target: t\nsteps: 2\nminutes: 1\n")
    odd = tmp_path / "odd name"
    odd.write_text("steps: 1\nminutes: 2\n")
    for words in (
        ("--config", path, "--config", str(odd)),
        (f"--config={path}", f"--config={odd}"),
    ):
        built = resolve("a", *words, "minutes=3")
        assert (built.target, built.steps, built.minutes) == ("t", 1, 3.0)
    assert "recipe 'absent' does not exist" in refusal("a", "--config", "absent")


@pytest.mark.parametrize("name", ["org/name", "2024", "off", "folder/model.gguf"])
def test_a_word_alone_is_the_target(tmp_path: Path, name: str) -> None:
    path = recipe(tmp_path, "target: other\nsteps: 1\n")
    for words in (
        ("a", name, path),
        ("a", path, "optim.lr=1", name),
        ("a", "--taps", "2", "--steps", "1", name),
    ):
        assert resolve(*words).target == name


def test_a_command_line_is_typed_again_and_holds_no_secret() -> None:
    for words in (
        ("a", "--target", "t"),
        ("b", "optim.lr=1e-5", "--target", "two words", "--taps", "2", "5", "--no-cache"),
        ("a", "--target", "t", "minutes=2", "--learn", "--keys", "x=1", "off"),
        ("a", "--target", "t=1"),
        ("a", "--target", "t.yaml"),
    ):
        line = configuration.command_line("sample", resolve(*words))
        assert resolve(*shlex.split(line)[2:]) == resolve(*words)
        assert "--port" not in line
    assert configuration.command_line("sample", resolve("a", "--target", "t")) == (
        "draftsmith sample a t"
    )
    bench = load(COMMANDS["bench"].config)(url="u", api_key="hidden", ignore_eos=False)
    assert configuration.command_line("bench", bench) == "draftsmith bench ignore_eos=false --url u"
    bench = load(COMMANDS["bench"].config)(url="http://user:p@ss@host:1/v1")
    assert configuration.command_line("bench", bench) == "draftsmith bench --url http://host:1/v1"


def test_a_record_for_others_has_last_parts_of_paths_and_no_logins() -> None:
    given = {
        "data": ["/home/me/x/answers:2", "../mine/y"], "prompts": "jsonl:/home/me/p.jsonl",
        "server": "http://user:pw@host:1/v1", "target": "org/name", "k": 3,
        "folders": {"/home/me/x/answers": 1, "/home/me/y/answers": 2},
    }  # fmt: skip
    assert configuration.for_others(given) == {
        "data": ["answers:2", "y"], "prompts": "jsonl:p.jsonl",
        "server": "http://host:1/v1", "target": "org/name", "k": 3,
        "folders": {"x/answers": 1, "y/answers": 2},
    }  # fmt: skip


def test_later_overrides_win_and_order_on_the_line_does_not_matter(tmp_path: Path) -> None:
    path = recipe(tmp_path, "steps: 1")
    assert resolve("a", "steps=2", "steps=3", path, "--target", "t").steps == 3


def test_a_recipe_or_override_behind_a_list_is_none_of_it(tmp_path: Path) -> None:
    path = recipe(tmp_path, "steps: 1")
    built = resolve("a", "--target", "t", "--taps", "2", "5", path, "optim.lr=0.25")
    assert (built.taps, built.steps, built.optim.lr) == ([2, 5], 1, 0.25)


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("a", "--target", "t", "--stpes", "3"), "'--stpes'; did you mean '--steps'"),
        (("a", "--target", "t", "--stpes=3"), "'--stpes'; did you mean '--steps'"),
        (("a", "--target", "t", "stpes=3"), "'stpes'; did you mean 'steps'"),
        (
            ("a", "--target", "t", "optim.schedul=x"),
            "'optim.schedul'; did you mean 'optim.schedule'",
        ),
        (("a", "--target", "t", "zzzzzz=3"), "known options are"),
        (("a",), "'target' is required; give --target"),
        (("--target", "t"), "required: family; see"),
        (("c", "--target", "t"), "'c'"),
        (("a", "--target"), "--target: expected one argument"),
        (("a", "--target", "t", "--steps", "many"), "'steps' is 'many'; it must be a whole number"),
        (("a", "--target", "t", "--steps", "1.5"), "'steps' is '1.5'; it must be a whole number"),
        (("a", "--target", "t", "--steps", "inf"), "'steps' is 'inf'; it must be a whole number"),
        (("a", "--target", "t", "steps=true"), "'steps' is True; it must be a whole number"),
        (("a", "--target", "t", "learn=maybe"), "'learn' is 'maybe'; it must be true or false"),
        (("a", "--target", "t", "--taps", "1", "x"), "'taps' is 'x'; it must be a whole number"),
        (("a", "--target", "t", "optim=3"), "'optim' is 3; it must be a mapping"),
        (("a", "--target", "t", "lr=3"), "'lr'; did you mean 'optim.lr'"),
        (("a", "--target", "t", "optmi.lr=3"), "'optmi.lr'; did you mean 'optim.lr'"),
        (("a", "--target", "t", "http.port=3"), "'http.port'; did you mean 'port'"),
        (("a", "--target", "t", "prot=3"), "'prot'; did you mean 'port'"),
        (("a", "--target", "t", "--prot", "3"), "'--prot'; did you mean '--port'"),
        (("a", "--target", "t", "port=x"), "'port' is 'x'; it must be a whole number"),
        (("a", "--target", "t", "optim.schedule=linear"), "one of cosine, constant"),
        (("a", "--target", "t", "loose"), "'loose' and 't' are both given as the target"),
        (("a", "steps", "200"), "'steps' and '200' are both given as the target"),
        (("a", "--target", "t", "steps=[1"), "'steps=[1' has a value that is not valid YAML"),
        (("a", "--target", "t", "absent.yaml"), "recipe 'absent.yaml' does not exist"),
    ],
)
def test_errors_name_the_value_and_the_mend(argv: tuple[str, ...], wanted: str) -> None:
    message = refusal(*argv)
    assert wanted in message
    assert "\n" not in message and not message.endswith(".")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("steps: [1", "not valid YAML"), ("- 1\n- 2\n", "must be a mapping"), ("7: 1\n", "'7'")],
)
def test_a_broken_recipe_is_one_sentence(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refusal("a", "--target", "t", recipe(tmp_path, text))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_recipe_in_another_encoding_is_one_sentence(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("target: caf\u00e9\n", encoding=encoding)
    assert "recipe.yaml' is not UTF-8 (" in refusal("a", str(path))


def test_days_and_switches_are_text_but_for_options_that_are_true_or_false(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("target: 2026-11-23\noptim: {schedule: constant}\nlearn: on\n")
    found = resolve("a", str(recipe))
    assert (found.target, found.learn) == ("2026-11-23", True)
    assert configuration.parse_override("thinking=off") == {"thinking": "off"}
    assert resolve("a", str(recipe), "learn=off", "target=yes").target == "yes"


def test_merge_changes_neither_input() -> None:
    base, over = {"optim": {"lr": 1, "schedule": "cosine"}}, {"optim": {"lr": 2}}
    assert configuration.merge(base, over) == {"optim": {"lr": 2, "schedule": "cosine"}}
    assert base == {"optim": {"lr": 1, "schedule": "cosine"}} and over == {"optim": {"lr": 2}}


def test_help_has_the_flag_of_a_switch_that_changes_its_default(tmp_path: Path) -> None:
    assert not resolve("a", "--target", "t", "--no-cache").cache
    path = recipe(tmp_path, "target: t\ncache: false\nlearn: true\n")
    assert not resolve("a", path).cache and resolve("a", path, "cache=true").cache
    assert resolve("a", path, "--cache").cache


def numbers(cls: type, *path: str) -> Iterator[tuple[tuple[str, ...], dataclasses.Field, type]]:
    """Path, field and type of every option that is a number or a list of them."""
    kinds = configuration.field_types(cls)
    for field in dataclasses.fields(cls):
        kind = configuration.plain(kinds[field.name])
        if dataclasses.is_dataclass(kind):
            yield from numbers(kind, *path, field.name)
        elif (one := (typing.get_args(kind) or (kind,))[0]) in (int, float):
            yield (*path, field.name), field, one


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_is_held_to_limits(command: str) -> None:
    cls = load(COMMANDS[command].config)
    required = {
        field.name: (field.metadata["choices"] or ("x",))[0]
        for field in dataclasses.fields(cls)
        if configuration._required(field)
    }
    configuration.build(cls, required)  # the defaults keep them
    for path, field, kind in numbers(cls):
        limits, name = field.metadata["limits"], ".".join(path)
        assert limits is not None, name
        wrong: list[Any] = [limits.low - 1, 2**64] + ([math.nan] if kind is float else [])
        for value in wrong:
            if limits.hold(value):  # an age may be as high as it likes
                continue
            with pytest.raises(UserError) as caught:
                configuration.build(cls, required | configuration.at_path(path, value))
            assert str(caught.value).startswith(f"option {name!r} is {kind(value)!r}; it must be ")


def test_limits_that_machines_have_are_named() -> None:
    assert refusal("a", "--target", "t", "steps=1e30").endswith(
        "it must be at least 1 and below 2**63"
    )


@pytest.mark.parametrize(
    "command, words, ours",
    [
        ("serve", "--model T --max-model-len 64 --served-model-name n",
         "--target T --max-length 64 --name n"),
        ("serve", "--max_num_seqs=4", "--max-batch=4"),
        ("train", "mtp --lr 1e-4 --num-train-epochs=2 --output-dir O",
         "mtp optim.lr=1e-4 --epochs=2 --out O"),
        ("train", "mtp --learning-rate=1e-4 --ttt-steps 3", "mtp optim.lr=1e-4 unroll.steps=3"),
        ("serve", "--no-enable-prefix-caching", "--no-prefix-cache"),
        ("serve", "--enable-prefix-caching", "prefix_cache=true"),
        ("serve", "--num-speculative-tokens 5", "--k 5"),
        ("audit", "--num-speculative-tokens=5", "--k=5"),
        ("generate", "--num-prompts 8 --max-new-tokens 9", "--count 8 --max-tokens 9"),
        ("bench", "--suite-file rows.jsonl", "--suite rows.jsonl"),
        ("serve", "-m T -md D -c 9 --bf16", "--target T --draft D --max-length 9 dtype=bfloat16"),
    ],
)  # fmt: skip
def test_names_of_peers_are_taken_and_told(
    command: str, words: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_for(command, load(COMMANDS[command].config))
    assert parse(parser, words.split()) == parse(parser, ours.split())
    told = capsys.readouterr().err.splitlines()
    assert len(told) == sum(word.startswith("-") for word in words.split())
    assert all(line.startswith("draftsmith: -") and line.endswith(" here") for line in told)


@pytest.mark.parametrize(
    "command, words, ours",
    [
        ("serve", "--prefix-cache", "prefix_cache=true"),
        ("train", "mtp --resume=false", "mtp resume=false"),
        ("audit", "--seeded", "seeded=true"),
    ],
)
def test_other_spellings_of_our_own_are_taken(
    command: str, words: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_for(command, load(COMMANDS[command].config))
    assert parse(parser, words.split()) == parse(parser, ours.split())
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--tensor-parallel-size=2", ".* with vLLM, for"),
        ("--tensor_parallel", ".* with vLLM, for"),
        ("--ngram", "--suffix is"),
        ("--prompt-lookup-max", "--suffix is"),
    ],
)
def test_what_is_not_here_is_answered_by_what_there_is(flag: str, instead: str) -> None:
    mend = f"^{flag.partition('=')[0]} is given and {instead}"
    with pytest.raises(UserError, match=mend):
        parse(parser_for("serve", load(COMMANDS["serve"].config)), ["--target", "t", flag, "2"])


@pytest.mark.parametrize("target", ["org/name", "--target org/name", "target=org/name"])
def test_a_revision_becomes_part_of_the_targets_name(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cls = load(COMMANDS["serve"].config)
    words = f"--revision v1.0 {target} --k 2".split()
    values = collect(cls, parse(parser_for("serve", cls), words))
    assert values == {"target": "org/name@v1.0", "k": "2"}
    assert "the target is org/name@v1.0" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--revision .* without a target; give --target"):
        collect(cls, parse(parser_for("serve", cls), words[:2]))


def test_a_peers_name_in_a_section_of_ours_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_for("train", load(COMMANDS["train"].config))
    found = parse(parser, ["mtp", "optim.learning_rate=3", "unroll.learning_rate=3"])
    assert found.extra == ["optim.lr=3", "unroll.learning_rate=3"]
    assert "optim.learning_rate is optim.lr here" in capsys.readouterr().err


def test_a_name_of_our_own_is_no_peers(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_for("bench", load(COMMANDS["bench"].config))
    found = parse(parser, ["--model", "m", "--num-prompts", "3"])
    assert (found.model, found.num_prompts) == ("m", "3") and not capsys.readouterr().err


def test_a_draft_alone_brings_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(command: str, *words: str) -> dict[str, Any]:
        cls = load(COMMANDS[command].config)
        return collect(cls, parse(parser_for(command, cls), words))

    draft = str(tmp_path)
    with pytest.raises(UserError, match="', which would name it, is not there"):
        given("serve", "--draft", draft)
    (tmp_path / "draftsmith.json").write_text('{"target": {"name": "org/model"}}')
    for command in ("serve", "bench", "eval"):
        assert given(command, "--draft", draft)["target"] == "org/model"
        assert "'org/model'" in capsys.readouterr().err
    assert given("serve", "mine", "--draft", draft)["target"] == "mine"
    assert given("bench", "http://a", "--draft", draft) == {"url": "http://a", "draft": draft}
    assert "target" not in given("doctor", "--data", "d", "--draft", draft)
    assert "target" not in given("export", draft, "--to", "vllm")
    assert not capsys.readouterr().err
    (tmp_path / "draftsmith.json").write_text('{"target": [1]}')
    assert "target" not in given("serve", "--draft", draft)
