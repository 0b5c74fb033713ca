"""A target in shares of two processes, each of which reads its own parts of the files alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked import Ranks, finish
from tests.integration.own_memory import GROWN, large_target

# The parts of a process are half of the layers; embeddings, norm and head are whole.
MOST = 0.65

STATES = """
import sys, torch
from torch.distributed.tensor import DTensor
from draftsmith.drafters.target import sharded
from draftsmith.drafters.target.load import load_model
from transformers.utils import logging
logging.disable_progress_bar()
ids = torch.arange(3, 43)[None]
whole_loads, own = [], sharded.load_model
def counted(*given, prepare=None, **named):
    whole_loads.append(prepare is None)
    return own(*given, prepare=prepare, **named)
sharded.load_model = counted
for folder in sys.argv[1:]:
    whole_loads.clear()
    model = sharded.load_spread(
        folder, dtype=torch.float32, device=torch.device("cpu"), shares=2
    )
    kinds = {type(one) is DTensor for one in model.parameters()}
    whole = load_model(folder, trust_remote_code=False, dtype=torch.float32)
    same = [name for (name, one), other in zip(model.named_parameters(), whole.parameters())
            if not torch.equal(one.full_tensor() if type(one) is DTensor else one, other)]
    buffers = dict(model.named_buffers())
    same += [name for name, one in whole.named_buffers() if not torch.equal(buffers[name], one)]
    with torch.no_grad():
        equal = torch.equal(model(ids).logits, whole(ids).logits)
    names = type(model) is type(whole)
    ends = model.generation_config.eos_token_id == whole.generation_config.eos_token_id
    print(whole_loads, sorted(kinds), same, equal, names, ends, flush=True)
sharded.leave_group()
"""

PEAK = (
    GROWN
    + """
import sys, torch
from draftsmith.drafters.target import sharded
if sys.argv[2] == "whole":
    sharded.can_prepare = lambda path, **options: False
sharded.share_mesh(torch.device("cpu"), 2)
load = lambda: sharded.load_spread(
    sys.argv[1], dtype=torch.float32, device=torch.device("cpu"), shares=2
)
print(grown(load), flush=True)
sharded.leave_group()
"""
)


def told(code: str, *words: object) -> list[str]:
    """Last line of each of two processes."""
    run = Ranks([sys.executable, "-c", code, *map(str, words)], 2)
    finish(run)
    return [one.stdout.read() for one in run.processes]


def test_shares_are_the_model_to_the_bit(tiny_target: Callable[..., str]) -> None:
    """Experts, whose weights are converted while they are loaded, among them."""
    kinds = ("gpt2", "gemma2", "mixtral", "olmo_hybrid")
    of_parts = "[False] [False, True] [] True True True"
    # Its convolutions are joined along their rows.
    whole = of_parts.replace("False", "True", 1)
    for said in told(STATES, *map(tiny_target, kinds)):
        lines = [one for one in said.splitlines() if one.startswith(("[False]", "[True]"))]
        assert lines == [of_parts] * 3 + [whole], said


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder of bfloat16 weights, and their bytes in float32: 200 MB."""
    folder = tmp_path_factory.mktemp("large")
    return folder, large_target(folder, layers=3, intermediate_size=4096)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is Linux's")
def test_no_process_holds_the_model_whole(large: tuple[Path, int]) -> None:
    folder, size = large
    assert size > 190e6
    grown = [int(said.split()[-1]) / size for said in told(PEAK, folder, "parts")]
    assert max(grown) <= MOST, grown
    # Negative control: as models are loaded whose parts cannot be read alone.
    grown = [int(said.split()[-1]) / size for said in told(PEAK, folder, "whole")]
    assert min(grown) > 1, grown
