// scatter_rows: dispatch forward and combine backward. Copies only.
//
// One persistent kernel does everything between the token rows of this rank and the expert rows of all
// ranks. A warp takes one segment of one token row at a time and, in turn,
//
//   send:     reads it once, writes it to the rows it has on this rank, and once into the window of each
//             other rank that has rows of it, and raises that rank's arrival flag
//   receive:  `lag` rounds later, waits for the flag of a segment from a peer, reads it and writes it to
//             all its local rows
//
// so the link, the local expansion and the expansion of what arrives run at the same time. A warp only
// waits for a segment that its sender sends before it waits for anything later, so there is no deadlock as
// long as all blocks are resident.
//
// Options: DTYPE, VEC_BYTES (common.cuh), SCALE_FLOOR (mxfp8.cuh), WIRE (0 = as is, 1 = MXFP8),
// OUT_MXFP8 (1 = rows stay MXFP8), WARPS, BLOCKS_PER_SM, UNROLL.
#include "mxfp8.cuh"

#ifndef WIRE
#define WIRE 0
#endif
#ifndef OUT_MXFP8
#define OUT_MXFP8 0
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
#define THREADS (WARPS * 32)

struct Scatter {
    const u64* peers;
    int me, P, T_max, K, H, L, alignment;
    i64 area_offset, flags_offset, pitch;
    u64 tokens;                  // this rank's rows
    const int* slot_rows_TK;
    const int* slot_ranks_TK;
    const int* recv_rows_PTK;
    const float* recv_weights_PTK;
    int* recv_rows_out_PTK;
    float* row_weights_R;
    u64 rows, scales;            // receive buffer: payload rows or E4M3 bytes; E8M0 bytes with OUT_MXFP8
    i64 row_bytes, R;
    int epoch;
};

// A warp's view of one segment of one row; a lane holds a slot. `target` is the row a lane writes to: an
// expert row of the own receive buffer (`local` lanes) or a wire row in a peer's window (`remote` lanes);
// `flag` is what a remote lane raises afterwards.
struct Segment {
    u64 source, target, target_scales;
    int* flag;
    int begin, end;              // elements
    u32 local, remote;
};

__device__ __forceinline__ u64 row_address(const Scatter& a, int row) { return a.rows + row * a.row_bytes; }
__device__ __forceinline__ u64 scales_address(const Scatter& a, int row) { return a.scales + (i64)row * (a.H / 32); }
__device__ __forceinline__ u64 shuffle_address(u64 a, int lane) { return __shfl_sync(FULL_MASK, a, lane); }

// ---- moving one segment ----------------------------------------------------------------------------

