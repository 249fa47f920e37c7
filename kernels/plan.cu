// The routing plan: who sends what to whom, and on which row everything lands. One kernel:
//
//   1. every warp counts its run of (token, slot) pairs per expert
//   2. the block that finishes last adds the counts up and delivers them to every rank
//   3. all blocks wait for the counts of all ranks, and derive from the [P, E] counts the segment offsets, the
//      required rows of every rank, the verdict, and the row of each of their pairs; rows and weights are
//      delivered to the ranks they land on
//
// Rows of an expert are ordered by (source rank, token, slot): expert_offsets[e] + rows of e from lower
// ranks + this rank's earlier (token, slot) pairs of e. No order-dependent atomics are used for positions,
// so the result is the same in every run.
//
// Options: IDX64 (1 = int64 ids), WARPS (of a block), ITEMS_PER_WARP (a multiple of 32).
#include "common.cuh"

#ifndef IDX64
#define IDX64 1
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef ITEMS_PER_WARP
#define ITEMS_PER_WARP 128
#endif
#define THREADS (WARPS * 32)
#define STEPS (ITEMS_PER_WARP / 32)

// A rank's message, int32 [HEADER_WORDS + P + E], is that of ep_comm.plan.CountMatrix: status words
// (ep_comm.status.Word), tokens for each rank, (token, slot) pairs of each expert.
#define HEADER_WORDS 10
#define WORD_TOKENS 2
#define WORD_BUDGET 4
#define WORD_FAULT 5
#define FAULT_EXPERT_ID 15
#define NO_ITEM 0x7fffffff

#if IDX64
typedef i64 Idx;
#else
typedef int Idx;
#endif

struct Routing {
    const u64* peers;
    int* state;
    int me, P, T, K, E, L, width, pitch, epoch;  // width = P + E; pitch: words from one rank's message to the next
    i64 counts_offset;
    const Idx* topk_idx_TK;
};

// Message of rank p. Epoch parity alternates: a rank may be one plan ahead of a peer that still reads.
__device__ __forceinline__ int* message_of(const Routing& a, u64 window, int p) {
    return (int*)(window + a.counts_offset) + ((i64)(a.epoch & 1) * a.P + p) * a.pitch;
}
__device__ __forceinline__ bool is_expert(const Routing& a, Idx e) { return e >= 0 && e < a.E; }

// Sends this rank's message: `totals` holds its counts [P + E]. All threads of one block.
__device__ void deliver(const Routing& a, const int* totals, const int* header, int bad_item) {
    bool bad = bad_item != NO_ITEM && header[WORD_FAULT] == 0;
    for (int x = threadIdx.x; x < HEADER_WORDS + a.width; x += THREADS) {
        int value = 0;
        if (x >= HEADER_WORDS) {
            value = totals[x - HEADER_WORDS];
        } else if (bad && x >= WORD_FAULT) {
            i64 id = a.topk_idx_TK[bad_item];  // travels as its lower and its upper half
            int words[5] = {FAULT_EXPERT_ID, bad_item / a.K, bad_item % a.K, (int)id, (int)(id >> 32)};
#pragma unroll
            for (int i = 0; i < 5; ++i) value = x == WORD_FAULT + i ? words[i] : value;
        } else {
            value = header[x];
        }
        for (int r = 0; r < a.P; ++r) message_of(a, a.peers[r], a.me)[x] = value;
    }
    __syncthreads();
    if ((int)threadIdx.x < a.P) store_release((int*)(a.peers[threadIdx.x] + COUNTED_OFFSET) + a.me, a.epoch);
}

