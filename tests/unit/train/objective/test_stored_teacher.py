"""What is stored of a target teaches as the target does: bfloat16 and fp8 states, sparse
distributions, and what is refused."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from draftsmith.commands import generate as generate_command
from draftsmith.commands.generate import GenerateConfig
from draftsmith.config import build
from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import DraftOptions, Eagle3Options, MedusaOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.divergence.fused import divergence
from draftsmith.kernels.divergence.kind import FORWARD_KL
from draftsmith.kernels.sampling.top_tokens import top_probs
from draftsmith.train.command import run
from draftsmith.train.config import OptimConfig, TrainConfig
from draftsmith.train.data.batches import pack
from draftsmith.train.data.dataset import Corpus, read_corpus
from draftsmith.train.data.mixture import Mixture, read_mixture
from draftsmith.train.data.stored_taps import LARGEST_FP8, tap_file
from draftsmith.train.objective.stored_teacher import DistributionSource, TapSource
from draftsmith.train.objective.stored_teacher import stored_source as source_of_folders
from draftsmith.train.objective.teacher import LiveSource, TargetSource
from draftsmith.train.objective.unrolled_loss import UnrolledLoss, unrolled_loss

TAPS = (1, 2, 3)


def stored_source(
    target: Target, folder: str | Path, provenance: dict[str, Any], taps: tuple[int, ...]
) -> TargetSource:
    """Source over one data folder."""
    return source_of_folders(target, {str(folder): provenance}, taps)


def source_of(target: Target, mixture: Mixture) -> TargetSource:
    """Source over all folders of a mixture."""
    pairs = zip(mixture.folders, mixture.corpora, strict=True)
    return source_of_folders(target, {one.path: corpus.provenance for one, corpus in pairs}, TAPS)


def store(target: Target, out: Path, **options: Any) -> Path:
    """A folder of 12 answers in shards of 5, with what is asked for stored of them."""
    values = {
        "prompts": "stdlib:prose",
        "count": 12,
        "prompt_tokens": 9,
        "max_tokens": 14,
        "batch": 4,
        "shard": 5,
    }
    generate_command.run(GenerateConfig(target=target.name, out=str(out), **values | options))
    return out


@pytest.fixture
def stored(target: Target, tmp_path: Path) -> Callable[..., Path]:
    """A folder of the test's own, which it may change."""
    return lambda **options: store(target, tmp_path / "data", **options)