#if WIRE == 0
__device__ __forceinline__ void move_segment(const Segment& s, bool source_is_wire, int H) {
    int last = s.end * ITEM_BYTES / VEC_BYTES;
    for (int v0 = s.begin * ITEM_BYTES / VEC_BYTES; v0 < last; v0 += 32 * UNROLL) {
        Vec x[UNROLL];
        int v = v0 + lane_id();
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (v + u * 32 < last) x[u] = load_vec((const Vec*)s.source + v + u * 32);
        for (u32 m = s.local | s.remote; m; m &= m - 1) {
            Vec* row = (Vec*)shuffle_address(s.target, __ffs(m) - 1);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u)
                if (v + u * 32 < last) row[v + u * 32] = x[u];
        }
    }
}
#else
// Writes 4 chunks of 256 quantised elements from element e0 on, ending at `end`, and their scales.
__device__ __forceinline__ void store_quantised(u64 row, u64 scales, const uint2* q, u32 scale_word, int e0, int end) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        int e = e0 + u * 256 + lane_id() * 8;
        if (e < end) *(uint2*)(row + e) = q[u];
    }
    int first = e0 / 32 + (int)lane_id() * 4, count = end / 32 - first;
    if (lane_id() < 8 && count > 0) {
        u64 at = scales + first;
        if (count >= 4 && (at & 3) == 0) *(u32*)at = scale_word;
        else for (int i = 0; i < 4 && i < count; ++i) *(u8*)(at + i) = (u8)(scale_word >> (8 * i));
    }
}
// Quantises 1024 elements from e0 on; the lane's four scale bytes are returned packed.
__device__ __forceinline__ u32 quantise_1024(u64 source, int e0, int end, uint2* q) {
    float f[4][8];
    u32 scales = 0;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        int e = e0 + u * 256 + lane_id() * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) f[u][i] = 0.0f;
        if (e < end) load_8_items((const void*)(source + (i64)e * ITEM_BYTES), f[u]);
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        u32 s;
        q[u] = quantize_8(f[u], &s);
        scales |= s << (8 * u);
    }
    return scales;
}
__device__ __forceinline__ u32 load_wire_1024(u64 source, int e0, int end, int H, uint2* q) {
    u32 s[4], scales = 0;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        int e = e0 + u * 256 + lane_id() * 8;
        q[u] = e < end ? load_8((const void*)(source + e)) : make_uint2(0, 0);
        s[u] = e < end ? *(const volatile u8*)(source + H + e / 32) : 0;
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) scales |= s[u] << (8 * u);
    return scales;
}
__device__ __forceinline__ void move_segment(const Segment& s, bool source_is_wire, int H) {
    for (int e0 = s.begin; e0 < s.end; e0 += 1024) {
        uint2 q[4];
        u32 scales = source_is_wire ? load_wire_1024(s.source, e0, s.end, H, q) : quantise_1024(s.source, e0, s.end, q);
        u32 scale_word = gather_scales(scales);
        for (u32 m = s.remote; m; m &= m - 1) {
            u64 row = shuffle_address(s.target, __ffs(m) - 1);
            store_quantised(row, row + H, q, scale_word, e0, s.end);
        }
        if (!s.local) continue;
#if OUT_MXFP8
        for (u32 m = s.local; m; m &= m - 1)
            store_quantised(shuffle_address(s.target, __ffs(m) - 1), shuffle_address(s.target_scales, __ffs(m) - 1), q,
                            scale_word, e0, s.end);
#else
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            int e = e0 + u * 256 + lane_id() * 8;
            float f[8];
            dequantize_8(q[u], (scales >> (8 * u)) & 0xff, f);
            Items8 items = pack_8(f);
            for (u32 m = s.local; m; m &= m - 1) {
                u64 row = shuffle_address(s.target, __ffs(m) - 1);
                if (e < s.end) store_8_items((void*)(row + (i64)e * ITEM_BYTES), items);
            }
        }
#endif
    }
}
#endif

// ---- what there is to move ---------------------------------------------------------------------------

__device__ __forceinline__ Segment send_segment(const Scatter& a, int t, int seg, int nseg) {
    Segment s = {0, 0, 0, nullptr, segment_start(a.H, seg, nseg), segment_start(a.H, seg + 1, nseg), 0, 0};
    int lane = lane_id();
    i64 slot = (i64)t * a.K + lane, from = (i64)a.me * a.T_max + t;
    int rank = lane < a.K ? a.slot_ranks_TK[slot] : -1, row = lane < a.K ? a.slot_rows_TK[slot] : -1;
    bool first = (__match_any_sync(FULL_MASK, rank) & lanes_below()) == 0;
    bool away = rank >= 0 && rank != a.me && first;
    if (rank == a.me) {
        s.target = row_address(a, row);
        s.target_scales = scales_address(a, row);
    } else if (away) {
        s.target = a.peers[rank] + a.area_offset + from * a.pitch;
        s.flag = (int*)(a.peers[rank] + a.flags_offset) + from * MAX_SEGMENTS + seg;
    }
    s.local = __ballot_sync(FULL_MASK, rank == a.me);
    s.remote = __ballot_sync(FULL_MASK, away);
    s.source = a.tokens + (i64)t * a.H * ITEM_BYTES;
    if (seg == 0 && a.recv_weights_PTK && lane < a.K) {
        i64 at = from * a.K + lane;
        if (rank == a.me) a.row_weights_R[row] = a.recv_weights_PTK[at];
        if (a.recv_rows_out_PTK) a.recv_rows_out_PTK[at] = rank == a.me ? row : -1;
    }
    return s;
}

