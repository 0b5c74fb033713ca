"""Calls of Hermes and Qwen, of Llama 3 and of Mistral. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from draftsmith.serve.tools.call_format import (
    LONGEST_NAME,
    NAME_LETTERS,
    CallFormat,
    CallText,
    Found,
    Marks,
    OpenedCall,
    ToolCallText,
    items,
    members,
    quoted,
    read_call,
    skip_space,
)

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
# A call as an object, up to its arguments.
OBJECT = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(
    rf"\s*([{NAME_LETTERS}]{{1,{LONGEST_NAME}}})\s*"
    r"(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?"
)
# What may become a name with its marks: no other character can still lead to a call.
BEGUN = re.compile(rf"[\w\s\[\]{NAME_LETTERS}]*")
LONGEST = LONGEST_NAME + 64  # with its marks and space


class Hermes(CallFormat):
    """`<tool_call>`, a JSON object, `</tool_call>`; Qwen's too."""

    signs, others = (HERMES_BEGIN,), ("<function=", "<arg_key>")
    markers = (HERMES_BEGIN, HERMES_END)
    starts = (HERMES_BEGIN,)

    def read(self, text: CallText) -> Found | None:
        none = Found((), len(HERMES_BEGIN))
        begin = skip_space(text.text, len(HERMES_BEGIN))
        if not text.text.startswith("{", begin):
            return none if text.final or begin < len(text.text) else None
        if (end := text.object_end(begin)) < 0:
            return none if text.final else None
        if (call := read_call(text.text[begin:end])) is None:
            return none
        close = skip_space(text.text, end)
        rest = text.text[close : close + len(HERMES_END)]
        if rest == HERMES_END:
            return Found([call], close + len(HERMES_END))
        if not HERMES_END.startswith(rest):
            return none
        # Some models leave out the last end marker, and a stop string may have cut it off.
        return Found([call], len(text.text)) if text.final else None

    def opened(self, text: CallText) -> OpenedCall | None:
        match = OBJECT.match(text.text, len(HERMES_BEGIN))
        return None if match is None else OpenedCall(json.loads(match[1]), match.end())

    def calls(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        line, end = "\n", mark(HERMES_END)
        again = f" ({quoted(line)} one)*" if parallel else ""
        bodies = rules_of("body", names, lambda *call: f"{written(*call, around=line)} {end}")
        return f"calls: one{again}\none: {mark(HERMES_BEGIN)} body\n{bodies}"

    def free(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        rule = "free: (head body)* ANY\n" if parallel else "free: ANY | head body\n"
        return rule + mark.head("head", HERMES_BEGIN) + self.calls(names, mark, parallel=parallel)


class Llama(CallFormat):
    """JSON objects with `name` and `parameters` at the beginning of the answer, with
    `<|python_tag|>` before them or without, with `;` between them."""

    signs = (LLAMA_TAG, '"parameters": dictionary of')
    markers = (LLAMA_TAG,)
    starts = (LLAMA_TAG, "{")
    leading = True

    def read(self, text: CallText) -> Found | None:
        """All calls or none: text behind them makes the whole no call."""
        none, calls = Found((), len(text.text)), list[ToolCallText]()
        at = len(LLAMA_TAG) if text.text.startswith(LLAMA_TAG) else 0
        while True:
            at = skip_space(text.text, at)
            if at == len(text.text):
                return none if text.final else None
            if text.text[at] != "{":
                return none
            if (end := text.object_end(at)) < 0:
                return none if text.final else None
            call = read_call(text.text[at:end], bare=True)
            if call is None or call.name not in text.names:
                return none
            calls.append(call)
            at = skip_space(text.text, end)
            if at == len(text.text):
                return Found(calls, at) if text.final else None
            if text.text[at] != ";":
                return none
            at += 1
            if text.final and skip_space(text.text, at) == len(text.text):
                return Found(calls, len(text.text))

    def opened(self, text: CallText) -> OpenedCall | None:
        match = OBJECT.match(text.text)
        if match is None or (name := json.loads(match[1])) not in text.names:
            return None  # another name makes it JSON that is no call
        return OpenedCall(name, match.end())

    def calls(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        again = f" ({quoted('; ')} one)*" if parallel else ""
        ones = rules_of("one", names, lambda *call: written(*call, key="parameters"))
        return f"calls: one{again}\n{ones}"

    def free(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        # What begins like a call is one.
        return "free: OTHER | calls\nOTHER: /([^{\\s](?s:.*))?/\n" + self.calls(
            names, mark, parallel=parallel
        )


class Mistral(CallFormat):
    """`[TOOL_CALLS]` and a JSON array of calls, or, since 2025, the name and the arguments of one
    call. `arrays`: the format in which a grammar has calls written. Both are read."""

    markers = (BEGIN, CALL_ID, ARGS)
    signs = starts = (BEGIN,)

    def __init__(self, *, arrays: bool = True):
        self.arrays = arrays

    def read(self, text: CallText) -> Found | None:
        begin = skip_space(text.text, len(BEGIN))
        if begin == len(text.text):
            return Found((), len(BEGIN)) if text.final else None
        if text.text[begin] == "[":
            return self._array(text, begin)
        return self._named(text)

    def _array(self, text: CallText, begin: int) -> Found | None:
        none = Found((), len(BEGIN))
        if (end := text.object_end(begin)) < 0:
            return none if text.final else None
        calls = calls_of_array(text.text[begin:end])
        return Found(calls, end) if calls else none

    def _named(self, text: CallText) -> Found | None:
        none = Found((), len(BEGIN))
        match, most = NAME.match(text.text, len(BEGIN)), len(BEGIN) + LONGEST
        if match is None or match.end() >= most or not text.text.startswith("{", match.end()):
            begun = BEGUN.match(text.text, len(BEGIN))
            may_be = begun is not None and begun.end() == len(text.text) < most
            return None if may_be and not text.final else none
        if (end := text.object_end(match.end())) < 0:
            return none if text.final else None
        arguments = text.text[match.end() : end]
        return (
            none if members(arguments) is None else Found([ToolCallText(match[1], arguments)], end)
        )

    def opened(self, text: CallText) -> OpenedCall | None:
        match = NAME.match(text.text, len(BEGIN))
        if match is None or not text.text.startswith("{", match.end()):
            return None
        return OpenedCall(match[1], match.end())

    def calls(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        return f"calls: {mark(BEGIN)} more\n" + self._rules(names, mark, parallel=parallel)

    def _rules(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        """Rules of `more`: calls behind the first marker."""
        if self.arrays:
            again = f" ({quoted(', ')} one)*" if parallel else ""
            more = f"more: {quoted('[')} one{again} {quoted(']')}\n"
            return more + rules_of("one", names, written)
        more = "more: one" + (f" ({mark(BEGIN)} one)*" if parallel else "") + "\n"
        return more + rules_of(
            "one", names, lambda name, arguments: f"{quoted(name)} {mark(ARGS)} {arguments}"
        )

    def free(self, names: Sequence[str], mark: Marks, *, parallel: bool) -> str:
        return (
            "free: ANY | calls_behind\ncalls_behind: head more\n"
            + mark.head("head", BEGIN)
            + self._rules(names, mark, parallel=parallel)
        )


def rules_of(rule: str, names: Sequence[str], call: Callable[[str, str], str]) -> str:
    """Rules of `rule`, which is a call of one of `names`: each `call(name, rule of its arguments)`,
    as it is written."""
    rules = [f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(len(names)))}\n"]
    for index, name in enumerate(names):
        rules.append(f"{rule}_{index}: {call(name, f'args_{index}')}\n")
    return "".join(rules)


def written(name: str, arguments: str, *, around: str = "", key: str = "arguments") -> str:
    """A call as an object, with `around` on both sides."""
    opening = f'{around}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f"{quoted(opening)} {arguments} {quoted('}' + around)}"


def calls_of_array(text: str) -> list[ToolCallText]:
    """Calls of a JSON array; none where one of its items is no call."""
    calls = [read_call(item) for item in items(text) or ()]
    return [] if None in calls else [call for call in calls if call is not None]
