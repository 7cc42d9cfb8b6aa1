// Skinny GEMMs of the flow: y = act(x w^T + bias).
//
// A block has 16*MT outputs of 56 rows, and its eight warps share the inputs' axis.
// Operands go from the cache straight into registers, D groups of 32 inputs at a time; the weights' first groups
// travel before the step before has ended. Weights are packed as in gemm.cu.
#if ELT != 0
#define SKINNY_WARPS 8
#define SKINNY_NT 7
template <int MT, int D> DEV void skinny(const elt* x, const uint4* w, const float* bias, elt* y, int rows, int n, int k, int activate) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int BN = 16 * MT, BT = 8 * SKINNY_NT, LD = BN + 8;
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int groups = k >> 5, per = (groups + SKINNY_WARPS - 1) / SKINNY_WARPS;
    const int k0 = min(warp * per, groups), k1 = min(k0 + per, groups), t0 = blockIdx.y * BT, n0 = blockIdx.x * BN;
    const uint4* wp = w + (i64)(n0 >> 4) * groups * 64 + lane;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 a[D][MT][2], b[D][SKINNY_NT];
    auto load_w = [&](int d, int at) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) a[d][i][h] = at < k1 ? load_ahead(wp + ((i64)i * groups + at) * 64 + h * 32) : none;
    };
#pragma unroll
    for (int d = 0; d < D; d++) load_w(d, k0 + d);
    dep_wait();
    const uint4* xp[SKINNY_NT];
#pragma unroll
    for (int j = 0; j < SKINNY_NT; j++) xp[j] = (const uint4*)(x + (i64)min(t0 + j * 8 + g, rows - 1) * k) + t4;
    auto load_x = [&](int d, int at) {
#pragma unroll
        for (int j = 0; j < SKINNY_NT; j++) b[d][j] = at < k1 ? xp[j][at * 4] : none;
    };
#pragma unroll
    for (int d = 0; d < D; d++) load_x(d, k0 + d);
    float acc[MT][SKINNY_NT][4] = {};
    for (int at = k0; at < k1; at += D) {
#pragma unroll
        for (int d = 0; d < D; d++) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < SKINNY_NT; j++) {
                    mma(acc[i][j], a[d][i][0], b[d][j].x, b[d][j].y);
                    mma(acc[i][j], a[d][i][1], b[d][j].z, b[d][j].w);
                }
            if (at + D < k1) { load_w(d, at + D + d); load_x(d, at + D + d); }
        }
    }
    float* part = (float*)smem;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < SKINNY_NT; j++) {
            float* v = acc[i][j];
            float* o = part + (warp * BT + j * 8 + 2 * t4) * LD + i * 16 + 2 * g;
            *(float2*)o = make_float2(v[0], v[2]);
            *(float2*)(o + LD) = make_float2(v[1], v[3]);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < BT * BN / 2; i += 32 * SKINNY_WARPS) {
        int t = i / (BN / 2), c = i % (BN / 2) * 2;
        if (t0 + t >= rows) continue;
        float2 s = *(const float2*)(bias + n0 + c);
#pragma unroll
        for (int q = 0; q < SKINNY_WARPS; q++) {
            float2 v = *(const float2*)(part + (q * BT + t) * LD + c);
            s.x += v.x;
            s.y += v.y;
        }
        if (activate) { s.x = gelu(s.x); s.y = gelu(s.y); }
        store2(y + (i64)(t0 + t) * n + n0 + c, s.x, s.y);
    }
}
KERNEL __launch_bounds__(256) flow_skinny_16(const elt* x, const uint4* w, const float* bias, elt* y, int rows, int n, int k, int activate) { skinny<1, 4>(x, w, bias, y, rows, n, k, activate); }
KERNEL __launch_bounds__(256) flow_skinny_32(const elt* x, const uint4* w, const float* bias, elt* y, int rows, int n, int k, int activate) { skinny<2, 3>(x, w, bias, y, rows, n, k, activate); }
KERNEL __launch_bounds__(256) flow_skinny_48(const elt* x, const uint4* w, const float* bias, elt* y, int rows, int n, int k, int activate) { skinny<3, 2>(x, w, bias, y, rows, n, k, activate); }
#endif
