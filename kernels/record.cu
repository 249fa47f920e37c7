// What a dispatch needed, entered into the record that the host reads once a step: ep_comm.ledger.DispatchRecord.
// One block.
#include "common.cuh"

#define HEADER_WORDS 10  // ep_comm.status: status words of a rank's message, the fault's from WORD_FAULT on
#define WORD_FAULT 5
#define FAULT_WORDS 5
#define THREADS 256

enum RecordWord { OVERFLOW, PAIR_PEAK, TOKENS_SENT, FAULT_RANK, FAULT, REQUIRED = FAULT + FAULT_WORDS };

//   matrix_PX      int32 [P, X], the messages of all ranks: status words, tokens for each rank, ...
//   overflow       `overflow_bytes` (1 or 4) bytes, not zero if something did not fit
//   words          int64 [REQUIRED + P], or null: only `sent` is wanted
//   sent           int64 [1], tokens that this rank has sent so far
extern "C" __global__ void __launch_bounds__(THREADS)
note_dispatch(const int* __restrict__ matrix_PX, int X, const i64* __restrict__ required_P,
              const u8* __restrict__ overflow, int overflow_bytes, i64* words, i64* sent, int me, int P) {
    __shared__ int peak, first;
    __shared__ u64 total;
    if (threadIdx.x == 0) {
        peak = 0;
        total = 0;
        first = P;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < P * P; i += THREADS) {
        int from = i / P, to = i % P, tokens = matrix_PX[(i64)from * X + HEADER_WORDS + to];
        atomicMax(&peak, tokens);
        if (from == me && to != me) atomicAdd(&total, (u64)tokens);
        if (to == 0 && matrix_PX[(i64)from * X + WORD_FAULT] != 0) atomicMin(&first, from);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *sent += (i64)total;
        if (words) {
            int over = overflow_bytes == 4 ? *(const int*)overflow : *overflow;
            if (over) words[OVERFLOW] = 1;
            if (peak > words[PAIR_PEAK]) words[PAIR_PEAK] = peak;
            words[TOKENS_SENT] += (i64)total;
            if (first < P && words[FAULT_RANK] < 0) {
                words[FAULT_RANK] = first;
                for (int i = 0; i < FAULT_WORDS; ++i) words[FAULT + i] = matrix_PX[(i64)first * X + WORD_FAULT + i];
            }
        }
    }
    if (words)
        for (int p = threadIdx.x; p < P; p += THREADS)
            if (required_P[p] > words[REQUIRED + p]) words[REQUIRED + p] = required_P[p];
}
