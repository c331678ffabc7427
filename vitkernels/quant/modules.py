"""Linear layers and embeddings that keep their weights in 8 or 4 bits.

Shape suffixes: K in features, N out features, S blocks, V rows of an embedding, D its width; "..." any dimensions.
"""

import torch
from torch import Tensor, nn

from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError
from vitkernels.ops import quantized_matmul
from vitkernels.ops.quantized_matmul import pack_int4, unpack_int4
from vitkernels.ops.quantized_matmul.reference import dequantize
from vitkernels.quant.schemes import Scheme, quantize_groups, quantize_weight, stored_weight


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + bias with W in 8 or 4 bits, in torch_xla's layouts; for inference.

    Buffers, all in the state dict: `weight` int8 (N, K) or (S, B, N), or uint8 with two 4-bit weights to a byte along
    K, or fp8 (N, K); `scale` and `zero_point` (N,) or (S, N); `bias` (N,), in float.
    backend: quantized_matmul's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme | str,
        bias: bool = True,
        backend: str = "auto",
        device=None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.backend = in_features, out_features, backend
        self.scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
        self.dtype = torch.float32  # of the weight that this one stands for
        shape, dtype, scale_shape = stored_weight(in_features, out_features, self.scheme)
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("scale", torch.zeros(scale_shape, device=device))
        self.register_buffer("zero_point", None if self.scheme.symmetric else torch.zeros(scale_shape, device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear, scheme: Scheme | str, backend: str = "auto") -> "QuantizedLinear":
        """The same layer with its weight rounded to nearest."""
        has_bias = linear.bias is not None
        quantized = cls(linear.in_features, linear.out_features, scheme, has_bias, backend, linear.weight.device)
        quantized.load_quantized_weight(*quantize_weight(linear.weight, quantized.scheme))
        quantized.dtype = linear.weight.dtype
        if has_bias:
            quantized.bias = linear.bias.detach().clone()
        return quantized.train(linear.training)

    def load_quantized_weight(self, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Take weights quantized elsewhere, such as for torch_xla's XlaQuantizedLinear.

        4-bit weights may come packed, or one to a byte as torch_xla has them. Raises UsageError for other shapes.
        """
        if self.scheme.weight_bits == 4 and weight.dtype == torch.int8:
            weight = pack_int4(weight)
        given = {"weight": weight, "scale": scale, "zero_point": zero_point}
        for name, tensor in given.items():
            expected = getattr(self, name)
            same = (tensor is None) == (expected is None) and (tensor is None or tensor.shape == expected.shape)
            if not same or (name == "weight" and tensor.dtype != expected.dtype):
                raise UsageError(
                    f"{name} of a {self.scheme.name} layer of {self.in_features} to {self.out_features} features must "
                    f"be {_described(expected)}, got {_described(tensor)}"
                )
        for name, tensor in given.items():
            setattr(self, name, tensor)
        if self.scheme.block_size != -1:  # in memory with K last, as 8-bit matrix units want it; the shape stays
            self.weight = self.weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        return quantized_matmul(
            x.to(dtype_of(x)),
            self.weight,
            self.scale,
            self.zero_point,
            bias=self.bias,
            block_size=self.scheme.block_size,
            weight_bits=self.scheme.weight_bits,
            activation_bits=self.scheme.activation_bits,
            backend=self.backend,
        )

    def dequantize(self) -> nn.Linear:
        """An nn.Linear with the weight that the stored one stands for, in the dtype of the layer this was made of."""
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        weight = dequantize(self.weight, self.scale, self.zero_point, self.in_features, self.scheme.block_size)
        linear.weight = nn.Parameter(weight.to(self.dtype))
        if has_bias:
            linear.bias = nn.Parameter(self.bias.clone())
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme.name}, bias={self.bias is not None}"


class QuantizedEmbedding(nn.Module):
    """Rows of a table kept in 8 or 4 bits, with one scale per row or one per block of a row; for inference.

    Buffers: `weight` int8 or fp8 (V, D), or uint8 (V, ⌈D/2⌉) with two 4-bit entries to a byte; `scale` and
    `zero_point` (V,) or (V, D / block_size). The scheme's activation_bits say nothing here.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, scheme: Scheme | str, dtype=torch.float32, device=None):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = num_embeddings, embedding_dim, dtype
        self.for_training = {}  # options of nn.Embedding that matter to its gradient alone, for `dequantize`
        self.scheme = scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
        if scheme.block_size != -1 and embedding_dim % scheme.block_size:
            raise UsageError(f"block_size {scheme.block_size} does not divide the embedding's width {embedding_dim}")
        packed = scheme.weight_bits == 4
        width = -(-embedding_dim // 2) if packed else embedding_dim
        shape = (num_embeddings,) if scheme.block_size == -1 else (num_embeddings, embedding_dim // scheme.block_size)
        self.register_buffer("weight", torch.zeros(num_embeddings, width, dtype=scheme.dtype, device=device))
        self.register_buffer("scale", torch.zeros(shape, device=device))
        self.register_buffer("zero_point", None if scheme.symmetric else torch.zeros(shape, device=device))

    @classmethod
    def of(cls, embedding: nn.Embedding, scheme: Scheme | str) -> "QuantizedEmbedding":
        """The same table with its entries rounded to nearest. max_norm, which changes weights, is refused."""
        if embedding.max_norm is not None:
            raise UsageError("an embedding with max_norm changes its weights as it is used and cannot be quantized")
        weight = embedding.weight.detach()
        quantized = cls(*weight.shape, scheme, weight.dtype, weight.device)
        options = ("padding_idx", "scale_grad_by_freq", "sparse")
        quantized.for_training = {name: getattr(embedding, name) for name in options}
        scheme = quantized.scheme
        groups = weight if scheme.block_size == -1 else weight.unflatten(1, (-1, scheme.block_size))
        q, quantized.scale, quantized.zero_point = quantize_groups(groups, scheme)
        q = q.reshape(weight.shape)
        quantized.weight = pack_int4(q) if scheme.weight_bits == 4 else q
        return quantized.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """(...,) of row numbers to (..., D) in the table's own dtype. Only the rows asked for are unpacked."""
        flat = ids.reshape(-1)
        zero_point = None if self.zero_point is None else self.zero_point[flat]
        w = self.weight
        w = w.view(torch.int8)[flat].view(w.dtype) if self.scheme.fp8 else w[flat]  # CPUs cannot index 8-bit floats
        return self._rows(w, self.scale[flat], zero_point).reshape(*ids.shape, self.embedding_dim)

    def dequantize(self) -> nn.Embedding:
        """An nn.Embedding of the entries that the stored ones stand for."""
        table = self._rows(self.weight, self.scale, self.zero_point)
        return nn.Embedding.from_pretrained(table, freeze=False, **self.for_training).train(self.training)

    def _rows(self, w: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        if self.scheme.weight_bits == 4:
            w = unpack_int4(w, self.embedding_dim)
        blocks = 1 if self.scheme.block_size == -1 else self.scale.shape[1]
        rows = w.float().unflatten(1, (blocks, -1)) * scale.reshape(-1, blocks, 1)
        if zero_point is not None:
            rows = rows - zero_point.reshape(-1, blocks, 1)
        return rows.flatten(1).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme.name}"


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
