"""Conversations as files hold them, and what must be trained on them: the prompts that a server
reads, each followed by its answer.

The expectation is transformers' own rendering of the plain conversation; it shares nothing with the
code that it judges.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate import prompts
from draftsmith.errors import UserError

# Ends of answers by what a template holds; of several lines the first counts. The generation config
# of such a model names them.
ENDS = (
    ("<|return|>", "<|call|>"), ("<|end_of_msg|>",), ("<seed:eos>",), ("<turn|>", "<|tool_response>"),
    ("<end_of_turn>",), ("<|eot_id|>", "<|eom_id|>"), ("<|END_OF_TURN_TOKEN|>",), ("[e~[",),
    ("<end_of_sentence>",), ("<|message_sep|>",), ("<|assistant_end|>",), ("<|role_end|>",),
    ("<SPECIAL_12>",), ("<|end_of_text|>",), ("<｜hy_eos:opensource｜>",), ("<|eot|>",),
    ("<sep>",), ("[|endofturn|]",), ("<|eom|>",), ("<|end_of_turn|>",), ("<end_of_utterance>",),
    ("</assistant>",), ("<｜end▁of▁sentence｜>",), ("<|im_end|>",), ("<|end|>", "<|calls|>"),
)  # fmt: skip
GLM = ("<|user|>", "<|observation|>")
SPECIAL = re.compile(
    r"<\|?[\w:/-]+\|>|<\|[\w:/-]+\|?>|<｜[^｜<>]+｜>|\[/?[A-Z_]{3,}\]|<\w+_of_\w+>|<seed:\w+>"
    r"|\]~!?b(?:\[|\])|\]<\]\w+\[>\[|<SPECIAL_\d+>|</?assistant>|</?user>|<sep>|</?role>"
)
MARKS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)(?::\w+)?>")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": CITY},
}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(city: str, *, as_text: bool) -> list[dict[str, Any]]:
    """One call; its arguments as files hold them are a text of JSON."""
    arguments: Any = {"city": city}
    function = {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}
    return [{"id": "abcdefghi", "type": "function", "function": function}]


def asked(word: str) -> dict[str, Any]:
    return turn("user", f"Tell me {word}, please.")


def said(word: str, **more: Any) -> dict[str, Any]:
    return turn("assistant", f"It is {word}.", **more)


def thought(word: str) -> dict[str, Any]:
    # Holds the answer, which must not be taken for it.
    return said(word, reasoning_content=f"I know that It is {word}. Surely {word}R.")


def tooled(content: str, *, as_text: bool) -> list[dict[str, Any]]:
    return [
        asked("ALPHA"), turn("assistant", content, tool_calls=call("BETACITY", as_text=as_text)),
        turn("tool", '{"sky": "GAMMA"}', tool_call_id="abcdefghi", name="weather"), said("DELTA"),
    ]  # fmt: skip


ONE = [asked("ALPHA"), said("BETA")]
TWO = [*ONE, asked("GAMMA"), said("DELTA")]
# name -> (row of a file, messages and variables as a server is sent them)
Case = tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]


def case(messages: list[dict[str, Any]], plain: Any = None, **row: Any) -> Case:
    variables = row.get("chat_template_kwargs", {})
    if "tools" in row:
        variables = {**variables, "tools": [TOOL]}
    return {"messages": messages, **row}, messages if plain is None else plain, variables


SYSTEM = turn("system", "Answer in one SIGMA.")
THOUGHTFUL = [asked("ALPHA"), thought("BETA"), asked("GAMMA"), thought("DELTA")]
SPACED = [turn("user", " \n Tell me ALPHA "), turn("assistant", "\n  It is BETA  \n\n")]
PARTS = [
    turn("user", [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "ALPHA."}]),
    turn("assistant", [{"type": "text", "text": "It is BETA."}]),
]
CONVERSATIONS: dict[str, Case] = {
    "single": case(ONE),
    "system": case([SYSTEM, *ONE]),
    "multi-turn": case([SYSTEM, *TWO]),
    "tools": case(tooled("", as_text=True), tooled("", as_text=False), tools=json.dumps([TOOL])),
    "content and calls": case(
        tooled("Looking at EPSILON.", as_text=True),
        tooled("Looking at EPSILON.", as_text=False),
        tools=[TOOL["function"] | {"strict": None}],
    ),
    "reasoning": case(THOUGHTFUL[:2]),
    "reasoning in turns": case(THOUGHTFUL),
    "parts": case(PARTS, [turn("user", "Tell me ALPHA."), turn("assistant", "It is BETA.")]),
    "begins with assistant": case([turn("assistant", "Hello OMEGA."), *ONE]),
    "two questions": case([asked("ALPHA"), asked("GAMMA"), said("BETA")]),
    "two answers": case([*ONE, said("DELTA")]),
    "system between": case([*ONE, SYSTEM, asked("GAMMA"), said("DELTA")]),
    "empty": case([asked("ALPHA"), turn("assistant", "")]),
    "unicode": case([asked("ÄLPHA \U0001f600"), said("BÉTA 東京 \U0001f680")]),
    "white space": case(SPACED),
    "thinking off": case(ONE, chat_template_kwargs={"enable_thinking": False}),
    "completion": ({"prompt": ONE[0]["content"], "completion": ONE[1]["content"]}, ONE, {}),
    "thoughts in content": case(
        [asked("ALPHA"), turn("assistant", "<think>\nSurely BETAR.\n</think>\n\nIt is BETA.")]
    ),
}
WORD = re.compile(r"[A-ZÄÉ]{4,}")


class Template(NamedTuple):
    name: str
    source: str


def ends_of(source: str) -> tuple[str, ...]:
    if "[gMASK]" in source:
        return GLM
    return next((ends for ends in ENDS if ends[0] in source), ("</s>",))


@functools.lru_cache(maxsize=1)
def trained_bytes() -> str:
    """A byte-level tokenizer with merges of line ends."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    made.train_from_iterator(["\n\n", "\n\n", "\n\nIt", "\n\nIt", " is", "Tell me"], trainer)
    return made.to_str()


