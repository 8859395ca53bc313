"""`hvd.elastic`: training that goes on when workers come and go."""

from paceline.integrations.horovod.elastic import ElasticSampler, ObjectState, TorchState, run
from paceline.integrations.horovod.elastic import ElasticState as State

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
