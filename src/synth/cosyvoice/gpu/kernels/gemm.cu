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
// Every sum runs in an order that depends on neither the batch nor the tile shape chosen for it. Continues product.cuh.

struct Span { int seq, t0, row0, len; };
DEV Span span_of(const Conv& p, int bt) {
    if (p.tiles) { int4 v = p.tiles[blockIdx.x]; return {v.x, v.y, v.z, v.w}; }
    return {0, (int)blockIdx.x * bt, 0, p.rows};
}

#if ELT != 0
#define STAGES 4
// Small blocks run few at a time: each has more in flight, or it waits for the cache at every stage.
#define DEEP 8
// One position's 16 bytes `q` of a 128 byte row: neighbouring rows use different halves of the banks.
DEV u32 swizzle(int row, int q) { return row * 128 + ((q ^ ((row & 1) << 2)) << 4); }
// A block computes 16*MT*WN outputs of 8*NT*WT positions with WN x WT warps. Weights of one (64 channels, tap) are
// a stage of a ring; positions of 64 channels stay for all their taps.
template <int MT, int NT, int WN, int WT, bool SPLIT, int ST = STAGES>
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
    const int ring = (ST - 2) / p.taps + 2; // chunks of positions that stages in flight may need
    const u32 wbase = smem_addr(smem), xbase = wbase + ST * WSTAGE, xstage = rows * 128;
    const int ntiles = p.n >> 4, tile0 = n0 >> 4;

    // Each thread copies the same places of every stage: what changes from stage to stage is one offset.
    constexpr int WSTEP = TH / 128, XSTEP = TH / 8;
    const int wr = threadIdx.x & 127, wtile = threadIdx.x >> 7;
    const uint4* wsrc = (const uint4*)p.w + (i64)(tile0 + wtile) * kt_all * 32 + wr;
    const i64 wjump = (i64)WSTEP * kt_all * 32;
    const int wleft = ntiles - tile0 - wtile;
    const u32 wdst = wbase + wtile * 2048 + wr * 16;
    const int last16 = (p.cin - (chunks - 1) * 64) >> 4, full = (chunks - 1) * p.taps;
    int wit = 0, woff = 0, wslot = 0; // the stage fetched next, where its weights lie, its place in the ring
    auto fetch_w = [&]() {
        int k16 = wit < full ? 4 : last16;
        bool in = wr < k16 * 32;
        u32 dst = wdst + wslot * WSTAGE;
        const uint4* src = wsrc + woff;
#pragma unroll
        for (int j = 0; j < TILES / WSTEP; j++) {
            bool ok = in && j * WSTEP < wleft;
            cp16(dst + j * WSTEP * 2048, ok ? src + j * wjump : (const uint4*)p.w, ok);
        }
        woff += k16 * 32;
        wit++;
        wslot = wslot == ST - 1 ? 0 : wslot + 1;
    };
    const elt* hin = nullptr;
    const int xr = threadIdx.x >> 3, xq = threadIdx.x & 7, xt = s.t0 - halo + xr;
    const elt* xsrc = p.x + (i64)(s.row0 + xt) * p.ldx + gcol + xq * 8;
    const elt* hsrc = nullptr;
    int xslot = 0, xc = 0;
    auto fetch_x = [&]() {
        const int c64 = xc * 64;
        const bool in = xq * 8 < p.cin - c64;
        u32 dst = xbase + xslot * xstage;
#pragma unroll 2
        for (int r = xr, t = xt, j = 0; r < rows; r += XSTEP, t += XSTEP, j++) {
            i64 off = (i64)j * XSTEP * p.ldx + c64;
            bool past = t < 0;
            bool ok = in && t < s.len && !(past && !hin);
            const elt* src = (past ? hsrc : xsrc) + off;
            cp16(dst + swizzle(r, xq), ok ? src : p.x, ok);
        }
        xc++;
        xslot = xslot == ring - 1 ? 0 : xslot + 1;
    };
    for (int it = 0; it < ST - 1; it++) if (it < iters) fetch_w();
    dep_wait();
    if (p.hist_in) {
        hin = (const elt*)p.hist_in[s.seq] + p.hist_off;
        hsrc = hin + (i64)(xt + halo) * p.ldx + gcol + xq * 8;
    }
    elt* hout = p.hist_out && n0 % (p.group ? p.group : 1 << 30) == 0 ? (elt*)p.hist_out[s.seq] + p.hist_off : nullptr;
    int ahead = 0; // tap of the stage fetched next
    for (int it = 0; it < ST - 1; it++) {
        if (it < iters && ahead == 0) fetch_x();
        ahead = ahead + 1 == p.taps ? 0 : ahead + 1;
        cp_commit();
    }
    float acc[MT][NT][4] = {};
    float tot[SPLIT ? MT : 1][SPLIT ? NT : 1][4] = {}, held[SPLIT ? MT : 1][SPLIT ? NT : 1][4] = {};
    int c = 0, tap = 0, step = 0, slot = 0, buf = 0;
    bool odd = false;
    for (int it = 0; it < iters; it++) {
        cp_wait<ST - 2>();
        __syncthreads();
        if (it + ST - 1 < iters) {
            fetch_w();
            if (ahead == 0) fetch_x();
            ahead = ahead + 1 == p.taps ? 0 : ahead + 1;
        }
        cp_commit();
        const u32 xb = xbase + buf * xstage;
        if (hout && tap == 0) {
            // the last `halo` rows of (history, input) are the next call's history
            for (int i = threadIdx.x; i < rows * 8; i += TH) {
                int r = i >> 3, q = i & 7, t = s.t0 - halo + r, h = t - s.len + halo;
                bool mine = t >= s.t0 || s.t0 == 0;
                if (mine && h >= 0 && h < halo && q * 8 < p.cin - c * 64)
                    *(uint4*)(hout + (i64)h * p.ldx + gcol + c * 64 + q * 8) = lds(xb + swizzle(r, q));
            }
        }
        const u32 wb = wbase + slot * WSTAGE + wn * MT * 2048 + lane * 16;
        slot = slot == ST - 1 ? 0 : slot + 1;
        const int r0 = wt * 8 * NT + tap * p.dil + (lane >> 2);
        // Past the last channel both operands are zeros: no branch keeps the second half's operands from being read
        // while the first is multiplied.
#pragma unroll
        for (int k = 0; k < 2; k++) {
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
        if (++tap == p.taps) {
            tap = 0;
            c++;
            buf = buf == ring - 1 ? 0 : buf + 1;
            if (SPLIT && (++step == SPLIT_CHUNKS(p.cin) || c == chunks)) {
                const bool first = SPLIT_CHUNKS(p.cin) > 1 && !odd && c < chunks;
                step = 0;
                odd = !odd;
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int si = SPLIT ? i : 0, sj = SPLIT ? j : 0;
                            held[si][sj][e] += acc[i][j][e];
                            acc[i][j][e] = 0.f;
                            if (!first) { tot[si][sj][e] += held[si][sj][e]; held[si][sj][e] = 0.f; }
                        }
            }
        }
    }
    // Through shared memory, so that a warp stores whole lines and the code of the epilogue exists once.
    cp_wait<0>();
    __syncthreads();
    constexpr int LD = BN + 8;
    float* tile = (float*)smem;
    const int g = lane >> 2, t4 = lane & 3;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float* v = SPLIT ? tot[SPLIT ? i : 0][SPLIT ? j : 0] : acc[i][j];
            float* o = tile + ((wt * NT + j) * 8 + 2 * t4) * LD + (wn * MT + i) * 16 + 2 * g;
            *(float2*)o = make_float2(v[0], v[2]);
            *(float2*)(o + LD) = make_float2(v[1], v[3]);
        }
    __syncthreads();
    const int outputs = min(BN, p.n - n0), positions = min(BT, s.len - s.t0);
