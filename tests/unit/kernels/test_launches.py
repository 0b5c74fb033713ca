"""Launches of Triton kernels happen on the device of their tensors, whichever is current."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from draftsmith.kernels import dispatch
from draftsmith.kernels.dispatch import choose, on_its_device
from draftsmith.kernels.sampling.draw import draw
from draftsmith.kernels.sampling.filters import SamplingRows
from draftsmith.kernels.sampling.random_streams import Purpose
from tests.unit.kernels import launches

ROOT = Path(__file__).parents[3]
CODE = ("kernels", "drafters", "serve", "train", "distill", "fleet")


class Site(NamedTuple):
    """A launch in the source: `kernel[grid](...)`."""

    kernel: str
    place: str
    decorators: tuple[str, ...]  # of the functions around it


def sites_of(source: str, name: str) -> list[Site]:
    """In modules that see Triton every call of a subscript is a launch."""
    tree = ast.parse(source)
    found: list[Site] = []

    def visit(node: ast.AST, decorators: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef):
            decorators += tuple(ast.unparse(decorator) for decorator in node.decorator_list)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel = ast.unparse(node.func.value)
            found.append(Site(kernel, f"{name}:{node.lineno}", decorators))
        for child in ast.iter_child_nodes(node):
            visit(child, decorators)

    visit(tree, ())
    return found


def sees_triton(source: str) -> bool:
    return "import triton" in source or "_triton import" in source


@pytest.fixture(scope="module")
def sites() -> list[Site]:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    return [
        site
        for name, source in sources.items()
        if sees_triton(source)
        for site in sites_of(source, name)
    ]


def test_no_launch_stands_outside_a_guarded_function(sites: list[Site]) -> None:
    assert [site.place for site in sites if "on_its_device" not in site.decorators] == []


@pytest.mark.parametrize("name", launches.EVERY_LAUNCHER)
def test_a_launcher_enters_the_device_of_its_tensors(name: str) -> None:
    with launches.recorded() as found:
        launches.EVERY_LAUNCHER[name]()
    assert found and {launch.device for launch in found} == {launches.DEVICE.index}


def test_every_kernel_in_the_source_was_launched(sites: list[Site]) -> None:
    """So that the two tests above leave no launcher out."""
    with launches.recorded() as found:
        for launch in launches.EVERY_LAUNCHER.values():
            launch()
    assert {launch.kernel.fn.__name__ for launch in found} == {site.kernel for site in sites}


def test_the_first_tensor_may_lie_in_a_tuple() -> None:
    @on_its_device
    def launch(*args: object) -> int:
        return len(args)

    assert launch("jsd", ("name", 1.0), (None, torch.ones(1))) == 3
    with pytest.raises(TypeError, match="no tensor"):
        launch("jsd", 2)


# Which implementation is taken


CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_auto_is_triton_on_cuda_only(compiled: None) -> None:
    assert (choose("auto", CPU, F32), choose("auto", CUDA, F32)) == ("torch", "triton")
    assert choose("torch", CUDA, F32) == "torch"


def test_float64_is_torchs_unless_asked_for(compiled: None) -> None:
    """The Triton kernels compute in float32."""
    assert [choose("auto", CUDA, dtype) for dtype in (torch.float64, torch.bfloat16)] == [
        "torch",
        "triton",
    ]
    assert choose("triton", CUDA, torch.float64) == "triton"


def test_auto_stays_torch_on_a_cpu_that_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (choose("auto", CPU, F32), choose("triton", CPU, F32)) == ("torch", "triton")


def test_triton_that_cannot_run_raises(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        choose("triton", CPU, F32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed"):
        choose("triton", CUDA, F32)
    assert choose("auto", CUDA, F32) == "torch"


def test_unknown_names_are_listed() -> None:
    with pytest.raises(ValueError, match=", ".join(dispatch.IMPLS)):
        choose("cuda", CPU, F32)


def test_an_operation_takes_its_arguments_by_name() -> None:
    given = {
        "logits": torch.randn(2, 40),
        "rows": SamplingRows.of([0.7, 1.0]),
        "seeds": torch.tensor([1, 2]),
        "positions": torch.tensor([5, 6]),
        "purpose": Purpose.BONUS,
    }
    found, expected = draw(**given), draw(*given.values(), impl="torch")
    assert torch.equal(found.tokens, expected.tokens)
    with pytest.raises(TypeError, match="no tensor"):
        draw()
