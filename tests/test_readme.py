"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jagg_fx.models import MLPVelocity

ROOT = Path(__file__).parent.parent


@pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")
def test_the_first_example() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    twin = code[1].replace("W=4, gate=None)", 'W=4, gate=None, compiler="eager")')
    assert twin != code[1]
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "net": MLPVelocity(2, hidden=8, depth=1),
        "states": torch.randn(5, 3, 2),
        "sigmas": torch.linspace(1, 0.2, 5),
        "old_log_probs": torch.zeros(4, 3),
        "advantages": torch.randn(3),
    }
    exec(compile(twin, "README.md", "exec"), names)
    inputs = [names[k] for k in ("states", "sigmas", "old_log_probs", "advantages")]
    torch.testing.assert_close(names["loss"], names["loss_fn"](names["net"], *inputs))
    assert all(p.grad is not None and bool(p.grad.any()) for p in names["net"].parameters())
