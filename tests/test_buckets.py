"""Gradient buckets: each is handed on once, in order, complete and as soon as it can be, however backward goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.gradient_buckets import Bucket, Buckets
from paceline.errors import UsageError

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


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def plain_gradients(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    for one in inputs:
        model(one).square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


@given(st.data())
def test_every_bucket_goes_once_in_order_complete_and_as_soon_as_it_can(data):
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
def test_buckets_hold_every_parameter_once_in_reverse_order_and_one_dtype_each(sizes, dtypes, first, others):
    params = parameters(sizes, dtypes)
    buckets = Buckets(params, first, others).buckets
    assert [number for bucket in buckets for number in bucket.members] == list(reversed(range(len(params))))
    for bucket in buckets:
        assert {params[number].dtype for number in bucket.members} == {bucket.flat.dtype}
        assert bucket.flat.numel() == sum(sizes[number] for number in bucket.members)
        # Nothing is added to a bucket that is full: without its last parameter it would be below the limit.
        before_last = sum(params[number].nbytes for number in bucket.members[:-1])
        assert before_last < (first if bucket.index == 0 else others)


def test_the_first_bucket_is_small_and_the_others_large():
    params = parameters([1 << 17] * 60)  # a megabyte each
    sizes = [bucket.flat.nbytes >> 20 for bucket in Buckets(params).buckets]
    assert sizes == [1, 25, 25, 9]


def test_gradients_are_those_of_plain_backward():
    model, x = mlp(), torch.randn(4, 5, dtype=torch.float64)
    plain = plain_gradients(model, x)
    buckets, handed = Buckets(list(model.parameters()), 64, 128), Handed()
    for _ in range(3):  # the second step finds gradients of the first
        buckets.begin(handed)
        buckets.begin_backward(last=True)
        for param in model.parameters():
            param.grad = None
        model(x).square().sum().backward()
        assert buckets.flush() == set()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    assert handed.order == list(range(len(buckets.buckets))) * 3


def test_micro_batches_add_up_and_only_the_last_hands_on():
    model = mlp()
    inputs = torch.randn(3, 4, 5, dtype=torch.float64).unbind()
    plain = plain_gradients(model, *inputs)
    buckets, handed = Buckets(list(model.parameters()), 1, 1), Handed()
    buckets.begin(handed)
    for one in inputs[:-1]:
        model(one).square().sum().backward()
        assert handed.order == []
    buckets.begin_backward(last=True)
    model(inputs[-1]).square().sum().backward()
    assert handed.order == list(range(len(buckets.buckets)))  # before flush: it overlapped with backward
    buckets.flush()
    for bucket, content in zip(buckets.buckets, handed.content, strict=True):
        assert torch.equal(content, bucket.flat)
    for param, grad in zip(model.parameters(), plain, strict=True):
        assert torch.allclose(param.grad, grad, rtol=1e-14, atol=0)


def test_a_parameter_that_only_an_earlier_micro_batch_used_keeps_its_gradient():
    one, other = parameters([3, 2])
    buckets, handed = Buckets([one, other], 1, 1), Handed()
    buckets.begin(handed)
    feed(one, 2.0)
    feed(other, 3.0)
    buckets.begin_backward(last=True)
    feed(other, 3.0)
    assert handed.order == [0]  # `other` is done, of `one` nothing more may come: flush knows
    assert buckets.flush() == set()
    assert one.grad.tolist() == [2.0, 2.0, 2.0]
    assert other.grad.tolist() == [6.0, 6.0]


def test_a_parameter_used_twice_is_counted_once():
    model, x = mlp(), torch.randn(4, 7, dtype=torch.float64)
    shared = nn.Linear(7, 7).double()

    def forward() -> torch.Tensor:
        return model[2](shared(torch.tanh(shared(x)))).square().sum()

    params = [*shared.parameters(), *model[2].parameters()]
    forward().backward()
    plain = [param.grad.clone() for param in params]
    for param in params:
        param.grad = None
    buckets, handed = Buckets(params, 1, 1), Handed()
    buckets.begin(handed)
    buckets.begin_backward(last=True)
    forward().backward()
    assert handed.order == [0, 1, 2, 3]
    assert buckets.flush() == set()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, plain, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_that_comes_in_parts_is_whole_or_refused(reentrant):
    """Reentrant checkpointing runs a backward inside of backward: a shared parameter gets its gradient in parts."""
    shared, x = nn.Linear(4, 4).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def forward() -> torch.Tensor:
        inside = checkpoint(shared, x, use_reentrant=reentrant)
        return checkpoint(shared, inside, use_reentrant=reentrant).square().sum()

    forward().backward()
    plain = [param.grad.clone() for param in shared.parameters()]
    shared.zero_grad(set_to_none=True)
    buckets = Buckets(list(shared.parameters()), 1, 1)
    buckets.begin(Handed())
    buckets.begin_backward(last=True)
    if not reentrant:
        forward().backward()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(shared.parameters(), plain, strict=True))
        return
    with pytest.raises(UsageError) as caught:
        forward().backward()
    assert str(caught.value) == (
        "the gradient of a parameter of shape (4,) came in two parts, the second after the first was sent to the other "
        "workers; checkpoint with use_reentrant=False: the other kind cannot share parameters between segments"
    )


def test_an_unused_parameter_is_zero_also_where_the_last_step_left_something():
    one, other = parameters([3, 2])
    buckets = Buckets([one, other])
    for both in (True, False):
        buckets.begin(Handed())
        buckets.begin_backward(last=True)
        one.grad = other.grad = None
        feed(one, 5.0)
        if both:
            feed(other, 7.0)
        assert buckets.flush() == (set() if both else {1})
    assert other.grad.tolist() == [0.0, 0.0]
    assert one.grad.tolist() == [5.0, 5.0, 5.0]


def test_a_parameter_that_was_frozen_meanwhile_is_unused():
    model, x = mlp(), torch.randn(4, 5, dtype=torch.float64)
    buckets, handed = Buckets(list(model.parameters()), 1, 1), Handed()
    model[2].requires_grad_(False)
    buckets.begin(handed)
    buckets.begin_backward(last=True)
    model(x).square().sum().backward()
    assert handed.order == [0, 1]  # those after the frozen ones wait for the flush
    assert buckets.flush() == {2, 3}
    assert handed.order == [0, 1, 2, 3, 4, 5]


def test_gradients_outside_of_a_step_are_left_alone():
    (param,) = parameters([2])
    buckets, handed = Buckets([param]), Handed()
    feed(param, 1.0)
    feed(param, 2.0)
    assert param.grad.tolist() == [3.0, 3.0]
    buckets.begin(handed)
    buckets.abandon()
    feed(param, 1.0)
    assert handed.order == []
    param.grad = None
    buckets.begin(handed)
    buckets.begin_backward(last=True)
    feed(param, 4.0)
    assert (handed.order, handed.content[0].tolist()) == ([0], [4.0, 4.0])


def test_channels_last_and_transposed_parameters_get_their_own_gradient():
    conv = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    turned = nn.Parameter(torch.randn(5, 4, dtype=torch.float64).t())
    x = torch.randn(2, 3, 3, 3, dtype=torch.float64)

    def forward() -> torch.Tensor:
        return (conv(x).flatten(1) @ turned).square().sum()

    forward().backward()
    params = [conv.weight, conv.bias, turned]
    plain = [param.grad.clone() for param in params]
    for param in params:
        param.grad = None
    buckets = Buckets(params)
    buckets.begin(Handed())
    buckets.begin_backward(last=True)
    forward().backward()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, plain, strict=True))
