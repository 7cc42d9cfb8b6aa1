// Skinny GEMMs, whose sums those of many rows repeat to the bit (gemm.cu, warpgroup.cu), and what a norm divides by.
// Weights are packed as gemm.cu says, which this continues.
#if ELT != 0
// What the sixteen warps found for two outputs of a row: of eight rows, `half` is the second of each pair.
template <int NT> DEV float2 parts_sum(const float (*red)[NT][4][32], int eight, int half, int lane, bool paired) {
    float2 v = make_float2(0.f, 0.f);
#pragma unroll
    for (int q = 0; q < SPLITS; q += 2) {
        add_parts(v.x, red[q][eight][half][lane], red[q + 1][eight][half][lane], paired);
        add_parts(v.y, red[q][eight][2 + half][lane], red[q + 1][eight][2 + half][lane], paired);
    }
    return v;
}
// 1/rms of a row whose squares every warp has summed for its part.
template <int ROWS> DEV float inverse_rms(const Conv& p, const float (*sq)[ROWS], int row) {
    float z = 0.f;
#pragma unroll
    for (int q = 0; q < SPLITS; q++) z += sq[q][row];
    return rsqrtf(z / p.kreal + p.eps);
}

// What follows the sums: outputs n and n+1 of one row. Of activations the gate alone, as all others would make the code longer:
// a block runs it once or twice, and waits for it as it does for data.
DEV void skinny_epilogue(const Conv& p, int n, int row, float2 v, float rs, Added add) {
    float a = v.x * rs, b = v.y * rs;
    if (p.act == ACT_SILU_GATE) {
        p.oute[row * p.lde + (n >> 1)] = to_e(a * sigmoid(a) * b);
        return;
    }
    if (p.bias) { a += add.bias.x; b += add.bias.y; }
    if (p.res) { a += add.res.x; b += add.res.y; }
    if (p.out) *(float2*)(p.out + row * p.ldo + n) = make_float2(a, b);
    if (p.oute) store2(p.oute + row * p.lde + n, a, b);
}

// A block streams 16 outputs' weights straight into registers, its 16 warps share the inputs' axis. Then
// the next 16 outputs, whose first weights are in flight while the sums of these are added up.
// U: groups of 32 inputs in flight.
template <int NT, int U> DEV void gemv(const Conv& p) {
    constexpr int BUFS = NT <= 2 ? 2 : 1;
    __shared__ float red[BUFS][SPLITS][NT][4][32];
    __shared__ float sq[SPLITS][NT * 8];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(p.cin) * 2, groups = p.cin >> 5, tiles = p.n >> 4, step = gridDim.x;
    const int k0 = min(warp * per, groups), k1 = min(k0 + per, groups);
    const uint4* w = (const uint4*)p.w + ((i64)blockIdx.x * groups) * 64 + lane;
    const i64 jump = (i64)step * groups * 64;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 a[U][2];
#pragma unroll
    for (int u = 0; u < U; u++) {
        bool ok = k0 + u < k1;
        a[u][0] = ok ? load_ahead(w + (i64)(k0 + u) * 64) : none;
        a[u][1] = ok ? load_ahead(w + (i64)(k0 + u) * 64 + 32) : none;
    }
    dep_wait();
    const uint4* x[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) x[j] = (const uint4*)(p.x + (i64)min(j * 8 + g, p.rows - 1) * p.ldx) + t4;
    // Two warps add up what eight rows have, a row of each pair each; a lane has two outputs of it.
    const int uj = warp >> 1, uh = warp & 1, t = uj * 8 + 2 * t4 + uh;
    const bool unit = warp < 2 * NT && t < p.rows;
    float inv = 1.f;
    bool first = true;
    for (int tile = blockIdx.x, buf = 0; tile < tiles; tile += step, w += jump, buf ^= BUFS - 1) {
        const int n = tile * 16 + 2 * g;
        Added add;
        if (unit) add = added(p, n, t);
        float acc[NT][4] = {}, ss[NT] = {};
        for (int k = k0; k < k1; k += U) {
            const bool last = k + U >= k1, on = !last || tile + step < tiles;
            const uint4* ahead = last ? w + jump : w;
            const int from = last ? k0 : k + U;
            uint4 b[U][NT], f[U][2];
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int j = 0; j < NT; j++) b[u][j] = k + u < k1 ? x[j][(k + u) * 4] : none;
#pragma unroll
            for (int u = 0; u < U; u++) {
                bool ok = on && from + u < k1;
                f[u][0] = a[u][0]; f[u][1] = a[u][1];
                a[u][0] = ok ? __ldg(ahead + (i64)(from + u) * 64) : none;
                a[u][1] = ok ? __ldg(ahead + (i64)(from + u) * 64 + 32) : none;
            }
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    mma(acc[j], f[u][0], b[u][j].x, b[u][j].y);
                    mma(acc[j], f[u][1], b[u][j].z, b[u][j].w);
                    if (first && p.eps > 0.f) ss[j] = squares(b[u][j], ss[j]);
                }
        }
