"""The engine's counters as Prometheus metrics: under vLLM's names, which dashboards and load
generators read, and under ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from draftsmith.drafters.weights import TellsReads
from draftsmith.kernels.acceptance import label_of
from draftsmith.record import SinkCounts
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.stats import MAX_PAUSES


class EngineCollector(Collector):
    """Reads the engine's plain counters when scraped, so that counting costs the rounds nothing."""

    def __init__(self, engine: EngineCore, model: str):
        self.engine, self.model = engine, model

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._serving()
        yield from self._acceptance()
        yield from self._rounds()
        yield from self._swaps()
        yield from self._graphs()
        yield from self._sizes()

    def _speculation(self) -> Iterator[Metric]:
        stats = self.engine.stats
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds that drafted.", stats.num_drafts)
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.num_draft_tokens
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Accepted drafted tokens.",
            stats.num_accepted_tokens,
        )
        yield self._by_position(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted by draft position.",
            stats.offered,
            stats.accepted,
        )

    def _serving(self) -> Iterator[Metric]:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        yield self._gauge(
            "vllm:num_requests_running", "Requests in the batch.", len(scheduler.running)
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests in the queue.", len(scheduler.waiting)
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of blocks in use.", scheduler.blocks.usage
        )
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        yield self._counter(
            "vllm:generation_tokens", "Generated tokens.", stats.num_generation_tokens
        )
        yield self._counter(
            "vllm:num_preemptions",
            "Requests put back for lack of blocks.",
            scheduler.num_preemptions,
        )
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Of those, tokens found there.", stats.prefix_cache_hits
        )
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=["model_name", "finished_reason"]
        )
        for reason in (
            FinishReason.STOP,
            FinishReason.LENGTH,
            FinishReason.ABORT,
            FinishReason.ERROR,
        ):
            finished.add_metric([self.model, reason.value], stats.finished[reason.value])
        yield finished
        cache = InfoMetricFamily("vllm:cache_config", "The paged pool.", labels=["model_name"])
        blocks = {
            "block_size": str(scheduler.blocks.block_size),
            "num_gpu_blocks": str(scheduler.blocks.num_usable),
        }
        cache.add_metric([self.model], blocks)
        yield cache

    def _acceptance(self) -> Iterator[Metric]:
        """Counters behind alpha_i (accepted over reached) and tau (committed over drafting rounds),
        by version."""
        stats = self.engine.stats
        yield self._by_position(
            "draftsmith_offered",
            "Draft tokens put before the target.",
            stats.offered,
            stats.offered,
        )
        reached = self._of_versions(
            "draftsmith_reached", "Of those, tokens whose prefix was kept.", "position"
        )
        accepted = self._of_versions("draftsmith_accepted", "Of those, tokens kept.", "position")
        rounds = self._of_versions(
            "draftsmith_drafting_rounds", "Rounds of a request that drafted."
        )
        committed = self._of_versions(
            "draftsmith_committed", "Tokens that these rounds committed, after stop trimming."
        )
        for version, counting in stats.by_version.items():
            counts, labels = counting.copy(), [self.model, version]
            for position, each in enumerate(zip(counts.offered, counts.accepted)):
                for family, count in zip((reached, accepted), each):
                    family.add_metric([*labels, str(position)], count)
            rounds.add_metric(labels, counts.rounds)
            committed.add_metric(labels, counts.num_committed)
        yield from (reached, accepted, rounds, committed, self._wasted())
        yield from self._by_context()

    def _by_context(self) -> Iterator[Metric]:
        """The same counters by the tokens before the round, over all versions and positions."""
        texts = {
            "rounds": "Rounds of a request that drafted",
            "committed": "Tokens that these rounds committed",
            "reached": "Draft tokens whose prefix was kept",
            "accepted": "Of those, tokens kept",
        }
        families = {
            name: CounterMetricFamily(
                f"draftsmith_context_{name}",
                f"{text}, by the number of tokens before the round.",
                labels=["model_name", "context"],
            )
            for name, text in texts.items()
        }
        for bucket, counting in self.engine.stats.by_context.items():
            counts, labels = counting.copy(), [self.model, label_of(bucket)]
            families["rounds"].add_metric(labels, counts.rounds)
            families["committed"].add_metric(labels, counts.num_committed)
            families["reached"].add_metric(labels, sum(counts.offered))
            families["accepted"].add_metric(labels, sum(counts.accepted))
        yield from families.values()

    def _wasted(self) -> Metric:
        """Draft tokens that the target verified but that were not committed."""
        stats = self.engine.stats
        kept = sum(stats.acceptance.accepted)
        causes = {
            "rejected": stats.num_draft_tokens - kept,
            "trimmed": kept - stats.num_accepted_tokens,
            # No more tokens of a tree than its depth could have been accepted.
            "branches": max(0, stats.num_tree_nodes - stats.num_draft_tokens),
        }
        return self._labelled(
            "draftsmith_wasted_draft_tokens",
            "Draft tokens not committed, by cause.",
            "cause",
            causes,
        )

    def _rounds(self) -> Iterator[Metric]:
        stats = self.engine.stats
        running = Counter(each.drafting for each in list(self.engine.scheduler.running))
        drafting = GaugeMetricFamily(
            "draftsmith_requests_drafting",
            "Requests in the batch by the state of their drafting.",
            labels=["model_name", "state"],
        )
        for state in ("on", "off"):
            drafting.add_metric([self.model, state], running[state])
        yield drafting
        yield self._counter("draftsmith_rounds", "Engine rounds.", stats.num_rounds)
        by_k = {str(k): count for k, count in sorted(self.engine.stats.rounds_by_k.items())}
        yield self._labelled(
            "draftsmith_rounds_by_k",
            "Engine rounds that decided, by the k they were planned with.",
            "k",
            by_k,
        )
        yield self._gauge(
            "draftsmith_adaptive",
            "1 where --k auto chooses how much is drafted.",
            float(self.engine.config.adaptive),
        )
        yield self._labelled(
            "draftsmith_time_seconds", "Where rounds spend their time.", "phase", stats.time_s
        )
        yield self._labelled(
            "draftsmith_fallbacks", "Drafting failures by cause.", "cause", stats.fallbacks
        )
        yield self._counter(
            "draftsmith_records",
            "Round records handed to the sink.",
            self.engine.recorder.num_records,
        )
        sink = self.engine.recorder.sink
        counts = SinkCounts() if sink is None else sink.counts
        for name, number, text in (
            ("written", counts.written, "Round records in the buffer."),
            ("dropped", counts.dropped, "Round records that were dropped for lack of room."),
            ("lost", counts.lost, "Round records that a killed writer had not written yet."),
        ):
            yield self._counter(f"draftsmith_records_{name}", text, number)
        yield self._counter(
            "draftsmith_requests_untapped",
            "Recorded requests whose hidden states have a hole, so that a draft that reads them "
            "cannot learn from the rest without the target.",
            self.engine.recorder.num_untapped,
        )
        text = "Of sampled requests with a seed, which are neither learned from nor measured: "
        yield self._counter(
            "draftsmith_seeded_requests", f"{text}requests that ended.", stats.num_seeded_requests
        )
        yield self._counter(
            "draftsmith_seeded_tokens", f"{text}generated tokens.", stats.num_seeded_tokens
        )

    def _swaps(self) -> Iterator[Metric]:
        stats = self.engine.stats
        versions = GaugeMetricFamily(
            "draftsmith_draft_version",
            "1 for the version of the served draft.",
            labels=["model_name", "version"],
        )
        if self.engine.drafter is not None:
            versions.add_metric([self.model, stats.draft_version], 1)
        yield versions
        text = "1 while the draft, made for other weights of the target, drafts seldom."
        quarantined = self.engine.draft.quarantined
        yield self._gauge("draftsmith_draft_quarantined", text, float(quarantined))
        yield self._counter("draftsmith_swaps", "Draft versions swapped in.", stats.num_swaps)
        yield self._counter(
            "draftsmith_swaps_refused", "Draft versions refused.", stats.num_swaps_refused
        )
        pauses = stats.swap_pauses_s or [0.0]
        yield self._gauge("draftsmith_swap_pause_seconds", "Pause of the latest swap.", pauses[-1])
        yield self._gauge(
            "draftsmith_swap_pause_seconds_p99",
            f"Pause that 99 of 100 of the latest {MAX_PAUSES} swaps stayed within.",
            sorted(pauses)[math.ceil(0.99 * len(pauses)) - 1],
        )
        yield self._gauge(
            "draftsmith_swap_pause_seconds_max",
            "Longest pause of a swap.",
            stats.longest_swap_pause_s,
        )

    def _graphs(self) -> Iterator[Metric]:
        held = {"target": self.engine.runner.graphs, "draft": self.engine.draft_graphs}
        text = "CUDA graphs, of the target's passes and of draft steps; none on a CPU."
        family = GaugeMetricFamily("draftsmith_graphs", text, labels=["model_name", "what"])
        for what, graphs in held.items():
            family.add_metric([self.model, what], 0 if graphs is None else graphs.num_graphs)
        yield family
        yield self._gauge(
            "draftsmith_graphs_broken",
            "1 when passes or draft steps could not be captured as CUDA graphs and run without.",
            float(any(graphs is not None and graphs.broken for graphs in held.values())),
        )

    def _sizes(self) -> Iterator[Metric]:
        """Weights read per step, which bound its time by memory bandwidth. With suffix decoding
        beside a draft the bytes of a proposal depend on its text, and are left out."""
        target, drafter = self.engine.target, self.engine.drafter
        text = (
            "Weights read by a target pass; by a proposal, however long, and besides by each of "
            "its tokens."
        )
        family = GaugeMetricFamily("draftsmith_step_bytes", text, labels=["model_name", "step"])
        family.add_metric([self.model, "target_pass"], target.pass_bytes())
        if isinstance(drafter, TellsReads):
            for step, count in drafter.read_bytes()._asdict().items():
                family.add_metric([self.model, step], count)
        yield family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _by_position(
        self, name: str, text: str, positions: Iterable[int], values: Mapping[int, int]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", "position"])
        for position in sorted(positions):
            family.add_metric([self.model, str(position)], values.get(position, 0))
        return family

    def _of_versions(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["model_name", "draft_version", *labels])

    def _labelled(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, value in dict(values).items():
            family.add_metric([self.model, key], value)
        return family
