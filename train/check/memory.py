"""Checks of memory: the needs of serving and training against what the machine has, and the options
by which a target that is too large fits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from draftsmith.drafters.quirks.kept_state import NUM_SIDES
from draftsmith.drafters.target.load import build_model, load_config, own_dtype
from draftsmith.drafters.target.offload import converts
from draftsmith.drafters.target.quantised import quantisation
from draftsmith.drafters.target.taps import body_name, decoder_layers
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.dispatch import pins, reads_freely
from draftsmith.kernels.host_memory import host_bytes
from draftsmith.train.check.finding import Finding, fail, ok, warn

GIB = 2**30
TRAINED_BYTES = 16  # of a trained parameter: float32 weight, gradient and two moments
OFFLOADED = {"cpu": "in the host's memory", "disk": "in its files"}
SHARES = (2, 4, 8, 16, 32, 64)  # numbers of processes that are offered


class Parts(NamedTuple):
    """Bytes of a target's weights: of each decoder layer, and of all else."""

    beside: int
    layers: tuple[int, ...]
    converts: bool = False  # whether layers are made of other tensors, and so not read from files

    @property
    def whole(self) -> int:
        return self.beside + sum(self.layers)

    def on_device(self, *, shares: int = 1, offload: str | None = None) -> int:
        """Memory of the device of one process. In shares the layer that runs and the next one are
        whole; of an offloaded target at most one layer is there."""
        if offload is not None:
            return self.beside + max(self.layers)
        if shares == 1:
            return self.whole
        gathered = sum(sorted(self.layers)[-2:])
        return self.beside + -(-sum(self.layers) // shares) + gathered


def parts_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Parts:
    """Parts of a model, which may be on the meta device; with `dtype` as if its weights had it."""
    body = getattr(model, body_name(model))
    num_layers = model.config.get_text_config().num_hidden_layers
    modules = decoder_layers(body, num_layers)
    layers = tuple(num_bytes(one, dtype) for one in modules)
    return Parts(num_bytes(model, dtype) - sum(layers), layers, converts(modules, model))


def outlined_parts(name: str, dtype: torch.dtype | str, *, trust_remote_code: bool) -> Parts | None:
    """Parts of a target that is not loaded, by its configuration; None where its weights are
    quantised, or where it cannot be read, for which loading has a sentence."""
    try:
        config = load_config(name, trust_remote_code=trust_remote_code)
        if quantisation(config):
            return None
        with torch.device("meta"):
            model = build_model(config, trust_remote_code=trust_remote_code)
        return parts_of(model, own_dtype(config) if isinstance(dtype, str) else dtype)
    except Exception:  # a model's own code raises what it likes
        return None


def check_fit(
    name: str,
    device: torch.device,
    *,
    dtype: torch.dtype | str,
    offload: str | None = None,
    trust_remote_code: bool,
) -> Finding | None:
    """Weights of a target that is yet to be loaded; None where they are not known."""
    parts = outlined_parts(name, dtype, trust_remote_code=trust_remote_code)
    if parts is None:
        return None
    needed, available = parts.on_device(offload=offload), available_bytes(device)
    at_once = "" if needed == parts.whole else f", {needed / GIB:.3g} GiB of them at a time"
    what = (
        f"{parts.whole / GIB:.3g} GiB of weights{at_once}; {device} has {available / GIB:.3g} GiB"
    )
    if needed >= available:
        ways = ways_to_fit(parts, device, offloads=offload is None)
        return fail("target.fits", what, ways or "use a smaller target")
    if offload == "cpu" and sum(parts.layers) >= host_bytes():
        what += f"; its layers do not fit the host's {host_bytes() / GIB:.3g} GiB"
        mend = "use a smaller target" if parts.converts else "give --target-offload disk"
        return fail("target.fits", what, mend)
    return ok("target.fits", what)


def ways_to_fit(
    parts: Parts, device: torch.device, *, beside: int = 0, offloads: bool = True
) -> str:
    """Options with which a target leaves room for `beside` bytes more on the device; empty where
    none does. Processes on one CPU share its memory."""
    room = available_bytes(device) - beside
    is_cpu = reads_freely(device)
    ways = []
    fitting = [shares for shares in SHARES if parts.on_device(shares=shares) < room]
    if fitting:
        ways.append(
            f"--target-shares {fitting[0]} on as many {'machines' if is_cpu else 'devices'}"
        )
    offload = "cpu" if not is_cpu and sum(parts.layers) < host_bytes() else "disk"
    is_read = offload == "cpu" or not parts.converts
    if parts.on_device(offload=offload) < room and offloads and is_read:
        ways.append(f"--target-offload {offload}")
    return f"give {', or '.join(ways)}" if ways else ""


def check_serving(target: Target, draft: torch.nn.Module | None, sequences: int) -> Finding:
    """Weights, in the types that they are served in, keys and values of `sequences` texts of full
    length."""
    tokens, states = target.max_positions, NUM_SIDES * target.state_layers.num_bytes
    weights, per_token = num_bytes(target.model), bytes_per_token(target, target)
    if draft is not None:
        weights += num_bytes(draft)
        per_token += bytes_per_token(draft, target)
    cache = int((per_token * tokens + states) * sequences)
    what = (
        f"weights {weights / GIB:.2f} GiB, keys and values {per_token / 1024:.1f} KiB per token, "
        f"{cache / GIB:.2f} GiB for {sequences} texts of {tokens} tokens"
    )
    if states:
        what += f", of which states {states / 1024:.1f} KiB each"
    mend = (
        "serve fewer or shorter sequences at once"
        if weights < available_bytes(target.device)
        else "serve it with vLLM, over several devices, or use a smaller target"
    )
    return compare("memory.serving", what, weights + cache, target.device, mend)


def check_training(
    target: Target, draft: torch.nn.Module, max_length: int, *, offload: str | None = None
) -> Finding:
    """The frozen target beside the draft's float32 weights, gradients and two Adam moments."""
    trained = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    parts = parts_of(target.model)
    own = TRAINED_BYTES * trained
    whole = parts.on_device(offload=offload) + own
    what = (
        f"{trained / 1e6:.1f} M trained parameters; {whole / GIB:.2f} GiB for "
        f"weights and optimizer, activations of rows up to {max_length} tokens on top"
    )
    if offload is not None:
        what += f"; {sum(parts.layers) / GIB:.2f} GiB of layers {OFFLOADED[offload]}"
    ways = ways_to_fit(parts, target.device, beside=own, offloads=offload is None)
    mend = ways or "use --deepspeed recipes/zero3.json or a smaller draft"
    return compare("memory.training", what, whole, target.device, mend)


def compare(check: str, what: str, needed: float, device: torch.device, mend: str) -> Finding:
    available = available_bytes(device)
    what += f"; {available / GIB:.1f} GiB on {device}"
    return ok(check, what) if needed < available else warn(check, what, mend)


def num_bytes(model: torch.nn.Module, dtype: torch.dtype | None = None) -> int:
    """Bytes of parameters and buffers, of floating-point ones as if they had `dtype`."""
    return sum(
        tensor.numel()
        * (dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size())
        for tensor in (*model.parameters(), *model.buffers())
    )


def bytes_per_token(pooled: Target | torch.nn.Module, target: Target) -> float:
    block_size = 16
    pool = pooled.new_pool(1, block_size, target.device, target.dtype)
    return 0.0 if pool is None else pool.num_bytes / block_size


def available_bytes(device: torch.device) -> int:
    """Memory of the whole device: what runs on it now may be gone when the server starts."""
    if pins(device):
        return torch.cuda.get_device_properties(device).total_memory
    return host_bytes()