#pragma unroll 4
    for (int i = threadIdx.x; i < BT * BN / 2; i += TH) {
        int t = i / (BN / 2), n = i % (BN / 2) * 2;
        if (t < positions && n < outputs) {
            float2 v = *(const float2*)(tile + t * LD + n);
            int row = s.row0 + s.t0 + t;
            epilogue(p, n0 + n, row, v.x, v.y, p.rowscale ? p.rowscale[row] : 1.f);
        }
    }
}
// names: outputs x positions of a block
KERNEL __launch_bounds__(128) conv_32x32(const __grid_constant__ Conv p) { conv_mma<1, 2, 2, 2, false, DEEP>(p); }
KERNEL __launch_bounds__(128) conv_64x32(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, false, DEEP>(p); }
KERNEL __launch_bounds__(128) conv_64x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 2, false>(p); }
KERNEL __launch_bounds__(256) conv_64x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(256, 2) conv_128x128(const __grid_constant__ Conv p) { conv_mma<4, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(128) conv_32x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 1, 4, false>(p); }
// Up to three convolutions of equal outputs and positions side by side.
struct Three { Conv p[3]; };
KERNEL __launch_bounds__(128, 6) three_64x32(const __grid_constant__ Three t) { conv_mma<2, 2, 2, 2, false, DEEP>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256, 3) three_64x128(const __grid_constant__ Three t) { conv_mma<2, 4, 2, 4, false>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256, 2) three_128x128(const __grid_constant__ Three t) { conv_mma<4, 4, 2, 4, false>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256) split_128x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 4, 2, true>(p); }

