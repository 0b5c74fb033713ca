"""A captured forward gives what the model gives: every state, logit, key and value, at any number
of tokens."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.compiled import captured as captured_module
from draftsmith.drafters.compiled.capture import NUM_TOKENS
from draftsmith.drafters.compiled.captured import Replay, capture_lm
from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import FINAL, Target
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.kernels.attention.pool import PagedPool
from draftsmith.kernels.products.few_rows import few_rows

ARCHITECTURES = [
    "gemma2",
    "gpt_neox",
    "qwen3_moe",
    "llama4",
    *(pytest.param(arch, marks=pytest.mark.long) for arch in ("qwen3", "mistral", "gpt2")),
]
TAPS = (2, 0, FINAL, 4)
# Tokens of the two rows in each pass: prompts, single tokens, verification of two depths, one row
# alone.
PASSES = [(9, 20), (1, 1), (4, 2), (1, 0), (0, 7), (3, 3)]


def serve_texts(target: Target) -> tuple[list[torch.Tensor], list[torch.Tensor], PagedPool]:
    """Logits and taps of every pass over two texts in blocks out of order, and the pool
    they leave."""
    pool = target.new_pool(num_blocks=24, block_size=4)
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(24, generator=generator).view(2, 12)
    texts = torch.randint(3, target.vocab_size, (2, 48), generator=generator)
    done, logits, taps = [0, 0], [], []
    for counts in PASSES:
        rows = [row for row in range(2) if counts[row]]
        parts = [torch.arange(done[row], done[row] + counts[row]) for row in rows]
        positions = torch.cat(parts)
        ids = torch.cat([texts[row, part] for row, part in zip(rows, parts)])
        context = PagedPass(
            pool, tables[rows], positions, torch.tensor([len(part) for part in parts])
        )
        output = target.forward(
            ids[None], positions[None], context, torch.arange(len(ids))[::2], TAPS
        )
        logits.append(output.logits)
        taps.append(output.taps)
        done = [one + two for one, two in zip(done, counts)]
    return logits, taps, pool


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_family_is_captured_and_replayed_exactly(tiny_target, arch):
    own, captured = Target.load(tiny_target(arch)), Target.load(tiny_target(arch))
    capture_lm(captured)
    assert captured.captured
    # Logits are a few units large; float32 sums in another order add up to 1e-5 of that.
    close = {"atol": 4e-5, "rtol": 1e-5}
    for found, expected in zip(serve_texts(captured), serve_texts(own)):
        if isinstance(found, PagedPool):
            found, expected = [*found.keys, *found.values], [*expected.keys, *expected.values]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **close)


def test_in_float64_only_the_order_of_sums_differs(tiny_target):
    own, captured = (Target.load(tiny_target("gemma2"), dtype=torch.float64) for _ in range(2))
    capture_lm(captured)
    for one, other in zip(serve_texts(captured)[1], serve_texts(own)[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-12)


@torch.no_grad()
def test_no_length_is_captured_anew(tiny_target, monkeypatch):
    target = Target.load(tiny_target("llama"))
    capture_lm(target)
    monkeypatch.setattr(captured_module, "Replay", None)
    capture_lm(target)
    pool, table = target.new_pool(16, 8), torch.arange(16)[None]
    for count in (1, 2, 3, 7, 30, 100):
        positions = torch.arange(count)
        context = PagedPass(pool, table, positions, torch.tensor([count]))
        final = target.paged(torch.full((1, count), 5), positions[None], context).final
        assert final.shape == (1, count, target.hidden_size)


def test_a_capture_that_is_wrong_is_not_used(tiny_target, monkeypatch, caplog):
    original = captured_module.Replay.__call__

    def wrong(self, *inputs, attention_context=None):
        result = original(self, *inputs, attention_context=attention_context)
        return result if isinstance(result, torch.Tensor) else [1.001 * state for state in result]

    monkeypatch.setattr(captured_module.Replay, "__call__", wrong)
    target = Target.load(tiny_target("llama"))
    with caplog.at_level(logging.INFO, logger="draftsmith.drafters.compiled.captured"):
        capture_lm(target)
    assert not target.captured
    assert "differs from the model's own" in caplog.text


def test_a_model_that_decides_by_value_is_run_as_it_is(tiny_target, monkeypatch, caplog):
    """Rotary frequencies that grow with the longest position are such a decision."""
    folder = tiny_target("llama")
    model = load_model(folder, trust_remote_code=False)
    config = model.config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    growing = AutoModelForCausalLM.from_config(config).eval()
    target = Target(growing, "growing")
    with caplog.at_level(logging.INFO, logger="draftsmith.drafters.compiled.captured"):
        capture_lm(target)
    assert not target.captured
    assert "runs without a captured forward" in caplog.text
    serve_texts(target)


@torch.no_grad()
def test_weights_written_in_place_count_after_a_refresh():
    layers = [torch.nn.Linear(16, size, bias=size > 8) for size in (8, 24)]

    def forward(rows, context):
        return [layer(rows) for layer in layers]

    replay = Replay(forward, [torch.zeros(1, NUM_TOKENS, 16)])
    rows = torch.randn(1, 3, 16)
    for layer in layers:
        layer.weight.copy_(torch.randn_like(layer.weight))
    stale = replay(rows)
    replay.refresh()
    for found, old, layer in zip(replay(rows), stale, layers):
        torch.testing.assert_close(found, layer(rows))
        assert (found - old).abs().max() > 0.1


@torch.no_grad()
def test_without_memory_for_a_second_copy_weights_stay_as_they_are(tiny_target):
    target = Target.load(tiny_target("llama"))
    layer = target.model.lm_head
    replay = Replay(
        lambda rows, context: layer(rows),
        [torch.zeros(1, NUM_TOKENS, target.hidden_size)],
        copies=0,
    )
    rows = torch.randn(1, 3, target.hidden_size)
    torch.testing.assert_close(replay(rows), layer(rows))
    assert [node.target for node in replay.graph.nodes if node.op == "call_function"] == [
        torch._C._nn.linear
    ]


def logits_of(target: Target, passes: list[tuple[int, int]]) -> torch.Tensor:
    """Logits of a text of which every pass reads the first number of tokens, beside another text's
    second number."""
    pool = target.new_pool(num_blocks=24, block_size=4)
    tables = torch.arange(24).view(2, 12)
    texts = torch.randint(3, target.vocab_size, (2, 48), generator=torch.Generator().manual_seed(5))
    done, found = [0, 0], []
    for counts in passes:
        rows = [row for row in range(2) if counts[row]]
        parts = {row: torch.arange(done[row], done[row] + counts[row]) for row in rows}
        positions = torch.cat([parts[row] for row in rows])
        ids = torch.cat([texts[row, parts[row]] for row in rows])
        lengths = torch.tensor([counts[row] for row in rows])
        context = PagedPass(pool, tables[rows], positions, lengths)
        output = target.forward(ids[None], positions[None], context, torch.arange(len(ids)), ())
        found.append(output.logits[: counts[0]])
        done = [one + two for one, two in zip(done, counts)]
    return torch.cat(found)


@pytest.mark.skipif(few_rows(torch.ones(1, 2), None) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("qwen3", torch.float32),
        pytest.param("gemma", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_verified_tokens_have_the_bits_of_tokens_decoded_one_by_one(
    tiny_target, architecture: str, dtype: torch.dtype
) -> None:
    target = Target.load(tiny_target(architecture), dtype=dtype)
    capture_lm(target)
    alone = logits_of(target, [(6, 0)] + [(1, 0)] * 24)
    with_others = [(6, 20), (4, 1), (8, 3), (1, 1), (3, 9), (8, 0)]
    assert target.captured and serve_texts(target)[1][0].dtype == dtype
    assert torch.equal(logits_of(target, with_others)[6:], alone[6:])
    # The control: the model's own forward rounds otherwise.
    with target.own_forward():
        assert not torch.equal(logits_of(target, with_others)[6:], alone[6:])


@torch.no_grad()
@pytest.mark.parametrize("takes_two", [False, True])
def test_a_head_that_is_more_than_a_product_is_not_taken_for_one(takes_two):
    first, second = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))

    def head(rows, context):
        return second(rows) - first(rows) if takes_two else first(rows)

    replay = Replay(head, [torch.zeros(1, NUM_TOKENS, 16)])
    assert (replay._product is None) == takes_two
    rows = torch.randn(1, 3, 16)
    torch.testing.assert_close(replay(rows), head(rows, None))
