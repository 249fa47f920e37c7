// gather_sum: combine forward and dispatch backward.
//
//   P[r, t] = round( sum over slots k ascending, expert on rank r, of (w[row] *) y[row] )
//   out[t]  = round( sum over ranks r ascending that hold rows of t, of P[r, t] )
//
// in FP32 from +0, each product rounded before it is added. One persistent kernel: a warp takes one segment
// of one token at a time and, in turn,
//
//   give:   sums the rows that this rank holds of a peer's token, and stores the sum into that peer's window
//   take:   `lag` rounds later, sums its own rows of an own token and the sums that the other ranks gave
//
// The arrival flag of a sum is raised after the warp's next task: by then its stores have drained, and the
// fence that orders them costs little. A warp waits only for sums that their rank flags before it waits for
// anything later (lag >= 1), so there is no deadlock as long as all blocks are resident.
//
// Beside each row one float32 may travel back, unsummed, to its (token, slot): the gradient of its weight.
//
// Options: DTYPE, VEC_BYTES (common.cuh), WEIGHTED (1 = rows are scaled by row_weights), WARPS, BLOCKS_PER_SM,
// BATCH (rows in flight; the next batch is loaded before the last one is added).
#include "common.cuh"

#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef WARPS
#define WARPS 20
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 1
#endif
#ifndef BATCH
#define BATCH 4
#endif
#define THREADS (WARPS * 32)
#define NO_SUMMAND 0xffffffffu

// What one token's segment is the sum of; a lane holds a summand. `key` orders them: rank * 32 + slot. A
// summand of another rank is that rank's partial sum, those of the own rank are rows.
struct Summands {
    u32 key;
    u64 address;
    float weight;
};
struct Batch {
    Vec x[BATCH];
    u32 key[BATCH];  // the same in all lanes; NO_SUMMAND behind the last
    bool ends;       // the last batch of these elements
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

// Starts the loads of the next BATCH summands at vector v; `left` is this lane's key until it is taken.
__device__ __forceinline__ void load_batch(Batch& b, const Summands& s, u32& left, int v, bool inside) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
        b.key[i] = __reduce_min_sync(FULL_MASK, left);
        u64 address = __shfl_sync(FULL_MASK, s.address, b.key[i] & 31);
        if (b.key[i] != NO_SUMMAND && inside) b.x[i] = load_vec((const Vec*)address + v);
        if (left == b.key[i]) left = NO_SUMMAND;
    }
    b.ends = __reduce_min_sync(FULL_MASK, left) == NO_SUMMAND;
}

// total = sum of the partial sums, with the own rows' one rounded in its turn.
struct Sums {
    float own[VEC_ITEMS], total[VEC_ITEMS];
    bool open;  // own rows have been added that are not in the total yet
};
__device__ __forceinline__ void clear(Sums& a) {
#pragma unroll
    for (int i = 0; i < VEC_ITEMS; ++i) a.own[i] = a.total[i] = 0.0f;
    a.open = false;
}
__device__ __forceinline__ void close(Sums& a) {
    if (a.open) {
#pragma unroll
        for (int i = 0; i < VEC_ITEMS; ++i) a.total[i] = __fadd_rn(a.total[i], round_to_payload(a.own[i]));
    }
    a.open = false;
}
__device__ __forceinline__ void add_batch(Sums& a, const Batch& b, const Summands& s, u32 me) {
#pragma unroll
    for (int n = 0; n < BATCH; ++n) {
        if (b.key[n] == NO_SUMMAND) continue;
        float f[VEC_ITEMS];
        unpack(b.x[n], f);
        if (b.key[n] / 32 == me) {
            float w = WEIGHTED ? __shfl_sync(FULL_MASK, s.weight, b.key[n] & 31) : 1.0f;
#pragma unroll
            for (int i = 0; i < VEC_ITEMS; ++i)
                a.own[i] = __fadd_rn(a.own[i], WEIGHTED ? __fmul_rn(w, f[i]) : f[i]);
            a.open = true;
        } else {
            close(a);
#pragma unroll
            for (int i = 0; i < VEC_ITEMS; ++i) a.total[i] = __fadd_rn(a.total[i], f[i]);
        }
    }
}

// Sums elements [begin, end) to `target`. While one batch is added, the next one is on its way.
__device__ __forceinline__ void sum_segment(const Summands& s, u32 me, int begin, int end, u64 target) {
    int last = end / VEC_ITEMS, lane = lane_id();
    int v = begin / VEC_ITEMS + lane, next_v = v, base = begin / VEC_ITEMS;
    u32 left = s.key;
    Sums sums;
    clear(sums);
    Batch first, second;
    auto load = [&](Batch& b) {
        load_batch(b, s, left, next_v, next_v < last);
        if (b.ends) {
            left = s.key;
            next_v += 32;
        }
    };
    // Adds `now` after starting `then`; true when the segment is done.
    auto step = [&](Batch& now, Batch& then) {
        bool finished = now.ends && base + 32 >= last;
        if (!finished) load(then);
        add_batch(sums, now, s, me);
        if (now.ends) {
            close(sums);
            if (v < last) ((Vec*)target)[v] = pack(sums.total);
            clear(sums);
            v += 32;
            base += 32;
        }
        return finished;
    };
    load(first);
    while (!step(first, second) && !step(second, first)) {}
}

