// Products of weights with a ragged batch of sequences, which is also every causal convolution of the model.
//
// out[t, n] = sum over taps j and channels c of w[n, j, c] * x[t - (taps-1-j)*dil, c]; taps = 1 is a plain product.
// Rows are channels-last. Rows before the start of a sequence come from its history, or are zero without one.
//
// Weights are the first operand of mma.m16n8k16 and stored in its fragment order: a tile of 16 outputs by 16
// inputs is 32 lanes of 16 bytes. Row i < 8 of a tile is output 2i, row i+8 is output 2i+1, so that a thread's two
// results of one position are neighbours. The order of tiles is [output tile][64 channels][tap][16 channels].
//
// Every sum runs in an order that depends on neither the batch nor the tile shape chosen for it.

enum { ACT_NONE = 0, ACT_SNAKE = 1, ACT_LEAKY = 2, ACT_MISH = 3, ACT_SILU_GATE = 4, ACT_GELU = 5 };

struct Conv {
    const elt* x;        // [rows, ldx]
    const elt* w;        // packed
    const float* bias;   // [outputs] or null
    const int4* tiles;   // {sequence, first position, first row, length} per block, or null: one sequence of `rows`
    const u64* hist_in;  // per sequence, or null
    const u64* hist_out; // per sequence, or null
    const float* res;    // added before the activation: [rows, ldo]
    const float* post;   // added after the activation: [rows, ldo]
    const float* sum;    // running sum: (v + sum) * scale
    float* out;          // [rows, ldo] or null
    elt* oute;           // activated, [rows, lde] or null
    const float* alpha;  // snake
    const float* rowscale; // per row, or null
    i64 hist_off;        // elements into the history
    int ldx, ldo, lde, rows;
    int cin, taps, dil;  // channels per group, padded to 16
    int n, group;        // outputs padded to 16; outputs per group
    int act;
    float scale, slope;
    float eps;           // > 0: root mean square of the input row, over `kreal` values
    int kreal;
};

DEV float activate(const Conv& p, int n, float v) {
    switch (p.act) {
        case ACT_SNAKE: return snake(v, p.alpha[n]);
        case ACT_LEAKY: return v >= 0.f ? v : v * p.slope;
        case ACT_MISH: return mish(v);
        case ACT_GELU: { float u = 0.7978845608028654f * (v + 0.044715f * v * v * v); return 0.5f * v * (1.f + tanhf(u)); }
        default: return v;
    }
}

// Outputs n and n+1 of one row.
DEV void epilogue(const Conv& p, int n, int row, float a, float b, float rs) {
    a *= rs;
    b *= rs;
    if (p.act == ACT_SILU_GATE) {
        p.oute[(i64)row * p.lde + (n >> 1)] = to_e(a * sigmoid(a) * b);
        return;
    }
    if (p.bias) { float2 v = *(const float2*)(p.bias + n); a += v.x; b += v.y; }
    i64 o = (i64)row * p.ldo + n;
    if (p.res) { float2 v = *(const float2*)(p.res + o); a += v.x; b += v.y; }
    if (p.sum) { float2 v = *(const float2*)(p.sum + o); a = (a + v.x) * p.scale; b = (b + v.y) * p.scale; }
    float fa = activate(p, n, a), fb = activate(p, n + 1, b);
    if (p.post) {
        float2 v = *(const float2*)(p.post + o);
        a = fa + v.x; b = fb + v.y;
        fa = a; fb = b;
    }
    if (p.out) *(float2*)(p.out + o) = make_float2(a, b);
    if (p.oute) store2(p.oute + (i64)row * p.lde + n, fa, fb);
}

struct Span { int seq, t0, row0, len; };
DEV Span span_of(const Conv& p, int bt) {
    if (p.tiles) { int4 v = p.tiles[blockIdx.x]; return {v.x, v.y, v.z, v.w}; }
    return {0, (int)blockIdx.x * bt, 0, p.rows};
}

#define SPLITS 16
#define SPLIT_CHUNKS(cin) ((((cin) + 63) / 64 + SPLITS - 1) / SPLITS)

