"""/metrics of a server that has served: it parses, counters only grow, numbers agree, and the
dashboard finds all it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.kernels import acceptance
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.record import SinkCounts
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.metrics.server import MAX_CLASSES, OTHER_CLASSES
from draftsmith.serve.stats import MAX_VERSIONS, TEXT, EngineStats

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"
PROMPT = [7, 8, 9] * 5
OPTIONS = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
# What dashboards made for vLLM read.
OF_VLLM = [
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total", "num_requests_running", "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_inference_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum",
    "request_params_n_sum",
    "request_params_max_tokens_sum", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "cache_config_info",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable) -> Any:
    server = live_server(target, Suffix(), EngineConfig(k=3, block_size=4))
    for _ in range(2):
        server.complete(PROMPT, **OPTIONS, request_class="prose").raise_for_status()
    # The greedy text goes round in circles, which suffixes foresee: a stop token at the beginning of
    # a round's drafts trims the rest of them. Sampling gets drafts rejected.
    tokens = server.choice(PROMPT, **OPTIONS, return_token_ids=True)["token_ids"]
    assert tokens[-6] != tokens[-5]
    trimmed = {"n": 2, "stop_token_ids": [tokens[-5]]}
    server.complete(PROMPT + tokens[:-6], **OPTIONS, **trimmed).raise_for_status()
    server.complete(PROMPT, **{**OPTIONS, "temperature": 1}, seed=1).raise_for_status()
    assert server.events("/v1/completions", prompt=PROMPT, **OPTIONS)
    return server


def samples(server: Any) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        assert family.documentation and family.type != "unknown"
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def total(found: dict[str, list[Sample]], name: str, **labels: str) -> float:
    return sum(sample.value for sample in found[name] if labels.items() <= sample.labels.items())


def test_what_dashboards_for_vllm_read_is_there_and_names_its_model(server: Any) -> None:
    found = samples(server)
    assert {f"vllm:{name}" for name in OF_VLLM} <= found.keys()
    assert {one.labels["model_name"] for own in found.values() for one in own} == {"tiny"}


def test_traffic_with_a_seed_or_a_class_has_counts_of_its_own(server: Any) -> None:
    found = samples(server)
    assert total(found, "draftsmith_seeded_requests_total") == 1
    assert total(found, "draftsmith_seeded_tokens_total") == OPTIONS["max_tokens"]
    assert total(found, "draftsmith_class_requests_total", request_class="prose") == 2
    assert total(found, "draftsmith_class_generation_tokens_total", request_class="prose") == 80
    passes = total(found, "draftsmith_class_target_passes_total", request_class="prose")
    assert 1 < 80 / passes < 4


def test_what_became_of_records_is_counted(
    server: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted() -> list[float]:
        found = samples(server)
        names = ("written", "dropped", "lost")
        return [total(found, f"draftsmith_records_{name}_total") for name in names]

    assert counted() == [0, 0, 0]
    records.counts = SinkCounts(written=5, dropped=2, lost=1)
    monkeypatch.setattr(server.engine.recorder, "sink", records)
    assert counted() == [5, 2, 1]


def test_counters_only_grow(server: Any) -> None:
    def counters() -> dict[tuple[str, str], float]:
        return {
            (name, json.dumps(sample.labels)): sample.value
            for name, found in samples(server).items()
            for sample in found
            if name.endswith(("_total", "_count", "_sum", "_bucket"))
        }

    before = counters()
    server.complete(PROMPT, **OPTIONS).raise_for_status()
    after = counters()
    assert before.keys() <= after.keys()
    assert all(after[key] >= value for key, value in before.items())
    assert sum(after.values()) > sum(before.values())


def test_the_numbers_agree_with_each_other(server: Any) -> None:
    found = samples(server)
    drafted = total(found, "vllm:spec_decode_num_draft_tokens_total")
    accepted = total(found, "vllm:spec_decode_num_accepted_tokens_total")
    assert total(found, "draftsmith_offered_total") == drafted > accepted > 0
    assert total(found, "draftsmith_wasted_draft_tokens_total") == drafted - accepted
    assert total(found, "draftsmith_drafting_rounds_total") == total(
        found, "vllm:spec_decode_num_drafts_total"
    )
    # A round reaches position i + 1 exactly where it kept position i and had offered one more.
    for position in range(2):
        kept = total(found, "draftsmith_accepted_total", position=str(position))
        assert total(found, "draftsmith_reached_total", position=str(position + 1)) <= kept
    assert total(found, "draftsmith_reached_total", position="0") == total(
        found, "draftsmith_drafting_rounds_total"
    )
    names = ("committed", "drafting_rounds")
    committed, rounds = (total(found, f"draftsmith_{name}_total") for name in names)
    assert rounds <= committed <= total(found, "vllm:generation_tokens_total")
    # The stop token cut accepted tokens off; all of them and a bonus token each time would have
    # been more.
    assert total(found, "draftsmith_wasted_draft_tokens_total", cause="trimmed") > 0
    assert committed <= rounds + accepted


def test_rounds_are_counted_by_the_tokens_before_them(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny target ends at 256 tokens.
    monkeypatch.setattr(acceptance, "FIRST", 32)

    def rounds() -> dict[str, float]:
        family = samples(server)["draftsmith_context_rounds_total"]
        return {sample.labels["context"]: sample.value for sample in family}

    options, before = OPTIONS | {"max_tokens": 6}, rounds()
    # The last round begins below 32 tokens and ends there.
    server.complete((PROMPT * 3)[:26], **options).raise_for_status()
    short = rounds()
    assert short["0-32"] > before["0-32"] and short.get("32-64") == before.get("32-64")
    server.complete((PROMPT * 3)[:32], **options).raise_for_status()
    assert rounds()["0-32"] == short["0-32"] and rounds()["32-64"] > short.get("32-64", 0)
    found = samples(server)
    for name, whole in (
        ("rounds", "drafting_rounds"),
        ("committed", "committed"),
        ("reached", "reached"),
        ("accepted", "accepted"),
    ):
        counted = total(found, f"draftsmith_context_{name}_total")
        assert counted == total(found, f"draftsmith_{whole}_total") > 0


def test_lengths_of_answers_are_told_by_prompt(server: Any) -> None:
    found = samples(server)
    assert (
        total(found, "vllm:request_params_n_sum") == total(found, "vllm:request_params_n_count") + 2
    )
    prompts = total(found, "vllm:request_prompt_tokens_count")
    assert total(found, "vllm:request_max_num_generation_tokens_count") == prompts - 1


def test_clients_cannot_make_labels_without_bound(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig())
    for number in range(MAX_CLASSES + 5):
        server.complete("x", max_tokens=1, request_class=f"class {number}\n\"'").raise_for_status()
    counted = samples(server)["draftsmith_class_requests_total"]
    assert len(counted) == MAX_CLASSES + 1
    assert total({"n": counted}, "n", request_class=OTHER_CLASSES) == 5


def test_versions_are_counted_apart_and_the_oldest_forgotten() -> None:
    stats = EngineStats()
    for version in range(MAX_VERSIONS + 4):
        stats.count_round(offered=2, accepted=1, committed=2, version=str(version))
        stats.count_round(offered=1, accepted=1, committed=2, version=str(version))
    assert list(stats.by_version) == [str(version) for version in range(4, MAX_VERSIONS + 4)]
    assert stats.by_version["7"] == AcceptanceCounts([2, 1], [2, 0], {2: 2})
    assert stats.acceptance.rounds == 2 * (MAX_VERSIONS + 4)
    stats.draft_version = "5"
    stats.count_round(offered=1, accepted=1, committed=2, version=None)
    for version in range(100, 103):
        stats.count_round(offered=1, accepted=1, committed=2, version=str(version))
    assert len(stats.by_version) == MAX_VERSIONS and list(stats.by_version)[:2] == ["5", "9"], (
        "what drafts now is no oldest one"
    )
    assert stats.by_version[TEXT].rounds == 1


@pytest.mark.parametrize("source", ["docs/guides/metrics.md", "train/check/server.py"])
def test_every_metric_that_is_written_about_or_judged_is_exported(source: str, server: Any) -> None:
    """What `draftsmith doctor --url` sums up is 0 for a name that nobody exports, so a renamed
    metric would look fine."""
    declared = set(re.findall(r"^# TYPE (\S+)", server.http.get("/metrics").text, re.MULTILINE))
    text = (DASHBOARD.parents[1] / source).read_text().replace("draftsmith_{name}_total", "")
    named = set(re.findall(r"\b(?:vllm:|draftsmith_)\w+", text))
    assert len(named) > 5
    assert {
        name for name in named if not {name, re.sub(r"_(bucket|sum|count)$", "", name)} & declared
    } == set()


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = dashboard()
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 39
    names = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "model_name"} == names
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not taken & cells, (
            f"{panel['title']} lies over another panel"
        )
        taken |= cells
        assert panel["type"] in ("row", "timeseries", "stat")
        if panel["type"] != "row":
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references) > 0
            for expression in (target["expr"] for target in panel["targets"]):
                assert expression.count("(") == expression.count(")")


def test_every_metric_of_the_dashboard_is_exported_with_its_labels(server: Any) -> None:
    text = server.http.get("/metrics").text
    declared = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    labels = {
        name: set().union(*(sample.labels for sample in found))
        for name, found in samples(server).items()
    }
    asked = 0
    read = r"(?:by \((\w+)\) )?\(?(?:rate\()?((?:vllm:|draftsmith_)\w+)"
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for by, name in re.findall(read, target["expr"]):
                asked += 1
                family = re.sub(r"_(bucket|sum|count)$", "", name)
                assert {name, family} & declared, (
                    f"{panel['title']} reads {name}, which no server exports"
                )
                # A counter of something that has not happened has no sample yet.
                if by and name in labels:
                    assert by in labels[name], f"{panel['title']} groups {name} by {by}"
    assert asked > 40
