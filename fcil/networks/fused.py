"""Batch normalisation with what follows it, in two Triton kernels forward and two backward.

PyTorch's own take seven, and two more for the activation. At the sizes of federated clients a GPU is busy with starting
kernels, so fewer of them are faster. The sums over a batch are split into parts of rows; whoever applies them adds the
parts up again, which is cheaper than one more kernel. No atomics: the same bits every time.

Images come as matrices: a row for each pixel of each image, a column for each channel.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found,misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MOST_PARTS = 64  # parts of rows that are summed side by side
TILE = 64  # rows, and channels, that a program has at a time
PROGRAMS = 264  # that apply: two for each multiprocessor of an H200


def norm_act(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, slope: float) -> Tensor:
    """Return act(norm(x) + residual), where act multiplies what is negative by `slope`."""
    x = x.contiguous(memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    result: Tensor = NormAct.apply(x, norm.weight, norm.bias, residual, norm, slope)
    return result


def agree(device: str) -> bool:
    """Compare passes forward and back, training and not, with PyTorch's on a few numbers in half precision."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(9, 24, 5, 5, generator=generator, device=device).bfloat16() for _ in range(3)]
    results = []
    for fused in (True, False):
        norm, (x, residual, back) = nn.BatchNorm2d(24, device=device), (t.clone() for t in drawn)
        x.requires_grad_(), residual.requires_grad_()
        compute = norm_act if fused else _in_full
        y = compute(norm, x, residual, 0.2)
        y.backward(back)
        with torch.no_grad():
            later = compute(norm.eval(), x, None, 0.0)
        results.append([y, later, x.grad, residual.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
    pairs = [(one.detach().float(), other.detach().float()) for one, other in zip(*results, strict=True)]
    return all(torch.allclose(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max())) for one, other in pairs)


def _in_full(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, slope: float) -> Tensor:
    y = norm(x.float()) if residual is None else norm(x.float()) + residual.float()
    return torch.where(y > 0, y, slope * y).to(x.dtype)


class NormAct(torch.autograd.Function):
    """The two passes; gradients go to images, weight, bias and residual."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, norm: nn.BatchNorm2d, slope: float
    ) -> Tensor:
        """Normalise by the batch's mean and variance while training, else by the running ones."""
        rows, channels, width = x.numel() // x.shape[1], x.shape[1], _width(x.shape[1])
        y, saved = torch.empty_like(x), torch.empty(3, channels, device=x.device)  # shift, mean, 1/deviation
        parts = _parts(rows)
        sums = torch.empty(2, parts, channels, device=x.device)
        blocks = triton.cdiv(channels, width)
        if norm.training:
            _sums[(blocks, parts)](
                x, norm.running_mean, sums, saved, rows, channels, triton.cdiv(rows, parts), BM=TILE, BC=width
            )  # fmt: skip
        programs = _programs(rows, blocks)
        _apply[(programs, blocks)](
            x, x if residual is None else residual, y, weight, bias, norm.running_mean, norm.running_var, sums, saved,
            rows, channels, parts, triton.cdiv(rows, programs), norm.momentum, norm.eps, slope,
            TRAINING=norm.training, RESIDUAL=residual is not None,
            BM=TILE, BC=width, PARTS=triton.next_power_of_2(parts),
        )  # fmt: skip
        ctx.save_for_backward(x, y if residual is not None else None, weight, bias, saved)
        ctx.slope, ctx.has_residual = slope, residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Return the gradients; only what was normalised by its own batch can be gone back through."""
        x, y, weight, bias, saved = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        rows, channels, width = x.numel() // x.shape[1], x.shape[1], _width(x.shape[1])
        blocks, parts = triton.cdiv(channels, width), _parts(rows)
        sums, programs = torch.empty(2, parts, channels, device=x.device), _programs(rows, blocks)
        how = {"RESIDUAL": ctx.has_residual, "LINEAR": ctx.slope == 1.0, "BM": TILE, "BC": width}
        y = x if y is None else y  # unused
        _back_sums[(blocks, parts)](
            x, y, dy, weight, bias, saved, sums, rows, channels, triton.cdiv(rows, parts), ctx.slope, **how
        )  # fmt: skip
        dx, dresidual = torch.empty_like(x), torch.empty_like(x) if ctx.has_residual else x
        dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
        _back_apply[(programs, blocks)](
            x, y, dy, dx, dresidual, weight, bias, dweight, dbias, saved, sums,
            rows, channels, parts, triton.cdiv(rows, programs), ctx.slope,
            PARTS=triton.next_power_of_2(parts), **how,
        )  # fmt: skip
        return dx, dweight, dbias, dresidual if ctx.has_residual else None, None, None


def _width(channels: int) -> Any:
    return min(TILE, triton.next_power_of_2(channels))


def _parts(rows: int) -> int:
    return max(1, min(MOST_PARTS, rows // TILE))


def _programs(rows: int, blocks: int) -> Any:
    return max(1, min(triton.cdiv(rows, TILE), PROGRAMS // blocks))


@triton.jit
def _tile(start, end, c, ok, channels, BM: tl.constexpr):
    """Return which of the next rows there are, and where they lie."""
    r = start + tl.arange(0, BM)
    return (r[:, None] < end) & ok[None, :], r[:, None] * channels + c[None, :]


@triton.jit
def _sums(x, shift, sums, saved, rows, channels, chunk, BM: tl.constexpr, BC: tl.constexpr):
    """Sum x - shift and its square over a part of the rows; the shift is near the mean, so no digits are lost."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < channels
    middle = tl.load(shift + c, mask=ok, other=0.0)
    total = tl.zeros([BM, BC], dtype=tl.float32)
    square = tl.zeros([BM, BC], dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, rows)
    for start in range(part * chunk, end, BM):
        here, at = _tile(start, end, c, ok, channels, BM)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - middle[None, :], 0.0)
        total += value
        square += value * value
    tl.store(sums + part * channels + c, tl.sum(total, 0), mask=ok)
    tl.store(sums + (parts + part) * channels + c, tl.sum(square, 0), mask=ok)
    if part == 0:
        tl.store(saved + c, middle, mask=ok)


