"""`/metrics`: the engine's counters under vLLM's names, which dashboards and load generators know, and under our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftsmith.serve.engine import Engine
from draftsmith.serve.request import FinishReason, Request

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Arrival to first token.",
    "vllm:inter_token_latency_seconds": "Time between two rounds that gave a request tokens.",
    "vllm:request_time_per_output_token_seconds": "Mean time of the tokens after the first, by request.",
    "vllm:e2e_request_latency_seconds": "Arrival to last token.",
    "vllm:request_queue_time_seconds": "Arrival to admission.",
}


class EngineCollector(Collector):
    """Reads the engine's plain counters when asked, so that counting costs the rounds nothing."""

    def __init__(self, engine: Engine, model: str):
        self.engine, self.model = engine, model

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._serving()
        yield from self._ours()

    def _speculation(self) -> Iterator[Metric]:
        stats = self.engine.stats
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds that drafted.", stats.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens.", stats.num_accepted_tokens)
        yield self._by_position(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted by draft position.", stats.offered, stats.accepted
        )

    def _serving(self) -> Iterator[Metric]:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", len(scheduler.waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of blocks in use.", scheduler.blocks.usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", stats.num_generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests put back for lack of blocks.", scheduler.num_preemptions)
        finished = CounterMetricFamily("vllm:request_success", "Finished requests.", labels=["model_name", "finished_reason"])
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR):
            finished.add_metric([self.model, reason.value], stats.finished[reason.value])
        yield finished

    def _ours(self) -> Iterator[Metric]:
        stats = self.engine.stats
        counts = stats.acceptance
        yield self._by_position("draftsmith_offered", "Draft tokens put before the target.", stats.offered, stats.offered)
        yield self._by_position(
            "draftsmith_reached", "Of those, tokens whose prefix was kept.", stats.offered, dict(enumerate(counts.offered))
        )
        yield self._by_position("draftsmith_accepted", "Of those, tokens kept.", stats.offered, dict(enumerate(counts.accepted)))
        yield self._counter("draftsmith_committed", "Tokens committed by rounds that drafted.", counts.num_committed)
        yield self._counter("draftsmith_rounds", "Engine rounds.", stats.num_rounds)
        version = GaugeMetricFamily("draftsmith_draft_version", "1 for the draft being served.", labels=["version"])
        version.add_metric([stats.draft_version], 1)
        yield version
        yield self._labelled("draftsmith_time_seconds", "Where rounds spend their time.", "phase", stats.time_s)
        yield self._labelled("draftsmith_fallbacks", "Drafting failures by cause.", "cause", stats.fallbacks)
        yield self._counter("draftsmith_swaps", "Draft versions swapped in.", stats.num_swaps)
        yield self._counter("draftsmith_swaps_refused", "Draft versions refused.", stats.num_swaps_refused)
        yield self._counter("draftsmith_records", "Round records handed to the sink.", self.engine.recorder.num_records)
        pauses = list(stats.swap_pauses_s)
        yield self._gauge("draftsmith_swap_pause_seconds", "Pause of the latest swap.", pauses[-1] if pauses else 0.0)
        yield self._gauge("draftsmith_swap_pause_seconds_max", "Longest pause of a swap.", max(pauses, default=0.0))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _by_position(self, name: str, text: str, positions: Iterable[int], values: dict[int, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", "position"])
        for position in sorted(positions):
            family.add_metric([self.model, str(position)], values.get(position, 0))
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[label])
        for key, value in dict(values).items():
            family.add_metric([key], value)
        return family


class ServerMetrics:
    """One registry a server, so that several servers of one process do not share counts."""

    def __init__(self, engine: Engine, model: str):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model))
        self._model = model
        self._histograms = {
            name: Histogram(name, text, ["model_name"], registry=self.registry, buckets=SECONDS)
            for name, text in HISTOGRAMS.items()
        }

    def finished(self, request: Request) -> None:
        """Latencies of a request that gave at least one token."""
        if request.first_token_s is None or request.finished_s is None or request.admitted_s is None:
            return
        first_s, last_s = request.first_token_s, request.last_token_s or request.first_token_s
        self._observe("vllm:time_to_first_token_seconds", first_s - request.arrival_s)
        self._observe("vllm:e2e_request_latency_seconds", last_s - request.arrival_s)
        self._observe("vllm:request_queue_time_seconds", request.admitted_s - request.arrival_s)
        if request.num_output > 1:
            self._observe("vllm:request_time_per_output_token_seconds", (last_s - first_s) / (request.num_output - 1))

    def updated(self, seconds: float) -> None:
        """Between two updates of a streaming request; a round may bring several tokens."""
        self._observe("vllm:inter_token_latency_seconds", seconds)

    def _observe(self, name: str, seconds: float) -> None:
        self._histograms[name].labels(self._model).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
