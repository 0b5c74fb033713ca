"""Checked requests from prompts, parameters and options; and the decoding of a few tokens without
what transformers does around it, which takes longer. Reads only constants, so any thread may use
it."""

from __future__ import annotations

import copy
import itertools
import secrets
import threading
import uuid
from collections.abc import Collection, Sequence
from functools import cached_property
from random import Random

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.random_streams import WORD, signed
from draftsmith.serve.requests.request import DEFAULT_OPTIONS, OnUpdate, Request, RequestOptions
from draftsmith.serve.sampling.adjustments import sampling_state
from draftsmith.serve.sampling.grammar_matcher import GrammarCompiler
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.text_stream import ShowsTokens, TextStream, Tokenizer

SEED_BITS = 62  # of seeds drawn here; those of requests have 64


class InputProcessor:
    """`k` is the draft length of requests that do not name one; 0 when there is no drafter. `seed`
    None: requests without a seed draw what no other engine and no earlier start has drawn."""

    def __init__(
        self,
        target: Target,
        *,
        k: int,
        has_drafter: bool,
        max_length: int,
        seed: int | None,
        adapters: Collection[str] = (),
    ):
        self.adapters = adapters  # names that requests may ask for
        self.target, self.k, self.has_drafter, self.max_length = target, k, has_drafter, max_length
        self._seeds = Random(secrets.randbits(64) if seed is None else seed)
        self._numbers = itertools.count()
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_update: OnUpdate | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Request:
        """A checked request; raises `UserError` for one that cannot be honoured exactly."""
        prompt = list(prompt_ids)
        max_tokens = self.max_tokens(prompt, params, spare=options.prompt_alone)
        stream = None
        if options.text or params.stop:
            stream = TextStream(
                self._text_of(params, options.shown_tokens),
                context=prompt,
                stop=params.stop,
                min_tokens=params.min_tokens,
                keep_stop=params.include_stop_str_in_output,
            )
        self._check_adapter(options.adapter)
        request = Request(
            id=f"{options.answer or uuid.uuid4().hex}-{next(self._numbers)}",
            tokens=prompt,
            num_prompt=len(prompt),
            params=params,
            seed=self._seeds.getrandbits(SEED_BITS)
            if params.seed is None
            else signed(params.seed & WORD),
            k=self.draft_length(params),
            max_tokens=max_tokens,
            on_update=on_update,
            options=options,
            text_stream=stream,
            sampling_state=sampling_state(params, prompt, self.target, self._grammars),
        )
        return request

    def _check_adapter(self, name: str) -> None:
        if name and name not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise UserError(
                f"adapter {name!r} is not served here ({known}); make the Engine with "
                f"lora=['{name}=FOLDER']"
            )

    def _text_of(self, params: SamplingParams, shown: frozenset[int]) -> Tokenizer:
        if params.skip_special_tokens and not shown:
            return self._text_decoder
        return ShowsTokens(
            self._text_decoder, self._special - shown if params.skip_special_tokens else ()
        )

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._decoder.added_tokens_decoder
        return frozenset(number for number, token in added.items() if token.special)

    def waits_for_grammar(self, params: SamplingParams) -> bool:
        """True where the grammar of `params` is still to be compiled."""
        compiler, grammar = self._compiler, params.grammar
        return grammar is not None and (compiler is None or not compiler.knows(grammar))

    def _grammars(self) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                target = self.target
                self._compiler = GrammarCompiler(
                    self._decoder, target.vocab_size, target.eos_token_ids
                )
            return self._compiler

    @cached_property
    def _decoder(self) -> PreTrainedTokenizerBase:
        # Its own copy: encoding may set options of the shared one, and a tokenizer that another
        # thread is reading refuses that.
        return copy.deepcopy(self.target.tokenizer())

    @cached_property
    def _text_decoder(self) -> Tokenizer:
        return decoder_of(self._decoder)

    def draft_length(self, params: SamplingParams) -> int:
        if not self.has_drafter:
            if params.k:
                raise UserError(
                    f"speculation.k is {params.k} but no drafter is loaded; give 0 or leave it out"
                )
            return 0
        return self.k if params.k is None else params.k

    def max_tokens(
        self, prompt: Sequence[int], params: SamplingParams, *, spare: bool = False
    ) -> int:
        """Most tokens of the answer; the context bounds it. With `spare` one may come behind it."""
        if not prompt:
            raise UserError("prompt is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= self.target.vocab_size:
            raise UserError(
                f"prompt holds token ids outside 0..{self.target.vocab_size - 1}; tokenise it "
                "with this model"
            )
        room = self.max_length - len(prompt) + spare
        if room < 1:
            raise UserError(
                f"prompt has {len(prompt)} tokens and the context {self.max_length}; shorten it "
                "to leave an answer room"
            )
        if params.min_tokens > room:
            raise UserError(
                f"min_tokens is {params.min_tokens} but {len(prompt)} prompt tokens leave {room} "
                f"of the context's {self.max_length}; ask for fewer"
            )
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise UserError(
                f"max_tokens is {params.max_tokens} but {len(prompt)} prompt tokens leave {room} "
                "of the context's "
                f"{self.max_length}; ask for fewer"
            )
        return params.max_tokens


class FastDecoder:
    """`decode` of a tokenizer of the `tokenizers` library, for lists of ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer, self._decode = tokenizer, tokenizer.backend_tokenizer.decode

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        if not clean_up_tokenization_spaces:
            return self._decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=True
        )


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """`FastDecoder` where the tokenizer's class decodes by the library alone, else the
    tokenizer."""
    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    if isinstance(tokenizer, fast) and (kind.decode, kind._decode) == (fast.decode, fast._decode):
        return FastDecoder(tokenizer)
    return tokenizer
