// Work on one row at a time, without any other rank: the MXFP8 codec, and the gradients of
// applied weights. A warp takes a row.
//
// Options: DTYPE, SCALE_FLOOR, WARPS, TREE_LEVELS.
#include "mxfp8.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef TREE_LEVELS
#define TREE_LEVELS 5
#endif
#define THREADS (WARPS * 32)

// x_NH [N, H] (payload dtype) -> E4M3 elements data_NH [N, H] and scales_NS [N, H / 32]. Strides in items; the
// elements of a row are adjacent. Rows of x at multiples of 16 bytes, those of data at multiples of 8.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize_rows(const void* __restrict__ x_NH, i64 x_stride, u8* __restrict__ data_NH, i64 data_stride,
              u8* __restrict__ scales_NS, i64 scales_stride, i64 N, int H) {
    for (i64 n = (i64)blockIdx.x * WARPS + threadIdx.x / 32; n < N; n += (i64)gridDim.x * WARPS) {
        u8 *data = data_NH + n * data_stride, *scales = scales_NS + n * scales_stride;
        for (int e0 = 0; e0 < H; e0 += 256) {
            int e = e0 + lane_id() * 8;
            float f[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (e < H) load_8_items((const u8*)x_NH + (n * x_stride + e) * ITEM_BYTES, f);
            u32 scale;
            uint2 q = quantize_8(f, &scale);
            if (e < H) {
                *(uint2*)(data + e) = q;
                if (lane_id() % 4 == 0) scales[e / 32] = (u8)scale;
            }
        }
    }
}

// The way back, to the payload dtype.
extern "C" __global__ void __launch_bounds__(THREADS)
dequantize_rows(const u8* __restrict__ data_NH, i64 data_stride, const u8* __restrict__ scales_NS, i64 scales_stride,
                void* __restrict__ x_NH, i64 x_stride, i64 N, int H) {
    for (i64 n = (i64)blockIdx.x * WARPS + threadIdx.x / 32; n < N; n += (i64)gridDim.x * WARPS) {
        const u8 *data = data_NH + n * data_stride, *scales = scales_NS + n * scales_stride;
        for (int e = lane_id() * 8; e < H; e += 256) {
            float f[8];
            dequantize_8(load_8(data + e), scales[e / 32], f);
            store_8_items((u8*)x_NH + (n * x_stride + e) * ITEM_BYTES, pack_8(f));
        }
    }
}

__device__ __forceinline__ float load_item(const void* p, i64 i) {
    return DTYPE == 0 ? ((const float*)p)[i] : half_to_float(((const u16*)p)[i]);
}
__device__ __forceinline__ void store_item(void* p, i64 i, float x) {
    if (DTYPE == 0) ((float*)p)[i] = x;
    else ((u16*)p)[i] = (u16)to_half_pair(x, 0.0f);
}

// 8 products y * grad from element h on, their gradients stored on the way; elements from H on are absent.
struct Products {
    float p[8];
};
struct WeightedRow {
    const u8 *y, *grad;
    u8* out;
    float w;
    int H;
    bool wide;  // 16-byte accesses are allowed
};
__device__ __forceinline__ Products products_at(const WeightedRow& a, int h) {
    float y[8], g[8];
    Products r;
    if (a.wide && h < a.H) {
        load_8_items(a.y + (i64)h * ITEM_BYTES, y);
        load_8_items(a.grad + (i64)h * ITEM_BYTES, g);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            y[i] = h + i < a.H ? load_item(a.y, h + i) : 0.0f;
            g[i] = h + i < a.H ? load_item(a.grad, h + i) : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        r.p[i] = __fmul_rn(y[i], g[i]);
        g[i] = __fmul_rn(a.w, g[i]);
    }
    if (a.wide && h < a.H) {
        store_8_items(a.out + (i64)h * ITEM_BYTES, pack_8(g));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (h + i < a.H) store_item(a.out, h + i, g[i]);
    }
    return r;
}
// Element `low` of a halving step of `stride` has a partner iff the row, padded to 2 * half, reaches it;
// the padding itself is never added (an absent +0 would turn a -0 into +0).
__device__ __forceinline__ bool has_partner(int low, int stride, int half, int H) {
    return stride < half || (stride == half && low + stride < H);
}
// This lane's 8 elements after all halvings of stride 256 and more. Chunks of 256 come in bit-reversed
// order, so that the two halves of a step follow each other: a binary counter of partial sums is enough.
__device__ __forceinline__ Products halve_chunks(const WeightedRow& a, int h, int half) {
    Products sums[TREE_LEVELS + 1], x;
#pragma unroll 2
    for (int i = 0; i < 1 << TREE_LEVELS; ++i) {
        int chunk = TREE_LEVELS ? (int)(__brev(i) >> (32 - TREE_LEVELS & 31)) : 0, at = chunk * 256 + h;
        x = products_at(a, at);
        bool carry = true;
#pragma unroll
        for (int c = 0; c <= TREE_LEVELS; ++c) {
            bool add = carry && (i >> c & 1);
            if (add) {
                // Only the first step, of stride `half`, meets the end of the row: x is its upper half.
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    x.p[j] = c > 0 || at + j < a.H ? __fadd_rn(sums[c].p[j], x.p[j]) : sums[c].p[j];
            } else if (carry) {
                sums[c] = x;
            }
            carry = add;
        }
    }
    return x;
}

// Backward of scaling rows by weights, on the expert's rank:
//   grad_rows[r] = round(w[r] * grad[r]);   grad_weights[r] = sum_h y[r, h] * grad[r, h]
// The sum is that of ep_comm.rows.row_dot: the row of rounded FP32 products, padded to a power of two, has
// its upper half added to its lower half until one is left. Rows from *row_count on (the tail) get a
// gradient of zero, and become zero rows if zero_tail.
// Option: TREE_LEVELS, log2 of (H rounded up to a power of two) / 256, at least 0.
extern "C" __global__ void __launch_bounds__(THREADS)
weighted_backward(const void* __restrict__ y_RH, const void* __restrict__ grad_RH, const float* __restrict__ weights_R,
                  void* __restrict__ grad_rows_RH, float* __restrict__ grad_weights_R, i64 R, int H,
                  const i64* __restrict__ row_count, int zero_tail) {
    i64 used = *row_count;
    bool wide = H % 8 == 0 && (((u64)y_RH | (u64)grad_RH | (u64)grad_rows_RH) & 15) == 0;
    int half = 1;
    while (half * 2 < H) half *= 2;
    for (i64 r = (i64)blockIdx.x * WARPS + threadIdx.x / 32; r < R; r += (i64)gridDim.x * WARPS) {
        i64 start = r * H * ITEM_BYTES;
        if (r >= used) {
            if (lane_id() == 0) grad_weights_R[r] = 0.0f;
            for (int h = lane_id(); zero_tail && h < H; h += 32) store_item((u8*)grad_rows_RH + start, h, 0.0f);
            continue;
        }
        WeightedRow a = {(const u8*)y_RH + start, (const u8*)grad_RH + start, (u8*)grad_rows_RH + start,
                         weights_R[r], H, wide};
        int h = lane_id() * 8;
        Products sum = halve_chunks(a, h, half);
#pragma unroll
        for (int d = 16; d; d /= 2)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float high = __shfl_down_sync(FULL_MASK, sum.p[i], d);
                if (has_partner(h + i, d * 8, half, H)) sum.p[i] = __fadd_rn(sum.p[i], high);
            }
#pragma unroll
        for (int d = 4; d; d /= 2)
#pragma unroll
            for (int i = 0; i < d; ++i)
                if (has_partner(h + i, d, half, H)) sum.p[i] = __fadd_rn(sum.p[i], sum.p[i + d]);
        if (lane_id() == 0) grad_weights_R[r] = sum.p[0];
    }
}
