// What gather.cu (a warp a task, loads into registers), gather_bulk.cu (a warp a task, bulk copies into shared memory)
// and gather_ring.cu (a team of warps a task) share: the tables, and what one task has to sum. A worker is the warp or
// the team that makes a task. The ranks' kernels may differ, as long as they cut rows into the same segments.
//
// Option: WEIGHTED (1 = rows are scaled by row_weights).
#pragma once
#include "common.cuh"

#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#define NO_SUMMAND 0xffffffffu

// What one token's segment is the sum of; a lane holds a summand. `key` orders them: rank * 32 + slot. A
// summand of another rank is that rank's partial sum, those of the own rank are rows.
struct Summands {
    u32 key;
    u64 address;
    float weight;
};
struct Gather {
    const u64* peers;
    int* state;
    i64 timeout_ns;
    int me, P, T_max, K, H, epoch, nseg;
    i64 area_offset, flags_offset, scalars_offset, pitch;
    u64 rows;
    i64 row_bytes;
    const float* row_weights_R;
    const float* row_scalars_R;
    const int* recv_rows_PTK;
    const int* slot_rows_TK;
    const int* slot_ranks_TK;
    u64 out;
    float* slot_scalars_TK;
};

// One sum to make: what of, where to, and the flag to raise when it has been made (give) or null (take).
struct Task {
    Summands summands;
    u64 target;
    int* flag;
    bool empty;
};

// This rank's rows of token t of rank dst, for dst's window. `row` is the lane's slot's.
__device__ __forceinline__ Task give(const Gather& a, int dst, int t, int seg, int row) {
    int lane = lane_id();
    i64 slot = (i64)a.me * a.T_max + t;
    if (seg == 0 && a.row_scalars_R && row >= 0)
        ((float*)(a.peers[dst] + a.scalars_offset))[slot * a.K + lane] = a.row_scalars_R[row];
    return {{row >= 0 ? (u32)(a.me * 32 + lane) : NO_SUMMAND, a.rows + row * a.row_bytes,
             WEIGHTED && row >= 0 ? a.row_weights_R[row] : 0.0f},
            a.peers[dst] + a.area_offset + slot * a.pitch,
            (int*)(a.peers[dst] + a.flags_offset) + slot * MAX_SEGMENTS + seg,
            !__any_sync(FULL_MASK, row >= 0)};
}

// The sum of all ranks' sums of the own token t, once they have arrived. `rank`, `row`: of the lane's slot.
__device__ __forceinline__ Task take(const Gather& a, int t, int seg, int rank, int row) {
    int lane = lane_id();
    i64 at = (i64)t * a.K + lane;
    bool here = rank == a.me, first = (__match_any_sync(FULL_MASK, rank) & lanes_below()) == 0;
    i64 slot = (i64)rank * a.T_max + t;
    bool arrived = true;
    if (!here && rank >= 0)
        arrived = wait_for((const int*)(a.peers[a.me] + a.flags_offset) + slot * MAX_SEGMENTS + seg, a.epoch, a.state,
                           a.timeout_ns, OP_GATHER, rank);
    if (seg == 0 && a.row_scalars_R && lane < a.K) {
        float scalar = 0.0f;
        if (here) scalar = a.row_scalars_R[row];
        else if (rank >= 0)
            scalar = *(const volatile float*)(a.peers[a.me] + a.scalars_offset + (slot * a.K + lane) * 4);
        a.slot_scalars_TK[at] = scalar;
    }
    return {{here || (rank >= 0 && first) ? (u32)(rank * 32 + lane) : NO_SUMMAND,
             here ? a.rows + row * a.row_bytes : a.peers[a.me] + a.area_offset + slot * a.pitch,
             WEIGHTED && here ? a.row_weights_R[row] : 0.0f},
            a.out + t * a.row_bytes, nullptr, !__all_sync(FULL_MASK, arrived)};
}