def tokenizer_of(source: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template's tokens."""
    made = Tokenizer.from_str(trained_bytes())
    ends = ends_of(source)
    special = sorted({*SPECIAL.findall(source), *ends, "<s>", "</s>"} - {"<think>", "</think>"})
    made.add_special_tokens([AddedToken(one, normalized=False) for one in special])
    made.add_tokens([AddedToken(one, normalized=False) for one in sorted({*MARKS.findall(source)})])
    eos = "</s>" if ends == GLM or "eos_token" not in source else ends[0]
    if ends[0] == "<|end|>":
        eos = "</s>"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=eos)
    wrapped.chat_template = source
    return wrapped


def eos_ids(source: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer.convert_tokens_to_ids([*ends_of(source), "</s>"])


def trained(row: dict[str, Any], tokenizer: Any, ends: Sequence[int], folder: Path) -> Any:
    """Texts of a row with their masks; a refusal as its sentence, any other error as itself."""
    (folder / "row.jsonl").write_text(json.dumps(row))
    config = GenerateOptions(
        target="t", prompts=str(folder / "row.jsonl"), out="o", keep_answers=True
    )
    try:
        return prompts.load(config, tokenizer, eos_token_ids=ends)
    except UserError as error:
        return str(error)
    except Exception as error:
        return error


VARIANTS = ({}, *({name: on} for name in ("enable_thinking", "thinking") for on in (True, False)))


def served(
    messages: list[dict[str, Any]], variables: dict[str, Any], tokenizer: Any
) -> Iterable[list[int]]:
    """Prompts that a server may have been sent, thinking switched on or off."""
    words = set(WORD.findall(json.dumps(messages, ensure_ascii=False)))
    for more in VARIANTS:
        for shape in (both_names, with_text_arguments, in_parts):
            try:
                text = tokenizer.apply_chat_template(
                    shape(messages), tokenize=False, add_generation_prompt=True,
                    **{**more, **variables},
                )  # fmt: skip
            except Exception:
                continue
            if words & set(WORD.findall(text)):
                yield tokenizer(text, add_special_tokens=False)["input_ids"]
                break


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take arguments as a text alone."""
    found = both_names(messages)
    for message in found:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    return found


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that leave out content which is a text."""
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]}
        for one in both_names(messages)
    ]


def both_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = copy.deepcopy(messages)
    for message in found:
        if "reasoning_content" in message:
            message["reasoning"] = message["thinking"] = message["reasoning_content"]
    return found


def faults(found: list[prompts.Prompt], case: Case, tokenizer: Any, source: str) -> list[str]:
    """What is wrong with the texts of a row."""
    _, messages, variables = case
    ends = [*ends_of(source), "</s>"]
    due = {
        at: list(served(messages[:at], variables, tokenizer))
        for at, one in enumerate(messages)
        if one["role"] == "assistant" and at > 0
    }
    wrong = []
    for text in found:
        for begin, end in stretches(text, tokenizer, ends):
            at = next((at for at, known in due.items() if text.ids[:begin] in known), None)
            if at is None:
                wrong.append(f"no served prompt: ...{tokenizer.decode(text.ids[:end])[-90:]!r}")
                continue
            del due[at]
            wrong += wrong_answer(text.ids[begin:end], messages, at, tokenizer, source, ends)
            before = tokenizer.decode(text.ids[:begin])
            asked_last = next(one for one in reversed(messages[:at]) if one["role"] != "assistant")
            wrong += [
                f"{word} is not in the prompt"
                for word in WORD.findall(str(asked_last["content"]))
                if word not in before
            ]
    return wrong + [f"turn {at + 1} is not trained" for at in due]


