// Products of weights with a ragged batch of sequences, which is also every causal convolution of the model.
//
// out[t, n] = sum over taps j and channels c of w[n, j, c] * x[t - (taps-1-j)*dil, c]; taps = 1 is a plain product.
// Rows are channels-last. Rows before the start of a sequence come from its history, or are zero without one.
//
// Weights are the first operand of mma.m16n8k16 and stored in its fragment order: a tile of 16 outputs by 16
// inputs is 32 lanes of 16 bytes. Row i < 8 of a tile is output 2i, row i+8 is output 2i+1, so that a thread's two
// results of one position are neighbours. Inputs go in groups of 32, of which thread t of four has 8t..8t+7, four
// for each of two products, so that it reads its part of a position in one piece. The order of tiles is
// [output tile][64 channels][tap][16 channels].
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
    int cin, taps, dil;  // channels per group, padded to 32
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
#define STAGES 4
// One position's 16 bytes `q` of a 128 byte row: neighbouring rows use different halves of the banks.
DEV u32 swizzle(int row, int q) { return row * 128 + ((q ^ ((row & 1) << 2)) << 4); }
DEV uint4 lds(u32 addr) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
    return v;
}

// A block computes 16*MT*WN outputs of 8*NT*WT positions with WN x WT warps. Weights of one (64 channels, tap) are
// a stage of a ring; positions of 64 channels stay for all their taps.
template <int MT, int NT, int WN, int WT, bool SPLIT>
DEV void conv_mma(const Conv& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int BT = 8 * NT * WT, BN = 16 * MT * WN, TH = 32 * WN * WT, TILES = BN / 16;
    constexpr u32 WSTAGE = TILES * 2048;
    dep_go();
    Span s = span_of(p, BT);
    if (s.seq < 0) { dep_wait(); return; }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wn = warp % WN, wt = warp / WN;
    const int n0 = blockIdx.y * BN, halo = (p.taps - 1) * p.dil, rows = BT + halo;
    const int gcol = p.group ? (n0 / p.group) * p.cin : 0;
    const int chunks = (p.cin + 63) >> 6, kt_all = (p.cin >> 4) * p.taps, iters = chunks * p.taps;
    const int ring = p.taps >= STAGES - 1 ? 2 : STAGES;
    const u32 wbase = smem_addr(smem), xbase = wbase + STAGES * WSTAGE, xstage = rows * 128;
    const int ntiles = p.n >> 4, tile0 = n0 >> 4;

    auto fetch_w = [&](int it) {
        int c = it / p.taps, tap = it - c * p.taps, k16 = min(4, (p.cin - c * 64) >> 4);
        i64 kt = (i64)c * 4 * p.taps + tap * k16;
        u32 dst = wbase + (it % STAGES) * WSTAGE;
#pragma unroll
        for (int i = threadIdx.x; i < TILES * 128; i += TH) {
            int tile = i >> 7, r = i & 127;
            bool ok = tile0 + tile < ntiles && r < k16 * 32;
            const uint4* src = (const uint4*)p.w + ((i64)min(tile0 + tile, ntiles - 1) * kt_all + kt) * 32 + (ok ? r : 0);
            cp16(dst + i * 16, src, ok);
        }
    };
    const elt* hin = nullptr;
    auto fetch_x = [&](int c) {
        u32 dst = xbase + (c % ring) * xstage;
        int left = p.cin - c * 64;
        for (int i = threadIdx.x; i < rows * 8; i += TH) {
            int r = i >> 3, q = i & 7, t = s.t0 - halo + r, col = gcol + c * 64 + q * 8;
            bool ok = q * 8 < left && t < s.len;
            const elt* src = p.x;
            if (t >= 0) src = p.x + (i64)(s.row0 + (ok ? t : 0)) * p.ldx + (ok ? col : 0);
            else if (hin) src = hin + (i64)(t + halo) * p.ldx + (ok ? col : 0);
            else ok = false;
            cp16(dst + swizzle(r, q), src, ok);
        }
    };
    for (int it = 0; it < STAGES - 1; it++) if (it < iters) fetch_w(it);
    dep_wait();
    if (p.hist_in) hin = (const elt*)p.hist_in[s.seq] + p.hist_off;
    elt* hout = p.hist_out && n0 % (p.group ? p.group : 1 << 30) == 0 ? (elt*)p.hist_out[s.seq] + p.hist_off : nullptr;
    for (int it = 0; it < STAGES - 1; it++) {
        if (it < iters && it % p.taps == 0) fetch_x(it / p.taps);
        cp_commit();
    }
    float acc[MT][NT][4] = {};
    float tot[SPLIT ? MT : 1][SPLIT ? NT : 1][4] = {};
    int c = 0, tap = 0, part = 0;
    for (int it = 0; it < iters; it++) {
        cp_wait<STAGES - 2>();
        __syncthreads();
        int nx = it + STAGES - 1;
        if (nx < iters) {
            fetch_w(nx);
            if (nx % p.taps == 0) fetch_x(nx / p.taps);
        }
        cp_commit();
        const u32 xb = xbase + (c % ring) * xstage;
        if (hout && tap == 0) {
            // the last `halo` rows of (history, input) are the next call's history
            for (int i = threadIdx.x; i < rows * 8; i += TH) {
                int r = i >> 3, q = i & 7, t = s.t0 - halo + r, h = t - s.len + halo;
                bool mine = t >= s.t0 || s.t0 == 0;
                if (mine && h >= 0 && h < halo && q * 8 < p.cin - c * 64)
                    *(uint4*)(hout + (i64)h * p.ldx + gcol + c * 64 + q * 8) = lds(xb + swizzle(r, q));
            }
        }
        const u32 wb = wbase + (it % STAGES) * WSTAGE + wn * MT * 2048 + lane * 16;
        const int r0 = wt * 8 * NT + tap * p.dil + (lane >> 2), k32 = min(2, (p.cin - c * 64) >> 5);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (k < k32) {
                uint4 b[NT], a[MT];
#pragma unroll
                for (int j = 0; j < NT; j++) b[j] = lds(xb + swizzle(r0 + j * 8, k * 4 + (lane & 3)));
#pragma unroll
                for (int i = 0; i < MT; i++) a[i] = lds(wb + i * 2048 + k * 1024);
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++) mma(acc[i][j], a[i], b[j].x, b[j].y);
#pragma unroll
                for (int i = 0; i < MT; i++) a[i] = lds(wb + i * 2048 + k * 1024 + 512);
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++) mma(acc[i][j], a[i], b[j].z, b[j].w);
            }
        }
        if (++tap == p.taps) {
            tap = 0;
            c++;
            if (SPLIT && (++part == SPLIT_CHUNKS(p.cin) || c == chunks)) {
                part = 0;
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) { tot[SPLIT ? i : 0][SPLIT ? j : 0][e] += acc[i][j][e]; acc[i][j][e] = 0.f; }
            }
        }
    }
    const int g = lane >> 2, t4 = lane & 3;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int tile = tile0 + wn * MT + i;
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
KERNEL __launch_bounds__(128) conv_32x32(const __grid_constant__ Conv p) { conv_mma<1, 2, 2, 2, false>(p); }
KERNEL __launch_bounds__(128) conv_64x32(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, false>(p); }
KERNEL __launch_bounds__(128) conv_64x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 2, false>(p); }
KERNEL __launch_bounds__(256) conv_64x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(256) conv_128x128(const __grid_constant__ Conv p) { conv_mma<4, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(128) conv_32x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 1, 4, false>(p); }
KERNEL __launch_bounds__(128) split_64x32(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, true>(p); }
KERNEL __launch_bounds__(256) split_128x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 4, 2, true>(p); }

