"""A row of a published shape as one of three: `messages`, `prompt` (with or without a `completion`)
or `text`. Conversations may have `tools` and `chat_template_kwargs`."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from draftsmith.chats import THOUGHTS
from draftsmith.errors import UserError

Row = dict[str, Any]

CONVERSATIONS = ("messages", "conversations", "conversation")
ASKED = ("prompt", "instruction", "question", "query", "problem", "input")
GIVEN = ("input", "context")  # what an instruction or a question is about
ANSWERS = ("completion", "response", "output", "answer", "solution", "chosen")
SYSTEM = ("system", "system_prompt", "system_message")
SPEAKS = ("role", "from")  # of a turn
SAID = ("content", "value", "text", "parts")
WITHOUT_TEXT = ("tool_calls", "function_call", *THOUGHTS)  # of an assistant
STEERING = ("reasoning_effort", "verbosity", "tool_choice")  # of the prompt, by a request
# A row with one of them is no object that holds the rows of a file.
NAMES = frozenset((*CONVERSATIONS, *ASKED, *ANSWERS, *SYSTEM, "turns", "text", "tools"))
# Speakers of ShareGPT and what was made after it.
SPEAKERS = {
    name: role
    for role, names in {
        "user": "human user prompter",
        "assistant": "gpt assistant chatgpt bing bard model bot function_call",
        "system": "system",
        "developer": "developer",
        "tool": "tool tool_response function function_response observation ipython",
    }.items()
    for name in names.split()
}


def normalised(value: Any, where: str) -> Iterator[Row]:
    """Rows that a value holds: none of a conversation without turns, several of an instruction with
    several instances.

    Raises:
        UserError: it has no known shape.
    """
    if isinstance(value, str):
        value = {"prompt": value}
    elif isinstance(value, list):
        value = {"messages": value}
    try:
        for row in _instances(value):
            found = _conversation(row) or _asked(row) or _text(row)
            if found.get("messages") != []:
                yield found
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} {error}; give `messages` of role and content, ShareGPT's `conversations`, a "
            "`prompt`, `instruction`, `question` or `turns`, or a `text`"
        ) from error


def _instances(value: Any) -> Iterator[Row]:
    """The row by names in lower case, without what is null: once, or for each of its instances."""
    if not isinstance(value, dict):
        raise ValueError(f"holds {_kind(value)}")
    row = {str(name).strip().lower(): item for name, item in value.items() if item is not None}
    if isinstance(row.get("body"), dict) and "custom_id" in row:  # a request of a batch
        row = row["body"]
    else:  # a column of such a name is about the row
        row = {name: item for name, item in row.items() if name not in STEERING}
    instances = row.get("instances")
    if "instruction" in row and isinstance(instances, list):
        yield from ({**row, **instance} for instance in instances if isinstance(instance, dict))
    else:
        yield row


def _conversation(row: Row) -> Row | None:
    """A list of turns, or a prompt that is one; with its answer where that stands apart."""
    name = next((name for name in (*CONVERSATIONS, "prompt", "chosen") if _listed(row, name)), None)
    if name is None:
        return None
    turns = _turns(row, name)
    if name == "prompt":
        # Others are what a program checks an answer by, as a number is.
        given = (one for one in ANSWERS if isinstance(row.get(one), str) or _listed(row, one))
        if answer := next(given, None):
            turns = _joined(turns, row, answer)
    elif name == "chosen" and isinstance(row.get("prompt"), str):
        turns = _joined([{"role": "user", "content": row["prompt"]}], row, name)
    return _with_options(turns, row)


def _joined(asked: list[Row], row: Row, name: str) -> list[Row]:
    """Conversation of a prompt and its answer, which may hold the prompt too."""
    if not _listed(row, name):
        return [*asked, {"role": "assistant", "content": row[name]}]
    answer = _turns(row, name)
    whole = bool(answer) and answer[0].get("role") != "assistant"
    return answer if whole else [*asked, *answer]


def _asked(row: Row) -> Row | None:
    """A question in a field of its own."""
    turns = parsed(row["turns"]) if "turns" in row else None
    if turns is not None and not (isinstance(turns, list) and turns):
        raise ValueError(f"holds {_kind(row['turns'])} as `turns`")
    if turns and isinstance(turns[0], dict):
        return _with_options(_turns(row, "turns"), row)
    texts = _texts(row, (*ASKED, *GIVEN, *SYSTEM, *ANSWERS))
    name = next((name for name in ASKED if name in texts), None)
    if turns:
        # The later ones ask about answers that are not given yet.
        prompt = turns[0]
    elif name is None:
        return None
    else:
        given = [texts[one] for one in GIVEN if one in texts and one != name and texts[one].strip()]
        about = [texts[name]] if texts[name].strip() or not given else []
        parts = {"instruction": [*about, *given], "question": [*given, *about]}
        prompt = "\n\n".join(parts.get(name, [texts[name]]))
    if not isinstance(prompt, str):
        raise ValueError(f"holds {_kind(prompt)} as its first turn")
    answer = next((texts[one] for one in ANSWERS if one in texts and not turns), None)
    system = next((texts[one] for one in SYSTEM if texts.get(one)), None)
    history = _pairs(row.get("history") or [])
    if not (system or history or _tools(row) or row.get("chat_template_kwargs")):
        return {"prompt": prompt} | ({} if answer is None else {"completion": answer})
    messages = [{"role": "system", "content": system}] if system else []
    messages += [*history, {"role": "user", "content": prompt}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return _with_options(messages, row)


def _text(row: Row) -> Row:
    if isinstance(row.get("text"), str):
        return {"text": row["text"]}
    if any(name in row for name in CONVERSATIONS):
        return {"messages": []}
    shown = ", ".join(itertools.islice((f"{name} ({_kind(row[name])})" for name in row), 12))
    raise ValueError(f"holds {shown or 'nothing'}")


def _texts(row: Row, names: tuple[str, ...]) -> dict[str, str]:
    """Those of the fields that hold text."""
    return {name: row[name] for name in names if isinstance(row.get(name), str)}


def _listed(row: Row, name: str) -> bool:
    """True where the field holds turns, also as text of a list or as columns, or a lone one."""
    value = row.get(name)
    if name in CONVERSATIONS:
        return value not in (None, [], "", "[]")  # as tables have it in rows of another shape
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = parsed(value)
        except ValueError:
            return False
    return isinstance(value, list) or _is_turn(value)


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(value.get(one), str) for one in SPEAKS)


def parsed(value: Any) -> Any:
    """Value of a text that holds one: JSON, or Python's, as a table is often written."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError) as error:
            raise ValueError(f"holds {value[:40]!r} where a list or an object belongs") from error


