// The routing plan: who sends what to whom, and on which row everything lands.
//
//   plan_count   counts this rank's tokens per expert and delivers the counts to every rank
//   plan_rows    from the [P, E] counts: segment offsets, required rows of every rank, the verdict, and
//                the row of each (token, slot); delivers rows and weights to the ranks they land on
//
// Rows of an expert are ordered by (source rank, token, slot): expert_offsets[e] + rows of e from lower
// ranks + this rank's earlier (token, slot) pairs of e. Counting uses no order-dependent atomics, so the
// result is the same in every run.
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
#define ITEMS_PER_BLOCK (WARPS * ITEMS_PER_WARP)
#define THREADS (WARPS * 32)

// A rank's message, int32 [HEADER_WORDS + P + E], is that of ep_comm.plan.CountMatrix: status words
// (ep_comm.status.Word), tokens for each rank, (token, slot) pairs of each expert.
#define HEADER_WORDS 10
#define WORD_TOKENS 2
#define WORD_BUDGET 4
#define WORD_FAULT 5
#define FAULT_EXPERT_ID 15

#if IDX64
typedef i64 Idx;
#else
typedef int Idx;
#endif

// Message of rank p. Epoch parity alternates: a rank may be one plan ahead of a peer that still reads.
__device__ __forceinline__ int* message_of(u64 window, i64 counts_offset, int epoch, int P, int E, int p) {
    return (int*)(window + counts_offset) + ((i64)(epoch & 1) * P + p) * (HEADER_WORDS + P + E);
}

