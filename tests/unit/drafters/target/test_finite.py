"""Targets that are not finite are refused where they are read, with what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.cli import main
from draftsmith.drafters.target.probe import check_weights
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.reference import TargetDistributions


def broken(path: str, folder: Path, weight: str, value: float) -> str:
    """The model with one wrong number in row 7 of a weight."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        own = model.get_parameter(weight)
        own.view(len(own), -1)[7, 0] = value
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        ("model.embed_tokens.weight", float("nan")),
        ("lm_head.weight", float("inf")),
        ("model.layers.1.mlp.down_proj.weight", -float("inf")),
        ("model.norm.weight", float("nan")),
    ],
)
def test_the_row_of_a_wrong_weight_is_named_before_any_work(
    weight: str,
    value: float,
    tiny_target: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = broken(tiny_target("llama"), tmp_path / "target", weight, value)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a text\n")
    data = str(tmp_path / "data")
    says = f"has NaN or infinite weights, first in row 7 of {weight!r}; restore its files"
    common = ("--target", target, "--out", data)
    for options in ((), ("--keep-answers", "--store-taps", "bf16")):
        assert main(["generate", *common, "--prompts", str(prompts), *options]) == 2
        assert says in capsys.readouterr().err
    assert main(["doctor", "--target", target]) == 1
    assert says.partition(";")[0] in " ".join(capsys.readouterr().out.split())


def test_large_weights_are_finite() -> None:
    check_weights(torch.nn.ParameterList([torch.full((2, 4), 3e38)]), "large")
    with pytest.raises(UserError, match="first in row 1 of '0'"):
        check_weights(torch.nn.ParameterList([torch.tensor([[3e38], [torch.nan]])]), "torn")


def test_an_audit_refuses_a_target_of_its_own_with_lost_weights(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    target = broken(tiny_target("llama"), tmp_path / "lost", "lm_head.weight", float("nan"))
    with pytest.raises(UserError, match=r"NaN or infinite weights, first in row 7"):
        TargetDistributions(AuditConfig(url="x", target=target))


def test_states_that_are_not_finite_are_refused(tiny_target: Callable[..., str]) -> None:
    target = Target.load(tiny_target("llama"), dtype=torch.float32)
    ids = torch.arange(3, 15)[None]
    mask = torch.ones_like(ids)
    target.states(ids, mask, ())
    with torch.no_grad():
        target.model.get_input_embeddings().weight[9] = float("inf")
    with pytest.raises(UserError, match=r"states that are NaN or infinite, in torch\.float32"):
        target.states(ids, mask, ())
