"""Answers of the target, to prompts and to the questions of a suite, turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import BaseStreamer

from draftsmith.chat_answers import ChatAnswers
from draftsmith.chats import conversation_of
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.progress import Progress
from draftsmith.prompts.suites import Question, most_tokens
from draftsmith.train.config import EvalConfig
from draftsmith.train.data.dataset import TokenSequence

SEEDS = 1_000_003
SUITE = "a question of the suite"


def answered(
    config: EvalConfig,
    temperature: float,
    target: Target,
    prompts: Sequence[list[int]],
    *,
    turn: int = 0,
) -> list[list[int]]:
    """The target's answer to each prompt."""
    most = most_tokens(config, config.max_tokens)
    progress = AnswerProgress(f"answers at T={temperature:g}", len(prompts), most)
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), config.batch_size):
        part = prompts[begin : begin + config.batch_size]
        numbers = range(begin, begin + len(part))
        answers += target.answer(
            part,
            max_new_tokens=most,
            temperature=temperature,
            seeds=[(config.seed + SEEDS * turn) * SEEDS + number for number in numbers],
            batch_size=config.batch_size,
            streamer=progress,
        )
        progress.move_to(len(answers))
    progress.bar.close()
    return answers


class AnswerProgress(BaseStreamer):
    """Bar of the tokens that answers of at most `most` tokens may take."""

    def __init__(self, label: str, num_prompts: int, most: int):
        self.bar = Progress(label, num_prompts * most, unit="tokens")
        self.num_prompts, self.most = num_prompts, most
        self.answered = self.tokens = 0

    def put(self, value: torch.Tensor) -> None:
        """`value`: prompts [B, L], or a token of each [B]."""
        self.tokens += value.numel() if value.ndim == 1 else 0
        self._show()

    def end(self) -> None:
        """End of a part, which `move_to` follows."""

    def move_to(self, answered: int) -> None:
        self.answered, self.tokens = answered, answered * self.most
        self._show()

    def _show(self) -> None:
        self.bar.update(self.tokens, f"{self.answered}/{self.num_prompts} answers")


def text_of(name: str, prompt: list[int], answer: list[int]) -> TokenSequence:
    ids = torch.tensor([*prompt, *answer], dtype=torch.int64)
    return TokenSequence(name, ids, torch.arange(len(ids)) >= len(prompt))


def suite_texts(
    config: EvalConfig, temperature: float, target: Target, questions: Sequence[Question]
) -> dict[str, list[TokenSequence]]:
    """Texts of every turn by task, each behind the answers before it. Turns of a conversation have
    one name, so that intervals draw them together."""
    tokenizer = target.tokenizer()
    if tokenizer.chat_template is None:
        raise UserError(
            f"a suite asks chats, and target {target.name!r} has no chat template; give data that "
            "`draftsmith generate` writes from plain prompts"
        )
    reader = ChatAnswers(tokenizer, target.eos_token_ids)
    turns: list[list[dict[str, Any]]] = [list(one.fields["messages"]) for one in questions]
    texts: dict[str, list[TokenSequence]] = {question.task: [] for question in questions}
    room = target.max_positions - most_tokens(config, config.max_tokens)
    unfit: set[int] = set()
    too_long = 0
    for turn in range(1 + max(len(question.later) for question in questions)):
        prompts: dict[int, list[int]] = {}
        for number, question in enumerate(questions):
            if number in unfit or turn > len(question.later):
                continue
            if turn:
                turns[number].append(question.later[turn - 1])
            chat = {**question.fields, "messages": turns[number]}
            prompts[number] = reader.prompt(conversation_of(chat, SUITE), SUITE)
            if len(prompts[number]) > room:
                unfit.add(number)
                del prompts[number]
        answers = answered(config, temperature, target, list(prompts.values()), turn=turn)
        for (number, prompt), answer in zip(prompts.items(), answers, strict=True):
            said = tokenizer.decode(answer, skip_special_tokens=True)
            turns[number].append({"role": "assistant", "content": said})
            kept = answer[: max(0, config.max_length - len(prompt))]
            too_long += len(kept) < len(answer)
            if kept:
                texts[questions[number].task].append(text_of(f"{number}", prompt, kept))
    if unfit:
        print(
            f"{len(unfit)} conversations do not fit into the target's {target.max_positions} "
            "tokens and are left out from there on",
            file=sys.stderr,
        )
    if too_long:
        print(
            f"{too_long} texts are longer than max_length ({config.max_length}) and are cut there",
            file=sys.stderr,
        )
    kept_texts = {task: own for task, own in texts.items() if own}
    if not kept_texts:
        raise UserError(
            f"max_length is {config.max_length} and the target has {target.max_positions} "
            "positions, and every prompt of the suite is as long; give a larger max_length, or "
            "smaller max_tokens"
        )
    return kept_texts
