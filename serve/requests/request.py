"""Request and its state in the engine, and the target's states at its first positions, kept for its
records. Torch-free but for the tap tensors it carries."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from draftsmith.drafters.quirks.kept_state import KeptState
from draftsmith.record import RecordHead
from draftsmith.serve.sampling.params import SamplingParams

if TYPE_CHECKING:
    import torch

    from draftsmith.serve.sampling.state import SamplingState
    from draftsmith.text_stream import TextStream


class FinishReason(str, enum.Enum):
    STOP = "stop"  # end-of-sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"  # cancelled by the client or by the server going down
    ERROR = "error"


class TokenLogprob(NamedTuple):
    """Log-probability of an emitted token under the target at temperature 1 without filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # likeliest first
    rank: int = 0  # of a prompt's token among all, from 1; 0: not computed


class Update(NamedTuple):
    """Tokens and text that a request got from one round."""

    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class SpeculationStats:
    """Speculation counters of one request. The lists have one entry per target pass that verified
    at least one drafted token."""

    offered: list[int] = field(default_factory=list)
    # kept, and still there after stop and EOS trimming
    accepted: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)  # after stop and EOS trimming
    # tokens of the answer that were there before the pass
    begins: list[int] = field(default_factory=list)
    num_passes: int = 0
    num_committed: int = 0

    @property
    def tau(self) -> float | None:
        """Tokens per pass of those that verified drafted ones; None without any."""
        return sum(self.committed) / len(self.committed) if self.committed else None

    def add(self, offered: int, accepted: int, committed: int) -> None:
        self.num_passes += 1
        self.num_committed += committed
        if offered > 0:
            self.begins.append(self.num_committed - committed)
            self.offered.append(offered)
            self.accepted.append(min(accepted, committed))
            self.committed.append(committed)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of a request besides its sampling parameters."""

    text: bool = True  # False: no detokenisation unless a stop string needs it
    request_class: str = ""
    # client that the queue treats as one; "" when the server does not distinguish clients
    tenant: str = ""
    learn: bool = True  # its rounds may be recorded
    adapter: str = ""  # LoRA adapter of the target by name; "": the target itself
    priority: int = 0  # the lowest of its class or tenant is admitted first
    cache_salt: str = ""  # it shares cached prefixes with requests of the same salt alone
    shown_tokens: frozenset[int] = frozenset()  # special tokens that its text keeps
    # one token comes that no client is shown, and the prompt may fill the context
    prompt_alone: bool = False
    # id that a client has of the request, and of others that belong to the same answer
    answer: str | None = None

    @cached_property
    def acceptance_class(self) -> str:
        """Class that its acceptance is counted by. An adapter has another distribution than the
        base, so it has classes of its own."""
        if not self.adapter:
            return self.request_class
        return "/".join(filter(None, (f"lora:{self.adapter}", self.request_class)))


DEFAULT_OPTIONS = RequestOptions()


@dataclass(slots=True)
class CacheState:
    """Prefix of the text that the target's paged cache holds."""

    computed: int = 0  # positions 0 .. computed-1 are in it
    num_stored: int = 0  # leading blocks that were offered to the prefix cache
    num_ready: int = 0  # of these, leading ones that the draft had read as well
    # tokens at the last preemption: these are read at once, with or without drafts
    num_forgotten: int = 0
    # of a target that has layers with a state
    state: KeptState = field(default_factory=KeptState)

    @property
    def begin(self) -> int:
        """Position at which the next pass begins: tokens that the kept state lacks are read
        again."""
        return self.computed - self.state.behind


class TapPiece(Protocol):
    """Taps [n, width] of positions that follow each other: a tensor, or what is made into one."""

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: slice, /) -> torch.Tensor: ...


@dataclass(eq=False)
class DraftState:
    """Prefix of the text that the draft's cache holds, and the taps that it has yet to read."""

    cached: int = 0  # positions 0 .. cached-1 are in its cache
    # of positions cached .. computed-1, in order
    taps: list[TapPiece] = field(default_factory=list)
    # too many unread tokens: the text must be read again before it can be drafted
    lost_taps: bool = False


@dataclass(slots=True)
class RecordingState:
    """Share of the request that is in round records."""

    num_records: int = 0
    num_tokens: int = 0  # tokens[:num_tokens] are in records already
    # the chance it had of being recorded; 0 where it is not, None until that is decided
    share: float | None = None
    # what its latest records share, and of which version and choice of drafted tokens
    head: RecordHead | None = None
    head_of: tuple[str, bool | None] = ("", None)
    has_distributions: bool = False  # False: sampled from others than a record's fields describe
    tap_log: TapLog | None = None  # None: its records hold no hidden states


