// GEMMs of weights with a ragged batch of sequences, which is also every causal convolution of the model.
//
// out[t, n] = sum over taps j and channels c of w[n, j, c] * x[t - (taps-1-j)*dil, c]; taps = 1 is a plain GEMM.
// Rows are channels-last. Rows before the start of a sequence come from its history, or are zero without one.
//
// Weights are the first operand of mma.m16n8k16 and stored in its fragment order: a tile of 16 outputs by 16
// inputs is 32 lanes of 16 bytes. Row i < 8 of a tile is output 2i, row i+8 is output 2i+1, so that a thread's two
// results of one position are neighbours. Inputs go in groups of 32, of which thread t of four has 8t..8t+7, four
// for each of two MMAs, so that it reads its part of a position in one piece. The order of tiles is
// [output tile][64 channels][tap][16 channels].
//
// Every sum runs in an order that depends on neither the batch nor the tile shape chosen for it, but for the shapes
// whose groups of warps share a sum. Continues gemm.cuh.

struct Span { int seq, t0, row0, len; };
DEV Span span_of(const Conv& p, int bt) {
    if (p.tiles) { int4 v = p.tiles[blockIdx.x]; return {v.x, v.y, v.z, v.w}; }
    return {0, (int)blockIdx.x * bt, 0, p.rows};
}

