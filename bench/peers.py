"""Other libraries' kernels on the same data, for a ratio within one run. Each is imported only when it is asked for.

A peer takes a :class:`bench.cases.Case`, brings the data into its own layout beforehand (that is not timed) and returns
a call without arguments, whose result is ``[B, Hq, N, Dv]``. Dense attention computes another function than ours, a
yardstick; the others compute ours where their rules allow, which ``refuses`` says.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case, Point
from .dense import dense_mask
from .timers import GRAPHS


@dataclass(frozen=True)
class Peer:
    """One kernel of somebody else.

    Attributes:
        name: in tables.
        module: what has to be importable, and ``install`` what to type if it is not.
        prepare: case -> call.
        refuses: point -> why it cannot run it, or None.
        same_function: False for dense attention, which is checked against dense attention.
        devices: types of device that it runs on; none given, any.
        half_only: whether it takes fp16 and bf16 alone on an accelerator.
        waits: whether a call waits for the device, so that no CUDA graph can hold it.
        distribution: whose version says which it was; none given, torch's.
    """

    name: str
    module: str
    install: str
    prepare: Callable[[Case], Callable[[], Tensor]]
    refuses: Callable[[Point], str | None]
    same_function: bool = True
    devices: tuple[str, ...] = ()
    half_only: bool = False
    waits: bool = False
    distribution: str = "torch"

    @property
    def kind(self) -> str:
        """As in :class:`bench.measure.Row`."""
        return "peer" if self.same_function else "yardstick"

    @property
    def installed(self) -> bool:
        """Whether the module is there. Only its package is imported, if it is a part of one."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except Exception:  # a package that is not there, or breaks when it is imported
            return False

    def unavailable(self, case: Case, timer: str | None = None) -> str | None:
        """Say why it cannot run ``case`` on its device, or not be timed by ``timer``; or None."""
        device, dtype = case.q.device, case.q.dtype
        if not self.installed:
            return f"needs {self.module}, which is not installed, or broken: {self.install}"
        if self.devices and device.type not in self.devices:
            return f"needs a device of type {' or '.join(self.devices)}, got {device}"
        if self.half_only and dtype == torch.float32 and device.type != "cpu":
            return f"needs float16 or bfloat16, got {dtype}"
        if self.waits and timer in GRAPHS:
            return f"needs --timer do_bench or events, got {timer}: each call waits for the device"
        return self.refuses(case.point)


def _square(point: Point) -> str | None:
    if point.N == point.M and not point.q_offset:
        return None
    return f"needs N = M and q_offset = 0, got N={point.N}, M={point.M} and q_offset={point.q_offset}"


def _square_and_even(point: Point) -> str | None:
    return _square(point) or (None if point.Dv == point.D else f"needs D = Dv, got D={point.D} and Dv={point.Dv}")


def _dense(backend: SDPBackend) -> Callable[[Case], Callable[[], Tensor]]:
    def prepare(case: Case) -> Callable[[], Tensor]:
        g = case.point.Hq // case.point.Hk
        # The fastest form of the dense call: its own group support is not in all of torch's kernels.
        k, v = (x.repeat_interleave(g, 1) for x in (case.k, case.v))

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(case.q, k, v, is_causal=True)

        return call

    return prepare


def _flash_attn(module: str) -> Callable[[Case], Callable[[], Tensor]]:
    """FlashAttention 2 (package flash_attn) or 3 (module flash_attn_interface): q, k, v as ``[B, N, heads, D]``."""

    def prepare(case: Case) -> Callable[[], Tensor]:
        attend: Any = importlib.import_module(module).flash_attn_func
        q, k, v = (x.transpose(1, 2).contiguous() for x in (case.q, case.k, case.v))

        def call() -> Tensor:
            out = attend(q, k, v, causal=True)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # with lse in releases before 3.0

        return call

    return prepare


