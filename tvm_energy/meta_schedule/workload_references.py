"""What each workload computes, in plain numpy: the ground truth for its kernels.

Sums are taken in float64 whatever the data type, so that a difference from a kernel is the kernel's
rounding and not ours. Convolutions add one shifted, strided slice of the input per kernel position;
nothing here shares code or form with the tensor expressions that TVM schedules. The callers cast
the result to the workload's output type.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def conv2d(
    data: Array, weight: Array, *, stride: int, padding: int, dilation: int, groups: int
) -> Array:
    """Cross-correlation, zero padded.

    Args:
        data: (n, ci, h, w).
        weight: (co, ci / groups, r, s).
        stride: step of the output grid in both directions.
        padding: zeros added on every side.
        dilation: distance between taps.
        groups: channel groups that do not see each other.

    Returns:
        (n, co, oh, ow).
    """
    padded = _pad(data, padding, 0.0)
    group_in, group_out = weight.shape[1], weight.shape[0] // groups
    taps = list(_taps(padded, weight.shape[2:], stride, dilation))
    results = []
    for group in range(groups):
        channels = slice(group * group_in, (group + 1) * group_in)
        filters = weight[group * group_out : (group + 1) * group_out]
        results.append(
            sum(
                np.einsum("nchw,oc->nohw", tap[:, channels], filters[:, :, r, s], optimize=True)
                for (r, s), tap in taps
            )
        )
    return np.concatenate(results, axis=1)


def conv1d(data: Array, weight: Array, *, stride: int, padding: int, dilation: int) -> Array:
    """Cross-correlation of (n, ci, l) with (co, ci, r), zero padded; gives (n, co, ol)."""
    padded = np.pad(data, ((0, 0), (0, 0), (padding, padding)))
    reach = (weight.shape[2] - 1) * dilation
    length = (padded.shape[2] - reach - 1) // stride + 1
    result = np.zeros((data.shape[0], weight.shape[0], length))
    for r in range(weight.shape[2]):
        start = r * dilation
        tap = padded[:, :, start : start + (length - 1) * stride + 1 : stride]
        result += np.einsum("ncl,oc->nol", tap, weight[:, :, r], optimize=True)
    return result


def conv2d_transpose(data: Array, weight: Array, *, stride: int, padding: int) -> Array:
    """The gradient of a convolution in its input: every input value stamps the kernel.

    Args:
        data: (n, ci, h, w).
        weight: (ci, co, r, s).
        stride: distance between stamps.
        padding: border cut off from the result.

    Returns:
        (n, co, (h - 1) * stride + r - 2 * padding, (w - 1) * stride + s - 2 * padding).
    """
    n, _, h, w = data.shape
    _, co, kernel_h, kernel_w = weight.shape
    canvas = np.zeros((n, co, (h - 1) * stride + kernel_h, (w - 1) * stride + kernel_w))
    for r in range(kernel_h):
        for s in range(kernel_w):
            stamp = np.einsum("nchw,co->nohw", data, weight[:, :, r, s], optimize=True)
            canvas[:, :, r : r + h * stride : stride, s : s + w * stride : stride][
                :, :, :h, :w
            ] += stamp
    return canvas[:, :, padding : canvas.shape[2] - padding, padding : canvas.shape[3] - padding]


def max_pool2d(data: Array, *, kernel: int, stride: int, padding: int) -> Array:
    """Largest value in each window of (n, c, h, w); the padding never wins."""
    padded = _pad(data, padding, -np.inf)
    return np.max([tap for _, tap in _taps(padded, (kernel, kernel), stride, 1)], axis=0)


def avg_pool2d(data: Array, *, kernel: int, stride: int, padding: int) -> Array:
    """Mean over each window of (n, c, h, w), over the cells inside the image only."""
    total = sum(tap for _, tap in _taps(_pad(data, padding, 0.0), (kernel, kernel), stride, 1))
    inside = _pad(np.ones_like(data[:1, :1]), padding, 0.0)
    count = sum(tap for _, tap in _taps(inside, (kernel, kernel), stride, 1))
    return np.asarray(total / count)


def softmax(data: Array) -> Array:
    """Softmax over the last axis."""
    exponent = np.exp(data - data.max(axis=-1, keepdims=True))
    return np.asarray(exponent / exponent.sum(axis=-1, keepdims=True))


def layernorm(data: Array, gamma: Array, beta: Array, *, epsilon: float) -> Array:
    """(x - mean) / sqrt(var + epsilon) * gamma + beta over the last axis."""
    centred = data - data.mean(axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + epsilon) * gamma + beta)


def _pad(data: Array, padding: int, value: float) -> Array:
    border = (padding, padding)
    return np.pad(data, ((0, 0), (0, 0), border, border), constant_values=value)


def _taps(
    padded: Array, kernel: tuple[int, ...], stride: int, dilation: int
) -> Iterator[tuple[tuple[int, int], Array]]:
    """For each kernel position, the input value that it meets at every output position."""
    out_h, out_w = (
        (size - (taps - 1) * dilation - 1) // stride + 1
        for size, taps in zip(padded.shape[2:], kernel, strict=True)
    )
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            top, left = r * dilation, s * dilation
            yield (
                (r, s),
                padded[
                    :,
                    :,
                    top : top + (out_h - 1) * stride + 1 : stride,
                    left : left + (out_w - 1) * stride + 1 : stride,
                ],
            )
