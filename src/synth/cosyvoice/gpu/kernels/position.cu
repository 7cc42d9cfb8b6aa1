// Position convolutions on Hopper, by warpgroup MMAs. Continues flow.cu.
//
// A block has a group of 64 channels of POSITION_SEQUENCES rows of chunks. A warpgroup has one row, with the end of what came before it, in
// shared memory, and takes the inputs of every tap from there into registers. The weights of a tap are one copy into a
// ring that the warpgroups share: what a multiprocessor takes in is the limit, and they are most of it.
//
// Weights: [group][tap][64 outputs][64 inputs], pieces of 16 bytes swizzled. POSITION_TAPS: taps.
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL) && BLOCK <= 64
#define POSITION_SEQUENCES 2
#define POSITION_STAGES 6
#define POSITION_PART (64 * 128) // weights of a tap
#define POSITION_ROWS ((64 + POSITION_TAPS - 1 + 7) / 8 * 8) // an MMA reads some past the last, which do not count
KERNEL __launch_bounds__(128 * POSITION_SEQUENCES + 32, 2) flow_position(const elt* x, const elt* w, const float* bias, const u64* hist, i64 off, const float* post, float* out, elt* oute, int rows) {
    extern __shared__ __align__(1024) unsigned char position_smem[];
    constexpr int BEFORE = POSITION_TAPS - 1, WARPS = 4 * POSITION_SEQUENCES;
    dep_go();
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), column = blockIdx.x * 64;
    const u32 ring = smem_addr(position_smem), full = ring + POSITION_STAGES * POSITION_PART + POSITION_SEQUENCES * POSITION_ROWS * 128, empty = full + POSITION_STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < POSITION_STAGES; i++) { bar_init(full + i * 8, 1); bar_init(empty + i * 8, WARPS); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) {
            int slot = 0, phase = 1;
            for (int tap = 0; tap < POSITION_TAPS; tap++) {
                if (tap >= POSITION_STAGES) bar_wait(empty + slot * 8, phase);
                bar_expect(full + slot * 8, POSITION_PART);
                bulk_copy(ring + slot * POSITION_PART, w + ((i64)blockIdx.x * POSITION_TAPS + tap) * 64 * 64, POSITION_PART, full + slot * 8);
                if (++slot == POSITION_STAGES) { slot = 0; phase ^= 1; }
            }
        }
        return;
    }
    const int wg = warp >> 2, row = blockIdx.y * POSITION_SEQUENCES + wg;
    const bool mine = row < rows;
    const u32 at = POSITION_STAGES * POSITION_PART + wg * POSITION_ROWS * 128, tile = ring + at;
    dep_wait();
    elt* before = (elt*)hist[mine ? row : 0] + off + column;
    x += (i64)(mine ? row : 0) * BLOCK * DIM + column;
#pragma unroll
    for (int i = tid; i < (BEFORE + BLOCK) * 8; i += 128) {
        const int r = i >> 3, q = i & 7;
        cp16(tile + r * 128 + ((q ^ (r & 7)) << 4), (r < BEFORE ? before + r * DIM : x + (i64)(r - BEFORE) * DIM) + q * 8, true);
    }
    cp_commit();
    cp_wait<0>();
    asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory");
    // The end of this chunk is what comes before the next.
    if (mine)
        for (int i = tid; i < BEFORE * 8; i += 128) {
            const int r = i >> 3, q = i & 7, from = BLOCK + r;
            *(uint4*)(before + r * DIM + q * 8) = *(const uint4*)(position_smem + at + from * 128 + ((q ^ (from & 7)) << 4));
        }
    float acc[32];
    uint4 a[2][4];
    const int mrow = (warp & 3) * 16;
    auto fetch = [&](uint4* to, int tap) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int r = mrow + tap + (lane & 15), q = k * 2 + (lane >> 4);
            ldm4(tile + r * 128 + ((q ^ (r & 7)) << 4), to[k].x, to[k].y, to[k].z, to[k].w);
        }
    };
    const u64 shape = (1ull << 16) | (64ull << 32) | (1ull << 62);
    int slot = 0, last = 0, phase = 0;
    auto step = [&](int tap, const uint4* now, uint4* next) {
        bar_wait(full + slot * 8, phase);
        const u64 b = (u64)((ring + slot * POSITION_PART) >> 4) | shape;
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) group_mma_rows<0>(acc, now[k], b + 2 * k, tap > 0 || k > 0);
        group_commit();
        // The tap before this one has been multiplied: its registers and its weights' place are free.
        group_wait<1>();
        if (tap > 0 && lane == 0) bar_arrive(empty + last * 8);
        __syncwarp();
        if (tap + 1 < POSITION_TAPS) fetch(next, tap + 1);
        last = slot;
        if (++slot == POSITION_STAGES) { slot = 0; phase ^= 1; }
    };
    fetch(a[0], 0);
#pragma unroll 1
    for (int tap = 0; tap < POSITION_TAPS; tap += 2) {
        step(tap, a[0], a[1]);
        if (tap + 1 < POSITION_TAPS) step(tap + 1, a[1], a[0]);
    }
    group_wait();
    if (!mine) return;
    const int f0 = mrow + (lane >> 2);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int f = f0 + e * 8;
        if (f >= BLOCK) continue;
        const i64 to = ((i64)row * BLOCK + f) * DIM + column + 2 * (lane & 3);
        float2 late[8];
#pragma unroll
        for (int n = 0; n < 8; n++) late[n] = post ? *(const float2*)(post + to + n * 8) : make_float2(0.f, 0.f);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 b = *(const float2*)(bias + column + n * 8 + 2 * (lane & 3));
            const float u = mish(acc[n * 4 + e * 2] + b.x) + late[n].x, v = mish(acc[n * 4 + e * 2 + 1] + b.y) + late[n].y;
            if (out) *(float2*)(out + to + n * 8) = make_float2(u, v);
            if (oute) store2(oute + to + n * 8, u, v);
        }
    }
}
#endif
