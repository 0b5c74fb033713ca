"""A frozen target too large for one device, spread over several: each process holds a share of
every decoder layer, which is put together for the moment it runs (what ZeRO-3 does, here by torch's
`fully_shard`).

Embeddings, last norm and head stay whole, because drafts read them too, each at its own pace.
Processes may read different texts, as data-parallel training has them do and tensor parallelism
cannot; but all must make equally many passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from draftsmith.drafters.target.load import can_prepare, load_model
from draftsmith.drafters.target.offload.hooks import weights_here
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.errors import UserError


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
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
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


def check_shares(shares: int, command: str) -> None:
    """Raises `UserError` where the processes of `command` make no whole number of copies."""
    running = os.environ.get("WORLD_SIZE") or "1"
    if shares > 1 and int(running) % shares:
        raise UserError(
            f"option 'target_shares' is {shares} but {running} processes run; start a multiple of "
            f"{shares} with torchrun --nproc_per_node N -m draftsmith.cli {command} ..."
        )


def check_offload(offload: str | None, *, shares: int = 1, dtype: str) -> None:
    """Raises `UserError` for a target that is to run layer after layer where no process has its
    layers by itself."""
    others = {
        f"'target_shares' {shares}": shares > 1,
        "its dtype int8, which is made of weights that are loaded": dtype == "int8",
    }
    for what, is_given in others.items():
        if offload is not None and is_given:
            raise UserError(
                f"option 'target_offload' is {offload!r} and {what}; leave one of them out"
            )


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
