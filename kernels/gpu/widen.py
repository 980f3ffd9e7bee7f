"""Elements of the arena as operands of a product: as they are, or widened from the bytes of fp8."""

import triton
import triton.language as tl


@triton.jit
def widen(elements, like, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Returns elements of the arena in a pointer's dtype, in float32 with UPCAST.

    Of fp8 (`kernels.fp8`) it returns 1/256 of each value, exactly: the four bits of exponent and three of mantissa are moved to
    where float16 has its lowest of each, so every code is finite and no fp8 instruction is needed.
    """
    if FP8:
        bits = elements.to(tl.uint16)
        elements = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if not UPCAST:
            elements = elements.to(like.dtype.element_ty)
    if UPCAST:
        elements = elements.to(tl.float32)
    return elements
