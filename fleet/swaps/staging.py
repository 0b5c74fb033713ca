"""Second copy of a draft, into which a thread loads versions while the engine serves.

The engine's thread is disturbed by nothing but Python's lock, which is given back between tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftsmith.errors import first_line
from draftsmith.fleet.swaps.checks import DraftRefused, check_like, tensor_files, tensors_of
from draftsmith.fleet.swaps.packed import (
    NotSwappable,
    Slots,
    check_made,
    check_pairs,
    slots_of,
    tensor_digest,
    tensors_in,
)
from draftsmith.fleet.swaps.proposer import SwappedProposer, restore, snapshot

# Time for the engine's thread after each tensor, and the longest that it waits for Python's lock.
REST_S = 0.001
LOCK_S = 0.0005


@dataclass
class Loaded:
    """A version in the second copy.

    Attributes:
        digests: by slot, of tensors; the trial adds those of handles
        changed: names of the slots that differ from the served ones
        backup: values of the served tensors that change
        derived: tensors of the proposer beside the module, and their new values
    """

    version: str
    slots: Slots
    digests: dict[str, str]
    changed: list[str]
    backup: dict[str, torch.Tensor]
    num_bytes: int
    load_s: float
    derived: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class Staging:
    def __init__(self, proposer: SwappedProposer):
        self.proposer = proposer
        self.model = proposer.second()
        check_pairs(self.served(), self.slots())

    def served(self) -> Slots:
        return slots_of(self.proposer.model, self.proposer.foreign)

    def slots(self) -> Slots:
        return slots_of(self.model, ())

    def load(self, folder: Path, version: str) -> Loaded:
        """Check a version and load it beside the served one. Raises `DraftRefused`; the second copy
        then holds what it held."""
        begun_s = time.perf_counter()
        proposer = self.proposer
        check_like(folder, proposer.folder, is_part=proposer.is_inside_target)
        # All are read, and found finite, before the first is loaded.
        tensors = dict(tensors_of(folder))
        check_shared(proposer, tensors)
        self._put(tensors)
        slots, served = self.slots(), self.served()
        check_pairs(served, slots)
        staged_tensors, served_tensors = tensors_in(slots), tensors_in(served)
        digests = {name: tensor_digest(one) for name, one in staged_tensors.items()}
        changed = [
            name for name, one in served_tensors.items() if tensor_digest(one) != digests[name]
        ]
        return Loaded(
            version=version,
            slots=slots,
            digests=digests,
            changed=changed,
            backup={name: served_tensors[name].detach().clone() for name in changed},
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            load_s=time.perf_counter() - begun_s,
        )

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = snapshot(self.model)
        try:
            with short_turns(), on_device(self.proposer.device):
                self.proposer.load(self.model, rested(tensors.items()))
                put_plain_buffers(self.model, tensors)
            for module, attributes in saved:
                check_made(attributes, module)
        except (DraftRefused, NotSwappable):
            restore(saved)
            raise
        except Exception as error:
            restore(saved)
            raise DraftRefused(f"vLLM's loader refused it: {first_line(error)}") from error


def check_shared(proposer: SwappedProposer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tables that the served draft takes from the target cannot change with a version."""
    names = [name for name in tensors if proposer.is_shared(name)]
    if not names or proposer.is_inside_target:
        return
    files = tensor_files(proposer.folder)
    served = {name: one for name, one in tensors_of(files[0].parent) if name in names}
    for name in names:
        if not torch.equal(tensors[name], served[name]):
            raise DraftRefused(
                f"{name!r} is another one, and the served draft shares it with the target; start "
                "the engine with this draft instead"
            )


def put_plain_buffers(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Buffers that a module's `load_weights` writes itself, which a reload by layers passes by."""
    for name in model._non_persistent_buffers_set & tensors.keys():
        buffer = model._buffers[name]
        assert buffer is not None
        with torch.no_grad():
            buffer.copy_(tensors[name].view_as(buffer))


def rested(
    items: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for item in items:
        yield item
        time.sleep(REST_S)


@contextmanager
def short_turns() -> Iterator[None]:
    """A short interval after which a waiting thread gets Python's lock."""
    kept_s = sys.getswitchinterval()
    sys.setswitchinterval(min(kept_s, LOCK_S))
    try:
        yield
    finally:
        sys.setswitchinterval(kept_s)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own, finished at the end."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
