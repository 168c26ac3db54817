"""How long a first call takes in a process that has run nothing yet: ``python -m bench --cold-start``.

Two fresh processes for each row, one after the other, with the caches of Triton, TileLang, torch's compilers and the
CUDA driver in a folder made for the row. The first finds it empty (``cold_start_s``), the second as the first left it
(``cached_start_s``). Counted is what a user waits for after the data is on the device: the import of the backend,
compiling, loading and the call itself; of a peer its preparation, too. Not counted are the interpreter and torch.

The process is ``python -m bench.cold_start``, with what it shall do as JSON; it prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import sparse_attn

from . import cases
from .measure import Row
from .peers import PEERS
from .timers import synchronised_clock

CACHES = (
    "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TVM_FFI_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    "CUDA_CACHE_PATH",
)  # fmt: skip
_PATIENCE_S = 900
_ROOT = Path(__file__).resolve().parent.parent


def fill(row: Row, device: torch.device) -> None:
    """Measure both starts of ``row``. One that fails makes the row an error; what was measured before stays."""
    wanted = {
        "point": {"set": row.point.set, "size": row.point.size, **row.point.shape},
        "dtype": row.dtype,
        "pattern": row.pattern,
        "seed": row.seed,
        "name": row.requested_backend,
        "kind": row.kind,
        "device": str(device),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="sparse_attn_cold_", ignore_cleanup_errors=True) as folder:
            row.cold_start_s = first_call(wanted, folder)
            row.cached_start_s = first_call(wanted, folder)
    except RuntimeError as error:
        row.status, row.reason = "error", f"in a fresh process: {error}"


def first_call(wanted: dict[str, Any], folder: str) -> float:
    """Seconds of the first call in a new process whose caches are in ``folder``.

    Raises:
        RuntimeError: if the process fails, with what it said last, or does not end.
    """
    places = {name: str(Path(folder) / name.lower()) for name in CACHES}
    environment = {**os.environ, **places}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "bench.cold_start", json.dumps(wanted)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {_PATIENCE_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(said[-1] if said else f"exit status {done.returncode}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])  # libraries may print something before


@torch.no_grad()
def main(wanted: dict[str, Any]) -> dict[str, float]:
    """Make the data, then time one call."""
    point, device = cases.Point(**wanted["point"]), torch.device(wanted["device"])
    if device.index is not None and device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    case = cases.make_case(point, wanted["pattern"], getattr(torch, wanted["dtype"]), device, wanted["seed"])
    name = wanted["name"]
    start = synchronised_clock()  # waits for the data
    if wanted["kind"] != "backend":
        {peer.name: peer for peer in PEERS}[name].prepare(case)()
    else:
        call = partial(sparse_attn.sparse_attention, *case.args, **case.kwargs)
        with nullcontext() if name == "auto" else sparse_attn.use_backend(name):
            call()
    return {"seconds": synchronised_clock() - start}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
