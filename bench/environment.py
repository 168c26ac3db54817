"""Where a measurement was made: the facts that make it comparable with another, and none that name the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import sparse_attn
from sparse_attn.device import describe
from sparse_attn.registry import ENVIRONMENT_VARIABLE


def default_device() -> torch.device:
    """The first CUDA device, else the first NPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if hasattr(torch, "npu") and torch.npu.is_available():
        return torch.device("npu")
    return torch.device("cpu")


def header(device: torch.device) -> dict[str, str | None]:
    """Device, the host's processor, versions, commit and date (UTC); None for what is absent."""
    facts = describe(device)
    return {
        "device": facts.name,
        "arch": facts.arch,
        "cpu": _cpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if facts.type != "cuda" else str(torch.backends.cudnn.version()),
        "triton": package_version("triton") or package_version("triton-ascend"),
        "tilelang": package_version("tilelang"),
        "python": platform.python_version(),
        "sparse_attn": sparse_attn.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE),
    }


def package_version(package: str) -> str | None:
    """The version of an installed distribution; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str | None:
    """What the processor's vendor calls it: hosts differ in what launching costs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine() or None


def commit(besides: Path | None = None) -> str | None:
    """The commit's hash, with ``-dirty`` behind if tracked files differ from it, those below ``besides`` aside."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # an unpacked archive inside somebody else's checkout
        return None
    inside = besides is not None and besides.resolve().is_relative_to(root)
    exclude = [f":(exclude){besides.resolve().relative_to(root)}"] if besides is not None and inside else []
    try:
        found = _git(root, "rev-parse", "HEAD")
        return f"{found}-dirty" if _git(root, "status", "--porcelain", "-uno", "--", ".", *exclude) else found
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
