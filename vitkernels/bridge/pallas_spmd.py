"""Adopted kernels under torch_xla's SPMD: each device runs the kernel on its own part of the batch."""

from collections.abc import Callable

from torch import Tensor


def run_per_shard(run: Callable, tensors: list[Tensor], outputs: list) -> list[Tensor]:
    """`run(tensors)`, with dimension 0 split over the global mesh's first axis, as data-parallel training splits it.

    Tensors of another leading size (a bias for the whole batch) go whole to every device. Runs unsplit where SPMD is
    off, no global mesh is set, the axis does not divide the batch, or an output is not of the batch's size (the
    gradient of a shared bias: a sum over all devices' images).

    `outputs` are the (shape, dtype)s of the unsplit call.
    """
    from torch_xla import runtime

    if not runtime.is_spmd():
        return run(tensors)
    import torch_xla.distributed.spmd as spmd

    mesh = spmd.get_global_mesh()
    if mesh is None:
        return run(tensors)
    parts, batch = mesh.mesh_shape[0], tensors[0].shape[0]
    if parts == 1 or batch % parts or batch == 1 or any(shape[:1] != (batch,) for shape, _ in outputs):
        return run(tensors)

    def spec(shape):
        return (0 if shape and shape[0] == batch else None, *[None] * (len(shape) - 1))

    local = [spmd.enable_manual_sharding(t, spec(t.shape), mesh=mesh).global_tensor for t in tensors]
    return [
        spmd.disable_manual_sharding(out, spec(shape), shape, mesh=mesh).global_tensor
        for out, (shape, _) in zip(run(local), outputs, strict=True)
    ]
