"""Calls of Hermes and Qwen: `<tool_call>`, a JSON object, `</tool_call>`. Torch-free."""

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
from draftsmith.serve.tools.json_text import read_call, skip_space

BEGIN, END = "<tool_call>", "</tool_call>"
NAMED = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class Hermes(CallFormat):
    markers = (BEGIN, END)
    starts = (BEGIN,)

    def read(self, text: CallText) -> Found | None:
        none = Found((), len(BEGIN))
        begin = skip_space(text.text, len(BEGIN))
        if not text.text.startswith("{", begin):
            return none if text.final or begin < len(text.text) else None
        if (end := text.object_end(begin)) < 0:
            return none if text.final else None
        if (call := read_call(text.text[begin:end])) is None:
            return none
        close = skip_space(text.text, end)
        rest = text.text[close : close + len(END)]
        if rest == END:
            return Found([call], close + len(END))
        if not END.startswith(rest):
            return none
        # Some models leave out the last end marker, and a stop string may have cut it off.
        return Found([call], len(text.text)) if text.final else None

    def opened(self, text: CallText) -> OpenedCall | None:
        match = NAMED.match(text.text, len(BEGIN))
        return None if match is None else OpenedCall(json.loads(match[1]), match.end())

    def calls(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        rules = [f"calls: one{' (' + quoted(chr(10)) + ' one)*' if parallel else ''}"]
        rules += [f"one: {mark(BEGIN)} body", f"body: {choice('body', len(names))}"]
        for index, name in enumerate(names):
            opening = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            parts = [quoted(opening), f"args_{index}", quoted("}\n"), mark(END)]
            rules.append(f"body_{index}: {' '.join(parts)}")
        return "\n".join(rules) + "\n"

    def free(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        rule = "free: (head body)* ANY\n" if parallel else "free: ANY | head body\n"
        return rule + mark.head("head", BEGIN) + self.calls(names, mark, parallel=parallel)
