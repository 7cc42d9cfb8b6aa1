// Skinny GEMMs of the flow by warpgroup MMAs, on Hopper: y = act(x w^T + bias). Continues flow.cu.
//
// A block makes N outputs of the BLOCK frames of one row of a chunk. Its weights are copied to shared memory before
// the launch before has ended; of its activations all are asked for at once after that, and multiplied as they come. Two
// warpgroups share its inputs. Where there would be too few blocks, PARTS of them share the inputs' axis, and the norm
// that follows adds up what they found (`flow_norm_shares`).
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL) && BLOCK <= 56
#define NARROW_X (56 * 128) // bytes of the frames' 64 inputs; an MMA reads eight rows more, which do not count

// CH: steps of 64 inputs of a warpgroup. y: [rows][n]; SHARED: [part][rows][n] singles, without bias.
template <int N, int CH, bool SHARED> DEV void narrow(const elt* x, const elt* w, const float* bias, void* y, i64 stride, int n, int k, int activate) {
    extern __shared__ __align__(1024) unsigned char narrow_smem[];
    constexpr int WEIGHTS = N * 128, HALF = N / 4;
    dep_go();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    const u32 x_s = smem_addr(narrow_smem) + group * CH * NARROW_X, w_s = smem_addr(narrow_smem) + 2 * CH * NARROW_X + group * CH * WEIGHTS;
    const int n0 = blockIdx.x * N, k0 = ((SHARED ? blockIdx.z * 2 : 0) + group) * CH * 64;
    const i64 row0 = (i64)blockIdx.y * BLOCK;
    // Rows of 64 inputs as warpgroup MMAs take them: pieces of 16 bytes, swizzled.
    for (int i = tid; i < N * 8; i += 128) {
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
    dep_wait();
#pragma unroll
    for (int c = 0; c < CH; c++) {
#pragma unroll
        for (int m = 0; m < PIECES; m++)
            if (m < PIECES - 1 || last) cp16(to[m] + c * NARROW_X, from[m] + c * 64, true);
        cp_commit();
    }
    float acc[N / 2] = {};
    const u64 shape = (1ull << 16) | (64ull << 32) | (1ull << 62);
    // Two steps, once no more than `cp_wait` says of those after them are still in flight: a fence and a barrier cost what a
    // step does.
    auto two = [&](int first) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        group_fence();
#pragma unroll
        for (int c = first; c < first + 2; c++) {
            const u64 a = (u64)((x_s + c * NARROW_X) >> 4) | shape, v = (u64)((w_s + c * WEIGHTS) >> 4) | shape;
#pragma unroll
            for (int q = 0; q < 4; q++) group_mma<N>(acc, a + 2 * q, v + 2 * q, c > 0 || q > 0);
        }
        group_commit();
    };
    if constexpr (CH == 8) { cp_wait<6>(); two(0); cp_wait<4>(); two(2); }
    if constexpr (CH >= 4) { cp_wait<2>(); two(CH - 4); }
    cp_wait<0>();
    two(CH - 2);
    group_wait();
    __syncthreads();
    // Each warpgroup adds up half of the outputs.
    float* sums = (float*)narrow_smem + tid;
#pragma unroll
    for (int i = 0; i < HALF; i++) sums[((1 - group) * HALF + i) * 128] = group ? acc[i] : acc[HALF + i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < HALF; i++) acc[i] = (group ? acc[HALF + i] : acc[i]) + sums[(group * HALF + i) * 128];
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
// names: outputs of a block, then inputs; of those that share the inputs, of one of them
#define NARROW(NAME, N, CH, SHARED) \
    KERNEL __launch_bounds__(256) NAME(const elt* x, const elt* w, const float* bias, void* y, i64 stride, int n, int k, int activate) { narrow<N, CH, SHARED>(x, w, bias, y, stride, n, k, activate); }
NARROW(narrow_48x1024, 48, 8, false)
NARROW(narrow_32x1024, 32, 8, false)
NARROW(shared_64x256, 64, 2, true)
NARROW(shared_64x512, 64, 4, true)
#endif
