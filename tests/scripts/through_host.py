"""As basics.py, where tensors of the CPU go the way that those of workers which share a GPU go."""

from basics import *  # noqa: F403
from basics import make as make

from paceline.comm import backend, group
from paceline.comm.nccl import Nccl
from paceline.comm.through_host import ThroughHost

carried = []


def carrier(channel, tensor, peer=None, coded=False):
    carried.append(tensor.nbytes)
    return ThroughHost(channel)


group.carrier = carrier
backend._cuda = lambda tensors: "the CPU"
Nccl.shares = lambda *_: True
