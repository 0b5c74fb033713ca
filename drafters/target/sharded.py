"""A frozen target too large for one device, spread over several: each process holds a share of
every decoder layer, which is put together for the moment it runs (what ZeRO-3 does, here by torch's
`fully_shard`).

Embeddings, last norm and head stay whole, because drafts read them too, each at its own pace.
Processes may read different texts, as data-parallel training has them do and tensor parallelism
cannot; but all must make equally many passes.

`Gone`, `join` and `in_step`: several processes of one launcher where rank 0 leads and sends each
call to the others, and all of them make it. A rank that leaves such a call halfway leaves the
others in a collective that never completes. So a rank that fails in one ends its process on the
spot, and torchrun ends the others.
"""

from __future__ import annotations

import datetime
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.drafters.target.load import can_prepare, load_model
from draftsmith.drafters.target.offload import weights_here
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.errors import UserError
from draftsmith.kernels.dispatch import pins, use_device


def load_spread(
    path: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    shares: int,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """`shares` neighbouring processes hold one copy, and each reads its own parts of the files.
    Models that `can_prepare` leaves out, among them those with tensors joined along their rows, are
    loaded whole, by the processes of a machine one after another: its memory must
    hold such a model once, its devices never."""
    mesh = share_mesh(device, shares)
    if can_prepare(path, trust_remote_code=trust_remote_code):
        return load_model(
            path,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            device=device,
            prepare=lambda model: spread(model, mesh),
        )
    turns = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for turn in range(turns):
        if turn == int(os.environ.get("LOCAL_RANK", "0")):
            model = load_model(path, trust_remote_code=trust_remote_code, dtype=dtype)
            model = spread(model, mesh).to(device)
        dist.barrier()
    return model


def share_mesh(device: torch.device, shares: int) -> DeviceMesh:
    """The processes that hold one copy with this one; joins the process group where there is none
    yet."""
    join(device)
    copies = dist.get_world_size() // shares
    return init_device_mesh(device.type, (copies, shares), mesh_dim_names=("copy", "share"))[
        "share"
    ]


def spread(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """Layer by layer, so that no device ever holds more than one whole layer."""
    body = getattr(model, body_name(model))
    layers = decoder_layers(body, model.config.get_text_config().num_hidden_layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The body owns no share itself; as the layers' root it lets the next layer be gathered while
    # one computes.
    in_layers = set(layers.parameters())
    fully_shard(
        body,
        mesh=mesh,
        ignored_params={p for p in model.parameters() if p not in in_layers},
    )
    return model


@contextmanager
def gathered(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layer with its weights whole and in memory: of a spread one every process must ask for
    it, an offloaded one is read; any other layer as it is."""
    if not isinstance(layer, FSDPModule):
        with weights_here(*layer.modules()):
            yield layer
        return
    layer.unshard()
    try:
        yield layer
    finally:
        layer.reshard()


log = logging.getLogger(__name__)
LEADER = 0
FAILED = 70  # exit status: sysexits.h's EX_SOFTWARE
# Numbers of the first part of a message, 32 KiB: that of a round of 8 rows with 8,000 tokens each
# is whole.
FRAME = 4095
# Rank 0 may rest for months between two calls; a collective that ends before then would end all.
PATIENCE = datetime.timedelta(days=3650)
# Words of gloo and NCCL on a process that is gone, where a library underneath makes the collective.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
        "remote process exited")  # fmt: skip
SOURCE = re.compile(r"^\[\S+:\d+\] ")  # of a message of gloo, in its own code
# Rank, and the library's sentence.
ENDS = (
    "rank %d ends because another process has (%s); see why it ended, and start all of them again"
)


class Gone(RuntimeError):
    """Another process has ended."""


class Channel:
    """Values from rank 0 to all others, in order, over gloo whatever the calls themselves use."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def send(self, call: Any) -> None:
        """A named tuple whose tensors, nested ones included, arrive on the listeners' devices."""
        with meeting():
            dist.broadcast_object_list([_moved(call, "cpu")], src=LEADER, group=self._group)

    def receive(self, device: torch.device) -> Any:
        message: list[Any] = [None]
        with meeting():
            dist.broadcast_object_list(message, src=LEADER, group=self._group)
        return _moved(message[0], device)

    def send_numbers(self, numbers: torch.Tensor) -> None:
        """[n] int64 on the host, without pickling: one message, or two of more than `FRAME`
        numbers."""
        frame = torch.zeros(1 + FRAME, dtype=torch.int64)
        frame[0] = len(numbers)
        frame[1 : 1 + len(numbers)] = numbers[:FRAME]
        self._broadcast(frame)
        if len(numbers) > FRAME:
            self._broadcast(numbers[FRAME:].contiguous())

    def receive_numbers(self) -> torch.Tensor:
        frame = torch.empty(1 + FRAME, dtype=torch.int64)
        self._broadcast(frame)
        count = int(frame[0])
        if count <= FRAME:
            return frame[1 : 1 + count]
        rest = torch.empty(count - FRAME, dtype=torch.int64)
        self._broadcast(rest)
        return torch.cat([frame[1:], rest])

    def least(self, value: int) -> int:
        """The least of all ranks' values, which each gives at the same point."""
        values = torch.tensor([value], dtype=torch.int64)
        with meeting():
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._group)
        return int(values)

    def _broadcast(self, values: torch.Tensor) -> None:
        with meeting():
            dist.broadcast(values, src=LEADER, group=self._group)


@contextmanager
def meeting() -> Iterator[None]:
    """Around collectives."""
    try:
        yield
    except RuntimeError as error:
        # The first sentence: advice of the library follows.
        raise Gone(str(error).split(". ")[0]) from error


def lost_by(error: BaseException | None) -> str | None:
    """First sentence of an error that says that another process has ended; None for others, and for
    connections that are no collective's."""
    while error is not None:
        is_torchs = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
        if is_torchs or isinstance(error, Gone):
            return SOURCE.sub("", str(error).split(". ")[0].split("\n")[0])
        error = error.__cause__ or error.__context__
    return None


def end_if_lost(error: BaseException, *, saves: bool) -> None:
    """Ends this process with one sentence where another one of its group has ended: an orderly exit
    may wait for that one. `saves`: of a command that goes on from what it saved."""
    if (reason := lost_by(error)) is None:
        return
    said = ENDS % (rank(), reason) + (": they go on from what is saved" if saves else "")
    print(f"draftsmith: error: {said}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def rank() -> int:
    """That of this process in its group, or as the launcher says."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or "0")


@contextmanager
def in_step() -> Iterator[None]:
    """Around a call that all ranks make; whatever it raises ends this process."""
    try:
        yield
    except BaseException as error:
        # Not for any handler above to catch, nor for an orderly exit: both may wait for ranks that
        # wait for this one.
        if (reason := lost_by(error)) is not None:
            log.critical(ENDS, dist.get_rank(), reason)
            log.debug("a collective failed", exc_info=True)
        elif isinstance(error, UserError):
            log.critical("rank %d: %s; all processes end", dist.get_rank(), error)
        else:
            log.critical(
                "rank %d failed in a call that all ranks make; all of them end",
                dist.get_rank(),
                exc_info=True,
            )
        logging.shutdown()
        os._exit(FAILED)


def started() -> int:
    """Number of processes that a launcher started together, this one included."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def leave_signals_to_the_leader() -> None:
    """torchrun signals every process at once; rank 0 ends its work and says when to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def join(device: torch.device) -> None:
    """The group of the processes that torchrun started, each with a device of its own."""
    use_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if pins(device) else "gloo")


def leave_group() -> None:
    """Ends the process group while every rank is there. Left to the interpreter's exit, its threads
    abort now and then a rank that had finished ("terminate called without an active exception"),
    and torchrun calls the run failed."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _moved(value: Any, device: torch.device | str) -> Any:
    """Every tensor of a (nested) call on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*(_moved(field, device) for field in value))
    return value
