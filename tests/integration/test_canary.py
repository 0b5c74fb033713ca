"""A version on trial from the gate to its end: real drafts, a real server's routing, and a learner
that is stopped in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.distill import command as daemon
from draftsmith.distill.buffer.buffer import BufferReader
from draftsmith.distill.config import GateConfig
from draftsmith.drafters import checkpoint, versions
from draftsmith.drafters.versions import Canary, read_canary, write_canary
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import CANARY
from tests.integration.conftest import LEARN, Loop

LEARNING = replace(LEARN, steps=40)
JUDGING = GateConfig(every=1, held_out=0.3, canary=0.5, canary_requests=12)


class Site(Loop):
    """A server and a learner that take turns."""

    def __init__(self, root: Path, target: str, family: str):
        super().__init__(root, target, family, learn=LEARNING, gate=JUDGING)

    def serve(
        self, count: int, seed: int, *, spoil: Callable[[torch.nn.Module], None] | None = None
    ) -> None:
        """With what `current` and `canary.json` name; `spoil` is done to the latter's weights on
        the server alone."""
        live = versions.latest(self.versions) or 1
        folder: str | Path = self.config.draft
        if versions.versions(self.versions):
            folder = versions.open_version(self.versions, live)

        def prepare(engine: EngineCore) -> None:
            if (canary := read_canary(self.versions)) is None:
                return
            tried = versions.open_version(self.versions, canary.version)
            if spoil is not None:
                module = checkpoint.load(tried, self.target)
                spoil(module)
                tried = self.root / "spoilt"
                checkpoint.save(module, tried, self.target)
            engine.drafts.prepare(str(tried), str(canary.version), draft=CANARY)
            engine.drafts.canary_share = canary.share
            engine.step()

        self.record(folder, self.prompts(count, seed), seed=seed, version=live, prepare=prepare)


@pytest.fixture
def tried(tmp_path: Path, tiny_target: Callable[..., str]) -> Site:
    """Version 2 has passed the gate and is on trial."""
    made = Site(tmp_path, tiny_target("llama"), "mtp")
    made.serve(60, 0)
    daemon.run(made.config)
    (accepted,) = made.decisions("accept")
    assert accepted["version"] == 2 and accepted["live"] == 1 and accepted["share"] == 0.5
    assert versions.latest(made.versions) == 1 and read_canary(made.versions) == Canary(2, 0.5)
    return made


@pytest.mark.long
def test_a_version_that_holds_on_its_share_is_promoted(tried: Site) -> None:
    tried.serve(10, 1)  # fewer than a trial takes, however their ids fall
    daemon.run(tried.config)
    assert read_canary(tried.versions) == Canary(2, 0.5), (
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
    assert versions.latest(tried.versions) == 2 and tried.decisions("rolled back") == []
    # What was learned meanwhile may be the next to be tried.
    assert read_canary(tried.versions) in (None, Canary(3, 0.5))


def test_a_version_that_is_served_wrongly_is_taken_back_before_all_get_it(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    """The target drafts for itself in both versions, so that held-out traffic finds nothing; what
    runs as the second is noise."""
    made = Site(tmp_path, tiny_target("llama"), "perfect")
    held = replace(made.config, gate=replace(made.config.gate, every=1000))
    daemon.run(held)
    draft = checkpoint.load(tmp_path / "draft", made.target)
    assert made.publish(draft, live=False) == 2
    write_canary(made.versions, Canary(2, 0.5))

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
    assert versions.latest(made.versions) == 1 and read_canary(made.versions) is None


@pytest.mark.long
def test_a_trial_ends_with_its_file_and_with_the_version_it_was_compared_with(tried: Site) -> None:
    (tried.versions / "canary.json").unlink()
    held = replace(tried.config, gate=replace(tried.config.gate, every=1000))
    daemon.run(held)
    assert read_canary(tried.versions) is None and versions.latest(tried.versions) == 1
    # Put on trial by hand, as after a learner that was killed between this file and its own state.
    write_canary(tried.versions, Canary(2, 0.25))
    daemon.run(held)
    assert read_canary(tried.versions) == Canary(2, 0.25)
    versions.promote(tried.versions, 2)
    daemon.run(held)
    assert read_canary(tried.versions) is None and versions.latest(tried.versions) == 2
