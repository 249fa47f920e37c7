// Whole rows by a table, without any other rank: copies to where the table says, FP32 sums of the rows that it
// lists, and single values. What the collective transport does before and after its all-to-all.
//
// Options: VEC_BYTES (take_rows), DTYPE and OUT_DTYPE (sum_rows: of the rows and of the sums), WARPS.
#include "mxfp8.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef OUT_DTYPE
#define OUT_DTYPE DTYPE
#endif
#define OUT_BYTES (OUT_DTYPE == 0 ? 4 : 2)
#define THREADS (WARPS * 32)
#define AHEAD 4  // rows of an item whose loads are in flight together

// out_RX[r] = rows_NX[index_R[r]], strides in bytes, row_bytes a multiple of VEC_BYTES. Segments of a row are
// copied by warps of their own, so that few rows fill the chip too.
extern "C" __global__ void __launch_bounds__(THREADS)
take_rows(const u8* __restrict__ rows_NX, i64 rows_stride, const i64* __restrict__ index_R, u8* __restrict__ out_RX,
          i64 out_stride, i64 R, i64 row_bytes, int segments) {
    i64 vectors = row_bytes / VEC_BYTES, units = R * segments;
    for (i64 u = (i64)blockIdx.x * WARPS + threadIdx.x / 32; u < units; u += (i64)gridDim.x * WARPS) {
        i64 r = u / segments, s = u % segments;
        i64 at = vectors * s / segments + lane_id(), end = vectors * (s + 1) / segments;
        const Vec* from = (const Vec*)(rows_NX + index_R[r] * rows_stride);
        Vec* to = (Vec*)(out_RX + r * out_stride);
        for (; at + 96 < end; at += 128) {
            Vec v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = load_vec(from + at + 32 * i);
#pragma unroll
            for (int i = 0; i < 4; ++i) to[at + 32 * i] = v[i];
        }
        for (; at < end; at += 32) to[at] = load_vec(from + at);
    }
}

__device__ __forceinline__ void load_some(const u8* row, int h, int H, bool wide, float* f) {
    if (wide) return load_8_items(row + (i64)h * ITEM_BYTES, f);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        f[i] = 0.0f;
        if (h + i < H) f[i] = DTYPE == 0 ? ((const float*)row)[h + i] : half_to_float(((const u16*)row)[h + i]);
    }
}
__device__ __forceinline__ u32 out_pair(float low, float high) {
    u32 pair;
    if (OUT_DTYPE == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ void store_some(u8* row, int h, int H, bool wide, const float* f) {
    u8* at = row + (i64)h * OUT_BYTES;
    if (wide && OUT_DTYPE == 0) {
        ((float4*)at)[0] = make_float4(f[0], f[1], f[2], f[3]);
        ((float4*)at)[1] = make_float4(f[4], f[5], f[6], f[7]);
    } else if (wide) {
        *(uint4*)at = make_uint4(out_pair(f[0], f[1]), out_pair(f[2], f[3]), out_pair(f[4], f[5]), out_pair(f[6], f[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (h + i < H) {
                if (OUT_DTYPE == 0) ((float*)at)[i] = f[i];
                else ((u16*)at)[i] = (u16)out_pair(f[i], 0.0f);
            }
    }
}

// out_NH[n] = round(sum over k, in order, of (weights[r] *) rows[r], r = table_NK[n, k] where it is not negative).
// Sums start at +0; products are rounded before they are added. Strides in items of their tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_rows(const u8* __restrict__ rows_RH, i64 rows_stride, const i64* __restrict__ table_NK, int K,
         const float* __restrict__ weights_R, u8* __restrict__ out_NH, i64 out_stride, i64 N, int H, int segments) {
    bool wide = H % 8 == 0 && (((u64)rows_RH | (u64)out_NH | (u64)(rows_stride * ITEM_BYTES) |
                                (u64)(out_stride * OUT_BYTES)) & 15) == 0;
    i64 chunks = ((i64)H + 255) / 256;
    i64 units = N * segments;
    for (i64 u = (i64)blockIdx.x * WARPS + threadIdx.x / 32; u < units; u += (i64)gridDim.x * WARPS) {
        i64 n = u / segments;
        const i64* entries = table_NK + n * K;
        int s = (int)(u % segments), end = (int)(chunks * (s + 1) / segments);
        u8* out = out_NH + n * out_stride * OUT_BYTES;
        for (int c = (int)(chunks * s / segments); c < end; ++c) {
            int h = c * 256 + lane_id() * 8;
            if (h >= H) continue;
            float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            for (int j = 0; j < K; j += AHEAD) {
                float f[AHEAD][8], w[AHEAD];
                bool there[AHEAD];
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    i64 r = j + a < K ? entries[j + a] : -1;
                    there[a] = r >= 0;
                    if (!there[a]) continue;
                    load_some(rows_RH + r * rows_stride * ITEM_BYTES, h, H, wide, f[a]);
                    w[a] = weights_R ? weights_R[r] : 1.0f;
                }
#pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    if (!there[a]) continue;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        sum[i] = __fadd_rn(sum[i], weights_R ? __fmul_rn(w[a], f[a][i]) : f[a][i]);
                }
            }
            store_some(out, h, H, wide, sum);
        }
    }
}

// out_R[table_NK[n, k]] = values_NK[n, k] where the table is not negative; items of 4 or 8 bytes. Without values: n.
extern "C" __global__ void __launch_bounds__(THREADS)
place_in_rows(const u8* __restrict__ values_NK, i64 stride_n, i64 stride_k, const i64* __restrict__ table_NK, i64 N,
              int K, u8* __restrict__ out_R, i64 R, int item_bytes) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < N * K; i += (i64)gridDim.x * THREADS) {
        i64 n = i / K, row = table_NK[i], at = n * stride_n + i % K * stride_k;
        if (row < 0 || row >= R) continue;
        if (item_bytes == 8) ((i64*)out_R)[row] = values_NK ? ((const i64*)values_NK)[at] : n;
        else ((u32*)out_R)[row] = ((const u32*)values_NK)[at];
    }
}

// out_NK[n, k] = values_R[table_NK[n, k]], zero where the table is negative; float32, rows of out `stride` items apart.
extern "C" __global__ void __launch_bounds__(THREADS)
pick_from_rows(const float* __restrict__ values_R, i64 R, const i64* __restrict__ table_NK, i64 N, int K,
               float* __restrict__ out_NK, i64 stride) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < N * K; i += (i64)gridDim.x * THREADS) {
        i64 row = table_NK[i];
        out_NK[i / K * stride + i % K] = row >= 0 && row < R ? values_R[row] : 0.0f;
    }
}
