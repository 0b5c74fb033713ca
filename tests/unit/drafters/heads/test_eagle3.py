"""EAGLE-3's portable folder, its vocabulary subset, and what a new draft takes from its target."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options, default_taps
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError


@pytest.fixture
def folder(target, tmp_path):
    create(target, draft_vocab_size=100).save(tmp_path)
    return tmp_path


def create(target: Target, **options) -> Eagle3:
    return Eagle3.create(
        Eagle3Options(**options), target, seed=0, token_counts=torch.arange(target.vocab_size)
    )


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(32, (2, 16, 29)), (8, (2, 4, 5)), (4, (1, 2)), (2, (1,)), (1, (1,)), (5, (2,))],
)
def test_default_taps(layers, taps):
    assert default_taps(layers) == taps


def test_d2t_holds_offsets(folder, target):
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(100) + tensors["d2t"]
    # The counts grow with the id, and the end-of-text token (0) is in whatever its count.
    assert ids.tolist() == [0, *range(189, 288)]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert Eagle3.load(folder, target).vocab_map.tolist() == ids.tolist()


def rewrite(folder, *, rename=lambda name: name, drop=(), config=None, add=None):
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items() if name not in drop}
    save_file({**tensors, **(add or {})}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    for key, value in (config or {}).items():
        values.pop(key) if value is None else values.update({key: value})
    (folder / "config.json").write_text(json.dumps(values))


def test_folders_made_elsewhere(folder, target):
    """`layers.0.`, no t2d, SGLang's key alone, no record of ours: the same draft."""
    own = Eagle3.load(folder, target)
    rewrite(
        folder,
        rename=lambda name: name.replace("midlayer.", "layers.0."),
        drop=("t2d",),
        config={"eagle_aux_hidden_state_layer_ids": None, "target_hidden_size": None},
    )
    theirs = checkpoint.load(folder, target)
    assert theirs.taps == own.taps == (1, 2)
    for name, tensor in own.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name


def test_folder_with_its_own_embeddings(folder, target):
    table = torch.randn(288, 32)
    rewrite(folder, add={"embed_tokens.weight": table})
    drafter = Eagle3.load(folder, target)
    assert torch.equal(drafter.embed(torch.tensor([5, 7])), table[[5, 7]])
    assert not drafter.embed_tokens.weight.requires_grad
    drafter.save(folder)
    assert torch.equal(load_file(folder / "model.safetensors")["embed_tokens.weight"], table)


def test_scaled_embeddings_are_kept_with_their_scale(tiny_target):
    """Engines share the raw table; where the target scales it, the draft must bring what it was
    trained on."""
    gemma = Target.load(tiny_target("gemma"), dtype=torch.float32)
    drafter = create(gemma)
    ids = torch.tensor([3, 100])
    torch.testing.assert_close(drafter.embed(ids), gemma.embed(ids))
    shared = type(gemma.model.get_input_embeddings()) is torch.nn.Embedding
    assert (drafter.embed_tokens is None) == shared


@pytest.mark.parametrize(
    "offsets", [torch.zeros(100).long() + 200, torch.zeros(99).long(), torch.arange(100).flip(0)]
)
def test_bad_vocabulary_maps(folder, target, offsets):
    rewrite(folder, add={"d2t": offsets})
    with pytest.raises(UserError, match="distinct target ids"):
        Eagle3.load(folder, target)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"taps": (1, 9)}, "'draft.taps' is 1 9; give ascending layers from 1 to 3, each once"),
        *(({"taps": taps}, "'draft.taps' is") for taps in ((3, 1), (1, 1, 2), (0, 1, 2), (2, 4))),
        ({"num_attention_heads": 3}, "num_attention_heads=3 with num_key_value_heads=2"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 with num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7, since rotary embeddings turn pairs"),
    ],
)
def test_shapes_that_no_engine_reads_are_refused(target, options, reason):
    with pytest.raises(UserError, match=reason):
        create(target, **options)


def test_a_subset_needs_counts(target):
    with pytest.raises(UserError, match="chosen by frequency"):
        Eagle3.create(Eagle3Options(draft_vocab_size=50), target, seed=0)
    assert Eagle3.create(Eagle3Options(draft_vocab_size=288), target, seed=0).vocab_map is None


def test_the_seed_decides_the_start_and_nothing_else_changes(target):
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first, again, other = (Eagle3.create(Eagle3Options(), target, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    # The half that reads the embedding is random; the other is the target's.
    weights = [drafter.midlayer.self_attn.q_proj.weight for drafter in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
