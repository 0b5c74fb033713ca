"""EAGLE-3's portable folder, its vocabulary subset, and what a new draft takes from its target."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.init_from_target import fitted_norm, frequent_tokens, gains, spread
from draftsmith.drafters.options import DflashOptions, Eagle3Options, default_taps
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from tests.conftest import merge_json


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
    merge_json(folder / "config.json", config or {})


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


# What a new head takes from its target


def load(tiny_target, arch: str) -> Target:
    return Target.load(tiny_target(arch), dtype=torch.float32)


def test_frequent_tokens():
    counts = torch.tensor([5, 0, 7, 7, 7, 1])
    assert frequent_tokens(counts, 3, always=(1,)).tolist() == [1, 2, 3]
    with pytest.raises(UserError, match="it must be at least 2"):
        frequent_tokens(counts, 1, always=(0, 1))


@pytest.mark.parametrize("arch", ["llama", "gemma", "qwen3"])
def test_fitted_norm_is_the_targets_own(tiny_target, arch):
    """With it and the target's table the draft turns true last states into the target's
    own logits."""
    target = load(tiny_target, arch)
    ids = torch.randint(288, (1, 20), generator=torch.Generator().manual_seed(5))
    last, hidden = target.states(ids, torch.ones_like(ids), (target.num_layers,))
    normed = (
        last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + 1e-6) * fitted_norm(target).float()
    )
    torch.testing.assert_close(
        normed @ target.output_weight.T, target.head(hidden), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("arch", "shift"), [("llama", 0.0), ("gemma", 1.0)])
def test_gains_are_effects_not_weights(tiny_target, arch, shift):
    norm = load(tiny_target, arch).layers[-1].input_layernorm
    torch.testing.assert_close(gains(norm, 32).float(), norm.weight + shift, atol=1e-4, rtol=1e-4)


def test_a_new_draft_starts_with_the_targets_last_layer(tiny_target):
    target = load(tiny_target, "llama")
    drafter = Eagle3.create(Eagle3Options(), target, seed=0)
    theirs, ours = target.layers[-1], drafter.midlayer
    assert torch.equal(ours.self_attn.v_proj.weight[:, 32:], theirs.self_attn.v_proj.weight)
    assert not torch.equal(ours.self_attn.v_proj.weight[:, :32], theirs.self_attn.v_proj.weight)
    assert torch.equal(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
    assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    torch.testing.assert_close(
        ours.hidden_norm.weight, theirs.input_layernorm.weight, atol=1e-5, rtol=1e-5
    )


def test_a_new_block_drafter_starts_with_layers_from_the_targets_first_to_its_last(tiny_target):
    target = load(tiny_target, "llama")
    drafter = Dflash.create(DflashOptions(num_layers=2), target, seed=0)
    for ours, theirs in zip(drafter.layers, (target.layers[0], target.layers[-1]), strict=True):
        assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
        torch.testing.assert_close(
            ours.input_layernorm.weight, theirs.input_layernorm.weight, atol=1e-5, rtol=1e-5
        )
    assert [spread(count, 8) for count in (1, 2, 3, 8)] == [[7], [0, 7], [0, 4, 7], list(range(8))]


def test_norms_of_a_block_drafter_act_as_the_targets_do(tiny_target):
    """Gemma 3 stores gains less 1, norms queries and keys, and has another norm between attention
    and the MLP's own."""
    target = load(tiny_target, "gemma3")
    ours, theirs = (
        Dflash.create(DflashOptions(num_layers=1), target, seed=0).layers[0],
        target.layers[-1],
    )
    for own, norm in (
        (ours.self_attn.q_norm, theirs.self_attn.q_norm),
        (ours.self_attn.k_norm, theirs.self_attn.k_norm),
        (ours.input_layernorm, theirs.input_layernorm),
        (ours.post_attention_layernorm, theirs.pre_feedforward_layernorm),
    ):
        torch.testing.assert_close(own.weight, 1 + norm.weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["gpt_neox", "gpt2", "qwen3_moe", "mixtral", "gemma2", "olmo"])
def test_targets_with_other_layers_give_what_fits(tiny_target, arch):
    target = load(tiny_target, arch)
    for drafter in (
        Eagle3.create(Eagle3Options(), target, seed=0),
        Dflash.create(DflashOptions(), target, seed=0),
    ):
        assert all(torch.isfinite(parameter).all() for parameter in drafter.parameters())


def test_a_draft_of_another_shape_keeps_its_own_weights(tiny_target):
    target = load(tiny_target, "llama")
    drafter = Eagle3.create(
        Eagle3Options(intermediate_size=48, num_attention_heads=2, head_dim=8), target, seed=0
    )
    assert drafter.midlayer.mlp.up_proj.weight.shape == (48, 32)
    assert drafter.midlayer.self_attn.o_proj.weight.shape == (32, 16)
