// What scatter.cu (registers) and scatter_bulk.cu (bulk copies) share: the tables, and one warp's view of
// one segment of one row, of its own rank ("send") or of a peer ("receive"). A lane holds a slot.
#pragma once
#include "mxfp8.cuh"

#ifndef OUT_MXFP8
#define OUT_MXFP8 0
#endif

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
    const int* token_counts_P;
    u64 rows, scales;            // receive buffer: payload rows or E4M3 bytes; E8M0 bytes with OUT_MXFP8
    i64 row_bytes;
    i64 R;
    int epoch;
};

// One segment: `target` is the row a lane writes to (0 = none), in its own receive buffer (`local` lanes)
// or a wire row in a window (`remote` lanes); `flag` is what a remote lane raises afterwards.
struct Segment {
    u64 source, target, target_scales;
    int* flag;
    int begin, end;              // elements
    u32 local, remote;
};

__device__ __forceinline__ Segment no_segment() {
    Segment s = {0, 0, 0, nullptr, 0, 0, 0, 0};
    return s;
}
__device__ __forceinline__ u64 row_address(const Scatter& a, int row) { return a.rows + row * a.row_bytes; }
__device__ __forceinline__ u64 scales_address(const Scatter& a, int row) { return a.scales + (i64)row * (a.H / 32); }

__device__ __forceinline__ Segment send_segment(const Scatter& a, int t, int seg, int nseg, bool publish) {
    Segment s = no_segment();
    int lane = lane_id();
    i64 slot = (i64)t * a.K + lane, from = (i64)a.me * a.T_max + t;
    int rank = lane < a.K ? a.slot_ranks_TK[slot] : -1, row = lane < a.K ? a.slot_rows_TK[slot] : -1;
    bool first = (__match_any_sync(FULL_MASK, rank) & lanes_below()) == 0;
    bool away = rank >= 0 && rank != a.me && first;
    if (rank == a.me) {
        s.target = row_address(a, row);
        s.target_scales = scales_address(a, row);
    } else if (away) {
        s.target = a.peers[publish ? a.me : rank] + a.area_offset + from * a.pitch;
        s.flag = (int*)(a.peers[rank] + a.flags_offset) + from * MAX_SEGMENTS + seg;
    }
    s.local = __ballot_sync(FULL_MASK, rank == a.me);
    s.remote = __ballot_sync(FULL_MASK, away);
    s.source = a.tokens + (i64)t * a.H * ITEM_BYTES;
    s.begin = segment_start(a.H, seg, nseg);
    s.end = segment_start(a.H, seg + 1, nseg);
    if (seg == 0 && a.recv_weights_PTK && lane < a.K) {
        i64 at = from * a.K + lane;
        if (rank == a.me) a.row_weights_R[row] = a.recv_weights_PTK[at];
        if (a.recv_rows_out_PTK) a.recv_rows_out_PTK[at] = rank == a.me ? row : -1;
    }
    return s;
}

// `local` stays 0 where nothing of the token lands here; otherwise *arrival must be waited for.
__device__ __forceinline__ Segment receive_segment(const Scatter& a, int src, int t, int seg, int nseg, bool pull,
                                                   const int** arrival) {
    Segment s = no_segment();
    int lane = lane_id();
    i64 from = (i64)src * a.T_max + t, at = from * a.K + lane;
    int row = lane < a.K ? a.recv_rows_PTK[at] : -1;
    if (seg == 0 && a.recv_weights_PTK && lane < a.K) {
        if (row >= 0) a.row_weights_R[row] = a.recv_weights_PTK[at];
        if (a.recv_rows_out_PTK) a.recv_rows_out_PTK[at] = row;
    }
    s.local = __ballot_sync(FULL_MASK, row >= 0);
    if (!s.local) return s;
    if (row >= 0) {
        s.target = row_address(a, row);
        s.target_scales = scales_address(a, row);
    }
    s.source = a.peers[pull ? src : a.me] + a.area_offset + from * a.pitch;
    s.begin = segment_start(a.H, seg, nseg);
    s.end = segment_start(a.H, seg + 1, nseg);
    *arrival = (const int*)(a.peers[a.me] + a.flags_offset) + from * MAX_SEGMENTS + seg;
    return s;
}

__device__ __forceinline__ void zero_row(const Scatter& a, i64 row) {
#if OUT_MXFP8
    for (int i = lane_id(); i < a.H / 4; i += 32) ((u32*)(a.rows + row * a.H))[i] = 0;
    for (int i = lane_id(); i < a.H / 32; i += 32) ((u8*)(a.scales + row * (a.H / 32)))[i] = 0;
#else
    Vec zero;
#pragma unroll
    for (int i = 0; i < VEC_BYTES / 2; ++i) reinterpret_cast<u16*>(&zero)[i] = 0;
    Vec* p = (Vec*)(a.rows + row * a.row_bytes);
    for (int i = lane_id(); i < a.row_bytes / VEC_BYTES; i += 32) p[i] = zero;
#endif
}

// Zeroes the padding behind each segment of the buffer, and the tail. w of `warps` warps.
__device__ __forceinline__ void zero_unused(const Scatter& a, const i64* tokens_per_expert_L,
                                            const i64* expert_offsets_L1, int zero_tail, int w, int warps) {
    for (i64 i = w; i < (i64)a.L * (a.alignment - 1); i += warps) {
        int e = (int)(i / (a.alignment - 1));
        i64 row = expert_offsets_L1[e] + tokens_per_expert_L[e] + i % (a.alignment - 1);
        if (row >= expert_offsets_L1[e + 1] || row >= a.R) continue;
        zero_row(a, row);
        if (a.recv_weights_PTK && lane_id() == 0) a.row_weights_R[row] = 0.0f;
    }
    for (i64 row = expert_offsets_L1[a.L] + w; row < a.R; row += warps) {
        if (zero_tail) zero_row(a, row);
        if (a.recv_weights_PTK && lane_id() == 0) a.row_weights_R[row] = 0.0f;
    }
}

// The parameters of both kernels, documented in scatter.cu.
#define SCATTER_PARAMETERS                                                                                      \
    const u64 *__restrict__ peers, int *state, i64 timeout_ns, int me, int P, int T_max, int K, int H,          \
        i64 area_offset, i64 flags_offset, i64 pitch, const void *tokens_TH,                                    \
        const int *__restrict__ slot_rows_TK, const int *__restrict__ slot_ranks_TK, const int *recv_rows_PTK,  \
        const float *recv_weights_PTK, int *recv_rows_out_PTK, float *row_weights_R,                            \
        const int *__restrict__ token_counts_P, const i64 *__restrict__ tokens_per_expert_L,                    \
        const i64 *__restrict__ expert_offsets_L1, int L, int alignment, i64 R, int zero_tail, void *rows_RH,   \
        void *row_scales, int segments, int lag
#define SCATTER_ARGUMENTS                                                                                       \
    {peers, me, P, T_max, K, H, L, alignment, area_offset, flags_offset, pitch, (u64)tokens_TH, slot_rows_TK,   \
     slot_ranks_TK, recv_rows_PTK, recv_weights_PTK, recv_rows_out_PTK, row_weights_R, token_counts_P,          \
     (u64)rows_RH, (u64)row_scales, OUT_MXFP8 ? (i64)H : (i64)H * ITEM_BYTES, R, current_epoch(state)}
__device__ __forceinline__ int most_tokens(const Scatter& a) {
    int most = 0;
    for (int r = 0; r < a.P; ++r) most = most > a.token_counts_P[r] ? most : a.token_counts_P[r];
    return most;
}
