"""The torch operators behind the function: schemas, tracing, compiling, gradients under compile, graph capture."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import sparse_attn
from sparse_attn.backends import reference
from sparse_attn.errors import BackendUnavailableError

from .cases import CASES, make

pytestmark = pytest.mark.filterwarnings("ignore::sparse_attn.FallbackWarning")

ops = torch.ops.sparse_attn


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def op_arguments(case: str = "ragged", dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Any, ...]:
    x = CASES[case].build(dtype)
    tensors = [t.requires_grad_(grad) for t in (x.q, x.k, x.v)]
    return (*tensors, x.index, x.block_size, 0.2, x.q_offset)


@pytest.mark.parametrize("case", ["ragged", "layout_bnhd", "dv_larger", "no_queries"])
def test_opcheck_forward(case: str) -> None:
    torch.library.opcheck(ops.forward.default, op_arguments(case))


@pytest.mark.parametrize("case", ["ragged", "layout_bnhd", "dv_larger"])
def test_opcheck_forward_lse(case: str) -> None:
    torch.library.opcheck(ops.forward_lse.default, op_arguments(case))


@pytest.mark.parametrize("case", ["ragged", "layout_bnhd", "dv_larger"])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_differentiable(case: str, grad: bool) -> None:
    torch.library.opcheck(ops.differentiable.default, op_arguments(case, grad=grad))


@pytest.mark.parametrize("case", ["ragged", "dv_larger"])
@pytest.mark.parametrize("parts", ["both", "out", "lse"])
def test_opcheck_backward(case: str, parts: str) -> None:
    arguments = op_arguments(case)
    out, lse = ops.forward_lse.default(*arguments)
    grad_out = None if parts == "lse" else torch.randn_like(out)
    grad_lse = None if parts == "out" else torch.randn_like(lse)
    torch.library.opcheck(ops.backward.default, (grad_out, grad_lse, out, lse, *arguments))


def test_compiled_equals_eager(device: torch.device) -> None:
    x = CASES["ragged"].build(torch.float16).to(device)
    compiled = torch.compile(sparse_attn.sparse_attention, fullgraph=True)
    assert torch.equal(compiled(*x.args, **x.kwargs), sparse_attn.sparse_attention(*x.args, **x.kwargs))
    pair = zip(compiled(*x.args, **x.kwargs, return_lse=True),
               sparse_attn.sparse_attention(*x.args, **x.kwargs, return_lse=True), strict=True)  # fmt: skip
    for got, expected in pair:
        assert torch.equal(got, expected)


def test_compiled_between_other_operations(device: torch.device) -> None:
    x = CASES["layout_bnhd"].build(torch.float32).to(device)

    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = sparse_attn.sparse_attention(q * 2, k + 1, x.v, x.index, x.block_size)
        return out.transpose(1, 2).flatten(2).relu()

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x.q, x.k), layer(x.q, x.k))


@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_gradients(return_lse: bool, device: torch.device) -> None:
    """Without an autograd registration a compiled call would return no gradient, in silence."""
    x = CASES["ragged"].build(torch.float32).to(device)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]

    def loss() -> torch.Tensor:
        result = sparse_attn.sparse_attention(*x.args, **x.kwargs, return_lse=return_lse)
        return result[0].square().sum() + result[1].sum() if return_lse else result.square().sum()

    expected = torch.autograd.grad(loss(), leaves)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_of_lse_alone() -> None:
    x = make(torch.float32, N=40)
    x.q.requires_grad_()
    _, lse = sparse_attn.sparse_attention(*x.args, return_lse=True)
    (got,) = torch.autograd.grad(lse.where(lse.isfinite(), 0).sum(), x.q)
    assert got.abs().sum() > 0


def test_only_the_gradients_asked_for() -> None:
    x = make(torch.float32, N=40)
    x.v.requires_grad_()
    out = sparse_attn.sparse_attention(*x.args)
    out.sum().backward()
    assert x.v.grad is not None
    assert x.q.grad is None


def test_second_derivative_is_refused() -> None:
    x = make(torch.float32, N=8)
    x.q.requires_grad_()
    (grad,) = torch.autograd.grad(sparse_attn.sparse_attention(*x.args).sum(), x.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_override_after_compiling(device: torch.device, register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made when the compiled code runs, not when it is traced."""

    class Sevens:
        def unsupported(self, problem: Any) -> list[str]:
            return []

        def __call__(self, q: torch.Tensor, k: Any, v: torch.Tensor, *_: Any) -> Any:
            return q.new_full((*q.shape[:3], v.shape[3]), 7), q.new_zeros(q.shape[:3], dtype=torch.float32)

    register("sevens", Sevens(), "no-device-chooses-this-by-itself", "*")
    x = make(torch.float16, N=64).to(device)
    compiled = torch.compile(lambda: sparse_attn.sparse_attention(*x.args), fullgraph=True)
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "reference")
    expected = compiled()
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "sevens")
    assert compiled().unique().tolist() == [7]
    assert sparse_attn.last_backend() == "sevens"
    with sparse_attn.use_backend("reference"):
        assert torch.equal(compiled(), expected)
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "torch_npu")
    with pytest.raises(BackendUnavailableError, match="torch_npu needs a device"):
        compiled()


