"""The choice of a backend on devices that are made up: which one, in what order, and what is said when none will do."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sparse_attn
from sparse_attn import registry
from sparse_attn.backends import BUILTIN
from sparse_attn.contract import BackendSpec, Device, Problem, Requirement
from sparse_attn.device import ascend_architecture, describe
from sparse_attn.errors import BackendUnavailableError, FallbackWarning, PluginWarning, UnknownBackendError
from sparse_attn.preference import FALLBACK, PREFERENCE

from .cases import make

A100 = Device("cuda", "sm80", "NVIDIA A100-SXM4-80GB")
H20 = Device("cuda", "sm90", "NVIDIA H20")
H200 = Device("cuda", "sm90", "NVIDIA H200")
RTX4090 = Device("cuda", "sm89", "NVIDIA GeForce RTX 4090")
B200 = Device("cuda", "sm100", "NVIDIA B200")
MI300 = Device("cuda", "gfx942", "AMD Instinct MI300X")
ASCEND = Device("npu", "ascend910b", "Ascend910B2")
ASCEND_310 = Device("npu", "ascend310p", "Ascend310P3")
CPU = Device("cpu", "cpu", "cpu")


class Fake:
    """A backend that can run everything, or gives the reasons it was made with."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons

    def unsupported(self, problem: Problem) -> Sequence[str]:
        return self.reasons

    def __call__(self, q: Any, k: Any, v: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((*q.shape[:3], v.shape[3]), 7, dtype=q.dtype), torch.zeros(q.shape[:3])


def problem(device: Device = CPU, **changed: Any) -> Problem:
    fields = {"B": 1, "Hq": 64, "Hk": 4, "N": 4096, "M": 4096, "D": 128, "Dv": 128, "topk": 32, "block_size": 64}
    return Problem(device, torch.float16, torch.int32, **{**fields, **changed})


@pytest.fixture
def everything_works(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """As if all packages were installed and all backends written: what is left are the table and the architectures."""
    fakes = {name: Fake() for name in registry._specs}
    monkeypatch.setattr(registry, "_module_exists", lambda module: True)
    monkeypatch.setattr(registry, "_installed_version", lambda distribution: "99")
    monkeypatch.setattr(registry, "_load", lambda spec: fakes[spec.name])
    registry._missing.cache_clear()
    registry.select.cache_clear()
    monkeypatch.setattr(registry, "_forget", lambda: None)
    yield fakes
    monkeypatch.undo()
    registry._forget()


@pytest.mark.parametrize(
    ("device", "order"),
    [
        (A100, ["triton", "reference"]),
        (H20, ["tilelang", "triton", "reference"]),
        (H200, ["tilelang", "triton", "reference"]),
        (RTX4090, ["triton", "reference"]),
        (B200, ["triton", "reference"]),
        (MI300, ["reference"]),
        (ASCEND, ["triton_ascend", "reference"]),  # torch_npu: only where it is asked for
        (ASCEND_310, ["reference"]),
        (CPU, ["reference"]),
        (Device("mps", "mps", "mps"), ["reference"]),
    ],
    ids=str,
)
def test_order_on_each_device(device: Device, order: list[str], everything_works: dict[str, Fake]) -> None:
    """The first of the row is chosen; when it refuses the inputs, the next, and so on to the reference."""
    for position, name in enumerate(order):
        assert registry.select(problem(device)).name == name
        skipped = registry.select(problem(device)).skipped
        assert [other for other in skipped if registry._specs[other].automatic] == order[:position]
        everything_works[name].reasons = (f"{name} does not want it",)
        registry.select.cache_clear()
    with pytest.raises(BackendUnavailableError, match=f"no backend can run this call on {device.name}") as error:
        registry.select(problem(device))
    for name in order:
        assert f"{name} does not want it" in str(error.value)


def test_backend_on_request_is_left_out_of_the_automatic_choice(everything_works: dict[str, Fake]) -> None:
    """What is chosen in its place says how to ask for it."""
    everything_works["triton_ascend"].reasons = ("needs D <= 256, got D=512",)
    selection = registry.select(problem(ASCEND))
    assert selection.name == "reference"
    hint = "is not chosen by itself: use_backend('torch_npu') or SPARSE_ATTN_BACKEND=torch_npu asks for it"
    assert selection.skipped["torch_npu"] == (hint,)
    assert f"torch_npu {hint}" in str(selection.warning)
    assert registry.select(problem(ASCEND), registry.Override("torch_npu", "here")).name == "torch_npu"

    said = str(registry.explanation(problem(ASCEND)))
    assert f"torch_npu      can run it; {hint}\n" in said
    everything_works["torch_npu"].reasons = ("needs fp16, got bf16",)
    assert "torch_npu      needs fp16, got bf16\n" in str(registry.explanation(problem(ASCEND)))


def test_backend_that_is_slow_leaves_a_problem_to_another(everything_works: dict[str, Fake]) -> None:
    """To another made for the device, and not to the fallback; asked for by name, it runs."""
    everything_works["tilelang"].slow_for = lambda p: ["is slow for few queries"] if p.N == 1 else []
    few = problem(H20)._replace(N=1)
    assert registry.select(problem(H20)).name == "tilelang"
    assert registry.select(few).name == "triton"
    assert registry.select(few).skipped == {"tilelang": ("is slow for few queries",)}
    assert registry.select(few, registry.Override("tilelang", "here")).name == "tilelang"
    said = str(registry.explanation(few))
    assert "triton would run this call" in said
    assert "tilelang       can run it; is slow for few queries\n" in said

    everything_works["tilelang"].slow_for = lambda p: "is slow"
    with pytest.raises(TypeError, match=r"tilelang's slow_for\(\) must return a sequence of reasons, got 'is slow'"):
        registry.select(few._replace(N=2))
    everything_works["tilelang"].slow_for = lambda p: ["is slow for few queries"]

    everything_works["triton"].reasons = ("needs topk < 8, got topk=32",)
    registry.select.cache_clear()
    selection = registry.select(few)
    assert (selection.name, selection.warning) == ("tilelang", None)
    assert list(selection.skipped) == ["triton"]


def test_backend_on_request_is_not_imported_unasked() -> None:
    """A plugin made for the device that cannot even be imported: nobody hears of it until it is asked for."""
    spec = BackendSpec("fabricated", "no_such_module:backend", ("cpu",), automatic=False)
    sparse_attn.register_backend(spec)
    try:
        selection = registry.select(problem(CPU))
        assert (selection.name, selection.warning) == ("reference", None)
        assert list(selection.skipped) == ["fabricated"]
        with pytest.raises(BackendUnavailableError, match="no module no_such_module"):
            registry.select(problem(CPU), registry.Override("fabricated", "here"))
    finally:
        sparse_attn.unregister_backend("fabricated")


def test_every_row_names_backends_that_exist() -> None:
    names = {spec.name for spec in BUILTIN}
    assert names == {"reference", "triton", "tilelang", "triton_ascend", "torch_npu"}
    for _, row in PREFERENCE:
        assert set(row) <= names
        assert row[-1] == FALLBACK
    assert PREFERENCE[-1][0] == "*"


def test_no_row_prefers_a_backend_that_its_device_cannot_run() -> None:
    for device in (A100, H20, RTX4090, ASCEND, CPU):
        for name in registry.candidates(device):
            assert "architecture" not in (registry.unavailable_on(name, device) or "")


# --- reasons: the cheapest first, and only the first -----------------------------------------------------------------


def reason(spec: BackendSpec, device: Device = H200) -> str:
    sparse_attn.register_backend(spec)
    try:
        (text,) = registry.reasons_against(spec.name, problem(device))
        return text
    finally:
        sparse_attn.unregister_backend(spec.name)


SPEC = BackendSpec("fabricated", "sparse_attn.registry:select", ("sm90",))


def test_reason_architecture_comes_first() -> None:
    spec = replace(SPEC, target="no_such_module:x", requires=(Requirement("no_such_package"),))
    assert reason(spec, CPU) == "needs a device of architecture sm90, got cpu"
    assert reason(spec, A100) == "needs a device of architecture sm90, got NVIDIA A100-SXM4-80GB (sm80)"


def test_reason_not_in_this_release() -> None:
    spec = replace(SPEC, target="sparse_attn.backends.not_yet:x", requires=(Requirement("no_such_package"),))
    assert "this release of sparse_attn has no module sparse_attn.backends.not_yet" in reason(spec)


def test_reason_package_missing() -> None:
    spec = replace(SPEC, requires=(Requirement("no_such_package", "1.2"),), install="pip install it")
    assert reason(spec) == "needs the package no_such_package >= 1.2, which is not installed: pip install it"


def test_reason_package_too_old() -> None:
    spec = replace(SPEC, requires=(Requirement("pytest", "1000.1"),))
    assert reason(spec) == f"needs the package pytest >= 1000.1, got version {pytest.__version__}"


@pytest.mark.parametrize(
    ("installed", "minimum", "old"),
    [("3.10.0", "3.2", False), ("3.2.0+git1", "3.2", False), ("3.1.9", "3.2", True), ("nightly", "3.2", True)],
)
def test_versions_are_numbers(installed: str, minimum: str, old: bool) -> None:
    assert (registry._release(installed) < registry._release(minimum)) == old


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise RuntimeError('no driver here')", "RuntimeError: no driver here"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("backend = 3", "callable and to have the method 'unsupported', got int"),
        ("other = 3", "AttributeError"),
    ],
)
def test_reason_import_failed(source: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception, with its text."""
    (tmp_path / "broken_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "broken_backend", raising=False)
    assert text in reason(replace(SPEC, target="broken_backend:backend"))


def test_reason_inputs_all_of_them(register: Any) -> None:
    register("fabricated", Fake("needs D in {64, 128}, got D=96", "needs topk < 8, got topk=32"))
    reasons = registry.reasons_against("fabricated", problem())
    assert reasons == ("needs D in {64, 128}, got D=96", "needs topk < 8, got topk=32")


def test_reason_no_backward(register: Any) -> None:
    register("fabricated", Fake())
    assert registry.reasons_against("fabricated", problem()) == ()
    (text,) = registry.reasons_against("fabricated", problem(needs_grad=True))
    assert "has no backward pass" in text


def test_backends_of_later_releases_say_so() -> None:
    """Until their modules are written, the rows are there and say plainly that they are empty."""
    for name, device in (("triton", A100), ("tilelang", H20), ("triton_ascend", ASCEND), ("torch_npu", ASCEND)):
        spec = registry._specs[name]
        if not registry._module_exists(spec.module):
            (text,) = registry.reasons_against(name, problem(device))
            assert text == f"is not there: this release of sparse_attn has no module {spec.module}"


# --- overrides -------------------------------------------------------------------------------------------------------


def call() -> torch.Tensor:
    return sparse_attn.sparse_attention(*make(torch.float16, N=16).args)


def ran() -> str | None:
    call()
    return sparse_attn.last_backend()


def test_override_precedence(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register("one", Fake())
    register("two", Fake())
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "one")
    assert ran() == "one"
    with sparse_attn.use_backend("two"):
        assert ran() == "two"
        with sparse_attn.use_backend("auto"):
            assert registry.current_override() is None
        assert ran() == "two"
    assert ran() == "one"
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "two")  # read at every call
    assert ran() == "two"


@pytest.mark.parametrize("value", ["", "auto", " auto "])
def test_environment_variable_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", value)
    assert registry.current_override() is None


def test_environment_variable_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "tritn")
    with pytest.raises(
        UnknownBackendError, match=r"SPARSE_ATTN_BACKEND=tritn .*did you mean 'triton'\?.*tilelang"
    ) as error:
        call()
    assert isinstance(error.value, ValueError)


def test_use_backend_misspelt() -> None:
    with pytest.raises(UnknownBackendError, match="did you mean 'tilelang'"), sparse_attn.use_backend("TileLang2"):
        pytest.fail("the name is checked on entry")


def test_forced_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, tilelang says why not, architecture first; nothing else runs."""
    monkeypatch.setenv("SPARSE_ATTN_BACKEND", "tilelang")
    with pytest.raises(BackendUnavailableError, match="needs a device of architecture sm90, got cpu"):
        call()
    explanation = sparse_attn.explain(*make(torch.float16, N=16).args)
    assert explanation.chosen is None
    assert explanation.reasons["reference"] == ()
    assert "SPARSE_ATTN_BACKEND=tilelang" in str(explanation)


def test_override_belongs_to_its_thread(register: Any) -> None:
    register("one", Fake())
    seen: dict[str, object] = {}
    inside, checked = threading.Event(), threading.Event()

    def forced() -> None:
        with sparse_attn.use_backend("one"):
            inside.set()
            checked.wait(10)
            seen["forced"] = ran()

    thread = threading.Thread(target=forced)
    thread.start()
    assert inside.wait(10)
    seen["other"] = registry.current_override()
    checked.set()
    thread.join()
    assert seen == {"forced": "one", "other": None}


def test_override_is_put_back_after_an_error() -> None:
    with pytest.raises(KeyError), sparse_attn.use_backend("reference"):
        raise KeyError
    assert registry.current_override() is None


def test_backward_uses_the_backend_of_the_forward_pass(register: Any) -> None:
    class WithBackward(Fake):
        def backward(self, grad_out: Any, grad_lse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *_: Any) -> Any:
            return q * 0 + 3, k * 0 + 4, v * 0 + 5

    register("one", WithBackward())
    x = make(torch.float16, N=16)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    with sparse_attn.use_backend("one"):
        out = sparse_attn.sparse_attention(*x.args)
    grads = torch.autograd.grad(out.sum(), leaves)  # outside: the choice was made in the forward pass
    assert [g.unique().tolist() for g in grads] == [[3], [4], [5]]


def test_forced_backend_without_backward_refuses_gradients(register: Any) -> None:
    register("one", Fake())
    x = make(torch.float16, N=16)
    x.q.requires_grad_()
    with sparse_attn.use_backend("one"):
        with pytest.raises(BackendUnavailableError, match="has no backward pass"):
            sparse_attn.sparse_attention(*x.args)
        with torch.no_grad():
            sparse_attn.sparse_attention(*x.args)


# --- what an automatic choice says -----------------------------------------------------------------------------------


def test_slow_fallback_says_why(everything_works: dict[str, Fake]) -> None:
    everything_works["triton"].reasons = ("needs topk < 8, got topk=32",)
    selection = registry.select(problem(A100))
    assert selection.name == "reference"
    assert selection.warning is not None
    assert "reference backend on NVIDIA A100" in selection.warning
    assert "triton needs topk < 8, got topk=32" in selection.warning


def test_fallback_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator where nothing else can run: the CPU passes for one."""
    monkeypatch.setattr(sparse_attn.ops, "describe", lambda device: MI300)
    with pytest.warns(FallbackWarning, match="reference backend on AMD Instinct MI300X") as caught:
        call()
    assert caught[0].filename == __file__  # it points at the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        sparse_attn.sparse_attention(*make(torch.float16, N=17).args)  # another length: the same fallback
        with sparse_attn.use_backend("reference"):  # forced: no fallback
            call()


def test_backend_that_calls_another_is_the_one_that_ran(register: Any) -> None:
    class Wrapper(Fake):
        def __call__(self, q: Any, k: Any, v: Any, index: Any, block_size: int, *_: Any) -> Any:
            with sparse_attn.use_backend("reference"):
                return sparse_attn.sparse_attention(q, k, v, index, block_size, return_lse=True)

    register("wrapper", Wrapper())
    with sparse_attn.use_backend("wrapper"):
        assert ran() == "wrapper"


def test_reference_on_a_cpu_is_no_fallback() -> None:
    assert registry.select(problem(CPU)).warning is None


def test_forced_reference_does_not_warn(everything_works: dict[str, Fake]) -> None:
    assert registry.select(problem(A100), registry.Override("reference", "here")).warning is None


def test_broken_install_of_a_preferred_backend_warns(everything_works: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load = registry._load
    monkeypatch.setattr(
        registry, "_load", lambda spec: "could not be imported: OSError" if spec.name == "tilelang" else load(spec)
    )
    selection = registry.select(problem(H20))
    assert selection.name == "triton"
    assert selection.warning is not None
    assert "tilelang could not be imported: OSError" in selection.warning


def test_absent_package_of_a_preferred_backend_is_silent(
    everything_works: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_module_exists", lambda module: module != "tilelang")
    registry._missing.cache_clear()
    selection = registry.select(problem(H20))
    assert (selection.name, selection.warning) == ("triton", None)


# --- third parties ---------------------------------------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a distribution with one entry point, as pip would leave it, and forget that plugins were loaded."""

    def install(entry: str, source: str) -> None:
        (tmp_path / "third_party_plugin.py").write_text(source)
        info = tmp_path / "third_party-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[sparse_attn.backends]\n{entry}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(registry, "_plugins_loaded", False)
        registry._forget()

    yield install
    if "third" in registry._specs:
        sparse_attn.unregister_backend("third")
    __import__("sys").modules.pop("third_party_plugin", None)


PLUGIN = """
from sparse_attn import BackendSpec
spec = BackendSpec("third", "third_party_plugin:backend", ("cpu", "sm90"))
class Backend:
    def unsupported(self, problem): return []
    def __call__(self, q, k, v, index, block_size, sm_scale, q_offset, return_lse):
        return q.new_full((*q.shape[:3], v.shape[3]), 9), None
backend = Backend()
"""


def test_plugin_is_found_and_comes_before_the_fallback(plugin: Any) -> None:
    plugin("third = third_party_plugin:spec", PLUGIN)
    assert "third" in sparse_attn.backend_specs()
    assert registry.candidates(H20) == ("tilelang", "triton", "third", "reference")
    assert registry.candidates(A100) == ("triton", "reference")
    assert registry.candidates(CPU) == ("third", "reference")
    assert call().unique().tolist() == [9]
    with sparse_attn.use_backend("third"):
        assert call().unique().tolist() == [9]


@pytest.mark.parametrize(
    ("entry", "source", "text"),
    [
        ("third = third_party_plugin:spec", "raise RuntimeError('half installed')", "RuntimeError: half installed"),
        ("third = third_party_plugin:nothing", PLUGIN, "AttributeError"),
        ("third = third_party_plugin:backend", PLUGIN, "spec must be a BackendSpec"),
        ("third = third_party_plugin:spec", PLUGIN.replace('"third"', '"triton"'), "'triton' is taken"),
    ],
)
def test_broken_plugin_warns_and_breaks_nothing(plugin: Any, entry: str, source: str, text: str) -> None:
    plugin(entry, source)
    with pytest.warns(PluginWarning, match=text):
        call()
    assert sparse_attn.last_backend() == "reference"


@pytest.mark.parametrize("name", ["", "Triton", "auto", "a b", "7up"])
def test_spec_checks_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"BackendSpec\.name"):
        BackendSpec(name, "module:attribute", ("*",))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("target", "module.attribute", ValueError),
        ("architectures", (), ValueError),
        ("architectures", "sm90", TypeError),
        ("architectures", (90,), TypeError),
        ("requires", ("triton",), TypeError),
        ("requires", Requirement("triton"), TypeError),
        ("automatic", "no", TypeError),
    ],
)
def test_spec_checks_its_fields(field: str, value: Any, error: type[Exception]) -> None:
    fields = {"name": "name", "target": "module:attribute", "architectures": ("*",), field: value}
    with pytest.raises(error, match=rf"BackendSpec\.{field}"):
        BackendSpec(**fields)


