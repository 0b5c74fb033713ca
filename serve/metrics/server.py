"""`/metrics`: the engine's counters, and the latencies and classes of finished requests."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.metrics.engine import EngineCollector
from draftsmith.serve.requests.request import Request

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
FEW = (0, 1, 2, 5, 10, 20, 50, 100)
LATENCIES = {
    "vllm:time_to_first_token_seconds": "Arrival to first token.",
    "vllm:inter_token_latency_seconds": "Time between two rounds that gave a request tokens.",
    "vllm:request_time_per_output_token_seconds": (
        "Mean time of the tokens after the first, by request."
    ),
    "vllm:e2e_request_latency_seconds": "Arrival to last token.",
    "vllm:request_queue_time_seconds": "Arrival to admission.",
    "vllm:request_inference_time_seconds": "Admission to last token.",
    "vllm:request_prefill_time_seconds": "Admission to first token.",
    "vllm:request_decode_time_seconds": "First token to last.",
}
SIZES = {
    "vllm:request_prompt_tokens": "Prompt tokens of a request.",
    "vllm:request_generation_tokens": "Tokens of an answer.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest of a prompt's answers.",
    "vllm:request_params_max_tokens": "Most tokens that a request allowed.",
}
NUMBERS = {
    "vllm:request_params_n": "Answers asked for a prompt.",
    "vllm:request_num_preemptions": "How often a request was put back for lack of blocks.",
}
# Of finished requests, by their class.
CLASS_COUNTERS: dict[str, tuple[str, Callable[[Request], int]]] = {
    "draftsmith_class_requests": ("Finished requests.", lambda request: 1),
    "draftsmith_class_generation_tokens": ("Their tokens.", lambda request: request.num_output),
    "draftsmith_class_target_passes": (
        "Target passes that gave these; tokens divided by passes is tau.",
        lambda request: request.speculation.num_passes,
    ),
    "draftsmith_class_draft_tokens": (
        "Draft tokens put before the target.",
        lambda request: sum(request.speculation.offered),
    ),
    "draftsmith_class_accepted_tokens": (
        "Of those, tokens kept.",
        lambda request: sum(request.speculation.accepted),
    ),
}
MAX_CLASSES = 32  # a label that a client chooses must not grow the exposition without bound
OTHER_CLASSES = "other"


class ServerMetrics:
    """One registry per server, so that several servers of one process do not share counts."""

    def __init__(self, engine: EngineCore, model: str):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model))
        self._model = model
        histograms = {
            name: Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            for family, buckets in ((LATENCIES, SECONDS), (SIZES, COUNTS), (NUMBERS, FEW))
            for name, text in family.items()
        }
        self._classes = {
            name: Counter(name, text, ["model_name", "request_class"], registry=self.registry)
            for name, (text, _) in CLASS_COUNTERS.items()
        }
        self._responses = Counter(
            "draftsmith_responses",
            "Answers of the generating endpoints, by HTTP status; 499: the client left first.",
            ["model_name", "status"],
            registry=self.registry,
        )
        self._class_names: set[str] = set()
        self.by_class: dict[str, AcceptanceCounts] = {}  # of finished requests
        # Labelled at once, so that the first scrape lists them, empty.
        self._of_model = {name: histogram.labels(model) for name, histogram in histograms.items()}

    def finished(self, request: Request, *, num_choices: int = 1) -> None:
        """Observe latencies and sizes of a request that gave at least one token; `num_choices` were
        asked for its prompt."""
        self._count_class(request)
        times = request.times
        if times.first_token_s is None or times.finished_s is None or times.admitted_s is None:
            return
        first_s, last_s = times.first_token_s, times.last_token_s or times.first_token_s
        observed = {
            "vllm:time_to_first_token_seconds": first_s - times.arrival_s,
            "vllm:e2e_request_latency_seconds": last_s - times.arrival_s,
            "vllm:request_queue_time_seconds": times.admitted_s - times.arrival_s,
            "vllm:request_inference_time_seconds": last_s - times.admitted_s,
            "vllm:request_prefill_time_seconds": first_s - times.admitted_s,
            "vllm:request_decode_time_seconds": last_s - first_s,
            "vllm:request_prompt_tokens": request.num_prompt,
            "vllm:request_generation_tokens": request.num_output,
            "vllm:request_params_max_tokens": request.max_tokens,
            "vllm:request_params_n": num_choices,
            "vllm:request_num_preemptions": request.num_preemptions,
        }
        if request.num_output > 1:
            mean_s = (last_s - first_s) / (request.num_output - 1)
            observed["vllm:request_time_per_output_token_seconds"] = mean_s
        for name, value in observed.items():
            self._observe(name, value)

    def answered(self, lengths: list[int], num_choices: int) -> None:
        """Observe the `lengths` of all answers of one HTTP request, choices of one prompt being
        neighbours."""
        for begin in range(0, len(lengths), num_choices):
            self._observe(
                "vllm:request_max_num_generation_tokens", max(lengths[begin : begin + num_choices])
            )

    def responded(self, status: int) -> None:
        self._responses.labels(self._model, str(status)).inc()

    def updated(self, seconds: float) -> None:
        """Observe the time between two updates of a streaming request; a round may bring several
        tokens."""
        self._observe("vllm:inter_token_latency_seconds", seconds)

    def _count_class(self, request: Request) -> None:
        label = self._class_label(request.options.acceptance_class)
        stats = request.speculation
        for name, (_, count) in CLASS_COUNTERS.items():
            self._classes[name].labels(self._model, label).inc(count(request))
        # A stop that trimmed a round leaves the fate of the drafts behind it unknown.
        known = [
            kept if committed <= kept else offered
            for offered, kept, committed in zip(stats.offered, stats.accepted, stats.committed)
        ]
        self.by_class.setdefault(label, AcceptanceCounts()).add(
            known, stats.accepted, stats.committed
        )

    def _class_label(self, name: str) -> str:
        if name not in self._class_names:
            if len(self._class_names) >= MAX_CLASSES:
                return OTHER_CLASSES
            self._class_names.add(name)
        return name

    def _observe(self, name: str, value: float) -> None:
        self._of_model[name].observe(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
