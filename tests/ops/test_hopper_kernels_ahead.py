"""Operators start to compile their Hopper kernels of both passes, when a call is traced or before the first one runs.

The kernels are stand-ins that compute nothing, and tensors on the CPU stand for tensors on a GPU.
"""

from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("jax", "0.11")
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from vitkernels.attention.pallas_flash.hopper import kernels
from vitkernels.attention.pallas_flash.hopper import operators as attention
from vitkernels.bridge.hopper import can_compile_for
from vitkernels.ops.linear import operators as linear_operators
from vitkernels.ops.linear import pallas_hopper as linear
from vitkernels.ops.linear import pallas_hopper_launch
from vitkernels.ops.linear_gelu import operators as linear_gelu_operators
from vitkernels.ops.linear_gelu import pallas_hopper as linear_gelu
from vitkernels.ops.mlp import operators as mlp_operators
from vitkernels.ops.mlp import pallas_hopper as mlp

# Where the stand-ins write nothing, interpreted Triton kernels may read NaN or infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


class StandIn:
    """A kernel; `events` records when one is started and when it is called."""

    events: ClassVar[list[str]] = []

    def __init__(self, function, shapes):
        kind = type(getattr(function, "__self__", function)).__name__  # or a method of one
        self.name = getattr(function, "__name__", kind)
        self.is_started = False

    def start(self, device):
        if not self.is_started:
            self.events.append(f"start {self.name}")
        self.is_started = True

    def __call__(self, *tensors):
        if not self.is_started:
            self.events.append(f"start {self.name}")
        self.is_started = True
        self.events.append(f"call {self.name}")


def has_known_sizes(*tensors):
    return all(isinstance(size, int) for x in tensors if x is not None for size in x.shape)


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(StandIn, "events", [])
    monkeypatch.setattr(kernels, "Kernel", StandIn)
    monkeypatch.setattr(pallas_hopper_launch, "Kernel", StandIn)
    monkeypatch.setattr(pallas_hopper_launch, "pairs_on", lambda device: 66)
    for module in (attention, linear_operators, linear_gelu_operators, mlp_operators):
        monkeypatch.setattr(module, "can_compile_for", has_known_sizes)
    caches = kernels.kernels_for, pallas_hopper_launch.kernel_of
    for cache in caches:
        cache.cache_clear()
    torch._dynamo.reset()
    yield StandIn.events
    torch._dynamo.reset()
    for cache in caches:
        cache.cache_clear()


def attend(x, heads=2, bias=None):
    qkv = x.unflatten(-1, (3, heads, -1))
    return attention.attend_packed(qkv, bias, *[None] * 5, False, 0.125)[0]


def attend_separate(x):
    q, k, v = x.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attention.attend(q, k, v, *[None] * 6, False, 0.125)[0]


def attend_rotated(x):
    qkv = x.unflatten(-1, (3, 2, -1))
    return attention.attend_rotary(qkv, torch.ones(x.shape[1], 128), True, *[None] * 6, False, 0.125)[0]


WEIGHT, TRANSPOSED = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((256, 128), (128, 256)))


def project(x):
    return linear.run(x, WEIGHT, None, False)


def project_with_gelu(x):
    return linear_gelu.run(x, WEIGHT, None, False)


def run_mlp(x):
    return mlp.run(x, WEIGHT, None, TRANSPOSED, None, False, True)


def tokens(N=300, width=384, requires_grad=True):
    return torch.zeros(1, N, width, dtype=torch.float16, requires_grad=requires_grad)


# Each operator, its forward kernel, and those of its backward pass.
OPERATORS = {
    "attention": (attend, tokens(), "OverlappedForward", ["dq", "dkdv"]),
    "attention, separate": (attend_separate, tokens(), "OverlappedForward", ["dq", "dkdv"]),
    "attention, short": (attend, tokens(197), "ShortForward", ["ShortBackward"]),
    "attention, long": (
        lambda x: attend(x, 400),
        tokens(1100, 400 * 3 * 64),
        "OverlappedForward",
        ["Starts", "FusedBackward"],
    ),
    "linear": (project, tokens(64, 128), "LinearProduct", []),
    "linear_gelu": (project_with_gelu, tokens(64, 128), "LinearGelu", []),
    "mlp": (run_mlp, tokens(64, 128), "LinearGelu", ["GeluLinearBackward"]),
}


def traced(function, x, dynamic=False):
    """Trace the call with torch.compile and drop its graph."""
    torch._dynamo.reset()
    nothing = x.new_zeros(1)
    torch.compile(lambda x: function(x * 1), backend=lambda graph, inputs: lambda *_: (nothing,), dynamic=dynamic)(x)


@pytest.mark.parametrize("case", OPERATORS)
def test_trace_with_gradients__starts_the_kernels_of_both_passes(case, events):
    function, x, forward, backward = OPERATORS[case]
    traced(function, x)
    assert events == [f"start {name}" for name in (forward, *backward)]


@pytest.mark.parametrize("case", OPERATORS)
def test_trace_without_gradients__starts_the_forward_kernel(case, events):
    function, x, forward, _ = OPERATORS[case]
    with torch.no_grad():
        traced(function, x)
    traced(function, x.detach())
    assert events == [f"start {forward}"]


@pytest.mark.parametrize("case", OPERATORS)
def test_trace_with_symbolic_sizes__starts_nothing(case, events):
    traced(*OPERATORS[case][:2], dynamic=True)
    assert events == []


@pytest.mark.parametrize("case", OPERATORS)
def test_eager_call__starts_the_backward_kernels_before_the_forward_kernel_runs(case, events):
    function, x, forward, backward = OPERATORS[case]
    y = function(x)
    started = [f"start {name}" for name in (forward, *backward)]
    assert events == [*started, f"call {forward}"]
    if backward:  # the kernels that the backward pass calls are those that were started
        y.backward(torch.zeros_like(y))
        assert events == [*started, f"call {forward}", *(f"call {name}" for name in backward)]


@pytest.mark.parametrize("run", [traced, lambda function, x: function(x)])
def test_bias__its_gradient_is_started_if_it_needs_one(run, events):
    bias = torch.zeros(1, 2, 384, 384, requires_grad=True)
    run(lambda x: attend(x, bias=bias), tokens(requires_grad=False))
    assert [event for event in events if "start" in event] == [
        f"start {name}" for name in ("Forward", "dq", "dkdv", "BiasGradient")
    ]
    events.clear()
    run(lambda x: attend(x, bias=bias.detach().clone()), tokens(301))
    assert [event for event in events if "start" in event] == [f"start {name}" for name in ("Forward", "dq", "dkdv")]


def test_rotation__trace_starts_the_kernels_of_both_passes(events):
    traced(attend_rotated, tokens())
    assert events == ["start OverlappedForward", "start dq", "start dkdv"]


def test_can_compile_for__requires_a_gpu_and_known_sizes(monkeypatch):
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        x, on_cpu = torch.empty(2, 3, device="cuda:0"), torch.empty(2, 3)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    symbol = mode.from_tensor(torch.empty(5, 3), symbolic_context=context).shape[0]
    with mode:
        dynamic = torch.empty(symbol, 3, device="cuda:0")
    assert not isinstance(dynamic.shape[0], int)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert can_compile_for(x) and can_compile_for(x, None)
    assert not can_compile_for(x, dynamic) and not can_compile_for(x, on_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not can_compile_for(x)
