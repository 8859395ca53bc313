"""What `oracle.py` has of data-parallel training, by the names that most tests import."""

from __future__ import annotations

from oracle import Plain as Plain
from oracle import Steps as Steps
from oracle import built as built
from oracle import forward as forward
from oracle import grid as grid
from oracle import in_order as in_order
from oracle import seed_all as seed_all
