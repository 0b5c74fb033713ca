"""A pool of drafts by class, from requests to routing. The target speaks two languages in the same
words; no small draft does."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.distill.buffer.buffer import BufferWriter
from draftsmith.distill.config import (
    DistillConfig,
    GateConfig,
    LearnConfig,
    LearnUnroll,
    PoolConfig,
)
from draftsmith.distill.daemon import Daemon
from draftsmith.distill.pool import pool
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.interface import TrainedDrafter, UnrollBatch
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.pool import DraftPool, read_pool
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.drafts.swap import Swap
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.loop import EngineLoop
from draftsmith.serve.requests.request import LIVE, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.watch import VersionWatcher
from tests.conftest import Records
from tests.integration.conftest import learner_of

WORDS = range(4, 68)
LANGUAGES = {"a": 80, "b": 81}  # the token that a text of it begins with
LEARN = LearnConfig(lr=1e-2, steps=12, fresh=16, batch=16, unroll=LearnUnroll(steps=1), replay=0.5)
GATE = GateConfig(every=1, held_out=0.3)
SAMPLING = SamplingParams(max_tokens=16, temperature=0.7)


class Pair(NamedTuple):
    """Folders."""

    target: str
    draft: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_target: Callable[..., str]) -> Pair:
    root = tmp_path_factory.mktemp("two-languages")
    make_target(root / "target", tiny_target("llama"))
    target = Target.load(str(root / "target"))
    checkpoint.save(make_draft(target), root / "draft", target)
    return Pair(str(root / "target"), str(root / "draft"))


def make_target(path: Path, like: str) -> None:
    """Each word has one likely successor in each language. Attention looks for the first token
    alone and tells which language it is, the MLP's gates move the word into that language's part of
    the state, and the head knows both."""
    torch.manual_seed(0)
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 128,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(like, **shape))
    layer = model.model.layers[0]
    # `slow`: hardly turned by rotary embeddings
    constant, is_first, sign, language, slow = 32, 33, 34, 35, 63
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.ndim == 2):
            parameter.zero_()
        words = torch.nn.functional.normalize(torch.randn(len(WORDS), 32), dim=-1)
        embedding = model.model.embed_tokens.weight
        embedding[:, constant] = 1.0
        embedding[WORDS.start : WORDS.stop, :32] = words
        for token, value in zip(LANGUAGES.values(), (1.0, -1.0), strict=True):
            embedding[token, is_first], embedding[token, sign] = 1.0, value
        layer.self_attn.q_proj.weight[slow, constant] = 4.0
        layer.self_attn.k_proj.weight[slow, is_first] = 1.0
        layer.self_attn.v_proj.weight[0, sign] = 1.0
        layer.self_attn.o_proj.weight[language, 0] = 0.15
        for part, value in enumerate((2.0, -2.0)):
            channels, room = slice(32 * part, 32 * part + 32), slice(40 + 32 * part, 72 + 32 * part)
            layer.mlp.gate_proj.weight[channels, language] = value
            layer.mlp.up_proj.weight[channels, :32] = torch.eye(32)
            layer.mlp.down_proj.weight[room, channels] = torch.eye(32) / 85
            model.lm_head.weight[WORDS.start + torch.randperm(len(WORDS)), room] = 1.5 * words
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(like).save_pretrained(path)


def beginnings(language: str, count: int, generator: torch.Generator) -> torch.Tensor:
    words = torch.randint(WORDS.start, WORDS.stop, (count, 3), generator=generator)
    return torch.cat([torch.full((count, 1), LANGUAGES[language]), words], dim=1)


def make_draft(target: Target) -> TrainedDrafter:
    """Too narrow for both languages, of which it has seen much."""
    draft = FAMILIES["draft-lm"].create(DraftLmOptions(num_layers=1, hidden_size=4), target, seed=0)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.cat([beginnings(name, 64, generator) for name in LANGUAGES]).tolist()
    answers = target.answer(
        prompts,
        max_new_tokens=16,
        temperature=SAMPLING.temperature,
        seeds=list(range(128)),
        ignore_eos=True,
    )
    texts = torch.tensor(
        [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    )
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-2)
    for _ in range(200):
        ids = texts[torch.randperm(128, generator=generator)[:32]]
        (unrolled,) = draft.unroll(
            UnrollBatch(input_ids=ids, attention_mask=torch.ones_like(ids), taps=None, num_steps=1)
        )
        logits = (unrolled.hidden @ draft.head_weight().T)[:, 3:-1]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten()).backward()
        optimizer.step()
    return draft


class Rounds(Records):
    """A sink that hands over whole shards when asked to."""

    def __init__(self, url: str):
        self.url = url

    def flush(self) -> None:
        writer = BufferWriter(self.url, flush_s=60.0, flush_records=10**6)
        for record in self:
            writer.put(record)
        writer.close()
        self.clear()


class Direct(EngineLoop):
    """An engine's loop that is never started: swaps and retirements happen at once."""

    def retire(self, draft: str) -> None:
        self.engine.drafts.retire(draft)

    def swap(
        self, folder: str, version: str, *, draft: str = LIVE, timeout_s: float = 60.0
    ) -> Swap:
        swap = self.engine.drafts.prepare(folder, version, draft=draft)
        self.engine.drafts.apply_swaps()
        return swap


