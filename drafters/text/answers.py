"""Answers that the target gave before, as a table: for a context, the token that followed it most
often, and the share of times that it can be expected to be right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.drafters.layouts.demo import NAME
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_difference
from draftsmith.errors import UserError, first_line
from draftsmith.files import read_json
from draftsmith.kernels.suffix_search import TableFields

DEMO = Path(__file__).parents[2] / "demo_answers"  # of the package
LONGEST = 4  # context in the answers
SEEN = 2  # fewest times that a context was seen in them
# Times that a context of one token counts as seen with another token behind it, and one of L
# tokens 1 / L of that. Fitted to answers of SmolLM2-135M-Instruct.
CAUTION = 7.0
SEPARATOR = -1
WORD = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15


class AnswerTable:
    """Contexts of up to `LONGEST` tokens that `texts`, arrays of tokens, hold `SEEN` times or more;
    20 bytes each."""

    def __init__(self, texts: Sequence[np.ndarray]):
        tokens = [np.append(text, SEPARATOR) for text in texts]
        pairs = _pairs(np.concatenate(tokens or [np.empty(0)]).astype(np.int64))
        found = [_most_frequent(*each, length) for length, each in enumerate(pairs, 1)]
        # Behind all others one that no context finds.
        found.append((np.array([WORD], np.uint64), np.array([SEPARATOR]), np.array([0.0])))
        keys, following, shares = map(np.concatenate, zip(*found))
        order = np.argsort(keys)
        self.keys, self.tokens = keys[order], following[order].astype(np.int32)
        self.shares = shares[order]
        self.fields = TableFields.of(self.keys, self.tokens, self.shares)

    def best(self, context: Sequence[int]) -> tuple[int, float]:
        """The token of the largest share behind the ends of `context`, and the share; 0 where the
        table has none."""
        keys = np.array(keys_of(context, LONGEST), dtype=np.uint64)
        places = np.searchsorted(self.keys[:-1], keys)
        places = places[self.keys[places] == keys]
        if len(places) == 0:
            return SEPARATOR, 0.0
        place = places[self.shares[places].argmax()]
        return int(self.tokens[place]), float(self.shares[place])


def keys_of(context: Sequence[int], most: int) -> list[int]:
    """Hashes of the last 1, 2 .. `most` tokens, as far as there are so many."""
    keys, key, power = [], 0, 1
    for token in context[: -most - 1 : -1]:
        key = key + (token + 1) * power & WORD
        power = power * MULTIPLIER & WORD
        keys.append(key)
    return keys


def powers(most: int) -> Iterator[np.uint64]:
    """Factors of the last token of a context, of the one before it ..., in `keys_of`."""
    each = itertools.accumulate(range(most - 1), lambda x, _: x * MULTIPLIER & WORD, initial=1)
    return map(np.uint64, each)


def _pairs(tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each length from 1 on, the keys of all contexts and what follows each."""
    words = (tokens + 1).astype(np.uint64)  # of a separator 0
    key = np.zeros(max(0, len(tokens) - 1), dtype=np.uint64)
    is_whole = tokens[1:] != SEPARATOR
    for back, power in enumerate(powers(LONGEST)):
        earlier = words[: max(0, len(key) - back)]
        key[back:] += earlier * power
        is_whole[:back] = False
        is_whole[back:] &= earlier > 0
        yield key[is_whole], tokens[1:][is_whole]


def _most_frequent(
    keys: np.ndarray, following: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contexts seen often enough, the token that followed most often (of equals the lowest), and
    its share."""
    order = np.lexsort((following, keys))
    keys, following = keys[order], following[order]
    begins = np.flatnonzero(_is_new(keys) | _is_new(following))
    times = np.diff(np.append(begins, len(keys)))
    order = np.lexsort((following[begins], -times, keys[begins]))
    keys, following, times = keys[begins][order], following[begins][order], times[order]
    firsts = np.flatnonzero(_is_new(keys))
    totals = np.add.reduceat(times, firsts) if len(firsts) else firsts
    shares = times[firsts] / (totals + CAUTION / length)
    kept = firsts[totals >= SEEN]
    return keys[kept], following[kept], shares[totals >= SEEN]


def _is_new(values: np.ndarray) -> np.ndarray:
    """True where a value is not the one before it."""
    return np.append(np.ones(min(1, len(values)), dtype=bool), values[1:] != values[:-1])


def read_answers(folder: str | Path, target: Target) -> list[np.ndarray]:
    """Tokens of the answers in a folder of `generate`, each behind the last tokens of its prompt.
    `demo` is the folder that ships for that target. Raises `UserError` for a folder without such,
    or of another tokenizer."""
    folder = DEMO if str(folder) == NAME else folder
    files, record = sorted(Path(folder).glob("part-*.parquet")), Path(folder) / "provenance.json"
    if not files:
        raise UserError(
            f"suffix_answers {str(folder)!r} holds no part-*.parquet; give a folder that "
            "`draftsmith generate` has filled"
        )
    written = read_json(record, "data provenance") if record.is_file() else {}
    if difference := tokenizer_difference(written, target.tokenizer()):
        raise UserError(
            f"suffix_answers {str(folder)!r} was written with another tokenizer than that of "
            f"target {target.name!r} ({difference}); generate it again"
        )
    try:
        return [text for file in files for text in tokens_of(file)]
    except (pa.ArrowException, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(
            f"suffix_answers {str(folder)!r} cannot be read ({first_line(error)}); generate it "
            "again"
        ) from error


def tokens_of(file: Path) -> Iterator[np.ndarray]:
    """Tokens of each text of a file, from shortly before its first answer on."""
    table = pq.read_table(file, columns=["input_ids", "loss_mask"])
    for ids, mask in zip(table["input_ids"], table["loss_mask"], strict=True):
        begin = (*np.flatnonzero(mask.values), len(mask.values))[0]
        yield ids.values.to_numpy()[max(0, begin - LONGEST) :]
