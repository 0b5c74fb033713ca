"""Calls and reasoning in answers: however a text is cut, its pieces sum up to the same, and nothing
of it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.serve.http.bodies import FunctionTool
from draftsmith.serve.tools.answer import THINK, AnswerForm, Thinking, joined, thinking_after
from draftsmith.serve.tools.call_format import AnswerPiece, CallFormat
from draftsmith.serve.tools.formats import Hermes, Llama, Mistral

FORMATS: dict[str, CallFormat] = {"hermes": Hermes(), "llama": Llama(), "mistral": Mistral()}
NAMES = ["f", "get_weather"]
ARGUMENTS = '{"city": "Köln \\" {\\u00e9 </tool_call> [TOOL_CALLS]", "n": [1, {"a": null}]}'


def read(form: AnswerForm, *parts: str) -> AnswerPiece:
    parser = form.parser()
    return joined([*(parser.push(part) for part in parts), parser.finish()])


def form_of(name: str, **options: object) -> AnswerForm:
    return AnswerForm(FORMATS[name], NAMES, **options)


def calls_of(piece: AnswerPiece) -> list[tuple[str | None, str]]:
    return [(call.name, call.arguments) for call in piece.calls]


WHOLE = {
    "hermes": (
        f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
    ),
    "llama": (
        f'{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "get_weather", "parameters": {{}}}}',
        f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}'
        ';{"name": "get_weather", "arguments": {}} ',
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}, '
        '{"arguments": {}, "name": "get_weather"}]',
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS] get_weather{{}}",
        f"[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather[ARGS]{{}}",
    ),
}


@pytest.mark.parametrize("name, text", [(name, text) for name in WHOLE for text in WHOLE[name]])
def test_calls_of_every_format_are_read(name: str, text: str) -> None:
    piece = read(form_of(name), text)
    assert [(called, json.loads(raw)) for called, raw in calls_of(piece)] == [
        ("f", json.loads(ARGUMENTS)),
        ("get_weather", {}),
    ]
    assert piece.content == "" and [call.index for call in piece.calls] == [0, 1]


def test_text_around_calls_is_content_without_the_space_beside_them() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert read(form_of("hermes"), f"Let me see.\n\n{call}\n{call}\n and more \n") == AnswerPiece(
        "Let me see.and more \n", calls=read(form_of("hermes"), call + call).calls
    )
    assert read(form_of("hermes"), f"\n\n{call}\n").content == ""
    assert read(form_of("mistral"), "Well\n[TOOL_CALLS]f{}").content == "Well"


MALFORMED = {
    "hermes": [
        "<tool_call>\n{not json}\n</tool_call>", "<tool_call>f</tool_call>", "<tool_call>", "<tool_c",
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1', '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} and </tool_call>', "</tool_call>", "a < b <tool_call",
        '<tool_call>[{"name": "f"}]</tool_call>', '<tool_call>{"name": 5}</tool_call>',
    ],
    "llama": [
        '{"name": "other", "parameters": {}}', '{"name": "f"}', '{"a": 1}', "{", "<|python_tag|>print(1)", "<|pyth",
        '{"name": "f", "parameters": {}} and text', 'text {"name": "f", "parameters": {}}', '{"name": "f", "parameters": [}',
        '{"name": "f", "parameters": {}};x', " \n",
    ],
    "mistral": [
        "[TOOL_CALLS]", "[TOOL_CALLS]no call here.", "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": "f"}, 3]', "[TOOL_CA",
        "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f{bad}", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]" + "n" * 300 + "{}",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, text", [(name, text) for name in MALFORMED for text in MALFORMED[name]]
)
def test_what_is_no_call_is_content_to_the_letter(name: str, text: str) -> None:
    assert read(form_of(name), text) == AnswerPiece(content=text)


def test_the_last_end_marker_may_be_missing() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
    for end in ("", "</tool", "</tool_call>"):
        assert calls_of(read(form_of("hermes"), text + end)) == [("f", '{"a": 1}')]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "\n", " ", "{", "}", '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}',
    "[TOOL_CALLS]", "[ARGS]", "[", "]", "f", "get_weather", ";", "<|python_tag|>", '"', "\\", "<think>", "</think>", "é", "<",
    '{"name": "f", "arguments": {"x": "</tool_call>"}}', ",", "text",
]  # fmt: skip
# What only some text before makes a call.
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def cut(draw: Callable, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)])]


@pytest.mark.parametrize("name", [*FORMATS, None])
@pytest.mark.parametrize("thinking", [None, *Thinking])
def test_every_cut_gives_the_same_sum(name: str | None, thinking: Thinking | None) -> None:
    reasoning = {} if thinking is None else {"reasoning": THINK, "thinking": thinking}
    form = AnswerForm(**reasoning) if name is None else form_of(name, **reasoning)

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        text = data.draw(TEXTS)
        whole = read(form, text)
        assert read(form, *cut(data.draw, text)) == whole
        assert read(form, *text) == whole
        if thinking is None:
            lost = len("".join(text.split()))
            lost -= len("".join(whole.content.split()))
            # All that is no content is calls: with their markers, longer than their arguments.
            assert lost >= sum(len("".join(call.arguments.split())) for call in whole.calls)
            assert whole.calls or whole.content == text

    check()


@pytest.mark.parametrize("name, text", [(name, text) for name in WHOLE for text in WHOLE[name]])
def test_certain_calls_are_given_while_they_are_written(name: str, text: str) -> None:
    whole = read(form_of(name), text)
    for step in (1, 2, 7):
        parts = [text[at : at + step] for at in range(0, len(text), step)]
        parser = form_of(name, certain=True).parser()
        pieces = [*(parser.push(part) for part in parts), parser.finish()]
        assert joined(pieces) == whole
        if step == 1 and name == "hermes":
            own = [call for piece in pieces for call in piece.calls if call.index == 0]
            assert own[0].name == "f" and len(own) > 10


@pytest.mark.parametrize("certain", [False, True])
def test_pieces_stand_in_the_order_of_the_text(certain: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = f"<think>so</think>See. {call} Then. {call}{call} End."
    for step in range(1, len(text) + 1):
        parser = form_of("hermes", certain=certain, reasoning=THINK).parser()
        written = ""
        for at in range(0, len(text), step):
            for piece in parser.pieces(text[at : at + step], last=at + step >= len(text)):
                arguments = [call.arguments for call in piece.calls]
                assert not (piece.content and arguments)
                written += "".join([piece.reasoning, piece.content, *arguments])
        assert written == 'soSee.{"a": 1}Then.{"a": 1}{"a": 1}End.'


def test_json_that_is_no_call_is_never_given_as_one() -> None:
    text = '{"name": "Bob", "parameters": {"age": 3}}'
    assert read(form_of("llama", certain=True), *text) == AnswerPiece(content=text)


def test_a_certain_call_that_is_cut_off_keeps_what_was_written() -> None:
    text = 'Hm.\n<tool_call>\n{"name": "f", "arguments": {"city": "Par'
    piece = read(form_of("hermes", certain=True), text)
    assert piece.content == "Hm." and calls_of(piece) == [("f", '{"city": "Par')]
    assert read(form_of("hermes"), text).content == text


@pytest.mark.parametrize("thinking, text, reasoning, content", [
    (Thinking.MAYBE, "<think>\nso\n</think>\n\nyes", "so", "yes"),
    (Thinking.MAYBE, "\n<think>so</think>yes\n", "so", "yes\n"),
    (Thinking.MAYBE, "yes <think>so</think>", "", "yes <think>so</think>"),
    (Thinking.MAYBE, " <thin", "", " <thin"),
    (Thinking.MAYBE, "<think>\n\n</think>\n\nyes", "", "yes"),
    (Thinking.OPEN, "\nso\nfar\n</think>\nyes</think>", "so\nfar", "yes</think>"),
    (Thinking.OPEN, "so far\n", "so far\n", ""),
    (Thinking.OPEN, "so </thin", "so </thin", ""),
    (Thinking.DONE, "<think>yes", "", "<think>yes"),
])  # fmt: skip
def test_reasoning_is_what_stands_between_its_markers(
    thinking: Thinking, text: str, reasoning: str, content: str
) -> None:
    form = AnswerForm(reasoning=THINK, thinking=thinking)
    assert read(form, text) == AnswerPiece(content, reasoning)


def test_a_prompt_opens_or_ends_the_reasoning() -> None:
    assert thinking_after("x<assistant><think>\n", THINK) is Thinking.OPEN
    assert thinking_after("x<assistant><think>\n\n</think>\n\n", THINK) is Thinking.DONE
    assert thinking_after("<think>so</think> x<assistant>", THINK) is Thinking.MAYBE


def test_a_call_within_reasoning_is_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    form = form_of("hermes", reasoning=THINK, thinking=Thinking.MAYBE)
    piece = read(form, f"<think>{call}</think>\n\n{call}")
    assert piece.reasoning == call and calls_of(piece) == [("f", "{}")] and piece.content == ""


RAW = (
    '{"x": 1.10, "n": 12345678901234567890.12, "big": '
    + "7" * 5000
    + ', "far": 1e999, "s": "\\u00e9"}'
)


def written(format: str, name: str, arguments: str) -> str:
    return {
        "hermes": f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>',
        "llama": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]',
        "mistral by name": f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{arguments}",
        "mistral by name alone": f"[TOOL_CALLS]{name}{arguments}",
    }[format]


FORMS = ["hermes", "llama", "mistral", "mistral by name", "mistral by name alone"]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_as_the_model_wrote_them(form: str, certain: bool) -> None:
    text = written(form, "f", RAW)
    for size in (1, 7, len(text)):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert calls_of(read(form_of(form.split()[0], certain=certain), *parts)) == [("f", RAW)]


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_a_request_may_give_is_read(form: str) -> None:
    for name in ("mcp:search", "srv/tool.v1:x_y-Z", "n" * 128):
        assert FunctionTool.model_validate({"type": "function", "function": {"name": name}})
        answer = AnswerForm(FORMATS[form.split()[0]], [name])
        text = written(form, name, "{}")
        assert calls_of(read(answer, *text)) == [(name, "{}")]


@pytest.mark.parametrize("form", FORMS)
def test_what_json_has_not_makes_no_call(form: str) -> None:
    wrong = [("f", f'{{"a": {number}}}') for number in ("NaN", "Infinity", "-Infinity")]
    for name, arguments in [*wrong, ("\\ud83d", "{}")]:
        text = written(form, name, arguments)
        answer = AnswerForm(FORMATS[form.split()[0]], ["f", "\ud83d"])
        assert read(answer, text) == AnswerPiece(content=text)


@pytest.mark.parametrize("continued, after, reasoning, content", [
    ("<think>\nLet me see", "\n\nSo.</think>\n\nYes", "\n\nSo.", "Yes"),
    ("<think>no</think>So <think>wait", " more</think>\nYes", " more", "Yes"),
    ("<think>\nLet me see.</think>\n\nYes,", "\nindeed <think>", "", "\nindeed <think>"),
    ("Yes,", "\nindeed", "", "\nindeed"),
])  # fmt: skip
def test_reasoning_of_a_continued_message_is_open_or_closed_as_its_last_marker_says(
    continued: str, after: str, reasoning: str, content: str
) -> None:
    for template in ("<user>what is <think>?<assistant>{}", "<assistant><think>\n\n</think>\n\n{}"):
        thinking = thinking_after(template.format(continued), THINK, continued)
        form = AnswerForm(reasoning=THINK, thinking=thinking, continues=True)
        assert read(form, *after) == AnswerPiece(content, reasoning)
