"""What a new head takes from its target."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.blocks.dflash import Dflash
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.init_from_target import fitted_norm, frequent_tokens, gains, spread
from draftsmith.drafters.options import DflashOptions, Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError


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
