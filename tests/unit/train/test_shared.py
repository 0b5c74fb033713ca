"""Several families trained at once: each draft is what it is alone, to the bit, and the target runs
once a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.drafters.options import DraftLmOptions, LoraOptions
from draftsmith.train import shared
from draftsmith.train.checkpoints import RunFolder
from draftsmith.train.command import run
from draftsmith.train.config import TrainConfig, UnrollConfig
from draftsmith.train.objective.teacher import SharedSource

FAMILIES = ("eagle3", "draft-lm")
STEPS, ACCUMULATE = 3, 2


@pytest.fixture
def config(configure: Callable[..., TrainConfig], tiny_target: Callable[..., str]) -> TrainConfig:
    """A draft without random numbers beside one with dropout."""
    return configure(
        steps=STEPS,
        accumulate=ACCUMULATE,
        batch_size=4,
        log_every=1,
        save_every=1,
        more_families=FAMILIES[1:],
        draft_lm=DraftLmOptions(
            init=tiny_target("llama", 1), lora=LoraOptions(rank=2, dropout=0.5)
        ),
        unroll=UnrollConfig(steps=2),
    )


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[SharedSource]:
    """The shared sources that runs make."""
    made: list[SharedSource] = []

    def note(*arguments: object) -> SharedSource:
        made.append(SharedSource(*arguments))
        return made[-1]

    monkeypatch.setattr(shared, "SharedSource", note)
    return made


def drafts(config: TrainConfig) -> dict[str, list]:
    """Metrics but for the clock, and weights, of each family."""
    found = {}
    for family in (config.family, *config.more_families):
        folder = Path(config.out) / family
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == STEPS
        # A LoRA draft is saved merged, in the layout of its model.
        weights = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
        assert weights
        found[family] = [
            [{key: line[key] for key in line if key != "elapsed_s"} for line in lines],
            weights,
        ]
    return found


@pytest.mark.long
def test_each_draft_is_the_one_trained_alone_also_after_a_kill(
    config: TrainConfig, sources: list[SharedSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config)
    assert not sources, "one after the other"
    alone = drafts(config)
    together = replace(config, shared_target=True, out=f"{config.out}-together")
    run(together)
    assert drafts(together) == alone
    assert [source.num_reads for source in sources] == [STEPS * ACCUMULATE]

    killed = replace(together, out=f"{config.out}-killed")
    complete = RunFolder.complete

    def kill(self: RunFolder, **record: object) -> None:
        if self.out.name == "draft-lm" and record["step"] == 1:
            raise KeyboardInterrupt
        complete(self, **record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "complete", kill)
        with pytest.raises(KeyboardInterrupt):
            run(killed)
    saved = {family: RunFolder(Path(killed.out) / family).newest() for family in FAMILIES}
    assert saved["eagle3"] is not None and saved["draft-lm"] is None, (
        "they go on from different steps"
    )
    run(killed)
    assert drafts(killed) == alone
    # The one that lost its checkpoint catches up alone, then every pass is shared.
    assert sources[-1].num_reads == STEPS * ACCUMULATE
