"""What agents and their coordinators import, before torch is: `NAMES` tells it from what comes after."""

import sys

import paceline.cli
import paceline.launch.chaos
import paceline.launch.check
import paceline.team.server  # noqa: F401

assert "torch" not in sys.modules
NAMES = {*sys.modules}