#pragma unroll
        for (int j = 0; j < NT; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) red[buf][warp][j][e][lane] = acc[j][e];
            if (first && p.eps > 0.f) {
                float v = ss[j];
                v += __shfl_xor_sync(~0u, v, 1);
                v += __shfl_xor_sync(~0u, v, 2);
                if (t4 == 0) sq[warp][j * 8 + g] = v;
            }
        }
        __syncthreads();
        if (unit) {
            if (first && p.eps > 0.f) inv = inverse_rms(p, sq, t);
            skinny_epilogue(p, n, t, parts_sum<NT>(red[buf], uj, uh, lane, per > 2), inv, add);
        }
        first = false;
        if (BUFS == 1) __syncthreads();
    }
}
KERNEL __launch_bounds__(512) gemv_8(const __grid_constant__ Conv p) { gemv<1, 5>(p); }
// for short inputs: two blocks a multiprocessor
KERNEL __launch_bounds__(512, 2) gemv_8s(const __grid_constant__ Conv p) { gemv<1, 2>(p); }
KERNEL __launch_bounds__(512, 2) gemv_16s(const __grid_constant__ Conv p) { gemv<2, 2>(p); }
KERNEL __launch_bounds__(512) gemv_16(const __grid_constant__ Conv p) { gemv<2, 3>(p); }
KERNEL __launch_bounds__(512) gemv_32(const __grid_constant__ Conv p) { gemv<4, 2>(p); }

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOST_TILES 8
// The same for at most NT * 8 rows where a block's weights fit its shared memory: all of them are in flight before the
// kernels before have ended, and memory is busy while those wait for each other.
// U: groups of 32 inputs of a warp's part, at most. TABLES: tiles whose sums are added up side by side, by as many warps.
template <int U, int NT, int TABLES> DEV void gemv_ahead(const Conv& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float red[TABLES][SPLITS][NT][4][32];
    __shared__ float sq[SPLITS][NT * 8];
    __shared__ __align__(8) u64 here_s[MOST_TILES];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(p.cin) * 2, groups = p.cin >> 5, tiles = p.n >> 4, step = gridDim.x;
    const int k0 = min(warp * per, groups), k1 = min(k0 + per, groups), each = (tiles - (int)blockIdx.x + step - 1) / step;
    const u32 base = smem_addr(smem), here = smem_addr(here_s), bytes = groups * 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < each; i++) bar_init(here + i * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < each; i++) {
            const unsigned char* from = (const unsigned char*)p.w + (i64)((int)blockIdx.x + i * step) * bytes;
            bar_expect(here + i * 8, bytes);
            for (u32 at = 0; at < bytes; at += 14336) bulk_copy(base + i * bytes + at, from + at, min(14336u, bytes - at), here + i * 8);
        }
    }
    __syncthreads();
    // Of a tile two warps add up what eight rows have, a row of each pair each; a lane has two outputs of it.
    const int ui = warp / (2 * NT), uj = warp % (2 * NT) >> 1, uh = warp & 1, t = uj * 8 + 2 * t4 + uh;
    const bool unit = ui < TABLES && t < p.rows;
    dep_wait();
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 b[U][NT];
#pragma unroll
    for (int j = 0; j < NT; j++) {
        const uint4* x = (const uint4*)(p.x + min(j * 8 + g, p.rows - 1) * p.ldx) + t4;
#pragma unroll
        for (int u = 0; u < U; u++) b[u][j] = k0 + u < k1 ? x[(k0 + u) * 4] : none;
    }
    float inv = 1.f;
