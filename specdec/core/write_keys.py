"""From the products of q, k and v to the query and the cache: head norm, rotary embedding, K and V in one kernel.

Inductor makes up to four kernels of it, and torch 14 to 30. This kernel reads each product once and rounds once. Its
arithmetic is in float32, so norm and rotary embedding add no roundings of 16 bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.core import fast

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch for GPUs
    triton = None


@torch.library.custom_op("specdec::write_keys", mutates_args=("keys", "values"))
def write_keys(
    products: Sequence[Tensor],
    rotary: Sequence[Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    norms: Sequence[Tensor],
    biases: Sequence[Tensor],
    epsilon: float,
) -> Tensor:
    """The query [B, H, S, E] of a pass; its K and V are written into the cache.

    products: results [B, S, H * E] for q, [B, S, G * E] for k and v; or one of all, in this order
    rotary: cos and sin [B, S, E], or the first halves of them, which the second ones repeat
    keys, values [B, G, C, E]: the cache; slots [B, S]: places of the pass's entries in it
    norms: weights [E] of the RMSNorms of query and key heads, with this epsilon; empty: none
    biases: vectors [H * E], [G * E] twice that the products lack; empty: none
    """
    wide = torch.promote_types(products[0].dtype, torch.float32)
    heads = []
    for index, product in enumerate(_split_products(products, keys)):
        x = product.to(wide) + biases[index] if biases else product.to(wide)
        x = x.unflatten(-1, (-1, keys.shape[-1])).transpose(1, 2)  # [B, heads, S, E]
        if index < 2:
            if norms:
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * norms[index]
            x = _turn_halves(x, *rotary)
        heads.append(x)
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    keys[rows, :, slots] = heads[1].transpose(1, 2).to(keys.dtype)
    values[rows, :, slots] = heads[2].transpose(1, 2).to(values.dtype)
    return heads[0].to(products[0].dtype).contiguous()


def _split_products(products: Sequence[Tensor], keys: Tensor) -> Sequence[Tensor]:
    """The products of q, k and v. Arguments as of `write_keys`"""
    if len(products) > 1:
        return products
    size = keys.shape[1] * keys.shape[-1]
    return products[0].split([products[0].shape[-1] - 2 * size, size, size], dim=-1)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of x [B, heads, S, E]. cos, sin as of `write_keys`"""
    half = x.shape[-1] // 2
    first, second = x.split(half, dim=-1)
    cos, sin = (values[:, None].to(x.dtype) for values in (cos, sin))
    first_turned = first * cos[..., :half] - second * sin[..., :half]
    return torch.cat([first_turned, second * cos[..., -half:] + first * sin[..., -half:]], dim=-1)


@write_keys.register_fake
def _(products, rotary, keys, values, slots, norms, biases, epsilon):
    width = keys.shape[-1]
    heads = _split_products(products, keys)[0].shape[-1] // width
    return products[0].new_empty(len(slots), heads, slots.shape[1], width)


