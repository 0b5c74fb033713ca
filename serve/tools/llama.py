"""Calls of Llama 3: JSON objects with `name` and `parameters` at the beginning of the answer, with
`<|python_tag|>` before them or without, with `;` between them. Torch-free."""

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
from draftsmith.serve.tools.calls import ToolCallText
from draftsmith.serve.tools.json_text import read_call, skip_space

TAG = "<|python_tag|>"
NAMED = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class Llama(CallFormat):
    markers = (TAG,)
    starts = (TAG, "{")
    leading = True

    def read(self, text: CallText) -> Found | None:
        """All calls or none: text behind them makes the whole no call."""
        none, calls = Found((), len(text.text)), list[ToolCallText]()
        at = len(TAG) if text.text.startswith(TAG) else 0
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
        match = NAMED.match(text.text)
        if match is None or (name := json.loads(match[1])) not in text.names:
            return None  # another name makes it JSON that is no call
        return OpenedCall(name, match.end())

    def calls(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        rules = [f"calls: one{' (' + quoted('; ') + ' one)*' if parallel else ''}"]
        rules.append(f"one: {choice('one', len(names))}")
        for index, name in enumerate(names):
            opening = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
            rules.append(f"one_{index}: {quoted(opening)} args_{index} {quoted('}')}")
        return "\n".join(rules) + "\n"

    def free(self, names: Sequence[str], mark: Mark, *, parallel: bool) -> str:
        # What begins like a call is one.
        return "free: OTHER | calls\nOTHER: /([^{\\s](?s:.*))?/\n" + self.calls(
            names, mark, parallel=parallel
        )
