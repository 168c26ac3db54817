"""Libraries with the names and the symbols of CANN's, and nothing in them: with these torch_npu can be imported.

    python tests/ascend/stub_cann.py FOLDER
    LD_LIBRARY_PATH=FOLDER TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c 'import torch_npu'

CANN comes with the device's driver, not from a package registry. torch_npu is linked to it in a way that asks for every
symbol at once. What torch_npu does without a device, as schemas and shapes of operators, calls none of them.
Needs gcc and binutils. Where CANN is installed there is nothing to do, and nothing is done.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def main(folder: Path) -> None:
    torch, torch_npu = _package("torch"), _package("torch_npu")
    users = [*torch_npu.glob("*.so"), *torch_npu.glob("lib/*.so")]
    at_hand = [*torch.glob("lib/*.so*"), *users]
    names = {library.name for library in at_hand}
    missing = sorted(name for name in set().union(*map(_needed, users)) - names if not _loads(name))
    symbols = set().union(*map(_undefined, users)) - set().union(*map(_defined, at_hand))
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    # One library has all the symbols. Virtual tables and types of C++ are data: some zeros; the rest are functions.
    source.write_text("".join(f"{_declaration(symbol)}\n" for symbol in sorted(symbols)))
    for position, name in enumerate(missing):
        content = [str(source)] if position == 0 else ["-x", "c", "/dev/null"]
        command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*command, *content], check=True)
    print(f"{len(missing)} libraries with {len(symbols)} symbols in {folder}: {' '.join(missing)}")


def _package(name: str) -> Path:
    """The folder of a package, which is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"needs the package {name}, which is not installed in {sys.prefix}")
    return Path(spec.submodule_search_locations[0])


def _needed(library: Path) -> set[str]:
    lines = _output("readelf", "-d", library)
    return {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _undefined(library: Path) -> set[str]:
    """Symbols that a library needs from another. Those of the C and C++ libraries have versions, those of CANN none."""
    fields = [line.split() for line in _output("nm", "-D", "--undefined-only", library)]
    return {name for kind, name in fields if kind == "U" and "@" not in name and not name.startswith(("Py", "_Py"))}


def _defined(library: Path) -> set[str]:
    return {line.split()[-1].partition("@")[0] for line in _output("nm", "-D", "--defined-only", library)}


def _declaration(symbol: str) -> str:
    return f"char {symbol}[64];" if symbol.startswith(("_ZTV", "_ZTI", "_ZTS")) else f"long {symbol}() {{ return 0; }}"


def _output(*command: object) -> list[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
