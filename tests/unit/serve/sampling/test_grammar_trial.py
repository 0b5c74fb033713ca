"""Grammars that the library cannot survive are refused before it sees them in this process."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.grammar_matcher import GrammarCompiler
from tests.waiting import wait_until

LEAF = '"x"'


def lark(count: int, rule: Callable[[int], str], names: str = "a") -> Grammar:
    """Rules that each hold the next one."""
    rules = [f"{names}{at}: {rule(at + 1)}" for at in range(count)]
    return Grammar.lark("\n".join([f"start: {names}0", *rules, f"{names}{count}: {LEAF}"]))


def chain(count: int, holder: Callable[[dict], Any], where: str = "$defs") -> Grammar:
    """Definitions that each refer to the next one."""
    parts = {f"a{at}": holder({"$ref": f"#/{where}/a{at + 1}"}) for at in range(count)}
    return Grammar.json_schema(
        {"$ref": f"#/{where}/a0", where: {**parts, f"a{count}": {"type": "null"}}}
    )


DEEP = {
    "rules": lark(5000, lambda at: f"a{at}"),
    "references": chain(3000, dict),
    "items": chain(3000, lambda next: {"type": "array", "items": next}),
    "in a tool": Grammar.combined(
        "start: @arguments", {"arguments": chain(3000, lambda next: {"items": next})}
    ),
    "nested in brackets": Grammar.lark(f"start: {'(' * 50_000}{LEAF}{')' * 50_000}"),
    "nested expression": Grammar.regex("(" * 50_000 + "a" + ")*" * 50_000),
    "nested schema": Grammar("json_schema", '{"items": ' * 50_000 + "{}" + "}" * 50_000),
}
SLOW = {
    "many options": Grammar.regex("a?" * 15_000),
    "repeats behind a text": Grammar.regex("[ab]{3}(a{1000}){1000}"),
    "a schema's expression": Grammar.json_schema(
        {"type": "string", "pattern": "^" + "[ab]?" * 20_000 + "$"}
    ),
    "too long": Grammar.choice([f"{at}" for at in range(400_000)]),
}


@pytest.fixture(scope="module")
def compiler(target: Target) -> GrammarCompiler:
    return GrammarCompiler(target.tokenizer(), target.vocab_size, target.eos_token_ids)


REASON = r"nested too deeply, or takes more than 2 s or \d+ MiB"


LATE = {"a schema's expression": [pytest.mark.long]}  # as late as "many options"


@pytest.mark.parametrize(
    "hostile", [pytest.param(name, marks=LATE.get(name, [])) for name in (*DEEP, *SLOW)]
)
def test_what_would_end_the_process_is_refused(compiler: GrammarCompiler, hostile: str) -> None:
    """Or honoured, as far as the library can."""
    said = None
    try:
        compiler.compile((DEEP | SLOW)[hostile]).masks([[]])
    except UserError as error:
        said = str(error)
        assert len(said) < 600 and "\n" not in said
    if hostile in ("rules", "references", "many options"):
        assert said is not None and re.search(REASON, said)
    assert compiler.compile(Grammar.choice(["yes", "no"])).masks([[]]).any()


@pytest.mark.parametrize("nested", [20, 100])
def test_what_people_nest_is_honoured(compiler: GrammarCompiler, nested: int) -> None:
    for grammar in (
        lark(nested, lambda at: f"a{at}"),
        chain(nested, lambda next: {"type": "object", "properties": {"p": next}}),
    ):
        assert compiler.compile(grammar).masks([[]]).any()


@pytest.mark.parametrize(
    "grammar", [Grammar.regex(r"[^\s\S]"), Grammar.lark("start: /[^\\s\\S]/"), Grammar.lark("start: start")]
)  # fmt: skip
def test_a_grammar_without_any_text_is_one_sentence(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    with pytest.raises(UserError, match=r"cannot be honoured: it allows no text; change it"):
        compiler.compile(grammar)


def test_a_text_may_be_empty(target: Target, compiler: GrammarCompiler) -> None:
    mask = compiler.compile(Grammar.lark("start: ")).masks([[]])[0]
    assert set(mask.nonzero()[0]) == set(target.eos_token_ids)


def test_a_choice_of_many_texts_is_honoured(compiler: GrammarCompiler, target: Target) -> None:
    texts = [f"text number {at}" for at in range(20_000)]
    matcher = compiler.compile(Grammar.choice(texts))
    tokens = target.tokenizer()("text number 1999", add_special_tokens=False)["input_ids"]
    matcher.commit(tokens)
    allowed = set(matcher.masks([[]])[0].nonzero()[0])
    digits = target.tokenizer().convert_tokens_to_ids([*"0123456789"])
    assert allowed == {*digits, *target.eos_token_ids}


@pytest.mark.parametrize("grammar", [Grammar.json_object(), Grammar.json_schema({"type": "array"})])
def test_space_between_the_parts_of_json_is_bounded(
    compiler: GrammarCompiler, target: Target, grammar: Grammar
) -> None:
    tokens = target.tokenizer().convert_tokens_to_ids
    begin = tokens("{" if grammar == Grammar.json_object() else "[")
    newline, space, tab, quote = tokens(["Ċ", "Ġ", "ĉ", '"'])
    mask = compiler.compile(grammar).masks([[begin]])[0]
    assert mask[quote] and not mask[[newline, space, tab]].any()


def test_a_schema_may_ask_for_its_own_space(compiler: GrammarCompiler, target: Target) -> None:
    flexible = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    begin, newline = target.tokenizer().convert_tokens_to_ids(["{", "Ċ"])
    assert compiler.compile(Grammar.json_schema(flexible)).masks([[begin]])[0, newline]


def processes() -> Iterator[int]:
    """Those that this one has started for trials."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(parent) == os.getpid()
                and b"sampling.grammar" in (folder / "cmdline").read_bytes()
            ):
                yield int(folder.name)
        except OSError:
            continue  # it has ended meanwhile


def test_a_process_that_is_killed_is_started_again(target: Target) -> None:
    before = set(processes())
    own = GrammarCompiler(target.tokenizer(), target.vocab_size, target.eos_token_ids)
    own.compile(Grammar.choice(["a"]))
    (process,) = set(processes()) - before
    os.kill(process, signal.SIGKILL)
    stat = Path(f"/proc/{process}/stat")
    wait_until(lambda: "Z" in stat.read_text().rpartition(")")[2].split()[0])
    own.compile(Grammar.choice(["b"]))
    del own
    gc.collect()
    assert set(processes()) <= before


def test_schemas_that_are_alike_are_one_grammar() -> None:
    assert Grammar.json_object() == Grammar.json_schema({"type": "object"})
    assert json.loads(Grammar.json_object().source)["x-guidance"]["whitespace_flexible"] is False
