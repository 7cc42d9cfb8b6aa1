// Run once at load: weights into the layouts of gemm.cu, and small exact GEMMs.

// Places src [n][cin][taps] into packed weights of `npad` outputs and `cinpad` channels a group. Output i becomes
// row i*mul + off. Groups narrower than a block of outputs are merged: channel c of output i lies at
// c + (i / coutg % merge) * cin.
KERNEL pack(const float* src, elt* dst, const float* colscale, int n, int cin, int taps, int cinpad, int npad, int mul, int off, int coutg, int merge) {
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i >= (i64)n * cin * taps) return;
    int tap = i % taps, c = i / taps % cin, o = i / ((i64)taps * cin);
    float v = src[i];
    if (colscale) v *= colscale[c];
    if (merge > 1) c += o / coutg % merge * cin;
    o = o * mul + off;
#if ELT == 0
    dst[(i64)(tap * cinpad + c) * npad + o] = v;
#else
    int chunk = c >> 6, k16 = min(4, (cinpad - chunk * 64) >> 4), kk = c & 31;
    int kt = chunk * 4 * taps + tap * k16 + ((c & 63) >> 5) * 2 + ((kk & 7) >> 2);
    int j = o & 15, row = (j >> 1) + (j & 1) * 8;
    int lane = (row & 7) * 4 + (kk >> 3), reg = (row >> 3) + 2 * ((kk & 3) >> 1);
    i64 tile = o >> 4, tiles_k = (i64)(cinpad >> 4) * taps;
    dst[((tile * tiles_k + kt) * 32 + lane) * 8 + reg * 2 + (kk & 1)] = to_e(v);
#endif
}

#if ELT != 0
// The operand of warpgroup.cu that holds packed weights of `cin` inputs, a multiple of 64: tiled, `height` outputs high, of each
// 16 outputs the even ones first.
KERNEL tile_weights(const uint4* packed, elt* dst, int n, int cin, int height) {
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i >= (i64)n * cin / 8) return;
    const int lane = i & 31, k16 = (i >> 5) % (cin >> 4);
    const int tile = (i >> 5) / (cin >> 4);
    const uint4 v = packed[i];
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    for (int reg = 0; reg < 4; reg++) {
        const int row = (lane >> 2) + (reg & 1) * 8, col = (k16 >> 1) * 32 + (lane & 3) * 8 + (k16 & 1) * 4 + (reg >> 1) * 2;
        *(u32*)(dst + tiled(height, tile * 16 + row, col)) = words[reg];
    }
}
#endif

KERNEL convert(const float* src, elt* dst, i64 n) {
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i < n) dst[i] = to_e(src[i]);
}

#if __CUDA_ARCH__ >= 890
// An even number of values, times `by`, in 8 bits.
KERNEL convert_fp8(const float2* src, u16* dst, i64 pairs, float by) {
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i < pairs) dst[i] = pack2_fp8(src[i].x * by, src[i].y * by);
}
#endif

// y[m][n] = bias[n] + sum of x[m][k] w[n][k]; one warp a value.
KERNEL linear_exact(const float* x, const float* w, const float* bias, float* y, int m, int n, int k, i64 ldy) {
    i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) >> 5;
    int lane = threadIdx.x & 31;
    if (i >= (i64)m * n) return;
    int r = i / n, o = i % n;
    double s = 0;
    for (int c = lane; c < k; c += 32) s += (double)x[(i64)r * k + c] * w[(i64)o * k + c];
    for (int q = 16; q; q >>= 1) s += __shfl_xor_sync(~0u, s, q);
    if (lane == 0) y[r * ldy + o] = (float)(s + (bias ? bias[o] : 0.f));
}

// What a kernel can reach at most, measured beside it.
KERNEL __launch_bounds__(512) copy_ceiling(const uint4* a, uint4* b, i64 n) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) b[i] = a[i];
}

// Uniform values of deviation `dev`, for measuring without a checkpoint.
KERNEL random_fill(float* p, i64 n, u32 seed, float dev) {
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 x = ((u64)i + 1 + ((u64)seed << 36)) * 0x9E3779B97F4A7C15ull;
    x ^= x >> 30; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 27; x *= 0x94D049BB133111EBull; x ^= x >> 31;
    p[i] = ((float)(x >> 40) * (1.f / 8388608.f) - 1.f) * dev * 1.7320508f;
}