def _flex(case: Case) -> Callable[[], Tensor]:
    """torch's flex_attention, compiled, with a block mask per query tile and the exact rule as a mask function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    point = case.point
    g, bs = point.Hq // point.Hk, point.block_size
    positions = torch.arange(point.N, device=case.q.device) + point.q_offset
    chosen = torch.stack([
        torch.stack([
            dense_mask(lists, point.num_blocks * bs, bs, positions + point.num_blocks * bs)[:, ::bs] for lists in entry
        ])
        for entry in case.index
    ])  # fmt: skip

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return chosen[b, h // g, i, j // bs] & (j <= i + point.q_offset)

    blocks = create_block_mask(rule, point.B, point.Hq, point.N, point.M, device=case.q.device, _compile=True)
    torch.compiler.reset()  # each point is a compilation of its own: past torch's limit of them, it would run eagerly
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(case.q, case.k, case.v, block_mask=blocks, enable_gqa=True)


def _fla(case: Case) -> Callable[[], Tensor]:
    """fla-core's NSA selection branch alone: ``parallel_nsa`` would pool k and v beside it."""
    from fla.ops.nsa.parallel import parallel_nsa_fwd

    q, k, v, index = (x.transpose(1, 2).contiguous() for x in (case.q, case.k, case.v, case.index))
    topk, bs, scale = case.point.topk, case.point.block_size, case.point.D**-0.5
    return lambda: parallel_nsa_fwd(q, k, v, index, topk, bs, scale)[0].transpose(1, 2)


def _nsa_triton(case: Case) -> Callable[[], Tensor]:
    """The selection kernel of XunhaoLai's native-sparse-attention-triton, on the batch as one packed sequence."""
    attend: Any = importlib.import_module(_NSA_TRITON).topk_sparse_attention
    point = case.point
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (case.q, case.k, case.v))  # [B * N, heads, D]
    index = case.index.transpose(0, 1).flatten(1, 2).contiguous()  # [Hk, B * N, topk]
    ends = torch.arange(point.B + 1, dtype=torch.int32, device=q.device) * point.N

    def call() -> Tensor:
        return attend(q, k, v, index, point.block_size, ends).unflatten(0, (point.B, point.N)).transpose(1, 2)

    return call


def _nsa_triton_refuses(point: Point) -> str | None:
    if point.block_size not in (32, 64, 128, 256):
        return f"needs block_size 32, 64, 128 or 256, got {point.block_size}"
    return _square_and_even(point)


def _fla_refuses(point: Point) -> str | None:
    g = point.Hq // point.Hk
    if g < 16 or g & (g - 1):
        return f"needs Hq / Hk to be a power of two and at least 16, got {g}"
    if point.q_offset != point.M - point.N:
        return f"needs the queries at the end of the keys, got q_offset={point.q_offset}"
    return None


def _flex_refuses(point: Point) -> str | None:
    return None if point.N * point.num_blocks <= 2**26 else "its mask of blocks for each query would not fit"


_NSA_TRITON = "native_sparse_attention.ops.triton.topk_sparse_attention"
_GPU = ("cuda",)
PEERS = (
    Peer(
        "sdpa-cudnn", "torch", "", _dense(SDPBackend.CUDNN_ATTENTION), _square,
        same_function=False, devices=_GPU, half_only=True,
    ),
    Peer("sdpa-flash", "torch", "", _dense(SDPBackend.FLASH_ATTENTION), _square, same_function=False, half_only=True),
    Peer(
        "flash-attn", "flash_attn", "pip install flash-attn", _flash_attn("flash_attn"), _square_and_even,
        same_function=False, devices=_GPU, half_only=True, distribution="flash-attn",
    ),
    Peer(
        "flash-attn-3", "flash_attn_interface", "build it in hopper/ of github.com/Dao-AILab/flash-attention",
        _flash_attn("flash_attn_interface"), _square_and_even,
        same_function=False, devices=_GPU, half_only=True, distribution="flash-attn-3",
    ),
    Peer("flex", "torch", "", _flex, _flex_refuses),
    Peer("fla", "fla", "pip install fla-core", _fla, _fla_refuses, devices=_GPU, distribution="fla-core"),
    Peer(
        "nsa-triton", _NSA_TRITON, "install it from github.com/XunhaoLai/native-sparse-attention-triton",
        _nsa_triton, _nsa_triton_refuses,
        devices=_GPU, half_only=True, waits=True, distribution="native-sparse-attention-triton",
    ),
)  # fmt: skip
