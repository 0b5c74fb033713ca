from __future__ import annotations

from draftsmith.kernels.contexts import bounds_of, bucket_of


def test_every_context_lies_in_its_bucket_and_buckets_touch() -> None:
    for context in (0, 1, 255, 256, 511, 512, 1023, 1024, 4095, 4096, 131_072):
        begin, end = bounds_of(bucket_of(context))
        assert begin <= context < end
    assert [bounds_of(bucket)[1] for bucket in range(6)] == [
        bounds_of(bucket + 1)[0] for bucket in range(6)
    ]
