// Warpgroup GEMMs: many rows on Hopper, the sums of gemm.cu's `gemv`, to the bit, by warpgroup instructions.
//
// Continues gemm.cuh. Both operands are tiled (`tiled` in common.cuh): [64 inputs][rows][64 values], swizzled, so that
// any run of rows is one bulk copy and lies in shared memory as a warpgroup MMA wants it. Weights are a second copy of
// gemm.cu's, of each 16 outputs the even ones first, so that a thread's two results of one row are neighbours.
//
// A block makes 64*GROUPS outputs of BN rows: a group of four warps multiplies 64 outputs each, and the first thread of
// one more warp has both operands copied into a ring. What a multiprocessor takes in is the limit (some 45 bytes a
// clock), so block shapes are chosen to spread that evenly and to need little of it. The inputs' axis has SPLITS parts; of
// long inputs two parts are added to each other before they are added to the rest, so that where there are too few blocks a
// cluster of eight shares the parts, two a block, and every block adds up some of the rows.
//
// Squares of what a norm divides by are summed where it is made, a sum for every part of a row: [part][rows].
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SHARED_BY 8 // blocks of a cluster that shares the parts

// Outputs n..n+3 of one row; `p.lde` is the height of the tiled result. Returns them as they are stored.
DEV float4 warpgroup_epilogue(const Conv& p, int n, int row, float4 v, float rs, float4 bias, float4 res) {
    v.x *= rs; v.y *= rs; v.z *= rs; v.w *= rs;
    if (p.act == ACT_SILU_GATE) {
        store2(p.oute + tiled(p.lde, row, n >> 1), v.x * sigmoid(v.x) * v.y, v.z * sigmoid(v.z) * v.w);
        return v;
    }
    if (p.bias) { v.x += bias.x; v.y += bias.y; v.z += bias.z; v.w += bias.w; }
    i64 o = (i64)row * p.ldo + n;
    if (p.res) { v.x += res.x; v.y += res.y; v.z += res.z; v.w += res.w; }
    if (p.out) *(float4*)(p.out + o) = v;
    if (p.oute) {
        u32 a = pack2(v.x, v.y), b = pack2(v.z, v.w);
        *(u32*)(p.oute + tiled(p.lde, row, n)) = a;
        *(u32*)(p.oute + tiled(p.lde, row, n + 2)) = b;
        float2 fa = unpack2(a), fb = unpack2(b);
        v = make_float4(fa.x, fa.y, fb.x, fb.y);
    }
    return v;
}

// The squares of 64 neighbouring values of a row in each half of a warp, four a lane, summed as `gemv` does it: of every
// 32, its thread t of four has the values 8t..8t+7. The results are in lanes 9 and 25.
DEV float row_squares(float4 v) {
    auto chain = [&](float s) { return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, s)))); };
    float s = chain(0.f);
    s = chain(__shfl_up_sync(~0u, s, 1));
    s = chain(__shfl_up_sync(~0u, s, 7));
    s = chain(__shfl_up_sync(~0u, s, 1));
    s += __shfl_xor_sync(~0u, s, 2);
    s += __shfl_xor_sync(~0u, s, 4);
    return s;
}

// The same sums for operands that no GEMM made: 64 rows, and one part, a block.
KERNEL __launch_bounds__(256) warpgroup_squares(const elt* x, float* squares_out, int height, int rows, int k) {
    dep_wait();
    dep_go();
    const int row = blockIdx.x * 64 + (threadIdx.x >> 2), t4 = threadIdx.x & 3, chunks = k >> 6, per = SPLIT_CHUNKS(k);
    float s = 0.f;
    if (row < rows)
        for (int c = blockIdx.y * per; c < min(((int)blockIdx.y + 1) * per, chunks); c++) {
            const u32* at = (const u32*)(x + ((i64)c * height + row) * 64) + t4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 u;
                u.x = at[((h * 4 + 0) ^ (row & 7)) << 2];
                u.y = at[((h * 4 + 1) ^ (row & 7)) << 2];
                u.z = at[((h * 4 + 2) ^ (row & 7)) << 2];
                u.w = at[((h * 4 + 3) ^ (row & 7)) << 2];
                s = squares(u, s);
            }
        }
    s += __shfl_xor_sync(~0u, s, 1);
    s += __shfl_xor_sync(~0u, s, 2);
    if (t4 == 0 && row < rows) squares_out[(i64)blockIdx.y * height + row] = s;
}

