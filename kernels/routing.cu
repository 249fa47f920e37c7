// The routing plan where ranks exchange their counts by a collective: what ep_comm.plan derives from a rank's
// own ids (count_slots, place_slots), what it tells the others (write_message), and what follows from the counts of
// all ranks (derive_plan). Nothing here talks to a peer.
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
#define BLOCK_ITEMS (WARPS * ITEMS_PER_WARP)

#define HEADER_WORDS 10  // ep_comm.status
#define WORD_BUDGET 4
#define WORD_FAULT 5
#define FAULT_EXPERT_ID 15

#if IDX64
typedef i64 Idx;
#else
typedef int Idx;
#endif

__device__ __forceinline__ int expert_of(const Idx* topk_idx, i64 i, int E) {
    Idx e = topk_idx[i];
    return e >= 0 && e < E ? (int)e : -1;
}

// A block counts its run of BLOCK_ITEMS slots.
//   topk_idx       [S = T * K] ids as given
//   idx            int64 [S], ids, those out of range replaced by -1
//   block_counts   int32 [blocks, E]
//   needs_TP       bool, zero before: whether the token has an expert on the rank
//   totals         int64 [E + P + 1], zero before: slots of each expert, tokens for each rank, and S - i for the
//                  first slot i whose id is out of range
extern "C" __global__ void __launch_bounds__(THREADS)
count_slots(const Idx* __restrict__ topk_idx, i64 S, int K, int E, int P, i64* idx, int* block_counts, u8* needs_TP,
            u64* totals) {
    extern __shared__ int counts[];  // [E + P]
    for (int x = threadIdx.x; x < E + P; x += THREADS) counts[x] = 0;
    __syncthreads();
    int L = E / P;
    i64 end = (i64)(blockIdx.x + 1) * BLOCK_ITEMS;
    for (i64 i = (i64)blockIdx.x * BLOCK_ITEMS + threadIdx.x; i < end && i < S; i += THREADS) {
        int e = expert_of(topk_idx, i, E);
        idx[i] = e;
        if (e < 0) {
            if (topk_idx[i] != (Idx)-1) atomicMax(totals + E + P, (u64)(S - i));
            continue;
        }
        atomicAdd(counts + e, 1);
        bool first = true;  // slot of this token on that rank
        for (i64 j = i / K * K; j < i; ++j) {
            int other = expert_of(topk_idx, j, E);
            first = first && !(other >= 0 && other / L == e / L);
        }
        if (first) {
            needs_TP[i / K * P + e / L] = 1;
            atomicAdd(counts + E + e / L, 1);
        }
    }
    __syncthreads();
    for (int x = threadIdx.x; x < E + P; x += THREADS) {
        if (x < E) block_counts[(i64)blockIdx.x * E + x] = counts[x];
        if (counts[x]) atomicAdd(totals + x, (u64)counts[x]);
    }
}

// After it, on the same grid:
//   position       int64 [S], earlier slots with the same expert; 0 where there is none
//   fault          int32 [5]: code, token, slot, lower and upper half of the first id out of range; zeros without one
extern "C" __global__ void __launch_bounds__(THREADS)
place_slots(const Idx* __restrict__ topk_idx, i64 S, int K, int E, int P, const int* __restrict__ block_counts,
            const i64* __restrict__ totals, i64* position, int* fault) {
    extern __shared__ int next[];  // [WARPS, E]: slots before the warp's run, then counted on
    int warp = threadIdx.x / 32;
    for (int x = threadIdx.x; x < WARPS * E; x += THREADS) next[x] = 0;
    if (blockIdx.x == 0 && threadIdx.x < 5) {
        i64 back = totals[E + P], i = S - back, id = back ? (i64)topk_idx[i] : 0;
        int words[5] = {FAULT_EXPERT_ID, (int)(i / K), (int)(i % K), (int)id, (int)(id >> 32)};
        int word = 0;
#pragma unroll
        for (int x = 0; x < 5; ++x) word = (int)threadIdx.x == x ? words[x] : word;
        fault[threadIdx.x] = back ? word : 0;
    }
    __syncthreads();
    int* mine = next + warp * E;
    i64 begin = (i64)blockIdx.x * BLOCK_ITEMS + warp * ITEMS_PER_WARP;
    for (int j = 0; j < ITEMS_PER_WARP; j += 32) {
        i64 i = begin + j + lane_id();
        int e = i < S ? expert_of(topk_idx, i, E) : -1;
        u32 same = __match_any_sync(FULL_MASK, e);
        if (e >= 0 && (same & lanes_below()) == 0) mine[e] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int before = 0;
        for (int b = 0; b < (int)blockIdx.x; ++b) before += block_counts[(i64)b * E + e];
        for (int w = 0; w < WARPS; ++w) {
            int count = next[w * E + e];
            next[w * E + e] = before;
            before += count;
        }
    }
    __syncthreads();
    for (int j = 0; j < ITEMS_PER_WARP; j += 32) {
        i64 i = begin + j + lane_id();
        int e = i < S ? expert_of(topk_idx, i, E) : -1;
        u32 same = __match_any_sync(FULL_MASK, e);
        int at = e >= 0 ? mine[e] + __popc(same & lanes_below()) : 0;
        __syncwarp();
        if (e >= 0 && (same & lanes_below()) == 0) mine[e] += __popc(same);
        __syncwarp();
        if (i < S) position[i] = at;
    }
}

