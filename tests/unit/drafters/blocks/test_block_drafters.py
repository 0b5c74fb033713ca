"""DFlash and DSpark: their published formulas slot by slot, blocks that see all of themselves, and
what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.interface import Proposal
from draftsmith.drafters.options import DflashOptions, DsparkOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.conftest import merge_json
from tests.first_rounds import first_round
from tests.noise import noisy
from tests.published_drafts import MASK_TOKEN, TAPPED, block_states
from tests.unrolled import assert_unrolls_as_drafted, unroll_batch

TARGET_DTYPE = torch.float64
SHAPED = {"taps": TAPPED, "mask_token": MASK_TOKEN}
OPTIONS = {
    ("dflash", True): DflashOptions(block_size=5, **SHAPED),
    ("dflash", False): DflashOptions(block_size=5, causal=False, **SHAPED),
    ("dspark", True): DsparkOptions(block_size=4, markov_rank=6, **SHAPED),
    ("dspark", False): DsparkOptions(block_size=4, markov_rank=6, causal=False, **SHAPED),
}
K = 4


@pytest.fixture(
    scope="module", params=OPTIONS, ids=lambda kind: f"{kind[0]} {'causal' if kind[1] else 'whole'}"
)
def drafter(request, target) -> Dflash:
    made = FAMILIES[request.param[0]].create(OPTIONS[request.param], target, seed=0)
    made = made.to(device=target.device, dtype=torch.float64)
    return noisy(made, 2)


def propose(drafter: Dflash, target: Target, text: list[int], k: int) -> Proposal:
    return drafter.propose(first_round(drafter, target, [text], [k]))


@torch.no_grad()
def test_drafts_follow_the_published_formula(drafter, target):
    text = torch.randint(3, 288, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    proposal = propose(drafter, target, text, K)
    assert proposal.lengths.tolist() == [K]
    drafted = proposal.tokens[0].tolist()
    sees = (lambda layer, slots, keys: keys <= slots) if drafter.shape.causal else None
    skipped, weights = 0 if drafter.family == "dspark" else 1, drafter.state_dict()
    states = block_states(weights, target, text, K + skipped, sees=sees)
    expected = states[skipped:] @ target.output_weight.T
    if drafter.family == "dspark":
        markov = drafter.markov_head
        previous = torch.tensor([text[-1], *drafted[:-1]])
        correction = markov.markov_w1.weight[previous] @ markov.markov_w2.weight.T
        assert bool((correction.abs().amax(-1) > 0.1).all())
        expected = expected + correction
    torch.testing.assert_close(
        proposal.logits[0].double().softmax(-1), expected.softmax(-1), atol=1e-5, rtol=1e-4
    )


@torch.no_grad()
def test_a_whole_block_is_unrolled_as_it_is_drafted(drafter, target):
    """With as many steps as are drafted: a slot of a block that is not causal depends on how many
    there are."""
    text = torch.randint(3, 288, (10,), generator=torch.Generator().manual_seed(4)).tolist()
    for k in (2, K):
        proposal = propose(drafter, target, text, k)
        assert_unrolls_as_drafted(drafter, target, text, proposal, rtol=1e-4)
    distributions = [propose(drafter, target, text, k).logits[0, 0].softmax(-1) for k in (1, K)]
    difference = float((distributions[0] - distributions[1]).abs().max())
    assert (difference < 1e-6) == drafter.shape.causal


@torch.no_grad()
def test_no_more_is_drafted_than_a_block_holds(drafter, target):
    assert propose(drafter, target, [5, 6, 7, 8], 7).lengths.tolist() == [drafter.max_depth] == [4]
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    steps = drafter.unroll(unroll_batch(drafter, target, ids, 6))
    assert [bool(step.valid.any()) for step in steps] == [True] * 4 + [False] * 2


@pytest.fixture
def folder(target, tmp_path):
    checkpoint.save(Dflash.create(DflashOptions(), target, seed=0), tmp_path, target)
    (tmp_path / "draftsmith.json").unlink()
    return tmp_path


def reconfigure(folder, nested: dict | None = None, **values) -> None:
    inner = json.loads((folder / "config.json").read_text())["dflash_config"]
    merge_json(folder / "config.json", values | {"dflash_config": inner | (nested or {})})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nested": {"sample_from_anchor": True}}, "sample_from_anchor=True"),
        ({"nested": {"use_swa": True}}, "sliding_window=None"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2},
            "sliding_window=2",
        ),
        ({"nested": {"attention_sink_bias": True}}, "attention_sink_bias=True"),
        ({"block_size": None}, "'block_size'"),
        ({"nested": {"target_layer_ids": [0, 9]}}, "tap 10 does not exist"),
        ({"vocab_size": 300}, "vocab_size=300 where 32 and 288"),
        ({"num_hidden_layers": 3}, "'layers.2.self_attn.q_proj.weight' is missing"),
    ],
)
def test_what_cannot_be_served_is_refused(change, words, folder, target):
    reconfigure(folder, **change)
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        checkpoint.load(folder, target)


def test_a_reduced_vocabulary_needs_its_map(folder, target):
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"lm_head.weight": torch.zeros(100, 32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="head over 100 tokens"):
        checkpoint.load(folder, target)
    reconfigure(folder, draft_vocab_size=100)
    with pytest.raises(UserError, match="head over 100 tokens"):
        checkpoint.load(folder, target)
    save_file({**tensors, "d2t": torch.full((100,), 200)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"d2t of .* does not map"):
        checkpoint.load(folder, target)


def test_blocks_of_others_are_not_causal_unless_they_say_so(folder, target):
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["causal"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not checkpoint.load(folder, target).shape.causal


def test_the_mask_token_is_one_that_no_text_holds(target):
    assert target.tokenizer().convert_tokens_to_ids("<|mask|>") == 2
    assert Dflash.create(DflashOptions(mask_token=2), target, seed=0).shape.mask_token == 2
    with pytest.raises(UserError, match="'mask_token' is 288"):
        Dflash.create(DflashOptions(mask_token=288), target, seed=0)
