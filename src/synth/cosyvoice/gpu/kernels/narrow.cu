// Skinny GEMMs of the flow by warpgroup MMAs, on Hopper: y = act(x w^T + bias). Continues flow.cu.
//
// A block makes N outputs of the BLOCK frames of one row of a chunk, or of two rows. Its weights are copied to shared memory before
// the launch before has ended; of its activations as many as there is room for are asked for at once after that, and multiplied as
// they come. Two warpgroups share the inputs of a row. Where there would be too few blocks, PARTS of them share the inputs' axis, and
// the norm that follows adds up what they found (`flow_norm_shares`). Where there would be so many that a multiprocessor runs two
// after each other, those of two rows are fewer, and read their weights once.
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL) && BLOCK <= 56
#define NARROW_X (56 * 128) // bytes of the frames' 64 inputs; an MMA reads eight rows more, which do not count

// CH: steps of 64 inputs of a warpgroup. ROWS: rows of chunks of a block. y: [rows][n]; SHARED: [part][rows][n] singles, without bias.
// `rows`: frames of all rows of chunks.
template <int N, int CH, bool SHARED, int ROWS>
DEV void narrow(const elt* x, const elt* w, const float* bias, void* y, i64 stride, int rows, int n, int k, int activate) {
    extern __shared__ __align__(1024) unsigned char narrow_smem[];
    // Of two rows only four steps' activations have room beside the weights.
    constexpr int WEIGHTS = N * 128, HALF = N / 4, STAGES = ROWS == 1 || CH < 4 ? CH : 4;
    dep_go();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    // Which half of the inputs, and of which row.
    const int group = warpgroup & 1, own = warpgroup >> 1;
    const u32 x_s = smem_addr(narrow_smem) + warpgroup * STAGES * NARROW_X;
    const u32 w_s = smem_addr(narrow_smem) + 2 * ROWS * STAGES * NARROW_X + group * CH * WEIGHTS;
    const int n0 = blockIdx.x * N, k0 = ((SHARED ? blockIdx.z * 2 : 0) + group) * CH * 64;
    // A row behind the last one is computed as that, and not stored.
    const int row = blockIdx.y * ROWS + own, last_row = rows / BLOCK - 1;
    const i64 row0 = (i64)min(row, last_row) * BLOCK;
    // Rows of 64 inputs as warpgroup MMAs take them: pieces of 16 bytes, swizzled.
    for (int i = tid + own * 128; i < N * 8; i += 128 * ROWS) {
        const int o = i >> 3, p = i & 7;
        const elt* from = w + (i64)(n0 + o) * k + k0 + p * 8;
#pragma unroll
        for (int c = 0; c < CH; c++) cp16(w_s + c * WEIGHTS + o * 128 + ((p ^ (o & 7)) << 4), from + c * 64, true);
    }
    cp_commit();
    const int col = n0 + group * (N / 2) + 2 * (lane & 3);
    float2 b[HALF / 4];
    if (!SHARED)
#pragma unroll
        for (int j = 0; j < HALF / 4; j++) b[j] = *(const float2*)(bias + col + j * 8);
    // Where a thread's pieces of the first 64 inputs lie and go is found before the wait: what is left after it is copies alone.
    constexpr int PIECES = (BLOCK * 8 + 127) / 128;
    const bool last = tid + (PIECES - 1) * 128 < BLOCK * 8;
    const elt* from[PIECES];
    u32 to[PIECES];
#pragma unroll
    for (int m = 0; m < PIECES; m++) {
        const int i = min(tid + m * 128, BLOCK * 8 - 1), t = i >> 3, p = i & 7;
        from[m] = x + (row0 + t) * k + k0 + p * 8;
        to[m] = x_s + t * 128 + ((p ^ (t & 7)) << 4);
        asm volatile("" : "+l"(from[m]), "+r"(to[m]));
    }
    auto load = [&](int c) {
#pragma unroll
        for (int m = 0; m < PIECES; m++)
            if (m < PIECES - 1 || last) cp16(to[m] + c % STAGES * NARROW_X, from[m] + c * 64, true);
        cp_commit();
    };
    dep_wait();
#pragma unroll
    for (int c = 0; c < STAGES; c++) load(c);
    float acc[N / 2] = {};
    const u64 shape = (1ull << 16) | (64ull << 32) | (1ull << 62);
    // Two steps, once no more than `cp_wait` says of those after them are still in flight: a fence and a barrier cost what a
    // step does.
    auto two = [&](int first) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        // All who copied weights, which are the same for both rows.
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(128 * ROWS) : "memory");
        group_fence();
