"""Starts the processes that share the target's weights, by torch's own agent, where torchrun has
not started them already."""

from __future__ import annotations

import logging
import os
import sys
import tempfile

import yaml
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from draftsmith.config import to_dict
from draftsmith.serve.config import ServeConfig

SHUTDOWN_S = 30  # beyond draining, until processes that have not ended are killed


def must_launch(config: ServeConfig) -> bool:
    return config.tensor_parallel > 1 and "WORLD_SIZE" not in os.environ


def launch(config: ServeConfig) -> int:
    """`draftsmith serve` in every process, until all have ended. A signal ends them in order, which
    is no failure."""
    # As torchrun has it: threads that wait for a core they share are ruinous.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(round(config.drain_s) + SHUTDOWN_S)
    # The processes have said themselves why they failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.tensor_parallel,
        run_id="draftsmith",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    # Readable by its owner alone, unlike a command line: it may hold API keys.
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as recipe:
        yaml.safe_dump(to_dict(config), recipe)
        recipe.flush()
        try:
            elastic_launch(settings, sys.executable)("-m", "draftsmith.cli", "serve", recipe.name)
        except SignalException:
            return 0
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            return failure.exitcode if failure.exitcode > 0 else 1
    return 0
