// A barrier over all ranks of the window, on the device: everything this rank did in stream order before it
// is visible to what the peers do after it. One block of at least P threads.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(MAX_RANKS)
barrier(const u64* __restrict__ peers, int* state, i64 timeout_ns, int me, int P) {
    int epoch = current_epoch(state);
    announce(peers, me, P, epoch);
    if (threadIdx.x < 32) await_peers(peers, me, P, state, epoch, timeout_ns, OP_BARRIER);
    finish_operation(state);
}
