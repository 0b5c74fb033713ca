"""Feature heads and draft language models: unrolling equals drafting, the cache equals a fresh
start, q is what was drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.blocks import block_unroll as block_pass
from draftsmith.drafters.interface import DraftInputs, UnrollBatch
from draftsmith.drafters.options import (
    DflashOptions,
    DraftLmOptions,
    DsparkOptions,
    Eagle1Options,
    Eagle3Options,
    MedusaOptions,
    MlpOptions,
    MtpOptions,
    PeagleOptions,
)
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.unrolled import unroll
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.sampling.filters import SamplingRows, process
from tests.noise import noisy

LENGTH = 150  # more than one chunk of the unroll
BLOCK = 4
KINDS = {
    "eagle3": ("eagle3", Eagle3Options()),
    "eagle3 subset": ("eagle3", Eagle3Options(draft_vocab_size=120, num_key_value_heads=4)),
    "eagle3.1": (
        "eagle3",
        Eagle3Options(norm_before_residual=True, fc_norm=True, norm_output=True),
    ),
    "p-eagle": ("p-eagle", PeagleOptions(num_hidden_layers=2, draft_vocab_size=200)),
    "mtp": ("mtp", MtpOptions()),
    "eagle1": ("eagle1", Eagle1Options()),
    "medusa": ("medusa", MedusaOptions(num_heads=5, num_layers=2)),
    "mlp": ("mlp", MlpOptions(num_predict=5, inner_size=40)),
    "dflash": ("dflash", DflashOptions(block_size=6)),
    "dspark": ("dspark", DsparkOptions(block_size=5, markov_rank=12)),
    "draft-lm": ("draft-lm", DraftLmOptions(num_layers=2, hidden_size=24, num_attention_heads=2)),
    "eagle3 window": ("eagle3", Eagle3Options(window=9)),
    "eagle3 narrow": ("eagle3", Eagle3Options(window=2)),  # shorter than the drafts
    "p-eagle window": ("p-eagle", PeagleOptions(num_hidden_layers=2, window=7)),
    "p-eagle narrow": ("p-eagle", PeagleOptions(num_hidden_layers=2, window=2)),
    "mtp window": ("mtp", MtpOptions(window=9)),
    "eagle1 window": ("eagle1", Eagle1Options(window=9)),
    "draft-lm window": (
        "draft-lm",
        DraftLmOptions(num_layers=2, hidden_size=24, num_attention_heads=2, window=9),
    ),
}


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.load(tiny_target("llama"), dtype=torch.float64)


@pytest.fixture(scope="module", params=KINDS)
def drafter(request, target):
    """Large random weights in float64: a head that ignored part of its input would otherwise still
    look right."""
    family, options = KINDS[request.param]
    counts = torch.randint(
        1, 1000, (target.vocab_size,), generator=torch.Generator().manual_seed(1)
    )
    made = (
        FAMILIES[family]
        .create(options, target, seed=0, token_counts=counts)
        .to(device=target.device, dtype=torch.float64)
    )
    return noisy(made, 2)


@pytest.fixture(scope="module")
def text(target) -> list[int]:
    return torch.randint(
        3, target.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(3)
    ).tolist()


def test_the_target_is_no_part_of_the_draft(drafter, target):
    """Drafters hold their target as a plain attribute: saving, casting and training
    leave it out."""
    weights = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert not weights & {parameter.data_ptr() for parameter in drafter.parameters()}
    assert not {*target.model.modules()} & {*drafter.modules()}


def true_taps(drafter, target: Target, tokens: Sequence[int]) -> torch.Tensor | None:
    ids = torch.tensor([list(tokens)])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    return None if taps is None else taps[0]


def inputs_for(
    drafter,
    target: Target,
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_draft: Sequence[int],
    pool: PagedPool,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    seeds: Sequence[int] | None = None,
    tables: torch.Tensor | None = None,
) -> DraftInputs:
    """One propose call over texts `rows`, whose draft caches cover `starts` positions."""
    known = {tuple(row): true_taps(drafter, target, row) for row in {*map(tuple, rows)}}
    taps = [known[tuple(row)] for row in rows] if drafter.taps else None
    if tables is None:
        blocks = -(-(LENGTH + 16) // BLOCK)
        order = torch.randperm(len(rows) * blocks, generator=torch.Generator().manual_seed(4))
        tables = order.view(len(rows), blocks)
    return DraftInputs(
        tokens=torch.tensor([token for row, start in zip(rows, starts) for token in row[start:]]),
        starts=torch.tensor(starts),
        lengths=torch.tensor([len(row) - start for row, start in zip(rows, starts)]),
        taps=torch.cat([tap[start : len(row) - 1] for tap, row, start in zip(taps, rows, starts)])
        if taps
        else None,
        num_draft=torch.tensor(num_draft),
        sampling=SamplingRows.of([temperature] * len(rows), top_k=[top_k] * len(rows)),
        seeds=torch.tensor(seeds or range(len(rows))),
        pool=pool,
        block_tables=tables,
        histories=[list(row) for row in rows],
    )


def new_pool(drafter, num_rows: int) -> PagedPool:
    blocks = num_rows * -(-(LENGTH + 16) // BLOCK)
    return drafter.new_pool(blocks, BLOCK, torch.device("cpu"), torch.float64)


def unrolled_logits(
    drafter, target: Target, tokens: Sequence[int], depth: int, offset_wanted: int
) -> torch.Tensor:
    """[V] raw draft logits, by unrolling, of the token after `tokens`, drafted at `depth`."""
    padded = torch.tensor([[*tokens, 0, 0]])
    taps = true_taps(drafter, target, padded[0].tolist())
    mask = torch.ones_like(padded)
    batch = UnrollBatch(
        input_ids=padded,
        attention_mask=mask,
        taps=None if taps is None else taps[None],
        num_steps=depth + 1,
    )
    steps = list(drafter.unroll(batch))
    step = steps[min(depth, len(steps) - 1)]
    assert step.offset == offset_wanted
    column = len(tokens) - step.offset
    assert bool(step.valid[0, column])
    logits = step.hidden[0, column] @ drafter.head_weight().T
    if drafter.vocab_map is None:
        return logits
    spread = torch.full((target.vocab_size,), -torch.inf, dtype=logits.dtype)
    spread[drafter.vocab_map] = logits
    return spread


@torch.no_grad()
def test_unrolling_is_drafting(drafter, target, text):
    """From any anchor, what propose samples from at depth s is what training computes there on the
    same text."""
    offset = 2 if drafter.taps else 1
    for anchor in (3, 70, 140):
        rows = [text[:anchor]]
        inputs = inputs_for(
            drafter, target, rows, [0], [4], new_pool(drafter, 1), temperature=1.0, seeds=[anchor]
        )
        proposal = drafter.propose(inputs)
        drafted = proposal.tokens[0].tolist()
        assert proposal.lengths.tolist() == [4]
        for depth in range(4):
            expected = unrolled_logits(drafter, target, [*rows[0], *drafted[:depth]], depth, offset)
            expected = process(expected[None], SamplingRows.of([1.0]))[0]
            torch.testing.assert_close(
                proposal.logits[0, depth].softmax(-1), expected.softmax(-1), atol=1e-5, rtol=1e-5
            )


@torch.no_grad()
def test_the_depth_matters_to_heads_alone(drafter, target, text):
    """The comparison above can fail: a head that has drafted for two steps is not one that has seen
    true states throughout."""
    offset = 2 if drafter.taps else 1
    at_zero, at_two = (
        unrolled_logits(drafter, target, text[:70], depth, offset).softmax(-1) for depth in (0, 2)
    )
    difference = float((at_zero - at_two).abs().max())
    assert difference > 1e-3 if drafter.taps else difference == 0


def test_long_texts_give_the_same_states_and_gradients(drafter, target, text, monkeypatch):
    """Beyond `LONG` attention weights are recomputed in the backward pass, or never made. What is
    no draft may be anything."""
    ids = torch.tensor([text])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    batch = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=3)
    found = []
    for limit in (LENGTH, LENGTH - 1):
        monkeypatch.setattr(unroll, "LONG", limit)
        monkeypatch.setattr(block_pass, "LONG", limit)
        drafter.zero_grad()
        sum(step.hidden[step.valid].pow(2).sum() for step in drafter.unroll(batch)).backward()
        found.append(
            [
                parameter.grad.clone()
                for parameter in drafter.parameters()
                if parameter.grad is not None
            ]
        )
    drafter.zero_grad()
    for kept, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(kept, recomputed)


@torch.no_grad()
def test_what_counts_is_drafted_alike_where_earlier_drafts_do_not(drafter, target, text):
    first = 40
    ids = torch.tensor([text])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    whole = UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=4)
    for one, other in zip(
        drafter.unroll(whole), drafter.unroll(replace(whole, first=first)), strict=True
    ):
        assert torch.equal(one.valid, other.valid)
        torch.testing.assert_close(
            one.hidden[:, first - one.offset :], other.hidden[:, first - one.offset :]
        )


@torch.no_grad()
def test_padding_changes_nothing(drafter, target, text):
    rows = [text[:20], text[20:33]]
    ids, mask = torch.zeros(2, 20, dtype=torch.int64), torch.zeros(2, 20, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    taps, _ = target.states(ids, mask, drafter.taps)
    both = list(
        drafter.unroll(UnrollBatch(input_ids=ids, attention_mask=mask, taps=taps, num_steps=3))
    )
    alone_ids = torch.tensor([rows[1]])
    alone_taps, _ = target.states(alone_ids, torch.ones_like(alone_ids), drafter.taps)
    alone = list(
        drafter.unroll(
            UnrollBatch(
                input_ids=alone_ids,
                attention_mask=torch.ones_like(alone_ids),
                taps=alone_taps,
                num_steps=3,
            )
        )
    )
    for padded, single in zip(both, alone):
        valid = single.valid[0]
        assert padded.valid[1].nonzero().tolist() == valid.nonzero().tolist()
        torch.testing.assert_close(padded.hidden[1, : len(valid)][valid], single.hidden[0][valid])


def test_gradients_reach_every_parameter(drafter, target, text):
    ids = torch.tensor([text[:30]])
    taps, _ = target.states(ids, torch.ones_like(ids), drafter.taps)
    steps = list(
        drafter.unroll(
            UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=5)
        )
    )
    total = sum(
        (step.hidden @ drafter.head_weight().T).logsumexp(-1).pow(2).sum() for step in steps
    )
    total = total + sum(
        step.confidence.pow(2).sum() for step in steps if step.confidence is not None
    )
    drafter.zero_grad()
    total.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    drafter.zero_grad()


@torch.no_grad()
def test_catching_up_after_each_round_is_a_fresh_start(drafter, target, text):
    """Rounds with every number of accepted tokens, some without drafting: the cache never remembers
    a rejected token."""
    pool, table = new_pool(drafter, 1), None
    start, known = 0, 7
    for accepted, k in ((0, 3), (3, 3), (1, 3), (0, 0), (2, 4), (0, 1), (1, 1)):
        row = text[:known]
        inputs = inputs_for(
            drafter, target, [row], [start], [k], pool, temperature=1.0, seeds=[9], tables=table
        )
        table = inputs.block_tables
        proposal = drafter.propose(inputs)
        fresh = drafter.propose(
            inputs_for(
                drafter,
                target,
                [row],
                [0],
                [k],
                new_pool(drafter, 1),
                temperature=1.0,
                seeds=[9],
                tables=table,
            )
        )
        assert proposal.tokens.tolist() == fresh.tokens.tolist()
        torch.testing.assert_close(proposal.logits, fresh.logits, atol=1e-5, rtol=1e-5)
        # What is accepted is what was drafted: the committed text takes those tokens, then a token
        # of its own.
        kept = proposal.tokens[0, :accepted].tolist()
        text = [*row, *kept, *text[known + len(kept) :]]
        start = drafter.cached_after(known - 1, k, accepted)
        known += accepted + 1
        assert start < known


@torch.no_grad()
def test_rows_of_different_k_are_as_alone(drafter, target, text):
    rows = [text[:12], text[12:40], text[40:45], text[50:51]]
    num_draft = [3, 0, 5, 2]
    pool = new_pool(drafter, 4)
    together = inputs_for(
        drafter, target, rows, [0, 0, 0, 0], num_draft, pool, temperature=1.0, seeds=[1, 2, 3, 4]
    )
    proposal = drafter.propose(together)
    # One token alone has no state yet, so a feature head cannot draft; a language model can.
    expected = [3, 0, 5, 0 if drafter.taps else 2]
    assert proposal.lengths.tolist() == expected
    for row, (tokens, k) in enumerate(zip(rows, num_draft)):
        alone = drafter.propose(
            inputs_for(
                drafter,
                target,
                [tokens],
                [0],
                [k],
                new_pool(drafter, 1),
                temperature=1.0,
                seeds=[row + 1],
            )
        )
        assert (
            proposal.tokens[row, : expected[row]].tolist()
            == alone.tokens[0, : expected[row]].tolist()
        )
        torch.testing.assert_close(
            proposal.logits[row, : expected[row]],
            alone.logits[0, : expected[row]],
            atol=1e-5,
            rtol=1e-5,
        )
        assert (proposal.tokens[row, expected[row] :] == -1).all()


@torch.no_grad()
def test_catch_up_alone_writes_the_cache(drafter, target, text):
    """A row that only catches up (k = 0), in pieces, drafts later as one that read all at once."""
    pool = new_pool(drafter, 1)
    table, start = None, 0
    for known in (5, 6, 30):
        inputs = inputs_for(drafter, target, [text[:known]], [start], [0], pool, tables=table)
        table = inputs.block_tables
        assert drafter.propose(inputs).tokens.shape == (1, 0)
        start = drafter.cached_after(known - 1, 0, 0)
    later = drafter.propose(
        inputs_for(drafter, target, [text[:31]], [start], [3], pool, temperature=1.0, tables=table)
    )
    fresh = drafter.propose(
        inputs_for(drafter, target, [text[:31]], [0], [3], new_pool(drafter, 1), temperature=1.0)
    )
    assert later.tokens.tolist() == fresh.tokens.tolist()
    torch.testing.assert_close(later.logits, fresh.logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_greedy_rows_take_the_best_token(drafter, target, text):
    inputs = inputs_for(drafter, target, [text[:25]], [0], [3], new_pool(drafter, 1))
    proposal = drafter.propose(inputs)
    drafted = proposal.tokens[0].tolist()
    for depth in range(3):
        raw = unrolled_logits(
            drafter, target, [*text[:25], *drafted[:depth]], depth, 2 if drafter.taps else 1
        )
        assert int(raw.argmax()) == drafted[depth]
    assert proposal.logits is None  # a one-hot distribution


@torch.no_grad()
def test_a_greedy_row_among_sampled_ones_has_a_one_hot_distribution(drafter, target, text):
    inputs = inputs_for(
        drafter,
        target,
        [text[:25], text[:20]],
        [0, 0],
        [3, 3],
        new_pool(drafter, 2),
        temperature=1.0,
    )
    alone = drafter.propose(
        inputs_for(drafter, target, [text[:25]], [0], [3], new_pool(drafter, 1))
    )
    mixed = replace(inputs, sampling=SamplingRows.of([0.0, 1.0]))
    proposal = drafter.propose(mixed)
    assert proposal.tokens[0].tolist() == alone.tokens[0].tolist()
    for depth, token in enumerate(proposal.tokens[0].tolist()):
        distribution = proposal.logits[0, depth].softmax(-1)
        assert distribution[token] == 1.0 and distribution.sum() == 1.0


def first_token_statistic(drawn: torch.Tensor, distribution: torch.Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean; bins are tokens expected at least
    5 times, and the rest."""
    expected = distribution * len(drawn)
    counts = torch.bincount(drawn, minlength=len(distribution)).double()
    common = expected >= 5
    bins_expected = torch.cat([expected[common], expected[~common].sum()[None]])
    bins_counts = torch.cat([counts[common], counts[~common].sum()[None]])
    used = bins_expected > 0
    statistic = ((bins_counts - bins_expected).pow(2)[used] / bins_expected[used]).sum()
    freedom = int(used.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@torch.no_grad()
def test_q_is_the_distribution_of_the_drawn_tokens(drafter, target, text):
    """Tokens over many seeds follow the returned logits (T = 0.8, top-k 12); the same test rejects
    a wrong distribution."""
    size = 600
    tables = torch.randperm(size * 4, generator=torch.Generator().manual_seed(4)).view(size, 4)
    pool = drafter.new_pool(size * 4, BLOCK, torch.device("cpu"), torch.float64)
    rows = [text[:8]] * size
    options = {
        "temperature": 0.8,
        "top_k": 12,
        "seeds": list(range(100, 100 + size)),
        "tables": tables,
    }
    proposal = drafter.propose(
        inputs_for(drafter, target, rows, [0] * size, [2] * size, pool, **options)
    )
    # Only rows that drew the same first token share the distribution of the second.
    same = proposal.tokens[:, 0] == proposal.tokens[:, 0].mode().values
    assert same.sum() > 50
    for depth, chosen in enumerate((torch.arange(size), same.nonzero()[:, 0])):
        distribution = proposal.logits[chosen[0], depth].double().softmax(-1)
        drawn = proposal.tokens[chosen, depth]
        assert first_token_statistic(drawn, distribution) < 4
        wrong = distribution.clone()
        wrong[drawn.mode().values] *= 0.3
        assert first_token_statistic(drawn, wrong / wrong.sum()) > 4


@torch.no_grad()
def test_seeds_and_positions_decide_the_draft(drafter, target, text):
    rows = [text[:8]] * 2
    options = {"temperature": 1.0}
    pool = new_pool(drafter, 2)
    same = drafter.propose(
        inputs_for(drafter, target, rows, [0, 0], [4, 4], pool, seeds=[5, 5], **options)
    )
    assert same.tokens[0].tolist() == same.tokens[1].tolist()
    other = drafter.propose(
        inputs_for(drafter, target, rows, [0, 0], [4, 4], pool, seeds=[5, 6], **options)
    )
    assert other.tokens[0].tolist() == same.tokens[0].tolist() != other.tokens[1].tolist()


@torch.no_grad()
def test_weights_of_nan_give_a_distribution_without_mass(drafter, target, text):
    """The engine sees that the distribution has no mass at the drawn token and falls back; nothing
    raises on the way."""
    broken = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    try:
        for parameter in drafter.parameters():
            parameter.fill_(torch.nan)
        proposal = drafter.propose(
            inputs_for(drafter, target, [text[:8]], [0], [3], new_pool(drafter, 1), temperature=1.0)
        )
    finally:
        drafter.load_state_dict(broken)
    drawn = proposal.logits[0].gather(1, proposal.tokens[0][:, None])
    assert proposal.tokens.min() >= 0  # an index that an embedding takes
    assert not torch.isfinite(drawn).any()


def test_inputs_are_left_alone(drafter, target, text):
    inputs = inputs_for(
        drafter, target, [text[:8]], [0], [3], new_pool(drafter, 1), temperature=1.0
    )
    before = replace(
        inputs,
        tokens=inputs.tokens.clone(),
        starts=inputs.starts.clone(),
        lengths=inputs.lengths.clone(),
    )
    drafter.propose(inputs)
    for name in ("tokens", "starts", "lengths"):
        assert torch.equal(getattr(inputs, name), getattr(before, name))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "arch"), zip(KINDS, itertools.cycle(["llama", "gemma2", "gpt_neox", "qwen3_moe"]))
)
def test_half_precision_on_other_targets(tiny_target, kind, arch):
    """bfloat16 throughout, as on an accelerator: distributions stay float32 and what was drawn has
    mass."""
    half = Target.load(tiny_target(arch), dtype=torch.bfloat16)
    family, options = KINDS[kind]
    drafter = FAMILIES[family].create(
        options, half, seed=0, token_counts=torch.ones(half.vocab_size).long()
    )
    drafter = drafter.to(device=half.device, dtype=torch.bfloat16).eval()
    rows = [list(range(5, 14)), list(range(40, 45))]
    tables = torch.arange(16).view(2, 8)
    pool = drafter.new_pool(16, BLOCK, torch.device("cpu"), torch.bfloat16)
    proposal = drafter.propose(
        inputs_for(drafter, half, rows, [0, 0], [3, 2], pool, temperature=1.0, tables=tables)
    )
    assert proposal.lengths.tolist() == [3, 2] and proposal.logits.dtype == torch.float32
    drawn = proposal.logits.gather(2, proposal.tokens.clamp(min=0)[..., None])[..., 0]
    assert torch.isfinite(drawn[proposal.tokens >= 0]).all()


def test_autocast_trains_close_to_float32(tiny_target, text):
    """bfloat16 autocast over float32 weights, as the trainer runs it."""
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    ids = torch.tensor([text[:60]])
    for family, options in KINDS.values():
        made = FAMILIES[family].create(
            options, target, seed=0, token_counts=torch.ones(target.vocab_size).long()
        )
        taps, _ = target.states(ids, torch.ones_like(ids), made.taps)
        batch = UnrollBatch(
            input_ids=ids, attention_mask=torch.ones_like(ids), taps=taps, num_steps=3
        )
        exact = [step.hidden for step in made.unroll(batch)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = [step.hidden for step in made.unroll(batch)]
        sum(hidden.float().pow(2).sum() for hidden in rough).backward()
        for one, other in zip(exact, rough):
            assert (one - other.float()).pow(2).mean() < 0.02 * one.pow(2).mean()
