"""Checks of the processes of a launcher: the device of each, collectives between them, and a target
that is spread over them. All of them make every check."""

from __future__ import annotations

import socket
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from draftsmith.drafters.target.device import device_of
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError, first_line
from draftsmith.train.doctor.finding import FAIL, Finding, fail, ok
from draftsmith.train.doctor.memory import GIB, held_bytes, num_bytes

NUMBERS = 2**18  # of the collective that is tried, 1 MiB
TOKENS = 16


def check_group() -> list[Finding]:
    """Devices, and collectives where each process has one."""
    found, error = "", ""
    try:
        device = device_of()
        found = f"{socket.gethostname()} {device}"
    except UserError as refused:
        error = str(refused)
    both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(both)
    findings = [device_finding(gathered((found, error)))]
    if findings[0].status != FAIL:
        findings.append(check_collectives(device))
    return findings


def device_finding(places: list[tuple[str, str]]) -> Finding:
    """`places`: device and error of each process."""
    check = "processes.devices"
    for rank, (_, error) in enumerate(places):
        if error:
            what, _, mend = error.rpartition("; ")
            return fail(check, f"process {rank}: {what or error}", mend or "start fewer processes")
    devices = [device for device, _ in places]
    twice = next((one for one in devices if "cuda" in one and devices.count(one) > 1), None)
    if twice is not None:
        return fail(
            check,
            f"{devices.count(twice)} processes have the device {twice}",
            "start as many processes as a machine has devices, each with a LOCAL_RANK of its own",
        )
    return ok(check, f"{len(devices)} processes: {', '.join(devices)}")


def check_collectives(device: torch.device) -> Finding:
    """A sum over all processes, of values that each of them gives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((NUMBERS,), float(rank), device=device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.all_reduce(values.clone())
        begun_s = perf_counter()
        dist.all_reduce(values)
        is_right = bool((values == size * (size - 1) / 2).all())
    except RuntimeError as error:
        return fail(
            "processes.collectives",
            f"a sum over {size} processes by {backend} failed: {first_line(error)}",
            "see that all machines reach each other, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME",
        )
    took_ms = 1e3 * (perf_counter() - begun_s)
    if not all(gathered(is_right)):
        return fail(
            "processes.collectives",
            f"a sum over {size} processes by {backend} is wrong",
            "compare the versions of torch and of the drivers on the machines",
        )
    what = f"1 MiB is summed over {size} processes in {took_ms:.1f} ms by {backend}"
    return ok("processes.collectives", what)


def check_spread(target: Target, shares: int, loaded_s: float) -> Finding:
    """A target of which each process holds a share: bytes, and a pass that gives all the same."""
    held, whole = held_bytes(target.model), num_bytes(target.model)
    ids = torch.arange(TOKENS, device=target.device)[None] % target.vocab_size
    begun_s = perf_counter()
    hidden = target.states(ids, torch.ones_like(ids), ())[1].float().cpu()
    took_ms = 1e3 * (perf_counter() - begun_s)
    what = (
        f"{shares} processes hold {whole / GIB:.3g} GiB between them, {held / GIB:.3g} GiB each, "
        f"loaded in {loaded_s:.1f} s; a pass over {TOKENS} tokens takes {took_ms:.0f} ms"
    )
    states = gathered(hidden)
    if all(torch.equal(states[0], one) for one in states) and bool(hidden.isfinite().all()):
        return ok("processes.shares", what)
    return fail(
        "processes.shares",
        f"{what}, and gives the processes different states",
        "see that all machines read the same files",
    )


def fit_of_all(own: Finding | None) -> Finding | None:
    """The verdict on a target that is yet to be loaded, the same for all processes: that of the
    first one where it does not fit, else this one's own."""
    for rank, found in enumerate(gathered(own)):
        if found is not None and found.status == FAIL:
            return found._replace(what=f"process {rank}: {found.what}")
    return own


def gathered(value: Any) -> list[Any]:
    """The values of all processes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
