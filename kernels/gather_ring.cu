// gather_sum by teams of specialised warps: the same operation, tables and result as gather.cu, for rows of a
// multiple of 16 bytes.
//
// What a task costs besides its bytes (tables, waiting, flags) is taken out of the warps that sum. A block holds
// TEAMS teams. Each has a ring of SLOTS slots of CHUNK_BYTES in shared memory, and
//
//   PRODUCERS warps  read the tables, wait for what peers give, and start one bulk copy for each row's chunk, into
//                    the next slot
//   one flag warp    raises the flags of what has been given, as many as are ready at a time
//   CONSUMERS warps  sum: each holds VECS vectors a lane of the same chunk, and stores the sum (to the peer)
//
// Producers take tasks by turns, so that one can read tables and wait while another starts copies. The slots of the
// ring are filled in the order of the tasks, because the consumers read them in that order: a producer touches the
// ring only when it is its turn, and hands the turn on as soon as it knows its last slot.
//
// No deadlock: a producer waits for a peer before its turn holds up anything but later tasks. All earlier tasks have
// been posted, or their producer itself waits for a peer's earlier sum. Consumers and the flag warp wait for nothing
// but tasks that have been posted. So what a rank gives up to round n is flagged while it waits for sums of round n,
// as in gather.cu. For the same reason no wait inside the block needs a limit of its own: producers' waits for peers
// have one, and a task that timed out is left out like one without rows.
//
// Options: DTYPE, WEIGHTED; VEC_BYTES must be 16; TEAMS, PRODUCERS, CONSUMERS, VECS (1 to 4), SLOTS.
#include "gather.cuh"

#ifndef TEAMS
#define TEAMS 2
#endif
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef CONSUMERS
#define CONSUMERS 7
#endif
#ifndef VECS
#define VECS 4
#endif
#ifndef SLOTS
#define SLOTS 7
#endif
#define MOST_LAG 11
#define POSTS 16  // tasks between the first and the last warp of a team
#define TEAM_WARPS (PRODUCERS + 1 + CONSUMERS)
#define THREADS (TEAMS * TEAM_WARPS * 32)
#define CHUNK_BYTES (CONSUMERS * VECS * 512)

