// MXFP8 blocks as a warp sees them: a lane holds 8 consecutive elements, 4 lanes hold a block of 32.
//
// Byte for byte what ep_comm.quantize_mxfp8 gives. Option: SCALE_FLOOR (0 = "rceil", 1 = "floor").
#pragma once
#include "common.cuh"

#ifndef SCALE_FLOOR
#define SCALE_FLOOR 0
#endif

// 8 elements of the payload dtype at p, as floats.
__device__ __forceinline__ void load_8_items(const void* p, float* f) {
    const uint4* q = reinterpret_cast<const uint4*>(p);
    if (DTYPE == 0) {
        uint4 a = load_16(q), b = load_16(q + 1);
        u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = __uint_as_float(w[i]);
    } else {
        uint4 a = load_16(q);
        u32 w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) from_half_pair(w[i], f + 2 * i);
    }
}

// Shared scale of a block from the bits of its largest magnitude. With exponent e and mantissa m the
// OCP text has 2^(e - 8) (448 = 1.75 * 2^8); rounding amax / 448 up adds one where m > 0.75.
__device__ __forceinline__ u32 scale_byte(u32 amax_bits) {
    int s = (int)(amax_bits >> 23) - 8;
    if (!SCALE_FLOOR) s += (amax_bits & 0x7fffff) > 0x600000;
    return s > 0 ? s : 0;  // at most 254 - 8 + 1
}

__device__ __forceinline__ u32 to_e4m3_pair(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

// Quantises the 8 elements of this lane together with its three neighbours. All 32 lanes call.
__device__ __forceinline__ uint2 quantize_8(const float* f, u32* scale) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 bits = __float_as_uint(f[i]) & 0x7fffffff;
        amax = bits > amax ? bits : amax;  // magnitudes order like integers, NaN above infinity
    }
    u32 other = __shfl_xor_sync(FULL_MASK, amax, 1);
    amax = other > amax ? other : amax;
    other = __shfl_xor_sync(FULL_MASK, amax, 2);
    amax = other > amax ? other : amax;
    if (amax >= 0x7f800000u) {
        *scale = 0xff;
        return make_uint2(0x7f7f7f7fu, 0x7f7f7f7fu);
    }
    u32 s = amax ? scale_byte(amax) : 0;
    *scale = s;
    float inverse = __uint_as_float((254 - s) << 23);  // 2^(127 - s); s <= 247, so never subnormal
    uint2 q;
    q.x = to_e4m3_pair(f[0] * inverse, f[1] * inverse) | (to_e4m3_pair(f[2] * inverse, f[3] * inverse) << 16);
    q.y = to_e4m3_pair(f[4] * inverse, f[5] * inverse) | (to_e4m3_pair(f[6] * inverse, f[7] * inverse) << 16);
    return q;
}

__device__ __forceinline__ void from_e4m3_pair(u32 pair, float scale, float* f) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
    f[0] = f16_to_float(halves & 0xffff) * scale;  // exact, or an overflow to infinity
    f[1] = f16_to_float(halves >> 16) * scale;
}
__device__ __forceinline__ void dequantize_8(uint2 q, u32 s, float* f) {
    // 2^(s - 127): subnormal for s = 0, NaN for 0xff
    float scale = __uint_as_float(s == 0xff ? 0x7fc00000u : s ? s << 23 : 0x400000u);
    from_e4m3_pair(q.x & 0xffff, scale, f);
    from_e4m3_pair(q.x >> 16, scale, f + 2);
    from_e4m3_pair(q.y & 0xffff, scale, f + 4);
    from_e4m3_pair(q.y >> 16, scale, f + 6);
}

// 8 floats in the payload dtype: one 16-byte vector, or two for float32.
struct Items8 {
    uint4 a;
#if DTYPE == 0
    uint4 b;
#endif
};
__device__ __forceinline__ Items8 pack_8(const float* f) {
    Items8 r;
#if DTYPE == 0
    r.a = make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
    r.b = make_uint4(__float_as_uint(f[4]), __float_as_uint(f[5]), __float_as_uint(f[6]), __float_as_uint(f[7]));
#else
    r.a = make_uint4(to_half_pair(f[0], f[1]), to_half_pair(f[2], f[3]), to_half_pair(f[4], f[5]),
                     to_half_pair(f[6], f[7]));
#endif
    return r;
}
__device__ __forceinline__ void store_8_items(void* p, const Items8& r) {
    reinterpret_cast<uint4*>(p)[0] = r.a;
#if DTYPE == 0
    reinterpret_cast<uint4*>(p)[1] = r.b;
#endif
}

// Four chunks of 256 elements have 32 scale bytes. Each lane holds one byte per chunk in `packed` (byte u
// = chunk u, the same in the 4 lanes of a block); lane j < 8 gets scale bytes 4j .. 4j+3 in row order.
__device__ __forceinline__ u32 gather_scales(u32 packed) {
    u32 j = lane_id() & 7, word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 from = __shfl_sync(FULL_MASK, packed, ((j & 1) * 4 + i) * 4);
        word |= ((from >> (8 * (j >> 1))) & 0xff) << (8 * i);
    }
    return word;
}
