"""Prompts with the answers that a conversation holds, token for token as they are served, and the
end of an answer.

A prompt is what a server reads before the answer. The answer is what the template puts behind it,
up to the token that ends the target's turn: in this turn, or at the head of the next one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from draftsmith.chats import (
    PROBE,
    ChatTokenizer,
    Conversation,
    Message,
    rendered,
    source_of,
    template_takes,
)
from draftsmith.errors import UserError

# Variables by which templates switch reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
# Begin and end of reasoning.
REASONING = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"), ("<think:opensource>", "</think:opensource>"),
)  # fmt: skip
# Made-up turns; behind the content of the latter two the template's own text is read.
ASKED = {"role": "user", "content": "Hello."}
SAID, PROBED = ({"role": role, "content": PROBE} for role in ("assistant", "user"))


class AnswerTokenizer(ChatTokenizer, Protocol):
    """Part of a transformers tokenizer that answers need."""

    eos_token_id: int | None
    bos_token_id: int | None
    added_tokens_decoder: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Any) -> str: ...


class Masked(NamedTuple):
    ids: list[int]
    mask: list[int]  # 1 = the target would have written this token


class End(NamedTuple):
    """End of a turn of the target."""

    tokens: list[int]
    tail: str = ""  # what the template puts behind an answer in its turn, where no token ends it
    is_next: bool = False  # the tokens are the head of the next turn


class UserTurn(NamedTuple):
    """Place of a user's text."""

    head: list[int]  # tokens before it
    ends: tuple[int, ...]  # any of these tokens ends it
    mark: str  # so does this text, where no token stands before it


