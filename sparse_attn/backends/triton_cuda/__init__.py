"""The Triton backend for CUDA GPUs from compute capability 8.0 on.

``adapter`` takes a call apart and launches; ``plan`` chooses kernels and tile sizes by shape and device; ``block_lists``
turns index into lists for tiles of queries; ``union`` walks such a list with a tile; ``gather`` walks the blocks
of one query; ``tiles`` is what the two share.
"""

from .adapter import backend

__all__ = ["backend"]
