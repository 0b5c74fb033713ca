"""Chat template of a model: the format of its tool calls, of its reasoning, and the variables it
takes; and grammars of answers: forced or strict calls, the format of the text, reasoning before
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.chats import source_of, template_takes
from draftsmith.errors import UserError
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.tools.answer import (
    REASONING_FORMATS,
    ReasoningFormat,
    Thinking,
    reasoning_format_of,
)
from draftsmith.serve.tools.call_format import ANY, CallFormat, Marks, Tool
from draftsmith.serve.tools.formats import ARGS, Hermes, Llama, Mistral

AUTO, NONE = "auto", "none"
FORMATS: dict[str, type[CallFormat]] = {"hermes": Hermes, "mistral": Mistral, "llama3_json": Llama}


class ChatTemplate:
    """The chat template of a tokenizer, and the formats of the answers to it.

    Args:
        tool_parser: one of `CALL_FORMATS`, "none", or "auto" for what the template shows.
        reasoning_parser: a key of `REASONING_FORMATS`, "none", or "auto".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ):
        self.source = source_of(tokenizer.chat_template)
        added = tokenizer.added_tokens_decoder
        self.special = {str(token): number for number, token in added.items() if token.special}
        self.marks = Marks({str(token): number for number, token in added.items()})
        self.calls = self._calls(tool_parser)
        self.reasoning = self._reasoning(reasoning_parser)

    def takes(self, variable: str) -> bool:
        """True when the template's text depends on the variable."""
        return template_takes(self.source, variable)

    def shown(self, *markers: str) -> frozenset[int]:
        """Special tokens that a parser needs to see in the text."""
        return frozenset(self.special[marker] for marker in markers if marker in self.special)

    def _calls(self, name: str) -> CallFormat | None:
        if name == AUTO:
            name = next((one for one in FORMATS if self._shows(FORMATS[one])), NONE)
        if name == "mistral":
            return Mistral(arrays=ARGS not in self.source)
        return None if name == NONE else FORMATS[name]()

    def _shows(self, format: type[CallFormat]) -> bool:
        return any(sign in self.source for sign in format.signs) and not any(
            other in self.source for other in format.others
        )

    def _reasoning(self, name: str) -> ReasoningFormat | None:
        if name == AUTO:
            return reasoning_format_of(self.source)
        return None if name == NONE else REASONING_FORMATS[name]

    def check_tools(self) -> CallFormat:
        """Format of calls; refuses tools where there is none."""
        if self.calls is None:
            raise UserError(
                "tools need a format of calls, which this model's chat template does not show; "
                "start the server with --tool-call-parser"
            )
        if not self.takes("tools"):
            raise UserError(
                "tools have no place in this model's chat template; leave them out or serve a "
                "model whose template takes tools"
            )
        return self.calls


def call_grammar(
    format: CallFormat,
    tools: Sequence[Tool],
    marks: Marks,
    *,
    forced: bool,
    parallel: bool,
    answer: Grammar | None = None,
) -> Grammar | None:
    """Grammar of an answer that may call `tools`, None where any text is allowed.

    Args:
        forced: the answer is a call.
        parallel: it may be several.
        answer: grammar of an answer without calls.
    """
    strict = any(tool.strict for tool in tools)
    if not (forced or strict or answer is not None or not parallel):
        return None
    names = [tool.name for tool in tools]
    if forced:
        rules = "start: calls\n" + format.calls(names, marks, parallel=parallel)
    elif answer is not None:
        rules = "start: calls | @answer\n" + format.calls(names, marks, parallel=parallel)
    else:
        rules = "start: free\n" + format.free(names, marks, parallel=parallel)
    parts = {} if forced or answer is None else {"answer": answer}
    for index, tool in enumerate(tools):
        rules += f"args_{index}: @arguments_{index}\n"
        held = tool.strict or forced
        schema = schema_of(tool) if held else {"type": "object"}
        parts[f"arguments_{index}"] = Grammar.json_schema(schema)
    return Grammar.combined(rules + ANY, parts)


def schema_of(tool: Tool) -> dict[str, Any]:
    """Schema of the arguments; a tool without one takes none."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise UserError(
            f"tools has parameters of {tool.name!r} with the type {kind!r}; arguments are an object"
        )
    return {"type": "object", **tool.parameters}


def after_reasoning(
    grammar: Grammar, format: ReasoningFormat, marks: Marks, thinking: Thinking
) -> Grammar:
    """The grammar, behind reasoning that the answer may or, where the prompt opens it, does begin
    with. Reasoning is any text that ends with its marker."""
    if thinking is Thinking.DONE:
        return grammar
    rules = "start: (reasoning space)? @answer\n"
    rules += f"reasoning: {marks(format.begin)} thoughts\n"
    if thinking is Thinking.OPEN:
        rules = "start: thoughts space @answer\n"
    rules += marks.head("thoughts", format.end) + "space: /\\n{0,2}/\n" + ANY
    return Grammar.combined(rules, {"answer": grammar})
