"""What a script makes torch's default dtype changes nothing of a model that names its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SCRIPTS, paceline
from safetensors.torch import load_file

OUTER = ["local=2 every=2 outer_codec=int8", "local=2 every=2 outer_codec=int4 fragments=2"]
PLANS = {
    "islands": ("--max-restarts", "0", "defaults.py", *OUTER),
    "units": ("--max-restarts", "0", "defaults.py", "shard=2 zero=1", "shard=2", "tensor=2", "exact"),
    **{f"servers {word}": ("--plan", f"server=2 {word}", "defaults.py") for word in ("codec=int8", "codec=fp16", "")},
}


@pytest.mark.slow
@pytest.mark.parametrize("default", ["float64", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_do_not_depend_on_the_default_dtype(plan: str, default: str, tmp_path: Path) -> None:
    at = PLANS[plan].index("defaults.py")
    options, plans = PLANS[plan][:at], PLANS[plan][at + 1 :]
    for dtype in ("float32", default):
        (tmp_path / dtype).mkdir()
        words = ("run", "--workers", "2", *options, SCRIPTS / "defaults.py", dtype, *plans)
        paceline(*words, cwd=tmp_path / dtype)
    for number in range(len(plans) or 1):
        one, other = (load_file(tmp_path / dtype / f"{number}.safetensors") for dtype in ("float32", default))
        assert all(one[name].equal(other[name]) for name in one), plans[number : number + 1]