def _turns(row: Row, name: str) -> list[Row]:
    """Turns of role and content."""
    value = parsed(row[name])
    if isinstance(value, dict) and value and all(isinstance(one, list) for one in value.values()):
        # Columns of turns, as older data sets hold a list of objects.
        value = [dict(zip(value, cells)) for cells in zip(*value.values(), strict=True)]
    if _is_turn(value):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(f"holds {_kind(value)} as `{name}`")
    if name in CONVERSATIONS[1:] and all(isinstance(turn, str) for turn in value):
        value = [
            {"role": role, "content": turn}
            for role, turn in zip(itertools.cycle(("user", "assistant")), value)
        ]
    turns: list[Row] = []
    for number, turn in enumerate(value, start=1):
        place = f"turn {number} of `{name}`"
        if not isinstance(turn, dict):
            raise ValueError(f"holds {_kind(turn)} as {place}")
        turns += _turn(turn, place)
    return turns


def _turn(turn: Row, place: str) -> list[Row]:
    if isinstance(turn.get("role"), str):
        role, spoken = turn["role"], SPEAKERS.get(turn["role"].lower())
        if role == "function_call":
            return [_said({**turn, "from": role}, place)]
        if spoken in ("user", "assistant", "system"):
            role = spoken
        said = _text_of(turn)
        if said is None and not any(turn.get(one) for one in WITHOUT_TEXT):
            raise ValueError(f"holds no content as {place}")
        return [{**turn, "role": role, "content": said}]
    if "from" in turn:
        return [_said(turn, place)]
    if {"input", "output"} <= turn.keys():
        told = [{"role": one, "content": turn[one]} for one in ("system",) if turn.get(one)]
        return [*told, *_pairs([[turn["input"], turn["output"]]])]
    raise ValueError(f"holds {', '.join(map(str, turn)) or 'nothing'} as {place}")


def _text_of(turn: Row) -> Any:
    return next((turn[name] for name in SAID if turn.get(name) is not None), None)


def _said(turn: Row, place: str) -> Row:
    """A turn of ShareGPT."""
    speaker = str(turn["from"]).lower()
    if speaker not in SPEAKERS:
        raise ValueError(f"holds {turn['from']!r} as the speaker of {place}")
    said = _text_of(turn)
    rest = {
        name: value for name, value in turn.items() if name in ("tool_calls", "reasoning_content")
    }
    if speaker == "function_call":
        calls = parsed(said)
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) and "name" in call for call in calls):
            raise ValueError(f"holds {said!r} as the call of {place}")
        said, rest = "", {"tool_calls": [{"type": "function", "function": call} for call in calls]}
    elif not isinstance(said, (str, list)) and not rest:
        raise ValueError(f"holds {_kind(said)} as the value of {place}")
    return {"role": SPEAKERS[speaker], "content": said, **rest}


def _pairs(history: Any) -> list[Row]:
    """Turns of questions with their answers."""
    history = parsed(history)
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError(f"holds {_kind(history)} as `history`, which is pairs of texts")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair)
    ]


def _tools(row: Row) -> Any:
    return row.get("tools") or row.get("functions") or None  # the latter: OpenAI's former name


def _with_options(messages: list[Row], row: Row) -> Row:
    """Conversation with the system text, tools and template variables that stand beside it."""
    system = next((row[one] for one in SYSTEM if row.get(one)), None)
    if isinstance(system, str) and messages and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    found: Row = {"messages": messages}
    found |= {name: row[name] for name in STEERING if isinstance(row.get(name), str)}
    tools = parsed(_tools(row))
    if tools:
        if not isinstance(tools, list):
            raise ValueError(f"holds {_kind(tools)} as `tools`")
        found["tools"] = [parsed(tool) for tool in tools]
    variables = parsed(row.get("chat_template_kwargs") or None)
    if variables:
        if not isinstance(variables, dict):
            raise ValueError(f"holds {_kind(variables)} as `chat_template_kwargs`")
        found["chat_template_kwargs"] = variables
    return found


KINDS: Mapping[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "nothing",
}


def _kind(value: Any) -> str:
    return KINDS.get(type(value), type(value).__name__)
