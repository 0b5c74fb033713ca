"""Draft of one vLLM worker: the served module, a second copy of it, and a switch for drafting.

All private names of vLLM that swaps need stand here. They are probed once; a worker that lacks one
keeps the draft that it was started with. The V1 runner (`drafter`) is run by tests on a CPU. The V2
runner (`speculator`) is written from the source of 0.32 and 0.33 and tested with stand-ins only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftsmith.fleet.engine import logger
from draftsmith.fleet.swaps.checks import DraftRefused
from draftsmith.fleet.swaps.packed import TENSOR_TABLES, NotSwappable

Named = Iterator[tuple[str, torch.Tensor]]
# Drafting methods whose module comes with the target's checkpoint.
INSIDE_TARGET = "mtp"


class SwappedProposer:
    """Draft of a worker.

    Attributes:
        model: the served module
        foreign: ids of the target's modules and tensors, which the draft may share
        folder: local folder of the draft that the engine was started with
        recent: inputs of recent steps
    """

    def __init__(self, worker: Any):
        self.worker, self.runner = worker, worker.model_runner
        self.config = worker.vllm_config
        model = getattr(self.runner, "get_draft_model", lambda: None)()
        if not isinstance(model, torch.nn.Module):
            raise NotSwappable("this engine has no draft; start it with a speculative config")
        self.model: torch.nn.Module = model
        self.kind = kind_of(self.runner)
        target = self.runner.get_model()
        self.foreign = {id(module) for module in target.modules()} | {
            id(tensor) for module in target.modules() for tensor in own_tensors(module)
        }
        self.shared = shared_paths(model, self.foreign)
        self.model_config = self.config.speculative_config.draft_model_config
        self.method: str = self.config.speculative_config.method
        self.is_stopped = False
        self.recent = Recent(self.kind.given)
        side = self.kind.side(self.runner)
        if hasattr(side, "propose"):
            side.propose = self.recent.watched(side.propose)

    @property
    def folder(self) -> Path:
        return local_folder(self.model_config.model, getattr(self.model_config, "revision", None))

    @property
    def dtype(self) -> torch.dtype:
        return self.model_config.dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def is_inside_target(self) -> bool:
        return self.method == INSIDE_TARGET

    def second(self) -> torch.nn.Module:
        """Second module with the weights of the start, without the target's modules. By the
        engine's thread only: vLLM sets default dtypes and configurations of the whole process
        meanwhile."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config), apart(self.config.compilation_config):
            model = self.kind.build(self.runner)
        for path in self.shared:
            detach(model, path)
        return model

    def load(self, model: torch.nn.Module, tensors: Named) -> None:
        """Load a checkpoint's tensors into a second module and pack them for the kernels, by vLLM's
        own loader. Any thread may."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with set_current_vllm_config(self.config), torch.no_grad():
            initialize_layerwise_reload(model)
            loaded = model.load_weights(self.own(tensors))
            finalize_layerwise_reload(model, self.model_config)
        if self.is_inside_target and isinstance(loaded, set):
            named = {name for name, one in model.named_parameters() if one.numel()}
            if missing := sorted(named - loaded):
                raise DraftRefused(f"no tensor of the version was loaded into {missing[0]!r}")

    def own(self, tensors: Named) -> Named:
        """Without the tables that the served draft shares with the target: they are never
        written."""
        return ((name, one) for name, one in tensors if not self.is_shared(name))

    def is_shared(self, name: str) -> bool:
        """True for a checkpoint's tensor that the served draft takes from the target."""
        return bool({path.rpartition(".")[2] for path in self.shared} & set(name.split(".")))

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[None]:
        """The target's modules in their places of a second module, for a pass."""
        if model is self.model:
            yield
            return
        try:
            for path, module in self.shared.items():
                parent, _, name = path.rpartition(".")
                model.get_submodule(parent)._modules[name] = module
            yield
        finally:
            for path in self.shared:
                detach(model, path)

    @contextmanager
    def forward_context(self, num_tokens: int) -> Iterator[None]:
        """Eager pass without attention metadata, as vLLM's own dry runs: keys and values of
        requests are neither read nor written."""
        from vllm.forward_context import set_forward_context

        parallel = self.config.parallel_config
        ranks = getattr(parallel, "data_parallel_size", 1)
        # Given, it is not negotiated with the other ranks, which are not in this call.
        across = torch.full((ranks,), num_tokens, dtype=torch.int32) if ranks > 1 else None
        with set_forward_context(
            None,
            self.config,
            num_tokens=num_tokens,
            num_tokens_across_dp=across,
            skip_compiled=True,
        ):
            yield

    def stop(self) -> None:
        """Stop drafting: the draft's module is not run any more, the target serves alone."""
        if not self.is_stopped:
            self.kind.stop(self.runner)
            self.is_stopped = True


