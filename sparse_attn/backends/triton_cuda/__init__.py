"""The Triton backend for CUDA GPUs from compute capability 8.0 on.

``adapter`` says what it can run, and runs it; ``plan`` chooses kernels and tile sizes by shape and device; ``call``
turns a call into launches, which ``launch`` makes cheap. Of the kernels, ``block_lists`` turns index into lists for
tiles of queries, ``union`` walks such a list with a tile, ``gather`` walks the blocks of one query, and ``tiles`` is
what these two share.
"""

from .adapter import backend

__all__ = ["backend"]