@pytest.fixture(scope="module")
def shared(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder that is read alone, made once."""

    @functools.cache
    def make(**options: Any) -> Path:
        return store(target, tmp_path_factory.mktemp("shared") / "data", **options)

    return make


def corpus_of(folder: Path) -> Corpus:
    return read_corpus(folder, max_length=64, vocab_size=288, held_out_share=0.0)


def text_of(corpus: Corpus, rows: list[list[int]]) -> TextBatch:
    return pack([[corpus.train[at] for at in row] for row in rows])


# Packed and alone, in and out of the folder's order, from every shard.
ROWS = [[0, 1, 7], [11], [6, 2]]


def loss(
    target: Target, teacher: TargetSource, text: TextBatch, family: str = "eagle3"
) -> UnrolledLoss:
    options = Eagle3Options(taps=TAPS) if family == "eagle3" else MedusaOptions(num_heads=3)
    drafter = FAMILIES[family].create(options, target, seed=0)
    return unrolled_loss(drafter, teacher, text, num_steps=3, decay=0.8)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2.0**-8), ("fp8", 2.0**-4)])
def test_stored_states_are_the_targets_to_their_precision(target, shared, precision, tolerance):
    """bfloat16 rounds to 8 bits; e4m3 to 4 bits of numbers within 2**-6 of the largest it has,
    which each state is scaled to."""
    corpus = corpus_of(folder := shared(store_taps=precision, taps=TAPS))
    text = text_of(corpus, ROWS)
    teacher = stored_source(target, folder, corpus.provenance, (*TAPS, FINAL))
    assert isinstance(teacher, TapSource)
    wanted = (3, FINAL, 1)
    live, kept = (
        one.read(text, wanted).taps.unflatten(-1, (3, -1)) for one in (LiveSource(target), teacher)
    )
    real = text.attention_mask.bool()
    # Half of the smallest step that e4m3 has, beside its largest number.
    floor = live.abs().amax(dim=-1, keepdim=True) * 2.0**-10 / LARGEST_FP8
    error = (kept - live)[real].abs() - floor[real]
    assert (error <= tolerance * live[real].abs()).all()
    # The final state is bfloat16 either way.
    assert ((kept - live)[real][:, 1].abs() <= 2.0**-8 * live[real][:, 1].abs()).all()
    assert (kept[real] != live[real]).any()


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-3), ("fp8", 2e-2)])
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_losses_under_stored_taps_are_the_live_ones(target, shared, family, precision, tolerance):
    """States are off by 2**-9 on average, fp8 ones by 2**-5; losses average that over some hundred
    positions."""
    corpus = corpus_of(folder := shared(store_taps=precision, taps=TAPS))
    text = text_of(corpus, ROWS)
    teacher = stored_source(target, folder, corpus.provenance, TAPS)
    expected, found = (
        loss(target, LiveSource(target), text, family),
        loss(target, teacher, text, family),
    )
    assert found.total.item() == pytest.approx(expected.total.item(), rel=tolerance)
    assert torch.allclose(found.sums.alpha, expected.sums.alpha, rtol=tolerance)
    assert found.keep is not None


@pytest.mark.parametrize("rows", [ROWS, [[0], [3]]])
def test_a_draft_vocabulary_is_taught_alike_by_the_whole_head_and_by_its_rows(
    target, shared, tmp_path, rows
):
    """The first reading multiplies the whole head and keeps what the rest weighs; the second has
    the draft's rows alone, also in another process, which finds the file."""
    corpus = corpus_of(folder := shared(store_taps="bf16", taps=TAPS))
    text, provenance = text_of(corpus, rows), {str(folder): corpus.provenance}
    options = Eagle3Options(taps=TAPS, draft_vocab_size=40)
    counts = torch.rand(target.vocab_size, generator=torch.Generator().manual_seed(0))
    drafter = FAMILIES["eagle3"].create(options, target, seed=0, token_counts=counts)

    def measured(*narrow: Any) -> UnrolledLoss:
        teacher = source_of_folders(target, provenance, TAPS, *narrow)
        drafter.zero_grad()
        found = unrolled_loss(drafter, teacher, text, num_steps=3, decay=0.8)
        found.total.backward()
        return found

    whole = measured()
    gradient = drafter.fc.weight.grad.clone()
    kept = tmp_path / "run" / "rest.f32"
    for _ in range(2):
        narrow = measured(drafter.vocab_map, kept)
        assert narrow.total.item() == pytest.approx(whole.total.item(), rel=1e-5)
        assert torch.allclose(drafter.fc.weight.grad, gradient, rtol=1e-3, atol=1e-6)
        for found, expected in zip(narrow.sums, whole.sums, strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert torch.allclose(narrow.keep, whole.keep, atol=1e-6)
    full = tmp_path / "file" / "rest.f32"
    full.parent.write_bytes(b"")
    assert measured(drafter.vocab_map, full).total.item() == pytest.approx(narrow.total.item())
    # A rest that weighs more shows that the kept numbers are the ones used.
    known = np.memmap(kept, np.float32, "r+")
    known[known != 0] += 5
    assert (measured(drafter.vocab_map, kept).sums.outside > 1.1 * whole.sums.outside).all()


def test_states_of_the_next_token_would_be_noticed(target, shared):
    """Negative control of the index: the same comparison, one token off."""
    corpus = corpus_of(folder := shared(store_taps="bf16", taps=TAPS))
    whole = vars(text_of(corpus, [[3]]))
    cut = {name: value if value is None else value[:, :-1] for name, value in whole.items()}
    teacher = stored_source(target, folder, corpus.provenance, TAPS)
    expected = loss(target, LiveSource(target), TextBatch(**cut)).total.item()
    assert loss(target, teacher, TextBatch(**cut)).total.item() == pytest.approx(expected, rel=2e-3)
    shifted = loss(
        target, teacher, TextBatch(**cut | {"token_index": cut["token_index"] + 1})
    ).total.item()
    assert abs(shifted - expected) > 1e-2 * expected


def test_sparse_distributions_lose_what_the_draft_and_the_target_differ_by_within_the_tail(
    target, shared
):
    """Chain rule: forward KL is that of the buckets plus, in each row, the tail's mass times the KL
    of the two distributions within it."""
    corpus = corpus_of(folder := shared(top_logprobs=64))
    text = text_of(corpus, ROWS)
    teacher = stored_source(target, folder, corpus.provenance, TAPS)
    assert isinstance(teacher, DistributionSource)
    expected, found = loss(target, LiveSource(target), text), loss(target, teacher, text)
    assert found.keep is None
    within = expected.sums.divergence - found.sums.divergence
    assert (within >= 0).all() and within.sum() < 0.5 * expected.sums.divergence.sum()

    row, position = (text.weights > 0).nonzero(as_tuple=True)
    shared_logits = LiveSource(target).read(text, ()).distributions(row, position)(slice(None))
    logits = shared_logits.logits[shared_logits.which]
    distribution, exact = teacher.read(text, ()).distributions(row, position), top_probs(logits, 64)
    assert torch.equal(distribution.ids[:, 0], exact.ids[:, 0])
    assert torch.allclose(distribution.logprobs, exact.logprobs, atol=1e-4) and torch.allclose(
        distribution.tail, exact.tail, atol=1e-5
    )

    q_logits, head = (
        torch.randn(len(logits), 288, generator=torch.Generator().manual_seed(0)).double(),
        torch.eye(288).double(),
    )
    weights, exact = torch.ones(len(logits)), top_probs(logits.double(), 64)
    full = divergence(FORWARD_KL, q_logits, head, lambda rows: logits[rows].double(), weights).rows
    buckets = divergence(FORWARD_KL, q_logits, head, exact, weights).rows
    in_tail = torch.ones_like(q_logits, dtype=torch.bool).scatter(1, exact.ids, False)
    p, q = (
        distribution.softmax(-1).where(in_tail, 0.0) for distribution in (logits.double(), q_logits)
    )
    p_within, q_within = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    within = torch.where(in_tail, p_within * (p_within.log() - q_within.log()), 0.0).sum(-1)
    assert (
        torch.allclose(full - buckets, p.sum(-1) * within, atol=1e-9)
        and (full - buckets).mean() > 0.01
    )


def test_a_flipped_byte_is_found_in_the_text_that_has_it(target, shared, tmp_path):
    whole = shared(store_taps="fp8", taps=TAPS)
    corpus = corpus_of(folder := shutil.copytree(whole, tmp_path / "data"))
    path = tap_file(folder / "part-00001.parquet")
    damaged = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(damaged[:8], "little")
    first = json.loads(damaged[8:begin])["final"]["data_offsets"][0]
    damaged[begin + first + 5] ^= 4  # in the first text of the second shard
    path.write_bytes(damaged)
    teacher = stored_source(target, folder, corpus.provenance, TAPS)
    teacher.read(text_of(corpus, [[0], [6]]), TAPS)
    with pytest.raises(UserError, match=r"taps-00001.safetensors' are damaged at text 0"):
        teacher.read(text_of(corpus, [[5]]), TAPS)


@pytest.mark.long
def test_storing_goes_on_where_it_was_killed_and_repeats_nothing(target, stored, monkeypatch):
    whole = stored(store_taps="fp8", taps=TAPS)
    expected = {path.name: path.read_bytes() for path in whole.glob("taps-*")}
    assert len(expected) == 3
    shutil.rmtree(whole)
    honest, passes = Target.states, []

    def states(self, ids, *rest):
        passes.append(tuple(ids.shape))
        if len(passes) == limit:
            raise KeyboardInterrupt
        return honest(self, ids, *rest)

    monkeypatch.setattr(Target, "states", states)
    limit = 2 + 1  # two of the first shard, one of the second
    with pytest.raises(KeyboardInterrupt):
        stored(store_taps="fp8", taps=TAPS)
    assert [path.name for path in whole.glob("taps-*")] == ["taps-00000.safetensors"]
    limit, begun = -1, len(passes)
    stored(store_taps="fp8", taps=TAPS)
    assert len(passes) - begun == 2 + 1  # the shards of five and of two
    assert {path.name: path.read_bytes() for path in whole.glob("taps-*")} == expected
    assert not list(whole.glob(".*.tmp"))


def test_the_cost_is_told_first_and_a_small_disk_refused(
    target, stored, tmp_path, monkeypatch, capsys
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(
            UserError, match=r"take up to .* GB and the disk of .* has 0.00 GB free"
        ):
            stored(store_taps="fp8", taps=TAPS)
    assert not list((tmp_path / "data").iterdir())
    capsys.readouterr()
    folder = stored(store_taps="fp8", taps=TAPS, count=3)
    told = capsys.readouterr().out.splitlines()[0]
    corpus = corpus_of(folder)
    written = sum(path.stat().st_size for path in folder.glob("taps-*"))
    tokens = corpus.train.pieces.num_tokens
    assert "fp8 take at most" in told and int(told.split()[-2]) >= tokens
    # 3 taps and the final state of 32 numbers, 3 scales; headers and checksums beside them.
    assert (
        tokens * (3 * 32 + 2 * 32 + 3 * 4)
        <= written
        <= tokens * (3 * 32 + 2 * 32 + 3 * 4) + 3 * 2000
    )


def test_what_was_stored_of_something_else_is_refused(
    target, stored, shared, tiny_target, tmp_path
):
    whole = shared(store_taps="bf16", taps=TAPS)
    corpus = corpus_of(folder := shutil.copytree(whole, tmp_path / "data"))
    other = Target.load(tiny_target("llama", seed=1))
    with pytest.raises(UserError, match="of other weights"):
        stored_source(other, folder, corpus.provenance, TAPS)
    with pytest.raises(UserError, match=r"tap 4 and stored are 1, 2, 3; .* --taps 1 2 3 4$"):
        stored_source(target, folder, corpus.provenance, (2, 4))
    tap_file(folder / "part-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"has no taps-00002\.safetensors"):
        stored_source(target, folder, corpus.provenance, TAPS)
    with pytest.raises(UserError, match="delete them to store"):
        stored(store_taps="fp8", taps=TAPS)
    for path in folder.glob("taps-*"):
        path.unlink()
    with pytest.raises(UserError, match="neither distributions nor taps"):
        stored_source(target, folder, corpus.provenance, TAPS)
    with pytest.raises(UserError, match="neither distributions nor taps"):
        stored_source(other, folder, corpus.provenance, TAPS)


@pytest.mark.parametrize(
    "signal",
    [
        pytest.param({"store_taps": "fp8", "taps": TAPS}, marks=pytest.mark.long),
        {"top_logprobs": 64},
    ],
)
def test_training_from_stored_signals_learns(target, shared, tmp_path, signal):
    folder = shared(**signal)
    values = {
        "target": target.name,
        "data": str(folder),
        "dtype": "float32",
        "held_out": 0.0,
        "eval_prompts": 0,
    }
    config = TrainConfig(
        family="eagle3", **values, out=str(tmp_path / "draft"), teacher="stored", packing=True,
        max_length=64, batch_size=2,
        steps=16, log_every=4, optim=OptimConfig(lr=1e-2), draft=DraftOptions(taps=TAPS),
    )  # fmt: skip
    run(config)
    lines = (tmp_path / "draft" / "metrics.jsonl").read_text().splitlines()
    losses = [line.split('"loss": ')[1].split(",")[0] for line in lines if '"loss"' in line]
    assert float(losses[-1]) < 0.8 * float(losses[0])
    if "top_logprobs" in signal:
        wrong = {"divergence": "ce", "out": str(tmp_path / "other")}
        with pytest.raises(UserError, match="needs whole distributions"):
            run(build(TrainConfig, asdict(config) | wrong))
        with pytest.raises(UserError, match="stores distributions of answers alone"):
            run(build(TrainConfig, asdict(config) | {"with_prompts": True, "out": str(tmp_path)}))


@pytest.mark.long
@pytest.mark.parametrize("store", [{"store_taps": "bf16", "taps": TAPS}, {"top_logprobs": 8}])
def test_stores_of_several_folders_are_read_as_one(target, stored, store, tmp_path):
    """Each text has the signals that its own folder has."""
    few = {**store, "count": 4, "max_tokens": 6}
    one = stored(**few).rename(tmp_path / "one")
    other = stored(**few, seed=1).rename(tmp_path / "other")
    # As another tool would have written it; taps know their Parquet file by its hash.
    for path in other.glob("*.parquet") if "top_logprobs" in store else ():
        table = pq.read_table(path)
        masks = table["loss_mask"].cast(pa.list_(pa.int64()))
        place = table.schema.get_field_index("loss_mask")
        pq.write_table(table.set_column(place, "loss_mask", masks), path)
    folders = [str(one), str(other)]
    mixture = read_mixture(folders, target, max_length=64, held_out_share=0.0)
    joined_source = source_of(target, mixture)
    first = len(mixture.corpora[0].train)
    together = loss(
        target, joined_source, pack(mixture.train.__getitems__([[first + 2], [1], [first]]))
    )
    parts = []
    for path, rows in ((one, [[1]]), (other, [[2], [0]])):
        corpus = corpus_of(path)
        teacher = stored_source(target, path, corpus.provenance, TAPS)
        parts.append(loss(target, teacher, text_of(corpus, rows)))
    expected = sum(part.total.item() for part in parts)
    assert together.total.item() == pytest.approx(expected, rel=1e-5)


def test_folders_that_store_different_things_are_refused(target, stored, shared):
    one, other = shared(store_taps="bf16", taps=TAPS), shared(top_logprobs=64)
    third = stored(count=2, max_tokens=2, top_logprobs=4)
    for folders, said in (((one, other), "some of the folders"), ((other, third), "store 64, 4")):
        mixture = read_mixture(
            [str(path) for path in folders], target, max_length=64, held_out_share=0.0
        )
        with pytest.raises(UserError, match=said):
            source_of(target, mixture)
