"""set_ops and set_attention on models that are wrapped or compiled already."""

import pytest
import torch
from expecting import error
from timm.models.vision_transformer import VisionTransformer
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vitkernels import models
from vitkernels.models.backend_attention import BackendAttention
from vitkernels.models.fused_modules import FusedBlock

pytestmark = pytest.mark.usefixtures("process_group", "quick_kernels")
OPS = {"layer_norm_residual": "triton", "mlp": "passes"}


@pytest.fixture
def process_group():
    """A process group of this process alone, which fully_shard and DDP need."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def tiny() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3)


def with_blocks(wrap) -> nn.Module:
    """Return a model whose blocks are wrapped one by one."""
    model = tiny()
    for name, block in model.blocks.named_children():
        model.blocks.set_submodule(name, wrap(block), strict=True)
    return model


def compiled_in_place(block: nn.Module) -> nn.Module:
    block.compile(backend="eager")
    return block


@pytest.mark.parametrize("ops", [OPS, dict.fromkeys(OPS, "auto"), {}], ids=["named", "auto", "eager"])
@pytest.mark.parametrize(
    ("wrap", "wrapper", "path"),
    [
        (lambda: fully_shard(tiny()), "fully_shard", ""),
        (lambda: with_blocks(fully_shard), "fully_shard", "blocks.0"),
        (lambda: fully_shard(models.set_ops(tiny(), OPS)), "fully_shard", ""),
        (lambda: DistributedDataParallel(tiny()), "DistributedDataParallel", ""),
        (lambda: nn.DataParallel(tiny()), "DataParallel", ""),
        (lambda: with_blocks(lambda block: torch.compile(block, backend="eager")), "torch.compile", "blocks.0"),
        (lambda: with_blocks(compiled_in_place), "torch.compile", "blocks.0"),
    ],
    ids=["sharded", "sharded-blocks", "sharded-fused", "ddp", "dp", "compiled-blocks", "blocks-compiled-in-place"],
)
def test_set_ops__refuses_a_wrapped_model(wrap, wrapper, path, ops):
    model = wrap()
    classes = [type(module) for module in model.modules()]
    with error("models.wrapped", caller="set_ops", wrapper=wrapper, path=path) as caught:
        models.set_ops(model, ops)
    assert f"call set_ops or accelerate before {wrapper}" in str(caught.value)
    assert [type(module) for module in model.modules()] == classes


@torch.no_grad()
def test_set_ops__of_a_compiled_model_takes_effect():
    """Only its parts must not be compiled: torch.compile notices that the model has changed."""
    model = tiny().eval()
    compiled, x = torch.compile(model, backend="eager"), torch.randn(2, 3, 16, 16)
    before = compiled(x)
    models.set_ops(compiled, OPS)
    assert all(isinstance(block, FusedBlock) for block in model.blocks)
    model.blocks.register_forward_hook(lambda module, inputs, output: output.cos())  # only the new blocks have it
    after = compiled(x)
    assert not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after, model(x))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("wrap", "wrapper"),
    [(fully_shard, "fully_shard"), (compiled_in_place, "torch.compile")],
)
def test_set_attention__refuses_wrapped_attention_modules(wrap, wrapper, swapped):
    model = models.set_attention(tiny(), "sdpa") if swapped else tiny()
    wrap(model.blocks[1].attn)
    with error("models.wrapped", caller="set_attention", wrapper=wrapper, path="blocks.1.attn"):
        models.set_attention(model, "native")


def test_set_attention__refuses_attention_in_a_compiled_module():
    model = tiny()
    model.blocks[0].attn = torch.compile(model.blocks[0].attn, backend="eager")
    with error("models.wrapped", caller="set_attention", wrapper="torch.compile", path="blocks.0.attn"):
        models.set_attention(model, "native")


def trained(sharded_first: bool) -> list[torch.Tensor]:
    """Return the losses of three steps of a model that is sharded before or after its attention is swapped."""
    model = tiny()
    if not sharded_first:
        models.set_attention(model, "native")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if sharded_first:
        models.set_attention(model, "native")
    assert all(isinstance(block.attn, BackendAttention) for block in model.blocks)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        losses.append(model(torch.randn(4, 3, 16, 16)).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_set_attention__inside_sharded_blocks_trains_as_before_sharding():
    first, last = trained(sharded_first=True), trained(sharded_first=False)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True)) and not torch.equal(first[0], first[2])


@torch.no_grad()
def test_set_attention__inside_ddp_and_compiled_models():
    for wrap in (DistributedDataParallel, lambda model: torch.compile(model, backend="eager")):
        model = tiny().eval()
        wrapped, x = wrap(model), torch.randn(2, 3, 16, 16)
        expected = wrapped(x)
        models.set_attention(wrapped, "native")
        assert all(isinstance(block.attn, BackendAttention) for block in model.blocks)
        torch.testing.assert_close(wrapped(x), expected)