#if ELT != 0
#define STAGES 4
// Small blocks run few at a time: each has more in flight, or it waits for the cache at every stage.
#define DEEP 8
// The largest blocks, where a block has less than 128 KiB of shared memory.
#ifndef TALL
#define TALL STAGES
#endif
// One position's 16 bytes `q` of a 128 byte row: neighbouring rows use different halves of the banks.
DEV u32 swizzle(int row, int q) { return row * 128 + ((q ^ ((row & 1) << 2)) << 4); }
// A block computes 16*MT*WN outputs of 8*NT*WT positions with G groups of WN x WT warps, of which each takes a part of
// (channels, taps) and a ring of its own. Weights of one (64 channels, tap) are a stage of a ring; positions of 64
// channels stay for all their taps.
template <int MT, int NT, int WN, int WT, bool SPLIT, int ST = STAGES, int G = 1>
DEV void conv_mma(const Conv& p) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int BT = 8 * NT * WT, BN = 16 * MT * WN, TH = 32 * WN * WT, TILES = BN / 16;
    constexpr u32 WSTAGE = TILES * 2048;
    dep_go();
    Span s = span_of(p, BT);
    if (s.seq < 0) { dep_wait(); return; }
    const int grp = G == 1 ? 0 : threadIdx.x / TH, tid = G == 1 ? threadIdx.x : threadIdx.x % TH;
    const int lane = tid & 31, warp = tid >> 5, wn = warp % WN, wt = warp / WN;
    const int n0 = blockIdx.y * BN, halo = (p.taps - 1) * p.dil, rows = BT + halo;
    const int gcol = p.group ? (n0 / p.group) * p.cin : 0;
    const int chunks = (p.cin + 63) >> 6, kt_all = (p.cin >> 4) * p.taps, iters = chunks * p.taps;
    // Steps of this group: all groups go equally many rounds, so that barriers are the whole block's.
    const int rounds = (iters + G - 1) / G, it0 = G == 1 ? 0 : min(grp * rounds, iters), it1 = G == 1 ? iters : min(it0 + rounds, iters);
    const int ring = min((ST - 2) / p.taps + 2, chunks); // chunks of positions that stages in flight may need
    const u32 xstage = rows * 128, wbase = smem_addr(smem) + grp * (ST * WSTAGE + ring * xstage), xbase = wbase + ST * WSTAGE;
    const int ntiles = p.n >> 4, tile0 = n0 >> 4;

    // Each thread copies the same places of every stage: what changes from stage to stage is one offset.
    constexpr int WSTEP = TH / 128, XSTEP = TH / 8;
    const int wr = tid & 127, wtile = tid >> 7;
    const uint4* wsrc = (const uint4*)p.w + (i64)(tile0 + wtile) * kt_all * 32 + wr;
    const i64 wjump = (i64)WSTEP * kt_all * 32;
    const int wleft = ntiles - tile0 - wtile;
    const u32 wdst = wbase + wtile * 2048 + wr * 16;
    const int last16 = (p.cin - (chunks - 1) * 64) >> 4, full = (chunks - 1) * p.taps;
    // the stage fetched next, where its weights lie, its place in the ring
    int wit = it0, woff = min(it0, full) * 128 + max(it0 - full, 0) * last16 * 32, wslot = 0;
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
    int c = G == 1 ? 0 : it0 / p.taps, tap = G == 1 ? 0 : it0 - c * p.taps, step = 0, slot = 0, buf = 0;
    const elt* hin = nullptr;
    const int xr = tid >> 3, xq = tid & 7, xt = s.t0 - halo + xr;
    const elt* xsrc = p.x + (i64)(s.row0 + xt) * p.ldx + gcol + xq * 8;
    const elt* hsrc = nullptr;
    int xslot = 0, xc = c;
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
    for (int it = it0; it < it0 + ST - 1; it++) if (it < it1) fetch_w();
    dep_wait();
    if (p.hist_in) {
        hin = (const elt*)p.hist_in[s.seq] + p.hist_off;
        hsrc = hin + (i64)(xt + halo) * p.ldx + gcol + xq * 8;
    }
    elt* hout = p.hist_out && n0 % (p.group ? p.group : 1 << 30) == 0 ? (elt*)p.hist_out[s.seq] + p.hist_off : nullptr;
    int ahead = tap; // tap of the stage fetched next
    for (int it = it0; it < it0 + ST - 1; it++) {
        if (it < it1 && (ahead == 0 || it == it0)) fetch_x();
        ahead = ahead + 1 == p.taps ? 0 : ahead + 1;
        cp_commit();
    }
    float acc[MT][NT][4] = {};
    float tot[SPLIT ? MT : 1][SPLIT ? NT : 1][4] = {}, held[SPLIT ? MT : 1][SPLIT ? NT : 1][4] = {};
    bool odd = false;
    for (int it = it0; it < it0 + rounds; it++) {
        cp_wait<ST - 2>();
        __syncthreads();
        if (it + ST - 1 < it1) {
            fetch_w();
            if (ahead == 0) fetch_x();
            ahead = ahead + 1 == p.taps ? 0 : ahead + 1;
        }
        cp_commit();
        if (G > 1 && it >= it1) continue;
        const u32 xb = xbase + buf * xstage;
        if (hout && tap == 0) {
            // the last `halo` rows of (history, input) are the next call's history
            for (int i = tid; i < rows * 8; i += TH) {
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
            float* o = tile + (grp * BT + (wt * NT + j) * 8 + 2 * t4) * LD + (wn * MT + i) * 16 + 2 * g;
            *(float2*)o = make_float2(v[0], v[2]);
            *(float2*)(o + LD) = make_float2(v[1], v[3]);
        }
    __syncthreads();
    // A thread has two outputs of several positions. What is added to them is asked for at once: results may be stored
    // where others are read, so the compiler would wait for each in turn.
    constexpr int EVERY = G * TH / (BN / 2), MOST = BT / EVERY, BATCH = MOST < 8 ? MOST : 8, LATER = MOST < 4 ? MOST : 4;
    static_assert(G * TH % (BN / 2) == 0 && BT % EVERY == 0 && MOST % BATCH == 0, "a thread's outputs stay the same");
    const int n = threadIdx.x % (BN / 2) * 2, positions = min(BT, s.len - s.t0), first = threadIdx.x / (BN / 2);
    if (n0 + n >= p.n) return;
    auto sums = [&](int at) {
        float2 v = *(const float2*)(tile + at * LD + n);
#pragma unroll
        for (int q = 1; q < G; q++) {
            float2 w = *(const float2*)(tile + (q * BT + at) * LD + n);
            v.x += w.x; v.y += w.y;
        }
        return v;
    };
    const float2 al = alphas(p, n0 + n);
    if (!SPLIT && p.act == ACT_SNAKE && !p.sum && !p.post && !p.rowscale) {
        // Most of the vocoder. The general form would take more instructions than the MMAs.
        const i64 row = s.row0 + s.t0 + first;
        const float2 bias = p.bias ? *(const float2*)(p.bias + n0 + n) : make_float2(0.f, 0.f);
        const Snake sa = snake_of(al.x), sb = snake_of(al.y);
        const int step = EVERY * p.ldo, stepe = EVERY * p.lde;
        const float* res = p.res ? p.res + row * p.ldo + n0 + n : nullptr;
        float* out = p.out ? p.out + row * p.ldo + n0 + n : nullptr;
        elt* oute = p.oute + row * p.lde + n0 + n;
#pragma unroll 1
        for (int t = first; t < positions; t += EVERY * BATCH) {
            float2 r[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; u++)
                r[u] = res && t + u * EVERY < positions ? *(const float2*)(res + u * step) : make_float2(0.f, 0.f);
#pragma unroll
            for (int u = 0; u < BATCH; u++) {
                if (t + u * EVERY >= positions) break;
                float2 v = sums(t + u * EVERY);
                v.x += bias.x + r[u].x;
                v.y += bias.y + r[u].y;
                if (out) *(float2*)(out + u * step) = v;
                store2(oute + u * stepe, snake(v.x, sa), snake(v.y, sb));
            }
            if (res) res += BATCH * step;
            if (out) out += BATCH * step;
            oute += BATCH * stepe;
        }
        return;
    }
#pragma unroll 1
    for (int t = first; t < positions; t += EVERY * LATER) {
        Added add[LATER];
        float2 late[LATER];
        float rs[LATER];
#pragma unroll
        for (int u = 0; u < LATER; u++) {
            int row = s.row0 + s.t0 + min(t + u * EVERY, positions - 1);
            add[u] = added(p, n0 + n, row);
            late[u] = added_late(p, n0 + n, row);
            rs[u] = p.rowscale ? p.rowscale[row] : 1.f;
        }
#pragma unroll
        for (int u = 0; u < LATER; u++) {
            const int at = t + u * EVERY;
            if (at >= positions) break;
            float2 v = sums(at);
            epilogue(p, n0 + n, s.row0 + s.t0 + at, v.x, v.y, rs[u], add[u], late[u], al);
        }
    }
}
// names: outputs x positions of a block
KERNEL __launch_bounds__(128) conv_32x32(const __grid_constant__ Conv p) { conv_mma<1, 2, 2, 2, false, DEEP>(p); }
KERNEL __launch_bounds__(128) conv_64x32(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, false, DEEP>(p); }
KERNEL __launch_bounds__(128) conv_64x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 2, false>(p); }
KERNEL __launch_bounds__(256) conv_64x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 2, 4, false>(p); }
KERNEL __launch_bounds__(256, 2) conv_128x128(const __grid_constant__ Conv p) { conv_mma<4, 4, 2, 4, false, TALL>(p); }
KERNEL __launch_bounds__(128) conv_32x128(const __grid_constant__ Conv p) { conv_mma<2, 4, 1, 4, false>(p); }
// For few blocks: groups of warps share the sum.
KERNEL __launch_bounds__(256, 2) conv_64x32_2(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, false, STAGES, 2>(p); }
KERNEL __launch_bounds__(512, 1) conv_64x32_4(const __grid_constant__ Conv p) { conv_mma<2, 2, 2, 2, false, STAGES, 4>(p); }
// Up to three convolutions of equal outputs and positions side by side.
struct Three { Conv p[3]; };
static_assert(sizeof(Three) == 3 * sizeof(Conv), "Rust passes an array");
KERNEL __launch_bounds__(128, 6) three_64x32(const __grid_constant__ Three t) { conv_mma<2, 2, 2, 2, false, DEEP>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256, 2) three_64x32_2(const __grid_constant__ Three t) { conv_mma<2, 2, 2, 2, false, STAGES, 2>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(512, 1) three_64x32_4(const __grid_constant__ Three t) { conv_mma<2, 2, 2, 2, false, STAGES, 4>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256, 3) three_64x128(const __grid_constant__ Three t) { conv_mma<2, 4, 2, 4, false>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256, 2) three_128x128(const __grid_constant__ Three t) { conv_mma<4, 4, 2, 4, false, TALL>(t.p[blockIdx.z]); }
KERNEL __launch_bounds__(256) split_128x64(const __grid_constant__ Conv p) { conv_mma<2, 4, 4, 2, true>(p); }

// GEMMs whose sums have gemv's order, for more rows: 64 outputs by 32 rows. GROUPS groups of four warps each take
// as many of the sixteen parts of the inputs' axis as the others and keep a sum a part; all parts are then added in
// order. All groups go the same number of steps, the last with less to do, so that barriers are the whole block's.
// Groups and stages of their rings follow the shared memory that a block may have (gemm.rs).
#ifndef GROUPS
#define GROUPS 4
#define SPLIT_STAGES STAGES
#endif
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
    const u32 base = smem_addr(smem) + grp * SPLIT_STAGES * SPLIT_STAGE;
    const uint4* wsrc = (const uint4*)p.w + (i64)tile0 * k16_all * 32 + tid;
    const int xr = tid >> 3, xq = tid & 7;
    const elt* xsrc = p.x + (i64)(t0 + xr) * p.ldx + xq * 8;
    auto fetch_w = [&](int c) {
        u32 dst = base + (c - c0) % SPLIT_STAGES * SPLIT_STAGE + tid * 16;
        bool in = tid < ((p.cin - c * 64) >> 4) * 32;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool ok = in && tile0 + j < ntiles;
            cp16(dst + j * 2048, ok ? wsrc + ((i64)j * k16_all + c * 4) * 32 : (const uint4*)p.w, ok);
        }
    };
    auto fetch_x = [&](int c) {
        u32 dst = base + (c - c0) % SPLIT_STAGES * SPLIT_STAGE + 64 * 128;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int r = xr + j * 16;
            bool ok = xq * 8 < p.cin - c * 64 && t0 + r < p.rows;
            cp16(dst + swizzle(r, xq), ok ? xsrc + (i64)j * 16 * p.ldx + c * 64 : p.x, ok);
        }
    };
    for (int j = 0; j < SPLIT_STAGES - 1; j++) if (c0 + j < c1) fetch_w(c0 + j);
    dep_wait();
    for (int j = 0; j < SPLIT_STAGES - 1; j++) {
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
            cp_wait<SPLIT_STAGES - 2>();
            __syncthreads();
            if (c >= c1) continue;
            if (c + SPLIT_STAGES - 1 < c1) { fetch_w(c + SPLIT_STAGES - 1); fetch_x(c + SPLIT_STAGES - 1); }
            cp_commit();
            const u32 st = base + (c - c0) % SPLIT_STAGES * SPLIT_STAGE, wb = st + wn * 4096 + lane * 16, xb = st + 64 * 128;
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
#if GROUPS == 4
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
#else
    // There is no room for the sums of every part: in turn, each group adds its own to what those before it found.
#pragma unroll 1
    for (int turn = 0; turn < GROUPS; turn++) {
        if (grp == turn)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float* o = tile + ((wt * 2 + j) * 8 + 2 * t4) * SPLIT_LD + (wn * 2 + i) * 16 + 2 * g;
                    float v[4] = {};
                    if (turn > 0) { v[0] = o[0]; v[1] = o[SPLIT_LD]; v[2] = o[1]; v[3] = o[SPLIT_LD + 1]; }
#pragma unroll
                    for (int q = 0; q < PARTS; q += 2)
#pragma unroll
                        for (int e = 0; e < 4; e++) add_parts(v[e], tot[q][i][j][e], tot[q + 1][i][j][e], per > 1);
                    *(float2*)o = make_float2(v[0], v[2]);
                    *(float2*)(o + SPLIT_LD) = make_float2(v[1], v[3]);
                }
        __syncthreads();
    }
#endif
#pragma unroll 1
    for (int i = threadIdx.x; i < 32 * 32; i += 128 * GROUPS) {
        int t = i >> 5, n = (i & 31) * 2, row = t0 + t;
        if (row >= p.rows || n0 + n >= p.n) continue;
        float a = 0.f, b = 0.f;
#if GROUPS == 4
#pragma unroll
        for (int q = 0; q < SPLITS; q += 2) {
            float2 v = *(const float2*)(tile + (q * 32 + t) * SPLIT_LD + n), u = *(const float2*)(tile + ((q + 1) * 32 + t) * SPLIT_LD + n);
            add_parts(a, v.x, u.x, per > 1);
            add_parts(b, v.y, u.y, per > 1);
        }
#else
        a = tile[t * SPLIT_LD + n];
        b = tile[t * SPLIT_LD + n + 1];
#endif
        epilogue(p, n0 + n, row, a, b, p.rowscale ? p.rowscale[row] : 1.f);
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
#endif
