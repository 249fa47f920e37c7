// What every kernel shares: element types, vectors, system-scope flags, epochs, waiting with a timeout.
//
// Compile-time options (all through -D):
//   DTYPE       0 = float32, 1 = bfloat16, 2 = float16: the elements of token rows
//   VEC_BYTES   16, 8, 4 or 2: bytes of one access; at least an element, divides a row's bytes and all addresses
//
// No header of the toolkit is included, so NVRTC compiles this anywhere.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef DTYPE
#define DTYPE 1
#endif
#ifndef VEC_BYTES
#define VEC_BYTES 16
#endif

#define FULL_MASK 0xffffffffu
#define ITEM_BYTES (DTYPE == 0 ? 4 : 2)
#define MAX_SEGMENTS 16    // arrival flags of one token row
#ifndef UNIT
#define UNIT 1024          // elements: a row is cut into segments at multiples of this; equal on all ranks
#endif

// ---- state words of one rank (local memory, int32) ---------------------------------------------
#define STATE_EPOCH 0      // operations this rank has finished on the window
#define STATE_EXITS 1      // blocks of the running kernel that are done
#define STATE_TICKET 2     // blocks of the running plan that have counted
#define STATE_ERROR 3      // 0, or the operation whose wait timed out first
#define STATE_ERROR_PEER 4
#define STATE_ERROR_EPOCH 5

// ---- bytes 0.. of every rank's window -----------------------------------------------------------
#define MAX_RANKS 64
#define READY_OFFSET 0     // int32 [MAX_RANKS]: epoch that rank r has entered
#define COUNTED_OFFSET 256 // int32 [MAX_RANKS]: epoch whose counts rank r has delivered

enum Operation { OP_PLAN = 1, OP_SCATTER = 2, OP_GATHER = 3, OP_BARRIER = 4 };

__device__ __forceinline__ u32 lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ u32 lanes_below() { return (1u << lane_id()) - 1; }

// ---- flags ---------------------------------------------------------------------------------------
__device__ __forceinline__ int load_acquire(const int* p) {
    int v;
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_release(int* p, int v) {
    asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u64 global_timer() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Waits until *flag has reached epoch. False after timeout_ns, or as soon as any wait of this rank has
// timed out: the first one leaves the operation, the peer and the epoch in state, for the host to raise.
__device__ __noinline__ bool wait_slow(const int* flag, int epoch, int* state, i64 timeout_ns, int op, int peer) {
    u64 start = global_timer();
    for (;;) {
        for (int i = 0; i < 64; ++i)
            if (load_acquire(flag) - epoch >= 0) return true;
        if (*(volatile int*)(state + STATE_ERROR)) return false;
        if ((i64)(global_timer() - start) > timeout_ns) {
            if (atomicCAS(state + STATE_ERROR, 0, op) == 0) {
                state[STATE_ERROR_PEER] = peer;
                state[STATE_ERROR_EPOCH] = epoch;
            }
            return false;
        }
    }
}
__device__ __forceinline__ bool wait_for(const int* flag, int epoch, int* state, i64 timeout_ns, int op, int peer) {
    if (load_acquire(flag) - epoch >= 0) return true;
    return wait_slow(flag, epoch, state, timeout_ns, op, peer);
}

// The epoch of the running operation. Counted in memory, not by the host, so that a replayed graph
// counts on; it moves only when the last block has left (finish_operation).
__device__ __forceinline__ int current_epoch(const int* state) {
    return *(const volatile int*)(state + STATE_EPOCH) + 1;
}

// Tells every peer that this rank has entered the operation: everything it did before on its window is over
// and visible, and its window may be written. All threads of all blocks; P <= blockDim.x.
__device__ __forceinline__ void announce(const u64* peers, int me, int P, int epoch) {
    int r = threadIdx.x;
    if (blockIdx.x == 0 && r < P && r != me) store_release((int*)(peers[r] + READY_OFFSET) + me, epoch);
}
// Waits, a warp at a time, until every peer has entered the operation.
__device__ __forceinline__ void await_peers(const u64* peers, int me, int P, int* state, int epoch,
                                            i64 timeout_ns, int op) {
    for (int r = lane_id(); r < P; r += 32)
        if (r != me) wait_for((const int*)(peers[me] + READY_OFFSET) + r, epoch, state, timeout_ns, op, r);
    __syncwarp();
}
__device__ __forceinline__ void finish_operation(int* state) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(state + STATE_EXITS, 1) == (int)gridDim.x - 1) {
            state[STATE_EXITS] = 0;
            atomicAdd(state + STATE_EPOCH, 1);
        }
    }
}

