"""The record of a round, which the engine hands to a sink after every round and the buffer stores
as a row. Torch-free, schema-versioned."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

SCHEMA_VERSION = 1
UNLOGGED = -1  # in place of a token whose id is not known


class ProbArrays(NamedTuple):
    """n categorical distributions as their `config.TOP` likeliest tokens, up to k each; never
    renormalised: exp(logprobs).sum() + tail == 1."""

    ids: np.ndarray  # [n, k] int32
    logprobs: np.ndarray  # [n, k] float32; -inf where a distribution has no more tokens
    tail: np.ndarray  # [n] float32 probability outside `ids`
    # [n] float32; of p: log sum_v exp(logprob_v / temperature); 0.0 where that is 0 or 1
    log_norms: np.ndarray
    # [n] float32 logprobs of the drafted tokens, which may lie outside `ids`; NaN where not logged;
    # None where none is
    drafted: np.ndarray | None = None

    @classmethod
    def joined(cls, parts: Sequence[ProbArrays], *, least: int = 0) -> ProbArrays:
        """One behind another, as wide as the widest and `least`; tokens that a distribution lacks
        are 0, without mass."""
        width = max([least, *(part.ids.shape[1] for part in parts)])
        ids = np.zeros((sum(len(part.tail) for part in parts), width), dtype=np.int32)
        logprobs = np.full(ids.shape, -np.inf, dtype=np.float32)
        rest = np.zeros((3, len(ids)), dtype=np.float32)
        begin = 0
        for part in parts:
            rows, begin = slice(begin, begin + len(part.tail)), begin + len(part.tail)
            columns = slice(part.ids.shape[1])
            ids[rows, columns], logprobs[rows, columns] = part.ids, part.logprobs
            rest[:, rows] = part.tail, part.log_norms, part.drafted_or_nan
        return cls(ids, logprobs, *rest)

    def chosen(self, places: slice | np.ndarray | Sequence[int]) -> ProbArrays:
        return ProbArrays(*(None if values is None else values[places] for values in self))

    @property
    def drafted_or_nan(self) -> np.ndarray:
        """[n] float32."""
        return np.full(len(self.tail), np.nan, np.float32) if self.drafted is None else self.drafted

    @property
    def columns(self) -> list[np.ndarray]:
        """As they are sent: ids, logprobs, and the others [n, 3]."""
        rest = np.stack([self.tail, self.log_norms, self.drafted_or_nan], axis=1)
        return [self.ids, self.logprobs, rest]

    @classmethod
    def of_columns(cls, ids: np.ndarray, logprobs: np.ndarray, rest: np.ndarray) -> ProbArrays:
        return cls(ids, logprobs, *rest.T.copy())

    @classmethod
    def one_hot(cls, tokens: Sequence[int]) -> ProbArrays:
        """q of a draft that is sure of its tokens [n]."""
        ids = np.array(tokens, dtype=np.int32)[:, None]
        none = np.zeros(len(tokens), dtype=np.float32)
        return cls(ids, np.zeros(ids.shape, dtype=np.float32), none, none, none)


class Distributions:
    """Distributions of consecutive positions: a slice of arrays, perhaps of many records'."""

    def __init__(self, arrays: ProbArrays, begin: int, end: int):
        self._arrays, self._begin, self._end = arrays, begin, end

    @classmethod
    def unlogged(cls, count: int) -> Distributions:
        """Without a token each."""
        ids, ones = np.zeros((count, 0), dtype=np.int32), np.ones(count, dtype=np.float32)
        return cls(ProbArrays(ids, ids.astype(np.float32), ones, 0 * ones), 0, count)

    @staticmethod
    def runs(rows: Iterable[Distributions]) -> list[ProbArrays]:
        """Arrays of all rows in order; neighbours in the same arrays are taken at once."""
        spans: list[Distributions] = []
        for row in rows:
            if spans and spans[-1]._end == row._begin and spans[-1]._arrays is row._arrays:
                spans[-1] = Distributions(row._arrays, spans[-1]._begin, row._end)
            else:
                spans.append(row)
        return [span.arrays for span in spans]

    @property
    def arrays(self) -> ProbArrays:
        return self._arrays.chosen(slice(self._begin, self._end))

    @property
    def is_logged(self) -> bool:
        """True where the first holds a token."""
        return bool(np.isfinite(self._arrays.logprobs[self._begin : self._end][:1]).any())

    def copied(self) -> Distributions:
        """These alone: a part keeps the arrays of all positions that it was read with."""
        arrays = ProbArrays(*(None if one is None else one.copy() for one in self.arrays))
        return Distributions(arrays, 0, len(self))

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> Distributions:
        positions = range(self._begin, self._end)[part]
        return Distributions(self._arrays, positions.start, positions.stop)