#if ELT != 0
template <int MT, int NT, int WN, int WT, bool SPLIT>
DEV void conv_mma(const Conv& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int BT = 8 * NT * WT, BN = 16 * MT * WN, TH = 32 * WN * WT;
    dep_go();
    Span s = span_of(p, BT);
    if (s.seq < 0) { dep_wait(); return; }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wn = warp % WN, wt = warp / WN;
    const int n0 = blockIdx.y * BN, halo = (p.taps - 1) * p.dil, rows = BT + halo;
    const int gcol = p.group ? (n0 / p.group) * p.cin : 0;
    const int chunks = (p.cin + 63) >> 6, kt_all = (p.cin >> 4) * p.taps;
    const u32 stage = rows * 128, base = smem_addr(smem);
    // tiles past the end are computed from the last one and not stored
    const int ntiles = p.n >> 4;
    const uint4* w[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int t = min(n0 / 16 + wn * MT + i, ntiles - 1);
        w[i] = (const uint4*)p.w + ((i64)t * kt_all) * 32 + lane;
    }
    float acc[MT][NT][4] = {};
    float tot[SPLIT ? MT : 1][SPLIT ? NT : 1][4] = {};
    uint4 a[2][MT];
#pragma unroll
    for (int i = 0; i < MT; i++) a[0][i] = __ldg(w[i]);
    dep_wait();
    const elt* hin = p.hist_in ? (const elt*)p.hist_in[s.seq] + p.hist_off : nullptr;
    elt* hout = p.hist_out && blockIdx.y * BN % (p.group ? p.group : 1 << 30) == 0 ? (elt*)p.hist_out[s.seq] + p.hist_off : nullptr;

    auto fetch = [&](int c) {
        u32 dst = base + (c & 1) * stage;
        int left = p.cin - c * 64;
        for (int i = threadIdx.x; i < rows * 8; i += TH) {
            int r = i >> 3, q = i & 7, t = s.t0 - halo + r, col = gcol + c * 64 + q * 8;
            bool ok = q * 8 < left && t < s.len;
            const elt* src = p.x;
            if (t >= 0) src = p.x + (i64)(s.row0 + (ok ? t : 0)) * p.ldx + (ok ? col : 0);
            else if (hin) src = hin + (i64)(t + halo) * p.ldx + (ok ? col : 0);
            else ok = false;
            cp16(dst + r * 128 + ((q ^ (r & 7)) << 4), src, ok);
        }
        cp_commit();
    };
    fetch(0);
    int kt = 0, part = 0;
    for (int c = 0; c < chunks; c++) {
        if (c + 1 < chunks) { fetch(c + 1); cp_wait<1>(); } else cp_wait<0>();
        __syncthreads();
        u32 buf = base + (c & 1) * stage;
        if (hout) {
            // the last `halo` rows of (history, input) are the next call's history
            for (int i = threadIdx.x; i < rows * 8; i += TH) {
                int r = i >> 3, q = i & 7, t = s.t0 - halo + r, h = t - s.len + halo;
                bool mine = t >= s.t0 || s.t0 == 0;
                if (mine && h >= 0 && h < halo && q * 8 < p.cin - c * 64) {
                    uint4 v;
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(buf + r * 128 + ((q ^ (r & 7)) << 4)));
                    *(uint4*)(hout + (i64)h * p.ldx + gcol + c * 64 + q * 8) = v;
                }
            }
        }
        int k16 = min(4, (p.cin - c * 64) >> 4);
        for (int tap = 0; tap < p.taps; tap++) {
            int r0 = wt * 8 * NT + tap * p.dil + (lane & 7) + ((lane >> 4) << 3);
#pragma unroll 4
            for (int k = 0; k < k16; k++, kt++) {
                int nx = min(kt + 1, kt_all - 1);
#pragma unroll
                for (int i = 0; i < MT; i++) a[1][i] = __ldg(w[i] + (i64)nx * 32);
                u32 b[NT][2];
#pragma unroll
                for (int j = 0; j < NT; j += 2) {
                    int r = r0 + j * 8, q = k * 2 + ((lane >> 3) & 1);
                    u32 d0, d1;
                    u32 ad = buf + r * 128 + ((q ^ (r & 7)) << 4);
                    if (j + 1 < NT) ldm4(ad, b[j][0], b[j][1], b[j + 1 < NT ? j + 1 : j][0], b[j + 1 < NT ? j + 1 : j][1]);
                    else ldm4(buf + (r - ((lane >> 4) << 3)) * 128 + ((q ^ ((r - ((lane >> 4) << 3)) & 7)) << 4), b[j][0], b[j][1], d0, d1);
                }
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++) mma(acc[i][j], a[0][i], b[j][0], b[j][1]);
#pragma unroll
                for (int i = 0; i < MT; i++) a[0][i] = a[1][i];
            }
        }
        if (SPLIT && (++part == SPLIT_CHUNKS(p.cin) || c + 1 == chunks)) {
            part = 0;
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int j = 0; j < NT; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) { tot[SPLIT ? i : 0][SPLIT ? j : 0][e] += acc[i][j][e]; acc[i][j][e] = 0.f; }
        }
        __syncthreads();
    }
    const int g = lane >> 2, t4 = lane & 3;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int tile = n0 / 16 + wn * MT + i;
        if (tile >= ntiles) continue;
        int n = tile * 16 + 2 * g;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float* v = SPLIT ? tot[SPLIT ? i : 0][SPLIT ? j : 0] : acc[i][j];
            int t = s.t0 + (wt * NT + j) * 8 + 2 * t4;
            if (t < s.len) epilogue(p, n, s.row0 + t, v[0], v[2], p.rowscale ? p.rowscale[s.row0 + t] : 1.f);
            if (t + 1 < s.len) epilogue(p, n, s.row0 + t + 1, v[1], v[3], p.rowscale ? p.rowscale[s.row0 + t + 1] : 1.f);
        }
    }
}
// names: outputs x positions of a block
KERNEL __launch_bounds__(128) conv_64x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 2, false>(p); }
KERNEL __launch_bounds__(256) conv_64x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(256) conv_128x128(const __grid_constant__ Conv p) { conv_mma<4, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(128) conv_32x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 1, 4, false>(p); }
KERNEL __launch_bounds__(128) split_64x32(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, true>(p); }
KERNEL __launch_bounds__(256) split_128x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 4, 2, true>(p); }

