"""The backend that maps the operator onto torch_npu's fused attention for decoding with a paged cache.

``mapping`` turns a call into such a decoding, in plain torch: every query of every key/value head is a sequence of its
own with one new token, whose pages are the blocks that it selects. ``fused_op`` is the one place that knows torch_npu.
``adapter`` says what that operator takes, calls it, and undoes the mapping.
"""

from .adapter import backend

__all__ = ["backend"]
