from __future__ import annotations

import datasets
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.vocabulary import tokenizer_record
from draftsmith.errors import UserError
from draftsmith.train.data.batches import Batch, BatchPlan, collate, pack
from draftsmith.train.data.dataset import Pieces, TokenSequence, check_tokenizer, read_corpus
from tests.conftest import small_files


def row(name: str, length: int = 6, **changes: object) -> dict:
    return {
        "name": name,
        "input_ids": list(range(length)),
        "loss_mask": [0, 0] + [1] * (length - 2),
        **changes,
    }


def read(folder, **changes):
    return read_corpus(
        folder, **{"max_length": 100, "vocab_size": 50, "held_out_share": 0.25, **changes}
    )


def test_split_follows_the_names_whatever_the_order(write_data):
    rows = [row(f"doc{number}") for number in range(60)]
    one = read(write_data(rows, name="a"))
    other = read(write_data(rows[::-1], name="b"))
    assert {s.name for s in one.held_out} == {s.name for s in other.held_out}
    assert len(one.train) + len(one.held_out) == 60
    # Binomial(60, 0.25): outside 3..28 once in a million.
    assert 3 <= len(one.held_out) <= 28
    assert not {s.name for s in one.train} & {s.name for s in one.held_out}


def test_split_written_by_generate_is_kept(write_data):
    rows = [row(f"d{number}", split="held-out" if number < 2 else "train") for number in range(10)]
    corpus = read(write_data(rows))
    assert {s.name for s in corpus.held_out} == {"d0", "d1"}


def test_answers_to_one_prompt_share_a_side_without_names(write_data):
    rows = [
        {"input_ids": [p, 7, a, a], "loss_mask": [0, 0, 1, 1]} for p in range(20) for a in (1, 2)
    ]
    corpus = read(write_data(rows))
    train = {int(s.input_ids[0]) for s in corpus.train}
    held_out = {int(s.input_ids[0]) for s in corpus.held_out}
    assert held_out and not train & held_out


def test_one_document_is_trained_on_and_two_are_divided(write_data):
    assert len(read(write_data([row("a")], name="one")).train) == 1
    two = read(write_data([row("a"), row("b")], name="two"), held_out_share=0.0001)
    assert len(two.train) == len(two.held_out) == 1


def test_long_sequences_are_cut_and_empty_ones_left_out(write_data):
    rows = [row("long", 40), row("cut to nothing", 40, loss_mask=[0] * 30 + [1] * 10), row("fine")]
    corpus = read(write_data(rows), max_length=20, held_out_share=0.0)
    assert corpus.long == 2 and corpus.empty == 1
    assert max(len(s.input_ids) for s in corpus.train) == 20


def test_long_sequences_are_split_and_every_token_counts_once(write_data):
    ids = [(7 * at) % 50 for at in range(97)]
    mask = [0] * 30 + [1] * 50 + [0] * 3 + [1] * 14
    corpus = read(
        write_data([row("short"), row("long", input_ids=ids, loss_mask=mask)]),
        max_length=20,
        split_long=True,
    )
    assert corpus.long == 1
    parts = [s for part in (corpus.train, corpus.held_out) for s in part if s.name == "long"]
    counted = torch.zeros(6 + 97, dtype=torch.int64)
    for part in parts:
        assert len(part.input_ids) <= 20 and part.loss_mask.any()
        begin = part.token_index - 6  # the short text has the first six places
        assert part.input_ids.tolist() == ids[begin : begin + len(part.input_ids)]
        counted[part.token_index : part.token_index + len(part.input_ids)] += part.loss_mask
        # Whoever trains a token has read what stands before it.
        assert begin == 0 or not part.loss_mask[:5].any()
    assert counted[6:].tolist() == mask
    # The first piece holds nothing of the answer.
    assert corpus.empty == 1


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 200), max_length=st.integers(2, 40))
def test_pieces_cover_a_text_whatever_the_lengths(size, max_length):
    table = pa.table({"input_ids": [[1] * size], "loss_mask": [[1] * size]})
    pieces = Pieces(datasets.Dataset(table), max_length, split=True)
    counted = [0] * size
    for begin, length, fresh in zip(pieces.begin, pieces.length, pieces.fresh, strict=True):
        assert 0 < length <= max_length and fresh < length
        for at in range(begin + fresh, begin + length):
            counted[at] += 1
    assert counted == [1] * size
    assert pieces.trained.sum() == size - 1