// The parameters of all of them, documented in gather.cu.
#define GATHER_PARAMETERS                                                                                       \
    const u64 *__restrict__ peers, int *state, i64 timeout_ns, int me, int P, int T_max, int K, int H,          \
        i64 area_offset, i64 flags_offset, i64 scalars_offset, i64 pitch, const void *rows_RH,                  \
        const float *__restrict__ row_weights_R, const float *__restrict__ row_scalars_R,                       \
        const int *__restrict__ recv_rows_PTK, const int *__restrict__ slot_rows_TK,                            \
        const int *__restrict__ slot_ranks_TK, const int *__restrict__ token_counts_P, void *out_TH,            \
        float *slot_scalars_TK, int segments, int lag
// Enters the operation as worker `which` of the `each` of a block: defines epoch, a, nseg, workers, w and rounds.
#define GATHER_BEGIN(each, which)                                                                               \
    int epoch = current_epoch(state), most = 0;                                                                 \
    announce(peers, me, P, epoch);                                                                              \
    for (int r = 0; r < P; ++r) most = most > token_counts_P[r] ? most : token_counts_P[r];                     \
    int nseg = segments_of(H, most, segments);                                                                  \
    Gather a = {peers, state, timeout_ns, me, P, T_max, K, H, epoch, nseg, area_offset, flags_offset,           \
                scalars_offset, pitch, (u64)rows_RH, (i64)H * ITEM_BYTES, row_weights_R, row_scalars_R,         \
                recv_rows_PTK, slot_rows_TK, slot_ranks_TK, (u64)out_TH, slot_scalars_TK};                      \
    int workers = gridDim.x * (each), w = (which) * gridDim.x + blockIdx.x;                                     \
    int rounds = (most * nseg + workers - 1) / workers;

// The tasks of a worker in order: in each round a give to every peer, then a take `lag` rounds behind. It stands
// at the next task.
struct Schedule {
    int round, d;
    bool taking;
    int dst, t, seg;
    int rank, row;  // of this lane's slot
};
__device__ __forceinline__ Schedule first_task() {
    Schedule s = {0, 0, false, 0, 0, 0, -1, -1};
    return s;
}
// Moves on to the next task there is; false behind the last one.
__device__ __forceinline__ bool step(Schedule& s, const Gather& a, const int* token_counts_P, int rounds, int lag,
                                     int workers, int w) {
    for (;;) {
        if (s.d == a.P) {
            s.d = 0;
            ++s.round;
        }
        if (s.round >= rounds + lag) return false;
        ++s.d;
        s.taking = s.d == a.P;
        if (s.taking ? s.round < lag : s.round >= rounds) continue;
        int item = (s.taking ? s.round - lag : s.round) * workers + w;
        s.dst = s.taking ? a.me : a.me + s.d < a.P ? a.me + s.d : a.me + s.d - a.P;
        s.t = item / a.nseg;
        s.seg = item - s.t * a.nseg;
        if (s.t < token_counts_P[s.dst]) return true;
    }
}
// Starts loading the task's table entries.
__device__ __forceinline__ void load_entries(Schedule& s, const Gather& a) {
    s.rank = s.row = -1;
    if ((int)lane_id() < a.K) {
        i64 at = (i64)s.t * a.K + lane_id();
        if (s.taking) s.rank = a.slot_ranks_TK[at];
        s.row = s.taking ? a.slot_rows_TK[at] : a.recv_rows_PTK[(i64)s.dst * a.T_max * a.K + at];
    }
}
__device__ __forceinline__ bool advance(Schedule& s, const Gather& a, const int* token_counts_P, int rounds, int lag,
                                        int workers, int w) {
    if (!step(s, a, token_counts_P, rounds, lag, workers, w)) return false;
    load_entries(s, a);
    return true;
}
__device__ __forceinline__ Task make_task(const Gather& a, const Schedule& s) {
    return s.taking ? take(a, s.t, s.seg, s.rank, s.row) : give(a, s.dst, s.t, s.seg, s.row);
}