// Products whose sums have gemv's order, for more rows: 64 outputs by 32 rows. Four groups of four warps each take
// four of the sixteen parts of the inputs' axis and keep a sum a part; all parts are then added in order. All groups
// go the same number of steps, the last with less to do, so that barriers are the whole block's.
#define GROUPS 4
#define PARTS (SPLITS / GROUPS)
#define SPLIT_STAGE (64 * 128 + 32 * 128)
#define SPLIT_LD 72
KERNEL __launch_bounds__(128 * GROUPS) split_64x32(const __grid_constant__ Conv p) {
    extern __shared__ __align__(128) unsigned char smem[];
    dep_go();
    const int lane = threadIdx.x & 31, grp = threadIdx.x >> 7, tid = threadIdx.x & 127, warp = tid >> 5, wn = warp & 1, wt = warp >> 1;
    const int n0 = blockIdx.y * 64, t0 = blockIdx.x * 32, chunks = (p.cin + 63) >> 6, per = SPLIT_CHUNKS(p.cin);
    const int c0 = min(grp * PARTS * per, chunks), c1 = min(c0 + PARTS * per, chunks), k16_all = p.cin >> 4;
    const int ntiles = p.n >> 4, tile0 = n0 >> 4;
    const u32 base = smem_addr(smem) + grp * STAGES * SPLIT_STAGE;
    const uint4* wsrc = (const uint4*)p.w + (i64)tile0 * k16_all * 32 + tid;
    const int xr = tid >> 3, xq = tid & 7;
    const elt* xsrc = p.x + (i64)(t0 + xr) * p.ldx + xq * 8;
    auto fetch_w = [&](int c) {
        u32 dst = base + (c - c0) % STAGES * SPLIT_STAGE + tid * 16;
        bool in = tid < ((p.cin - c * 64) >> 4) * 32;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool ok = in && tile0 + j < ntiles;
            cp16(dst + j * 2048, ok ? wsrc + ((i64)j * k16_all + c * 4) * 32 : (const uint4*)p.w, ok);
        }
    };
    auto fetch_x = [&](int c) {
        u32 dst = base + (c - c0) % STAGES * SPLIT_STAGE + 64 * 128;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int r = xr + j * 16;
            bool ok = xq * 8 < p.cin - c * 64 && t0 + r < p.rows;
            cp16(dst + swizzle(r, xq), ok ? xsrc + (i64)j * 16 * p.ldx + c * 64 : p.x, ok);
        }
    };
    for (int j = 0; j < STAGES - 1; j++) if (c0 + j < c1) fetch_w(c0 + j);
    dep_wait();
    for (int j = 0; j < STAGES - 1; j++) {
        if (c0 + j < c1) fetch_x(c0 + j);
        cp_commit();
    }
    float tot[PARTS][2][2][4];
    int c = c0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) tot[part][i][j][e] = 0.f;
#pragma unroll 1
        for (int q = 0; q < per; q++, c++) {
            cp_wait<STAGES - 2>();
            __syncthreads();
            if (c >= c1) continue;
            if (c + STAGES - 1 < c1) { fetch_w(c + STAGES - 1); fetch_x(c + STAGES - 1); }
            cp_commit();
            const u32 st = base + (c - c0) % STAGES * SPLIT_STAGE, wb = st + wn * 4096 + lane * 16, xb = st + 64 * 128;
            const int r0 = wt * 16 + (lane >> 2), k32 = min(2, (p.cin - c * 64) >> 5);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                if (k >= k32) continue;
                uint4 b0 = lds(xb + swizzle(r0, k * 4 + (lane & 3))), b1 = lds(xb + swizzle(r0 + 8, k * 4 + (lane & 3)));
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        uint4 a = lds(wb + i * 2048 + k * 1024 + h * 512);
                        mma(tot[part][i][0], a, h ? b0.z : b0.x, h ? b0.w : b0.y);
                        mma(tot[part][i][1], a, h ? b1.z : b1.x, h ? b1.w : b1.y);
                    }
            }
        }
    }
    cp_wait<0>();
    __syncthreads();
    float* tile = (float*)smem;
    const int g = lane >> 2, t4 = lane & 3;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float* v = tot[part][i][j];
                float* o = tile + ((grp * PARTS + part) * 32 + (wt * 2 + j) * 8 + 2 * t4) * SPLIT_LD + (wn * 2 + i) * 16 + 2 * g;
                *(float2*)o = make_float2(v[0], v[2]);
                *(float2*)(o + SPLIT_LD) = make_float2(v[1], v[3]);
            }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < 32 * 32; i += 128 * GROUPS) {
        int t = i >> 5, n = (i & 31) * 2, row = t0 + t;
        if (row >= p.rows || n0 + n >= p.n) continue;
        float a = 0.f, b = 0.f;
#pragma unroll
        for (int q = 0; q < SPLITS; q += 2) {
            float2 v = *(const float2*)(tile + (q * 32 + t) * SPLIT_LD + n), u = *(const float2*)(tile + ((q + 1) * 32 + t) * SPLIT_LD + n);
            add_parts(a, v.x, u.x, per > 1);
            add_parts(b, v.y, u.y, per > 1);
        }
        epilogue(p, n0 + n, row, a, b, p.rowscale ? p.rowscale[row] : 1.f);
    }
}

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