def test_use_backend_inside_compiled_code_is_honoured(device: torch.device) -> None:
    """It may break the graph; it must not be ignored."""
    x = make(torch.float16, N=64).to(device)

    def forced() -> Any:
        with sparse_attn.use_backend("torch_npu"):
            return sparse_attn.sparse_attention(*x.args)

    with pytest.raises(BackendUnavailableError, match="torch_npu needs a device"):
        torch.compile(forced)()


def test_arguments_are_checked_in_compiled_code() -> None:
    x = make(torch.float16, N=64)
    compiled = torch.compile(sparse_attn.sparse_attention)
    with pytest.raises(ValueError, match="v must be"):
        compiled(x.q, x.k, x.v[:, :1], x.index, x.block_size)


def test_lengths_do_not_recompile(device: torch.device) -> None:
    """Growing lengths and a moving q_offset, as in decoding: two graphs at the most, one static and one dynamic."""
    frames = 0

    def count(graph: torch.fx.GraphModule, example: Any) -> Any:
        nonlocal frames
        frames += 1
        return graph.forward

    compiled = torch.compile(sparse_attn.sparse_attention, backend=count, fullgraph=True)
    whole = make(torch.float32, Hq=4, Hk=2, N=160, topk=3).to(device)
    for n in range(128, 141):
        x = replace(whole, q=whole.q[:, :, :7], index=whole.index[:, :, :7], k=whole.k[:, :, :n], v=whole.v[:, :, :n])
        got = compiled(*x.args, q_offset=n - 7)
        assert torch.equal(got, sparse_attn.sparse_attention(*x.args, q_offset=n - 7))
    assert frames <= 3


def test_dynamic_shapes(device: torch.device) -> None:
    compiled = torch.compile(sparse_attn.sparse_attention, fullgraph=True, dynamic=True)
    for case in ("ragged", "tiny5", "d100"):
        x = CASES[case].build(torch.float16).to(device)
        assert torch.equal(compiled(*x.args, **x.kwargs), sparse_attn.sparse_attention(*x.args, **x.kwargs))


def test_export_keeps_one_operator() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, index: Any) -> Any:
            return sparse_attn.sparse_attention(q, k, v, index, 32)

    x = make(torch.float16, N=64)
    program = torch.export.export(Layer(), (x.q, x.k, x.v, x.index))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [ops.forward.default]
    assert torch.equal(program.module()(x.q, x.k, x.v, x.index), sparse_attn.sparse_attention(*x.args))


def test_meta_tensors_give_shapes() -> None:
    x = make(torch.float16, N=64)
    tensors = [t.to("meta") for t in (x.q, x.k, x.v, x.index)]
    out, lse = sparse_attn.sparse_attention(*tensors, 32, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", x.q.shape, x.q.shape[:3])


def test_no_grad_modes() -> None:
    x = make(torch.float16, N=64)
    x.q.requires_grad_()
    expected = sparse_attn.sparse_attention(*x.args).detach()
    with torch.no_grad():
        assert torch.equal(sparse_attn.sparse_attention(*x.args), expected)
    with torch.inference_mode():
        out = sparse_attn.sparse_attention(*x.args)
        assert out.is_inference()
        assert torch.equal(out, expected)


def test_graph_traced_for_inference_still_has_gradients(register: Any) -> None:
    """Its operator has a gradient of its own: no None, no silence. Autograd cannot look into this backend."""

    class Opaque:
        def unsupported(self, problem: Any) -> list[str]:
            return []

        def __call__(self, *arguments: Any) -> Any:
            with torch.no_grad(), sparse_attn.use_backend("reference"):
                q, k, v, index, block_size, sm_scale, q_offset, _ = arguments
                return sparse_attn.sparse_attention(
                    q, k, v, index, block_size, sm_scale, q_offset=q_offset, return_lse=True
                )

        def backward(self, *arguments: Any) -> Any:
            return reference.backend.backward(*arguments)

    register("opaque", Opaque(), "cpu")

    class Layer(torch.nn.Module):
        def __init__(self, return_lse: bool) -> None:
            super().__init__()
            self.return_lse = return_lse

        def forward(self, q: Any, k: Any, v: Any, index: Any) -> Any:
            result = sparse_attn.sparse_attention(q, k, v, index, 32, return_lse=self.return_lse)
            return result[0] + result[1][..., None] * 0 if self.return_lse else result

    x = make(torch.float32, N=64, select_all=True)
    tensors = x.q, x.k, x.v, x.index
    for return_lse in (False, True):
        with torch.no_grad():
            traced = torch.export.export(Layer(return_lse), tensors).module()
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        expected = torch.autograd.grad(sparse_attn.sparse_attention(*leaves, x.index, 32).square().sum(), leaves)
        with sparse_attn.use_backend("opaque"):
            got = torch.autograd.grad(traced(*leaves, x.index).square().sum(), leaves)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_forward_mode_is_refused() -> None:
    x = make(torch.float32, N=16)
    call = lambda q: sparse_attn.sparse_attention(q, *x.args[1:])  # noqa: E731
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(call, (x.q,), (x.q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.q, x.q)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            call(dual)
        assert torch.equal(call(x.q), call(x.q.clone()))  # a tensor without tangent is no reason to refuse


def test_vmap_over_calls() -> None:
    x = make(torch.float32, B=3, N=40)
    stacked = [t.unsqueeze(1) for t in (x.q, x.k, x.v, x.index)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loops
        got = torch.func.vmap(lambda *t: sparse_attn.sparse_attention(*t, x.block_size))(*stacked)
    torch.testing.assert_close(got.squeeze(1), sparse_attn.sparse_attention(*x.args))