class V1:
    """Runner with a `drafter`."""

    @staticmethod
    def side(runner: Any) -> Any:
        return runner.drafter

    @staticmethod
    def given(
        *_: Any,
        target_token_ids: torch.Tensor | None = None,
        target_hidden_states: torch.Tensor | None = None,
        **__: Any,
    ) -> Given | None:
        if target_token_ids is None or target_hidden_states is None:
            return None
        return Given(target_token_ids, target_hidden_states)

    @staticmethod
    def build(runner: Any) -> torch.nn.Module:
        return runner.drafter._get_model()

    @staticmethod
    def stop(runner: Any) -> None:
        """As for a text too long for the draft, vLLM proposes zeros, which it verifies like any
        proposal. Where the scheduler takes the proposals from the runner, it gets none."""
        runner._input_fits_in_drafter = lambda *_, **__: False
        if not getattr(runner, "use_async_scheduling", False):
            take = runner.take_draft_token_ids

            def nothing() -> Any:
                taken = take()
                return (
                    taken
                    if taken is None
                    else type(taken)(taken.req_ids, [[] for _ in taken.req_ids])
                )

            runner.take_draft_token_ids = nothing


class V2:
    """Runner with a `speculator`."""

    @staticmethod
    def side(runner: Any) -> Any:
        return runner.speculator

    @staticmethod
    def given(
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *_: Any,
        dummy_run: bool = False,
        **__: Any,
    ) -> Given | None:
        if dummy_run:
            return None
        # Padding is behind the tokens.
        count = min(NUM_KEPT, input_batch.num_tokens)
        taps = [one[:count] for one in aux_hidden_states or [last_hidden_states]]
        return Given(input_batch.input_ids[:count], torch.cat(taps, dim=-1))

    @staticmethod
    def build(runner: Any) -> torch.nn.Module:
        return runner.speculator.load_draft_model(runner.get_model(), set())

    @staticmethod
    def stop(runner: Any) -> None:
        """Proposes token 0 everywhere, with a distribution that says so."""
        speculator = runner.speculator

        def zeros(batch: Any, *_: Any, **__: Any) -> torch.Tensor:
            logits = speculator.draft_logits
            if logits is not None:
                logits.fill_(-torch.inf)
                logits[..., 0] = 0.0
            return torch.zeros_like(speculator.draft_tokens[: batch.num_reqs])

        speculator.propose = zeros


def kind_of(runner: Any) -> type[V1] | type[V2]:
    if hasattr(getattr(runner, "drafter", None), "_get_model"):
        return V1
    if hasattr(getattr(runner, "speculator", None), "load_draft_model"):
        return V2
    raise NotSwappable(
        f"{type(runner).__name__} of this vLLM builds its draft in a way that is not known here; "
        "it keeps the draft that it was started with"
    )


def own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensors in (module._parameters, module._buffers):
        yield from (tensor for tensor in tensors.values() if tensor is not None)


