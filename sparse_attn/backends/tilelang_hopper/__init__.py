"""The TileLang backend for Hopper GPUs (sm_90a).

``adapter`` says what it can run, and runs it; ``plan`` chooses kernel and tiles by shape and GPU; ``compiled`` has
kernels compiled and keeps them. Of the kernels, ``block_lists`` turns index into lists for tiles of queries, which
``union`` walks, or ``exact`` where products are slow; ``order`` deals queries into tiles where adjacent ones have
little in common; ``parts`` has macros for what walks a list.
"""

from .adapter import backend

__all__ = ["backend"]
