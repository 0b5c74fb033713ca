"""The Python API: the engine that the server runs, on a thread of its own, behind plain calls."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from draftsmith.drafters.checkpoint import load_draft
from draftsmith.drafters.config import Pair, check_draft_options
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.target.device import device_of, weight_dtype
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.http.tokens import completion_prompts
from draftsmith.serve.requests.request import Completion, FinishReason, Request, Update
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.warm_up import warm_up

Prompts = str | list[str] | list[int] | list[list[int]]
Params = SamplingParams | Sequence[SamplingParams] | None


class Engine:
    """A target and at most one draft, ready to answer; lossless, whatever the draft.

        with Engine("path/to/target", draft="path/to/draft") as engine:
            for completion in engine.generate(["Once upon a time", "def main("],
            SamplingParams(max_tokens=64)):
                print(completion.text)

    Calls may come from any thread, and requests of all of them share one batch.

    Args:
        target: a local folder or Hub id.
        draft: a draft checkpoint, a drafter made elsewhere (`Ngram()`, say), or None for no
        speculation.
        draft_revision, draft_dtype, heterogeneous_vocab: of a draft checkpoint, as the flags of
        `draftsmith serve`.
        config: options of the engine, flags of `draftsmith serve`.
        trust_remote_code: run Python code that a model's folder brings (`auto_map`); off, a model
        that needs it is refused.
        dtype: the weights' type; "auto" is the checkpoint's own, on a CPU wherever it is fast at
        that, else float32.
        device: torch's name of it; by default the first CUDA device, else the CPU.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | ServingDrafter | None = None,
        *,
        draft_revision: str | None = None,
        draft_dtype: str = "auto",
        heterogeneous_vocab: bool = False,
        config: EngineConfig | None = None,
        trust_remote_code: bool = False,
        dtype: str = "auto",
        device: str | None = None,
    ):
        pair = Pair(
            draft=str(draft) if isinstance(draft, (str, Path)) else None,
            draft_revision=draft_revision,
            draft_dtype=draft_dtype,
            heterogeneous_vocab=heterogeneous_vocab,
        )
        check_draft_options(pair)
        place = device_of(device)
        loaded = Target.load(
            target,
            dtype=weight_dtype(dtype, place, target, trust_remote_code=trust_remote_code),
            device=place,
            max_length=None if config is None else config.max_length,
            trust_remote_code=trust_remote_code,
        )
        drafter = load_draft(pair, loaded) if isinstance(draft, (str, Path)) else draft
        self._tokenizer = loaded.tokenizer()
        version = "" if drafter is None else "0"
        engine = build_engine(loaded, drafter, config or EngineConfig(), draft_version=version)
        warm_up(engine)
        self._loop = EngineLoop(engine).start()

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or token ids; `params` are for all
        prompts, or a list with one entry per prompt.

        Raises:
            UserError: a parameter that cannot be honoured exactly.
        """
        with closing(self._streams(prompts, params)) as streams:
            return [stream.result() for stream in streams]

    async def generate_async(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """`generate` as a coroutine."""
        with closing(self._streams(prompts, params)) as streams:
            return [await stream.result_async() for stream in streams]

    def _streams(self, prompts: Prompts, params: Params) -> Generator[Stream, None, None]:
        """Streams of all prompts in order, each given when the queue has no room for more; what has
        not ended is cancelled with the generator."""
        window: deque[Stream] = deque()
        try:
            for prompt, own in self._inputs(prompts, params):
                window.append(self.stream(prompt, own))
                if len(window) == self._loop.engine.config.max_queue:
                    yield window.popleft()
            while window:
                yield window.popleft()
        finally:
            for stream in window:
                stream.close()

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Updates of one request as they come, by `for` or `async for`; closing the stream or
        leaving the loop early cancels the request."""
        (parsed,) = completion_prompts(
            prompt if isinstance(prompt, str) else list(prompt), self._tokenizer
        )
        return Stream(self._loop, parsed.tokens, params or SamplingParams())

    def _inputs(
        self, prompts: Prompts, params: Params
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        parsed = completion_prompts(prompts, self._tokenizer)
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
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Stream:
    """The updates of one request, for one reader."""

    def __init__(self, loop: EngineLoop, prompt: Sequence[int], params: SamplingParams):
        self._loop = loop
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None
        self._done = False
        self.request = loop.submit(prompt, params, self._take)

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
            raise RuntimeError(
                "the engine could not finish this request; see the log for the cause"
            )
        return update