enum { SHORT = 0, LONG = 1, SHARED = 2 };
// ST: stages of the ring; INPUTS: whether parts are single steps of 64 inputs, or longer, or shared by a cluster; MORE:
// registers of a thread that multiplies, taken from four warps that copy; 0: as launched, with one warp that copies.
template <int GROUPS, int BN, int ST, int INPUTS, int MORE> DEV void warpgroup(const Conv& p, const float* sq_in, float* sq_out) {
    extern __shared__ __align__(1024) unsigned char raw[];
    constexpr int BM = 64 * GROUPS, LD = BM + 4, WORKERS = 128 * GROUPS;
    constexpr u32 WEIGHTS = BM * 128, STAGE = WEIGHTS + BN * 128;
    __shared__ __align__(8) u64 full_s[ST], empty_s[ST];
    __shared__ float inv[BN];
    dep_go();
    const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), g = lane >> 2, t4 = lane & 3;
    const u32 ring = (smem_addr(raw) + 1023) & ~1023u, full = smem_addr(full_s), empty = smem_addr(empty_s);
    constexpr int parts = INPUTS == SHARED ? SPLITS / SHARED_BY : SPLITS;
    const int rank = INPUTS == SHARED ? blockIdx.x : 0, n0 = blockIdx.z * BM, t0 = blockIdx.y * BN;
    const int chunks = p.cin >> 6, per = INPUTS == SHORT ? 1 : SPLIT_CHUNKS(p.cin), all_parts = (chunks + per - 1) / per;
    const int c0 = min(rank * parts * per, chunks), c1 = min(c0 + parts * per, chunks);
    if (tid == 0) {
        for (int i = 0; i < ST; i++) { bar_init(full + i * 8, 1); bar_init(empty + i * 8, WORKERS / 32); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp >= GROUPS * 4) {
        if constexpr (MORE > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (tid == WORKERS) {
            // Past the last output there is nothing, and nothing is read of it.
            const int height = (p.n + 127) & ~127;
            const u32 have = min(BM, height - n0) * 128;
            auto weights = [&](int c, int slot) {
                bar_expect(full + slot * 8, have + BN * 128);
                bulk_copy(ring + slot * STAGE, p.w + ((i64)c * height + n0) * 64, have, full + slot * 8);
            };
            auto rows = [&](int c, int slot) {
                bulk_copy(ring + slot * STAGE + WEIGHTS, p.x + ((i64)c * p.ldx + t0) * 64, BN * 128, full + slot * 8);
            };
            // Weights were there before; activations are what the kernel before this one makes.
            const int first = min(c1 - c0, ST);
            for (int i = 0; i < first; i++) weights(c0 + i, i);
            dep_wait();
            asm volatile("fence.proxy.async;" ::: "memory");
            for (int i = 0; i < first; i++) rows(c0 + i, i);
            int slot = 0, phase = 0;
            for (int c = c0 + ST; c < c1; c++) {
                bar_wait(empty + slot * 8, phase);
                weights(c, slot);
                rows(c, slot);
                if (++slot == ST) { slot = 0; phase ^= 1; }
            }
        }
        return;
    }
    if constexpr (MORE > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
    dep_wait();
    if (p.eps > 0.f && tid < BN) {
        float z[SPLITS], all = 0.f;
#pragma unroll
        for (int i = 0; i < SPLITS; i++) z[i] = i < all_parts ? __ldcg(sq_in + (i64)i * p.ldx + t0 + tid) : 0.f;
#pragma unroll
        for (int i = 0; i < SPLITS; i++) all += z[i];
        inv[tid] = rsqrtf(all / p.kreal + p.eps);
    }
    __syncwarp();
    // A part that is being summed, and the next; all parts before them, or all pairs, of which `held` is the one at hand.
    constexpr bool TWO = INPUTS == SHORT && GROUPS == 1;
    float acc[BN / 2], next[TWO ? BN / 2 : 1], held[INPUTS == LONG ? BN / 2 : 1], tot[BN / 2];
#pragma unroll
    for (int e = 0; e < BN / 2; e++) { tot[e] = 0.f; if (INPUTS == LONG) held[e] = 0.f; }
    const u32 mine_w = ring + (warp >> 2) * 64 * 128;
    int slot = 0, phase = 0, used = 0;
    // Has a step's 64 inputs multiplied, and does not wait for it.
    auto multiply = [&](float* sums, bool add) {
        bar_wait(full + slot * 8, phase);
        const u64 shape = (1ull << 16) | (64ull << 32) | (1ull << 62);
        const u64 a = (u64)((mine_w + slot * STAGE) >> 4) | shape, b = (u64)((ring + slot * STAGE + WEIGHTS) >> 4) | shape;
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) group_mma<BN>(sums, a + 2 * k, b + 2 * k, k > 0 || add);
        group_commit();
        if (++slot == ST) { slot = 0; phase ^= 1; }
    };
    // The oldest step that was not released has been multiplied.
    auto release = [&] {
        if (lane == 0) bar_arrive(empty + used * 8);
        __syncwarp();
        if (++used == ST) used = 0;
    };
    auto total = [&](const float* sums) {
#pragma unroll
        for (int e = 0; e < BN / 2; e++) tot[e] += sums[e];
    };
    // One step is multiplied while the sums of the one before it are waited for and added up.
    if constexpr (TWO) {
        multiply(acc, false);
        int c = c0 + 1;
#pragma unroll 1
        for (; c + 1 < c1; c += 2) {
            multiply(next, false);
            group_wait<1>();
            release();
            total(acc);
            multiply(acc, false);
            group_wait<1>();
            release();
            total(next);
        }
        if (c < c1) {
            multiply(next, false);
            group_wait<1>();
            total(acc);
            group_wait();
            total(next);
        } else {
            group_wait();
            total(acc);
        }
    } else {
        int part = 0;
#pragma unroll 1
        for (int c = c0; c < c1;) {
            multiply(acc, false);
            const int end = min(c + per, c1);
#pragma unroll 1
            for (c++; c < end; c++) {
                // Of large steps few have room: each is released as soon as it can be.
                if constexpr (BN > 64) { group_wait(); release(); }
                multiply(acc, true);
                if constexpr (BN <= 64) { group_wait<1>(); release(); }
            }
            group_wait();
            release();
            if constexpr (INPUTS == LONG) {
#pragma unroll
                for (int e = 0; e < BN / 2; e++) held[e] += acc[e];
                if (part++ % 2 == 1 || c == c1)
#pragma unroll
                    for (int e = 0; e < BN / 2; e++) { tot[e] += held[e]; held[e] = 0.f; }
            } else {
                // a cluster's block has no more than one pair
                total(acc);
            }
        }
    }
    // The ring has been read by everybody: the sums take its place. Outputs 2g, 2g+1 of the warp's sixteen and rows
    // 2*t4, 2*t4+1 of every eight are this thread's.
    auto workers_meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); };
    workers_meet();
    const u32 mine = ring + ((2 * t4) * LD + warp * 16 + 2 * g) * 4;
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(mine + j * 8 * LD * 4), "f"(tot[j * 4]), "f"(tot[j * 4 + 2]) : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(mine + (j * 8 + 1) * LD * 4), "f"(tot[j * 4 + 1]), "f"(tot[j * 4 + 3]) : "memory");
    }
    // A thread has four outputs of every eighth row. What is added to several rows travels together.
    constexpr int share = INPUTS == SHARED ? BN / SHARED_BY : BN, passes = share / 8, AT_ONCE = passes < 4 ? passes : 4;
    const int first = rank * share, n = tid % (BM / 4) * 4, r0 = tid / (BM / 4);
    const bool column = n0 + n < p.n;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f), bias = column && p.bias ? *(const float4*)(p.bias + n0 + n) : none;
    float4 res[AT_ONCE];
    auto fetch = [&](int pass) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int row = t0 + first + r0 + (pass + j) * 8;
            res[j] = column && p.res && row < p.rows ? *(const float4*)(p.res + (i64)row * p.ldo + n0 + n) : none;
        }
    };
    fetch(0);
    if (INPUTS == SHARED) cluster_sync(); else workers_meet();