def test_spec_takes_lists() -> None:
    spec = BackendSpec("name", "module:attribute", ["*"], requires=[Requirement("torch")])
    assert hash(spec) == hash(BackendSpec("name", "module:attribute", ("*",), requires=(Requirement("torch"),)))


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("needs D=64", TypeError, r"backend fabricated's unsupported\(\) must return .* got 'needs D=64'"),
        (None, TypeError, "got None"),
        (RuntimeError("boom"), RuntimeError, "backend fabricated failed .* RuntimeError: boom"),
    ],
)
def test_backend_whose_reasons_are_wrong_is_named(register: Any, said: Any, error: Any, message: str) -> None:
    class Wrong(Fake):
        def unsupported(self, problem: Problem) -> Any:
            if isinstance(said, Exception):
                raise said
            return said

    register("fabricated", Wrong())
    with sparse_attn.use_backend("fabricated"), pytest.raises(error, match=message):
        call()


def test_backend_that_forgets_lse_is_named(register: Any) -> None:
    class Wrong(Fake):
        def __call__(self, *arguments: Any) -> Any:
            return super().__call__(*arguments)[0], None

    register("fabricated", Wrong())
    with sparse_attn.use_backend("fabricated"), pytest.raises(TypeError, match=r"fabricated .* returned None for lse"):
        sparse_attn.sparse_attention(*make(torch.float16, N=16).args, return_lse=True)


