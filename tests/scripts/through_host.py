"""As basics.py, where tensors of the CPU go the way that those of workers which share a GPU go."""

from basics import *  # noqa: F403
from basics import make as make

from paceline.comm import c10d_backend as backend
from paceline.comm import communicator as group
from paceline.comm.host_staging import HostStaging
from paceline.comm.nccl import Nccl

carried = []


def carrier(channel, tensor, peer=None, coded=False):
    carried.append(tensor.nbytes)
    return HostStaging(channel)


group.carrier = carrier
backend._cuda = lambda tensors: "the CPU"
Nccl.shares = lambda *_: True
