"""Ascend 910B, by a Triton kernel for its cube and vector cores (triton-ascend). See ``adapter`` for the way in."""

from .adapter import backend

__all__ = ["backend"]
