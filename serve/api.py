"""The Python API: the engine that the server runs, on a thread of its own, behind plain calls."""

from __future__ import annotations

import asyncio
import os
import queue
import reprlib
import socket
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftsmith.chats import Message, conversation_of, source_of
from draftsmith.config import build
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.products.fast_types import name_of
from draftsmith.progress import duration, say
from draftsmith.serve.config import HttpOptions, ServeConfig
from draftsmith.serve.config_checks import check
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.tokens import TokenPrompt, completion_prompts, conversation_prompt
from draftsmith.serve.load import MakeSink, load_engine, load_served_target
from draftsmith.serve.requests.request import (
    Completion,
    FinishReason,
    Request,
    RequestOptions,
    Update,
)
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.warm_up import warm_up
from draftsmith.serve.watch import watch_versions

Prompts = str | list[str] | list[int] | list[list[int]]
Conversation = Sequence[Message]
Params = SamplingParams | Sequence[SamplingParams] | None
# Options of `draftsmith serve` that mean nothing without its port.
OF_SERVER = tuple(one.name for one in fields(HttpOptions))
# Options that mean nothing beside a drafter that is loaded already.
OF_SOURCE = ("draft_dtype", "draft_revision", "heterogeneous_vocab")
OF_DRAFTER = (*ServingDrafter.__annotations__, "new_pool", "propose", "cached_after")