@triton.jit
def _added(sums, first, parts, channels, c, ok, PARTS: tl.constexpr):
    """Add the parts of a sum up."""
    p = tl.arange(0, PARTS)
    here = (p[:, None] < parts) & ok[None, :]
    return tl.sum(tl.load(sums + (first + p)[:, None] * channels + c[None, :], mask=here, other=0.0), 0)


@triton.jit
def _apply(
    x, residual, y, weight, bias, running_mean, running_var, sums, saved,
    rows, channels, parts, chunk, momentum, eps, slope,
    TRAINING: tl.constexpr, RESIDUAL: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Normalise, add, activate; the first program of a column also keeps mean and deviation."""
    program = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = c < channels
    if TRAINING:
        off = _added(sums, 0, parts, channels, c, ok, PARTS) / rows
        mean = tl.load(saved + c, mask=ok, other=0.0) + off
        spread = tl.maximum(_added(sums, parts, parts, channels, c, ok, PARTS) / rows - off * off, 0.0)
    else:
        mean = tl.load(running_mean + c, mask=ok, other=0.0)
        spread = tl.load(running_var + c, mask=ok, other=1.0)
    inverse = 1.0 / tl.sqrt(spread + eps)
    if program == 0:
        tl.store(saved + channels + c, mean, mask=ok)
        tl.store(saved + 2 * channels + c, inverse, mask=ok)
        if TRAINING:
            before = tl.load(running_mean + c, mask=ok, other=0.0)
            tl.store(running_mean + c, (1 - momentum) * before + momentum * mean, mask=ok)
            before = tl.load(running_var + c, mask=ok, other=0.0)
            unbiased = spread * rows / tl.maximum(rows - 1, 1)
            tl.store(running_var + c, (1 - momentum) * before + momentum * unbiased, mask=ok)
    scale = inverse * tl.load(weight + c, mask=ok, other=0.0)
    shift = tl.load(bias + c, mask=ok, other=0.0) - mean * scale
    end = tl.minimum((program + 1) * chunk, rows)
    for start in range(program * chunk, end, BM):
        here, at = _tile(start, end, c, ok, channels, BM)
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
        if RESIDUAL:
            value += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        value = tl.where(value > 0, value, value * slope)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=here)


@triton.jit
def _kept(weight, bias, saved, channels, c, ok):
    """Return mean and 1/deviation as they were, and what normalised images were multiplied by and added to."""
    mean = tl.load(saved + channels + c, mask=ok, other=0.0)
    inverse = tl.load(saved + 2 * channels + c, mask=ok, other=0.0)
    scale = inverse * tl.load(weight + c, mask=ok, other=0.0)
    return mean, inverse, scale, tl.load(bias + c, mask=ok, other=0.0) - mean * scale


@triton.jit
def _came_back(
    x, y, dy, at, here, mean, inverse, scale, shift, slope, RESIDUAL: tl.constexpr, LINEAR: tl.constexpr
):  # fmt: skip
    """Return what comes back through the activation, and the normalised images.

    What was negative before it is seen from the result where something was added; else it is computed again, since
    reading takes longer.
    """
    back = tl.load(dy + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if not LINEAR:
        if RESIDUAL:
            sign = tl.load(y + at, mask=here, other=0.0).to(tl.float32)
        else:
            sign = value * scale[None, :] + shift[None, :]
        back = tl.where(sign > 0, back, back * slope)
    return back, (value - mean[None, :]) * inverse[None, :]


@triton.jit
def _back_sums(
    x, y, dy, weight, bias, saved, sums, rows, channels, chunk, slope,
    RESIDUAL: tl.constexpr, LINEAR: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum over a part of the rows what comes back, and its product with the normalised images."""
    part, parts = tl.program_id(1), tl.num_programs(1)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    ok = c < channels
    mean, inverse, scale, shift = _kept(weight, bias, saved, channels, c, ok)
    total = tl.zeros([BM, BC], dtype=tl.float32)
    product = tl.zeros([BM, BC], dtype=tl.float32)
    end = tl.minimum((part + 1) * chunk, rows)
    for start in range(part * chunk, end, BM):
        here, at = _tile(start, end, c, ok, channels, BM)
        back, normal = _came_back(x, y, dy, at, here, mean, inverse, scale, shift, slope, RESIDUAL, LINEAR)
        total += back
        product += back * normal
    tl.store(sums + part * channels + c, tl.sum(total, 0), mask=ok)
    tl.store(sums + (parts + part) * channels + c, tl.sum(product, 0), mask=ok)


@triton.jit
def _back_apply(
    x, y, dy, dx, dresidual, weight, bias, dweight, dbias, saved, sums, rows, channels, parts, chunk, slope,
    RESIDUAL: tl.constexpr, LINEAR: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Go back through activation and normalisation; the first program of a column has weight and bias."""
    program = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = c < channels
    total = _added(sums, 0, parts, channels, c, ok, PARTS)
    product = _added(sums, parts, parts, channels, c, ok, PARTS)
    if program == 0:
        tl.store(dbias + c, total, mask=ok)
        tl.store(dweight + c, product, mask=ok)
    mean, inverse, scale, shift = _kept(weight, bias, saved, channels, c, ok)
    total = total / rows
    product = product / rows
    end = tl.minimum((program + 1) * chunk, rows)
    for start in range(program * chunk, end, BM):
        here, at = _tile(start, end, c, ok, channels, BM)
        back, normal = _came_back(x, y, dy, at, here, mean, inverse, scale, shift, slope, RESIDUAL, LINEAR)
        value = scale[None, :] * (back - total[None, :] - normal * product[None, :])
        tl.store(dx + at, value.to(dx.dtype.element_ty), mask=here)
        if RESIDUAL:
            tl.store(dresidual + at, back.to(dresidual.dtype.element_ty), mask=here)
