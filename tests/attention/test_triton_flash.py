"""triton_flash beyond the conformance suite: bit-equal reruns, graphs without breaks, no copies, refusals."""

import pytest
import torch
from expecting import error

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from vitkernels import attention
from vitkernels.attention import Problem
from vitkernels.attention.triton_flash.inputs import split_head_dim
from vitkernels.attention.triton_flash.launch import launch_fitting
from vitkernels.attention.triton_flash.tiling import TileConfig, tail_tile
from vitkernels.bridge.operator import readable
from vitkernels.testing.attention_harness import check_reruns

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLASH = attention.get("triton_flash")


@pytest.mark.parametrize("device", DEVICES)
def test_reruns__are_bit_equal(device):
    qkv = torch.randn(2, 70, 3, 2, 64, device=device, requires_grad=True)
    bias = torch.randn(2, 1, 70, requires_grad=True, device=device)
    check_reruns(lambda: FLASH.qkvpacked(qkv, bias=bias), (qkv, bias))


@pytest.mark.parametrize(
    "device, backend", [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("packed", [True, False])
def test_compile__has_no_graph_breaks(device, backend, packed):
    torch._dynamo.reset()
    x = torch.randn(1, 40, 3, 2, 32, device=device, requires_grad=True)

    def model(x):
        if packed:
            return FLASH.qkvpacked(x * 1.5).relu()
        return FLASH(*(x * 1.5).permute(2, 0, 3, 1, 4).unbind(0), is_causal=True).relu()

    out, compiled = model(x), torch.compile(model, fullgraph=True, backend=backend)(x)
    # Inductor may fuse the multiplication differently: one float32 rounding.
    torch.testing.assert_close(compiled, out, rtol=1e-5, atol=1e-5)
    (grad,), (compiled_grad,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(compiled.sum(), x)
    torch.testing.assert_close(compiled_grad, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_operators__pass_opcheck(device):
    """Check schemas, fake outputs and registered gradients."""
    ops = torch.ops.vitkernels
    qkv = torch.randn(1, 20, 3, 2, 32, device=device, requires_grad=True)
    bias = torch.randn(1, 1, 20, 64, device=device, requires_grad=True)
    bias.data[..., 20:] = float("-inf")
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    FLASH.qkvpacked(qkv)  # registers them
    torch.library.opcheck(ops.triton_flash_packed, (qkv, bias, None, None, False, 0.2, [], None), test_utils=checks)
    rotary = qkv, torch.randn(18, 64, device=device), True, bias, None, None, False, 0.2, [], None
    torch.library.opcheck(ops.triton_flash_rotary, rotary, test_utils=checks)
    q, k, v = qkv.detach().permute(2, 0, 3, 1, 4).unbind(0)
    torch.library.opcheck(ops.triton_flash, (q, k, v, bias, None, None, True, 0.2, [], None), test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [True, False])
def test_tiles__run_as_configured(device, packed, monkeypatch):
    """Each pass runs with the requested sizes and returns the same result as with default tiles."""
    from vitkernels.attention.triton_flash import launch, operators

    run, seen = launch._launch_pass, []
    monkeypatch.setattr(launch, "_launch_pass", lambda *args: seen.append(args[5]) or run(*args))
    for cache in ("_forward_launches", "_backward_launches"):
        monkeypatch.setattr(operators, cache, {})
    chosen = FLASH.configured(tiles={"forward": "32x16", "dq": None, "dkdv": "16x32"})
    qkv = torch.randn(1, 70, 3, 1, 32, device=device, requires_grad=True)

    def result(backend):
        out = backend.qkvpacked(qkv) if packed else backend(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        return out, *torch.autograd.grad(out, qkv, torch.ones_like(out).cumsum(-1))

    expected = result(FLASH)
    assert seen == [None] * 3
    for got, wanted in zip(result(chosen), expected, strict=True):
        # Different tiles sum 70 float32 products in a different order.
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert [tiles and (tiles.n, tiles.m) for tiles in seen[3:]] == [(32, 16), None, (16, 32)]


@pytest.mark.parametrize(
    ("options", "code", "fields"),
    [
        ({"tiles": {"forward": "64"}}, "attention.tiles", {"key": "forward", "value": "64"}),
        ({"tiles": {"forward": "48x64"}}, "attention.tiles", {"key": "forward", "value": "48x64"}),
        ({"tiles": {"sideways": "64x64"}}, "attention.tiles", {"key": "sideways"}),
        ({"speed": 9}, "attention.options", {"options": ("speed",)}),
    ],
)
def test_configured__rejects_unknown_options(options, code, fields):
    with error(code, **fields):
        FLASH.configured(**options)
    assert FLASH.configured(tiles={"forward": None}) is FLASH


@pytest.mark.parametrize("device", DEVICES)
def test_relaunch__reads_its_own_tensors(device):
    """A second call with a known layout launches with addresses, which must be those of its own tensors."""
    packed = torch.randn(2, 41, 2, 3, 2, 40, device=device)  # two interleaved packed projections
    odd = torch.randn(2 * 41 * 256, device=device)
    shape = (2, 41, 3, 2, 40)
    layouts = [packed[:, :, 0], packed[:, :, 1], odd[1 : packed.numel() // 2 + 1].view(shape)]
    layouts += [odd[: packed.numel() // 2].view(shape), odd.as_strided(shape, (41 * 256, 256, 82, 40, 1))]  # k copied
    for qkv in layouts:
        for transposed in (False, True, False):
            leaf = qkv.detach().requires_grad_()
            out = FLASH.qkvpacked(leaf)
            do = torch.randn(41, 2, 80, device=device).transpose(0, 1) if transposed else torch.randn_like(out)
            exact = leaf.detach().double().requires_grad_()
            wanted = attention.get("native").qkvpacked(exact)
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)  # float32: 41 products and sums
            grads = torch.autograd.grad(out, leaf, do), torch.autograd.grad(wanted, exact, do.double())
            torch.testing.assert_close(grads[0][0].double(), grads[1][0], rtol=0, atol=5e-5)  # of larger numbers


@pytest.mark.parametrize("device", DEVICES)
def test_relaunch__after_alignment_changes(device):
    """A kernel compiled for 16-byte-aligned addresses must not run on unaligned tensors."""
    memory = torch.randn(4, 2 * 3 * 50 * 32 + 1, device=device)
    for first in (0, 1, 0, 1):
        q, k, v, do = memory[:, first : first + 2 * 3 * 50 * 32].view(4, 2, 3, 50, 32).unbind(0)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = FLASH(*leaves)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        wanted = attention.get("native")(*exact)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)  # float32: sums of 50 products
        grads = torch.autograd.grad(out, leaves, do), torch.autograd.grad(wanted, exact, do.double())
        for got, expected in zip(*grads, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-5)  # as above, of larger numbers


@pytest.mark.gpu
def test_memory__holds_no_copies():
    """In addition to its inputs, a training call allocates only out, lse, delta and one dqkv."""
    qkv = torch.randn(8, 197, 3, 12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn(8, 197, 12 * 64, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(FLASH.qkvpacked(qkv), qkv, do)
    used = torch.cuda.max_memory_allocated() - before
    statistics = 2 * 8 * 12 * 197 * 4
    assert used < (qkv.numel() + do.numel()) * 2 + statistics + 8 * 512  # the allocator rounds up to 512 bytes


def test_model_layouts__are_read_in_place():
    for D in range(32, 129, 8):
        q, k, v = torch.empty(2, 10, 3, 3, D, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
        assert all(readable(x) is x for x in (q, k, v, q.contiguous(), q[:1, :, :1]))
    assert readable(q.mT) is not q.mT and readable(q[..., 1:]).is_contiguous()


def test_head_dim__is_split_into_two_tiles():
    dims = (16, 24, 32, 40, 64, 72, 80, 88, 96, 104, 128, 160, 192, 224)
    assert {D: split_head_dim(D) for D in dims} == {
        16: (16, 0), 24: (32, 0), 32: (32, 0), 40: (32, 16), 64: (64, 0), 72: (64, 16), 80: (64, 16), 88: (64, 32),
        96: (64, 32), 104: (128, 0), 128: (128, 0), 160: (128, 64), 192: (128, 64), 224: (256, 0),
    }  # fmt: skip
    assert [tail_tile(n, 64) for n in (64, 65, 80, 81, 127, 5)] == [0, 16, 16, 32, 64, 16]


def test_launch_fitting__shrinks_tiles_until_they_fit():
    """On GPUs with less shared memory than Hopper: first fewer stages, then smaller tiles."""
    tried = []

    def launch(tiles):
        tried.append((tiles.n, tiles.m, tiles.num_stages))
        if len(tried) < 4:
            raise OutOfResources(131072, 101376, "shared memory")
        return "launched"

    assert launch_fitting(TileConfig(128, 64, 8, 2), launch) == "launched"
    assert tried == [(128, 64, 2), (128, 64, 1), (64, 64, 1), (64, 32, 1)]


def test_launch_fitting__raises_if_the_smallest_tiles_do_not_fit():
    def launch(tiles):
        raise OutOfResources(131072, 101376, "shared memory")

    with pytest.raises(OutOfResources):
        launch_fitting(TileConfig(128, 64), launch)


def test_unsupported__message():
    def problem(**changes):
        standard = {"batch": 1, "heads": 1, "q_tokens": 9, "kv_tokens": 9, "head_dim": 64}
        return Problem(**standard | {"dtype": torch.float32, "device_type": "cuda"} | changes)

    assert FLASH.unsupported(problem()) is None
    assert "bfloat16, float16 and float32" in FLASH.unsupported(problem(dtype=torch.float64))
    assert "got 60" in FLASH.unsupported(problem(head_dim=60))
    assert "dropout_p=0.1" in FLASH.unsupported(problem(dropout_p=0.1))
    assert "got xla" in FLASH.unsupported(problem(device_type="xla"))


def test_training__matches_sdpa():
    """Four steps of a small attention layer: losses decrease and equal those with sdpa."""

    def losses(name):
        torch.manual_seed(0)
        qkv, head = torch.nn.Linear(32, 96), torch.nn.Linear(32, 10)
        optimizer = torch.optim.AdamW([*qkv.parameters(), *head.parameters()], lr=1e-2)
        x, y = torch.randn(4, 17, 32), torch.randint(0, 10, (4,))
        found = []
        for _ in range(4):
            out = attention.get(name).qkvpacked(qkv(x).view(4, 17, 3, 1, 32))
            loss = torch.nn.functional.cross_entropy(head(out.mean(1)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours, theirs = losses("triton_flash"), losses("sdpa")
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-4)  # float32 rounding, amplified by four steps of AdamW