// Exclusive scan of values[0..E) in shared memory, in place, by the whole block.
__device__ void scan_exclusive(int* values, int E, int* warp_sums) {
    int per_thread = (E + THREADS - 1) / THREADS, first = threadIdx.x * per_thread, sum = 0;
    for (int j = first; j < first + per_thread && j < E; ++j) sum += values[j];
    int inclusive = sum;
    for (int d = 1; d < 32; d *= 2) {
        int up = __shfl_up_sync(FULL_MASK, inclusive, d);
        if ((int)lane_id() >= d) inclusive += up;
    }
    if (lane_id() == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    int before = inclusive - sum;
    for (int w = 0; w < (int)threadIdx.x / 32; ++w) before += warp_sums[w];
    for (int j = first; j < first + per_thread && j < E; ++j) {
        int value = values[j];
        values[j] = before;
        before += value;
    }
    __syncthreads();
}

// What every rank needs and has, from the scanned starts; one warp of one block.
__device__ void write_verdict(const Routing& a, const int* matrix, const int* starts, int all_rows,
                              const int* budgets, i64* required_P, int* verdict, int* token_counts_P) {
    int over = 0, faults = 0, most = 0;
    for (int r = threadIdx.x; r < a.P; r += 32) {
        const int* words = matrix + (i64)r * a.pitch;
        int need = (r + 1 < a.P ? starts[(r + 1) * a.L] : all_rows) - starts[r * a.L];
        int tokens = __ldcg(words + WORD_TOKENS);
        required_P[r] = need;
        token_counts_P[r] = tokens;
        over |= need > budgets[r];
        faults |= __ldcg(words + WORD_FAULT) != 0;
        most = most > tokens ? most : tokens;
        if (r == a.me) verdict[3] = need;
    }
    over = __any_sync(FULL_MASK, over);
    faults = __any_sync(FULL_MASK, faults);
    most = __reduce_max_sync(FULL_MASK, most);
    if (threadIdx.x == 0) {
        verdict[0] = over;
        verdict[1] = faults;
        verdict[2] = most;
    }
}

// grid: enough blocks of floor(WARPS * ITEMS_PER_WARP / K) tokens, at least 1, all resident; block THREADS;
// dynamic shared (P + (WARPS + 2) * E + 2 * floor(WARPS * ITEMS_PER_WARP / K)) * 4 bytes.
//   header              int32 [HEADER_WORDS], the status words; a fault in them wins over ids out of range
//   topk_idx_TK         expert ids, -1 = none; ids outside [-1, E) count as none, the first becomes the fault
//   topk_weights_TK     float32, delivered with the rows
//   pitch               words between messages in the window: the same for all its layers, whatever their E, so that
//                       ranks that plan for different layers still read each other's status words
//   block_counts        int32 [blocks, P + E], scratch
//   first_bad           int32 [1], 2^31 - 1 between calls
// Out:
//   matrix_PX           int32, the messages of all ranks
//   tokens_per_expert_L int64, rows that fit this rank's budget, without padding
//   expert_offsets_L1   int64 [L + 1], aligned starts of the segments and the end, capped by the budget
//   required_P          int64, rows that each rank needs, padding included
//   verdict             int32 [4]: some rank needs more than its budget; some rank reports a fault;
//                       most tokens of a rank; rows this rank needs
//   token_counts_P      int32, tokens of each rank
//   slot_rows_TK, slot_ranks_TK   int32: row and rank of each slot; both -1 where it goes nowhere, also
//                       because the row is beyond that rank's budget
// and in each peer's window, int32/float32 [P, T_max, K] at rows_offset / weights_offset: what lands there.
extern "C" __global__ void __launch_bounds__(THREADS)
plan(const u64* __restrict__ peers, int* state, i64 timeout_ns, int me, int P, i64 counts_offset,
     const int* __restrict__ header, const Idx* __restrict__ topk_idx_TK,
     const float* __restrict__ topk_weights_TK, int T, int K, int E, int pitch, int T_max, int alignment,
     int* block_counts, int* first_bad, i64 rows_offset, i64 weights_offset,
     int* matrix_PX, i64* tokens_per_expert_L, i64* expert_offsets_L1, i64* required_P, int* verdict,
     int* token_counts_P, int* slot_rows_TK, int* slot_ranks_TK) {
    extern __shared__ int shared[];
    __shared__ int warp_sums[WARPS], budgets[MAX_RANKS], status[HEADER_WORDS], is_last, bad_item;
    Routing a = {peers, state, me, P, T, K, E, E / P, P + E, pitch, current_epoch(state), counts_offset, topk_idx_TK};
    int* totals = shared;             // [P + E], then [E] aligned starts, counted through all ranks
    int* base = shared + P + E;       // [E] this block's first row of each expert, from the segment's start
    int* next = shared + P + 2 * E;   // [WARPS, E]
    int warp = threadIdx.x / 32, L = a.L;
    // A block takes whole tokens: `last` is the end of its items, `begin` the first of this warp.
    int block_items = WARPS * ITEMS_PER_WARP / K * K, origin = blockIdx.x * block_items;
    int last = T * K - origin < block_items ? T * K : origin + block_items, begin = origin + warp * ITEMS_PER_WARP;

    // 1. Count. A warp goes through its run in order, so that positions are stable.
    u32* ranks_of = (u32*)(next + WARPS * E);  // [tokens of the block, 2] bits: ranks that have an expert of it
    int words = P + (WARPS + 2) * E + WARPS * ITEMS_PER_WARP / K * 2;
    for (int i = threadIdx.x; i < words; i += THREADS) shared[i] = 0;
    if (threadIdx.x < HEADER_WORDS) status[threadIdx.x] = header[threadIdx.x];
    __syncthreads();
    int* mine = next + warp * E;
    int experts[STEPS];
    u32 same[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
        int i = begin + j * 32 + lane_id();
        Idx e = i < last ? topk_idx_TK[i] : (Idx)-1;
        if (e < -1 || e >= E) atomicMin(first_bad, i);
        experts[j] = is_expert(a, e) ? (int)e : -1;
        if (experts[j] >= 0) {
            int rank = experts[j] / L;
            u32 bit = 1u << (rank & 31);
            if (!(atomicOr(ranks_of + (i - origin) / K * 2 + rank / 32, bit) & bit)) atomicAdd(totals + rank, 1);
        }
        same[j] = __match_any_sync(FULL_MASK, experts[j]);
        if (experts[j] >= 0 && (same[j] & lanes_below()) == 0) mine[experts[j]] += __popc(same[j]);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS)
        for (int w = 0; w < WARPS; ++w) totals[P + e] += next[w * E + e];
    __syncthreads();

    // 2. Deliver.
    bool alone = gridDim.x == 1;
    if (!alone) {
        for (int e = threadIdx.x; e < P + E; e += THREADS) block_counts[(i64)blockIdx.x * (P + E) + e] = totals[e];
        __threadfence();
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        bool finishes = alone || atomicAdd(state + STATE_TICKET, 1) == (int)gridDim.x - 1;
        is_last = finishes;
        if (finishes) {
            __threadfence();
            bad_item = atomicExch(first_bad, NO_ITEM);
            state[STATE_TICKET] = 0;
        }
    }
    __syncthreads();
    if (is_last) {
        for (int e = threadIdx.x; !alone && e < P + E; e += THREADS) {
            int sum = 0;
#pragma unroll 8
            for (int b = 0; b < (int)gridDim.x; ++b) sum += __ldcg(block_counts + (i64)b * (P + E) + e);
            totals[e] = sum;
        }
        __syncthreads();
        deliver(a, totals, status, bad_item);
    }

    // 3. Derive.
    if ((int)threadIdx.x < P) {
        wait_for((const int*)(peers[me] + COUNTED_OFFSET) + threadIdx.x, a.epoch, state, timeout_ns, OP_PLAN,
                 threadIdx.x);
        budgets[threadIdx.x] = __ldcg(message_of(a, peers[me], threadIdx.x) + WORD_BUDGET);
    }
    __syncthreads();
    const int* matrix = message_of(a, peers[me], 0);
    int* starts = totals;
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int total = 0, before = 0;
        for (int p = 0; p < P; ++p) {
            int c = __ldcg(matrix + (i64)p * pitch + HEADER_WORDS + P + e);
            total += c;
            before += p < me ? c : 0;
        }
#pragma unroll 8
        for (int b = 0; b < (int)blockIdx.x; ++b) before += __ldcg(block_counts + (i64)b * (P + E) + P + e);
        starts[e] = (total + alignment - 1) / alignment * alignment;
        base[e] = before;
        if (blockIdx.x == 0 && e / L == me) tokens_per_expert_L[e - me * L] = total;  // capped below
    }
    // The last segment is kept beside the scan: the end of all rows is no segment's start.
    __syncthreads();
    int last_segment = starts[E - 1];
    __syncthreads();
    scan_exclusive(starts, E, warp_sums);
    if (blockIdx.x == 0) {
        int all_rows = starts[E - 1] + last_segment, budget = budgets[me], zero = starts[me * L];
        for (int i = threadIdx.x; i <= L; i += THREADS) {
            int start = (me * L + i < E ? starts[me * L + i] : all_rows) - zero;
            start = start < budget ? start : budget;
            expert_offsets_L1[i] = start;
            if (i < L) {
                i64 total = tokens_per_expert_L[i];
                tokens_per_expert_L[i] = total < budget - start ? total : budget - start;
            }
        }
        int words_X = HEADER_WORDS + P + E;
        for (int x = threadIdx.x; x < P * words_X; x += THREADS)
            matrix_PX[x] = __ldcg(matrix + (i64)(x / words_X) * pitch + x % words_X);
        if (threadIdx.x < 32) write_verdict(a, matrix, starts, all_rows, budgets, required_P, verdict, token_counts_P);
    }
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int row = base[e] + starts[e] - starts[e / L * L];
        for (int w = 0; w < WARPS; ++w) {
            int count = next[w * E + e];
            next[w * E + e] = row;
            row += count;
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
        int i = begin + j * 32 + lane_id(), e = experts[j];
        int row = e >= 0 ? mine[e] + __popc(same[j] & lanes_below()) : -1;
        __syncwarp();
        if (e >= 0 && (same[j] & lanes_below()) == 0) mine[e] += __popc(same[j]);
        __syncwarp();
        if (i >= last) continue;
        int rank = e >= 0 ? e / L : 0;
        bool fits = row >= 0 && row < budgets[rank];
        rank = fits ? rank : -1;
        row = fits ? row : -1;
        slot_rows_TK[i] = row;
        slot_ranks_TK[i] = rank;
        float weight = topk_weights_TK[i];
        i64 at = (i64)me * T_max * K + i;
        for (int r = 0; r < P; ++r) {
            ((int*)(peers[r] + rows_offset))[at] = rank == r ? row : -1;
            ((float*)(peers[r] + weights_offset))[at] = rank == r ? weight : 0.0f;
        }
    }
    finish_operation(state);
}