class ChatAnswers:
    """Answers by the chat template of a tokenizer.

    Args:
        eos_token_ids: of the target's generation config; by default the tokenizer's.
    """

    def __init__(self, tokenizer: AnswerTokenizer, eos_token_ids: Sequence[int] = ()):
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.eos = list(eos_token_ids) or ([] if eos is None else [eos])
        self.special = {*tokenizer.added_tokens_decoder, *self.eos} - {tokenizer.bos_token_id}
        self.source = source_of(tokenizer.chat_template)
        self.reasoning = next((pair for pair in REASONING if pair[1] in self.source), None)

    def texts(self, chat: Conversation, where: str) -> list[Masked]:
        """Texts with the masks of the answers: one, or several where the prompt of a later answer
        does not begin with the tokens of the earlier ones.

        Raises:
            UserError: an answer has no such text; `where` names the conversation.
        """
        self._check_tools(chat, where)
        found: list[Masked] = []
        for at, turn in enumerate(chat.messages):
            if turn["role"] != "assistant" or at == 0:
                continue  # what comes before any prompt answers none
            prompt, answer = self._answer(chat, at, where)
            if found and prompt[: len(found[-1].ids)] == found[-1].ids:
                ids, mask = found.pop()
                mask = mask + [0] * (len(prompt) - len(ids))
            else:
                mask = [0] * len(prompt)
            found.append(Masked(prompt + answer, mask + [1] * len(answer)))
        if not found:
            raise UserError(
                f"{where} has no assistant turn behind a prompt; leave out --keep-answers to have "
                "the target answer it"
            )
        return found

    def prompt(self, chat: Conversation, where: str) -> list[int]:
        """Tokens that a server reads."""
        self._check_tools(chat, where)
        return self._encode(self._text(chat, where))

    def completion(self, prompt: list[int], text: str) -> Masked:
        """A text that answers a prompt without a template."""
        answer = self._encode(text)
        if not answer or answer[-1] not in self.eos:
            answer += self.eos[:1]
        mask = [0] * len(prompt) + [1] * len(answer)
        mask[:1] = [0]  # without a prompt the first token has nothing to be predicted from
        return Masked([*prompt, *answer], mask)

    def exact(self, text: str) -> list[int] | None:
        """Canonical tokens of a text; None where they do not decode to it."""
        tokens = self._encode(text)
        return tokens if self._decode(tokens) == text else None

    def user_turn(self) -> UserTurn:
        """First turn of a user. Raises `UserError` where the template has none to write in."""
        text = rendered([PROBED], self.tokenizer) if self.source else ""
        head, found, tail = text.partition(PROBE)
        before, through = self._encode(head), self._encode(head + PROBE)
        # A space at the end of the head may belong to the first token of the text.
        before = _shared(before, through)
        closing = self._head(tail)[-1:]
        mark = "" if closing else tail.strip()
        if not found or not before or not (closing or mark):
            raise UserError("its chat template puts no text before and behind a user's")
        return UserTurn(before, tuple({*self.eos, *closing}), mark)

    def end_behind(self, prompt: Sequence[int]) -> list[int]:
        """End of an answer that is known as text alone."""
        return self.end.tokens if self._openings & set(prompt) else self.eos[:1]

    @functools.cached_property
    def end(self) -> End:
        """End of an answer in a chat; without a template the end of text."""
        try:
            tail = self._behind([ASKED, SAID])
            after = self._behind([ASKED, SAID, ASKED])
        except UserError:
            return End(self.eos[:1])
        own, head = self._encode(tail), self._encode(after)
        for tokens in (_shared(own, head), own):
            ends = [one for one in tokens if one in self.eos]
            found = ends or [one for one in reversed(tokens) if one in self.special]
            if found:
                return End(found[:1])
        if tail.strip():
            return End(self._encode(tail.strip()), tail)
        following = self._head(after)
        return End(following or self.eos[:1], tail, is_next=bool(following))

    @functools.cached_property
    def _openings(self) -> set[int]:
        """Tokens of a prompt by which a chat is known."""
        return self.special & set(self._encode(self._opening))

    @functools.cached_property
    def _opening(self) -> str:
        """Text between a question and its answer."""
        try:
            return self._behind([PROBED], prompted=True)
        except UserError:
            return ""

    def _check_tools(self, chat: Conversation, where: str) -> None:
        if chat.tools and not template_takes(self.source, "tools"):
            raise UserError(
                f"{where} has tools, which have no place in the target's chat template; leave them "
                "out, or take a target whose template has one"
            )

    def _behind(self, messages: list[Message], *, prompted: bool = False) -> str:
        """The template's own text behind the last made-up content."""
        made_up = Conversation(messages, [], {})
        _, found, text = self._text(made_up, "", prompted=prompted).rpartition(PROBE)
        if not found:
            raise UserError("messages are left out by the chat template; use another")
        return text

    def _head(self, text: str) -> list[int]:
        """Tokens of `text` up to its first special one, before which only space may stand."""
        tokens = self._encode(text)
        size = next((at for at, one in enumerate(tokens, start=1) if one in self.special), 0)
        return tokens[:size] if size and not self._decode(tokens[: size - 1]).strip() else []

    def _answer(self, chat: Conversation, at: int, where: str) -> tuple[list[int], list[int]]:
        """Tokens of the prompt of turn `at`, and of its answer."""
        where_turn = f"{where}, turn {at + 1}"
        prompt, text = self._written(chat, at, where, where_turn)
        ends = {*self.eos, *self.end.tokens[-1:]} if not self.end.tail.strip() else {*self.eos}
        before, answer = self._tokens(prompt, text, where_turn)
        if not ends & set(answer):
            text = self._ended(chat, at, prompt, text)
            before, answer = self._tokens(prompt, text, where_turn)
        size = next((size for size, one in enumerate(answer, start=1) if one in ends), len(answer))
        turn, written = chat.messages[at], self._decode(answer[:size])
        called = [call["function"]["name"] for call in turn.get("tool_calls", ())]
        for piece in (self._parted(turn)[1], *called):
            due = max(1, called.count(piece))
            # The tokenizer may normalise what it reads.
            if _lost(piece, written, due) and _lost(
                self._decode(self._encode(piece)), written, due
            ):
                how = "leaves {} out of" if _lost(piece, text, due) else "puts {} behind the end of"
                raise UserError(
                    f"{where_turn}: the chat template {how.format(repr(piece.strip()[:40]))} the "
                    "answer; mend the chat, or leave it out"
                )
        return before, answer[:size]

    def _written(self, chat: Conversation, at: int, where: str, where_turn: str) -> tuple[str, str]:
        """Text of the prompt of turn `at`, and of what the target writes behind it."""
        thoughts, _ = self._parted(chat.messages[at])
        tried = []
        for variables in self._variables(chat, bool(thoughts)):
            asked = chat._replace(messages=chat.messages[:at], variables=variables)
            answered = asked._replace(messages=chat.messages[: at + 1])
            prompt = self._text(asked, where)
            through = self._text(answered, where, prompted=False)
            tried.append((prompt, through))
            answer = through[len(prompt) :]
            forgets = thoughts and self.reasoning is not None and _lost(thoughts, answer)
            if through.startswith(prompt) and not forgets:
                return prompt, answer
        for prompt, through in tried:
            reasoned = self._reasoned(prompt, through, thoughts)
            if reasoned is not None:
                return prompt, reasoned
        if at > 1 or chat.messages[0] != ASKED:
            # A prompt of other text that ends in the same opening of an answer.
            short = chat._replace(messages=[ASKED, chat.messages[at]])
            alone, answer = self._written(short, 1, where, where_turn)
            lead = self._lead(alone)
            for prompt, _ in tried:
                if lead and prompt.endswith(lead):
                    return prompt, answer
        raise UserError(
            f"{where_turn}: the chat template asks for an answer behind {tried[0][0][-40:]!r}, and "
            f"renders this one, {'with' if thoughts else 'without'} reasoning, behind other text; "
            "set its variables by chat_template_kwargs, or leave the row out"
        )

    def _lead(self, prompt: str) -> str:
        """Text at the end of a prompt that opens its answer, from its last special token on."""
        tokens = self._encode(prompt)
        begin = max((at for at, one in enumerate(tokens) if one in self.special), default=None)
        return self._opening if begin is None else self._decode(tokens[begin:])

    def _variables(self, chat: Conversation, thinks: bool) -> Iterator[dict[str, Any]]:
        """Variables as they are given, then with reasoning switched as the answer has it."""
        yield chat.variables
        for switch in SWITCHES:
            if switch not in chat.variables and template_takes(self.source, switch):
                yield {**chat.variables, switch: thinks}

    def _parted(self, turn: Mapping[str, Any]) -> tuple[str, str]:
        """Reasoning and content of an answer."""
        thoughts, content = turn.get("reasoning_content") or "", turn["content"]
        if self.reasoning is not None and not thoughts and self.reasoning[1] in content:
            begin, end = self.reasoning
            thoughts, _, content = content.partition(end)
            thoughts = thoughts.strip().removeprefix(begin)
        return thoughts.strip("\n"), content

    def _reasoned(self, prompt: str, through: str, thoughts: str) -> str | None:
        """Text that is written behind a prompt that ends in reasoning, or behind it, where the
        template renders the answer without."""
        if self.reasoning is None:
            return None
        begin, end = self.reasoning
        bare = prompt.rstrip()
        is_closed = bare.endswith(end)
        is_open = bare.endswith(begin)
        if is_closed or is_open:
            head = bare.removesuffix(end).rstrip().removesuffix(begin)
        else:
            head = prompt
        if not through.startswith(head) or (is_closed and thoughts):
            return None
        rest = through[len(head) :]
        own, found, body = rest.lstrip().removeprefix(begin).partition(end)
        if found and not own.strip():
            closing = end + body
        else:
            closing, body = f"{end}\n\n{rest}", rest
        if is_closed:
            return body
        if not (is_open or thoughts):
            return None
        return ("" if is_open else f"{begin}\n") + f"{thoughts}\n{closing}"

    def _ended(self, chat: Conversation, at: int, prompt: str, text: str) -> str:
        """The answer with an end, which its turn does not have."""
        bare = text.rstrip()
        if not self.end.is_next and self._encode(bare)[-1:] in [[one] for one in self.special]:
            return bare
        body = text.removesuffix(self.end.tail)
        tokens = self.end.tokens
        if self.end.is_next:
            following = chat.messages[at + 1 : at + 2]
            if not following or following[0]["role"] not in ("user", "tool"):
                calls = chat.messages[at].get("tool_calls")
                following = [{"role": "tool", "content": PROBE} if calls else ASKED]
            try:
                asked = chat._replace(messages=[*chat.messages[: at + 1], *following])
                longer = self._text(asked, "", prompted=False)
            except UserError:
                longer = ""
            if longer.startswith(prompt + body):
                tokens = self._head(longer[len(prompt + body) :]) or tokens
        return body + self._decode(tokens)

    def _tokens(self, prompt: str, answer: str, where: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt, and those that the target writes behind them."""
        before, whole = self._encode(prompt), self._encode(prompt + answer)
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
        # A token of the whole text lies on both sides of the edge.
        text = self._decode(whole)
        for lead in ("", "\n"):
            alone = self._encode(lead + answer)[len(self._encode(lead)) :]
            if self._decode(before + alone) == text:
                return before, alone
        raise UserError(
            f"{where}: the tokenizer gives no tokens of the answer alone; leave the row out"
        )

    def _text(self, chat: Conversation, where: str, *, prompted: bool = True) -> str:
        return rendered(
            chat.messages,
            self.tokenizer,
            tools=chat.tools,
            variables=chat.variables,
            add_generation_prompt=prompted,
            where=f"messages of {where}",
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))


def _shared(one: list[int], other: list[int]) -> list[int]:
    """Tokens with which both begin."""
    pairs = zip(one, other)
    return [mine for mine, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _lost(piece: str, text: str, due: int = 1) -> bool:
    return "".join(text.split()).count("".join(piece.split())) < due