// ---- barriers in shared memory -------------------------------------------------------------------
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init_barrier(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void arrive_expecting(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Waits until the phase of this parity is over. try_wait lets the hardware suspend the warp meanwhile.
__device__ __forceinline__ void await(u32 bar, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}
// Whether it is over. Not by try_wait: that may suspend the warp for microseconds before it says no.
__device__ __forceinline__ bool is_over(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void copy_row(u32 to, u64 from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
    return v;
}

// A task as its consumers see it: summands in order of their keys, those of lower ranks first.
struct Post {
    u64 target;
    int* flag;
    int low, own, all;  // summands of lower ranks, of this one, of all
    int begin, end;     // bytes of the row; begin < 0: there are no more tasks
    float weight[32];   // of the summand at each place
};
// Where in the ring, and at which post, the next task starts. Kept in shared memory by whose turn it is.
struct Place {
    u32 slot, lap, post;
};
// Barriers come in phases. Their users count how often they have used one: use n ends phase n, and its parity is
// that of n. Those that say "free" are waited for one use behind, so that the first wait finds them open.
struct Team {
    u64 full[SLOTS], empty[SLOTS];                    // a slot's row has arrived; all consumers have read it
    u64 posted[POSTS], summed[POSTS], freed[POSTS];   // a post is written; its sum is stored; its flag is read
    u64 turn[PRODUCERS];
    Place next;
    Post posts[POSTS];
};

// One warp for its team; then all must meet.
__device__ __forceinline__ void init_team(Team& team) {
    for (int i = lane_id(); i < SLOTS; i += 32) {
        init_barrier(team.full + i, 1);
        init_barrier(team.empty + i, CONSUMERS);
    }
    for (int i = lane_id(); i < POSTS; i += 32) {
        init_barrier(team.posted + i, 1);
        init_barrier(team.summed + i, CONSUMERS);
        init_barrier(team.freed + i, 1);
    }
    if (lane_id() < PRODUCERS) init_barrier(team.turn + lane_id(), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (lane_id() == 0) {
        team.next = {0, 0, 0};
        arrive(shared_address(team.turn));
    }
}

// ---- producers -----------------------------------------------------------------------------------
__device__ __forceinline__ void hand_on(Team& team, int producer, Place next) {
    if (lane_id() != 0) return;
    team.next = next;
    arrive(shared_address(team.turn + (producer + 1) % PRODUCERS));
}
// Waits for producer's turn number `use`.
__device__ __forceinline__ Place await_turn(Team& team, int producer, u32 use) {
    await(shared_address(team.turn + producer), use & 1);
    Place place = team.next;
    __syncwarp();  // all lanes have read it before one of them hands it on
    return place;
}
// The post of this number, once its last use is over.
__device__ __forceinline__ Post& await_post(Team& team, u32 number) {
    await(shared_address(team.freed + number % POSTS), (number / POSTS & 1) ^ 1);
    return team.posts[number % POSTS];
}
__device__ __forceinline__ void announce_post(Team& team, u32 number) {
    __syncwarp();
    if (lane_id() == 0) arrive(shared_address(team.posted + number % POSTS));
}

// Posts a task and starts the copies of its rows, bytes [begin, end), in producer's turn number `use`.
__device__ __forceinline__ void post_task(Team& team, u32 buffers, const Gather& a, int producer, u32 use,
                                          const Task& task, int begin, int end) {
    u32 key = task.empty ? NO_SUMMAND : task.summands.key;
    u32 present = __ballot_sync(FULL_MASK, key != NO_SUMMAND);
    int low = __popc(__ballot_sync(FULL_MASK, key != NO_SUMMAND && (int)(key / 32) < a.me));
    int own = __popc(__ballot_sync(FULL_MASK, key != NO_SUMMAND && (int)(key / 32) == a.me));
    int all = __popc(present), order = 0;  // order: this lane's summand among all
    for (u32 m = present; m; m &= m - 1) order += __shfl_sync(FULL_MASK, key, __ffs(m) - 1) < key;
    if (key == NO_SUMMAND) order = -1;

    Place place = await_turn(team, producer, use);
    if (task.empty) {
        hand_on(team, producer, place);
        return;
    }
    u32 number = place.post++;
    Post& post = await_post(team, number);
    if (lane_id() == 0) {
        post.target = task.target;
        post.flag = task.flag;
        post.low = low;
        post.own = own;
        post.all = all;
        post.begin = begin;
        post.end = end;
    }
    if (WEIGHTED && order >= 0) post.weight[order] = task.summands.weight;
    announce_post(team, number);
    if (all == 0 || begin >= end) hand_on(team, producer, place);
    // One row after the other, so that none waits for the slot of the next.
    for (int chunk = begin; all > 0 && chunk < end; chunk += CHUNK_BYTES) {
        u32 bytes = (u32)(end - chunk < CHUNK_BYTES ? end - chunk : CHUNK_BYTES);
#pragma unroll 1
        for (int i = 0; i < all; ++i) {
            u32 slot = place.slot, bar = shared_address(team.full + slot);
            await(shared_address(team.empty + slot), (place.lap & 1) ^ 1);
            __syncwarp();  // a lane that came late could find the slot filled and emptied again, and wait on
            if (++place.slot == SLOTS) {
                place.slot = 0;
                ++place.lap;
            }
            if (i == all - 1 && end - chunk <= CHUNK_BYTES) hand_on(team, producer, place);
            if (order == i) {
                arrive_expecting(bar, bytes);
                copy_row(buffers + slot * CHUNK_BYTES, task.summands.address + chunk, bytes, bar);
            }
        }
    }
}
__device__ __forceinline__ void post_end(Team& team, int producer, u32 use) {
    u32 number = await_turn(team, producer, use).post;
    Post& post = await_post(team, number);
    if (lane_id() == 0) {
        post.flag = nullptr;
        post.begin = -1;
    }
    announce_post(team, number);
}
__device__ __forceinline__ void produce(Team& team, u32 buffers, const Gather& a, const int* token_counts_P, int rounds,
                                        int lag, int workers, int w, int producer) {
    Schedule s = first_task();
    u32 n = 0;  // number of the task at which s stands; those of this producer have n % PRODUCERS == producer
    bool more = step(s, a, token_counts_P, rounds, lag, workers, w);
    auto seek = [&]() {
        for (; more && n % PRODUCERS != producer; ++n) more = step(s, a, token_counts_P, rounds, lag, workers, w);
        if (more) load_entries(s, a);
    };
    seek();
    while (more) {
        Task task = make_task(a, s);
        // Peers wrote their sums with ordinary stores, the copy engine reads them. Each lane has waited for the sum
        // that it copies.
        if (s.taking) asm volatile("fence.proxy.async.global;" ::: "memory");
        int begin = segment_start(a.H, s.seg, a.nseg) * ITEM_BYTES;
        int end = segment_start(a.H, s.seg + 1, a.nseg) * ITEM_BYTES;
        u32 use = n++ / PRODUCERS;
        more = step(s, a, token_counts_P, rounds, lag, workers, w);
        seek();  // the next task's entries are on their way while this one's rows are waiting for slots
        post_task(team, buffers, a, producer, use, task, begin, end);
    }
    if (n % PRODUCERS == producer) post_end(team, producer, n / PRODUCERS);
}

// ---- flags ---------------------------------------------------------------------------------------
// A release waits until the stores before it have drained, which takes microseconds over the link. So one lane each
// raises the flags of all sums that are ready, and the posts are free again before that.
__device__ __forceinline__ void raise_flags(Team& team, int epoch) {
    bool stop = false;
    for (u32 n = 0; !stop;) {
        await(shared_address(team.summed + n % POSTS), n / POSTS & 1);
        int* mine = nullptr;
        u32 count = 0;
        do {
            const Post& post = team.posts[n % POSTS];
            stop = post.begin < 0;
            if (lane_id() == count++) mine = post.flag;
            __syncwarp();
            if (lane_id() == 0) arrive(shared_address(team.freed + n % POSTS));
            ++n;
        } while (!stop && count < 32 &&
                 __all_sync(FULL_MASK, is_over(shared_address(team.summed + n % POSTS), n / POSTS & 1)));
        if (mine) store_release(mine, epoch);
        __syncwarp();
    }
}

// ---- consumers -----------------------------------------------------------------------------------
struct Ring {
    u32 rows, full, empty;  // shared addresses: of this lane's first vector in slot 0, of the barriers
    u32 slot, parity;
};
// acc += (weight *) the next `count` rows of the ring, in order.
__device__ __forceinline__ void add(float (*acc)[VEC_ITEMS], Ring& r, int count, const float* weight) {
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        await(r.full + r.slot * 8, r.parity);
        float w = weight ? weight[n] : 1.0f;
        Vec x[VECS];
#pragma unroll
        for (int u = 0; u < VECS; ++u) x[u] = load_shared(r.rows + r.slot * CHUNK_BYTES + u * 512);
#pragma unroll
        for (int u = 0; u < VECS; ++u) {
            float f[VEC_ITEMS];
            unpack(x[u], f);
#pragma unroll
            for (int i = 0; i < VEC_ITEMS; ++i) acc[u][i] = __fadd_rn(acc[u][i], weight ? __fmul_rn(w, f[i]) : f[i]);
        }
        __syncwarp();
        if (lane_id() == 0) arrive(r.empty + r.slot * 8);
        if (++r.slot == SLOTS) {
            r.slot = 0;
            r.parity ^= 1;
        }
    }
}
// `slice`: place of this lane's first vector in a chunk. Behind the end of a row a slot holds old bytes, whose sum
// is not stored.
__device__ __forceinline__ void sum_task(const Post& post, Ring& r, int slice) {
    int low = post.low, own_rows = post.own, high = post.all - low - own_rows, end = post.end;
    u64 target = post.target;
    for (int chunk = post.begin; chunk < end; chunk += CHUNK_BYTES) {
        float own[VECS][VEC_ITEMS], total[VECS][VEC_ITEMS];
#pragma unroll
        for (int u = 0; u < VECS; ++u)
#pragma unroll
            for (int i = 0; i < VEC_ITEMS; ++i) own[u][i] = total[u][i] = 0.0f;
        add(total, r, low, nullptr);
        add(own, r, own_rows, WEIGHTED ? post.weight + low : nullptr);
        if (own_rows)
#pragma unroll
            for (int u = 0; u < VECS; ++u)
#pragma unroll
                for (int i = 0; i < VEC_ITEMS; ++i) total[u][i] = __fadd_rn(total[u][i], round_to_payload(own[u][i]));
        add(total, r, high, nullptr);
#pragma unroll
        for (int u = 0; u < VECS; ++u) {
            int at = chunk + slice + u * 512;
            if (at < end) *(Vec*)(target + at) = pack(total[u]);
        }
    }
}
__device__ __forceinline__ void consume(Team& team, u32 buffers, int consumer) {
    int slice = consumer * VECS * 512 + lane_id() * 16;
    Ring r = {buffers + slice, shared_address(team.full), shared_address(team.empty), 0, 0};
    bool stop = false;
    for (u32 n = 0; !stop; ++n) {
        await(shared_address(team.posted + n % POSTS), n / POSTS & 1);
        const Post& post = team.posts[n % POSTS];
        stop = post.begin < 0;
        if (!stop) sum_task(post, r, slice);
        __syncwarp();
        if (lane_id() == 0) arrive(shared_address(team.summed + n % POSTS));
    }
}

// grid <= SMs, block THREADS, dynamic shared TEAMS * SLOTS * CHUNK_BYTES (and less than 4 KB a team of static).
// Parameters as in gather.cu, but a negative lag stands for this part of the rounds, MOST_LAG at most: -8 is an eighth
// of them.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_sum_ring(GATHER_PARAMETERS) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Team teams[TEAMS];
    int warp = threadIdx.x / 32, which = warp / TEAM_WARPS, role = warp % TEAM_WARPS;
    Team& team = teams[which];
    u32 buffers = shared_address(memory) + which * (SLOTS * CHUNK_BYTES);
    if (role == 0) init_team(team);
    __syncthreads();
    GATHER_BEGIN(TEAMS, which)
    if (role < PRODUCERS) {
        if (lag < 0) {
            lag = rounds > -lag ? (rounds - 1) / -lag + 1 : 1;
            lag = lag < MOST_LAG ? lag : MOST_LAG;
        }
        await_peers(peers, me, P, state, epoch, timeout_ns, OP_GATHER);
        produce(team, buffers, a, token_counts_P, rounds, lag, workers, w, role);
    } else if (role == PRODUCERS) {
        raise_flags(team, epoch);
    } else {
        consume(team, buffers, role - PRODUCERS - 1);
    }
    finish_operation(state);
}
