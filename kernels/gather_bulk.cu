// gather_sum with rows fetched by the bulk copy engine: the same operation, tables and result as gather.cu, for
// rows of a multiple of 16 bytes.
//
// A warp works on chunks of CHUNK_BYTES of its tasks' rows. It has two sets of K buffers in shared memory:
// while it sums one chunk out of the first set, cp.async.bulk fills the second with the next. So a few
// multiprocessors keep as many bytes in flight as many do with loads into registers.
//
// Options: DTYPE, WEIGHTED; VEC_BYTES must be 16; WARPS, CHUNK_BYTES (512, 1024 or 2048).
#include "gather.cuh"

#ifndef WARPS
#define WARPS 12
#endif
#ifndef CHUNK_BYTES
#define CHUNK_BYTES 1024
#endif
#define THREADS (WARPS * 32)
#define NEVER 0x7fffffff
#define VECS (CHUNK_BYTES / 512)  // vectors of a lane in a chunk

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait_loads(u32 bar, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
    return v;
}

// A task whose chunks are being loaded: summands in order of their keys, those of lower ranks first.
struct Job {
    u64 source, target;   // of this lane's summand; of the sum
    int* flag;
    float weight;         // of the summand at place lane_id()
    int place;            // of this lane's summand, or -1
    int low, own, all;    // summands of lower ranks, then of this one, then the rest
    int at, end;          // bytes of the row
    int round;            // of a give; NEVER for a take
};

__device__ __forceinline__ Job make_job(const Gather& a, const Schedule& s) {
    Task task = make_task(a, s);
    // Peers wrote their sums with ordinary stores; the copy engine reads them.
    if (s.taking) asm volatile("fence.proxy.async.global;" ::: "memory");
    u32 key = task.empty ? NO_SUMMAND : task.summands.key;
    Job job = {task.summands.address, task.target, task.empty ? nullptr : task.flag, 0.0f, -1, 0, 0, 0,
               segment_start(a.H, s.seg, a.nseg) * ITEM_BYTES, segment_start(a.H, s.seg + 1, a.nseg) * ITEM_BYTES,
               task.empty || s.taking ? NEVER : s.round};
    if (task.empty) job.at = job.end;
    u32 present = __ballot_sync(FULL_MASK, key != NO_SUMMAND);
    job.all = __popc(present);
    job.low = __popc(__ballot_sync(FULL_MASK, key != NO_SUMMAND && (int)(key / 32) < a.me));
    job.own = __popc(__ballot_sync(FULL_MASK, key != NO_SUMMAND && (int)(key / 32) == a.me));
    int place = 0;
    for (u32 m = present; m; m &= m - 1) place += __shfl_sync(FULL_MASK, key, __ffs(m) - 1) < key;
    job.place = key != NO_SUMMAND ? place : -1;
    if (WEIGHTED)
        for (u32 m = present; m; m &= m - 1) {
            float weight = __shfl_sync(FULL_MASK, task.summands.weight, __ffs(m) - 1);
            int at = __shfl_sync(FULL_MASK, job.place, __ffs(m) - 1);
            if ((int)lane_id() == at) job.weight = weight;
        }
    return job;
}

__device__ __forceinline__ void start_loads(const Job& job, u32 buffers, u32 bar) {
    u32 bytes = (u32)(job.end - job.at < CHUNK_BYTES ? job.end - job.at : CHUNK_BYTES);
    if (lane_id() == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes * job.all) : "memory");
    __syncwarp();
    if (job.place >= 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(buffers + job.place * CHUNK_BYTES), "l"(job.source + job.at), "r"(bytes), "r"(bar) : "memory");
}