def shared_paths(model: torch.nn.Module, foreign: set[int]) -> dict[str, torch.nn.Module]:
    """Outermost modules of the target inside the draft, by every path."""
    found: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and id(module) in foreign and not inside:
            found[path] = module
    return found


def detach(model: torch.nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules.pop(name, None)


@contextmanager
def apart(compilation: Any) -> Iterator[None]:
    """Registries of layers that a second module fills are not the engine's."""
    names = ("static_forward_context", "static_all_moe_layers")
    kept = {name: getattr(compilation, name) for name in names if hasattr(compilation, name)}
    for name, value in kept.items():
        setattr(compilation, name, type(value)())
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(compilation, name, value)


def local_folder(name: str, revision: str | None) -> Path:
    """Folder of a model given by path or by a name of the Hub whose files are there."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


Snapshot = list[tuple[torch.nn.Module, dict[str, Any]]]


def snapshot(model: torch.nn.Module) -> Snapshot:
    """All attributes of all modules, so that a load that fails half-way leaves nothing behind."""
    return [
        (
            module,
            {
                key: type(value)(value) if key in TENSOR_TABLES else value
                for key, value in vars(module).items()
            },
        )
        for module in model.modules()
    ]


def restore(saved: Snapshot) -> None:
    for module, attributes in saved:
        vars(module).clear()
        vars(module).update(attributes)
    try:
        from vllm.model_executor.model_loader.reload import get_layerwise_info
    except ImportError:
        return
    for module, _ in saved:
        get_layerwise_info(module).reset()


NUM_KEPT = 8


class Given(NamedTuple):
    """Inputs of a call of a proposer: token ids [n] and the target's hidden states [n, width]."""

    tokens: torch.Tensor
    states: torch.Tensor


class Recent:
    """The first tokens of the last step, behind them those of longer steps before it.

    Args:
        read: arguments of a proposer's `propose` -> what it is given; None for a dry run.

    Attributes:
        num_tokens: of what is kept
    """

    def __init__(self, read: Callable[..., Given | None]):
        self.read = read
        self.num_tokens = 0
        self._tokens: torch.Tensor | None = None
        self._states: torch.Tensor | None = None

    def watched(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        """`propose`, which keeps a copy of what it is given. No error of the copy reaches it."""

        def keeping(*args: Any, **kwargs: Any) -> Any:
            try:
                self.keep(self.read(*args, **kwargs))
            except Exception:
                logger.debug("draftsmith: the inputs of a step are not kept", exc_info=True)
            return propose(*args, **kwargs)

        return keeping

    def keep(self, given: Given | None) -> None:
        if given is None:
            return
        tokens, states = given.tokens[:NUM_KEPT], given.states[:NUM_KEPT]
        if self._tokens is None or self._states is None:
            self._tokens = torch.full((NUM_KEPT,), -1, dtype=torch.int32, device=tokens.device)
            self._states = states.new_full((NUM_KEPT, states.shape[1]), torch.nan)
        self._tokens[: len(tokens)].copy_(tokens)
        self._states[: len(states)].copy_(states)
        self.num_tokens = max(self.num_tokens, len(tokens))

    def put(self, tokens: torch.Tensor, states: torch.Tensor, *, vocab_size: int) -> None:
        """Write what was kept over the first rows of token ids [n] and hidden states [n, width].
        Tokens that the draft does not have, states of another width and those in which the target
        is not finite are left out: they say nothing about a draft."""
        if self._tokens is None or self._states is None:
            return
        known = (self._tokens >= 0) & (self._tokens < vocab_size)
        first = tokens[:NUM_KEPT]
        first.copy_(torch.where(known, self._tokens, first))
        if self._states.shape[1] == states.shape[1]:
            finite = torch.isfinite(self._states).all(-1, keepdim=True)
            rows = states[:NUM_KEPT]
            rows.copy_(torch.where(finite, self._states, rows))
