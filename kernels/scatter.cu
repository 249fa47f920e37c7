// scatter_rows: dispatch forward and combine backward. Copies only.
//
// One persistent kernel does everything between the token rows of this rank and the expert rows of all
// ranks. A warp takes one segment of one token row at a time and, in turn,
//
//   send:     reads it once, writes it to the rows it has on this rank, and once into the window of each
//             other rank that has rows of it, then raises that rank's arrival flag
//   receive:  `lag` rounds later, waits for the flag of a segment from a peer, reads it and writes it to
//             all its local rows
//
// so the link, the local expansion and the expansion of what arrives run at the same time. A warp only
// waits for a segment that its sender sends before it waits for anything later, so there is no deadlock as
// long as all blocks are resident.
//
// PULL = 1 publishes into the own window instead, and the receiver loads over the link (kept for
// comparison: loads are slower than stores, see docs/kernels.md).
//
// Options: DTYPE, VEC_BYTES (common.cuh), SCALE_FLOOR (mxfp8.cuh), WIRE (0 = as is, 1 = MXFP8),
// OUT_MXFP8 (1 = rows stay MXFP8), WARPS, BLOCKS_PER_SM, UNROLL, PULL.
#include "scatter.cuh"

#ifndef WIRE
#define WIRE 0
#endif
#ifndef WARPS
#define WARPS 16
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 2
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef PULL
#define PULL 0
#endif
#define THREADS (WARPS * 32)

__device__ __forceinline__ u64 shuffle_address(u64 a, int lane) { return __shfl_sync(FULL_MASK, a, lane); }

// Copies bytes [begin, end) of src to the same place of the row at address `target` of each lane in `todo`.
__device__ __forceinline__ void copy_bytes(u64 src, int begin, int end, u64 target, u32 todo) {
    int last = end / VEC_BYTES;
    for (int v0 = begin / VEC_BYTES; v0 < last; v0 += 32 * UNROLL) {
        Vec x[UNROLL];
        int v = v0 + lane_id();
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (v + u * 32 < last) x[u] = load_vec((const Vec*)src + v + u * 32);
        for (u32 m = todo; m; m &= m - 1) {
            Vec* row = (Vec*)shuffle_address(target, __ffs(m) - 1);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (v + u * 32 < last) row[v + u * 32] = x[u];
        }
    }
}

#if WIRE == 1
// Writes 4 chunks of 256 quantised elements from element e0 on, ending at `end`, with their scales.
__device__ __forceinline__ void store_wire(u64 row, const uint2* q, u32 scale_word, int e0, int end, i64 scales_at) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        int e = e0 + u * 256 + lane_id() * 8;
        if (e < end) *(uint2*)(row + e) = q[u];
    }
    int first = e0 / 32 + (int)lane_id() * 4, count = end / 32 - first;
    if (lane_id() < 8 && count > 0) {
        u64 at = row + scales_at + first;
        if (count >= 4 && (at & 3) == 0) *(u32*)at = scale_word;
        else for (int i = 0; i < 4 && i < count; ++i) *(u8*)(at + i) = (u8)(scale_word >> (8 * i));
    }
}
__device__ __forceinline__ void store_rows_8(u64 target, u32 todo, const float* f, int e, bool active) {
    Items8 items = pack_8(f);
    for (u32 m = todo; m; m &= m - 1) {
        u64 row = shuffle_address(target, __ffs(m) - 1);
        if (active) store_8_items((void*)(row + (i64)e * ITEM_BYTES), items);
    }
}
#endif

