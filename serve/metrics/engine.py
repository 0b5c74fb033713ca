"""The engine's counters as Prometheus metrics: under vLLM's names, which dashboards and load
generators read, and under ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from draftsmith.drafters.weights import TellsReads
from draftsmith.kernels.acceptance import label_of
from draftsmith.record import SinkCounts
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.stats import MAX_PAUSES

Values = Mapping[str, float] | Mapping[tuple[str, str], float]  # by the values of the labels


class EngineCollector(Collector):
    """Reads the engine's plain counters when scraped, so that counting costs the rounds nothing."""

    def __init__(self, engine: EngineCore, model: str):
        self.engine, self.model = engine, model

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._serving()
        yield from self._acceptance()
        yield from self._rounds()
        yield from self._records()
        yield from self._swaps()
        yield from self._graphs()
        yield self._sizes()

    def _speculation(self) -> Iterator[Metric]:
        stats, name = self.engine.stats, "vllm:spec_decode_num"
        yield self._counter(f"{name}_drafts", "Rounds that drafted.", stats.num_drafts)
        yield self._counter(f"{name}_draft_tokens", "Drafted tokens.", stats.num_draft_tokens)
        text = "Accepted drafted tokens."
        yield self._counter(f"{name}_accepted_tokens", text, stats.num_accepted_tokens)
        by_position = {str(at): stats.accepted[at] for at in sorted(stats.offered)}
        text = "Accepted by draft position."
        yield self._counter(f"{name}_accepted_tokens_per_pos", text, by_position, "position")

    def _serving(self) -> Iterator[Metric]:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        running, waiting, blocks = scheduler.running, scheduler.waiting, scheduler.blocks
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", len(running))
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", len(waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of blocks in use.", blocks.usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        generated = stats.num_generation_tokens
        yield self._counter("vllm:generation_tokens", "Generated tokens.", generated)
        text = "Requests put back for lack of blocks."
        yield self._counter("vllm:num_preemptions", text, scheduler.num_preemptions)
        text = "Tokens looked up in the prefix cache."
        yield self._counter("vllm:prefix_cache_queries", text, stats.prefix_cache_queries)
        text = "Of those, tokens found there."
        yield self._counter("vllm:prefix_cache_hits", text, stats.prefix_cache_hits)
        ended = {reason.value: stats.finished[reason.value] for reason in FinishReason}
        yield self._counter("vllm:request_success", "Finished requests.", ended, "finished_reason")
        cache = InfoMetricFamily("vllm:cache_config", "The paged pool.", labels=["model_name"])
        sizes = {"block_size": str(blocks.block_size), "num_gpu_blocks": str(blocks.num_usable)}
        cache.add_metric([self.model], sizes)
        yield cache

    def _acceptance(self) -> Iterator[Metric]:
        """Counters behind alpha_i (accepted over reached) and tau (committed over drafting rounds),
        by version; then by the tokens before the round, over all versions and positions."""
        stats, labels = self.engine.stats, ("draft_version", "position")
        offered = {str(at): stats.offered[at] for at in sorted(stats.offered)}
        text = "Draft tokens put before the target."
        yield self._counter("draftsmith_offered", text, offered, "position")
        counts = {version: one.copy() for version, one in stats.by_version.items()}
        positions = [(name, at) for name, one in counts.items() for at in range(len(one.offered))]
        reached = {(name, str(at)): counts[name].offered[at] for name, at in positions}
        text = "Of those, tokens whose prefix was kept."
        yield self._counter("draftsmith_reached", text, reached, *labels)
        accepted = {(name, str(at)): counts[name].accepted[at] for name, at in positions}
        yield self._counter("draftsmith_accepted", "Of those, tokens kept.", accepted, *labels)
        rounds = {name: one.rounds for name, one in counts.items()}
        text = "Rounds of a request that drafted."
        yield self._counter("draftsmith_drafting_rounds", text, rounds, "draft_version")
        committed = {name: one.num_committed for name, one in counts.items()}
        text = "Tokens that these rounds committed, after stop trimming."
        yield self._counter("draftsmith_committed", text, committed, "draft_version")
        kept = sum(stats.acceptance.accepted)
        wasted = {
            "rejected": stats.num_draft_tokens - kept,
            "trimmed": kept - stats.num_accepted_tokens,
            # No more tokens of a tree than its depth could have been accepted.
            "branches": max(0, stats.num_tree_nodes - stats.num_draft_tokens),
        }
        text = "Draft tokens not committed, by cause."
        yield self._counter("draftsmith_wasted_draft_tokens", text, wasted, "cause")
        counts = {label_of(bucket): one.copy() for bucket, one in stats.by_context.items()}
        name, before = "draftsmith_context", "by the number of tokens before the round."
        rounds = {label: one.rounds for label, one in counts.items()}
        text = f"Rounds of a request that drafted, {before}"
        yield self._counter(f"{name}_rounds", text, rounds, "context")
        committed = {label: one.num_committed for label, one in counts.items()}
        text = f"Tokens that these rounds committed, {before}"
        yield self._counter(f"{name}_committed", text, committed, "context")
        reached_in_all = {label: sum(one.offered) for label, one in counts.items()}
        text = f"Draft tokens whose prefix was kept, {before}"
        yield self._counter(f"{name}_reached", text, reached_in_all, "context")
        accepted_in_all = {label: sum(one.accepted) for label, one in counts.items()}
        text = f"Of those, tokens kept, {before}"
        yield self._counter(f"{name}_accepted", text, accepted_in_all, "context")

    def _rounds(self) -> Iterator[Metric]:
        stats = self.engine.stats
        running = Counter(each.drafting for each in list(self.engine.scheduler.running))
        text = "Requests in the batch by the state of their drafting."
        drafting = {state: running[state] for state in ("on", "off")}
        yield self._gauge("draftsmith_requests_drafting", text, drafting, "state")
        yield self._counter("draftsmith_rounds", "Engine rounds.", stats.num_rounds)
        by_k = {str(k): count for k, count in sorted(stats.rounds_by_k.items())}
        text = "Engine rounds that decided, by the k they were planned with."
        yield self._counter("draftsmith_rounds_by_k", text, by_k, "k")
        text = "1 where --k auto chooses how much is drafted."
        yield self._gauge("draftsmith_adaptive", text, float(self.engine.config.adaptive))
        text = "Where rounds spend their time."
        yield self._counter("draftsmith_time_seconds", text, stats.time_s, "phase")
        text = "Drafting failures by cause."
        yield self._counter("draftsmith_fallbacks", text, stats.fallbacks, "cause")

    def _records(self) -> Iterator[Metric]:
        stats, recorder = self.engine.stats, self.engine.recorder
        text = "Round records handed to the sink."
        yield self._counter("draftsmith_records", text, recorder.num_records)
        counts = SinkCounts() if recorder.sink is None else recorder.sink.counts
        text = "Round records in the buffer."
        yield self._counter("draftsmith_records_written", text, counts.written)
        text = "Round records that were dropped for lack of room."
        yield self._counter("draftsmith_records_dropped", text, counts.dropped)
        text = "Round records that a killed writer had not written yet."
        yield self._counter("draftsmith_records_lost", text, counts.lost)
        text = (
            "Recorded requests whose hidden states have a hole, so that a draft that reads them "
            "cannot learn from the rest without the target."
        )
        yield self._counter("draftsmith_requests_untapped", text, recorder.num_untapped)
        text = "Of sampled requests with a seed, which are neither learned from nor measured: "
        ended, tokens = f"{text}requests that ended.", f"{text}generated tokens."
        yield self._counter("draftsmith_seeded_requests", ended, stats.num_seeded_requests)
        yield self._counter("draftsmith_seeded_tokens", tokens, stats.num_seeded_tokens)

    def _swaps(self) -> Iterator[Metric]:
        stats = self.engine.stats
        served = {} if self.engine.drafter is None else {stats.draft_version: 1}
        text = "1 for the version of the served draft."
        yield self._gauge("draftsmith_draft_version", text, served, "version")
        text = "1 while the draft, made for other weights of the target, drafts seldom."
        quarantined = float(self.engine.draft.quarantined)
        yield self._gauge("draftsmith_draft_quarantined", text, quarantined)
        yield self._counter("draftsmith_swaps", "Draft versions swapped in.", stats.num_swaps)
        refused = stats.num_swaps_refused
        yield self._counter("draftsmith_swaps_refused", "Draft versions refused.", refused)
        pauses, name = stats.swap_pauses_s or [0.0], "draftsmith_swap_pause_seconds"
        yield self._gauge(name, "Pause of the latest swap.", pauses[-1])
        text = f"Pause that 99 of 100 of the latest {MAX_PAUSES} swaps stayed within."
        yield self._gauge(f"{name}_p99", text, sorted(pauses)[math.ceil(0.99 * len(pauses)) - 1])
        yield self._gauge(f"{name}_max", "Longest pause of a swap.", stats.longest_swap_pause_s)

    def _graphs(self) -> Iterator[Metric]:
        graphs = {"target": self.engine.runner.graphs, "draft": self.engine.draft_graphs}
        counts = {what: 0 if one is None else one.num_graphs for what, one in graphs.items()}
        text = "CUDA graphs, of the target's passes and of draft steps; none on a CPU."
        yield self._gauge("draftsmith_graphs", text, counts, "what")
        broken = any(one is not None and one.broken for one in graphs.values())
        text = "1 when passes or draft steps could not be captured as CUDA graphs and run without."
        yield self._gauge("draftsmith_graphs_broken", text, float(broken))

    def _sizes(self) -> Metric:
        """Weights read per step, which bound its time by memory bandwidth. With suffix decoding
        beside a draft the bytes of a proposal depend on its text, and are left out."""
        drafter, sizes = self.engine.drafter, {"target_pass": self.engine.target.pass_bytes()}
        if isinstance(drafter, TellsReads):
            sizes |= drafter.read_bytes()._asdict()
        text = (
            "Weights read by a target pass; by a proposal, however long, and besides by each of "
            "its tokens."
        )
        return self._gauge("draftsmith_step_bytes", text, sizes, "step")

    def _counter(self, name: str, text: str, values: float | Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=["model_name", *labels]), values)

    def _gauge(self, name: str, text: str, values: float | Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=["model_name", *labels]), values)

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: float | Values
    ) -> Metric:
        for key, value in dict(values).items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric([self.model, *([key] if isinstance(key, str) else key)], value)
        return family
