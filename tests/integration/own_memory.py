"""Memory that a process takes for itself while it works, and a target that is large enough to
see."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# Source for processes of their own: `grown(work)` is the most that their own memory grows while
# `work()` runs and what it gives is kept. Pages of files that are mapped do not count.
GROWN = """
import threading
def own_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(one for one in lines if one.startswith("RssAnon")).split()[1])
def grown(work):
    before, found, ended = own_bytes(), [], threading.Event()
    def watch():
        while not ended.wait(0.002):
            found.append(own_bytes())
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    ended.set()
    watcher.join()
    return max([*found, own_bytes()]) - before
"""


def large_target(folder: Path, *, layers: int, **shape: int) -> int:
    """Writes bfloat16 weights into the folder; their bytes in float32."""
    config = AutoConfig.for_model(
        "llama", hidden_size=1024, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=288, **shape,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu").bfloat16()
    for parameter in model.parameters():
        # Equal rows would make every expert as good as every other.
        torch.nn.init.normal_(parameter, std=0.01)
    model.save_pretrained(folder)
    return 2 * (folder / "model.safetensors").stat().st_size
