"""A target run layer after layer, each read from its files for every pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.distill import command as distill
from draftsmith.distill.config import GenerateOptions
from draftsmith.distill.generate import command as generate
from draftsmith.drafters.options import DraftOptions
from draftsmith.drafters.target.device import load_target
from draftsmith.drafters.target.quantised import numbers_of
from draftsmith.drafters.target.sharded import gathered
from draftsmith.errors import UserError
from draftsmith.train.command import run
from draftsmith.train.config import EvalConfig, OptimConfig, TrainConfig
from draftsmith.train.evaluate import command as evaluation
from tests.forked import Forked, finish, one_thread
from tests.integration.own_memory import GROWN, large_target

# Of all weights. Embeddings, norm and head stay, and of the layers one matrix of fourteen is read at a
# time.
MOST = 0.5

PEAK = (
    GROWN
    + """
import ctypes, sys, torch
from draftsmith.drafters.target.device import load_target
# M_MMAP_THRESHOLD: the C library gives the memory of matrices back at once.
ctypes.CDLL(None).mallopt(-3, 1000000)
def read(folder, offload):
    target = load_target(
        folder, dtype="float32", device="cpu", offload=offload, trust_remote_code=False
    )
    ids = torch.arange(3, 67)[None]
    target.states(ids, torch.ones_like(ids), (0, 2))
