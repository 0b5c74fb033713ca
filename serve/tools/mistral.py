"""Calls of Mistral: `[TOOL_CALLS]` and a JSON array of calls, or, since 2025, the name and the
arguments of one call. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from draftsmith.serve.tools.call_format import (
    CallFormat,
    CallText,
    Found,
    Mark,
    OpenedCall,
    choice,
    quoted,
)
from draftsmith.serve.tools.calls import LONGEST_NAME, NAME_LETTERS, ToolCallText
from draftsmith.serve.tools.json_text import items, members, read_call, skip_space

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(
    rf"\s*([{NAME_LETTERS}]{{1,{LONGEST_NAME}}})\s*"
    r"(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?"
)
# What may become a name with its marks: no other character can still lead to a call.
BEGUN = re.compile(rf"[\w\s\[\]{NAME_LETTERS}]*")
LONGEST = LONGEST_NAME + 64  # with its marks and space


class Mistral(CallFormat):
    """`arrays`: the format in which a grammar has calls written. Both are read."""

    markers = (BEGIN, CALL_ID, ARGS)
    starts = (BEGIN,)

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

    def calls(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        return f"calls: {mark(BEGIN)} more\n" + self._rules(names, mark, parallel=parallel)

    def _rules(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        """Rules of `more`: calls behind the first marker."""
        rules = [f"one: {choice('one', len(names))}"]
        if self.arrays:
            again = f" ({quoted(', ')} one)*" if parallel else ""
            rules.append(f"more: {quoted('[')} one{again} {quoted(']')}")
        else:
            rules.append("more: one" + (f" ({mark(BEGIN)} one)*" if parallel else ""))
        for index, name in enumerate(names):
            written = json.dumps(name, ensure_ascii=False)
            opening = quoted(f'{{"name": {written}, "arguments": ')
            parts = [opening, f"args_{index}", quoted("}")]
            if not self.arrays:
                parts = [quoted(name), mark(ARGS), f"args_{index}"]
            rules.append(f"one_{index}: {' '.join(parts)}")
        return "\n".join(rules) + "\n"

    def free(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        return (
            "free: ANY | calls_behind\ncalls_behind: head more\n"
            + mark.head("head", BEGIN)
            + self._rules(names, mark, parallel=parallel)
        )


def calls_of_array(text: str) -> list[ToolCallText]:
    """Calls of a JSON array; none where one of its items is no call."""
    calls = [read_call(item) for item in items(text) or ()]
    return [] if None in calls else [call for call in calls if call is not None]
