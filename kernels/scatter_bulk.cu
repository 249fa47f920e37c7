// scatter_rows with the bulk copy engine: the same operation, tables and result as scatter.cu for payload
// that travels as is. Rows go global -> shared -> global by cp.async.bulk and never through registers, so a
// few multiprocessors move as much as many do with loads and stores.
//
// A warp owns a ring of BUFFERS buffers. Task q (a send, or a receive from one peer) starts its load in
// buffer q % BUFFERS; DEPTH tasks later its stores start, one per lane that has a target; when the buffer
// comes round again they are complete, and the arrival flags are raised.
//
// Options: DTYPE; VEC_BYTES must be 16; WARPS, BUFFERS, BUFFER_BYTES (a segment must fit), DEPTH.
#include "scatter.cuh"

#ifndef WARPS
#define WARPS 12
#endif
#ifndef BUFFERS
#define BUFFERS 4
#endif
#ifndef BUFFER_BYTES
#define BUFFER_BYTES 4096
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#define THREADS (WARPS * 32)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init_mbarrier(u32 bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void start_load(u32 buffer, u64 src, u32 bytes, u32 bar) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(buffer), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void wait_load(u32 bar, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void start_store(u64 dst, u32 buffer, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(buffer), "r"(bytes)
                 : "memory");
}

// grid <= SMs, block THREADS, dynamic shared WARPS * BUFFERS * BUFFER_BYTES. Parameters as in scatter.cu.
extern "C" __global__ void __launch_bounds__(THREADS, 1) scatter_rows_bulk(SCATTER_PARAMETERS) {
    extern __shared__ __align__(128) u8 buffers[];
    __shared__ __align__(8) u64 mbarriers[WARPS * BUFFERS];
    int warp = threadIdx.x / 32;
    if (threadIdx.x < WARPS * BUFFERS) init_mbarrier(shared_address(mbarriers + threadIdx.x));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    Scatter a = SCATTER_ARGUMENTS;
    enter_operation(peers, me, P, state, a.epoch, timeout_ns, OP_SCATTER);
    int most = most_tokens(a), nseg = segments_of(H, most, segments), T = token_counts_P[me];
    int warps = gridDim.x * WARPS, w = warp * gridDim.x + blockIdx.x;
    int rounds = (int)(((i64)most * nseg + warps - 1) / warps);
    u32 ring = shared_address(buffers) + warp * BUFFERS * BUFFER_BYTES;
    u32 bars = shared_address(mbarriers) + warp * BUFFERS * 8;

    Segment tasks[BUFFERS];
    u32 parity = 0, busy = 0;  // a bit per buffer
#pragma unroll
    for (int b = 0; b < BUFFERS; ++b) tasks[b] = no_segment();
    i64 count = (i64)(rounds + lag) * P;
    int round = 0, d = 0;
    for (i64 q0 = 0; q0 < count + BUFFERS; q0 += BUFFERS) {
#pragma unroll
        for (int b = 0; b < BUFFERS; ++b) {
            // 1. the task of DEPTH turns ago: its row is here, write it everywhere
            const int s = (b + BUFFERS - DEPTH) % BUFFERS;
            if (busy >> s & 1) {
                wait_load(bars + s * 8, parity >> s & 1);
                parity ^= 1u << s;
                busy &= ~(1u << s);
                i64 begin = (i64)tasks[s].begin * ITEM_BYTES;
                u32 bytes = (u32)(tasks[s].end - tasks[s].begin) * ITEM_BYTES;
                if (tasks[s].target) start_store(tasks[s].target + begin, ring + s * BUFFER_BYTES, bytes);
            }
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            // 2. the task that had buffer b before: its writes are complete, tell the receivers
            asm volatile("cp.async.bulk.wait_group %0;" ::"n"(BUFFERS - DEPTH) : "memory");
            if (tasks[b].flag) store_release(tasks[b].flag, a.epoch);
            __syncwarp();
            // 3. the next task: start its load
            tasks[b] = no_segment();
            if (q0 + b >= count) continue;
            bool arrived = true;
            if (d == 0) {
                i64 item = (i64)round * warps + w;
                if (round < rounds && item < (i64)T * nseg)
                    tasks[b] = send_segment(a, (int)(item / nseg), (int)(item % nseg), nseg, false);
            } else if (round >= lag) {
                i64 item = (i64)(round - lag) * warps + w;
                int src = me + d < P ? me + d : me + d - P;
                if (item < (i64)token_counts_P[src] * nseg) {
                    const int* arrival = nullptr;
                    tasks[b] = receive_segment(a, src, (int)(item / nseg), (int)(item % nseg), nseg, false, &arrival);
                    if (tasks[b].local && lane_id() == 0)
                        arrived = wait_for(arrival, a.epoch, state, timeout_ns, OP_SCATTER, src);
                    arrived = __shfl_sync(FULL_MASK, arrived, 0);
                }
            }
            if (++d == P) {
                d = 0;
                ++round;
            }
            if (!(tasks[b].local | tasks[b].remote) || !arrived) continue;
            busy |= 1u << b;
            if (lane_id() == 0) {
                asm volatile("fence.proxy.async;" ::: "memory");
                start_load(ring + b * BUFFER_BYTES, tasks[b].source + (i64)tasks[b].begin * ITEM_BYTES,
                           (u32)(tasks[b].end - tasks[b].begin) * ITEM_BYTES, bars + b * 8);
            }
        }
    }
    zero_unused(a, tokens_per_expert_L, expert_offsets_L1, zero_tail, w, warps);
    finish_operation(state);
}
