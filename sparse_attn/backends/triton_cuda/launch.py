"""A launch as a value: tests compile for GPUs that are not at hand exactly what a call would run."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

# Compiled kernels by all that they were compiled for. Triton looks them up by describing every argument anew at each
# launch, 19 us for 47 arguments on a busy 2-core x86 box; here the caller says what counts. From the release on with
# which this was tested.
_compiled: dict[tuple[Any, ...], Any] = {}
_MAX_COMPILED = 4096
_CAN_REUSE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


class Launch(NamedTuple):
    """A kernel with everything it is launched with, in the order of its parameters.

    Attributes:
        kernel, grid, warps: what, how often, how wide.
        tensors: tensors and TMA descriptors, then the softmax scale if the kernel has one.
        strides: numbers that a kernel is specialised on: whether they are 1, or multiples of 16.
        sizes: numbers that it is not specialised on: lengths and the like.
        constants: what the kernel is compiled for.
    """

    kernel: Any
    grid: tuple[int, int, int]
    warps: int
    tensors: tuple[Any, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]

    @property
    def args(self) -> tuple[Any, ...]:
        """All arguments."""
        return self.tensors + self.strides + self.sizes + self.constants

    def run(self, like: tuple[Any, ...] | None = None) -> None:
        """Launch on the current device and stream.

        Args:
            like: equal for calls on the same device whose tensors agree in dtype, all of them aligned to 16 bytes, and
                whose sizes all fit into 32 bits; None for calls of which that is not known.
        """
        if like is None or not _CAN_REUSE:
            self.kernel[self.grid](*self.args, num_warps=self.warps)
            return
        key = (self.kernel.fn, self.warps, self.strides, self.constants, like)
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[self.grid](*self.args)
            return
        compiled = self.kernel[self.grid](*self.args, num_warps=self.warps)
        if compiled is not None:  # None: interpreted
            if len(_compiled) >= _MAX_COMPILED:  # strides of ever other lengths
                _compiled.clear()
            _compiled[key] = compiled
