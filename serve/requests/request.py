"""A request on its way through the engine. Torch-free but for the tap tensors it carries."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from draftsmith.errors import UserError
from draftsmith.serve.drafts.routing import UNROUTED, Route
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import check_adjustments, within

if TYPE_CHECKING:
    import torch

    from draftsmith.serve.sampling.state import LawState
    from draftsmith.text_stream import TextStream

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-6  # as kernels/sampling/filters.py, which this torch-free module cannot import


# A transformers `LogitsProcessor`: (input_ids [1, n], scores [1, V]) -> scores [1, V], a pure function of both.
LogitsProcessor = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class FinishReason(str, enum.Enum):
    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"  # cancelled by the client or by the server going down
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What the request asked for; every field is honoured exactly or refused here."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 switches the filter off
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None  # None: as many as the context holds
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report besides the emitted token; None reports nothing
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, its first one excepted
    k: int | None = None  # draft tokens a round; None: the server's
    draft_temperature: float | None = None  # of the draft's own law, 0 for greedy drafts; None: as the server does

    # Applied to raw logits, at every position with the tokens before it, drafted ones included (serve/sampling/adjustments.py).
    repetition_penalty: float = 1.0  # transformers': of the tokens in prompt and output
    presence_penalty: float = 0.0  # OpenAI's: of the tokens in the output
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias), added
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences, none of which comes about
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    min_tokens: int = 0  # what would end the answer is banned until then
    grammar: Grammar | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        within("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise UserError(f"temperature is {self.temperature}; give 0 for greedy or at least {MIN_TEMPERATURE}")
        within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        within("min_p", self.min_p, 0.0, 1.0)
        within("top_k", self.top_k, 0, math.inf)
        within("max_tokens", self.max_tokens, 1, math.inf)
        within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        within("speculation.draft_temperature", self.draft_temperature, 0.0, 100.0)
        if self.draft_temperature is not None and 0 < self.draft_temperature < MIN_TEMPERATURE:
            raise UserError(f"speculation.draft_temperature is {self.draft_temperature}; give 0 or at least {MIN_TEMPERATURE}")
        within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        within("speculation.k", self.k, 0, 64)
        if "" in self.stop:
            raise UserError("stop holds an empty string; give the text to stop at")
        check_adjustments(self)

    @property
    def adjusts(self) -> bool:
        """Whether the law is another than temperature and filters make of the target's."""
        return (
            (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
            or bool(self.logit_bias or self.bad_words or self.min_tokens or self.logits_processors)
            or self.allowed_token_ids is not None
            or self.grammar is not None
        )


class TokenLogprob(NamedTuple):
    """Log-probability of an emitted token under the target at temperature 1 without filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first


class Update(NamedTuple):
    """What one round gave a request."""

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class SpeculationStats:
    """One request's target passes that emitted; the lists hold an entry for each that put at least one draft token before it."""

    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # kept, and still there after stop and EOS trimming
    committed: list[int] = field(default_factory=list)  # after stop and EOS trimming
    begins: list[int] = field(default_factory=list)  # tokens of the answer that were there before the pass
    num_passes: int = 0
    num_committed: int = 0
    # Drafted tokens of its own draft (not of text in its place) whose prefix was kept, and how many of them were kept.
    own_reached: int = 0
    own_kept: int = 0

    def add(self, offered: int, accepted: int, committed: int, *, own: bool) -> None:
        """`own`: its own draft drafted."""
        self.num_passes += 1
        self.num_committed += committed
        if offered > 0:
            self.begins.append(self.num_committed - committed)
            kept = min(accepted, committed)
            self.offered.append(offered)
            self.accepted.append(kept)
            self.committed.append(committed)
            if own:
                self.own_reached += min(kept + 1, offered)
                self.own_kept += kept


OnUpdate = Callable[["Request", Update], None]


@dataclass(slots=True, eq=False)
class Request:
    """Positions `0 .. computed-1` of `tokens` are in the target's cache, `0 .. draft_cached-1` in the draft's."""

    id: str
    tokens: list[int]  # prompt, then everything committed
    num_prompt: int
    params: SamplingParams
    seed: int
    k: int
    max_tokens: int
    on_update: OnUpdate | None = None
    request_class: str = ""
    tenant: str = ""  # whom the queue treats as one client; "" when the server does not tell them apart
    learn: bool = True  # may its rounds be recorded
    route: Route = UNROUTED  # its draft, given when it comes in
    text_stream: TextStream | None = None
    law_state: LawState | None = None  # None: its law is the target's under temperature and filters
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens[1:num_prompt], as far as they were read
    finish_reason: FinishReason | None = None
    error: str = ""

    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # row of the block-table tensor while running
    num_cached: int = 0  # of the prompt's tokens, those that the prefix cache held when it was admitted
    computed: int = 0
    draft_cached: int = 0
    taps: list[torch.Tensor] = field(default_factory=list)  # of positions draft_cached .. computed-1, in order
    lost_taps: bool = False  # the draft did not come for too long: the text must be read again before it can be drafted
    num_forgotten: int = 0  # tokens it had when its caches were last taken: these are read at once, with or without drafts
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as the prefix cache knows them
    num_stored: int = 0  # leading blocks that were offered to the prefix cache
    num_ready: int = 0  # of these, leading ones that the draft had read as well

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_records: int = 0
    recorded: int = 0  # tokens[:recorded] are in records already
    record_share: float | None = None  # the chance it had of being recorded; 0 where it is not, None until that is decided
    num_preemptions: int = 0
    arrival_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether another request may make the same draws: it is sampled, with a seed of its own.

        Text that it drew, or a draft or setting chosen by how its drafts were accepted, depends on draws that are made again,
        and would bias the output of a request that makes them. So it is not recorded, measured or shared.
        """
        return self.params.seed is not None and self.params.temperature > 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of its prompt are still to be read; a cached prefix has none."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.num_output

    @property
    def prefilling(self) -> bool:
        """More than the newest token still has to go through the target."""
        return self.computed < len(self.tokens) - 1 or self.num_output == 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def forget_caches(self) -> None:
        """Its blocks were taken: both models start again from the first token."""
        self.computed = self.draft_cached = self.num_stored = self.num_ready = 0
        self.taps.clear()
        self.lost_taps = False
        self.num_forgotten = self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished request as the Python API returns it."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]  # of prompt[1:], if asked for
    speculation: SpeculationStats
