"""From a ``torch.device`` to the facts a choice of backend depends on.

Only torch is asked, and only about the device in hand: a machine may hold GPUs of several architectures, so nothing is
remembered for "the current device".
"""

from __future__ import annotations

import re
from functools import cache

import torch

from .contract import Device

# Names that torch.npu.get_device_name reports, to the architecture that a kernel is built for.
# 910_93xx is the two-die package sold as 910C; its dies run 910B code.
_ASCEND_ARCHITECTURES = (
    (r"Ascend910B\d?C?(-\d+)?", "ascend910b"),
    (r"Ascend910_93\w*", "ascend910b"),
    (r"Ascend910(A|Pro[AB]?|[A-Z])?", "ascend910a"),
    (r"Ascend310P\d*", "ascend310p"),
)


def ascend_architecture(name: str) -> str:
    """Normalise an Ascend device name: ``"Ascend910B4-1"`` -> ``"ascend910b"``; others are lower-cased as they are."""
    for pattern, arch in _ASCEND_ARCHITECTURES:
        if re.fullmatch(pattern, name):
            return arch
    return name.lower()


@cache
def describe(device: torch.device) -> Device:
    """Describe ``device``. Reads properties once per device; a CUDA tensor exists, so its context does too."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return Device("cuda", properties.gcnArchName.partition(":")[0], properties.name)
        return Device("cuda", f"sm{properties.major}{properties.minor}", properties.name)
    if device.type == "npu":
        # torch_npu is what made the device type exist: it is loaded already, and torch.npu is there.
        name = torch.npu.get_device_name(device)  # type: ignore[attr-defined]
        return Device("npu", ascend_architecture(name), name)
    return Device(device.type, device.type, device.type)


def present_devices() -> list[torch.device]:
    """Every accelerator that torch sees here, and the CPU last."""
    found = []
    for kind in ("cuda", "npu", "xpu", "mps"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [torch.device(kind, i) for i in range(module.device_count())]
    return [*found, torch.device("cpu")]
