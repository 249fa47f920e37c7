// The tables of an all-to-all of token rows (ep_comm.transport.hop): where items stand in the send buffer, what the
// receivers are told with each row, and where the received rows belong. Nothing here talks to a peer.
//
// Letters: T items, D destinations, S positions of the send buffer, K slots, N received rows, R rows of experts.
#include "common.cuh"

#define WARPS 32
#define THREADS (WARPS * 32)
#define RUN 8                     // ballots of a warp
#define BLOCK_ITEMS (THREADS * RUN)

__device__ __forceinline__ i64 count_at(const u8* counts, int count_bytes, i64 d) {
    return count_bytes == 4 ? (i64)((const int*)counts)[d] : ((const i64*)counts)[d];
}

// D blocks for each run of BLOCK_ITEMS items: a block places its run for one destination.
//   needs_TD       bool, rows `stride` apart: whether the item goes to the destination
//   counts_D       items for each destination, count_bytes (4 or 8) each; null: every destination has `rows` positions
//   position_TD    int64: position of the item; -1 where it does not go there, or there is no room for it
//   tokens_S       int64: item at the position, 0 where there is none
extern "C" __global__ void __launch_bounds__(THREADS)
place_items(const u8* __restrict__ needs_TD, i64 stride, i64 T, int D, const u8* __restrict__ counts_D, int count_bytes,
            i64 rows, i64* __restrict__ position_TD, i64* __restrict__ tokens_S, i64 S) {
    __shared__ u64 before, base;  // items in earlier blocks, positions of earlier destinations
    __shared__ u32 found[WARPS];
    int d = blockIdx.x % D, warp = threadIdx.x / 32;
    i64 begin = (i64)(blockIdx.x / D) * BLOCK_ITEMS;
    if (threadIdx.x == 0) before = base = 0;
    __syncthreads();
    u32 mine = 0;
#pragma unroll 4
    for (i64 t = threadIdx.x; t < begin; t += THREADS) mine += needs_TD[t * stride + d] != 0;
    mine = __reduce_add_sync(FULL_MASK, mine);
    if (lane_id() == 0 && mine) atomicAdd(&before, (u64)mine);
    if (counts_D)
        for (int e = threadIdx.x; e < d; e += THREADS) atomicAdd(&base, (u64)count_at(counts_D, count_bytes, e));
    u32 going[RUN], total = 0;
    i64 first = begin + warp * (RUN * 32) + lane_id();
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
        i64 t = first + j * 32;
        going[j] = __ballot_sync(FULL_MASK, t < T && needs_TD[t * stride + d] != 0);
        total += __popc(going[j]);
    }
    if (lane_id() == 0) found[warp] = total;
    __syncthreads();
    i64 start = counts_D ? (i64)base : d * rows, room = counts_D ? count_at(counts_D, count_bytes, d) : rows;
    i64 order = (i64)before;
    for (int w = 0; w < warp; ++w) order += found[w];
#pragma unroll
    for (int j = 0; j < RUN; ++j) {
        i64 t = first + j * 32, at = order + __popc(going[j] & lanes_below()), position = start + at;
        bool goes = (going[j] >> lane_id() & 1) && at < room && position >= 0 && position < S;
        if (t < T) position_TD[t * D + d] = goes ? position : -1;
        if (goes) tokens_S[position] = t;
        order += __popc(going[j]);
    }
    if (blockIdx.x + D < gridDim.x) return;  // not the destination's last
    i64 all = (i64)before;
    for (int w = 0; w < WARPS; ++w) all += found[w];
    i64 end = d + 1 < D && start + room < S ? start + room : S;
    for (i64 s = start + (all < room ? all : room) + threadIdx.x; s < end; s += THREADS)
        if (s >= 0) tokens_S[s] = 0;
}

__device__ __forceinline__ void store_int(u8* at, int bytes, i64 value) {
    if (bytes == 2) *(short*)at = (short)value;
    else *(int*)at = (int)value;
}