def test_prompts_count_where_it_is_asked(write_data):
    """Those that are held out do not: what is measured there are answers."""
    corpus = read(write_data([row(f"d{number}") for number in range(8)]))
    assert corpus.train[0].loss_mask.tolist() == [False] * 2 + [True] * 4
    corpus.train.with_prompts = True
    assert all(one.loss_mask.all() for one in corpus.train)
    assert [one.loss_mask.tolist() for one in corpus.held_out] == [[False] * 2 + [True] * 4] * len(
        corpus.held_out
    )
    assert len(corpus.held_out)


def test_tokens_of_the_training_answers_are_counted(write_data):
    rows = [
        row(
            f"d{number}",
            input_ids=[1, 1, 2, 3, 3, number],
            split="held-out" if number < 10 else "train",
        )
        for number in range(30)
    ]
    counts = read(write_data(rows)).token_counts(50)
    assert counts[:4].tolist() == [0, 0, 20, 40]  # the prompt's ones are not the target's
    assert counts[4:].tolist() == [0] * 6 + [1] * 20 + [0] * 20


def test_reading_does_not_hold_the_text(write_data):
    """More rows than one scan takes at once; every one is the row that was written."""
    rows = [row(f"d{number}", input_ids=[number % 50] * 6) for number in range(2500)]
    corpus = read(write_data(rows), held_out_share=0.3)
    assert len(corpus.train) + len(corpus.held_out) == 2500
    for part in (corpus.train, corpus.held_out):
        assert all(int(s.input_ids[0]) == int(s.name[1:]) % 50 for s in part)
        assert part.lengths.tolist() == [6] * len(part)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"input_ids": [1, 2]}], "no column 'loss_mask'"),
        ([row("a", loss_mask=[0] * 6)], "no token to learn from"),
        ([row("a", loss_mask=[1] * 5)], "6 input_ids but 5 loss_mask"),
        ([row("a", input_ids=[0, 1, 2, 3, 4, 77])], "token id 77"),
    ],
)
def test_bad_data_is_one_sentence(write_data, rows, said):
    with pytest.raises(UserError, match=said):
        read(write_data(rows))


