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
// fence that orders them costs little. Before a warp waits for sums of round n, it has flagged its own up to
// round n; so there is no deadlock as long as all blocks are resident.
//
// Beside each row one float32 may travel back, unsummed, to its (token, slot): the gradient of its weight.
//
// Options: DTYPE, VEC_BYTES (common.cuh), WEIGHTED (1 = rows are scaled by row_weights), WARPS, BLOCKS_PER_SM,
// BATCH (rows in flight; the next batch is loaded before the last one is added).
#include "gather.cuh"

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

struct Batch {
    Vec x[BATCH];
    u32 key[BATCH];  // the same in all lanes; NO_SUMMAND behind the last
    bool ends;       // the last batch of these elements
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

// grid <= SMs * BLOCKS_PER_SM (all resident), block THREADS. K <= 32, P <= MAX_RANKS.
//   rows_RH               expert outputs or row gradients, payload dtype
//   row_weights_R         float32, with WEIGHTED
//   row_scalars_R         null, or one float32 a row that returns to its slot
//   recv_rows_PTK         rows that this rank holds of each rank's tokens, as scatter_rows left them
//   slot_rows_TK, slot_ranks_TK, token_counts_P   from plan
//   out_TH                payload dtype;  slot_scalars_TK float32, zero for slots without a row
//   segments, lag         segments of a row (segments_of); rounds between giving and taking (2 or more keep the loads flowing); equal on all ranks
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) gather_sum(GATHER_PARAMETERS) {
    GATHER_BEGIN(WARPS, threadIdx.x / 32)
    await_peers(peers, me, P, state, epoch, timeout_ns, OP_GATHER);
    int* pending = nullptr;  // flag of the latest sum given, in round pending_round
    int pending_round = 0;
    Schedule s = first_task();
    bool more = advance(s, a, token_counts_P, rounds, lag, workers, w);
    while (more) {
        if (pending && s.taking && pending_round <= s.round - lag) {
            if (lane_id() == 0) store_release(pending, epoch);
            pending = nullptr;
        }
        Task task = make_task(a, s);
        int begin = segment_start(H, s.seg, nseg), end = segment_start(H, s.seg + 1, nseg), round = s.round;
        more = advance(s, a, token_counts_P, rounds, lag, workers, w);
        if (!task.empty) sum_segment(task.summands, me, begin, end, task.target);
        __syncwarp();
        if (pending && lane_id() == 0) store_release(pending, epoch);
        pending = task.empty ? nullptr : task.flag;
        pending_round = round;
    }
    __syncwarp();
    if (pending && lane_id() == 0) store_release(pending, epoch);
    finish_operation(state);
}
