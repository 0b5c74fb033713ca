"""A version on trial from the gate to its end: real drafts, a real server's routing, and a learner
that is stopped in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill import command as daemon
from draftsmith.distill.buffer.buffer import BufferReader, BufferWriter
from draftsmith.distill.config import DistillConfig, GateConfig, LearnConfig, LearnUnroll
from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import DraftLmOptions, MtpOptions
from draftsmith.drafters.published import versions
from draftsmith.drafters.published.versions import Canary, read_canary, write_canary
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import CANARY
from draftsmith.serve.sampling.params import SamplingParams

# Text of a tiny random target is unlike language; at this temperature its distributions fit into 64
# tokens.
SAMPLING = SamplingParams(max_tokens=16, temperature=0.5)


class Site:
    """A server and a learner that take turns."""

    def __init__(self, root: Path, target: str, family: str, options: MtpOptions | DraftLmOptions):
        self.target = Target.load(target)
        checkpoint.save(
            FAMILIES[family].create(options, self.target, seed=0), root / "draft", self.target
        )
        self.root = root / "versions"
        self.config = DistillConfig(
            target=target, draft=str(root / "draft"), buffer=str(root / "buffer"),
            versions=str(self.root),
            until_idle_s=0.3, poll_s=0.05,
            learn=LearnConfig(lr=3e-3, steps=40, fresh=16, unroll=LearnUnroll(steps=3)),
            gate=GateConfig(every=1, held_out=0.3, canary=0.5, canary_requests=12),
        )  # fmt: skip

    def serve(
        self, count: int, seed: int, *, spoil: Callable[[torch.nn.Module], None] | None = None
    ) -> None:
        """With what `current` and `canary.json` name; `spoil` is done to the latter's weights on
        the server alone."""
        live = versions.latest(self.root) or 1
        folder = (
            versions.open_version(self.root, live)
            if versions.versions(self.root)
            else self.config.draft
        )
        writer = BufferWriter(self.config.buffer, flush_s=60.0, flush_records=10**6)
        drafter = checkpoint.load(folder, self.target)
        engine = build_engine(
            self.target,
            drafter,
            EngineConfig(k=3, seed=seed, compile="off"),
            sink=writer,
            draft_version=str(live),
        )
        if (canary := read_canary(self.root)) is not None:
            tried = versions.open_version(self.root, canary.version)
            if spoil is not None:
                module = checkpoint.load(tried, self.target)
                spoil(module)
                tried = self.root.parent / "spoilt"
                checkpoint.save(module, tried, self.target)
            engine.drafts.prepare(str(tried), str(canary.version), draft=CANARY)
            engine.drafts.router.canary_share = canary.share
            engine.step()
        prompts = torch.randint(
            3, 288, (count, 6), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        engine.generate(prompts, SAMPLING, text=False)
        writer.close()

    def decisions(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in versions.read_decisions(self.root) if one["decision"] == kind]


@pytest.fixture
def tried(tmp_path: Path, tiny_target: Callable[..., str]) -> Site:
    """Version 2 has passed the gate and is on trial."""
    made = Site(tmp_path, tiny_target("llama"), "mtp", MtpOptions())
    made.serve(60, 0)
    daemon.run(made.config)
    (accepted,) = made.decisions("accept")
    assert accepted["version"] == 2 and accepted["live"] == 1 and accepted["share"] == 0.5
    assert versions.latest(made.root) == 1 and read_canary(made.root) == Canary(2, 0.5)
    return made


@pytest.mark.long
def test_a_version_that_holds_on_its_share_is_promoted(tried: Site) -> None:
    tried.serve(10, 1)  # fewer than a trial takes, however their ids fall
    daemon.run(tried.config)
    assert read_canary(tried.root) == Canary(2, 0.5), (
        "so few decide nothing, and the learner was stopped meanwhile"
    )
    tried.serve(40, 2)
    daemon.run(tried.config)
    (promoted,) = tried.decisions("promoted")
    assert (promoted["version"], promoted["live"]) == (2, 1)
    # All that it drafted for, before the learner was stopped and after: server and learner agree on
    # whose turn it was.
    records = BufferReader(tried.config.buffer).read(max_records=10**6).records
    assert (
        promoted["requests"] == len({one.request for one in records if one.draft_version == "2"})
        and promoted["missed"] == 0
    )
    assert versions.latest(tried.root) == 2 and tried.decisions("rolled back") == []
    # What was learned meanwhile may be the next to be tried.
    assert read_canary(tried.root) in (None, Canary(3, 0.5))


def test_a_version_that_is_served_wrongly_is_taken_back_before_all_get_it(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    """The target drafts for itself in both versions, so that held-out traffic finds nothing; what
    runs as the second is noise."""
    path = tiny_target("llama")
    made = Site(tmp_path, path, "draft-lm", DraftLmOptions(init=path))
    held = replace(made.config, gate=replace(made.config.gate, every=1000))
    daemon.run(held)
    draft = checkpoint.load(tmp_path / "draft", made.target)
    assert versions.publish(
        made.root, lambda folder: checkpoint.save(draft, folder, made.target), family="draft-lm",
        target={}, parent=1,
        data_range={}, gate={}, live=False,
    ) == 2  # fmt: skip
    write_canary(made.root, Canary(2, 0.5))

    def spoil(module: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()

    made.serve(40, 1, spoil=spoil)
    daemon.run(held)
    (back,) = made.decisions("rolled back")
    assert (back["left"], back["version"]) == (2, 1) and back["acceptance"] < back[
        "acceptance_elsewhere"
    ] - 0.3
    assert back["worse_evidence"] >= 1 / made.config.gate.error and made.decisions("promoted") == []
    assert versions.latest(made.root) == 1 and read_canary(made.root) is None


@pytest.mark.long
def test_a_trial_ends_with_its_file_and_with_the_version_it_was_compared_with(tried: Site) -> None:
    (tried.root / "canary.json").unlink()
    held = replace(tried.config, gate=replace(tried.config.gate, every=1000))
    daemon.run(held)
    assert read_canary(tried.root) is None and versions.latest(tried.root) == 1
    # Put on trial by hand, as after a learner that was killed between this file and its own state.
    write_canary(tried.root, Canary(2, 0.25))
    daemon.run(held)
    assert read_canary(tried.root) == Canary(2, 0.25)
    versions.promote(tried.root, 2)
    daemon.run(held)
    assert read_canary(tried.root) is None and versions.latest(tried.root) == 2
