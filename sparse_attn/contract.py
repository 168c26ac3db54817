"""What a backend is told, what it promises, and how it is announced.

Everything here is plain data or a protocol: no tensors, no registry, no backend. A backend imports this module and its
own folder, nothing else of the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class Device(NamedTuple):
    """What a choice of backend may depend on, as a value: tests make up devices that are not at hand.

    ``type`` is torch's device type (``"cuda"``, ``"npu"``, ``"cpu"``); ``arch`` names the instruction set a kernel is
    built for (``"sm90"``, ``"ascend910b"``, ``"cpu"``); ``name`` is what its vendor calls it (``"NVIDIA H20"``).
    """

    type: str
    arch: str
    name: str

    def __str__(self) -> str:
        return self.name if self.name == self.arch else f"{self.name} ({self.arch})"


class Problem(NamedTuple):
    """One call of ``sparse_attention`` without its tensors: all that may decide which backend runs it.

    A named tuple, because it is also the key under which the choice is cached, once per call: it hashes at C speed.
    Strides are left out on purpose (every backend takes any strides), and of ``q_offset`` only whether it is zero
    (it changes at every decoding step).
    """

    device: Device
    dtype: torch.dtype
    index_dtype: torch.dtype
    B: int
    Hq: int
    Hk: int
    N: int
    M: int
    D: int
    Dv: int
    topk: int
    block_size: int
    has_q_offset: bool = False
    return_lse: bool = False
    needs_grad: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key/value head, ``Hq / Hk``."""
        return self.Hq // self.Hk

    @property
    def num_blocks(self) -> int:
        """Key blocks, ``ceil(M / block_size)``; the last one may be partial."""
        return -(-self.M // self.block_size)


@runtime_checkable
class Backend(Protocol):
    """An implementation of the operator.

    It may also have a method ``slow_for(problem) -> Sequence[str]``, asked where it can run the problem: why another
    backend made for the device should rather do so, if there is one, which is then chosen. Usually none.

    And it may have a method ``backward(grad_out, grad_lse, out, lse, q, k, v, index, block_size, sm_scale, q_offset)
    -> (dq, dk, dv)``, with ``grad_lse`` a tensor or None; without one, the registry refuses calls that need gradients
    on its behalf.
    """

    def unsupported(self, problem: Problem) -> Sequence[str]:
        """Say why this backend cannot run ``problem``: empty means that it can.

        Called once per distinct problem, on a device of the announced architectures. Each reason says what is needed,
        then what was got: ``"needs D in {64, 128}, got D=96"``. An exception raised here is a bug and propagates.
        """
        ...

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        index: torch.Tensor,
        block_size: int,
        sm_scale: float,
        q_offset: int,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute ``out`` ``[B, Hq, N, Dv]`` in q's dtype and, with ``return_lse``, ``lse`` ``[B, Hq, N]`` in fp32.

        Arguments are those of ``sparse_attn.sparse_attention``, already checked, with any strides. Both results are
        new, contiguous tensors. ``index`` must not be read on the host. The current device need not be q's: a backend
        that launches kernels by itself sets it.
        """
        ...


class Requirement(NamedTuple):
    """A package that a backend imports: the module's name, and the oldest version that was tested, if that matters.

    ``distribution`` is the name under which the package is installed, where it differs from the module's.
    """

    module: str
    minimum: str | None = None
    distribution: str | None = None

    def __str__(self) -> str:
        name = self.distribution or self.module
        return f"{name} >= {self.minimum}" if self.minimum else name


@dataclass(frozen=True)
class BackendSpec:
    """The announcement of a backend: data, readable without importing it.

    Args:
        name: what users write, ``[a-z][a-z0-9_]*``.
        target: ``"package.module:attribute"`` of an object that follows :class:`Backend`; imported on first use.
        architectures: shell patterns over ``Device.arch``, e.g. ``("sm80", "sm9*")``; any sequence of strings.
        requires: packages that ``target`` imports beside torch; any sequence of :class:`Requirement`.
        install: what to type when one of them is missing.
        automatic: whether the automatic choice may take it. If not, it runs only where it is asked for by name.

    Raises:
        TypeError, ValueError: if a field is malformed.
    """

    name: str
    target: str
    architectures: tuple[str, ...]
    requires: tuple[Requirement, ...] = ()
    install: str | None = None
    automatic: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name) or self.name == "auto":
            raise ValueError(f"BackendSpec.name must match [a-z][a-z0-9_]* and not be 'auto', got {self.name!r}")
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.target):
            raise ValueError(f"BackendSpec.target must look like 'package.module:attribute', got {self.target!r}")
        for field, kind in (("architectures", str), ("requires", Requirement)):
            value = getattr(self, field)
            if isinstance(value, (str, Requirement)) or not all(isinstance(x, kind) for x in value):
                raise TypeError(f"BackendSpec.{field} must be a tuple of {kind.__name__}, got {value!r}")
            object.__setattr__(self, field, tuple(value))  # a list would not hash
        if not isinstance(self.automatic, bool):
            raise TypeError(f"BackendSpec.automatic must be a bool, got {self.automatic!r}")
        if not self.architectures:
            raise ValueError("BackendSpec.architectures must name at least one pattern, got none")

    @property
    def module(self) -> str:
        """The module part of ``target``."""
        return self.target.partition(":")[0]