// Moves one segment to all its targets. source_is_wire: the source is a wire row, and no lane is remote.
__device__ __forceinline__ void move_segment(const Segment& s, bool source_is_wire, int H, u32 remote) {
    u64 src = s.source, target = s.target;
    int begin = s.begin, end = s.end;
    u32 local = s.local;
#if WIRE == 0
    copy_bytes(src, begin * ITEM_BYTES, end * ITEM_BYTES, target, local | remote);
#else
    for (int e0 = begin; e0 < end; e0 += 1024) {
        uint2 q[4];
        u32 scales = 0;
        if (source_is_wire) {
            u32 s[4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                int e = e0 + u * 256 + lane_id() * 8;
                q[u] = e < end ? load_8((const void*)(src + e)) : make_uint2(0, 0);
                s[u] = e < end ? *(const volatile u8*)(src + H + e / 32) : 0;
            }
#pragma unroll
            for (int u = 0; u < 4; ++u) scales |= s[u] << (8 * u);
        } else {
            float f[4][8];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                int e = e0 + u * 256 + lane_id() * 8;
#pragma unroll
                for (int i = 0; i < 8; ++i) f[u][i] = 0.0f;
                if (e < end) load_8_items((const void*)(src + (i64)e * ITEM_BYTES), f[u]);
            }
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                u32 s;
                q[u] = quantize_8(f[u], &s);
                scales |= s << (8 * u);
            }
        }
        u32 scale_word = gather_scales(scales);
        for (u32 m = remote; m; m &= m - 1)
            store_wire(shuffle_address(target, __ffs(m) - 1), q, scale_word, e0, end, H);
        if (!local) continue;
#if OUT_MXFP8
        for (u32 m = local; m; m &= m - 1) {
            u64 row = shuffle_address(target, __ffs(m) - 1);
            store_wire(row, q, scale_word, e0, end, (i64)(shuffle_address(s.target_scales, __ffs(m) - 1) - row));
        }
#else
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            int e = e0 + u * 256 + lane_id() * 8;
            float f[8];
            dequantize_8(q[u], (scales >> (8 * u)) & 0xff, f);
            store_rows_8(target, local, f, e, e < end);
        }
#endif
    }
#endif
}

// grid <= SMs * BLOCKS_PER_SM (all resident), block THREADS. K <= 32, P <= MAX_RANKS.
//   area_offset, flags_offset    of the payload [P, T_max, pitch] and the flags [P, T_max, MAX_SEGMENTS]
//   tokens_TH                    this rank's rows, payload dtype
//   slot_rows_TK, slot_ranks_TK, token_counts_P, tokens_per_expert_L, expert_offsets_L1   from plan_rows
//   recv_rows_PTK                what lands here: [P, T_max, K], -1 = nothing
//   recv_weights_PTK             weights of the same slots; null: row_weights_R is left alone
//   recv_rows_out_PTK            null, or a copy of recv_rows that outlives the window's
//   row_weights_R                float32, zero on padding and tail
//   zero_tail                    1: rows after the last segment become zero too
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) scatter_rows(SCATTER_PARAMETERS) {
    Scatter a = SCATTER_ARGUMENTS;
    enter_operation(peers, me, P, state, a.epoch, timeout_ns, OP_SCATTER);
    int most = most_tokens(a), nseg = segments_of(H, most, segments), T = token_counts_P[me];
    int warps = gridDim.x * WARPS, w = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
    int rounds = (int)(((i64)most * nseg + warps - 1) / warps);

    for (int round = 0; round < rounds + lag; ++round) {
        i64 item = (i64)round * warps + w;
        if (round < rounds && item < (i64)T * nseg) {
            Segment s = send_segment(a, (int)(item / nseg), (int)(item % nseg), nseg, PULL);
            move_segment(s, false, H, PULL ? s.remote & (0 - s.remote) : s.remote);
            __syncwarp();
            if (s.flag) store_release(s.flag, a.epoch);
        }
        item -= (i64)lag * warps;
        for (int d = 1; round >= lag && d < P; ++d) {
            int src = me + d < P ? me + d : me + d - P;
            if (item >= (i64)token_counts_P[src] * nseg) continue;
            const int* arrival;
            Segment s = receive_segment(a, src, (int)(item / nseg), (int)(item % nseg), nseg, PULL, &arrival);
            if (!s.local) continue;
            bool arrived = true;
            if (lane_id() == 0) arrived = wait_for(arrival, a.epoch, state, timeout_ns, OP_SCATTER, src);
            if (__shfl_sync(FULL_MASK, arrived, 0)) move_segment(s, true, H, 0);
        }
    }
    zero_unused(a, tokens_per_expert_L, expert_offsets_L1, zero_tail, w, warps);
    finish_operation(state);
}