def stretches(text: prompts.Prompt, tokenizer: Any, ends: list[str]) -> list[tuple[int, int]]:
    """Begins and ends of the answers; of two answers in a row each."""
    found, begin = [], 0
    for at in range(1, len(text.ids) + 1):
        is_end = at == len(text.ids) or not text.mask[at]
        is_end |= at < len(text.ids) and tokenizer.decode(text.ids[at - 1 : at]) in ends
        if text.mask[at - 1] and is_end:
            found.append((begin, at))
        if not text.mask[at - 1] or is_end:
            begin = at
    return found


def wrong_answer(
    ids: list[int],
    messages: list[dict[str, Any]],
    at: int,
    tokenizer: Any,
    source: str,
    ends: list[str],
) -> list[str]:
    text, turn = tokenizer.decode(ids), messages[at]
    words = set(WORD.findall(turn["content"] + json.dumps(turn.get("tool_calls", ""))))
    code = re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL)
    knows = "reasoning_content" in code or "</think>" in code
    if not knows or "</think>" in turn["content"]:
        words = {word for word in words if not word.endswith("R")}
    elif "reasoning_content" in turn:
        words |= set(WORD.findall(turn["reasoning_content"]))
    others = set(WORD.findall(json.dumps([*messages[:at], *messages[at + 1 :]])))
    own = set(WORD.findall(json.dumps(turn, ensure_ascii=False)))
    wrong = [f"{word} is not in {text!r}" for word in sorted(words) if word not in text]
    shown = set(WORD.findall(text)) - set(WORD.findall(source))
    wrong += [f"{word} is in {text!r}" for word in sorted(shown & (others - own))]
    if tokenizer.decode(ids[-1:]) not in ends:
        wrong.append(f"no end: {text[-60:]!r}")
    if any(tokenizer.decode([one]) in ends for one in ids[:-1]):
        wrong.append(f"goes on behind its end: {text!r}")
    return wrong


def templates(*folders: Path) -> list[Template]:
    paths = itertools.chain.from_iterable(sorted(folder.rglob("*.jinja")) for folder in folders)
    return [Template(f"{path.parent.parent.name}/{path.stem}", path.read_text()) for path in paths]


PLAIN = (both_names, with_text_arguments)


def is_true(sentence: str, case: Case, tokenizer: Any, source: str) -> bool:
    """True where transformers' own rendering confirms the refusal of a row."""
    _, messages, variables = case
    turns = [at for at, one in enumerate(messages) if one["role"] == "assistant" and at > 0]
    pairs = [
        (at, _rendered(messages[:at], variables, tokenizer, True),
         _rendered(messages[: at + 1], variables, tokenizer, False))
        for at in turns
    ]  # fmt: skip
    if "have no place" in sentence:
        bare = {name: value for name, value in variables.items() if name != "tools"}
        return all(
            _rendered(messages[:at], bare, tokenizer, True) == prompt for at, prompt, _ in pairs
        )
    if "are refused by the chat template" in sentence:
        return any(
            _rendered(messages[:end], variables, tokenizer, prompted, PLAIN) is None
            for at in turns
            for end, prompted in ((at, True), (at + 1, False))
        )
    named = re.search(r"turn (\d+): the chat template (leaves|puts|asks)", sentence)
    if named is None:
        return False
    _, prompt, through = next(one for one in pairs if one[0] + 1 == int(named[1]))
    if named[2] == "asks":
        return not through.startswith(prompt)
    piece = re.search(r"(?:leaves|puts) '(.*?)' (?:out|behind)", sentence)
    left_out = piece is not None and through.count(piece[1]) == prompt.count(piece[1])
    ends_before = any(end in through[len(prompt) :].split(piece[1])[0] for end in ends_of(source))
    return left_out if named[2] == "leaves" else ends_before


def _rendered(
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tokenizer: Any,
    prompted: bool,
    shapes: Any = None,
) -> str | None:
    for shape in shapes or (*PLAIN, in_parts):
        try:
            return tokenizer.apply_chat_template(
                shape(messages), tokenize=False, add_generation_prompt=prompted, **variables
            )
        except Exception:
            continue
    return None
