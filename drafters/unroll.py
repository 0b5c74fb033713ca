"""Training-time unrolling of a feature head: every anchor drafts at once, each query seeing exactly what it would when serving.

Step 0 runs the head over true states. At step s the query at column t continues the draft that was anchored at column t - s, so
it sees the true keys (of step 0) at columns <= t - s, and of each later step j only its own chain's key, at column t - (s - j).

L columns, S steps so far, keys and values [B, kv_heads, L, dim].
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

# Queries of a chunk meet only the keys that some of them may see: half of step 0's, and a diagonal band of every later step.
CHUNK = 128


class UnrollPass:
    """An `AttentionContext` for one attention layer; call `next_step()` between steps."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.step = 0

    def next_step(self) -> None:
        assert len(self.keys) == self.step + 1, "one attention call a step"
        self.step += 1

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sliding_window is not None or softcap is not None or sinks is not None:
            raise ValueError("a feature head with a sliding window, soft cap or sinks cannot be unrolled; use plain attention")
        # Under autocast the rotated queries and keys come wider than the values.
        query, key = query.to(value.dtype), key.to(value.dtype)
        self.keys.append(key)
        self.values.append(value)
        length = query.shape[2]
        outputs = [self._chunk(query, begin, min(begin + CHUNK, length), scaling) for begin in range(0, length, CHUNK)]
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _chunk(self, query: torch.Tensor, begin: int, end: int, scaling: float) -> torch.Tensor:
        columns = torch.arange(begin, end, device=query.device)[:, None]
        keys, values, masks = [], [], []
        for step, (key, value) in enumerate(zip(self.keys, self.values)):
            back = self.step - step
            # Nobody in the chunk sees the columns outside [low, high). Every query sees at least its own key, that of this step.
            low, high = (0 if step == 0 else max(0, begin - back)), max(0, end - back)
            seen = torch.arange(low, high, device=query.device)[None, :]
            keys.append(key[:, :, low:high])
            values.append(value[:, :, low:high])
            masks.append(seen <= columns - back if step == 0 else seen == columns - back)
        return scaled_dot_product_attention(
            query[:, :, begin:end],
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            attn_mask=torch.cat(masks, dim=1),
            scale=scaling,
            enable_gqa=query.shape[1] != keys[0].shape[1],
        )
