"""A target whose passes are made elsewhere gives what it gives here, without a server in between."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.remote import target as remote
from draftsmith.drafters.remote.checks import check_description
from draftsmith.drafters.remote.messages import (
    StatesOfTexts,
    Texts,
    body_of_states,
    body_of_texts,
    body_of_weights,
    texts_of_body,
)
from draftsmith.drafters.remote.service import (
    check_texts,
    described,
    layer_weights,
    shared_weights,
    states,
)
from draftsmith.drafters.remote.target import RemoteTarget, load_remote
from draftsmith.drafters.speculate import speculate
from draftsmith.drafters.target.taps import FINAL
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError

MOST = 4096


class Direct:
    """In place of a connection: the server's part, called at once."""

    base, revision = "http://host", None

    def __init__(self, target: Target):
        self.target = target
        self.asked: list[Texts] = []

    def description(self) -> dict[str, Any]:
        return described(self.target, max_tokens=MOST, tokenizer=self.target.tokenizer())

    def weights(self, layer: int | None = None) -> dict[str, torch.Tensor]:
        found = shared_weights(self.target) if layer is None else layer_weights(self.target, layer)
        return load(body_of_weights(found))

    def states(self, texts: Texts) -> StatesOfTexts:
        self.asked.append(texts)
        found = texts_of_body(body_of_texts(texts))
        check_texts(self.target, found, MOST)
        return StatesOfTexts(**load(body_of_states(states(self.target, found))))


Pair = tuple[Target, RemoteTarget]


@pytest.fixture
def pair(
    tiny_target: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Pair]:
    """`pair(arch, dtype=)`: a target, and the same one elsewhere, whose folder has no weights."""

    def make(arch: str, **options: Any) -> Pair:
        here = Target.load(tiny_target(arch), **options)
        folder = tmp_path / arch
        shutil.copytree(here.name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        monkeypatch.setattr(remote, "Connection", lambda url: Direct(here))
        there = load_remote(
            str(folder),
            "http://host",
            dtype=here.dtype,
            device=torch.device("cpu"),
            trust_remote_code=False,
        )
        return here, there

    return make


ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gpt_neox", "qwen3_moe"]


def batch(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, target.vocab_size, (3, 12), generator=generator)
    return ids, (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_states_head_and_embeddings_are_those_of_the_target_here(
    arch: str, pair: Callable[..., Pair]
) -> None:
    here, there = pair(arch)
    ids, mask = batch(here)
    taps = (2, FINAL, 0)
    wanted, found = here.states(ids, mask, taps), there.states(ids, mask, taps)
    kept = mask.bool()
    for ours, theirs in zip(wanted, found, strict=True):
        assert torch.equal(ours[kept], theirs[kept])
        assert not theirs[~kept].any()
    assert torch.equal(here.head(wanted[1]), there.head(wanted[1]))
    assert torch.equal(here.embed(ids), there.embed(ids))
    assert torch.equal(here.output_weight, there.output_weight)
    assert (here.revision, here.vocab_size, here.num_layers, here.pass_bytes()) == (
        there.revision,
        there.vocab_size,
        there.num_layers,
        there.pass_bytes(),
    )


def test_packed_texts_and_texts_apart_are_read_as_here(pair: Callable[..., Pair]) -> None:
    here, there = pair("llama")
    ids, _ = batch(here)
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3, [0] * 12])
    mask = (segments >= 0).long()
    wanted, found = (one.states(ids, mask, (1,), segments) for one in (here, there))
    for ours, theirs in zip(wanted, found, strict=True):
        assert torch.equal(ours[mask.bool()], theirs[mask.bool()])
    texts = [ids[0], ids[1, :5], ids[2, :1]]
    for text, (tapped, final) in zip(texts, there.read_apart(texts, (1, FINAL)), strict=True):
        taps, hidden = here.states(text[None], torch.ones_like(text[None]), (1, FINAL))
        assert torch.equal(tapped, taps[0]) and torch.equal(final, hidden[0])
    assert there.connection.asked[-1].apart


@pytest.mark.parametrize("most", [12, 30])
def test_more_positions_than_the_server_reads_are_asked_for_in_parts(
    most: int, pair: Callable[..., Pair]
) -> None:
    _, there = pair("llama")
    ids, mask = batch(there)
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 7 + [-1] * 5, [0] + [-1] * 11])
    for packed in (None, segments):
        there.there["max_tokens"] = MOST
        wanted = there.states(ids, mask, (1, FINAL), packed)
        top = there.likeliest(ids, mask, packed, 5)
        there.there["max_tokens"] = most
        begun = len(there.connection.asked)
        there.expect(ids, mask, (1, FINAL), packed)
        found = there.states(ids, mask, (1, FINAL), packed)
        assert len(there.connection.asked) - begun == (3 if most == 12 else 2)
        assert all(part.num_positions <= most for part in there.connection.asked[begun:])
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(there.likeliest(ids, mask, packed, 5)[1:], top[1:])
    there.there["max_tokens"] = 11
    with pytest.raises(UserError, match="a row has 12 positions, padding included, and target"):
        there.states(ids, mask, ())