small, large = sys.argv[1:]
read(small, "disk")  # what the libraries take
print(grown(lambda: read(large, "disk")), grown(lambda: read(large, None)), flush=True)
"""
)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_states_and_logits_are_those_of_a_target_in_memory(
    kind: str, tiny_target: Callable[..., str]
) -> None:
    """Qwen3's and GPT-2's head is their embedding."""
    folder = tiny_target(kind)
    there = load_target(folder, device="cpu", offload="disk", trust_remote_code=False)
    here = load_target(folder, device="cpu", trust_remote_code=False)
    assert all(own.is_meta for own in there.layers.parameters())
    ids, mask = torch.arange(3, 43)[None], torch.ones(1, 40, dtype=torch.int64)
    packed = [] if here.state_layers else [torch.arange(40)[None] // 25]
    for segments in (None, *packed):
        (taps, hidden), (read, final) = (
            one.states(ids, mask, (0, 2, 4), segments) for one in (here, there)
        )
        assert torch.equal(taps, read) and torch.equal(hidden, final)
        assert torch.equal(here.head(hidden), there.head(final))
    assert here.revision == there.revision and here.pass_bytes() == there.pass_bytes()
    with gathered(there.layers[1]) as layer:
        numbers, known = numbers_of(layer), numbers_of(here.layers[1])
        assert numbers.keys() == known.keys()
        assert all(torch.equal(numbers[name], known[name]) for name in known)
    assert all(own.is_meta for own in there.layers.parameters())


def test_a_layer_that_a_target_has_several_times_is_one(tiny_target: Callable[..., str]) -> None:
    folder, ids = tiny_target("zamba2"), torch.arange(3, 43)[None]
    there = load_target(folder, device="cpu", offload="disk", trust_remote_code=False)
    here = load_target(folder, device="cpu", trust_remote_code=False)
    assert here.revision == there.revision
    read, known = (one.states(ids, torch.ones_like(ids), (0, 2)) for one in (there, here))
    assert torch.equal(read[0], known[0]) and torch.equal(read[1], known[1])


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is Linux's")
def test_no_more_than_a_part_of_a_layer_is_in_memory(tmp_path: Path, target_folder: str) -> None:
    size = large_target(tmp_path, layers=2, intermediate_size=8704)
    assert size > 240e6
    held = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-c", PEAK, target_folder, str(tmp_path)]
    said = finish(Forked(command, env=one_thread(), stdout=PIPE))
    offloaded, whole = map(int, said.split()[-2:])
    assert offloaded <= MOST * size
    assert whole > 0.8 * size, "negative control"
    assert sorted(tmp_path.rglob("*")) == held, "no second copy of the weights"


def settings(target: str, data: Path, out: Path, **changes: Any) -> TrainConfig:
    values = {
        "family": "eagle3", "dtype": "float32", "target": target, "data": (str(data),),
        "out": str(out), "steps": 3, "log_every": 1, "batch_size": 4, "packing": True,
        "optim": OptimConfig(schedule="constant", warmup=0.0), "eval_prompts": 0,
    }  # fmt: skip
    return TrainConfig(**values | changes)


@pytest.mark.long
def test_a_draft_learns_and_is_measured_as_by_a_target_in_memory(
    target_folder: str, data: Path, tmp_path: Path
) -> None:
    here = settings(target_folder, data, tmp_path / "here")
    run(here)
    run(replace(here, out=str(tmp_path / "there"), target_offload="disk"))
    a, b = (load_file(tmp_path / one / "model.safetensors") for one in ("here", "there"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    asked = EvalConfig(
        target=target_folder, draft=here.out, data=here.data, prompts=4, k=2, max_tokens=4,
        temperature=(1.0,), out=str(tmp_path / "here.json"),
    )  # fmt: skip
    there = replace(asked, out=str(tmp_path / "there.json"), target_offload="disk")
    assert evaluation.run(asked) == evaluation.run(there) == 0
    found = [json.loads(Path(one.out).read_text())["evaluation"] for one in (asked, there)]
    assert found[0] == found[1]


def none_written(*_: object) -> Any:
    raise AssertionError("answers are kept")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_shares": 2}, "'target_offload' is 'disk' and 'target_shares' 2; leave one"),
        (
            {"family": "draft-lm", "draft": DraftOptions(target_layers=(0,))},
            "'draft.target_layers' is .* not offloaded",
        ),
        ({"target_offload": "cpu"}, "target_offload is 'cpu' and the target runs there"),
    ],
)
def test_what_train_cannot_offload_is_refused(
    changes: dict[str, Any], says: str, target_folder: str, data: Path, tmp_path: Path
) -> None:
    one = settings(target_folder, data, tmp_path / "out", target_offload="disk")
    with pytest.raises(UserError, match=says):
        run(replace(one, **changes))


def test_what_other_commands_cannot_offload_is_refused(
    loop: Callable[..., Any], target_folder: str
) -> None:
    asked = GenerateOptions(target="t", prompts="p", out="o", target_offload="disk")
    with pytest.raises(UserError, match="read again for every token of an answer"):
        generate.run(asked, none_written)
    config = loop().config
    here = "target_offload is 'cpu' and the target runs there"
    with pytest.raises(UserError, match=here):
        evaluation.run(
            EvalConfig(target=target_folder, draft="d", data=("x",), target_offload="cpu")
        )
    kept = replace(asked, target=target_folder, keep_answers=True, target_offload="cpu")
    with pytest.raises(UserError, match=here):
        generate.run(kept, none_written)
    with pytest.raises(UserError, match=here):
        distill.run(replace(config, target_offload="cpu"))
    recorded = replace(config, learn=replace(config.learn, teacher="recorded"))
    with pytest.raises(UserError, match=r"learn\.teacher=recorded no target is loaded"):
        distill.run(replace(recorded, target_offload="disk"))


def test_adapters_and_quantised_models_are_refused(target_folder: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = {"base_model_name_or_path": target_folder}
    (adapter / "adapter_config.json").write_text(json.dumps(base))
    settings = json.loads((Path(target_folder) / "config.json").read_text())
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantised / "config.json").write_text(json.dumps(settings))
    for folder, says in ((adapter, "is an adapter"), (quantised, "is quantised")):
        with pytest.raises(UserError, match=f"target_offload is given and .* {says}"):
            load_target(str(folder), device="cpu", offload="disk", trust_remote_code=False)
