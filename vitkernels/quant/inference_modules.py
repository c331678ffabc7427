"""Linear layers and embeddings with weights in 8 or 4 bits, for inference.

Shape suffixes: K in features, N out features, S blocks, V rows of an embedding, D its width; "..." any dimensions.
"""

from typing import Any

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

    Buffers, all in the state dict: `weight` int8 (N, K) or (S, B, N), or uint8 with two 4-bit weights per byte along
    K, or fp8 (N, K); `scale` and `zero_point` (N,) or (S, N); `bias` (N,), floating point.
    backend: of the op quantized_matmul.

    Raises UsageError ("quant.block_size") if the scheme's block size does not divide in_features.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None

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
        self.dtype = torch.float32  # of the weight that `dequantize` returns
        shape, dtype, scale_shape = stored_weight(in_features, out_features, self.scheme)
        self.register_buffer("weight", torch.zeros(shape, dtype=dtype, device=device))
        self.register_buffer("scale", torch.zeros(scale_shape, device=device))
        self.register_buffer("zero_point", None if self.scheme.symmetric else torch.zeros(scale_shape, device=device))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear, scheme: Scheme | str, backend: str = "auto") -> "QuantizedLinear":
        """Return the quantized form of a linear layer, its weight rounded to nearest."""
        has_bias = linear.bias is not None
        quantized = cls(linear.in_features, linear.out_features, scheme, has_bias, backend, linear.weight.device)
        quantized.load_quantized_weight(*quantize_weight(linear.weight, quantized.scheme))
        quantized.dtype = linear.weight.dtype
        if has_bias:
            quantized.bias = linear.bias.detach().clone()
        return quantized.train(linear.training)

    def load_quantized_weight(self, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Load weights that were quantized elsewhere, such as for torch_xla's XlaQuantizedLinear.

        4-bit weights may be packed, or one per byte as in torch_xla. Raises UsageError ("quant.weight_shape") for
        another shape or dtype.
        """
        if self.scheme.weight_bits == 4 and weight.dtype == torch.int8:
            weight = pack_int4(weight)
        given = {"weight": weight, "scale": scale, "zero_point": zero_point}
        for name, tensor in given.items():
            expected = getattr(self, name)
            same = (tensor is None) == (expected is None) and (tensor is None or tensor.shape == expected.shape)
            if not same or (name == "weight" and weight.dtype != expected.dtype):
                raise UsageError(
                    f"{name} of a {self.scheme.name} layer with {self.in_features} in and {self.out_features} out "
                    f"features must be {_describe(expected)}, got {_describe(tensor)}",
                    code="quant.weight_shape",
                    name=name,
                    expected=_describe(expected),
                    got=_describe(tensor),
                )
        for name, tensor in given.items():
            setattr(self, name, tensor)
        if self.scheme.block_size != -1:  # same shape, with strides that put K last, as 8-bit tensor cores require
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
        """Return an nn.Linear with the dequantized weight, in the dtype of the original layer."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        weight = dequantize(self.weight, self.scale, self.zero_point, self.in_features, self.scheme.block_size)
        linear.weight = nn.Parameter(weight.to(self.dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.clone())
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.scheme.name}, bias={self.bias is not None}"


class QuantizedEmbedding(nn.Module):
    """An embedding table in 8 or 4 bits, with one scale per row or per block of a row; for inference.

    Buffers: `weight` int8 or fp8 (V, D), or uint8 (V, ⌈D/2⌉) with two 4-bit entries per byte; `scale` and
    `zero_point` (V,) or (V, D / block_size). The scheme's activation_bits have no effect.

    Raises UsageError ("quant.block_size") if the scheme's block size does not divide embedding_dim.
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def __init__(self, num_embeddings: int, embedding_dim: int, scheme: Scheme | str, dtype=torch.float32, device=None):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.dtype = num_embeddings, embedding_dim, dtype
        self.gradient_options: dict[str, Any] = {}  # nn.Embedding options that affect only its gradient
        self.scheme = scheme = Scheme.named(scheme) if isinstance(scheme, str) else scheme
        if scheme.block_size != -1 and embedding_dim % scheme.block_size:
            message = f"block_size {scheme.block_size} does not divide the embedding dimension {embedding_dim}"
            raise UsageError(message, code="quant.block_size", block_size=scheme.block_size, in_features=embedding_dim)
        packed = scheme.weight_bits == 4
        width = -(-embedding_dim // 2) if packed else embedding_dim
        shape = (num_embeddings,) if scheme.block_size == -1 else (num_embeddings, embedding_dim // scheme.block_size)
        self.register_buffer("weight", torch.zeros(num_embeddings, width, dtype=scheme.dtype, device=device))
        self.register_buffer("scale", torch.zeros(shape, device=device))
        self.register_buffer("zero_point", None if scheme.symmetric else torch.zeros(shape, device=device))

    @classmethod
    def of(cls, embedding: nn.Embedding, scheme: Scheme | str) -> "QuantizedEmbedding":
        """Return the quantized form of an embedding, its entries rounded to nearest.

        Raises UsageError ("quant.max_norm") if the embedding has max_norm, which modifies weights in the forward pass.
        """
        if embedding.max_norm is not None:
            message = "embeddings with max_norm modify their weights in the forward pass and cannot be quantized"
            raise UsageError(message, code="quant.max_norm", max_norm=embedding.max_norm)
        weight = embedding.weight.detach()
        rows, width = weight.shape
        quantized = cls(rows, width, scheme, weight.dtype, weight.device)
        options = ("padding_idx", "scale_grad_by_freq", "sparse")
        quantized.gradient_options = {name: getattr(embedding, name) for name in options}
        scheme = quantized.scheme
        groups = weight if scheme.block_size == -1 else weight.unflatten(1, (-1, scheme.block_size))
        q, quantized.scale, quantized.zero_point = quantize_groups(groups, scheme)
        q = q.reshape(weight.shape)
        quantized.weight = pack_int4(q) if scheme.weight_bits == 4 else q
        return quantized.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows (..., D) of integer ids (...,) in the original dtype. Only these rows are unpacked."""
        flat = ids.reshape(-1)
        zero_point = None if self.zero_point is None else self.zero_point[flat]
        w = self.weight
        w = w.view(torch.int8)[flat].view(w.dtype) if self.scheme.fp8 else w[flat]  # CPUs cannot index fp8
        return self._rows(w, self.scale[flat], zero_point).reshape(*ids.shape, self.embedding_dim)

    def dequantize(self) -> nn.Embedding:
        """Return an nn.Embedding with the dequantized entries."""
        table = self._rows(self.weight, self.scale, self.zero_point)
        return nn.Embedding.from_pretrained(table, freeze=False, **self.gradient_options).train(self.training)

    def _rows(self, w: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """Return dequantized rows (rows, D)."""
        if self.scheme.weight_bits == 4:
            w = unpack_int4(w, self.embedding_dim)
        blocks = 1 if self.scheme.block_size == -1 else self.scale.shape[1]
        rows = w.float().unflatten(1, (blocks, -1)) * scale.reshape(-1, blocks, 1)
        if zero_point is not None:
            rows = rows - zero_point.reshape(-1, blocks, 1)
        return rows.flatten(1).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.scheme.name}"


def _describe(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
