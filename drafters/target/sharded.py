"""A frozen target too large for one device, spread over several: each process holds a share of
every decoder layer, which is put together for the moment it runs (what ZeRO-3 does, here by torch's
`fully_shard`).

Embeddings, last norm and head stay whole, because drafts read them too, each at its own pace.
Processes may read different texts, as data-parallel training has them do; but all must make equally
many passes.

A process that another one leaves alone in a collective ends on the spot, with one sentence.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.drafters.target.load import can_prepare, load_model
from draftsmith.drafters.target.offload import weights_here
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.kernels.dispatch import pins, use_device

FAILED = 70  # exit status: sysexits.h's EX_SOFTWARE
# Words of gloo and NCCL on a process that is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
        "remote process exited")  # fmt: skip
SOURCE = re.compile(r"^\[\S+:\d+\] ")  # of a message of gloo, in its own code


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
        body, mesh=mesh, ignored_params={p for p in model.parameters() if p not in in_layers}
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


def lost_by(error: BaseException | None) -> str | None:
    """First sentence of an error that says that another process has ended; None for others, and for
    connections that are no collective's."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
            return SOURCE.sub("", str(error).split(". ")[0].split("\n")[0])
        error = error.__cause__ or error.__context__
    return None


def end_if_lost(error: BaseException, *, saves: bool) -> None:
    """Ends this process with one sentence where another one of its group has ended: an orderly exit
    may wait for that one. `saves`: of a command that goes on from what it saved."""
    if (reason := lost_by(error)) is None:
        return
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or "0")
    kept = ": they go on from what is saved" if saves else ""
    print(
        f"draftsmith: error: rank {rank} ends because another process has ({reason}); see why it "
        f"ended, and start all of them again{kept}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(FAILED)


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