#pragma unroll
        for (int c = first; c < first + 2; c++) {
            const u64 a = (u64)((x_s + c % STAGES * NARROW_X) >> 4) | shape, v = (u64)((w_s + c * WEIGHTS) >> 4) | shape;
#pragma unroll
            for (int q = 0; q < 4; q++) group_mma<N>(acc, a + 2 * q, v + 2 * q, c > 0 || q > 0);
        }
        group_commit();
    };
    // Steps behind those that there is room for, once what was in their place is multiplied.
    auto refill = [&](int first) {
        group_wait();
        asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 3) : "memory");
        load(first);
        load(first + 1);
    };
    if constexpr (CH == 8 && STAGES == 8) { cp_wait<6>(); two(0); cp_wait<4>(); two(2); }
    if constexpr (CH == 8 && STAGES == 4) { cp_wait<2>(); two(0); refill(4); cp_wait<2>(); two(2); refill(6); }
    if constexpr (CH >= 4) { cp_wait<2>(); two(CH - 4); }
    cp_wait<0>();
    two(CH - 2);
    group_wait();
    __syncthreads();
    // Each warpgroup adds up half of the outputs.
    float* sums = (float*)narrow_smem + own * N / 2 * 128 + tid;
#pragma unroll
    for (int i = 0; i < HALF; i++) sums[((1 - group) * HALF + i) * 128] = group ? acc[i] : acc[HALF + i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HALF; i++) acc[i] = (group ? acc[HALF + i] : acc[i]) + sums[(group * HALF + i) * 128];
    if (row > last_row) return;
    const int f0 = warp * 16 + (lane >> 2);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int f = f0 + e * 8;
        if (f >= BLOCK) continue;
#pragma unroll
        for (int j = 0; j < HALF / 4; j++) {
            float s = acc[j * 4 + e * 2], t = acc[j * 4 + e * 2 + 1];
            const i64 at = (row0 + f) * n + col + j * 8;
            if (SHARED) {
                *(float2*)((float*)y + blockIdx.z * stride + at) = make_float2(s, t);
                continue;
            }
            s += b[j].x;
            t += b[j].y;
            if (activate) { s = gelu(s); t = gelu(t); }
            store2((elt*)y + at, s, t);
        }
    }
}
// names: outputs of a block, then inputs; of those that share the inputs, of one of them; then rows of chunks, if two
#define NARROW(NAME, N, CH, SHARED, ROWS) \
    KERNEL __launch_bounds__(256 * ROWS) NAME(const elt* x, const elt* w, const float* bias, void* y, i64 stride, int rows, int n, int k, int activate) { \
        narrow<N, CH, SHARED, ROWS>(x, w, bias, y, stride, rows, n, k, activate); \
    }
NARROW(narrow_48x1024, 48, 8, false, 1)
NARROW(narrow_32x1024, 32, 8, false, 1)
NARROW(shared_64x256, 64, 2, true, 1)
NARROW(shared_64x512, 64, 4, true, 1)
NARROW(narrow_48x1024_2, 48, 8, false, 2)
NARROW(narrow_32x1024_2, 32, 8, false, 2)
NARROW(shared_64x256_2, 64, 2, true, 2)
NARROW(shared_64x512_2, 64, 4, true, 2)
#endif