// Few rows: a block streams 16 outputs' weights straight into registers, its 16 warps share the inputs' axis. Then
// the next 16 outputs, whose first weights are on their way while the sums of these are added up.
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
            const float2 v = parts_sum<NT>(red[buf], uj, uh, lane, per > 2);
            epilogue(p, n, t, v.x, v.y, inv, add);
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
// The same for at most eight rows where a block's weights fit its shared memory: all of them are on their way before the
// kernels before have ended, and memory is busy while those wait for each other.
// U: groups of 32 inputs of a warp's part, at most.
template <int U> DEV void gemv_ahead(const Conv& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ float red[2][SPLITS][1][4][32];
    __shared__ float sq[SPLITS][8];
    __shared__ __align__(8) u64 here_s[MOST_TILES];
    dep_go();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t4 = lane & 3;
    const int per = SPLIT_CHUNKS(p.cin) * 2, groups = p.cin >> 5, tiles = p.n >> 4, step = gridDim.x;
    const int k0 = min(warp * per, groups), k1 = min(k0 + per, groups);
    const u32 base = smem_addr(smem), here = smem_addr(here_s), bytes = groups * 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MOST_TILES; i++) bar_init(here + i * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int tile = blockIdx.x, i = 0; tile < tiles; tile += step, i++) {
            bar_expect(here + i * 8, bytes);
            for (u32 at = 0; at < bytes; at += 14336)
                bulk_copy(base + i * bytes + at, (const unsigned char*)p.w + (i64)tile * bytes + at, min(14336u, bytes - at), here + i * 8);
        }
    }
    __syncthreads();
    dep_wait();
    const uint4* x = (const uint4*)(p.x + (i64)min(g, p.rows - 1) * p.ldx) + t4;
    const uint4 none = make_uint4(0, 0, 0, 0);
    uint4 b[U];
#pragma unroll
    for (int u = 0; u < U; u++) b[u] = k0 + u < k1 ? x[(k0 + u) * 4] : none;
    const int t = 2 * t4 + warp;
    const bool unit = warp < 2 && t < p.rows;
    float inv = 1.f;
    for (int tile = blockIdx.x, i = 0; tile < tiles; tile += step, i++) {
        const int n = tile * 16 + 2 * g, buf = i & 1;
        Added add;
        if (unit) add = added(p, n, t);
        float acc[4] = {}, ss = 0.f;
        bar_wait(here + i * 8, 0);
        const u32 w = base + i * bytes + k0 * 1024 + lane * 16;
#pragma unroll
        for (int u = 0; u < U; u++)
            if (k0 + u < k1) {
                mma(acc, lds(w + u * 1024), b[u].x, b[u].y);
                mma(acc, lds(w + u * 1024 + 512), b[u].z, b[u].w);
                if (i == 0 && p.eps > 0.f) ss = squares(b[u], ss);
            }
#pragma unroll
        for (int e = 0; e < 4; e++) red[buf][warp][0][e][lane] = acc[e];
        if (i == 0 && p.eps > 0.f) {
            ss += __shfl_xor_sync(~0u, ss, 1);
            ss += __shfl_xor_sync(~0u, ss, 2);
            if (t4 == 0) sq[warp][g] = ss;
        }
        __syncthreads();
        if (unit) {
            if (i == 0 && p.eps > 0.f) inv = inverse_rms(p, sq, t);
            const float2 v = parts_sum<1>(red[buf], 0, warp, lane, per > 2);
            epilogue(p, n, t, v.x, v.y, inv, add);
        }
    }
}
KERNEL __launch_bounds__(512, 2) gemv_ahead_2(const __grid_constant__ Conv p) { gemv_ahead<2>(p); }
KERNEL __launch_bounds__(512) gemv_ahead_10(const __grid_constant__ Conv p) { gemv_ahead<10>(p); }
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