// Few rows: a block streams 16 outputs' weights straight into registers, its 16 warps share the inputs' axis.
template <int NT> DEV void gemv(const Conv& p) {
    __shared__ float red[SPLITS][NT][4][32];
    __shared__ float sq[SPLITS][NT * 8];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(p.cin) * 4, kt_all = p.cin >> 4;
    const int k0 = min(warp * per, kt_all), k1 = min(k0 + per, kt_all);
    const uint4* w = (const uint4*)p.w + ((i64)blockIdx.x * kt_all) * 32 + lane;
    constexpr int U = 8;
    uint4 a[U];
#pragma unroll
    for (int u = 0; u < U; u++) if (k0 + u < k1) a[u] = __ldg(w + (i64)(k0 + u) * 32);
    dep_wait();
    const u32* x[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) x[j] = (const u32*)(p.x + (i64)min(j * 8 + g, p.rows - 1) * p.ldx) + t4;
    float acc[NT][4] = {}, ss[NT] = {};
    for (int k = k0; k < k1; k += U) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (k + u >= k1) break;
            uint4 f = a[u];
            if (k + u + U < k1) a[u] = __ldg(w + (i64)(k + u + U) * 32);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                u32 b0 = x[j][(k + u) * 8], b1 = x[j][(k + u) * 8 + 4];
                mma(acc[j], f, b0, b1);
                if (p.eps > 0.f) {
                    float2 v = unpack2(b0), q = unpack2(b1);
                    ss[j] = fmaf(v.x, v.x, ss[j]); ss[j] = fmaf(v.y, v.y, ss[j]);
                    ss[j] = fmaf(q.x, q.x, ss[j]); ss[j] = fmaf(q.y, q.y, ss[j]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < NT; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) red[warp][j][e][lane] = acc[j][e];
        if (p.eps > 0.f) {
            float v = ss[j];
            v += __shfl_xor_sync(~0u, v, 1);
            v += __shfl_xor_sync(~0u, v, 2);
            if (t4 == 0) sq[warp][j * 8 + g] = v;
        }
    }
    __syncthreads();
    // one warp a column group; a lane sums its own two outputs of two positions
    for (int j = warp; j < NT; j += SPLITS) {
        float v[4] = {}, inv[2] = {1.f, 1.f};
#pragma unroll
        for (int q = 0; q < SPLITS; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] += red[q][j][e][lane];
        if (p.eps > 0.f)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float z = 0.f;
                for (int q = 0; q < SPLITS; q++) z += sq[q][j * 8 + 2 * t4 + h];
                inv[h] = rsqrtf(z / p.kreal + p.eps);
            }
        int n = blockIdx.x * 16 + 2 * g, t = j * 8 + 2 * t4;
        if (t < p.rows) epilogue(p, n, t, v[0], v[2], inv[0]);
        if (t + 1 < p.rows) epilogue(p, n, t + 1, v[1], v[3], inv[1]);
    }
}
KERNEL __launch_bounds__(512) gemv_8(const __grid_constant__ Conv p) { gemv<1>(p); }
KERNEL __launch_bounds__(512) gemv_16(const __grid_constant__ Conv p) { gemv<2>(p); }
KERNEL __launch_bounds__(512) gemv_32(const __grid_constant__ Conv p) { gemv<4>(p); }