// `local` stays 0 where nothing of the token lands here; otherwise *arrival must be waited for.
__device__ __forceinline__ Segment receive_segment(const Scatter& a, int src, int t, int seg, int nseg,
                                                   const int** arrival) {
    Segment s = {0, 0, 0, nullptr, segment_start(a.H, seg, nseg), segment_start(a.H, seg + 1, nseg), 0, 0};
    int lane = lane_id();
    i64 from = (i64)src * a.T_max + t, at = from * a.K + lane;
    int row = lane < a.K ? a.recv_rows_PTK[at] : -1;
    if (seg == 0 && a.recv_weights_PTK && lane < a.K) {
        if (row >= 0) a.row_weights_R[row] = a.recv_weights_PTK[at];
        if (a.recv_rows_out_PTK) a.recv_rows_out_PTK[at] = row;
    }
    s.local = __ballot_sync(FULL_MASK, row >= 0);
    if (row >= 0) {
        s.target = row_address(a, row);
        s.target_scales = scales_address(a, row);
    }
    s.source = a.peers[a.me] + a.area_offset + from * a.pitch;
    *arrival = (const int*)(a.peers[a.me] + a.flags_offset) + from * MAX_SEGMENTS + seg;
    return s;
}

// ---- rows that nobody sends ----------------------------------------------------------------------------

__device__ __forceinline__ void zero_row(const Scatter& a, i64 row) {
#if OUT_MXFP8
    for (int i = lane_id(); i < a.H / 4; i += 32) ((u32*)(a.rows + row * a.H))[i] = 0;
    for (int i = lane_id(); i < a.H / 32; i += 32) ((u8*)(a.scales + row * (a.H / 32)))[i] = 0;
#else
    Vec zero;
#pragma unroll
    for (int i = 0; i < VEC_BYTES / 2; ++i) reinterpret_cast<u16*>(&zero)[i] = 0;
    Vec* p = (Vec*)(a.rows + row * a.row_bytes);
    int count = (int)(a.row_bytes / VEC_BYTES);
#pragma unroll 4
    for (int i = lane_id(); i < count; i += 32) p[i] = zero;
#endif
}
__device__ __forceinline__ void zero_padding(const Scatter& a, const i64* tokens_per_expert_L,
                                             const i64* expert_offsets_L1, int w, int warps) {
    int most = a.alignment - 1;
    for (i64 i = w; i < (i64)a.L * most; i += warps) {
        int e = (int)i / most;
        i64 row = expert_offsets_L1[e] + tokens_per_expert_L[e] + ((int)i - e * most);
        if (row >= expert_offsets_L1[e + 1] || row >= a.R) continue;
        zero_row(a, row);
        if (a.recv_weights_PTK && lane_id() == 0) a.row_weights_R[row] = 0.0f;
    }
}
__device__ __forceinline__ void zero_rest(const Scatter& a, i64 first, int zero_rows, int w, int warps) {
    for (i64 row = first + w; row < a.R; row += warps) {
        if (zero_rows) zero_row(a, row);
        if (a.recv_weights_PTK && lane_id() == 0) a.row_weights_R[row] = 0.0f;
    }
}