class Engine:
    """A target and at most one draft, ready to answer; lossless, whatever the draft.

        with Engine("path/to/target", draft="path/to/draft", k=3) as engine:
            for completion in engine.generate(["Once upon a time", "def main("],
            SamplingParams(max_tokens=64)):
                print(completion.text)

    Calls may come from any thread, and requests of all of them share one batch.

    Args:
        target: a local folder or Hub id.
        draft: a draft checkpoint, a drafter made elsewhere (`Suffix()`, say), or None.
        options: those of `draftsmith serve` by their names (`k=3`, `suffix=True`, `dtype`,
        `max_batch`, `learn`, ...), but `OF_SERVER`.
    """

    make_sink: ClassVar[MakeSink | None] = None  # for `learn`; this package stores no records

    def __init__(
        self, target: str | Path, draft: str | Path | ServingDrafter | None = None, **options: Any
    ):
        begun_s = time.monotonic()
        config = configured(target, draft, options)
        if config.learn is not None and Engine.make_sink is None:
            raise UserError("learn is given but nothing stores records here; use draftsmith.Engine")
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        loaded = load_served_target(config)
        self._tokenizer = loaded.tokenizer()
        drafter = None if isinstance(draft, str | Path) else draft
        engine, served, sink = load_engine(config, loaded, Engine.make_sink, drafter)
        with ExitStack() as services:  # ended in reverse order
            if sink is not None:
                services.callback(sink.close)
            warm_up(engine)
            self._loop = EngineLoop(engine).start()
            services.callback(self._loop.close)
            if config.versions is not None:
                services.callback(watch_versions(config, self._loop, served).stop)
            # By the interpreter too, as it ends: threads at work would be aborted.
            self._end = weakref.finalize(self._loop, services.pop_all().close)
        say(f"ready after {duration(time.monotonic() - begun_s)}")

    def __repr__(self) -> str:
        engine, target = self._loop.engine, self.target
        ended = "" if self._loop.healthy else ", closed"
        where = f"{name_of(target.dtype)} on {target.device}"
        return f"<Engine of {target.name!r}: {where}, {engine.drafts}{ended}>"

    def generate(
        self, prompts: Prompts, params: Params = None, *, adapter: str = ""
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or token ids; `params` are for all
        prompts, or a list with one entry per prompt. `adapter` is one of `lora`.

        Raises:
            UserError: a parameter that cannot be honoured exactly.
        """
        with closing(self._streams(prompts, params, adapter)) as streams:
            return [stream.result() for stream in streams]

    async def generate_async(
        self, prompts: Prompts, params: Params = None, *, adapter: str = ""
    ) -> list[Completion]:
        """`generate` as a coroutine."""
        with closing(self._streams(prompts, params, adapter)) as streams:
            return [await stream.result_async() for stream in streams]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        adapter: str = "",
    ) -> list[Completion]:
        """`generate` for the messages of one conversation, or of each of several, as
        /v1/chat/completions reads them by the target's chat template."""
        chats = conversations(messages)
        if not chats:
            raise UserError(
                f"messages are {reprlib.repr(messages)}; give a list of messages, each with role "
                "and content, or several such lists"
            )
        source, prompts = source_of(self._tokenizer.chat_template), []
        for number, each in enumerate(chats, start=1):
            where = "messages" if len(chats) == 1 else f"messages of conversation {number}"
            row = {"messages": each, "chat_template_kwargs": chat_template_kwargs}
            chat = conversation_of(row, where, source)
            prompt = conversation_prompt(
                chat.messages,
                self._tokenizer,
                variables=chat.variables,
                continue_final_message=continue_final_message,
                where=where,
            )
            prompts.append(prompt.tokens)
        return self.generate(prompts, params, adapter=adapter)

    def _streams(
        self, prompts: Prompts, params: Params, adapter: str
    ) -> Generator[Stream, None, None]:
        """Streams of all prompts in order, each given when the queue has no room for more; what has
        not ended is cancelled with the generator."""
        window: deque[Stream] = deque()
        try:
            for prompt, own in self._inputs(prompts, params):
                window.append(self.stream(prompt, own, adapter=adapter))
                if len(window) == self._loop.engine.config.max_queue:
                    yield window.popleft()
            while window:
                yield window.popleft()
        finally:
            for stream in window:
                stream.close()

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
    ) -> Stream:
        """Updates of one request as they come, by `for` or `async for`; closing the stream or
        leaving the loop early cancels the request."""
        if not self._loop.healthy:
            ended = "failed, and the log says why" if self._end.alive else "is closed"
            raise UserError(f"this Engine {ended}; make another one")
        if not isinstance(params, SamplingParams | None):
            raise UserError(f"params are {reprlib.repr(params)}; give draftsmith.SamplingParams")
        parsed, *others = self._tokens(prompt)
        if others:
            raise UserError("a stream is of one prompt; open one for each prompt")
        return Stream(self._loop, parsed.tokens, params or SamplingParams(), adapter)

    def _tokens(self, prompts: Any) -> list[TokenPrompt]:
        if not isinstance(prompts, Sequence):
            raise UserError(f"prompt is {reprlib.repr(prompts)}; give a text, token ids or a list")
        if conversations(prompts):
            raise UserError("the prompt holds messages of a chat; give them to Engine.chat")
        given = prompts if isinstance(prompts, str) else list(prompts)
        return completion_prompts(given, self._tokenizer)

    def _inputs(
        self, prompts: Prompts, params: Params
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        parsed = self._tokens(prompts)
        own = (
            [params or SamplingParams()] * len(parsed)
            if not isinstance(params, Sequence)
            else list(params)
        )
        if len(own) != len(parsed):
            raise UserError(
                f"{len(parsed)} prompts are given with {len(own)} params; give one for all or one "
                "for each"
            )
        return [(prompt.tokens, each) for prompt, each in zip(parsed, own, strict=True)]

    @property
    def target(self) -> Target:
        return self._loop.engine.target

    def close(self) -> None:
        """End running requests. The weights are freed with the object."""
        self._end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def configured(
    target: str | Path, draft: str | Path | ServingDrafter | None, options: Mapping[str, Any]
) -> ServeConfig:
    """The options as `draftsmith serve` checks them."""
    if needless := sorted(options.keys() & set(OF_SERVER)):
        raise UserError(
            f"option {needless[0]!r} is of the server alone; leave it out, or start draftsmith "
            "serve"
        )
    named: Any = draft
    if draft is not None and not isinstance(draft, str | Path):
        if lacking := [name for name in OF_DRAFTER if not hasattr(draft, name)]:
            raise UserError(
                f"draft is a {type(draft).__name__}, which lacks {lacking[0]!r}; add it, as "
                "drafters/interface.py: ServingDrafter has it, or give the folder of a draft"
            )
        named = draft.family
    if named is not draft and (needless := sorted(options.keys() & set(OF_SOURCE))):
        raise UserError(
            f"option {needless[0]!r} says how a draft is loaded, and the {named} drafter given is "
            "loaded; leave it out"
        )
    place = f"{socket.gethostname()}:{os.getpid()}"
    given = {"target": target, "draft": named, "engine_name": place} | dict(options)
    config = build(ServeConfig, given)
    check(config)
    return config


def conversations(given: Any) -> list[Conversation]:
    """`given` as conversations, which are lists of messages: one, or several; none where it holds
    something else."""
    items = list(given) if isinstance(given, list | tuple) else []
    if items and isinstance(items[0], Mapping):
        items = [items]
    held = (isinstance(one, list | tuple) and one and isinstance(one[0], Mapping) for one in items)
    return items if all(held) else []


class Stream:
    """The updates of one request, for one reader."""

    def __init__(
        self, loop: EngineLoop, prompt: Sequence[int], params: SamplingParams, adapter: str = ""
    ):
        self._loop = loop
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None
        self._done = False
        self.request = loop.submit(prompt, params, self._take, RequestOptions(adapter=adapter))

    def __iter__(self) -> Iterator[Update]:
        try:
            while not self._done:
                yield self._checked(self._updates.get())
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Update]:
        here, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: None if here.is_closed() else here.call_soon_threadsafe(arrived.set)
        try:
            while not self._done:
                arrived.clear()
                if self._updates.empty():
                    await arrived.wait()
                yield self._checked(self._updates.get())
        finally:
            self.close()

    def result(self) -> Completion:
        """Completion of the request, once it has finished."""
        for _ in self:
            pass
        return Completion.of(self.request)

    async def result_async(self) -> Completion:
        async for _ in self:
            pass
        return Completion.of(self.request)

    def set_k(self, k: int) -> None:
        """Change the draft length from the next round on; 0 stops drafting."""
        self._loop.set_k(self.request, k)

    def close(self) -> None:
        """Cancels what has not ended; safe to call again."""
        if not self._done:
            self._done = True
            self._loop.cancel(self.request)

    def _take(self, request: Request, update: Update) -> None:
        """Called on the engine's thread."""
        self._updates.put(update)
        if self._wake is not None:
            self._wake()

    def _checked(self, update: Update) -> Update:
        self._done = update.finish_reason is not None
        if update.finish_reason is FinishReason.ERROR:
            raise RuntimeError("the engine could not finish this request; the log says why")
        return update