#pragma unroll 1
    for (int i0 = 0; i0 < each; i0 += TABLES) {
        const int n = ((int)blockIdx.x + (i0 + ui) * step) * 16 + 2 * g, some = min(TABLES, each - i0);
        const bool mine = unit && ui < some;
        Added add;
        if (mine) add = added(p, n, t);
#pragma unroll 1
        for (int i = 0; i < some; i++) {
            float acc[NT][4] = {};
            bar_wait(here + (i0 + i) * 8, 0);
            const u32 w = base + (i0 + i) * bytes + k0 * 1024 + lane * 16;
#pragma unroll
            for (int u = 0; u < U; u++)
                if (k0 + u < k1) {
                    const uint4 lo = lds(w + u * 1024), hi = lds(w + u * 1024 + 512);
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        mma(acc[j], lo, b[u][j].x, b[u][j].y);
                        mma(acc[j], hi, b[u][j].z, b[u][j].w);
                    }
                }
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) red[i][warp][j][e][lane] = acc[j][e];
        }
        if (i0 == 0 && p.eps > 0.f) {
#pragma unroll
            for (int j = 0; j < NT; j++) {
                float v = 0.f;
#pragma unroll
                for (int u = 0; u < U; u++) v = squares(b[u][j], v);
                v += __shfl_xor_sync(~0u, v, 1);
                v += __shfl_xor_sync(~0u, v, 2);
                if (t4 == 0) sq[warp][j * 8 + g] = v;
            }
        }
        __syncthreads();
        if (mine) {
            if (i0 == 0 && p.eps > 0.f) inv = inverse_rms(p, sq, t);
            skinny_epilogue(p, n, t, parts_sum<NT>(red[ui], uj, uh, lane, per > 2), inv, add);
        }
        if (i0 + TABLES < each) __syncthreads();
    }
}
// names: groups of 32 inputs, rows
KERNEL __launch_bounds__(512, 2) gemv_ahead_2x8(const __grid_constant__ Conv p) { gemv_ahead<2, 1, 3>(p); }
KERNEL __launch_bounds__(512) gemv_ahead_10x8(const __grid_constant__ Conv p) { gemv_ahead<10, 1, 1>(p); }
KERNEL __launch_bounds__(512, 2) gemv_ahead_2x16(const __grid_constant__ Conv p) { gemv_ahead<2, 2, 1>(p); }
KERNEL __launch_bounds__(512) gemv_ahead_10x16(const __grid_constant__ Conv p) { gemv_ahead<10, 2, 1>(p); }
#endif

// 1/rms of each row, summed in the order in which `gemv` sums it.
KERNEL __launch_bounds__(512) row_rms(const elt* x, float* out, int rows, int k, int ldx, int kreal, float eps) {
    __shared__ float sq[SPLITS][8];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(k) * 2, groups = k >> 5;
    const int k0 = min(warp * per, groups), k1 = min(k0 + per, groups);
    dep_wait();
    const uint4* r = (const uint4*)(x + (i64)min((int)blockIdx.x * 8 + g, rows - 1) * ldx) + t4;
    float s = 0.f;
    for (int i = k0; i < k1; i++) s = squares(r[i * 4], s);
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    if (t4 == 0) sq[warp][g] = s;
    __syncthreads();
    int row = blockIdx.x * 8 + threadIdx.x;
    if (threadIdx.x < 8 && row < rows) {
        float z = 0.f;
        for (int q = 0; q < SPLITS; q++) z += sq[q][threadIdx.x];
        out[row] = rsqrtf(z / kreal + eps);
    }
}
#else
KERNEL __launch_bounds__(32) row_rms(const elt* x, float* out, int rows, int k, int ldx, int kreal, float eps) {
    dep_go();
    dep_wait();
    float s = 0.f;
    for (int i = threadIdx.x; i < k; i += 32) { float v = x[(i64)blockIdx.x * ldx + i]; s = fmaf(v, v, s); }
    s = warp_sum(s);
    if (threadIdx.x == 0) out[blockIdx.x] = rsqrtf(s / kreal + eps);
}
#endif
