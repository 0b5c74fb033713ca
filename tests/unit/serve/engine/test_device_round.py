"""What a round on a device copies and waits for, counted on a stand-in, and its tokens, which are
those of a round on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.drafters.options import OPTIONS
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.verify import chain_logits, chain_triton
from draftsmith.kernels.verify.chain_logits import verify_logits_torch
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests import device_stand_in
from tests.device_stand_in import StandIn, kernel, move, on_device

PROMPTS = [[5, 60, 7, 200], [11, 12, 13], [9, 8, 7, 6, 5, 4]]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
TOP_P: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9}


class Served:
    """A target and a draft on the CPU or on the stand-in."""

    def __init__(self, path: str, family: str | None, device: StandIn | None):
        self.target, self.drafter, self.device = Target.load(path), None, device
        if family is not None:
            created: Any = FAMILIES[family].create(OPTIONS[family](), self.target, seed=1)
            self.drafter = created.eval()
        if device is not None:
            move(self.target.model)
            self.target._unused_mask = on_device(self.target._unused_mask)
            if self.drafter is not None:
                move(self.drafter)

    def texts(self, values: dict[str, Any], **options: Any) -> list[list[int]]:
        """Answers; of the device, what the fourth round costs is left in its counts."""
        config = EngineConfig(k=3, max_length=64, num_blocks=40, compile="off", **options)
        engine = build_engine(self.target, self.drafter, config)
        requests = [
            engine.submit(
                prompt, SamplingParams(seed=seed, max_tokens=16, ignore_eos=True, **values)
            )
            for seed, prompt in enumerate(PROMPTS)
        ]
        kept = 0
        while engine.busy:
            kept += 1
            if self.device is not None and kept <= 4:
                self.device.clear()
            engine.step()
            if self.device is not None and kept == 4:
                found = list(self.device.events), self.device.launches.copy()
        if self.device is not None:
            self.device.events[:], self.device.launches = found
        assert not engine.stats.fallbacks
        return [request.output for request in requests]


def tempered(logits: torch.Tensor, temperatures: torch.Tensor, *rest: Any) -> torch.Tensor:
    return verify_logits_torch(logits, SamplingRows.of(temperatures.tolist()), *rest)


# (waits, uploads) of a round, outside of the drafter.
CASES = {
    (None, "greedy"): (GREEDY, 1, 2),
    (None, "sampled"): (SAMPLED, 1, 2),
    (None, "top-p"): (TOP_P, 1, 2),
    ("eagle3", "greedy"): (GREEDY, 1, 3),
    ("eagle3", "sampled"): (SAMPLED, 1, 3),
    ("eagle3", "top-p"): (TOP_P, 1, 3),
}


@pytest.mark.parametrize("family, name", CASES)
def test_a_round_waits_for_its_result(
    family: str | None,
    name: str,
    tiny_target: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, waits, uploads = CASES[family, name]
    expected = Served(tiny_target("llama"), family, None).texts(values)
    with device_stand_in.device(monkeypatch) as device:
        monkeypatch.setattr(
            chain_logits,
            "choose",
            lambda impl, device, dtype: "torch" if device.type == "cpu" else "triton",
        )
        monkeypatch.setattr(
            chain_triton, "verify_logits_triton", kernel(device, "verify_logits", tempered)
        )
        found = Served(tiny_target("llama"), family, device).texts(values)
        events = "\n".join(map(str, device.events))
    assert found == expected
    assert (device.count("wait"), device.count("upload")) == (waits, uploads), events


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with device_stand_in.device(monkeypatch) as device:
        here = device_stand_in.DEVICE
        numbers = torch.tensor([3, 1, 2], device=here)
        assert (device.count("wait"), device.count("upload")) == (1, 1)
        device.clear()
        sent = torch.tensor([3, 1, 2]).pin_memory().to(here, non_blocking=True)
        table = torch.zeros(4, 5, device=here)
        table[sent, 1] = 2.0
        table.masked_fill_(table > 1, 3.0)
        assert (device.count("wait"), device.count("upload")) == (0, 1)
        torch.tensor([3, 1, 2]).to(here, non_blocking=True)  # not page-locked
        assert (device.count("wait"), device.count("upload")) == (1, 2)
        for look in (
            lambda: numbers.tolist(),
            lambda: int(numbers[0]),
            lambda: bool((numbers > 1).any()),
            lambda: numbers.cpu(),
            lambda: numbers[numbers > 1],
            lambda: numbers.nonzero(),
            lambda: torch.repeat_interleave(numbers),
            lambda: numbers[[0, 1]],
        ):
            device.clear()
            look()
            assert device.count("wait") == 1, device.events
        with pytest.raises(RuntimeError, match="on the host and on the device"):
            numbers + torch.tensor([1, 2, 3])
