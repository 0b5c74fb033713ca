"""Chat template of a model: the format of its tool calls, of its reasoning, and the variables it
takes."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from draftsmith.chats.template import source_of, template_takes
from draftsmith.errors import UserError
from draftsmith.serve.tools.call_format import CallFormat
from draftsmith.serve.tools.grammars import Marks
from draftsmith.serve.tools.hermes import Hermes
from draftsmith.serve.tools.llama import Llama
from draftsmith.serve.tools.mistral import ARGS, Mistral
from draftsmith.serve.tools.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_format_of,
)

AUTO, NONE = "auto", "none"
# Texts of a template that show the format, and texts that show another one which has them too.
SIGNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>",), ("<function=", "<arg_key>")),
    "mistral": (("[TOOL_CALLS]",), ()),
    "llama3_json": (("<|python_tag|>", '"parameters": dictionary of'), ()),
}


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
            name = next((one for one in SIGNS if self._shows(*SIGNS[one])), NONE)
        if name == NONE:
            return None
        formats: dict[str, CallFormat] = {
            "hermes": Hermes(),
            "llama3_json": Llama(),
            "mistral": Mistral(arrays=ARGS not in self.source),
        }
        return formats[name]

    def _shows(self, signs: tuple[str, ...], others: tuple[str, ...]) -> bool:
        return any(sign in self.source for sign in signs) and not any(
            other in self.source for other in others
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