def test_states_travel_in_the_narrower_numbers(pair: Callable[..., Pair]) -> None:
    here, there = pair("llama", dtype=torch.bfloat16)
    ids, mask = batch(here)
    there._place = there._place._replace(dtype=torch.float32)
    assert there.states(ids, mask, ())[1].dtype == torch.float32
    assert there.connection.asked[-1].dtype == "bfloat16"
    here, there = pair("qwen3")
    there._place = there._place._replace(dtype=torch.bfloat16)
    assert there.states(ids, mask, ())[1].dtype == torch.bfloat16
    assert there.connection.asked[-1].dtype == "bfloat16"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_and_rounds_write_the_texts_of_the_target_here(
    temperature: float, pair: Callable[..., Pair]
) -> None:
    here, there = pair("llama")
    prompts = [[5, 6, 7, 8], [9], [10, 11]]
    asked = {"max_new_tokens": 9, "temperature": temperature, "seeds": [3, 4, 5]}
    answers = [one.answer(prompts, **asked, batch_size=2) for one in (here, there)]
    assert answers[0] == answers[1]
    for family in ("eagle3", "draft-lm"):
        drafter = FAMILIES[family].create(OPTIONS[family](), here, seed=0).eval()
        texts = [speculate(drafter, one, prompts, k=3, **asked).texts for one in (here, there)]
        assert texts[0] == texts[1]


def test_a_new_draft_takes_from_a_server_what_it_takes_here(pair: Callable[..., Pair]) -> None:
    here, there = pair("llama")
    for family in ("eagle3", "dflash", "mtp", "medusa"):
        one, other = (
            FAMILIES[family].create(OPTIONS[family](), target, seed=0).state_dict()
            for target in (here, there)
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), family


@pytest.mark.parametrize(
    "name, value",
    [("dtype", None), ("states_dtype", "int8"), ("hidden_size", "32"), ("config", [])],
)
def test_a_description_without_its_entries_is_refused(
    name: str, value: Any, pair: Callable[..., Pair]
) -> None:
    here, _ = pair("llama")
    direct = Direct(here)
    with pytest.raises(UserError, match=f"describes its target with {name} = "):
        check_description(direct, direct.description() | {name: value}, "auto")


def test_states_that_were_asked_for_ahead_are_taken_once(pair: Callable[..., Pair]) -> None:
    _, there = pair("llama")
    ids, mask = batch(there)
    there.expect(ids, mask, (1,))
    assert there._ahead is not None
    there._ahead[1].result(timeout=60)
    there.states(ids, mask, ())  # others, of an evaluation say
    assert len(there.connection.asked) == 2
    ahead = there.states(ids, mask, (1,))
    assert len(there.connection.asked) == 2
    again = there.states(ids, mask, (1,))
    assert len(there.connection.asked) == 3
    assert all(torch.equal(a, b) for a, b in zip(ahead, again, strict=True))


def test_an_error_ahead_is_raised_where_the_states_are_read(pair: Callable[..., Pair]) -> None:
    _, there = pair("llama")
    ids, mask = batch(there)
    ids[0, 0] = there.vocab_size
    there.expect(ids, mask, ())
    with pytest.raises(UserError, match="ids are outside 0 to"):
        there.states(ids, mask, ())


def texts(**changes: Any) -> Texts:
    values = {"ids": torch.tensor([5, 6, 7]), "lengths": torch.tensor([3]), "width": 3}
    return Texts(**values | changes)


@pytest.mark.parametrize(
    "asked, says",
    [
        (texts(width=MOST + 1), "more than the 4096 of --states-max-tokens"),
        (texts(ids=torch.tensor([5, 6, -1])), "ids are outside 0 to 287"),
        (texts(ids=torch.tensor([5, 6, 288])), "ids are outside 0 to 287"),
        (texts(taps=(9,)), "tap 9 does not exist"),
        (texts(taps=(-1,)), "a tap is -1; give raw layers"),
        (texts(taps=(0,) * 200_000), "tap 0 is asked for 200000 times; give each raw layer once"),
        (texts(top=5000), "top is 5000; ask for at most 1024"),
        (texts(width=2000), "a text has 2000 tokens; the target reads up to"),
    ],
)
def test_texts_that_no_pass_may_read_are_refused(
    asked: Texts, says: str, tiny_target: Callable[..., str]
) -> None:
    with pytest.raises(UserError, match=says):
        check_texts(Target.load(tiny_target("llama")), asked, MOST)


def test_likeliest_tokens_are_those_of_the_targets_logits(pair: Callable[..., Pair]) -> None:
    here, there = pair("llama")
    ids, mask = batch(here)
    asked = Texts(ids=ids.flatten(), lengths=torch.tensor([12] * 3), width=12, top=5, taps=(1,))
    found = there.connection.states(asked)
    taps, hidden = here.states(ids, torch.ones_like(mask), (1,))
    logprobs = here.head(hidden).float().log_softmax(dim=-1).flatten(0, 1)
    best = logprobs.topk(5)
    assert found.hidden is None and torch.equal(found.taps, taps.flatten(0, 1))
    assert torch.equal(found.top_ids.long(), best.indices)
    torch.testing.assert_close(found.top_logprobs, best.values)
    torch.testing.assert_close(found.tail, 1 - best.values.exp().sum(dim=-1))


def test_a_target_of_8_bits_is_read_as_it_is_served(pair: Callable[..., Pair]) -> None:
    here, there = pair("llama", dtype=torch.int8)
    assert (there.revision, there.loaded_revision) == (here.revision, here.loaded_revision)
    assert there.there["dtype"] == "int8"
    ids, mask = batch(here)
    wanted, found = here.states(ids, mask, ()), there.states(ids, mask, ())
    assert torch.equal(wanted[1][mask.bool()], found[1][mask.bool()])
    ours, theirs = here.head(wanted[1]).float(), there.head(wanted[1]).float()
    # The head here multiplies by the numbers that the 8 bits stand for: logits of bfloat16, 4 to 8
    # in size, are steps of 1 / 32 apart.
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1 / 32)


def test_a_layer_that_is_none_is_refused(tiny_target: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="layer is 9; the target has the layers 0 to 3"):
        layer_weights(Target.load(tiny_target("llama")), 9)