// out_SK[s, k] = values_TK[t, k] with t = tokens_S[s] where the position's destination owns the slot, else -1; and
// the item's scalars, whoever owns their slots, if there are any.
//   slot_places_TK   int64: destination that owns the slot, -1 for none
//   out_SK           out_bytes (2 or 4) a number, rows out_stride bytes apart
//   scalars_TK       float32 or null; out_scalars_SK: rows out_stride bytes apart
extern "C" __global__ void __launch_bounds__(THREADS)
write_slots(const i64* __restrict__ tokens_S, const i64* __restrict__ position_TD, const i64* __restrict__ slot_places_TK,
            const i64* __restrict__ values_TK, const float* __restrict__ scalars_TK, i64 S, i64 T, int D, int K, u8* out_SK,
            int out_bytes, u8* out_scalars_SK, i64 out_stride) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < S * K; i += (i64)gridDim.x * THREADS) {
        i64 s = i / K, t = tokens_S[s], value = -1;
        int k = (int)(i % K);
        float scalar = 0.0f;
        if (t >= 0 && t < T) {
            i64 place = slot_places_TK[t * K + k];
            // A position without an item holds item 0, which stands elsewhere.
            if (place >= 0 && place < D && position_TD[t * D + place] == s) value = values_TK[t * K + k];
            if (scalars_TK) scalar = scalars_TK[t * K + k];
        }
        store_int(out_SK + s * out_stride + k * out_bytes, out_bytes, value);
        if (scalars_TK) *(float*)(out_scalars_SK + s * out_stride + k * 4) = scalar;
    }
}

// out_TK[t, k] = returned_SK[s, k] at the item's position s for the destination that owns the slot; zero without a row.
//   returned_SK      float32, rows `stride` items apart
extern "C" __global__ void __launch_bounds__(THREADS)
slot_scalars(const float* __restrict__ returned_SK, i64 stride, i64 S, const i64* __restrict__ position_TD,
             const i64* __restrict__ slot_places_TK, const i64* __restrict__ slot_rows_TK, i64 T, int D, int K,
             float* __restrict__ out_TK) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < T * K; i += (i64)gridDim.x * THREADS) {
        i64 t = i / K, place = slot_places_TK[i], s = -1;
        if (place >= 0 && place < D && slot_rows_TK[i] >= 0) s = position_TD[t * D + place];
        out_TK[i] = s >= 0 && s < S ? returned_SK[s * stride + i % K] : 0.0f;
    }
}

// Before the next: no received row has any of the R rows.
extern "C" __global__ void __launch_bounds__(THREADS)
clear_rows(i64* source_R, i64 missing, float* scalars_R, i64 R) {
    for (i64 r = (i64)blockIdx.x * THREADS + threadIdx.x; r < R; r += (i64)gridDim.x * THREADS) {
        source_R[r] = missing;
        if (scalars_R) scalars_R[r] = 0.0f;
    }
}

//   wire_NK        int32, rows wire_stride items apart: rows as they arrived; whatever they are, none outside R is kept
//   rows_NK        int64
//   source_R       int64: received row of each row; scalars_R: its scalar, float32 or null
//   scalars_NK     float32, rows scalars_stride items apart
extern "C" __global__ void __launch_bounds__(THREADS)
enter_rows(const int* __restrict__ wire_NK, i64 wire_stride, const float* __restrict__ scalars_NK, i64 scalars_stride,
           i64 N, int K, i64 R, i64* __restrict__ rows_NK, i64* __restrict__ source_R, float* __restrict__ scalars_R) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < N * K; i += (i64)gridDim.x * THREADS) {
        i64 n = i / K, k = i % K, row = wire_NK[n * wire_stride + k];
        row = row >= R ? R - 1 : row;
        row = row < -1 ? -1 : row;
        rows_NK[i] = row;
        if (row < 0) continue;
        source_R[row] = n;
        if (scalars_R) scalars_R[row] = scalars_NK[n * scalars_stride + k];
    }
}
