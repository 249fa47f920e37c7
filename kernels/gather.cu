// gather_sum: combine forward and dispatch backward.
//
//   P[r, t] = round( sum over slots k ascending, expert on rank r, of (w[row] *) y[row] )
//   out[t]  = round( sum over ranks r ascending that hold rows of t, of P[r, t] )
//
// in FP32 from +0, each product rounded before it is added. One persistent kernel: a warp takes one segment
// of one token at a time and, in turn,
//
//   give:   sums the rows that this rank holds of a peer's token, stores the sum into that peer's window
//           and raises its arrival flag
//   take:   `lag` rounds later, sums its own rows of an own token, waits for the partial sums of the other
//           ranks, and writes the total
//
// Beside each row one float32 may travel back, unsummed, to its (token, slot): the gradient of its weight.
//
// Options: DTYPE, VEC_BYTES (common.cuh), WEIGHTED (1 = rows are scaled by row_weights), WARPS, BLOCKS_PER_SM,
// UNROLL, BATCH (rows loaded before the first is added).
#include "common.cuh"

#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#ifndef UNROLL
#define UNROLL 2
#endif
#ifndef BATCH
#define BATCH 4
#endif
#define THREADS (WARPS * 32)

// acc[u] += (weight *) row, over the lanes of `todo` in ascending order; row addresses and weights by lane.
__device__ __forceinline__ void add_rows(float (*acc)[VEC_ITEMS], u64 address, float weight, u32 todo, int v, int last) {
    while (todo) {
        Vec x[BATCH][UNROLL];
        u32 m = todo;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const Vec* row = (const Vec*)__shfl_sync(FULL_MASK, address, m ? __ffs(m) - 1 : 0);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (m && v + u * 32 < last) x[b][u] = load_vec(row + v + u * 32);
            m &= m - 1;
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float w = WEIGHTED ? __shfl_sync(FULL_MASK, weight, todo ? __ffs(todo) - 1 : 0) : 1.0f;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (todo && v + u * 32 < last) {
                    float f[VEC_ITEMS];
                    unpack(x[b][u], f);
#pragma unroll
                    for (int i = 0; i < VEC_ITEMS; ++i)
                        acc[u][i] = __fadd_rn(acc[u][i], WEIGHTED ? __fmul_rn(w, f[i]) : f[i]);
                }
            todo &= todo - 1;
        }
    }
}
__device__ __forceinline__ void clear(float (*acc)[VEC_ITEMS]) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
        for (int i = 0; i < VEC_ITEMS; ++i) acc[u][i] = 0.0f;
}