#pragma unroll 1
    for (int pass = 0; pass < passes; pass += AT_ONCE) {
        if (pass > 0) fetch(pass);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int r = first + r0 + (pass + j) * 8, row = t0 + r;
            const u32 at = ring + (r * LD + n) * 4;
            float4 v = none;
            if (INPUTS == SHARED) {
                // many in flight at once: each comes from another multiprocessor
                float4 u[SHARED_BY];
#pragma unroll
                for (int e = 0; e < SHARED_BY; e++) u[e] = peer_load4(peer(at, e));
#pragma unroll
                for (int e = 0; e < SHARED_BY; e++) { v.x += u[e].x; v.y += u[e].y; v.z += u[e].z; v.w += u[e].w; }
            } else {
                uint4 b = lds(at);
                v = make_float4(__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w));
            }
            const bool mine = column && row < p.rows;
            if (mine) v = warpgroup_epilogue(p, n0 + n, row, v, p.eps > 0.f ? inv[r] : 1.f, bias, res[j]);
            // half a warp has 64 outputs of a row
            if (sq_out) {
                const float s = row_squares(v);
                if (mine && (lane & 15) == 9) sq_out[(i64)((n0 + n) >> 6) * p.lde + row] = s;
            }
        }
    }
    // Nobody leaves while its sums are read.
    if (INPUTS == SHARED) cluster_sync();
}
// names: outputs x rows of a block
#define WARPGROUP_KERNEL(NAME, GROUPS, BN, ST, INPUTS, MORE, BLOCKS) \
    KERNEL __launch_bounds__(128 * GROUPS + (MORE ? 128 : 32), BLOCKS) NAME(const __grid_constant__ Conv p, const float* sq_in, float* sq_out) { \
        warpgroup<GROUPS, BN, ST, INPUTS, MORE>(p, sq_in, sq_out); \
    }
WARPGROUP_KERNEL(warpgroup_64x32, 1, 32, 8, SHORT, 0, 2)
WARPGROUP_KERNEL(warpgroup_64x64, 1, 64, 6, SHORT, 0, 2)
WARPGROUP_KERNEL(warpgroup_128x64, 2, 64, 4, SHORT, 0, 2)
WARPGROUP_KERNEL(warpgroup_192x128, 3, 128, 5, SHORT, 152, 1)
WARPGROUP_KERNEL(warpgroup_64x64_long, 1, 64, 6, LONG, 0, 2)
WARPGROUP_KERNEL(warpgroup_128x128_long, 2, 128, 6, LONG, 232, 1)
WARPGROUP_KERNEL(warpgroup_64x64_shared, 1, 64, 6, SHARED, 0, 2)
WARPGROUP_KERNEL(warpgroup_128x64_shared, 2, 64, 4, SHARED, 0, 2)
WARPGROUP_KERNEL(warpgroup_128x128_shared, 2, 128, 6, SHARED, 0, 1)
#endif