// One sum to make: what of, where to, and the flag to raise when it has been made (give) or null (take).
struct Task {
    Summands summands;
    u64 target;
    int* flag;
    bool empty;
};

// This rank's rows of token t of rank dst, for dst's window.
__device__ __forceinline__ Task give(const Gather& a, int dst, int t, int seg) {
    int lane = lane_id();
    int row = lane < a.K ? a.recv_rows_PTK[((i64)dst * a.T_max + t) * a.K + lane] : -1;
    i64 slot = (i64)a.me * a.T_max + t;
    if (seg == 0 && a.row_scalars_R && row >= 0)
        ((float*)(a.peers[dst] + a.scalars_offset))[slot * a.K + lane] = a.row_scalars_R[row];
    return {{row >= 0 ? (u32)(a.me * 32 + lane) : NO_SUMMAND, a.rows + row * a.row_bytes,
             WEIGHTED && row >= 0 ? a.row_weights_R[row] : 0.0f},
            a.peers[dst] + a.area_offset + slot * a.pitch,
            (int*)(a.peers[dst] + a.flags_offset) + slot * MAX_SEGMENTS + seg,
            !__any_sync(FULL_MASK, row >= 0)};
}

// The sum of all ranks' sums of the own token t, once they have arrived.
__device__ __forceinline__ Task take(const Gather& a, int t, int seg) {
    int lane = lane_id();
    i64 at = (i64)t * a.K + lane;
    int rank = lane < a.K ? a.slot_ranks_TK[at] : -1, row = lane < a.K ? a.slot_rows_TK[at] : -1;
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

// grid <= SMs * BLOCKS_PER_SM (all resident), block THREADS. K <= 32, P <= MAX_RANKS.
//   rows_RH               expert outputs or row gradients, payload dtype
//   row_weights_R         float32, with WEIGHTED
//   row_scalars_R         null, or one float32 a row that returns to its slot
//   recv_rows_PTK         rows that this rank holds of each rank's tokens, as scatter_rows left them
//   slot_rows_TK, slot_ranks_TK, token_counts_P   from plan
//   out_TH                payload dtype;  slot_scalars_TK float32, zero for slots without a row
//   segments, lag         least segments of a row; rounds between giving and taking (>= 1); equal on all ranks
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
gather_sum(const u64* __restrict__ peers, int* state, i64 timeout_ns, int me, int P, int T_max, int K, int H,
           i64 area_offset, i64 flags_offset, i64 scalars_offset, i64 pitch,
           const void* rows_RH, const float* __restrict__ row_weights_R, const float* __restrict__ row_scalars_R,
           const int* __restrict__ recv_rows_PTK, const int* __restrict__ slot_rows_TK,
           const int* __restrict__ slot_ranks_TK, const int* __restrict__ token_counts_P,
           void* out_TH, float* slot_scalars_TK, int segments, int lag) {
    int epoch = current_epoch(state);
    announce(peers, me, P, epoch);
    int most = 0, T = token_counts_P[me];
    for (int r = 0; r < P; ++r) most = most > token_counts_P[r] ? most : token_counts_P[r];
    int nseg = segments_of(H, most, segments);
    Gather a = {peers, state, timeout_ns, me, P, T_max, K, H, epoch, nseg, area_offset, flags_offset,
                scalars_offset, pitch, (u64)rows_RH, (i64)H * ITEM_BYTES, row_weights_R, row_scalars_R,
                recv_rows_PTK, slot_rows_TK, slot_ranks_TK, (u64)out_TH, slot_scalars_TK};
    int warps = gridDim.x * WARPS, w = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
    int rounds = (most * nseg + warps - 1) / warps;

    await_peers(peers, me, P, state, epoch, timeout_ns, OP_GATHER);
    int* pending = nullptr;  // flag of the latest sum given
    int round = 0, d = 1;    // gives of a round for d = 1 .. P - 1, then its take
    while (round < rounds + lag) {
        bool taking = d == P;
        int item = (taking ? round - lag : round) * warps + w, t = item / nseg, seg = item - t * nseg;
        int dst = me + d < P ? me + d : me + d - P;
        bool due = taking ? round >= lag : round < rounds;
        if (due && t < (taking ? T : token_counts_P[dst])) {
            Task task = taking ? take(a, t, seg) : give(a, dst, t, seg);
            if (!task.empty)
                sum_segment(task.summands, me, segment_start(H, seg, nseg), segment_start(H, seg + 1, nseg), task.target);
            __syncwarp();
            if (pending && lane_id() == 0) store_release(pending, epoch);
            pending = task.empty ? nullptr : task.flag;
        }
        if (taking) {
            __syncwarp();
            if (pending && lane_id() == 0) store_release(pending, epoch);
            pending = nullptr;
            d = 1;
            ++round;
        } else {
            ++d;
        }
    }
    finish_operation(state);
}
