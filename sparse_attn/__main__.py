"""``python -m sparse_attn``: which backend runs on which device of this machine, and why not the others."""

from __future__ import annotations

import argparse
import textwrap

import torch

from . import __version__, registry
from .contract import Problem
from .device import describe, present_devices
from .messages import Explanation, unknown_backend


def _typical_problem(device: torch.device) -> Problem:
    """A call of the size that the package is made for: 4096 keys, 64 query heads over 4, D=128, 32 blocks of 64."""
    return Problem(describe(device), torch.float16, torch.int32, 1, 64, 4, 4096, 4096, 128, 128, 32, 64)


def _report(device: torch.device, explanation: Explanation) -> str:
    width = max(map(len, explanation.reasons))
    nothing = "" if explanation.chosen else f": nothing would run, since {explanation.how} cannot"
    lines = [f"{device}: {explanation.device}{nothing}"]
    for name, reasons in explanation.reasons.items():
        answer = "chosen" if name == explanation.chosen else "no" if reasons else "yes"
        text = f"  {name:<{width}}  {answer:<6}  {explanation.says(name)}".rstrip()
        lines.append(textwrap.fill(text, 120, subsequent_indent=" " * (width + 12), break_on_hyphens=False))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sparse_attn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sparse_attn {__version__}, torch {torch.__version__}")
    parser.parse_args()
    override = registry.current_override()
    if override is not None and override.name not in registry.backend_specs():
        parser.error(unknown_backend(override.name, override.source, list(registry.backend_specs())))
    print(
        f"sparse_attn {__version__}, torch {torch.__version__}; {override.source if override else 'automatic choice'}"
    )
    for device in present_devices():
        print()
        print(_report(device, registry.explanation(_typical_problem(device))))
    print("\nFor a call of your own: print(sparse_attn.explain(q, k, v, index, block_size))")


if __name__ == "__main__":
    main()