class World:
    """One server and one learner in this process, neither with a thread of its own."""

    def __init__(self, root: Path, pair: Pair):
        self.target = Target.load(pair.target)
        self.config = DistillConfig(
            target=pair.target, draft=pair.draft, buffer=str(root / "buffer"),
            versions=str(root / "versions"),
            learn=LEARN, gate=GATE, pool=PoolConfig(most=2, requests=24, idle_requests=150),
        )  # fmt: skip
        self.daemon = self.begin()
        self.sink = Rounds(self.config.buffer)
        drafter = checkpoint.load(pair.draft, self.target)
        self.engine = build_engine(
            self.target,
            drafter,
            EngineConfig(k=3, compile="off"),
            sink=self.sink,
            draft_version="1",
        )
        self.watcher = VersionWatcher(Direct(self.engine), self.config.versions, serving=1)
        self.generator = torch.Generator().manual_seed(0)

    def begin(self) -> Daemon:
        return learner_of(self.config, io.StringIO())

    def prompts(self, language: str, count: int) -> list[list[int]]:
        return beginnings(language, count, self.generator).tolist()

    def serve(self, prompts: dict[str, list[list[int]]]) -> list[RoundRecord]:
        """Prompts by class; the records since the learner looked last."""
        for name, asked in prompts.items():
            for prompt in asked:
                self.engine.submit(
                    prompt, SAMPLING, options=RequestOptions(text=False, request_class=name)
                )
        while self.engine.scheduler.busy:
            self.engine.step()
        return list(self.sink)

    def learn(self) -> None:
        self.sink.flush()
        while self.daemon.cycle():
            pass
        self.watcher.look()

    def decisions(self) -> list[tuple[str, str]]:
        found = versions.read_decisions(self.config.versions)
        return [(one["decision"], one["class"]) for one in found if "class" in one]


def drafted_by(records: list[RoundRecord], name: str) -> set[str]:
    return {
        record.draft_version
        for record in records
        if record.request_class == name and record.drafted
    }


def acceptance(records: list[RoundRecord], name: str) -> float:
    own = [record for record in records if record.request_class == name and record.drafted]
    return sum(record.accepted for record in own) / sum(
        min(record.accepted + 1, len(record.drafted)) for record in own
    )


@pytest.mark.long
def test_classes_get_drafts_that_beat_the_single_one_and_lose_them(
    pair: Pair, tmp_path: Path
) -> None:
    world = World(tmp_path, pair)
    for _ in range(16):
        world.serve({name: world.prompts(name, 16) for name in LANGUAGES})
        world.learn()
        if len(serving(world)) == 2:
            break
    assert sorted(world.decisions()) == [
        ("class learns", "a"),
        ("class learns", "b"),
        ("new class", "a"),
        ("new class", "b"),
    ]
    assert serving(world) == {"a": "c01", "b": "c02"}

    # The same requests of both classes, with the pool and without.
    asked = {name: world.prompts(name, 48) for name in LANGUAGES}
    pooled = list(world.serve(asked))
    live = str(versions.latest(world.config.versions))
    named, versions_of_a = (
        f"a/{world.daemon.pool.members['a'].track.live.version}",
        drafted_by(pooled, "a"),
    )
    # one in ten is for comparison
    assert versions_of_a >= {named} and versions_of_a <= {named, live}
    world.sink.clear()
    world.engine.drafts.router.pool = DraftPool()
    single = list(world.serve(asked))
    world.sink.clear()
    assert drafted_by(single, "a") == {live}
    for name in LANGUAGES:
        assert acceptance(pooled, name) > acceptance(single, name) + 0.05

    # A learner that starts again knows what this one did, and goes on with these classes where
    # nobody says how many.
    world.daemon.save()
    world.config = replace(world.config, pool=replace(world.config.pool, most=None))
    again = world.begin()
    assert again.status.stream.getvalue().count("goes on with 'a', 'b'") == 1
    assert again.pool.to_dict() == world.daemon.pool.to_dict()
    assert (
        again.pool.members.keys() == world.daemon.pool.members.keys()
        and again.pool.members["a"].is_serving
    )
    for folder, track in world.daemon.tracks.items():
        weights = again.tracks[folder].learner.drafter.state_dict()
        assert all(
            torch.equal(values, weights[name])
            for name, values in track.learner.drafter.state_dict().items()
        )
    world.daemon = again

    # Requests tagged a speak the other language from now on, and those tagged b are gone.
    for _ in range(16):
        world.serve({"a": world.prompts("b", 24)})
        world.learn()
        if not serving(world):
            break
    assert world.decisions()[4:] == [("merged class", "a"), ("retired class", "b")]
    assert sorted(world.engine.drafts.served) == [LIVE]
    assert not list((tmp_path / "versions" / "pool").glob("c*/v*"))


@pytest.mark.long
def test_requests_without_a_tag_are_sorted_by_their_prompts(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FIRST_CLUSTERS", 48)
    world = World(tmp_path, pair)
    for _ in range(2):
        # Two subjects, which have no word in common.
        prompts = [
            torch.randint(begin, begin + 32, (24,), generator=world.generator).tolist()
            for begin in [4] * 36 + [36] * 36
        ]
        world.serve({"": prompts})
        world.learn()
    found = read_pool(world.config.versions)
    assert found is not None and len(found.learning) == 2
    names = [
        {found.class_of("", prompt) for prompt in part} for part in (prompts[:36], prompts[36:])
    ]
    assert [len(one) for one in names] == [1, 1] and names[0] | names[1] == set(found.learning)
    assert world.begin().pool.members.keys() == set(found.learning)


def serving(world: World) -> dict[str, str]:
    found = read_pool(world.config.versions)
    return {} if found is None else dict(found.classes)
