"""Served texts stitched from round records, with the role of each position, and the requests whose
records are still coming."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from draftsmith.distill.buffer.folder import ShardFolder, is_forgotten, parse
from draftsmith.distill.buffer.record_table import tokens_only, without_distributions, without_q
from draftsmith.errors import UserError
from draftsmith.prompts.shares import uniform
from draftsmith.record import UNLOGGED, RecordedTaps, RoundRecord, sampler_of

# A request that ends has a last record, unless its server was killed. Servers write every second,
# or every 20 s into an object store, and no record while a request drafts nothing: one that is
# taken for finished too soon loses the records that come later.
SILENCE_S = 60.0


class Role(enum.IntEnum):
    """Outcome of verification at a position of text that rounds wrote."""

    CONTEXT = 0  # the prompt, or text without a known role
    ACCEPTED = 1  # the drafted token was accepted
    FIRST_REJECTED = 2  # the drafted token was rejected; the token here is the target's
    BONUS = 3  # the target's token after a fully accepted draft


class TrainedRow(NamedTuple):
    """A text to train on."""

    tokens: list[int]
    weights: np.ndarray  # [len(tokens)] float32, of the predicted tokens

    def cut(self, length: int) -> TrainedRow:
        return TrainedRow(self.tokens[:length], self.weights[:length])


@dataclass(frozen=True)
class ServedText:
    """One request, from its prompt to the last token without a gap before it."""

    records: list[RoundRecord]  # in order of round
    tokens: list[int]
    roles: np.ndarray  # [len(tokens)] int8, of `Role`

    @property
    def request(self) -> str:
        return self.records[0].request

    @cached_property
    def tap_bytes(self) -> int:
        return sum(record.tap_bytes for record in self.records)

    @property
    def is_scorable(self) -> bool:
        """True where a round carries distributions: it drafted, and its request used no sampling
        that records leave out."""
        return any(record.p for record in self.records)

    @property
    def group(self) -> str:
        """Name of the requests that are accepted alike: of the same class, drafted alike."""
        name = self.records[0].request_class
        others = [one for one in samplers_of([self]) if one != "probabilistic"]
        return f"{name} ({', '.join(others)})".lstrip() if others else name

    def is_of(self, revision: str) -> bool:
        """True where the weights at hand wrote all of it."""
        return all(record.target_revision in ("", revision) for record in self.records)

    def unlogged(self) -> ServedText:
        """Copy for another revision of the target: its tokens, which may be scored, without the
        logged distributions."""
        return replace(self, records=[tokens_only(record) for record in self.records])

    def slim(self, *, keeps_p: bool = False) -> ServedText:
        """Copy without the logged distributions that training does not read."""
        stripped = without_q if keeps_p else without_distributions
        return replace(self, records=[stripped(record) for record in self.records])


def stitch(records: Iterable[RoundRecord]) -> ServedText | None:
    """Text of one request's records, None when the beginning is missing. A gap (a dropped or
    damaged record) ends the text: what follows lacks its context."""
    ordered = sorted(records, key=lambda record: record.round)
    kept: list[RoundRecord] = []
    tokens: list[int] = []
    roles: list[int] = []
    for number, record in enumerate(ordered):
        if record.round != number or len(tokens) + len(record.context) != record.position:
            break
        tokens += [*record.context, *record.committed]
        roles += [Role.CONTEXT] * len(record.context)
        roles += roles_of(len(record.drafted), record.accepted, len(record.committed))
        kept.append(record)
    return ServedText(kept, tokens, np.array(roles, dtype=np.int8)) if kept else None


def roles_of(num_drafted: int, accepted: int, committed: int) -> list[Role]:
    """Roles of the tokens that one round committed, which trimming may have cut short."""
    last = Role.FIRST_REJECTED if accepted < num_drafted else Role.BONUS
    return [*[Role.ACCEPTED] * accepted, last][:committed]


def text_row(text: ServedText, positions: Collection[str]) -> TrainedRow:
    """The text, of which `positions`, names of roles, are trained."""
    wanted = [role for role in Role if role.name.lower().replace("_", "-") in positions]
    return TrainedRow(text.tokens, np.isin(text.roles, wanted).astype(np.float32))


def branched(text: ServedText) -> list[tuple[RoundRecord, TrainedRow]]:
    """Rounds with tokens drafted behind a rejected one, which are known, each with the text before
    it and its draft. Those tokens are trained: the target's distributions there are known, though
    the text went another way."""
    found = []
    for record in text.records:
        behind = record.position + record.accepted + 1
        tokens = [*text.tokens[: record.position], *record.drafted]
        if behind < len(tokens) and UNLOGGED not in record.drafted:
            weights = (np.arange(len(tokens)) >= behind).astype(np.float32)
            found.append((record, TrainedRow(tokens, weights)))
    return found


def is_held_out(text: ServedText, share: float, by: str = "prompt") -> bool:
    """Decides by the prompt, so that a repeated prompt is never both trained on and scored, or by
    the request."""
    if by == "prompt":
        return is_held_out_prompt(text.records[0].context, share)
    return uniform(text.request) < share


def is_held_out_prompt(prompt: Sequence[int], share: float) -> bool:
    """The same of token ids, for texts that were never served."""
    return uniform(np.array(prompt, dtype=np.int32).tobytes()) < share


def is_whole(records: Sequence[RoundRecord]) -> bool:
    """True when no record is missing up to a last one, in whatever order they came."""
    return any(record.last and record.round == len(records) - 1 for record in records)


def depth_of(texts: Iterable[ServedText]) -> int:
    """Largest number of tokens drafted in a round; 1 where none is, since texts without drafts are
    judged by a draft's first token."""
    return max((len(record.drafted) or 1 for text in texts for record in text.records), default=1)