if triton is not None:

    @triton.jit
    def _load_halves(product, bias, head, columns, inside, HALF: tl.constexpr):
        """Both halves of a head of a product in float32, with its bias if there is one"""
        first = 2 * HALF * head + columns
        x = tl.load(product + first, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(product + HALF + first, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            x += tl.load(bias + first, mask=inside, other=0.0).to(tl.float32)
            y += tl.load(bias + HALF + first, mask=inside, other=0.0).to(tl.float32)
        return x, y

    @triton.jit
    def _store_halves(goal, x, y, columns, inside, HALF: tl.constexpr):
        tl.store(goal + columns, x.to(goal.dtype.element_ty), mask=inside)
        tl.store(goal + HALF + columns, y.to(goal.dtype.element_ty), mask=inside)

    @triton.jit
    def _write_turned(  # noqa: PLR0913 (kernels take strides)
        goal, product, bias, head, norm, epsilon, cos, sin, columns, inside, HALF: tl.constexpr, LAST: tl.constexpr
    ):
        """A head of q or k behind norm and rotary embedding. LAST: column of the second half's cos"""
        x, y = _load_halves(product, bias, head, columns, inside, HALF)
        if norm is not None:
            scale = tl.rsqrt(tl.sum(x * x + y * y, 0) / (2 * HALF) + epsilon)
            x *= scale * tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
            y *= scale * tl.load(norm + HALF + columns, mask=inside, other=0.0).to(tl.float32)
        cos_x = tl.load(cos + columns, mask=inside, other=0.0).to(tl.float32)
        sin_x = tl.load(sin + columns, mask=inside, other=0.0).to(tl.float32)
        cos_y = tl.load(cos + LAST + columns, mask=inside, other=0.0).to(tl.float32)
        sin_y = tl.load(sin + LAST + columns, mask=inside, other=0.0).to(tl.float32)
        _store_halves(goal, x * cos_x - y * sin_x, y * cos_y + x * sin_y, columns, inside, HALF)

    @triton.jit
    def _write_kernel(  # noqa: PLR0913 (kernels take strides)
        query, key, value, query_stride, key_stride, value_stride, cos, sin, cos_stride, sin_stride,
        query_norm, key_norm, query_bias, key_bias, value_bias, epsilon, slots,
        keys, keys_row, keys_group, keys_slot, values, values_row, values_group, values_slot, out, num,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """A program for each token and each head of q, k and v. num: S; HALF: E / 2; BLOCK: power of two from HALF on

        Strides of products, cos and sin are those from token to token, B * S tokens in all.
        """
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        row = token // num
        slot = tl.load(slots + token)
        columns = tl.arange(0, BLOCK)
        inside = columns < HALF
        cos += token * cos_stride
        sin += token * sin_stride
        if head < HEADS:
            out += ((row * HEADS + head) * num + token % num) * 2 * HALF
            query += token * query_stride
            _write_turned(out, query, query_bias, head, query_norm, epsilon, cos, sin, columns, inside, HALF, LAST)
        elif head < HEADS + GROUPS:
            head -= HEADS
            keys += row * keys_row + head.to(tl.int64) * keys_group + slot * keys_slot
            key += token * key_stride
            _write_turned(keys, key, key_bias, head, key_norm, epsilon, cos, sin, columns, inside, HALF, LAST)
        else:
            head -= HEADS + GROUPS
            values += row * values_row + head.to(tl.int64) * values_group + slot * values_slot
            x, y = _load_halves(value + token * value_stride, value_bias, head, columns, inside, HALF)
            _store_halves(values, x, y, columns, inside, HALF)

    @write_keys.register_kernel("cuda")
    def launch_kernel(products, rotary, keys, values, slots, norms, biases, epsilon):
        num_rows, num = slots.shape
        groups, width = keys.shape[1], keys.shape[-1]
        flat_products = [product.reshape(num_rows * num, -1) for product in _split_products(products, keys)]
        angles = [values.expand(num_rows, num, -1).reshape(num_rows * num, -1) for values in rotary]
        heads = flat_products[0].shape[1] // width
        out = flat_products[0].new_empty(num_rows, heads, num, width)
        with torch.cuda.device_of(keys):
            _write_kernel[num_rows * num, heads + 2 * groups](
                *flat_products, *(product.stride(0) for product in flat_products),
                *angles, *(values.stride(0) for values in angles),
                *(norms or (None, None)), *(biases or (None, None, None)), epsilon, slots.contiguous(),
                keys, *keys.stride()[:3], values, *values.stride()[:3], out, num,
                heads, groups, width // 2, angles[0].shape[1] - width // 2, triton.next_power_of_2(width // 2),
                num_warps=1,
            )  # fmt: skip
        return out


def check_write_keys(device: torch.device) -> None:
    """Compares the kernel with the reference in float64 on this device.

    Raises ValueError if they differ beyond rounding, and if a GPU lacks triton.
    """
    if device.type == "cuda" and triton is None:
        raise ValueError("needs the package triton, which comes with torch for GPUs")
    compare_kernel(write_keys, device, torch.bfloat16, max_error=0.02)


def compare_kernel(
    kernel: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, *, max_error: float
) -> None:
    """Compares a kernel of `write_keys` with the reference in float64, for three rows and four kinds of layers.

    max_error: upper bound of the relative error. Raises ValueError if the kernel exceeds it.
    """
    torch.manual_seed(0)
    for num, width, has_norms, has_biases in (
        (1, 128, True, False), (5, 128, True, True), (7, 64, False, True), (3, 80, False, False),
    ):  # fmt: skip
        sizes = [4 * width, 2 * width, 2 * width]  # four query heads, two key heads
        angles = 7 * torch.rand(3, num, width // 2)
        angles = torch.cat([angles, angles], dim=-1) if has_norms else angles
        slots = torch.tensor([[0], [17], [50 - num]]) + torch.arange(num)
        product, bias = torch.randn(3, num, sum(sizes)), torch.randn(sum(sizes))
        cache = torch.zeros(2, 3, 2, 50, width)
        tensors = product, angles.cos(), angles.sin(), *cache, *torch.rand(2, width), bias
        results = []
        for function, place, precision in ((kernel, device, dtype), (write_keys, torch.device("cpu"), torch.float64)):
            joined, cos, sin, keys, values, *weights, shift = [tensor.to(place, precision) for tensor in tensors]
            options = weights if has_norms else [], shift.split(sizes) if has_biases else []
            products = [joined] if num == 5 else joined.split(sizes, dim=-1)
            query = function(products, (cos, sin), keys, values, slots.to(place), *options, 1e-6)
            results.append((query, keys, values))
        fast.compare_with_reference(f"{num} nodes, heads of {width}", results[0], results[1], max_error)
