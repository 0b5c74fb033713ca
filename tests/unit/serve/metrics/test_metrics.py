from __future__ import annotations

from types import SimpleNamespace

from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.metrics.engine import EngineCollector
from draftsmith.serve.metrics.log_line import lines
from draftsmith.serve.stats import EngineStats, StatsReading

IDLE: dict = {"running": 0, "waiting": 0, "usage": 0.0}


def test_an_idle_server_logs_nothing() -> None:
    stats = EngineStats(num_prompt_tokens=10, num_generation_tokens=20)
    assert lines(StatsReading.of(stats).since(StatsReading.of(stats)), **IDLE) == []


def test_both_lines_in_the_words_of_vllm() -> None:
    stats = EngineStats(num_prompt_tokens=10, num_generation_tokens=20)
    stats.count_round(3, 2, 3, version=None)
    before = StatsReading.of(stats)
    stats.num_prompt_tokens, stats.num_generation_tokens = 110, 270
    stats.prefix_cache_queries, stats.prefix_cache_hits = 200, 50
    kept = {(3, 3): 4, (3, 2): 2, (3, 1): 2, (3, 0): 2, (2, 2): 4, (2, 1): 4, (2, 0): 2}
    for (offered, accepted), times in kept.items():
        for _ in range(times):
            stats.count_round(offered, accepted, accepted + 1, version=None)
    passed = StatsReading.of(stats).since(before)._replace(time_s=10.0)
    serving, speculation = lines(passed, running=3, waiting=1, usage=0.25)
    assert serving == (
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 25.0 "
        "tokens/s, "
        "Running: 3 reqs, Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    # 20 rounds, 50 drafted, 30 accepted; position 2 was offered by 10 rounds only.
    assert speculation == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 3.00 tokens/s, "
        "Drafted throughput: 5.00 tokens/s, Accepted: 30 tokens, Drafted: 50 tokens, "
        "Per-position acceptance rate: 0.800, 0.500, 0.400, Avg Draft acceptance rate: 60.0%"
    )


def test_rounds_that_are_alike_are_counted_at_once_as_they_are_one_by_one() -> None:
    at_once, singly = EngineStats(), EngineStats()
    for shares, version, bucket, times in (
        ((3, 2, 3), "1", 0, 4), ((3, 3, 1), "1", 2, 2), ((1, 0, 1), None, 0, 3),
    ):  # fmt: skip
        at_once.count_round(*shares, version=version, bucket=bucket, times=times)
        for _ in range(times):
            singly.count_round(*shares, version=version, bucket=bucket)
    assert at_once == singly and at_once.num_drafts == 9


def test_no_line_about_drafts_where_there_were_none() -> None:
    stats = EngineStats()
    before = StatsReading.of(stats)
    stats.num_generation_tokens = 5
    assert len(lines(StatsReading.of(stats).since(before), **IDLE)) == 1


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