// acc += (weight *) the summands [first, last), in order.
__device__ __forceinline__ void add(float (*acc)[VEC_ITEMS], const Job& job, u32 buffers, int first, int last, bool weighted) {
#pragma unroll 2
    for (int n = first; n < last; ++n) {
        float weight = weighted ? __shfl_sync(FULL_MASK, job.weight, n) : 1.0f;
#pragma unroll
        for (int u = 0; u < VECS; ++u) {
            float f[VEC_ITEMS];
            unpack(load_shared(buffers + n * CHUNK_BYTES + u * 512 + lane_id() * 16), f);
#pragma unroll
            for (int i = 0; i < VEC_ITEMS; ++i) acc[u][i] = __fadd_rn(acc[u][i], weighted ? __fmul_rn(weight, f[i]) : f[i]);
        }
    }
}
__device__ __forceinline__ void sum_chunk(const Job& job, u32 buffers) {
    float own[VECS][VEC_ITEMS], total[VECS][VEC_ITEMS];
#pragma unroll
    for (int u = 0; u < VECS; ++u)
#pragma unroll
        for (int i = 0; i < VEC_ITEMS; ++i) own[u][i] = total[u][i] = 0.0f;
    add(total, job, buffers, 0, job.low, false);
    add(own, job, buffers, job.low, job.low + job.own, WEIGHTED);
    if (job.own)
#pragma unroll
        for (int u = 0; u < VECS; ++u)
#pragma unroll
            for (int i = 0; i < VEC_ITEMS; ++i) total[u][i] = __fadd_rn(total[u][i], round_to_payload(own[u][i]));
    add(total, job, buffers, job.low + job.own, job.all, false);
#pragma unroll
    for (int u = 0; u < VECS; ++u) {
        int at = job.at + u * 512 + lane_id() * 16;
        if (at < job.end) *(Vec*)(job.target + at) = pack(total[u]);
    }
}

// grid <= SMs, block THREADS, dynamic shared WARPS * 2 * K * CHUNK_BYTES. Parameters as in gather.cu.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_sum_bulk(GATHER_PARAMETERS) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 mbarriers[WARPS * 2];
    int warp = threadIdx.x / 32;
    if (threadIdx.x < WARPS * 2)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(mbarriers + threadIdx.x)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    GATHER_BEGIN(WARPS, threadIdx.x / 32)
    await_peers(peers, me, P, state, epoch, timeout_ns, OP_GATHER);
    u32 bars = shared_address(mbarriers + warp * 2), set_bytes = K * CHUNK_BYTES;
    u32 sets = shared_address(memory) + warp * 2 * set_bytes;

    Schedule s = first_task();
    bool more = advance(s, a, token_counts_P, rounds, lag, workers, w);
    Job ahead, now;              // the chunk being loaded, the chunk being summed
    ahead.at = ahead.end = 0;
    int* pending = nullptr;      // flag of the latest sum given, in round pending_round
    int pending_round = NEVER;
    u32 use = 0;                 // chunks whose loads have been started
    // Starts the loads of the next chunk, if there is one, and if it is no sum to take of a round up to
    // `unflagged`, the earliest one whose own sum has not been flagged: the peer may be waiting for that.
    auto load_next = [&](int unflagged) {
        if (ahead.end - ahead.at > CHUNK_BYTES) {
            ahead.at += CHUNK_BYTES;
        } else {
            do {
                if (!more || (s.taking && unflagged <= s.round - lag)) return false;
                ahead = make_job(a, s);
                more = advance(s, a, token_counts_P, rounds, lag, workers, w);
            } while (ahead.at == ahead.end);
        }
        start_loads(ahead, sets + (use & 1) * set_bytes, bars + (use & 1) * 8);
        ++use;
        return true;
    };
    auto raise_pending = [&]() {
        if (pending && lane_id() == 0) store_release(pending, epoch);
        pending = nullptr;
        pending_round = NEVER;
    };
    bool loading = load_next(NEVER);
    while (loading || more) {
        if (!loading) {
            raise_pending();
            loading = load_next(NEVER);
            continue;
        }
        now = ahead;
        u32 k = use - 1;
        loading = load_next(now.round < pending_round ? now.round : pending_round);
        wait_loads(bars + (k & 1) * 8, k >> 1 & 1);
        sum_chunk(now, sets + (k & 1) * set_bytes);
        __syncwarp();
        if (now.end - now.at > CHUNK_BYTES) continue;
        raise_pending();
        pending = now.flag;
        pending_round = now.round;
    }
    raise_pending();
    finish_operation(state);
}
