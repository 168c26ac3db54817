"""``solution.py``: what it is made of, and that it does by itself what the package does.

It runs in fresh processes, in folders that hold it and what drives it, with ``sparse_attn`` hidden; results are held
against the truth of tests/test_backends.py, within its bounds. Choice and kernels are compared with the package's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sparse_attn
from bench.make_solution import SOLUTION, Section, rendered, solution
from sparse_attn import registry
from sparse_attn.device import describe

from .cases import CASES, DTYPES, make
from .conftest import INTERPRETED
from .test_backends import assert_close, skip_if_unavailable, truth, truth_of_case
from .test_import import ROOT
from .test_registry import A100, ASCEND, B200, CPU, H20, MI300, RTX4090, problem

VARIABLE = registry.ENVIRONMENT_VARIABLE
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# What Triton's interpreter runs within seconds.
QUICK = ("decode_speculative", "short_queries", "tiny5", "minus_one_before_nan", "odd17")
# As if these packages were not installed: they are not found, nor imported.
HIDE = """
import sys
sys.modules.update(dict.fromkeys({hidden}))
"""


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


interpreted = pytest.mark.skipif(
    not installed("triton") or tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4),
    reason=f"needs Triton, and for its interpreter numpy < 2.4: numpy is {np.__version__}",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``solution.py``, its drivers, and nothing else."""
    shutil.copy(SOLUTION, tmp_path)
    for source, name in (("cases", "cases"), ("solution_driver", "driver"), ("handout_driver", "benchmark")):
        shutil.copy(ROOT / "tests" / f"{source}.py", tmp_path / f"{name}.py")
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """Run Python in that folder, and return what it printed."""
    __tracebackhide__ = True
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env={**outside, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_cases(folder: Path, device: torch.device, cases: list[str], *hidden: str, **environment: str) -> set[str]:
    """Run cases (``ragged-fp16``, ...), hold results against the truth, and return which backends ran."""
    __tracebackhide__ = True
    run(folder, "driver.py", ",".join(["sparse_attn", *hidden]), str(device), ",".join(cases), **environment)
    results = torch.load(folder / "results.pt")
    assert len(results) == len(cases)
    ran = set()
    for (case, name), result in results.items():
        dtype = DTYPES[name]
        x = CASES[case].build(dtype)
        asked = sparse_attn.problem_of(*x.args, **x.kwargs)._replace(device=describe(device))
        if isinstance(result, str):  # refused: then by the package, too
            assert registry.reasons_against(environment[VARIABLE], asked), result
            continue
        backend, out, lse, alone = result
        if not hidden:
            assert backend == environment.get(VARIABLE, registry.select(asked).name)
        expected, where = truth_of_case(case, dtype), f"{case}-{name} on {backend}: "
        assert out.dtype == alone.dtype == dtype
        assert_close(out, expected.out, expected.out_bound, where + "out")
        assert_close(lse, expected.lse, expected.lse_bound, where + "lse")
        assert_close(alone, expected.out, expected.out_bound, where + "out without lse")
        ran.add(backend)
    return ran


# --- what it is made of ----------------------------------------------------------------------------------------------


def test_is_generated_from_the_package() -> None:
    assert SOLUTION.read_text(encoding="utf-8") == solution(), "run python -m bench.make_solution"


def test_holds_every_module_of_every_backend() -> None:
    headings = {line.split()[2].rstrip(",") for line in solution().splitlines() if line.startswith("# === ")}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparse_attn" / "backends").rglob("*.py")}
    assert modules <= headings
    assert "sparse_attn/registry.py" in headings


def test_sections_keep_what_strings_say(tmp_path: Path) -> None:
    """They move to the right: docstrings may, values may not. And a module that is new is found like the rest."""
    source = 'a = """b\n  c\n"""\n\n\ndef f():\n    """d\n    e\n    """\n    return f"""g\nh{a}"""\n'
    names: dict[str, Any] = {}
    exec(source, names)
    section = Section("backends.new", ROOT / "sparse_attn" / "backends" / "new.py", source, [])
    (tmp_path / "solution.py").write_text(solution() + rendered(section))
    new = load(tmp_path / "solution.py")._section("backends.new")
    assert new.a == names["a"]
    assert new.f() == names["f"]()
    assert inspect.getdoc(new.f) == "d\ne"
    assert inspect.getsource(new.f).startswith("    def f():\n")


# --- alone, in a fresh process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case(backend: str, dtype: str, folder: Path, device: torch.device) -> None:
    """The backend that the environment variable names."""
    skip_if_unavailable(backend, device)
    cases = CASES if not INTERPRETED or backend != "triton" else QUICK if dtype != "bf16" else ["tiny5"]
    ran = check_cases(folder, device, [f"{case}-{dtype}" for case in cases], **{VARIABLE: backend})
    assert ran <= {backend}
    assert ran or not can_run(backend, dtype, device)


def can_run(backend: str, dtype: str, device: torch.device) -> bool:
    asked = problem(describe(device))._replace(dtype=DTYPES[dtype])
    return not registry.reasons_against(backend, asked)


def test_every_case_by_its_own_choice(folder: Path, device: torch.device) -> None:
    """In fp16, which is the contest's."""
    assert check_cases(folder, device, [f"{case}-fp16" for case in CASES])


@interpreted
def test_triton_kernels_run_interpreted(folder: Path) -> None:
    environment = {"TRITON_INTERPRET": "1", VARIABLE: "triton"}
    cases = [f"{case}-fp16" for case in QUICK] + ["tiny5-fp32"]
    assert check_cases(folder, torch.device("cpu"), cases, **environment) == {"triton"}


@interpreted
def test_ascend_kernel_runs_interpreted(folder: Path) -> None:
    """Its object alone: neither the device nor triton-ascend is at hand."""
    x = CASES["odd17"].build(torch.float16)
    torch.save(vars(x), folder / "x.pt")
    code = """
import torch, solution
x = torch.load("x.pt")
backend = solution._section("backends.triton_ascend").backend
torch.save(backend(x["q"], x["k"], x["v"], x["index"], x["block_size"], 0.125, 0, True), "y.pt")
"""
    run(folder, "-c", HIDE.format(hidden={"sparse_attn"}) + code, TRITON_INTERPRET="1")
    out, lse = torch.load(folder / "y.pt")
    expected = truth(x)
    assert_close(out, expected.out, expected.out_bound, "out")
    assert_close(lse, expected.lse, expected.lse_bound, "lse")


@pytest.mark.parametrize("hidden", [(), ("triton",), ("tilelang",), ("triton", "tilelang")], ids=str)
def test_packages_that_are_not_there(hidden: tuple[str, ...], folder: Path) -> None:
    """The choice on devices that are made up, a call on the CPU; and TileLang is not imported where it has no use."""
    code = """
import json, sys, warnings
import torch, solution
Device = solution._section("contract").Device
x = torch.empty(1, 64, 4096, 128, dtype=torch.float16, device="meta")
index = torch.empty(1, 4, 4096, 32, dtype=torch.int32, device="meta")
chosen = {}
for name, arch in (("CPU", "cpu"), ("A100", "sm80"), ("H20", "sm90")):
    solution.ops.describe = lambda _: Device(arch if arch == "cpu" else "cuda", arch, name)
    chosen[name] = solution.backend_for(x, x[:, :4], x[:, :4], index, 64)
    assert name == "H20" or sys.modules.get("tilelang") is None
    assert name != "CPU" or sys.modules.get("triton") is None
x, index = torch.randn(1, 4, 40, 16, dtype=torch.float16), torch.zeros(1, 2, 40, 2, dtype=torch.int32)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):  # still on an H20, says describe
        out = solution.sparse_attention(x, x[:, :2], x[:, :2], index, 64)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(
    x, *[x[:, :2].repeat_interleave(2, 1)] * 2, is_causal=True), atol=1e-2, rtol=1e-2)
print(json.dumps([chosen, [str(w.message) for w in said if w.category.__name__ == "FallbackWarning"]]))
"""
    hide = HIDE.format(hidden={"sparse_attn", *hidden})
    chosen, said = json.loads(run(folder, "-c", hide + code, CUDA_HOME="/nowhere", TRITON_INTERPRET="0"))
    there = [name for name in ("tilelang", "triton") if name not in hidden and installed(name)]
    assert chosen == {
        "CPU": "reference",
        "A100": "triton" if "triton" in there else "reference",
        "H20": (*there, "reference")[0],
    }
    # Those that are there failed, on tensors that are on the CPU; then the reference, on an accelerator, says why.
    *failed, slow = said
    assert sorted(text.split()[5].rstrip(",") for text in failed) == there
    assert "runs on the reference backend on H20 (sm90)" in slow
    assert all(f"needs the package {name}" in slow for name in hidden)


def test_threads_that_call_at_once(folder: Path) -> None:
    """The first call ever, of eight threads: nothing is imported twice or halfway."""
    code = """
import threading
import torch, solution
x, index = torch.randn(1, 4, 40, 16), torch.zeros(1, 2, 40, 2, dtype=torch.int32)
barrier, results = threading.Barrier(8), []
def call():
    barrier.wait()
    results.append(solution.sparse_attention(x, x[:, :2], x[:, :2], index, 16))
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(results) == 8
assert all(torch.equal(out, results[0]) for out in results)
"""
    run(folder, "-c", HIDE.format(hidden={"sparse_attn"}) + code)


# --- as the contest calls it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_driver_of_the_handout(size: str, folder: Path, device: torch.device) -> None:
    if device.type == "cpu" and size != "small":
        pytest.skip(f"{size} needs an accelerator, got cpu")
    (folder / "alone").mkdir()
    for name in ("solution.py", "benchmark.py"):
        shutil.move(folder / name, folder / "alone")
    printed = run(folder / "alone", "benchmark.py", "--size", size)
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert [row[:2] for row in rows] == [[size, "passed"]] * (2 if size == "large" else 1)


@on_gpu
def test_first_call_compiles_and_later_calls_do_not_wait(backend: str, folder: Path, device: torch.device) -> None:
    """With empty caches: within a minute. Afterwards the host waits for nothing."""
    skip_if_unavailable(backend, device)
    code = """
import time
import torch, solution
q = torch.randn(1, 64, 4096, 128, dtype=torch.float16, device="cuda")
k, v = torch.randn(2, 1, 4, 4096, 128, dtype=torch.float16, device="cuda")
index = torch.randint(-1, 64, (1, 4, 4096, 32), dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
solution.sparse_attention(q, k, v, index, 64, 128**-0.5)
torch.cuda.synchronize()
print(time.perf_counter() - start)
torch.cuda.set_sync_debug_mode("error")
for _ in range(3):
    solution.sparse_attention(q, k, v, index, 64, 128**-0.5)
"""
    caches = {name: str(folder / name) for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")}
    printed = run(folder, "-c", HIDE.format(hidden={"sparse_attn"}) + code, **{VARIABLE: backend}, **caches)
    seconds = float(printed.split()[-1])  # behind what compilers say
    print(f"first call on {backend}: {seconds:.1f} s")
    assert seconds < 60


@on_gpu
@pytest.mark.parametrize("hidden", [("triton",), ("tilelang",), ("triton", "tilelang")], ids=str)
def test_cases_without_a_package_on_a_gpu(hidden: tuple[str, ...], folder: Path, device: torch.device) -> None:
    cases = [f"{case}-fp16" for case in CASES if case.startswith("contest") or case in QUICK]
    assert check_cases(folder, device, cases, *hidden).isdisjoint(hidden)


# --- arguments, and the choice, here ----------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """Import a file as others may do it: by its path, under a name that the import system does not keep."""
    spec = importlib.util.spec_from_file_location("someones_solution", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone() -> ModuleType:
    return load(SOLUTION)


def test_block_size_has_two_names(alone: ModuleType) -> None:
    x = make(torch.float16, N=70, sm_scale=0.2)
    tensors, size, scale = x.args[:4], x.args[4], x.args[5]
    expected = alone.sparse_attention(*tensors, size, scale)
    for out in (
        alone.sparse_attention(*tensors, bs=size, sm_scale=scale),
        alone.sparse_attention(*tensors, block_size=size, sm_scale=scale),
        alone.sparse_attention(*tensors, None, scale, bs=size),
        alone.sparse_attention(q=x.q, k=x.k, v=x.v, index=x.index, bs=size, sm_scale=scale),
        sparse_attn.sparse_attention(*tensors, size, scale),
    ):
        assert torch.equal(out, expected)
    assert alone.backend_for(*tensors, bs=size) == alone.backend_for(*tensors, size) == "reference"
    with pytest.raises(TypeError, match=r"block_size, or bs, .* got neither"):
        alone.sparse_attention(*tensors)
    with pytest.raises(TypeError, match="got both"):
        alone.sparse_attention(*tensors, size, bs=size)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        alone.sparse_attention(*tensors, bs=0)
    with pytest.raises(TypeError, match="index must be int32 or int64"):
        alone.sparse_attention(*tensors[:3], x.index.float(), size)


def test_inputs_that_require_gradients(alone: ModuleType) -> None:
    x = make(torch.float32, N=70)
    expected = alone.sparse_attention(*x.args)
    out, lse = alone.sparse_attention(x.q.requires_grad_(), *x.args[1:], return_lse=True)
    assert torch.equal(out, expected)
    assert not out.requires_grad
    assert not lse.requires_grad


GONE = """
import os, torch
names = {}
{load}
os.remove("solution.py")
q, k = torch.randn(1, 2, 20, 16).half(), torch.randn(1, 1, 20, 16).half()
index = torch.zeros(1, 1, 20, 1, dtype=torch.int32)
out = names["sparse_attention"](q, k, k, index, 32)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
print(names["backend_for"](q, k, k, index, 32))
"""


@interpreted
@pytest.mark.parametrize(
    "load",
    [
        "import solution; names = vars(solution)",
        "exec(compile(open('solution.py').read(), 'solution.py', 'exec'), names)",
    ],
    ids=["import", "exec"],
)
def test_file_may_go_once_it_is_loaded(load: str, folder: Path) -> None:
    """A judge's folder may be gone before the first call, which has Triton read the kernels' source."""
    said = run(folder, "-c", GONE.replace("{load}", load), TRITON_INTERPRET="1", SPARSE_ATTN_BACKEND="triton")
    assert said.split() == ["triton"]


def test_source_without_a_file_is_refused() -> None:
    with pytest.raises(ImportError, match=r"needs its own source, in a file.*got '.*<string>'"):
        exec(SOLUTION.read_text(encoding="utf-8"), {})


def test_two_copies_in_one_process(alone: ModuleType, tmp_path: Path) -> None:
    """As where one is compared with another: each has sections of its own."""
    other = tmp_path / "solution.py"
    other.write_text(SOLUTION.read_text().replace("q must be float16", "q of another copy must be float16"))
    second = load(other)
    x = make(torch.float64, N=8)
    for module, says in ((alone, "q must"), (second, "q of another copy must"), (alone, "q must")):
        with pytest.raises(TypeError, match=says):
            module.sparse_attention(*x.args)
    assert torch.equal(*(m.sparse_attention(*make(torch.float16, N=8).args) for m in (alone, second)))


PROBLEMS = {
    "large": {},
    "medium": {"N": 1024, "M": 1024, "D": 64, "Dv": 64, "topk": 16},
    "few queries": {"N": 1, "has_q_offset": True},
    "sparse": {"N": 65536, "M": 65536, "topk": 4},
    "odd features": {"D": 100},
    "many features": {"D": 512, "Dv": 512},
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("device", [A100, H20, RTX4090, B200, MI300, ASCEND, CPU], ids=lambda d: d.arch)
def test_choice_is_the_packages(device: Any, name: str, alone: ModuleType) -> None:
    """Which backend, why none before it, what is warned of; what is said where one is asked for that cannot run."""
    asked = problem(device)._replace(**PROBLEMS[name])
    theirs, mine = registry.select(asked), alone._choose(asked, None)
    assert (mine.name, mine.skipped, mine.warning) == (theirs.name, theirs.skipped, theirs.warning)
    for forced in registry.backend_specs():
        override = registry.Override(forced, f"{VARIABLE}={forced}")
        assert answer(alone._choose, asked, override) == answer(registry.select, asked, override)


def answer(select: Any, asked: Any, override: Any) -> str:
    try:
        return select(asked, override).name
    except RuntimeError as refused:
        return str(refused)


def test_environment_variable(alone: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(torch.float16, N=8)
    monkeypatch.setenv(VARIABLE, "torch_npu")
    with pytest.raises(RuntimeError, match="asks for the backend torch_npu, which cannot run this call"):
        alone.sparse_attention(*x.args)
    monkeypatch.setenv(VARIABLE, "tritn")
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        alone.sparse_attention(*x.args)
    monkeypatch.setenv(VARIABLE, "auto")
    assert alone.backend_for(*x.args) == "reference"


@pytest.fixture
def on_a_h20(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``solution.py`` afresh, for which every device is an H20 and every backend can run everything."""

    class Fake:
        def __init__(self, error: Exception | None) -> None:
            self.error, self.calls = error, 0

        def unsupported(self, problem: Any) -> list[str]:
            return []

        def __call__(self, q: Any, k: Any, v: Any, *_: Any) -> tuple[torch.Tensor, None]:
            self.calls += 1
            if self.error is not None:
                raise self.error
            return torch.full_like(q, 7), None

    module = load(SOLUTION)
    module.fakes = {"tilelang": Fake(RuntimeError("nvcc said no")), "triton": Fake(None), "reference": Fake(None)}
    monkeypatch.setattr(module.ops, "describe", lambda device: H20)
    monkeypatch.setattr(module.registry, "_missing", lambda spec, device: None)
    monkeypatch.setattr(module.registry, "_load", lambda spec: module.fakes[spec.name])
    return module


def test_next_backend_runs_where_one_fails(on_a_h20: ModuleType) -> None:
    x = make(torch.float16, N=8)
    with pytest.warns(UserWarning, match="leaves out the backend tilelang, which failed: RuntimeError: nvcc said no"):
        assert (on_a_h20.sparse_attention(*x.args) == 7).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_a_h20.sparse_attention(*x.args)
    assert [on_a_h20.fakes[name].calls for name in ("tilelang", "triton", "reference")] == [1, 2, 0]
    assert on_a_h20.backend_for(*x.args) == "triton"
    with warnings.catch_warnings():  # the same kernels would be compiled
        warnings.simplefilter("error")
        on_a_h20.sparse_attention(*make(torch.float16, N=9, M=70, topk=1).args)
    with pytest.warns(UserWarning, match="leaves out the backend tilelang"):  # others may go well
        on_a_h20.sparse_attention(*make(torch.float16, N=8, D=128).args)


def test_failures_that_are_not_passed_over(on_a_h20: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backend that was asked for, of the last one, and for want of memory."""
    x = make(torch.float16, N=8)
    monkeypatch.setenv(VARIABLE, "tilelang")
    with pytest.raises(RuntimeError, match="nvcc said no"):
        on_a_h20.sparse_attention(*x.args)
    monkeypatch.delenv(VARIABLE)
    on_a_h20.fakes["tilelang"].error = torch.OutOfMemoryError("of 140 GiB")
    with pytest.raises(torch.OutOfMemoryError):
        on_a_h20.sparse_attention(*x.args)
    for name in ("tilelang", "triton", "reference"):
        on_a_h20.fakes[name].error = RuntimeError(f"{name} said no")
    tilelang, triton = (pytest.warns(UserWarning, match=f"{name} said no") for name in ("tilelang", "triton"))
    with tilelang, triton, pytest.raises(RuntimeError, match="reference said no"):
        on_a_h20.sparse_attention(*x.args)


# --- kernels, in the form in which they are compiled ------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED or not installed("triton"), reason="needs Triton's compiler")
@pytest.mark.parametrize(("capability", "product"), [(80, "mma.sync"), (90, "wgmma")])
def test_triton_kernels_compile(
    capability: int, product: str, alone: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .offline import compile_for

    # Triton's cache goes by what a kernel says and on which line, not by its file: a copy's code would be found in it.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = CASES["contest_medium"].build(torch.float16)
    plan, call = (alone._section(f"backends.triton_cuda.{name}") for name in ("plan", "call"))
    shape = plan.Shape(x.q.dtype, 8, 16, 128, 128, 64, 64, 2, 64, 0)
    launches = call.Call(*x.args[:5], 0.125, 0, False).launches(plan.plan(shape, plan.Gpu(capability, 78)))
    code = [compile_for(launch, capability).ptx for launch in launches]
    assert len(code) >= 2
    assert any(product in ptx for ptx in code)
    assert all(str(SOLUTION) in ptx for ptx in code)  # its lines are where profilers and debuggers look


@pytest.mark.skipif(not installed("tilelang"), reason="needs TileLang")
@pytest.mark.parametrize("case", ["contest_large1", "block16", "group3"])
def test_tilelang_kernels_are_the_packages(case: str, alone: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call hands to the compiler, in TileLang's own form: tests/test_tilelang.py lowers and compiles it."""
    import tilelang
    from tilelang import tvm

    def handed(find: Any) -> list[Any]:
        kernels: list[Any] = []

        def compile_kernel(kernel: Any, **_: Any) -> Any:
            kernels.append(kernel)
            return lambda *_: None

        monkeypatch.setattr(tilelang, "compile", compile_kernel)
        compiled = find("backends.tilelang_hopper.compiled")
        compiled._kernels.clear()  # of other tests; and no other test shall find these
        x = CASES[case].build(torch.float16)
        find("backends.tilelang_hopper").backend(*x.args[:5], 0.1, 0, True)
        compiled._kernels.clear()
        return kernels

    # As if tensors were on the current device.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=78))
    theirs = handed(lambda name: importlib.import_module(f"sparse_attn.{name}"))
    mine = handed(alone._section)
    assert len(mine) == len(theirs) >= 2
    assert all(tvm.ir.structural_equal(a, b) for a, b in zip(mine, theirs, strict=True))
