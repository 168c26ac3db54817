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
    """Device, versions, commit and date (UTC); None for what is absent."""
    facts = describe(device)
    return {
        "device": facts.name,
        "arch": facts.arch,
        "torch": torch.__version__,
        "triton": _version("triton") or _version("triton-ascend"),
        "tilelang": _version("tilelang"),
        "python": platform.python_version(),
        "sparse_attn": sparse_attn.__version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ENVIRONMENT_VARIABLE: os.environ.get(ENVIRONMENT_VARIABLE),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # an unpacked archive inside somebody else's checkout
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
