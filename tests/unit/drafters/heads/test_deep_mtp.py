"""Several MTP modules, one for each drafted token: the formula, training as serving, greedy text,
prefix caching, and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.drafters import checkpoint
from draftsmith.drafters.heads.mtp import Mtp
from draftsmith.drafters.heads.mtp_deepseek import DeepMtp
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import MtpOptions
from draftsmith.drafters.speculate import speculate
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import run
from tests.first_rounds import first_round
from tests.noise import noisy
from tests.unrolled import assert_unrolls_as_drafted, unroll_batch

IDS = torch.randint(2, 288, (2, 16), generator=torch.Generator().manual_seed(1))
NUM = 3


@pytest.fixture(scope="module")
def target(native_target: Callable[..., Path]) -> Target:
    return Target.load(native_target("glm4_moe") / "whole", dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter(target: Target) -> DeepMtp:
    drafter = Mtp.create(MtpOptions(modules=NUM), target, seed=5)
    assert isinstance(drafter, DeepMtp)
    return noisy(drafter, 0, 0.2).eval()


def causal(
    head: Any, embeds: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head reads and what the next module reads, [L, H], by the layer's own attention."""
    length = len(states)
    positions = torch.arange(length)[None]
    embeds = torch.where(positions[0, :, None] == 0, 0, embeds)
    mixed = head.eh_proj(torch.cat([head.enorm(embeds), head.hnorm(states)], dim=-1))[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    rotary = head._rotary[0](mixed, positions)
    before = head.layer.self_attn.config._attn_implementation
    head.layer.self_attn.config._attn_implementation = "eager"
    out = head.layer(mixed, attention_mask=mask, position_embeddings=rotary)[0]
    head.layer.self_attn.config._attn_implementation = before
    return head.norm(out), out  # GLM's module hands on its state before the norm


@torch.no_grad()
def test_each_module_reads_the_one_before_at_its_position(target: Target, drafter: DeepMtp) -> None:
    batch = unroll_batch(drafter, target, IDS, NUM + 1)
    steps = list(drafter.unroll(batch))
    for row in range(len(IDS)):
        state = batch.taps[row]
        for depth in range(NUM):
            length = IDS.shape[1] - 1 - depth  # of which the token is known
            embeds = target.embed(IDS[row, 1 + depth :])
            read, state = causal(drafter.heads[depth], embeds, state[:length])
            # the state at t predicts the token at t + 2 + depth
            torch.testing.assert_close(
                steps[depth].hidden[row, depth : depth + length], read, rtol=1e-4, atol=1e-4
            )
            valid = steps[depth].valid[row]
            assert valid.tolist() == [depth <= at < IDS.shape[1] - 1 for at in range(IDS.shape[1])]
    assert not steps[NUM].valid.any()


@torch.no_grad()
def test_what_is_drafted_over_rounds_is_what_unrolling_says(
    target: Target, drafter: DeepMtp
) -> None:
    """Rounds that draft all, nothing and less, whose drafted tokens are all rejected."""
    text = IDS[0].tolist()
    pool, start = drafter.new_pool(8, 4, target.device, target.dtype), 0
    for end, k in ((5, NUM), (6, 0), (7, 1), (9, NUM), (10, 2), (14, NUM + 2)):
        drafted = drafter.propose(
            first_round(drafter, target, [text[:end]], [k], [start], pool=pool)
        )
        assert drafted.lengths.tolist() == [min(k, NUM)]
        start = drafter.cached_after(end - 1, min(k, NUM), 0)
        if k:
            assert_unrolls_as_drafted(drafter, target, text[:end], drafted, rtol=1e-3)


def test_the_engine_drafts_what_speculate_does_after_prefixes_too(
    target: Target, drafter: DeepMtp
) -> None:
    """The same proposals behind the same texts, which are a function of these alone: a cache with
    stale values would draft other tokens."""
    prompt, drafted = IDS[0].tolist(), dict[int, list[int]]()
    propose = drafter.propose

    def spy(inputs: DraftInputs) -> Proposal:
        proposal: Proposal = propose(inputs)
        length = int(proposal.lengths[0])
        drafted[len(inputs.histories[0])] = proposal.tokens[0, :length].tolist()
        return proposal

    drafter.propose = spy  # type: ignore[method-assign]
    try:
        alone = speculate(
            drafter, target, [prompt], k=NUM, temperature=0.0, seeds=[0], max_new_tokens=24
        )
        expected = dict(drafted)
        engine = build_engine(target, drafter, EngineConfig(k=NUM, compile="off", block_size=4))
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        for _ in range(2):
            drafted.clear()
            (found,) = engine.generate([prompt], params, text=False)
            assert found.tokens == alone.texts[0].tokens[len(prompt) :]
            common = drafted.keys() & expected.keys()
            assert len(common) > 8 and all(drafted[at] == expected[at] for at in common)
    finally:
        drafter.propose = propose  # type: ignore[method-assign]
    assert engine.stats.prefix_cache_hits > 0


def test_saved_and_exported_as_further_layers(
    target: Target, drafter: DeepMtp, tmp_path: Path
) -> None:
    checkpoint.save(drafter, tmp_path / "draft", target)
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    layers = {name.split(".")[2] for name in saved}
    first = target.num_layers
    assert layers == {str(first + index) for index in range(NUM)}
    again = checkpoint.load(tmp_path / "draft", target)
    assert all(
        torch.equal(one, again.state_dict()[name]) for name, one in drafter.state_dict().items()
    )
    out = tmp_path / "out"
    run(ExportConfig(draft=str(tmp_path / "draft"), to="vllm", out=str(out)))
    config = json.loads((out / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == NUM
    assert isinstance(checkpoint.load(out, Target.load(out)), DeepMtp)


def test_several_modules_that_no_engine_reads_are_refused(
    tiny_target: Callable[..., str], native_target: Callable[..., Path], tmp_path: Path
) -> None:
    other = Target.load(tiny_target("qwen3"))
    with pytest.raises(UserError, match="several modules are for deepseek_v3, glm4_moe"):
        Mtp.create(MtpOptions(modules=2), other, seed=0)
