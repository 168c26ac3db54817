"""Checks of the 910B's backends without one, each in the environment that it needs: `make test-ascend`.

None is skipped: what is missing makes a check fail.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl

    # Its interpreter takes this reduction for an unknown one, and calls it for every single number.
    tl.standard._elementwise_max = tl.max.fn.__globals__["_elementwise_max_default"]