def test_a_folder_without_shards_and_a_broken_shard(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        read(tmp_path / "missing")
    with pytest.raises(UserError, match=r"no part-\*.parquet"):
        read(tmp_path)
    (tmp_path / "part-00000.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"cannot be read as Parquet \(Parquet magic bytes"):
        read(tmp_path)


def test_a_full_cache_is_told_as_such(write_data):
    folder = write_data([row(f"doc{number}", 400) for number in range(20)])
    with (
        small_files(4096),
        pytest.raises(UserError, match=r"no room in .*File too large.*set HF_DATASETS_CACHE"),
    ):
        read(folder)


def test_another_tokenizer_is_refused_with_the_difference(tiny_target):
    target, other = Target.load(tiny_target("llama")), Target.load(tiny_target("other_vocab"))
    check_tokenizer({}, target, "data")
    check_tokenizer(tokenizer_record(target.tokenizer()), target, "data")
    with pytest.raises(
        UserError, match=r"tokenizer of 'T', not .* \(272 tokens and 288\); generate it again"
    ):
        check_tokenizer(tokenizer_record(other.tokenizer()) | {"target": "T"}, target, "data")


def test_collate_pads_to_the_longest():
    sequences = [
        TokenSequence("a", torch.tensor([1, 2, 3]), torch.tensor([False, True, True])),
        TokenSequence("b", torch.tensor([4]), torch.tensor([True])),
    ]
    batch = collate(sequences)
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    # The first token of a text has nothing to be predicted from.
    assert batch.weights.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch.segments is None and batch.token_index.tolist() == [[-1] * 3, [-1] * 3]


def test_pack_puts_sequences_side_by_side():
    mask = torch.tensor([True, True, False])
    one, two = (
        TokenSequence(name, torch.tensor(ids), mask, place)
        for name, ids, place in (("a", [1, 2, 3], 10), ("b", [4, 5, 6], 0))
    )
    batch = pack([[one, two], [two]])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [4, 5, 6, 0, 0, 0]]
    assert batch.weights.tolist() == [[0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, -1, -1, -1]]
    assert batch.token_index.tolist() == [[10, 11, 12, 0, 1, 2], [0, 1, 2, -1, -1, -1]]


LENGTHS = [3 + (7 * number) % 50 for number in range(101)]


def plan(
    rank: int = 0,
    world_size: int = 1,
    num_batches: int = 26,
    seed: int = 0,
    row_length: int | None = None,
) -> list[Batch]:
    share = {"rank": rank, "world_size": world_size, "num_batches": num_batches}
    return list(BatchPlan(LENGTHS, batch_size=4, seed=seed, row_length=row_length, **share))


def flat(batches: list[Batch]) -> list[int]:
    return [at for batch in batches for row in batch for at in row]


def test_every_sequence_once_an_epoch_in_a_new_order():
    batches = plan(num_batches=52)
    first, second = flat(batches[:26]), flat(batches[26:])
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second and plan(seed=1) != plan(seed=0)


def test_buckets_limit_padding():
    def padding(batches: list[Batch]) -> int:
        sizes = [[sum(LENGTHS[at] for at in row) for row in batch] for batch in batches]
        return sum(max(rows) * len(rows) - sum(rows) for rows in sizes)

    random = torch.randperm(101, generator=torch.Generator().manual_seed(0)).tolist()
    unsorted = [[[at] for at in random[begin : begin + 4]] for begin in range(0, 101, 4)]
    assert padding(plan()) < 0.3 * padding(unsorted)


def test_packed_rows_are_full_and_hold_every_sequence_once_an_epoch():
    count = len(BatchPlan(LENGTHS, batch_size=4, seed=0, row_length=100).epoch(0))
    batches = plan(num_batches=count, row_length=100)
    assert sorted(flat(batches)) == list(range(101))
    rows = [sum(LENGTHS[at] for at in row) for batch in batches for row in batch]
    assert max(rows) <= 100 and sum(rows) > 0.95 * 100 * len(rows)
    # the last one drawn may be smaller
    assert sorted(len(batch) for batch in batches)[1:] == [4] * (count - 1)


@pytest.mark.parametrize("row_length", [None, 60])
def test_a_longer_run_begins_like_a_shorter_one_and_ranks_share_the_stream_of_one(row_length):
    whole = plan(num_batches=40, row_length=row_length)
    assert plan(num_batches=60, row_length=row_length)[:40] == whole
    shares = [
        plan(rank=rank, world_size=2, num_batches=20, row_length=row_length) for rank in (0, 1)
    ]
    assert [batch for pair in zip(*shares) for batch in pair] == whole


def test_a_batch_is_pinned_tensor_by_tensor(monkeypatch):
    """torch's loader pins what has the method and passes on the rest as it is."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: pinned.append(one) or one + 0)
    ids = torch.arange(6).view(2, 3)
    batch = TextBatch(input_ids=ids, attention_mask=torch.ones_like(ids), weights=ids.float())
    found = pin_memory({"text": batch})["text"]
    assert len(pinned) == 3 and found.input_ids is not ids
    assert found.segments is None and torch.equal(found.weights, batch.weights)