// grid <= SMs * BLOCKS_PER_SM (all resident), block THREADS. K <= 32, P <= MAX_RANKS.
//   rows_RH               expert outputs or row gradients, payload dtype
//   row_weights_R         float32, with WEIGHTED
//   row_scalars_R         null, or one float32 a row that returns to its slot
//   recv_rows_PTK         rows that this rank holds of each rank's tokens, as scatter_rows left them
//   slot_rows_TK, slot_ranks_TK, token_counts_P   from plan_rows
//   out_TH                payload dtype;  slot_scalars_TK float32, zero for slots without a row
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
gather_sum(const u64* __restrict__ peers, int* state, i64 timeout_ns, int me, int P, int T_max, int K, int H,
           i64 area_offset, i64 flags_offset, i64 scalars_offset, i64 pitch,
           const void* rows_RH, const float* __restrict__ row_weights_R, const float* __restrict__ row_scalars_R,
           const int* __restrict__ recv_rows_PTK, const int* __restrict__ slot_rows_TK,
           const int* __restrict__ slot_ranks_TK, const int* __restrict__ token_counts_P,
           void* out_TH, float* slot_scalars_TK, int segments, int lag) {
    int epoch = current_epoch(state), lane = lane_id();
    enter_operation(peers, me, P, state, epoch, timeout_ns, OP_GATHER);
    i64 row_bytes = (i64)H * ITEM_BYTES;
    u64 rows = (u64)rows_RH;
    int most = 0;
    for (int r = 0; r < P; ++r) most = most > token_counts_P[r] ? most : token_counts_P[r];
    int nseg = segments_of(H, most, segments), T = token_counts_P[me];
    int warps = gridDim.x * WARPS, w = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
    int rounds = (int)(((i64)most * nseg + warps - 1) / warps);

    for (int s = 0; s < rounds + lag; ++s) {
        i64 item = (i64)s * warps + w;
        for (int d = 1; s < rounds && d < P; ++d) {  // give
            int dst = me + d < P ? me + d : me + d - P;
            if (item >= (i64)token_counts_P[dst] * nseg) continue;
            int t = (int)(item / nseg), seg = (int)(item % nseg);
            int row = lane < K ? recv_rows_PTK[((i64)dst * T_max + t) * K + lane] : -1;
            u32 todo = __ballot_sync(FULL_MASK, row >= 0);
            if (!todo) continue;
            float weight = WEIGHTED && row >= 0 ? row_weights_R[row] : 0.0f;
            i64 slot = (i64)me * T_max + t;
            if (seg == 0 && row_scalars_R && row >= 0)
                ((float*)(peers[dst] + scalars_offset))[slot * K + lane] = row_scalars_R[row];
            Vec* partial = (Vec*)(peers[dst] + area_offset + slot * pitch);
            int last = segment_start(H, seg + 1, nseg) / VEC_ITEMS;
            for (int v0 = segment_start(H, seg, nseg) / VEC_ITEMS; v0 < last; v0 += 32 * UNROLL) {
                float acc[UNROLL][VEC_ITEMS];
                clear(acc);
                int v = v0 + lane;
                add_rows(acc, rows + row * row_bytes, weight, todo, v, last);
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    if (v + u * 32 < last) partial[v + u * 32] = pack(acc[u]);
            }
            __syncwarp();
            if (lane == 0)
                store_release((int*)(peers[dst] + flags_offset) + slot * MAX_SEGMENTS + seg, epoch);
        }
        item -= (i64)lag * warps;
        if (s < lag || item >= (i64)T * nseg) continue;  // take
        int t = (int)(item / nseg), seg = (int)(item % nseg);
        int rank = lane < K ? slot_ranks_TK[(i64)t * K + lane] : -1;
        int row = lane < K ? slot_rows_TK[(i64)t * K + lane] : -1;
        u32 todo = __ballot_sync(FULL_MASK, rank == me);
        float weight = WEIGHTED && rank == me ? row_weights_R[row] : 0.0f;
        u32 low = __reduce_or_sync(FULL_MASK, rank >= 0 && rank < 32 ? 1u << rank : 0u);
        u32 high = __reduce_or_sync(FULL_MASK, rank >= 32 ? 1u << (rank - 32) : 0u);
        u64 holders = low | ((u64)high << 32);
        bool arrived = true;
        for (int r = lane; r < P; r += 32)
            if (r != me && (holders >> r & 1))
                arrived &= wait_for((const int*)(peers[me] + flags_offset) + ((i64)r * T_max + t) * MAX_SEGMENTS + seg,
                                    epoch, state, timeout_ns, OP_GATHER, r);
        if (!__all_sync(FULL_MASK, arrived)) continue;
        Vec* total = (Vec*)((u64)out_TH + t * row_bytes);
        int last = segment_start(H, seg + 1, nseg) / VEC_ITEMS;
        for (int v0 = segment_start(H, seg, nseg) / VEC_ITEMS; v0 < last; v0 += 32 * UNROLL) {
            float own[UNROLL][VEC_ITEMS], acc[UNROLL][VEC_ITEMS];
            clear(own);
            clear(acc);
            int v = v0 + lane;
            Vec x[UNROLL];
            u64 left = holders & ~(1ull << me);
            int ahead = left ? __ffsll(left) - 1 : -1;  // the first peer's sum, fetched with the own rows
            if (ahead >= 0) {
                const Vec* from = (const Vec*)(peers[me] + area_offset + ((i64)ahead * T_max + t) * pitch);
#pragma unroll
                for (int u = 0; u < UNROLL; ++u)
                    if (v + u * 32 < last) x[u] = load_vec(from + v + u * 32);
            }
            add_rows(own, rows + row * row_bytes, weight, todo, v, last);
            for (u64 m = holders; m; m &= m - 1) {
                int r = __ffsll(m) - 1;
                const Vec* from = (const Vec*)(peers[me] + area_offset + ((i64)r * T_max + t) * pitch);
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    if (v + u * 32 >= last) continue;
                    float f[VEC_ITEMS];
                    if (r != me) unpack(r == ahead ? x[u] : load_vec(from + v + u * 32), f);
#pragma unroll
                    for (int i = 0; i < VEC_ITEMS; ++i)
                        acc[u][i] = __fadd_rn(acc[u][i], r == me ? round_to_payload(own[u][i]) : f[i]);
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (v + u * 32 < last) total[v + u * 32] = pack(acc[u]);
        }
        if (seg == 0 && row_scalars_R && lane < K) {
            float scalar = 0.0f;
            if (rank == me) scalar = row_scalars_R[row];
            else if (rank >= 0)
                scalar = *(const volatile float*)(peers[me] + scalars_offset + (((i64)rank * T_max + t) * K + lane) * 4);
            slot_scalars_TK[(i64)t * K + lane] = scalar;
        }
    }
    finish_operation(state);
}
