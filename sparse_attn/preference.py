"""Which backend is tried first on which architecture: a table, nothing else.

The first row whose pattern matches ``Device.arch`` counts. The order within a row is the order of measured speed on
that architecture (docs/performance.md). Backends that a row does not name, as plugins, come after those it does and
before the fallback, which is always last: on a CPU, for one, a plugin made for CPUs comes first.
"""

# What is left when nothing made for the device can run a call; never the better choice on an accelerator.
FALLBACK = "reference"

PREFERENCE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sm80", ("triton", FALLBACK)),
    ("sm90", ("tilelang", "triton", FALLBACK)),
    ("sm*", ("triton", FALLBACK)),
    # The order of these two is by argument until a 910B has run them: a kernel made for the operator reads each block
    # once for several queries, the fused operator once per query. Until then torch_npu runs only where it is asked for
    # (BackendSpec.automatic): this is its place afterwards.
    ("ascend910b", ("triton_ascend", "torch_npu", FALLBACK)),
    ("*", (FALLBACK,)),
)
