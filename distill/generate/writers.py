"""Writers of a dataset's answers: an OpenAI-compatible server, or none, when the prompts hold their
answers. That of the target, by an engine, is given by the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, Protocol

from draftsmith.chat_answers import ChatAnswers
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate.prompts import Prompt, way_of
from draftsmith.errors import UserError
from draftsmith.train.objective.prompt_logprobs import COMPLETIONS_PATH, PatientServer


class WrittenAnswer(NamedTuple):
    ids: list[int]  # prompt and answer
    mask: list[int]  # 1 = a token of the answer


# Texts, each with the number of its prompt, in the order in which answers end.
Texts = Generator[tuple[int, WrittenAnswer], None, None]


class AnswerWriter(Protocol):
    # what answers depend on beside the prompts, the options of `generate` and the target
    provenance: dict[str, Any]

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Texts:
        """Writes the answer to each prompt, with its seed."""
        ...

    def report(self) -> str:
        """Speed and acceptance in a line; "" where nothing was written here."""
        return ""


class GivenWriter(AnswerWriter):
    """Writer for prompts that are whole texts with masks, which follow no known distribution."""

    def __init__(self) -> None:
        unknown = dict.fromkeys(("temperature", "top_k", "top_p", "max_tokens"))
        self.provenance = {"answered_by": "the prompts", **unknown}

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Texts:
        for number, prompt in enumerate(prompts):
            yield number, WrittenAnswer(prompt.ids, prompt.mask or [])


def temperature_of(prompt: Prompt, config: GenerateOptions) -> float:
    """The temperature of its answer."""
    return way_of(config, 0).temperature if prompt.way is None else prompt.way.temperature


def continued(prompt: Prompt, answer: Sequence[int]) -> WrittenAnswer:
    return WrittenAnswer([*prompt.ids, *answer], [0] * len(prompt.ids) + [1] * len(answer))


def seed_of(seed: int, index: int) -> int:
    """Seed of a prompt's own random stream: its answer does not depend on where a run was
    interrupted."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big") >> 1


# Servers keep seeds in different integers; all hold this many bits.
SEED_BITS = 31


class ServerWriter(AnswerWriter):
    """Writer that keeps `batch` requests under way: the next one leaves when an answer arrives."""

    def __init__(self, config: GenerateOptions, form: ChatAnswers, **waiting: Any):
        """`waiting`: as of `PatientServer`."""
        self.config, self.form = config, form
        self.server = PatientServer(config.url or "", "url", api_key=config.api_key, **waiting)
        self.model = config.model or self.server.first_model("check the URL, or give --model")
        self.provenance = {"answered_by": f"server of {self.model}"}

    def write(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Texts:
        pool = ThreadPoolExecutor(self.config.batch)
        try:
            numbers = {
                pool.submit(self._answer, prompt, seed): number
                for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            }
            for answer in as_completed(numbers):
                number = numbers.pop(answer)
                yield number, continued(prompts[number], answer.result())
        finally:
            # Those that have not left would all be sent before the process could end.
            pool.shutdown(cancel_futures=True)

    def _answer(self, prompt: Prompt, seed: int) -> list[int]:
        body = {
            "model": self.model,
            "prompt": prompt.ids,
            "max_tokens": self.config.max_tokens,
            "temperature": temperature_of(prompt, self.config),
            "top_p": self.config.top_p,
            "seed": seed % (1 << SEED_BITS),
            "return_token_ids": True,
        }
        if prompt.ends:
            body["stop_token_ids"] = list(prompt.ends)
        if self.config.top_k:
            body["top_k"] = self.config.top_k
        answered = self.server.ask("POST", COMPLETIONS_PATH, body)
        try:
            choice = answered["choices"][0]
            ids = choice.get("token_ids")
            return (
                list(ids)
                if ids is not None
                else self._tokenised(prompt, choice["text"], choice.get("finish_reason"))
            )
        except (KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self.server.base} answers no completion ({str(answered)[:200]}); is it "
                "OpenAI-compatible?"
            ) from error

    def _tokenised(self, prompt: Prompt, text: str, reason: str | None) -> list[int]:
        """Tokens for servers that return text alone. The end is appended unless a length ended the
        answer."""
        ids = self.form.exact(text)
        if ids is None:
            raise UserError(
                f"{self.server.base} gives no token ids, and the target's tokenizer does not give "
                f"back its text {text[:60]!r}; use a server with return_token_ids, such as vLLM"
            )
        return [*ids, *self.form.end_behind(prompt.ids)] if reason == "stop" else ids
