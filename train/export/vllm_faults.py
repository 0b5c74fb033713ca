"""Releases of vLLM whose sampled speculation has another distribution than the target's: one table
for the plugin, exports and guides.

Imports nothing of draftsmith, since the plugin reads it inside vLLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FIRST_RUNNER = "set VLLM_USE_V2_MODEL_RUNNER=0"
# Methods that only the second runner drafts with.
SECOND_RUNNER_ALONE = ("dspark",)


@dataclass(frozen=True)
class Fault:
    issue: int  # of vLLM
    minors: range  # releases 0.x that have it
    where: str  # runner and setting
    mends: tuple[str, ...]  # each is enough

    @property
    def releases(self) -> str:
        return f"0.{self.minors[0]} to 0.{self.minors[-1]}"

    def is_in(self, version: str) -> bool:
        found = re.match(r"0\.(\d+)", version)
        return found is not None and int(found[1]) in self.minors

    def sentence(self, method: str, version: str = "") -> str:
        """Fault of one release, by default of all that have it, and what helps where
        this method drafts."""
        without_first = method in SECOND_RUNNER_ALONE
        mends = [one for one in self.mends if one != FIRST_RUNNER or not without_first]
        return (
            f"vLLM {version or self.releases} {self.where} does not sample from the target's "
            f"distribution at a temperature (vLLM #{self.issue}): {', '.join(mends[:-1])} or "
            f"{mends[-1]}"
        )


# A rejected token is replaced by the noise that it was drafted with. Read in the sources of 0.19 to
# 0.32; 0.21 is the first that has the setting. The second runner is the default of Qwen3 since
# 0.22, of Llama and Mistral since 0.23, of all dense models since 0.25, of all models since 0.29.
SHARED_NOISE = Fault(
    54282,
    range(21, 29),
    "with its V2 model runner and draft_sample_method probabilistic",
    ("take 0.29 or later", FIRST_RUNNER, "leave draft_sample_method at greedy"),
)
# The first runner's `expand_kernel` writes temperatures into a copy. Read up to 0.33.
CPU_KERNEL = Fault(
    55005,
    range(24, 34),
    "with speculation on a CPU without Triton",
    ("set mend_expand_kernel among the plugin's settings", "serve without speculation"),
)
FAULTS = (SHARED_NOISE, CPU_KERNEL)