NOTHING = Distributions.unlogged(0)


class RecordedTaps(NamedTuple):
    """Hidden states of the target at n consecutive positions of a text."""

    layers: tuple[int, ...]  # raw ids, as `drafters/target/taps.py` counts them
    begin: int  # position of the first state
    values: np.ndarray  # [n, len(layers) * H] uint16, the bits of bfloat16


@dataclass(slots=True)
class SharedFields:
    """Fields that a request's records share while one draft proposes for it."""

    request: str  # hashed id, stable over the request's rounds
    request_class: str = ""  # "" when the client gave none
    target: str = ""
    target_revision: str = ""
    draft_version: str = ""  # "" when no draft proposed
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    share: float = 1.0  # the chance with which its request was chosen to be recorded
    # how `drafted` was verified: "chain", "block", "tree" (of whose nodes the kept path and the
    # first rejected one are recorded), or a lossy rule of another engine; "" where not known
    rule: str = ""
    engine: str = ""  # name of the engine, for a buffer of several; "" when it has none
    # choice of `drafted`: "probabilistic" (drawn from the draft's distribution under the request's
    # sampling), "unfiltered" (drawn at the request's temperature without its filters), "greedy"
    # (the draft's likeliest token), "tempered" (drawn at another temperature than the request's);
    # "" where not known
    sampler: str = ""
    # Sampled with a seed of the request's own, so that another request may make the same draws:
    # readers leave it out.
    seeded: bool = False
    # name of the target's weights by the engine, which may change without a new folder; "" when it
    # has none
    weight_version: str = ""


HEAD_FIELDS = tuple(SharedFields.__dataclass_fields__)


@dataclass(slots=True, kw_only=True)
class RoundRecord(SharedFields):
    """One propose -> verify -> commit step of one request.

    The tokens of a request are, in order of `round`: `context` (tokens committed since the
    request's previous record; the whole prompt in the first one), then `committed`. `p[i]` and
    `q[i]` are the distributions at drafted position i. They are left out when the request asked for
    more than the sampling fields describe (a penalty, a ban, a grammar): acceptance then is no
    evidence about the distributions under these fields, so such rounds are text to learn from and
    are never scored.
    """

    round: int  # 0, 1, 2, ... within the request
    time_s: float
    position: int  # absolute position of the first drafted token
    context: list[int]
    drafted: list[int]  # of another server perhaps `UNLOGGED` from the first rejected one
    accepted: int  # how many of `drafted` were kept before any trimming
    committed: list[int]  # what was emitted after stop and EOS trimming
    emitted: int  # the residual or bonus token
    last: bool = False  # no record of its request follows
    # target distribution at temperature 1 without filters, per drafted position; of a server that
    # logs its text alone only up to the first rejected one
    p: Distributions = NOTHING
    # the distribution the draft token was sampled from; one-hot for deterministic drafts
    q: Distributions = NOTHING
    # the target's states of the text up to here that no record before holds; None where the server
    # records none, and behind the positions at which it does
    taps: RecordedTaps | None = None
    schema: int = SCHEMA_VERSION

    @property
    def tap_bytes(self) -> int:
        return 0 if self.taps is None else self.taps.values.nbytes


@dataclass(slots=True)
class RecordHead(SharedFields):
    """The shared fields of records of one request, which is no longer changed."""

    encoded: bytes = field(init=False, repr=False, compare=False)  # the others, as JSON

    def __post_init__(self) -> None:
        self.encoded = json.dumps(self.values).encode()

    @property
    def values(self) -> list[Any]:
        return [getattr(self, name) for name in HEAD_FIELDS]

    @classmethod
    def decoded(cls, data: bytes) -> RecordHead:
        return cls(*json.loads(data))