def test_class_in_place_of_a_backend_is_refused(register: Any) -> None:
    register("fabricated", Fake)
    assert "the class Fake, not an instance" in str(registry.unavailable_on("fabricated", CPU))


def test_unregister_only_what_was_registered(register: Any) -> None:
    with pytest.raises(ValueError, match="ships with sparse_attn"):
        sparse_attn.unregister_backend("reference")
    with pytest.raises(UnknownBackendError, match=r"unregister_backend\('nothing'\)"):
        sparse_attn.unregister_backend("nothing")


def test_use_backend_wants_a_name() -> None:
    with pytest.raises(TypeError, match="use_backend needs a backend's name or 'auto', got NoneType"):
        sparse_attn.use_backend(None).__enter__()


def test_calls_while_others_register(register: Any) -> None:
    """The table is replaced, not changed: nobody sees it half done."""
    register("one", Fake())
    stop, failures = threading.Event(), []

    def keep_selecting() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            try:
                registry.select(problem(CPU, N=n, M=n))
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=keep_selecting) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(300):
        spec = BackendSpec(f"spare{n}", "sparse_attn.registry:select", ("sm90",))
        sparse_attn.register_backend(spec)
        sparse_attn.unregister_backend(spec.name)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Ascend910B2", "ascend910b"),
        ("Ascend910B4-1", "ascend910b"),
        ("Ascend910B2C", "ascend910b"),
        ("Ascend910_9391", "ascend910b"),
        ("Ascend910A", "ascend910a"),
        ("Ascend910ProB", "ascend910a"),
        ("Ascend310P3", "ascend310p"),
        ("Ascend950", "ascend950"),
    ],
)
def test_ascend_names(name: str, arch: str) -> None:
    assert ascend_architecture(name) == arch


def test_describe_the_cpu() -> None:
    assert describe(torch.device("cpu")) == CPU


def test_cuda_device_is_described_by_its_own_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed machine: each GPU by its own index, not by the current one."""

    class Properties:
        def __init__(self, device: torch.device) -> None:
            self.major, self.minor, self.name = (8, 0, "NVIDIA A100") if device.index == 0 else (9, 0, "NVIDIA H20")

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.version, "hip", None)
    describe.cache_clear()
    assert describe(torch.device("cuda:0")) == Device("cuda", "sm80", "NVIDIA A100")
    assert describe(torch.device("cuda:1")) == Device("cuda", "sm90", "NVIDIA H20")
    describe.cache_clear()