// 1/rms of each row, summed in the order in which `gemv` sums it.
KERNEL __launch_bounds__(512) row_rms(const elt* x, float* out, int rows, int k, int ldx, int kreal, float eps) {
    __shared__ float sq[SPLITS][8];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(k) * 4, kt_all = k >> 4;
    const int k0 = min(warp * per, kt_all), k1 = min(k0 + per, kt_all);
    dep_wait();
    const u32* r = (const u32*)(x + (i64)min((int)blockIdx.x * 8 + g, rows - 1) * ldx) + t4;
    float s = 0.f;
    for (int i = k0; i < k1; i++) {
        float2 v = unpack2(r[i * 8]), q = unpack2(r[i * 8 + 4]);
        s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s); s = fmaf(q.x, q.x, s); s = fmaf(q.y, q.y, s);
    }
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
// Plain float: 64 outputs x 64 positions a block; weights are [tap][channel][output].
KERNEL __launch_bounds__(256) conv_f32(const __grid_constant__ Conv p) {
    extern __shared__ __align__(128) unsigned char smem[];
    float* xs = (float*)smem;
    dep_go();
    dep_wait();
    Span s = span_of(p, 64);
    if (s.seq < 0) return;
    const int nt = threadIdx.x >> 6, g = (threadIdx.x >> 3) & 7, mt = threadIdx.x & 7;
    const int n0 = blockIdx.y * 64, halo = (p.taps - 1) * p.dil, rows = 64 + halo;
    const int gcol = p.group ? (n0 / p.group) * p.cin : 0;
    const int n = n0 + nt * 16 + 2 * g;
    const bool live = n < p.n;
    const float* hin = p.hist_in ? (const float*)p.hist_in[s.seq] + p.hist_off : nullptr;
    float* hout = p.hist_out && n0 % (p.group ? p.group : 1 << 30) == 0 ? (float*)p.hist_out[s.seq] + p.hist_off : nullptr;
    float a[8] = {}, b[8] = {};
    for (int c0 = 0; c0 < p.cin; c0 += 16) {
        for (int i = threadIdx.x; i < rows * 16; i += 256) {
            int r = i >> 4, c = i & 15, t = s.t0 - halo + r, col = gcol + c0 + c;
            float v = 0.f;
            if (t >= 0) { if (t < s.len) v = p.x[(i64)(s.row0 + t) * p.ldx + col]; }
            else if (hin) v = hin[(i64)(t + halo) * p.ldx + col];
            xs[r * 17 + c] = v;
        }
        __syncthreads();
        if (hout)
            for (int i = threadIdx.x; i < rows * 16; i += 256) {
                int r = i >> 4, c = i & 15, t = s.t0 - halo + r, h = t - s.len + halo;
                if ((t >= s.t0 || s.t0 == 0) && h >= 0 && h < halo) hout[(i64)h * p.ldx + gcol + c0 + c] = xs[r * 17 + c];
            }
        if (live)
            for (int tap = 0; tap < p.taps; tap++)
                for (int c = 0; c < 16; c++) {
                    float2 w = *(const float2*)(p.w + (i64)(tap * p.cin + c0 + c) * p.n + n);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float x = xs[(mt + 8 * i + tap * p.dil) * 17 + c];
                        a[i] = fmaf(w.x, x, a[i]);
                        b[i] = fmaf(w.y, x, b[i]);
                    }
                }
        __syncthreads();
    }
    if (!live) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int t = s.t0 + mt + 8 * i;
        if (t < s.len) epilogue(p, n, s.row0 + t, a[i], b[i], p.rowscale ? p.rowscale[s.row0 + t] : 1.f);
    }
}
KERNEL __launch_bounds__(32) row_rms(const elt* x, float* out, int rows, int k, int ldx, int kreal, float eps) {
    dep_go();
    dep_wait();
    float s = 0.f;
    for (int i = threadIdx.x; i < k; i += 32) { float v = x[(i64)blockIdx.x * ldx + i]; s = fmaf(v, v, s); }
    s = warp_sum(s);
    if (threadIdx.x == 0) out[blockIdx.x] = rsqrtf(s / kreal + eps);
}
#endif
