"""A pair, and text that drafts in place of its draft or beside it: flags of `serve` and of what starts a server. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import option
from draftsmith.drafters.config import Pair
from draftsmith.drafters.options import SuffixOptions


@dataclass(frozen=True, kw_only=True)
class ServedPair(Pair):
    ngram: bool = option(False, "draft by looking up the longest matching n-gram in the request's own text")
    prompt_lookup_min: int = option(2, "shortest n-gram looked up")
    prompt_lookup_max: int = option(4, "longest n-gram looked up")
    suffix: bool = option(
        False,
        "draft the most frequent continuation in the request's own text and in finished requests; beside a draft, where sure",
    )
    suffix_share: float = option(0.8, "beside a draft: be sure of this share of k tokens")
    suffix_max_tree_depth: int = option(24, "longest context matched")
    suffix_max_cached_requests: int = option(10000, "finished requests searched, the oldest forgotten first; 0 shares nothing")
    suffix_max_cached_tokens: int = option(2**21, "tokens of finished requests held at most, about 70 bytes each")
    suffix_max_spec_factor: float = option(1.0, "drafted tokens a token of matching context")
    suffix_max_spec_offset: float = option(0.0, "drafted tokens added to that")
    suffix_min_token_prob: float = option(0.1, "a draft ends before the chance of having come so far falls below this")
    fallback: str = option(
        "none", "who drafts while the trained draft rests after a failure", choices=("none", "ngram", "suffix")
    )

    def suffix_options(self) -> SuffixOptions:
        return SuffixOptions(
            max_tree_depth=self.suffix_max_tree_depth,
            max_cached_requests=self.suffix_max_cached_requests,
            max_cached_tokens=self.suffix_max_cached_tokens,
            max_spec_factor=self.suffix_max_spec_factor,
            max_spec_offset=self.suffix_max_spec_offset,
            min_token_prob=self.suffix_min_token_prob,
        )