// grid <= SMs * BLOCKS_PER_SM (all resident), block THREADS. K <= 32, P <= MAX_RANKS.
//   area_offset, flags_offset    of the payload [P, T_max, pitch] and the flags [P, T_max, MAX_SEGMENTS]
//   tokens_TH                    this rank's rows, payload dtype
//   slot_rows_TK, slot_ranks_TK, token_counts_P, tokens_per_expert_L, expert_offsets_L1   from plan
//   recv_rows_PTK                what lands here: [P, T_max, K], -1 = nothing
//   recv_weights_PTK             weights of the same slots, directly after their plan; null: no weights travel
//   recv_rows_out_PTK            null, or a copy of recv_rows that outlives the window's
//   row_weights_R                float32, zero on padding and tail
//   zero_tail                    1: rows after the last segment become zero too
//   segments, lag                segments of a row (segments_of); rounds between sending and receiving (>= 0);
//                                equal on all ranks
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
scatter_rows(const u64* __restrict__ peers, int* state, i64 timeout_ns, int me, int P, int T_max, int K, int H,
             i64 area_offset, i64 flags_offset, i64 pitch, const void* tokens_TH,
             const int* __restrict__ slot_rows_TK, const int* __restrict__ slot_ranks_TK,
             const int* recv_rows_PTK, const float* recv_weights_PTK, int* recv_rows_out_PTK,
             float* row_weights_R, const int* __restrict__ token_counts_P,
             const i64* __restrict__ tokens_per_expert_L, const i64* __restrict__ expert_offsets_L1, int L,
             int alignment, i64 R, int zero_tail, void* rows_RH, void* row_scales, int segments, int lag) {
    int epoch = current_epoch(state);
    announce(peers, me, P, epoch);
    Scatter a = {peers, me, P, T_max, K, H, L, alignment, area_offset, flags_offset, pitch, (u64)tokens_TH,
                 slot_rows_TK, slot_ranks_TK, recv_rows_PTK, recv_weights_PTK, recv_rows_out_PTK, row_weights_R,
                 (u64)rows_RH, (u64)row_scales, OUT_MXFP8 ? (i64)H : (i64)H * ITEM_BYTES, R, epoch};
    int most = 0, T = token_counts_P[me];
    for (int r = 0; r < P; ++r) most = most > token_counts_P[r] ? most : token_counts_P[r];
    int nseg = segments_of(H, most, segments);
    int warps = gridDim.x * WARPS, w = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
    int rounds = (most * nseg + warps - 1) / warps;

    zero_padding(a, tokens_per_expert_L, expert_offsets_L1, warps - 1 - w, warps);  // while peers arrive
    // Directly after a plan every peer has been heard of since its last use of its window, so sending may start.
    bool met = recv_weights_PTK == nullptr;
    if (met) await_peers(peers, me, P, state, epoch, timeout_ns, OP_SCATTER);
    for (int round = 0; round < rounds + lag; ++round) {
        int item = round * warps + w;
        if (round < rounds && item < T * nseg) {
            int t = item / nseg;
            Segment s = send_segment(a, t, item - t * nseg, nseg);
            move_segment(s, false, H);
            __syncwarp();
            if (s.flag) store_release(s.flag, epoch);
        }
        if (round < lag) continue;
        if (!met) await_peers(peers, me, P, state, epoch, timeout_ns, OP_SCATTER);  // for recv_rows and weights
        met = true;
        item -= lag * warps;
        for (int d = 1; d < P; ++d) {
            int src = me + d < P ? me + d : me + d - P, t = item / nseg;
            if (t >= token_counts_P[src]) continue;
            const int* arrival;
            Segment s = receive_segment(a, src, t, item - t * nseg, nseg, &arrival);
            if (!s.local) continue;
            bool arrived = true;
            if (lane_id() == 0) arrived = wait_for(arrival, epoch, state, timeout_ns, OP_SCATTER, src);
            if (__shfl_sync(FULL_MASK, arrived, 0)) move_segment(s, true, H);
        }
    }
    zero_rest(a, expert_offsets_L1[L], zero_tail, w, warps);
    finish_operation(state);
}