// ---- vectors of VEC_BYTES ------------------------------------------------------------------------
#if VEC_BYTES == 16
typedef uint4 Vec;
__device__ __forceinline__ Vec load_vec(const Vec* p) {
    Vec v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
#else
#if VEC_BYTES == 8
typedef uint2 Vec;
#elif VEC_BYTES == 4
typedef u32 Vec;
#else
typedef u16 Vec;
#endif
__device__ __forceinline__ Vec load_vec(const Vec* p) {
#if VEC_BYTES == 8
    Vec v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
#else
    return *(const volatile Vec*)p;
#endif
}
#endif
#define VEC_ITEMS (VEC_BYTES / ITEM_BYTES)

__device__ __forceinline__ uint2 load_8(const void* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_16(const void* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// ---- elements ------------------------------------------------------------------------------------
// Which NaN comes out of a conversion is left to the hardware; all other values are those of the CPU.
__device__ __forceinline__ float f16_to_float(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}
__device__ __forceinline__ float half_to_float(u32 bits) {
    return DTYPE == 1 ? __uint_as_float(bits << 16) : f16_to_float(bits);
}
// Two elements of 16 bits, the first in the low half.
__device__ __forceinline__ u32 to_half_pair(float low, float high) {
    u32 pair;
    if (DTYPE == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ void from_half_pair(u32 pair, float* f) {
    f[0] = half_to_float(pair & 0xffff);
    f[1] = DTYPE == 1 ? __uint_as_float(pair & 0xffff0000u) : half_to_float(pair >> 16);
}
// x as it reads after it was stored in the payload dtype.
__device__ __forceinline__ float round_to_payload(float x) {
    return DTYPE == 0 ? x : half_to_float(to_half_pair(x, 0.0f) & 0xffff);
}

// Unpacks a Vec into VEC_ITEMS floats, and back.
__device__ __forceinline__ void unpack(const Vec& v, float* f) {
#if VEC_BYTES >= 4
    const u32* w = reinterpret_cast<const u32*>(&v);
#pragma unroll
    for (int i = 0; i < VEC_BYTES / 4; ++i) {
        if (DTYPE == 0) f[i] = __uint_as_float(w[i]);
        else from_half_pair(w[i], f + 2 * i);
    }
#else
    f[0] = half_to_float(v);
#endif
}
__device__ __forceinline__ Vec pack(const float* f) {
    Vec v;
#if VEC_BYTES >= 4
    u32* w = reinterpret_cast<u32*>(&v);
#pragma unroll
    for (int i = 0; i < VEC_BYTES / 4; ++i)
        w[i] = DTYPE == 0 ? __float_as_uint(f[i]) : to_half_pair(f[2 * i], f[2 * i + 1]);
#else
    v = (Vec)to_half_pair(f[0], 0.0f);
#endif
    return v;
}

// Segments in which a row of H elements is moved: `segments` where a rank has 8,192 tokens, more where there
// are fewer, so that few tokens still fill the chip. Depends only on what all ranks know, because sender and
// receiver must cut alike.
__device__ __forceinline__ int segments_of(int H, int most_tokens, int segments) {
    int units = (H + UNIT - 1) / UNIT, most = most_tokens > 0 ? most_tokens : 1;
    int want = (segments * 8192 + most - 1) / most;
    want = want > 1 ? want : 1;
    want = want < units ? want : units;
    return want < MAX_SEGMENTS ? want : MAX_SEGMENTS;
}
// First element of segment s of n.
__device__ __forceinline__ int segment_start(int H, int s, int n) {
    int units = (H + UNIT - 1) / UNIT, start = units * s / n * UNIT;
    return start < H ? start : H;
}
