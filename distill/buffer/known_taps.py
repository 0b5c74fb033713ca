"""Hidden states of the target in a text's records, as a draft reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.distill.buffer.folder import ShardFolder, parse
from draftsmith.errors import UserError
from draftsmith.record import RecordedTaps, RoundRecord

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
            records = parse(folder.fetch(shard))
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