@dataclass(slots=True)
class RequestTimes:
    """Times of `time.monotonic`, in seconds; None: not reached."""

    arrival_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None


OnUpdate = Callable[["Request", Update], None]


@dataclass(slots=True, eq=False)
class Request:
    """Text, parameters and state of one request, from its arrival to its last token."""

    id: str
    tokens: list[int]  # prompt, then everything committed
    num_prompt: int
    params: SamplingParams
    seed: int
    k: int
    max_tokens: int
    on_update: OnUpdate | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    text_stream: TextStream | None = None
    # None: its distribution is the target's under temperature and filters
    sampling_state: SamplingState | None = None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # of tokens[1:num_prompt], as far as they were read
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""

    cache: CacheState = field(default_factory=CacheState)
    draft: DraftState = field(default_factory=DraftState)
    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # row of the block-table tensor while running
    # of the prompt's tokens, those that the prefix cache held when it was admitted
    num_cached: int = 0
    # keys of its full blocks in the prefix cache
    block_keys: list[bytes] = field(default_factory=list)

    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    recording: RecordingState = field(default_factory=RecordingState)
    num_preemptions: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def repeatable(self) -> bool:
        """True when another request may make the same draws: sampled, with a seed of its own.

        Text that it drew, or a draft or setting chosen by how its drafts were accepted, depends on
        draws that are made again, and would bias the output of a request that makes them. So it is
        not recorded, measured or shared.
        """
        return self.params.seed is not None and self.params.temperature > 0

    @property
    def drafting(self) -> str:
        """State of its drafting, whatever the control chooses for a round."""
        return "off" if self.k == 0 else "on"

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
        """True while logits of its prompt are still to be read; a cached prefix has none."""
        return (
            self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.num_prompt - 1
        )

    @property
    def remaining(self) -> int:
        return self.num_prompt + self.max_tokens - len(self.tokens)

    @property
    def prefilling(self) -> bool:
        """More than the newest token still has to go through the target."""
        count = len(self.tokens)
        return self.cache.computed < count - 1 or count == self.num_prompt

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def forget_caches(self) -> None:
        """Start both models again from the first token: the request's blocks were taken."""
        self.cache = CacheState(num_forgotten=self.num_tokens)
        self.draft = DraftState()


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

    def __repr__(self) -> str:
        tau = self.speculation.tau
        drafted = "" if tau is None else f", tau={tau:.2f}"
        reason, count = self.finish_reason.value, len(self.tokens)
        return f"Completion({self.text!r}, finish_reason={reason!r}, {count} tokens{drafted})"

    @classmethod
    def of(cls, request: Request) -> Completion:
        assert request.finish_reason is not None
        return cls(
            prompt=request.tokens[: request.num_prompt],
            tokens=request.output,
            text=request.text,
            finish_reason=request.finish_reason,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            speculation=request.speculation,
        )


class TapLog:
    """States of positions 0 .. `end` - 1, in the order in which passes read them, at most `most`
    positions. Once a position was read without being kept, what follows is of no use to a draft,
    which reads all states before."""

    def __init__(self, most: int):
        self.most = most
        self.end = 0
        self.recorded = 0  # positions 0 .. recorded - 1 are in records
        self.has_hole = False
        self._states: np.ndarray | None = None  # [most, width] uint16, filled up to `end`

    @property
    def is_full(self) -> bool:
        return self.has_hole or self.end == self.most

    def add(self, begin: int, states: np.ndarray) -> None:
        """Keeps `states` [n, width] of positions from `begin` on. Those that are known already,
        read again after a preemption, stay as they are."""
        self.has_hole = self.has_hole or begin > self.end
        fresh = states[max(0, self.end - begin) : self.most - begin]
        if self.has_hole or len(fresh) == 0:
            return
        if self._states is None:
            self._states = np.empty((self.most, states.shape[1]), dtype=np.uint16)
        self._states[self.end : self.end + len(fresh)] = fresh
        self.end += len(fresh)

    def between(self, begin: int, end: int) -> np.ndarray | None:
        """[end - begin, width], a copy; None unless all are there."""
        if self._states is None or not 0 <= begin < end <= self.end:
            return None
        return self._states[begin:end].copy()
