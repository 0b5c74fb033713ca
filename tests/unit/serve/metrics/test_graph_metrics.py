from __future__ import annotations

from types import SimpleNamespace

from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.metrics.engine import EngineCollector


def gauges(engine: EngineCore) -> dict[str, float]:
    """Of CUDA graphs."""
    return {
        sample.labels.get("what", "broken"): sample.value
        for family in EngineCollector(engine, "model").collect()
        for sample in family.samples
        if sample.name.startswith("draftsmith_graphs")
    }


def test_graphs_of_target_and_drafts_and_whether_any_could_not_be_captured(target):
    engine = build_engine(target, None, EngineConfig(compile="off"))
    assert gauges(engine) == {"target": 0, "draft": 0, "broken": 0}  # on a CPU
    engine.runner.graphs = SimpleNamespace(num_graphs=25, broken=False)
    engine.draft_graphs = SimpleNamespace(num_graphs=7, broken=False)
    assert gauges(engine) == {"target": 25, "draft": 7, "broken": 0}
    engine.draft_graphs.broken = True
    assert gauges(engine) == {"target": 25, "draft": 7, "broken": 1}