DEV float squares(uint4 u, float s) {
    float2 v = unpack2(u.x); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    v = unpack2(u.y); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    v = unpack2(u.z); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    v = unpack2(u.w); s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s);
    return s;
}

// Few rows: a block streams 16 outputs' weights straight into registers, its 16 warps share the inputs' axis.
// U: groups of 32 inputs in flight.
template <int NT, int U> DEV void gemv(const Conv& p) {
    __shared__ float red[SPLITS][NT][4][32];
    __shared__ float sq[SPLITS][NT * 8];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(p.cin) * 2, groups = p.cin >> 5;
    const int k0 = min(warp * per, groups), k1 = min(k0 + per, groups);
    const uint4* w = (const uint4*)p.w + ((i64)blockIdx.x * groups) * 64 + lane;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 a[U][2];
#pragma unroll
    for (int u = 0; u < U; u++) {
        bool ok = k0 + u < k1;
        a[u][0] = ok ? __ldg(w + (i64)(k0 + u) * 64) : none;
        a[u][1] = ok ? __ldg(w + (i64)(k0 + u) * 64 + 32) : none;
    }
    dep_wait();
    const uint4* x[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) x[j] = (const uint4*)(p.x + (i64)min(j * 8 + g, p.rows - 1) * p.ldx) + t4;
    float acc[NT][4] = {}, ss[NT] = {};
    for (int k = k0; k < k1; k += U) {
        uint4 b[U][NT], f[U][2];
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int j = 0; j < NT; j++) b[u][j] = k + u < k1 ? x[j][(k + u) * 4] : none;
#pragma unroll
        for (int u = 0; u < U; u++) {
            bool ok = k + u + U < k1;
            f[u][0] = a[u][0]; f[u][1] = a[u][1];
            a[u][0] = ok ? __ldg(w + (i64)(k + u + U) * 64) : none;
            a[u][1] = ok ? __ldg(w + (i64)(k + u + U) * 64 + 32) : none;
        }
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int j = 0; j < NT; j++) {
                mma(acc[j], f[u][0], b[u][j].x, b[u][j].y);
                mma(acc[j], f[u][1], b[u][j].z, b[u][j].w);
                if (p.eps > 0.f) ss[j] = squares(b[u][j], ss[j]);
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
#pragma unroll
                for (int q = 0; q < SPLITS; q++) z += sq[q][j * 8 + 2 * t4 + h];
                inv[h] = rsqrtf(z / p.kreal + p.eps);
            }
        int n = blockIdx.x * 16 + 2 * g, t = j * 8 + 2 * t4;
        if (t < p.rows) epilogue(p, n, t, v[0], v[2], inv[0]);
        if (t + 1 < p.rows) epilogue(p, n, t + 1, v[1], v[3], inv[1]);
    }
}
KERNEL __launch_bounds__(512) gemv_8(const __grid_constant__ Conv p) { gemv<1, 5>(p); }
KERNEL __launch_bounds__(512) gemv_16(const __grid_constant__ Conv p) { gemv<2, 3>(p); }
KERNEL __launch_bounds__(512) gemv_32(const __grid_constant__ Conv p) { gemv<4, 2>(p); }

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