// This rank's message: five words of header, five of the fault (from the device, or as arguments where `fault` is
// null), then up to three parts of counts, then zeros.
//   a, b, c        int64 [na], [nb], [nc], may be null: tokens for each rank, slots of each expert, tokens for each host
//   message        int32 [X]
extern "C" __global__ void __launch_bounds__(THREADS)
write_message(int operation, int agreed, int tokens, int dtype, int budget, const int* __restrict__ fault, int code,
              int v0, int v1, int v2, int v3, const i64* __restrict__ a, int na, const i64* __restrict__ b, int nb,
              const i64* __restrict__ c, int nc, int* message, int X) {
    int words[HEADER_WORDS] = {operation, agreed, tokens, dtype, budget, code, v0, v1, v2, v3};
    for (int x = blockIdx.x * THREADS + threadIdx.x; x < X; x += gridDim.x * THREADS) {
        int word = 0, i = x - HEADER_WORDS;
        if (i < 0) {
#pragma unroll
            for (int w = 0; w < HEADER_WORDS; ++w) word = x == w ? words[w] : word;
            if (fault && x >= WORD_FAULT) word = fault[x - WORD_FAULT];
        } else if (i < na) word = (int)a[i];
        else if (i < na + nb) word = (int)b[i - na];
        else if (i < na + nb + nc) word = (int)c[i - na - nb];
        message[x] = word;
    }
}

// From the messages of all ranks. Every block derives the segments for itself and places some slots.
//   matrix_PX            int32 [P, X]: status words, tokens for each rank, slots of each expert, ...
//   pair_limit           most tokens between two ranks; negative for none
//   slot_rank, slot_rows int64 [S]: rank and row of the slot; both -1 where it goes nowhere
//   tokens_per_expert_L, expert_offsets_L1, required_P   int64; overflow: bool [1]
extern "C" __global__ void __launch_bounds__(THREADS)
derive_plan(const int* __restrict__ matrix_PX, i64 X, const i64* __restrict__ idx, const i64* __restrict__ position,
            i64 S, int E, int P, int me, i64 alignment, i64 pair_limit, i64* slot_rank, i64* slot_rows,
            i64* tokens_per_expert_L, i64* expert_offsets_L1, i64* required_P, u8* overflow) {
    extern __shared__ i64 base[];  // [E] first row of this rank's slots on the expert's rank
    i64* totals = base + E;        // [E] rows of the expert from all ranks
    __shared__ int over;
    int L = E / P;
    if (threadIdx.x == 0) over = 0;
    const int* counts = matrix_PX + HEADER_WORDS + P;
    for (int e = threadIdx.x; e < E; e += THREADS) {
        i64 total = 0, lower = 0;
        for (int r = 0; r < P; ++r) {
            int count = counts[r * X + e];
            total += count;
            lower += r < me ? count : 0;
        }
        totals[e] = total;
        base[e] = lower;
    }
    __syncthreads();
    // A thread walks the segments of one rank, in order.
    for (int p = threadIdx.x; p < P; p += THREADS) {
        i64 start = 0, budget = matrix_PX[p * X + WORD_BUDGET];
        bool writes = blockIdx.x == 0 && p == me;
        for (int l = 0; l < L; ++l) {
            i64 total = totals[p * L + l], capped = start < budget ? start : budget;
            base[p * L + l] += start;
            if (writes) {
                expert_offsets_L1[l] = capped;
                tokens_per_expert_L[l] = total < budget - capped ? total : budget - capped;
            }
            start += (total + alignment - 1) / alignment * alignment;
        }
        if (writes) expert_offsets_L1[L] = start < budget ? start : budget;
        if (blockIdx.x == 0) {
            required_P[p] = start;
            bool too_much = start > budget;
            for (int r = 0; r < P && pair_limit >= 0; ++r)
                too_much |= matrix_PX[p * X + HEADER_WORDS + r] > pair_limit;
            if (too_much) atomicOr(&over, 1);
        }
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) *overflow = (u8)over;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < S; i += (i64)gridDim.x * THREADS) {
        int e = (int)idx[i], rank = e >= 0 ? e / L : 0;
        i64 row = e >= 0 ? base[e] + position[i] : 0;
        bool fits = e >= 0 && row < matrix_PX[rank * X + WORD_BUDGET];
        slot_rank[i] = fits ? rank : -1;
        slot_rows[i] = fits ? row : -1;
    }
}
