"""Block top-k sparse attention on every accelerator, behind one signature.

>>> out = sparse_attn.sparse_attention(q, k, v, index, block_size)
"""

from .api import backend_for, explain, problem_of, sparse_attention
from .contract import Backend, BackendSpec, Device, Problem, Requirement
from .errors import (
    BackendUnavailableError,
    FallbackWarning,
    PluginWarning,
    SparseAttnWarning,
    UnknownBackendError,
)
from .messages import Explanation
from .registry import backend_specs, last_backend, register_backend, unregister_backend, use_backend

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendSpec",
    "BackendUnavailableError",
    "Device",
    "Explanation",
    "FallbackWarning",
    "PluginWarning",
    "Problem",
    "Requirement",
    "SparseAttnWarning",
    "UnknownBackendError",
    "backend_for",
    "backend_specs",
    "explain",
    "last_backend",
    "problem_of",
    "register_backend",
    "sparse_attention",
    "unregister_backend",
    "use_backend",
]