class RoundRow(NamedTuple):
    """One record of an engine's round: its head, and fields of `RoundRecord`. Without more it is
    one without drafts."""

    head: RecordHead
    round: int
    position: int
    context: list[int]
    drafted: Sequence[int] = ()
    accepted: int = 0
    committed: Sequence[int] = ()
    emitted: int = UNLOGGED
    last: bool = False
    taps: RecordedTaps | None = None
    place: int = -1  # of its logits among the round's rows; -1: it has no p and q

    def record(self, time_s: float) -> RoundRecord:
        """The record but for its p and q."""
        return RoundRecord(
            **dict(zip(HEAD_FIELDS, self.head.values)),
            round=self.round,
            time_s=time_s,
            position=self.position,
            context=self.context,
            drafted=list(self.drafted),
            accepted=self.accepted,
            committed=list(self.committed),
            emitted=self.emitted,
            last=self.last,
            taps=self.taps,
        )


class RoundLogits(Protocol):
    """Logits of a round in the engine's memory, which is used again after it."""

    def arrays(self, rows: Sequence[RoundRow]) -> tuple[ProbArrays, ProbArrays | None]:
        """p and q at all drafted positions of `rows`, one row after another; no q where the draft
        is sure of its tokens."""
        ...


class RecordedRound(NamedTuple):
    """Records of an engine's round, of which nothing is made before a sink asks."""

    rows: Sequence[RoundRow]
    time_s: float
    logits: RoundLogits | None = None  # None where no row has p and q

    def records(self) -> list[RoundRecord]:
        made = [row.record(self.time_s) for row in self.rows]
        probed = [row for row in self.rows if row.place >= 0]
        if self.logits is None or not probed:
            return made
        p, q = self.logits.arrays(probed)
        if q is None:
            q = ProbArrays.one_hot([token for row in probed for token in row.drafted])
        end = 0
        for record, row in zip(made, self.rows, strict=True):
            if row.place >= 0:
                begin, end = end, end + len(row.drafted)
                record.p, record.q = (Distributions(one, begin, end) for one in (p, q))
        return made


def sampler_of(record: RoundRecord) -> str:
    """Choice of the drafted tokens, by its usual name where it is not known."""
    return record.sampler or "probabilistic"


def hashed(request_id: str) -> str:
    """Name of a request in records. Requests of one answer are `ANSWER-NUMBER`: the answer's id
    finds them all."""
    answer, _, number = request_id.rpartition("-")
    return f"{hashed_answer(answer)}-{number}"


@functools.lru_cache(maxsize=4096)  # asked for every record of every running request
def hashed_answer(answer: str) -> str:
    return hashlib.sha256(answer.encode()).hexdigest()[:16]


class SinkCounts(NamedTuple):
    """Records that a sink was handed, by what became of them; those that wait are in none."""

    written: int = 0
    dropped: int = 0  # for lack of room, or refused
    lost: int = 0  # with a writer that was killed
    untapped: int = 0  # that lost their hidden states alone


class Sink(Protocol):
    """Receiver of records from the engine's thread; `put_round` must never block and never
    raise."""

    @property
    def share(self) -> float:
        """Share of new requests to record, from 0 to 1, each whole; a sink that falls behind lowers
        it."""
        ...

    @property
    def counts(self) -> SinkCounts: ...

    def put_round(self, round: RecordedRound) -> None:
        """Called once a round. What a sink needs of its logits it reads before it returns: the
        engine uses their memory again."""
        ...

    def forget(self, answer: str) -> int:
        """Delete the records of an answer, by its id, and return their number; callable from any
        thread, and slow."""
        ...

    def close(self) -> None: ...


class RecordSink(Sink, Protocol):
    """Sink of records one by one, for what it is to inherit from."""

    def put(self, record: RoundRecord) -> None: ...

    def put_round(self, round: RecordedRound) -> None:
        for record in round.records():
            self.put(record)
