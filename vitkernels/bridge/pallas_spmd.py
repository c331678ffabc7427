"""Run a JAX kernel under torch_xla's SPMD: each device computes its own shard of the batch."""

from collections.abc import Callable

from torch import Tensor


def run_per_shard(run: Callable, tensors: list[Tensor], outputs: list, sums: bool = False) -> list[Tensor]:
    """Run `run(tensors)` with dimension 0 sharded over the global mesh's first axis, as in data-parallel training.

    Tensors with another leading size (a bias shared by the batch) are replicated. The call is not sharded if SPMD is
    off, no global mesh is set, the axis does not divide the batch, or an output's leading size is not the batch size
    (the gradient of a shared bias sums over all devices' images).

    Args:
        outputs: the (shape, dtype) of each output of the unsharded call.
        sums: the outputs are sums over the batch, with a leading 1. A sharded call returns one entry per shard.
    """
    from torch_xla import runtime

    if not runtime.is_spmd():
        return run(tensors)
    import torch_xla.distributed.spmd as spmd

    mesh = spmd.get_global_mesh()
    if mesh is None:
        return run(tensors)
    shards, batch = mesh.mesh_shape[0], tensors[0].shape[0]
    leading = 1 if sums else batch
    if shards == 1 or batch % shards or batch == 1 or any(shape[:1] != (leading,) for shape, _ in outputs):
        return run(tensors)
    if sums:
        outputs = [((shards, *shape[1:]), dtype) for shape, dtype in outputs]

    def spec(shape):
        return (0 if shape and shape[0] == batch else None, *[None] * (len(shape) - 1))

    def sharded(shape):
        return (0, *[None] * (len(shape) - 1))

    local = [spmd.enable_manual_sharding(t, spec(t.shape), mesh=mesh).global_tensor for t in tensors]
    return [
        spmd.disable_manual_sharding(out, sharded(shape), shape, mesh=mesh).global_tensor
        for out, (shape, _) in zip(run(local), outputs, strict=True)
    ]
