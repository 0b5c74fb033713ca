"""Feature heads and draft language models: unrolling equals drafting, the cache equals a fresh
start, q is what was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.blocks import block_unroll as block_pass
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.unrolled import unroll
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.sampling.filters import SamplingRows
from tests.first_rounds import first_round
from tests.small_drafts import KINDS, small_draft
from tests.unrolled import assert_unrolls_as_drafted, unroll_batch, unrolled_logits

TARGET_DTYPE = torch.float64
LENGTH = 150  # more than one chunk of the unroll
BLOCK = 4
EACH = [kind for kind in KINDS if kind not in ("p-eagle", "dflash, seeing all")]
# For what no window of a draft has a part in.
WHOLE = [kind for kind in EACH if not kind.endswith(("window", "narrow"))]
whole = pytest.mark.parametrize("drafter", WHOLE, indirect=True)


@pytest.fixture(scope="module", params=EACH)
def drafter(request, target):
    return small_draft(request.param, target)


@pytest.fixture(scope="module")
def text(target) -> list[int]:
    return torch.randint(
        3, target.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(3)
    ).tolist()


@whole
def test_the_target_is_no_part_of_the_draft(drafter, target):
    """Drafters hold their target as a plain attribute: saving, casting and training
    leave it out."""
    weights = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert not weights & {parameter.data_ptr() for parameter in drafter.parameters()}
    assert not {*target.model.modules()} & {*drafter.modules()}


def inputs_for(
    drafter,
    target: Target,
    rows: Sequence[Sequence[int]],
    num_draft: Sequence[int],
    starts: Sequence[int] | None = None,
    pool: PagedPool | None = None,
    *,
    temperature: float = 1.0,
    seeds: Sequence[int] | None = None,
) -> DraftInputs:
    """One propose call over texts `rows`, whose draft caches cover `starts` positions."""
    blocks = len(rows) * -(-(LENGTH + 16) // BLOCK)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(4))
    return first_round(
        drafter,
        target,
        [list(row) for row in rows],
        num_draft,
        starts,
        sampling=SamplingRows.of([temperature] * len(rows)),
        seeds=torch.tensor(seeds or range(len(rows))),
        pool=pool or new_pool(drafter, target, len(rows)),
        block_tables=order.view(len(rows), -1),
    )


@torch.no_grad()
def propose(drafter, *given, **options) -> Proposal:
    return drafter.propose(inputs_for(drafter, *given, **options))


def new_pool(drafter, target: Target, num_rows: int) -> PagedPool:
    blocks = num_rows * -(-(LENGTH + 16) // BLOCK)
    return drafter.new_pool(blocks, BLOCK, torch.device("cpu"), target.dtype)


def test_unrolling_is_drafting(drafter, target, text):
    """From any anchor, what propose samples from at depth s is what training computes there on the
    same text."""
    for anchor in (3, 70, 140):
        proposal = propose(drafter, target, [text[:anchor]], [4], seeds=[anchor])
        assert proposal.lengths.tolist() == [4]
        assert_unrolls_as_drafted(drafter, target, text[:anchor], proposal)


@whole
def test_the_depth_matters_to_heads_alone(drafter, target, text):
    """The comparison above can fail: a head that has drafted for two steps is not one that has seen
    true states throughout."""
    at_zero, at_two = (
        unrolled_logits(drafter, target, text[:begin], text[begin:71])[-1].softmax(-1)
        for begin in (70, 68)
    )
    difference = float((at_zero - at_two).abs().max())
    assert difference > 1e-3 if drafter.taps else difference == 0


def test_long_texts_give_the_same_states_and_gradients(drafter, target, text, monkeypatch):
    """Beyond `LONG` attention weights are recomputed in the backward pass, or never made. What is
    no draft may be anything."""
    batch = unroll_batch(drafter, target, torch.tensor([text]), 3)
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
    whole = unroll_batch(drafter, target, torch.tensor([text]), 4)
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
    both = drafter.unroll(unroll_batch(drafter, target, ids, 3, mask))
    alone = drafter.unroll(unroll_batch(drafter, target, torch.tensor([rows[1]]), 3))
    for padded, single in zip(both, alone):
        valid = single.valid[0]
        assert padded.valid[1].nonzero().tolist() == valid.nonzero().tolist()
        torch.testing.assert_close(padded.hidden[1, : len(valid)][valid], single.hidden[0][valid])


@whole
def test_gradients_reach_every_parameter(drafter, target, text):
    steps = list(drafter.unroll(unroll_batch(drafter, target, torch.tensor([text[:30]]), 5)))
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


def test_catching_up_after_each_round_is_a_fresh_start(drafter, target, text):
    """Rounds with every number of accepted tokens, some without drafting: the cache never remembers
    a rejected token."""
    pool = new_pool(drafter, target, 1)
    start, known = 0, 7
    for accepted, k in ((0, 3), (3, 3), (1, 3), (0, 0), (2, 4), (0, 1), (1, 1)):
        row = text[:known]
        proposal = propose(drafter, target, [row], [k], [start], pool, seeds=[9])
        fresh = propose(drafter, target, [row], [k], seeds=[9])
        assert proposal.tokens.tolist() == fresh.tokens.tolist()
        torch.testing.assert_close(proposal.logits, fresh.logits, atol=1e-5, rtol=1e-5)
        # What is accepted is what was drafted: the committed text takes those tokens, then a token
        # of its own.
        kept = proposal.tokens[0, :accepted].tolist()
        text = [*row, *kept, *text[known + len(kept) :]]
        start = drafter.cached_after(known - 1, k, accepted)
        known += accepted + 1
        assert start < known


def test_rows_of_different_k_are_as_alone(drafter, target, text):
    rows = [text[:12], text[12:40], text[40:45], text[50:51]]
    num_draft = [3, 0, 5, 2]
    proposal = propose(drafter, target, rows, num_draft, seeds=[1, 2, 3, 4])
    # One token alone has no state yet, so a feature head cannot draft; a language model can.
    expected = [3, 0, 5, 0 if drafter.taps else 2]
    assert proposal.lengths.tolist() == expected
    for row, (tokens, k, length) in enumerate(zip(rows, num_draft, expected)):
        alone = propose(drafter, target, [tokens], [k], seeds=[row + 1])
        assert proposal.tokens[row, :length].tolist() == alone.tokens[0, :length].tolist()
        torch.testing.assert_close(
            proposal.logits[row, :length], alone.logits[0, :length], atol=1e-5, rtol=1e-5
        )
        assert (proposal.tokens[row, length:] == -1).all()


def test_catch_up_alone_writes_the_cache(drafter, target, text):
    """A row that only catches up (k = 0), in pieces, drafts later as one that read all at once."""
    pool, start = new_pool(drafter, target, 1), 0
    for known in (5, 6, 30):
        nothing = propose(drafter, target, [text[:known]], [0], [start], pool, temperature=0.0)
        assert nothing.tokens.shape == (1, 0)
        start = drafter.cached_after(known - 1, 0, 0)
    later = propose(drafter, target, [text[:31]], [3], [start], pool)
    fresh = propose(drafter, target, [text[:31]], [3])
    assert later.tokens.tolist() == fresh.tokens.tolist()
    torch.testing.assert_close(later.logits, fresh.logits, atol=1e-5, rtol=1e-5)


@whole
def test_greedy_rows_take_the_best_token(drafter, target, text):
    proposal = propose(drafter, target, [text[:25]], [3], temperature=0.0)
    drafted = proposal.tokens[0].tolist()
    raw = unrolled_logits(drafter, target, text[:25], drafted)
    assert raw.argmax(-1).tolist() == drafted
    assert proposal.logits is None  # a one-hot distribution


@whole
@torch.no_grad()
def test_a_greedy_row_among_sampled_ones_has_a_one_hot_distribution(drafter, target, text):
    inputs = inputs_for(drafter, target, [text[:25], text[:20]], [3, 3])
    alone = propose(drafter, target, [text[:25]], [3], temperature=0.0)
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


@whole
@torch.no_grad()
def test_q_is_the_distribution_of_the_drawn_tokens(drafter, target, text):
    """Tokens over many seeds follow the returned logits (T = 0.8, top-k 12); the same test rejects
    a wrong distribution."""
    size = 600
    sampling = SamplingRows.of([0.8] * size, top_k=[12] * size)
    seeds = torch.arange(100, 100 + size)
    inputs = first_round(
        drafter, target, [text[:8]] * size, [2] * size, sampling=sampling, seeds=seeds
    )
    proposal = drafter.propose(inputs)
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


@whole
def test_seeds_and_positions_decide_the_draft(drafter, target, text):
    same, other = (
        propose(drafter, target, [text[:8]] * 2, [4, 4], seeds=seeds) for seeds in ([5, 5], [5, 6])
    )
    assert same.tokens[0].tolist() == same.tokens[1].tolist()
    assert other.tokens[0].tolist() == same.tokens[0].tolist() != other.tokens[1].tolist()


@whole
@torch.no_grad()
def test_weights_of_nan_give_a_distribution_without_mass(drafter, target, text):
    """The engine sees that the distribution has no mass at the drawn token and falls back; nothing
    raises on the way."""
    broken = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    try:
        for parameter in drafter.parameters():
            parameter.fill_(torch.nan)
        proposal = propose(drafter, target, [text[:8]], [3])
    finally:
        drafter.load_state_dict(broken)
    drawn = proposal.logits[0].gather(1, proposal.tokens[0][:, None])
    assert proposal.tokens.min() >= 0  # an index that an embedding takes
    assert not torch.isfinite(drawn).any()


def test_inputs_are_left_alone(drafter, target, text):
    inputs = inputs_for(drafter, target, [text[:8]], [3])
    before = [one.clone() for one in (inputs.tokens, inputs.starts, inputs.lengths)]
    drafter.propose(inputs)
    for one, known in zip((inputs.tokens, inputs.starts, inputs.lengths), before, strict=True):
        assert torch.equal(one, known)


@pytest.mark.parametrize("place, arch", enumerate(["llama", "gemma2", "gpt_neox", "qwen3_moe"]))
def test_half_precision_on_other_targets(tiny_target, place, arch):
    """bfloat16 throughout, as on an accelerator: distributions stay float32 and what was drawn has
    mass."""
    half = Target.load(tiny_target(arch), dtype=torch.bfloat16)
    counts = torch.ones(half.vocab_size).long()
    for family, options in (KINDS[kind] for kind in WHOLE[place::4]):
        drafter = FAMILIES[family].create(options, half, seed=0, token_counts=counts)
        drafter = drafter.to(device=half.device, dtype=torch.bfloat16).eval()
        rows = [list(range(5, 14)), list(range(40, 45))]
        proposal = propose(drafter, half, rows, [3, 2])
        assert proposal.lengths.tolist() == [3, 2] and proposal.logits.dtype == torch.float32
        drawn = proposal.logits.gather(2, proposal.tokens.clamp(min=0)[..., None])[..., 0]
        assert torch.isfinite(drawn[proposal.tokens >= 0]).all()


def test_autocast_trains_close_to_float32(tiny_target, text):
    """bfloat16 autocast over float32 weights, as the trainer runs it."""
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    ids = torch.tensor([text[:60]])
    for family, options in (KINDS[kind] for kind in WHOLE):
        made = FAMILIES[family].create(
            options, target, seed=0, token_counts=torch.ones(target.vocab_size).long()
        )
        batch = unroll_batch(made, target, ids, 3)
        exact = [step.hidden for step in made.unroll(batch)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = [step.hidden for step in made.unroll(batch)]
        sum(hidden.float().pow(2).sum() for hidden in rough).backward()
        for one, other in zip(exact, rough):
            assert (one - other.float()).pow(2).mean() < 0.02 * one.pow(2).mean()


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp", "p-eagle", "dflash", "dspark"])
def test_rotary_frequencies_follow_the_draft_and_keep_their_digits(kind, target):
    draft = small_draft(kind, target)
    (rotary,), before = draft._rotary, draft._rotary[0].inv_freq.clone()
    draft.to(torch.bfloat16)
    assert torch.equal(rotary.inv_freq, before) and rotary.inv_freq.dtype == torch.float32
    assert not any("inv_freq" in name for name in draft.state_dict())
    draft.to("meta")
    assert {one.device.type for one in rotary.buffers()} == {"meta"}
