"""The one private seam: `model_runner.rejection_sampler`, called once per step of speculation by
both of vLLM's model runners. Both calls are read into the same `Verified`.

The first runner's call was run; the second one's is written from the source of vLLM 0.26 to 0.33
and tested with stand-ins of it alone, since it needs a GPU.

Legend: r requests of a step, n drafted positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.fleet.engine import logger, once

# Parameters of the two calls; what a later vLLM adds behind them is not needed.
FIRST = ["metadata", "draft_probs", "logits", "sampling_metadata"]
SECOND = ["logits", "input_batch", "draft_logits"]


@dataclass
class Verified:
    """Verification of a step, before it happens. All tensors are the engine's own: copies are taken
    of what is kept."""

    req_ids: list[str]
    counts: list[int]  # [r] drafted positions of each request
    drafted: torch.Tensor  # [n] ids, all requests' after another
    logits: torch.Tensor  # raw target logits
    rows: torch.Tensor  # [n] rows of `logits` at the drafted positions
    # [n, V] of a choice of positions: what drafted tokens were drawn from; None where they are the
    # likeliest ones
    q: Callable[[torch.Tensor | slice], torch.Tensor] | None = None
    q_is_probs: bool = False


def kind_of(sampler: Any) -> str:
    """ "first" or "second" by the parameters of a rejection sampler; "" for an unknown one."""
    call = sampler.forward if isinstance(sampler, torch.nn.Module) else type(sampler).__call__
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    if names[: len(FIRST)] == FIRST:
        return "first"
    return "second" if names[: len(SECOND)] == SECOND else ""


def drafts_have_temperature() -> bool | None:
    """True where the second runner keeps a draft's logits divided by the temperature (vLLM 0.26 to
    0.27), False where it divides later, None where it is not known."""
    try:
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    except ImportError:
        return None
    names = inspect.signature(gumbel_sample).parameters
    if "logits_cache" in names:
        return False
    return True if "output_processed_logits" in names else None


class Seam:
    """In place of a rejection sampler: shows each call to `look` and passes it on unchanged."""

    def __init__(self, runner: Any, look: Callable[[Verified], None]):
        self.inner, self.runner, self.look = runner.rejection_sampler, runner, look
        self.kind = kind_of(self.inner)
        readers: dict[str, Callable[..., Verified | None]] = {
            "first": self._first,
            "second": self._second,
        }
        self._read = readers[self.kind]
        self.has_temperature = drafts_have_temperature() if self.kind == "second" else None
        runner.rejection_sampler = self

    def remove(self) -> None:
        self.runner.rejection_sampler = self.inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            verified = self._read(*args, **kwargs)
            if verified is not None:
                self.look(verified)
        except Exception:
            logger.debug("draftsmith: a step is not recorded", exc_info=True)
        return self.inner(*args, **kwargs)

    def _first(
        self, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, *_: Any
    ) -> Verified:
        return Verified(
            req_ids=self.runner.input_batch.req_ids,
            counts=metadata.num_draft_tokens,
            drafted=metadata.draft_token_ids,
            logits=logits,
            rows=metadata.target_logits_indices,
            q=None if draft_probs is None else (lambda chosen: draft_probs[chosen]),
            q_is_probs=True,
        )

    def _second(
        self, logits: torch.Tensor, batch: Any, draft_logits: torch.Tensor | None = None, *_: Any
    ) -> Verified | None:
        if getattr(self.runner, "adaptive_verification", None) is not None:
            # Rows are dropped on the device; the host has the counts from before.
            return None
        has_temperature = self.has_temperature
        if draft_logits is not None and has_temperature is None:
            once("no distributions are recorded: this vLLM keeps its draft's logits in another way")
            return None
        firsts = batch.cu_num_logits_np.tolist()
        # Of a request in its prefill drafted tokens are placeholders.
        skipped = self._prefilling(batch)
        counts: list[int] = []
        rows: list[int] = []
        for index, first in enumerate(firsts[:-1]):
            count = 0 if skipped[index] else firsts[index + 1] - first - 1
            counts.append(count)
            # Row j of a request verifies the token that is the input of its row j + 1.
            rows += range(first, first + count)
        at = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        states, depths = batch.expanded_idx_mapping[at + 1].long(), batch.expanded_local_pos[at]

        def q(chosen: torch.Tensor | slice) -> torch.Tensor:
            assert draft_logits is not None
            own = states[chosen]
            kept = draft_logits[own, depths[chosen].long()].float()
            if has_temperature:
                return kept
            temperature = self.runner.sampler.sampling_states.temperature.gpu[own]
            scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
            return kept / scale

        return Verified(
            req_ids=list(batch.req_ids[: batch.num_reqs]),
            counts=counts,
            drafted=batch.input_ids[batch.logits_indices[at + 1]],
            logits=logits,
            rows=at,
            q=None if draft_logits is None else q,
        )

    def _prefilling(self, batch: Any) -> list[bool]:
        """Flags of the requests of this batch. A rank that verifies a part of all requests (sharded
        sampling) is given the flags of all, in an order that it has not."""
        if len(batch.is_prefilling_np) == batch.num_reqs:
            return [bool(flag) for flag in batch.is_prefilling_np]
        states, own = self.runner.req_states, batch.idx_mapping_np
        return (states.num_computed_prefill_tokens[own] < states.prefill_len.np[own]).tolist()
