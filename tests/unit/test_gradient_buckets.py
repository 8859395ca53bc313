"""Gradient buckets: each is handed on once, in order, complete and as soon as it can be, whatever comes first."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples import examples
from paceline.comm.gradient_buckets import Bucket, Buckets

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Handed:
    """Takes buckets as a strategy does, and remembers what was in them at that moment."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.content: list[torch.Tensor] = []

    def __call__(self, bucket: Bucket) -> None:
        self.order.append(bucket.index)
        self.content.append(bucket.flat.clone())


def parameters(sizes: list[int], dtypes: list[torch.dtype] | None = None) -> list[nn.Parameter]:
    dtypes = dtypes or [torch.float64]
    return [nn.Parameter(torch.ones(size, dtype=dtypes[n % len(dtypes)])) for n, size in enumerate(sizes)]


def feed(param: nn.Parameter, value: float) -> None:
    """A backward that gives this parameter alone the gradient `value`."""
    (param * value).sum().backward()


@examples(st.data(), fast=40)
def test_each_bucket_is_sent_once_in_order_when_complete(data):
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    params = parameters(sizes)
    first, others = data.draw(st.integers(1, 100)), data.draw(st.integers(1, 200))
    buckets, handed = Buckets(params, first, others), Handed()
    arrival = data.draw(st.permutations(range(len(params))))
    arrival = arrival[: data.draw(st.integers(0, len(params)))]
    buckets.begin(handed)
    buckets.begin_backward(last=True)
    arrived: set[int] = set()
    for number in arrival:
        feed(params[number], number + 1.0)
        arrived.add(number)
        complete = 0
        while complete < len(buckets.buckets) and arrived.issuperset(buckets.buckets[complete].members):
            complete += 1
        assert handed.order == list(range(complete))
    unused = buckets.flush()
    assert unused == set(range(len(params))) - arrived
    assert handed.order == list(range(len(buckets.buckets)))
    for bucket, content in zip(buckets.buckets, handed.content, strict=True):
        assert torch.equal(content, bucket.flat)  # nothing came after it was handed on
    for number, param in enumerate(params):
        assert torch.equal(param.grad, torch.full_like(param, number + 1.0 if number in arrived else 0.0))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(1, 600),
)
def test_buckets_partition_parameters_in_reverse_order_by_dtype(sizes, dtypes, first, others):
    params = parameters(sizes, dtypes)
    buckets = Buckets(params, first, others).buckets
    assert [number for bucket in buckets for number in bucket.members] == list(reversed(range(len(params))))
    for bucket in buckets:
        assert {params[number].dtype for number in bucket.members} == {bucket.flat.dtype}
        assert bucket.flat.numel() == sum(sizes[number] for number in bucket.members)
        # Nothing is added to a bucket that is full: without its last parameter it would be below the limit.
        before_last = sum(params[number].nbytes for number in bucket.members[:-1])
        assert before_last < (first if bucket.index == 0 else others)


def test_first_bucket_is_smaller_than_the_others():
    params = parameters([1 << 17] * 60)  # a megabyte each
    sizes = [bucket.flat.nbytes >> 20 for bucket in Buckets(params).buckets]
    assert sizes == [1, 25, 25, 9]
