"""What an import costs and pulls in, in a fresh process; and which module may import which."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sparse_attn"


def fresh(code: str, **environment: str) -> str:
    """Run ``code`` in a new interpreter and return what it printed."""

    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "tilelang", "torch_npu", "numpy", "rich", "packaging"}:
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_import_needs_torch_only() -> None:
    printed = fresh(
        BLOCK
        + """
import torch
before = set(sys.modules)
import sparse_attn
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"sparse_attn"}, new
assert not any(name.startswith("sparse_attn.backends.") for name in sys.modules)
print(sparse_attn.__version__)
"""
    )
    assert printed.strip() == "0.1.0"


def test_a_call_needs_torch_only() -> None:
    fresh(
        BLOCK
        + """
import warnings; warnings.simplefilter("ignore")  # torch's own, about numpy
import torch, sparse_attn
q = torch.randn(1, 4, 8, 16)
out = sparse_attn.sparse_attention(q, q[:, :2], q[:, :2], torch.zeros(1, 2, 8, 1, dtype=torch.int32), 4)
assert sparse_attn.last_backend() == "reference"
print(sparse_attn.explain(q, q[:, :2], q[:, :2], torch.zeros(1, 2, 8, 1, dtype=torch.int32), 4))
"""
    )


def test_import_is_quick(tmp_path: Path) -> None:
    """Under 50 ms of processor time beyond torch, in one of up to ten fresh processes: the machine may be busy.

    With byte code, which pip makes when it installs: the first process writes it.
    """
    code = f"""
import sys, time, torch
sys.pycache_prefix, sys.dont_write_bytecode = {str(tmp_path)!r}, False
start = time.process_time()
import sparse_attn
print(time.process_time() - start)
"""
    took = [float(fresh(code))]
    while len(took) < 10 and min(took) >= 0.050:
        took.append(float(fresh(code)))
    assert min(took) < 0.050


def test_import_touches_no_device() -> None:
    code = """
import torch
def touched(*args, **kwargs): raise AssertionError("a device was asked for")
torch.cuda._lazy_init = torch.cuda.get_device_properties = torch.cuda.is_available = touched
import sparse_attn
assert not torch.cuda.is_initialized()
"""
    fresh(code)


def test_command_prints_every_backend_with_its_reason() -> None:
    done = subprocess.run([sys.executable, "-m", "sparse_attn"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    lines = done.stdout[done.stdout.index("\ncpu: ") :].splitlines()
    assert any(line.split()[:2] == ["reference", "chosen"] for line in lines)
    for name in ("triton", "tilelang", "triton_ascend", "torch_npu"):
        assert any(line.split()[:2] == [name, "no"] and "needs a device" in line for line in lines)


def test_command_with_an_override_that_cannot_run() -> None:
    environment = {**os.environ, "SPARSE_ATTN_BACKEND": "torch_npu"}
    done = subprocess.run(
        [sys.executable, "-m", "sparse_attn"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert "\ncpu: cpu: nothing would run, since SPARSE_ATTN_BACKEND=torch_npu cannot\n" in done.stdout
    assert "chosen" not in done.stdout


def test_command_with_a_misspelt_override() -> None:

    environment = {**os.environ, "SPARSE_ATTN_BACKEND": "tritn"}
    done = subprocess.run(
        [sys.executable, "-m", "sparse_attn"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 2
    assert "did you mean 'triton'" in done.stderr
    assert "Traceback" not in done.stderr


# --- import arrows, as CONTRIBUTING draws them -----------------------------------------------------------------------

# Which modules of the package each module may import. Whatever lies in backends/ follows the rule for backends.
ARROWS: dict[str, set[str]] = {
    "__init__": {"api", "contract", "errors", "messages", "registry"},
    "__main__": {"", "contract", "device", "messages", "registry"},
    "api": {"checks", "contract", "messages", "ops", "registry"},
    "checks": set(),
    "contract": set(),
    "device": {"contract"},
    "errors": set(),
    "messages": {"contract"},
    "ops": {"contract", "device", "messages", "registry"},
    "preference": set(),
    "registry": {"", "backends", "contract", "errors", "messages", "preference"},
}


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, wherever in the file."""
    package = ["sparse_attn", *path.relative_to(PACKAGE).parent.parts] if path.is_relative_to(PACKAGE) else []
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
    return found


def inside(names: set[str]) -> set[str]:
    """Those of the package, without its name: ``sparse_attn.api`` -> ``api``."""
    return {name.partition(".")[2] for name in names if name.partition(".")[0] == "sparse_attn"}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_arrows_between_modules(path: Path) -> None:
    allowed = ARROWS[path.stem]
    targets = {name if name in ARROWS or name == "backends" else "" for name in inside(imports(path))}
    # `from . import explain` names a module; `from . import __version__` names the package itself.
    assert targets <= allowed, f"{path.name} imports {targets - allowed}"


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "backends").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE / "backends"))
)
def test_arrows_of_backends(path: Path) -> None:
    """A backend imports the contract and its own folder, never another backend."""
    room = path.relative_to(PACKAGE / "backends").parts[0].removesuffix(".py")
    for name in inside(imports(path)):
        own = room != "__init__" and (name == f"backends.{room}" or name.startswith(f"backends.{room}."))
        assert name == "contract" or own, f"{path.name} imports sparse_attn.{name}"


def test_only_backends_name_backend_modules() -> None:
    for path in PACKAGE.glob("*.py"):
        assert not any(name.startswith("backends.") for name in inside(imports(path))), path.name


def test_package_imports_nothing_but_torch_at_module_level() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE and path.parent.name != "backends":
            continue  # a backend's own folder imports what its spec requires
        tops = {name.partition(".")[0] for name in imports(path)}
        assert tops <= {"torch", "sparse_attn"} | set(sys.stdlib_module_names), path.name


def test_no_module_hides_a_package() -> None:
    """A file called triton.py would be imported in place of Triton by anything run from its folder."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        assert path.stem not in {"triton", "tilelang", "torch", "rich"}, path


# --- the options of this test suite -----------------------------------------------------------------------------------


def collected(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})


def test_option_backend_runs_exactly_that_one() -> None:
    lines = collected("-k", "backend", "tests/test_backends.py", "--backend", "triton").stdout.splitlines()
    names = {line.partition("[")[2].partition("-")[0].rstrip("]") for line in lines if "::" in line}
    assert names == {"triton"}
    assert "tests/test_backends.py::test_case[triton-ragged-fp16]" in lines


def test_misspelt_backends_are_named() -> None:
    for done in (collected("--backend", "tritn"), collected(SPARSE_ATTN_TEST_REQUIRE="tritn")):
        assert done.returncode == 4
        assert "did you mean 'triton'" in done.stderr
        assert "INTERNALERROR" not in done.stderr + done.stdout


def test_required_backend_fails_instead_of_skipping() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_backends.py", "-k", "torch_npu and ragged-fp16"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SPARSE_ATTN_TEST_REQUIRE": "torch_npu"},
    )
    assert done.returncode == 1
    assert "torch_npu needs a device of architecture ascend910b" in done.stdout
