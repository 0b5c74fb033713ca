"""Stand-ins of the parts of vLLM that the recorder meets: a worker whose steps are given, with
vLLM's own names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith.distill.buffer.folder import ShardFolder, in_turn, parse
from draftsmith.fleet.recording.recorder import EngineRecorder
from draftsmith.fleet.recording.writer import EngineJob, run
from draftsmith.record import RoundRecord
from draftsmith.shared_ring import Ring

VOCAB = 48


class FirstSampler(torch.nn.Module):
    """Call of the first runner's rejection sampler."""

    def forward(
        self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> str:
        logits.zero_()  # it may be updated in place
        return "sampled"


class SecondSampler:
    """Call of the second runner's."""

    num_speculative_steps = 3

    def __call__(
        self, logits: Any, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None
    ) -> str:
        return "sampled"


def params(**changes: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "max_tokens": 99,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "min_tokens": 0, "logit_bias": None, "allowed_token_ids": None, "bad_words": [],
        "structured_outputs": None, "thinking_token_budget": None, "repetition_detection": None,
        "eos_token_id": 0, "stop_token_ids": [], "extra_args": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **changes})


def new_request(req_id: str, prompt: list[int] | None, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=req_id, prompt_token_ids=prompt, mm_features=[], prompt_embeds=None,
        lora_request=None, prefill_token_ids=None, sampling_params=params(**changes),
    )  # fmt: skip


def scheduled(
    new: Sequence[Any] = (),
    finished: Sequence[str] = (),
    resumed: dict[str, list[int]] | None = None,
) -> SimpleNamespace:
    cached = SimpleNamespace(resumed_req_ids=set(resumed or {}), all_token_ids=resumed or {})
    return SimpleNamespace(
        scheduled_new_reqs=list(new), finished_req_ids=set(finished), scheduled_cached_reqs=cached
    )


def first_call(
    rows: list[list[int]], *, seed: int = 0, probs: bool = False
) -> tuple[SimpleNamespace, torch.Tensor | None, torch.Tensor]:
    """Metadata, draft probs and logits for drafted tokens of each request, whose rows are followed
    by the bonus row of each."""
    generator = torch.Generator().manual_seed(seed)
    counts = [len(row) for row in rows]
    at, bonus, begin = [], [], 0
    for count in counts:
        at += range(begin, begin + count)
        bonus.append(begin + count)
        begin += count + 1
    metadata = SimpleNamespace(
        draft_token_ids=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        num_draft_tokens=counts,
        target_logits_indices=torch.tensor(at, dtype=torch.int32),
        bonus_logits_indices=torch.tensor(bonus, dtype=torch.int32),
    )
    logits = torch.randn(begin, VOCAB, generator=generator)
    q = torch.softmax(torch.randn(sum(counts), VOCAB, generator=generator), -1)
    return metadata, q if probs else None, logits


class Worker:
    """Worker of vLLM with the steps of a test: `step` runs one."""

    def __init__(self, sampler: Any, **config: Any):
        self.rank = 0
        self.model_runner = SimpleNamespace(
            rejection_sampler=sampler, input_batch=SimpleNamespace(req_ids=[])
        )
        plain: dict[str, Any] = {
            "additional_config": {},
            "speculative_config": SimpleNamespace(
                method="draft_model", draft_sample_method="greedy",
                rejection_sample_method="standard",
            ),
            "model_config": SimpleNamespace(model="org/target", max_model_len=1000),
            "parallel_config": SimpleNamespace(data_parallel_rank=0),
        }  # fmt: skip
        self.vllm_config = SimpleNamespace(**{**plain, **config})
        self.verify: tuple[Any, ...] = ()
        self.output: Any = None
        self.returned: Any = None

    def execute_model(self, scheduler_output: Any) -> None:
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.verify:
            self.returned = self.model_runner.rejection_sampler(*self.verify)
        return self.output

    def compile_or_warm_up_model(self) -> str:
        return "warm"

    def shutdown(self) -> None:
        """Nothing to end."""

    def step(
        self,
        schedule: Any,
        sampled: dict[str, list[int]],
        verify: tuple[Any, ...] = (),
        *,
        later: bool = False,
        batch: list[str] | None = None,
    ) -> Any:
        """One step, whose tokens are fetched at once or, as under async scheduling, `later`."""
        self.model_runner.input_batch.req_ids = list(sampled) if batch is None else batch
        self.verify = verify
        result = SimpleNamespace(
            req_ids=list(sampled), sampled_token_ids=[list(own) for own in sampled.values()]
        )
        self.output = Later(result) if later else result
        assert self.execute_model(schedule) is None
        return self.sample_tokens(None)


class Later:
    """Output whose tokens are on their way."""

    def __init__(self, result: Any):
        self.result = result

    def get_output(self) -> Any:
        return self.result


class Writer:
    """In place of `Child`: a ring that the test reads."""

    def __init__(self, ring: Any):
        self.ring, self.generation, self.alive, self.closed = ring, 1, True, False

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


class Lab:
    """A worker with a recorder, and the records that came of it."""

    def __init__(
        self, folder: Path, sampler: Any = None, capacity: int = 1 << 20, max_length: int = 1000
    ):
        self.folder, self.max_length = folder, max_length
        self.worker = Worker(sampler or FirstSampler())
        self.writer = Writer(Ring.create(capacity))
        self.state = SimpleNamespace(version="1")
        self.recorder = EngineRecorder(
            self.worker, self.state, self.writer, most=1.0, max_length=max_length  # type: ignore[arg-type]
        )  # fmt: skip

    def records(self, *, seeded: bool = False) -> dict[str, list[RoundRecord]]:
        """By request; those of seeded ones too where asked for."""
        job = EngineJob(str(self.folder), "e", "t", "r", "greedy", "chain", 1.0, self.max_length)
        run(self.writer.ring, job, lambda seconds: True)
        found: dict[str, list[RoundRecord]] = {}
        folder = ShardFolder(str(self.folder))
        shards = in_turn(folder.shards_among(folder.names()))
        for one in [one for shard in shards for one in parse(folder.read(shard.name))]:
            if one.seeded and not seeded:
                continue
            found.setdefault(one.request, []).append(one)
        return found