def samplers_of(texts: Iterable[ServedText]) -> dict[str, int]:
    """Number of rounds by the choice of their drafted tokens, which makes no difference to
    requests at temperature 0."""
    names = [
        sampler_of(record)
        for text in texts
        for record in text.records
        if record.drafted and record.temperature > 0
    ]
    return {name: names.count(name) for name in sorted(set(names))}


def without(texts: Sequence[ServedText], answers: frozenset[str]) -> list[ServedText]:
    """Texts that are not of the forgotten `answers`."""
    return [text for text in texts if not is_forgotten(text.request, answers)]


def newest_within(texts: Sequence[ServedText], tap_bytes: float) -> list[ServedText]:
    """The newest texts, as many as hold at most `tap_bytes` of hidden states."""
    kept, held = len(texts), 0
    while kept > 0 and held + texts[kept - 1].tap_bytes <= tap_bytes:
        kept -= 1
        held += texts[kept].tap_bytes
    return list(texts[kept:])


class OpenRequests:
    """Requests whose records are still coming. A request is over with its last record, or after
    `idle_s` of silence."""

    def __init__(self, records: Sequence[RoundRecord] = (), *, orphans: int = 0):
        self.records: dict[str, list[RoundRecord]] = {}
        self.seen_s: dict[str, float] = {}
        # records that came after their request was taken, or without its beginning
        self.orphans = orphans
        self.add(records)

    def add(self, records: Iterable[RoundRecord]) -> None:
        now_s = time.monotonic()
        for record in records:
            self.records.setdefault(record.request, []).append(record)
            self.seen_s[record.request] = now_s

    def forget(self, answers: frozenset[str]) -> None:
        for request in [request for request in self.records if is_forgotten(request, answers)]:
            del self.records[request], self.seen_s[request]

    def take(self, *, idle_s: float) -> list[ServedText]:
        """Removes and returns the texts of requests that are over, in order of arrival."""
        now_s = time.monotonic()
        over = [
            request
            for request, seen_s in self.seen_s.items()
            if now_s - seen_s >= idle_s or is_whole(self.records[request])
        ]
        texts = []
        for request in over:
            del self.seen_s[request]
            records = self.records.pop(request)
            text = stitch(records)
            self.orphans += len(records) - (len(text.records) if text else 0)
            if text is not None:
                texts.append(text)
        return texts

    def all_records(self) -> list[RoundRecord]:
        return [record for records in self.records.values() for record in records]


# Newest shards that are looked into for records of a request's beginning.
MOST_SHARDS = 8


def known_taps(records: Sequence[RoundRecord], layers: Sequence[int]) -> torch.Tensor | None:
    """[m, len(layers) * H] bfloat16 states of a text's first m positions, up to the first one that
    no record holds; None where the first position is none of them."""
    parts: list[np.ndarray] = []
    end = 0
    for one in records:
        if one.taps is None:
            continue
        if one.taps.begin != end or not holds(one.taps, layers):
            break
        parts.append(chosen(one.taps, layers))
        end += len(parts[-1])
    if not parts:
        return None
    return torch.from_numpy(np.concatenate(parts).view(np.int16)).view(torch.bfloat16)


def num_readable(states: torch.Tensor | None) -> int:
    """Number of a text's tokens that a draft may be unrolled over when it has `states` of the first
    positions: the newest token has none, as in serving."""
    return 1 if states is None else len(states) + 1


def holds(taps: RecordedTaps, layers: Sequence[int]) -> bool:
    return set(layers) <= set(taps.layers)


def chosen(taps: RecordedTaps, layers: Sequence[int]) -> np.ndarray:
    """[n, len(layers) * H] uint16, in the order of `layers`."""
    by_layer = taps.values.reshape(len(taps.values), len(taps.layers), -1)
    order = [taps.layers.index(layer) for layer in layers]
    return by_layer[:, order].reshape(len(taps.values), -1)


def padded_taps(
    known: Sequence[torch.Tensor | None], length: int, width: int, device: torch.device
) -> torch.Tensor:
    """[B, length, width] float32 of rows [m, width]; 0 where nothing is known."""
    return torch.stack([filled_taps(states, length, width) for states in known]).to(device)


def filled_taps(states: torch.Tensor | None, length: int, width: int) -> torch.Tensor:
    """[length, width] float32 of `states` [m, width]; 0 where nothing is known."""
    taps = torch.zeros(length, width)
    if states is not None:
        count = min(len(states), length)
        taps[:count] = states[:count].float()
    return taps


def check_recorded(folder: ShardFolder, layers: Sequence[int]) -> None:
    """Refuses a buffer whose newest records hold no states of `layers`. One without records of a
    request's beginning is not judged."""
    found: set[tuple[int, ...]] = set()
    for shard in reversed(folder.shards()[-MOST_SHARDS:]):
        try:
            records = parse(folder.read(shard.name))
        except (OSError, ValueError):
            continue  # its reader reports it
        first = [one for one in records if one.round == 0 and one.drafted]
        if any(one.taps is not None and holds(one.taps, layers) for one in first):
            return
        found |= {() if one.taps is None else one.taps.layers for one in first}
        if found:
            break
    if found:
        raise UserError(
            f"the newest records in buffer {folder.url!r} hold {states_of(found)}, and the draft "
            f"reads layers {numbers(layers)}; serve with --record-taps 1024, or give "
            "learn.teacher=live"
        )


def states_of(found: set[tuple[int, ...]]) -> str:
    layers = max(found)
    return f"hidden states of layers {numbers(layers)}" if layers else "no hidden states"


def numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