// grid ceil(T*K / ITEMS_PER_BLOCK), at least 1; block THREADS; dynamic shared (P + E) * 4 bytes.
//   header            int32 [HEADER_WORDS], the status words; a fault in them wins over ids out of range
//   topk_idx_TK       expert ids, -1 = none; ids outside [-1, E) count as none, the first becomes the fault
//   block_counts      int32 [blocks, P + E], scratch that plan_rows reads
//   first_bad         int32 [1], 2^31 - 1 between calls
extern "C" __global__ void __launch_bounds__(THREADS)
plan_count(const u64* __restrict__ peers, int* state, int me, int P, i64 counts_offset,
           const int* __restrict__ header, const Idx* __restrict__ topk_idx_TK, int T, int K, int E,
           int* block_counts, int* first_bad) {
    extern __shared__ int histogram[];  // [P] tokens for each rank, [E] pairs of each expert
    __shared__ int is_last, bad_item;
    int epoch = current_epoch(state), L = E / P, width = P + E;
    for (int e = threadIdx.x; e < width; e += THREADS) histogram[e] = 0;
    __syncthreads();
    i64 items = (i64)T * K, begin = (i64)blockIdx.x * ITEMS_PER_BLOCK;
    for (int j = threadIdx.x; j < ITEMS_PER_BLOCK && begin + j < items; j += THREADS) {
        i64 i = begin + j;
        Idx e = topk_idx_TK[i];
        if (e < -1 || e >= E) atomicMin(first_bad, (int)i);
        if (e < 0 || e >= E) continue;
        atomicAdd(histogram + P + (int)e, 1);
        int rank = (int)e / L;
        bool first = true;  // the first of the token's slots on that rank
        for (i64 q = i / K * K; q < i; ++q) {
            Idx other = topk_idx_TK[q];
            first &= !(other >= (Idx)rank * L && other < (Idx)(rank + 1) * L);
        }
        if (first) atomicAdd(histogram + rank, 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < width; e += THREADS) block_counts[(i64)blockIdx.x * width + e] = histogram[e];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(state + STATE_TICKET, 1) == (int)gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) {
        bad_item = atomicExch(first_bad, 0x7fffffff);
        state[STATE_TICKET] = 0;
    }
    __syncthreads();
    bool bad = bad_item != 0x7fffffff && header[WORD_FAULT] == 0;
    for (int x = threadIdx.x; x < HEADER_WORDS + width; x += THREADS) {
        int value = 0;
        if (x >= HEADER_WORDS) {
            for (int b = 0; b < (int)gridDim.x; ++b) value += __ldcg(block_counts + (i64)b * width + x - HEADER_WORDS);
        } else if (bad && x >= WORD_FAULT) {
            i64 id = topk_idx_TK[bad_item], low = -2147483648ll, high = 2147483647ll;
            id = id < low ? low : id > high ? high : id;
            int words[5] = {FAULT_EXPERT_ID, bad_item / K, bad_item % K, (int)id, 0};
#pragma unroll
            for (int i = 0; i < 5; ++i) value = x == WORD_FAULT + i ? words[i] : value;
        } else {
            value = header[x];
        }
        for (int r = 0; r < P; ++r) message_of(peers[r], counts_offset, epoch, P, E, me)[x] = value;
    }
    __syncthreads();
    if ((int)threadIdx.x < P) store_release((int*)(peers[threadIdx.x] + COUNTED_OFFSET) + me, epoch);
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

// Same grid and block as plan_count; dynamic shared (WARPS + 2) * E * 4 bytes.
//   topk_weights_TK     float32, delivered with the rows
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
plan_rows(const u64* __restrict__ peers, int* state, i64 timeout_ns, int me, int P, i64 counts_offset,
          const Idx* __restrict__ topk_idx_TK, const float* __restrict__ topk_weights_TK, int T, int K, int E,
          int T_max, int alignment, const int* __restrict__ block_counts, i64 rows_offset, i64 weights_offset,
          int* matrix_PX, i64* tokens_per_expert_L, i64* expert_offsets_L1, i64* required_P, int* verdict,
          int* token_counts_P, int* slot_rows_TK, int* slot_ranks_TK) {
    extern __shared__ int shared[];
    __shared__ int warp_sums[WARPS], budgets[MAX_RANKS];
    int* starts = shared;           // [E] aligned starts, counted through all ranks
    int* base = shared + E;         // [E] this block's first row of each expert, from the segment's start
    int* next = shared + 2 * E;     // [WARPS, E]
    int epoch = current_epoch(state), L = E / P, warp = threadIdx.x / 32, width = P + E;
    if ((int)threadIdx.x < P) {
        wait_for((const int*)(peers[me] + COUNTED_OFFSET) + threadIdx.x, epoch, state, timeout_ns, OP_PLAN,
                 threadIdx.x);
        budgets[threadIdx.x] = __ldcg(message_of(peers[me], counts_offset, epoch, P, E, threadIdx.x) + WORD_BUDGET);
    }
    __syncthreads();
    const int* matrix = message_of(peers[me], counts_offset, epoch, P, E, 0);
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int total = 0, before = 0;
        for (int p = 0; p < P; ++p) {
            int c = __ldcg(matrix + (i64)p * (HEADER_WORDS + width) + HEADER_WORDS + P + e);
            total += c;
            before += p < me ? c : 0;
        }
        for (int b = 0; b < (int)blockIdx.x; ++b) before += block_counts[(i64)b * width + P + e];
        starts[e] = (total + alignment - 1) / alignment * alignment;
        base[e] = before;
        next[e] = total;  // until the offsets are known
    }
    // The last segment is kept beside the scan: the end of all rows is no segment's start.
    __syncthreads();
    int last_segment = starts[E - 1];
    __syncthreads();
    scan_exclusive(starts, E, warp_sums);
    if (blockIdx.x == 0) {
        int all_rows = starts[E - 1] + last_segment, budget = budgets[me], origin = starts[me * L];
        for (int i = threadIdx.x; i <= L; i += THREADS) {
            int start = (me * L + i < E ? starts[me * L + i] : all_rows) - origin;
            start = start < budget ? start : budget;
            expert_offsets_L1[i] = start;
            if (i < L) {
                int total = next[me * L + i];
                tokens_per_expert_L[i] = total < budget - start ? total : budget - start;
            }
        }
        for (int x = threadIdx.x; x < P * (HEADER_WORDS + width); x += THREADS) matrix_PX[x] = __ldcg(matrix + x);
        if (threadIdx.x < 32) {
            int over = 0, faults = 0, most = 0;
            for (int r = threadIdx.x; r < P; r += 32) {
                const int* words = matrix + (i64)r * (HEADER_WORDS + width);
                int need = (r + 1 < P ? starts[(r + 1) * L] : all_rows) - starts[r * L];
                int tokens = __ldcg(words + WORD_TOKENS);
                required_P[r] = need;
                token_counts_P[r] = tokens;
                over |= need > budgets[r];
                faults |= __ldcg(words + WORD_FAULT) != 0;
                most = most > tokens ? most : tokens;
                if (r == me) verdict[3] = need;
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
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WARPS * E; i += THREADS) next[i] = 0;
    __syncthreads();
    // Stable positions: every warp owns a run of items and its own counters, first counted, then walked.
    i64 items = (i64)T * K, begin = (i64)blockIdx.x * ITEMS_PER_BLOCK + warp * ITEMS_PER_WARP;
    int* mine = next + warp * E;
    int experts[ITEMS_PER_WARP / 32];
    u32 peers_of[ITEMS_PER_WARP / 32];
#pragma unroll
    for (int j = 0; j < ITEMS_PER_WARP / 32; ++j) {
        i64 i = begin + j * 32 + lane_id();
        Idx e = i < items ? topk_idx_TK[i] : (Idx)-1;
        experts[j] = e >= 0 && e < E ? (int)e : -1;
        peers_of[j] = __match_any_sync(FULL_MASK, experts[j]);
        if (experts[j] >= 0 && (peers_of[j] & lanes_below()) == 0) mine[experts[j]] += __popc(peers_of[j]);
        __syncwarp();
    }
    __syncthreads();
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
    for (int j = 0; j < ITEMS_PER_WARP / 32; ++j) {
        i64 i = begin + j * 32 + lane_id();
        int e = experts[j], row = e >= 0 ? mine[e] + __popc(peers_of[j] & lanes_below()) : -1;
        __syncwarp();
        if (e >= 0 && (peers_of[j] & lanes_below()) == 0) mine[e] += __popc(peers_of[j]);
        __syncwarp();
        if (i >= items) continue;
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
