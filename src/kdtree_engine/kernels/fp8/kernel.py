"""FP8 words to the two operands they hold, for kernels that multiply by them.

    words [.., N, 32] int16: low byte input i, high byte input 32 + i of 64
    scale [.., N, 1] float32
    two planes [.., N, 32]: float32(byte) * scale, rounded once to the activations' dtype

Words, not bytes: behind eight-bit loads Triton permutes an operand's inputs inside the MMA where
that saves shuffles, which would add them up in another order than those of a bf16 weight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def planes_ptx(words, scale):
    """Two words lie in one register; each is converted to two float16, exactly, then multiplied.

    A pair that a conversion makes belongs to two planes, and the last conversion takes one of each
    word. Outputs are written before the last input is read.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 v, w, v0, v1, w0, w1;
        .reg .b32 p, q;
        .reg .f32 a0, a1, b0, b1;
        mov.b32 {v, w}, $2;
        cvt.rn.f16x2.e4m3x2 p, v;
        cvt.rn.f16x2.e4m3x2 q, w;
        mov.b32 {v0, v1}, p;
        mov.b32 {w0, w1}, q;
        cvt.f32.f16 a0, v0;
        cvt.f32.f16 a1, v1;
        cvt.f32.f16 b0, w0;
        cvt.f32.f16 b1, w1;
        mul.rn.f32 a0, a0, $3;
        mul.rn.f32 a1, a1, $3;
        mul.rn.f32 b0, b0, $4;
        mul.rn.f32 b1, b1, $4;
        cvt.rn.bf16x2.f32 $0, b0, a0;
        cvt.rn.bf16x2.f32 $1, b1, a1;
        }
        """,
        "=&r,=&r,r,f,f",
        [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def plane(words, scale, J: tl.constexpr, DTYPE: tl.constexpr):
    """Plane J in DTYPE, by integer operations: in bfloat16 what planes_ptx returns.

    Exponent and mantissa, put where float32 has them, are the value times 2^-120, denormals too.
    """
    byte = (words.to(tl.int32) >> (8 * J)) & 255
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where((byte & 127) == 127, float("nan"), value)
    return (value * scale).to(DTYPE)


@triton.jit
def planes(words, scale, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Both planes in DTYPE; by inline PTX if there is one for it."""
    if PTX and tl.bfloat16 == DTYPE:
        both = planes_ptx(words, scale)
    else:
        both = plane(words, scale, 0, DTYPE), plane(words, scale, 1, DTYPE)
    return both
