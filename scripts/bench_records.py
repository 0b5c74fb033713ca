"""What recording costs; `scripts/bench_records --help`. Turns with and without a buffer alternate, so that a loaded machine slows
them alike; each pair of turns answers the same prompts with the same seeds."""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, sleep, thread_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from draftsmith.distill.buffer import BufferReader, BufferWriter
from draftsmith.distill.folder import Folder
from draftsmith.drafters.checkpoint import load
from draftsmith.drafters.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine import Engine
from draftsmith.serve.recorder import Recorder
from draftsmith.serve.request import SamplingParams

# What a round lasts, what the engine's thread works for it, and what all threads do: the writer's work costs throughput too where
# no core is free for it.
CLOCKS = ("wall", "engine_thread_cpu", "process_cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", required=True, help="a folder that draftsmith generate wrote; its prompts are asked")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--turns", type=int, default=12, help="pairs of turns, after one that does not count")
    parser.add_argument("--out", type=Path, help="writes the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load(options.target, dtype="float32")
    prompts = read_prompts(options.data, options.batch * (options.turns + 1))
    with tempfile.TemporaryDirectory() as folder:
        report = {"load_average_before": os.getloadavg()[0], **measure(target, prompts, options, folder)}
    report["taps"] = taps(target, load(options.draft, target).taps, [prompt + prompt for prompt in prompts[:8]])
    report["load_average_after"] = os.getloadavg()[0]
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


class Meter:
    """Seconds that the engine's thread works for recording: the part of the cost that no other core can take over."""

    def __init__(self) -> None:
        self.seconds, self.counts = 0.0, False

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun_s = thread_time()
            result = work(*arguments)
            self.seconds += (thread_time() - begun_s) * self.counts
            return result

        return timed


def read_prompts(data: str, count: int) -> list[list[int]]:
    table = pa.concat_tables([pq.read_table(path) for path in sorted(Path(data).glob("part-*.parquet"))])
    found = [tokens[:48] for tokens in table["input_ids"].to_pylist() if len(tokens) >= 48]
    return [found[index % len(found)] for index in range(count)]


def measure(target: Target, prompts: list[list[int]], options: argparse.Namespace, folder: str) -> dict[str, Any]:
    engine = Engine(target, load(options.draft, target), EngineConfig(k=options.k, max_batch=options.batch))
    writer = BufferWriter(folder)
    meter = Meter()
    engine._round_laws = meter.around(engine._round_laws)
    recorders = {
        "on": Recorder(writer, target=target.name, target_revision=target.revision),
        "off": Recorder(None, target=target.name, target_revision=target.revision),
    }
    on = recorders["on"]
    on.round, on.finish = meter.around(on.round), meter.around(on.finish)
    spent: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in CLOCKS} for name in recorders}
    for turn in range(options.turns + 1):
        asked = prompts[turn * options.batch : (turn + 1) * options.batch]
        for name in ("on", "off") if turn % 2 else ("off", "on"):
            engine.recorder, meter.counts = recorders[name], turn > 0 and name == "on"
            clocks = answer(engine, asked, options, seed=turn)
            if name == "on":
                clocks["process_cpu"] += drain(writer)
            if turn > 0:
                for clock, seconds in clocks.items():
                    spent[name][clock].append(seconds)
    writer.close()
    records = BufferReader(folder).read(max_records=10**9).records
    positions = sum(len(record.drafted) for record in records)
    size = sum(shard.bytes for shard in Folder(folder).shards())
    cost = {clock: [on / off - 1 for on, off in zip(spent["on"][clock], spent["off"][clock])] for clock in CLOCKS}
    return {
        "percent_more": {
            clock: {"median": round(100 * statistics.median(values), 2), "quartiles": [round(100 * value, 2) for value in
                    statistics.quantiles(values, n=4)[::2]]}
            for clock, values in cost.items()
        },
        "percent_of_engine_thread": round(100 * meter.seconds / sum(spent["on"]["engine_thread_cpu"]), 2),
        "bytes_a_position": round(size / positions, 1),
        "positions": positions,
        "records": len(records),
        "dropped": writer.dropped,
        "ms_a_turn": {name: round(1e3 * statistics.median(values["wall"]), 1) for name, values in spent.items()},
    }  # fmt: skip


def answer(engine: Engine, prompts: list[list[int]], options: argparse.Namespace, *, seed: int) -> dict[str, float]:
    """Seconds of the clock on the wall, of this thread's work and of all threads'."""
    params = [
        SamplingParams(temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True, seed=1000 * seed + index)
        for index in range(len(prompts))
    ]
    begun = perf_counter(), thread_time(), process_time()
    for prompt, one in zip(prompts, params, strict=True):
        engine.submit(prompt, one)
    while engine.busy:
        engine.step()
    ended = perf_counter(), thread_time(), process_time()
    return dict(zip(CLOCKS, (after - before for before, after in zip(begun, ended))))


def drain(writer: BufferWriter) -> float:
    """What one turn left in the queue is not the next turn's to pay for. Seconds of all threads."""
    begun_s = process_time()
    while writer._queue:
        writer._wake.set()
        sleep(0.005)
    return process_time() - begun_s


def taps(target: Target, layers: tuple[int, ...], texts: list[list[int]]) -> dict[str, float]:
    """Microseconds and bytes a position: taps and last state written and read again, against one pass of the target."""
    ids = torch.tensor(texts)
    mask = torch.ones_like(ids)
    target.states(ids, mask, layers)
    begun_s = perf_counter()
    with torch.no_grad():
        states, hidden = target.states(ids, mask, layers)
    pass_s = perf_counter() - begun_s
    parts = [hidden] if states is None else [states, hidden]
    begun_s = perf_counter()
    data = io.BytesIO()
    values = torch.cat(parts, dim=-1).flatten(0, 1).bfloat16().view(torch.int16).numpy().view(np.uint8)
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(values.shape[1]), len(values), [None, pa.py_buffer(values.tobytes())])
    pq.write_table(pa.table({"states": column}), data, compression="zstd", use_dictionary=False)
    data.seek(0)
    pq.read_table(data)
    store_s = perf_counter() - begun_s
    count = ids.numel()
    return {
        "recompute_us": round(1e6 * pass_s / count, 1),
        "write_and_read_us": round(1e6 * store_s / count, 1),
        "stored_bytes": round(len(data.getvalue()) / count, 1),
    }


if __name__ == "__main__":
    main()
