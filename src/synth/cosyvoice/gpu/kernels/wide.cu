// Products for many rows on Hopper: the sums of gemm.cu's `gemv`, to the bit, by warpgroup instructions.
//
// Continues product.cuh. Weights are gemm.cu's packed fragments, which a warpgroup product takes from registers as they are.
// Activations are tiled (`tiled` in common.cuh): [64 columns][rows][64 values], in the order of the fragments and
// swizzled, so that any run of rows is one bulk copy and lies in shared memory as the product wants it.
//
// A block makes 128 outputs of 64 rows. Two groups of four warps multiply; each lane loads its own weights two steps of
// 64 inputs ahead, and the first thread has activations copied into a ring. The inputs' axis has SPLITS parts whose
// sums are added in order. Where there are too few blocks, a cluster of eight shares the parts, and every block adds up
// some of the rows.
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BM 128 // outputs of a block
#define BN 64  // rows of a block
#define LD (BM + 4)
#define THREADS 256
#define X_STAGES 5
#define SHARED_BY 8 // blocks of a cluster that shares the parts

DEV void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
DEV void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
DEV void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DEV void bar_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}
DEV void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
DEV void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of block `rank` of the cluster.
DEV u32 peer(u32 addr, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
    return r;
}
DEV float4 peer_load4(u32 addr) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr) : "memory");
    return v;
}
DEV float peer_load(u32 addr) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory");
    return v;
}
DEV void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEV void group_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
#if ELT == 1
#define GROUP_TYPES "f32.bf16.bf16"
#else
#define GROUP_TYPES "f32.f16.f16"
#endif
// clang-format off
#define F4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F16(c, i) F4(c, i), F4(c, i + 4), F4(c, i + 8), F4(c, i + 12)
// c (+)= a * b: 64 outputs (a: this warp's 16 of them) x 64 rows x 16 inputs; b describes shared memory.
DEV void group_mma(float* c, uint4 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
        : F16(c, 0), F16(c, 16) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)add));
}
// clang-format on

// Outputs n..n+3 of one row, `rows` the height of the tiled result.
DEV void wide_epilogue(const Conv& p, int n, int row, float4 v, float rs) {
    v.x *= rs; v.y *= rs; v.z *= rs; v.w *= rs;
    if (p.act == ACT_SILU_GATE) {
        store2(p.oute + tiled(p.lde, row, n >> 1), v.x * sigmoid(v.x) * v.y, v.z * sigmoid(v.z) * v.w);
        return;
    }
    if (p.bias) { float4 b = *(const float4*)(p.bias + n); v.x += b.x; v.y += b.y; v.z += b.z; v.w += b.w; }
    i64 o = (i64)row * p.ldo + n;
    if (p.res) { float4 b = *(const float4*)(p.res + o); v.x += b.x; v.y += b.y; v.z += b.z; v.w += b.w; }
    if (p.out) *(float4*)(p.out + o) = v;
    if (p.oute) {
        store2(p.oute + tiled(p.lde, row, n), v.x, v.y);
        store2(p.oute + tiled(p.lde, row, n + 2), v.z, v.w);
    }
}

template <bool SPLIT> DEV void wide(const Conv& p) {
    extern __shared__ __align__(1024) unsigned char raw[];
    constexpr u32 STAGE = BN * 128, PART = BN * LD * 4;
    __shared__ __align__(8) u64 full_s[X_STAGES], empty_s[X_STAGES];
    __shared__ float sq[SPLITS][BN], inv[BN];
    dep_go();
    const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), g = lane >> 2, t4 = lane & 3;
    const u32 pad = (1024 - (smem_addr(raw) & 1023)) & 1023;
    const unsigned char* const ring_s = raw + pad;
    const u32 ring = smem_addr(raw) + pad, full = smem_addr(full_s), empty = smem_addr(empty_s);
    const u32 sums = ring;
    constexpr int parts = SPLIT ? SPLITS / SHARED_BY : SPLITS;
    const int rank = SPLIT ? blockIdx.x : 0, n0 = blockIdx.z * BM, t0 = blockIdx.y * BN;
    const int chunks = p.cin >> 6, per = SPLIT_CHUNKS(p.cin), all_parts = (chunks + per - 1) / per;
    const int c0 = min(rank * parts * per, chunks), c1 = min(c0 + parts * per, chunks);
    // A tile past the last is computed from the last and not stored.
    const int tile = min((n0 >> 4) + warp, (p.n >> 4) - 1);
    const uint4* w = (const uint4*)p.w + (i64)tile * (p.cin >> 4) * 32 + lane;
    uint4 ahead[2][4];
    auto fetch = [&](uint4* a, int c) {
#pragma unroll
        for (int k = 0; k < 4; k++) a[k] = __ldg(w + (i64)c * 128 + k * 32);
    };
#pragma unroll
    for (int i = 0; i < 2; i++) if (c0 + i < c1) fetch(ahead[i], c0 + i);
    if (tid == 0) {
        for (int i = 0; i < X_STAGES; i++) { bar_init(full + i * 8, 1); bar_init(empty + i * 8, THREADS / 32); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    dep_wait();
    // the next chunk of activations to copy, its place, and the phase in which that is free
    int next = c0, fill = 0, free = 1;
    auto refill = [&]() {
        bar_wait(empty + fill * 8, free);
        bar_expect(full + fill * 8, STAGE);
        bulk_copy(ring + fill * STAGE, p.x + ((i64)next * p.ldx + t0) * 64, STAGE, full + fill * 8);
        next++;
        if (++fill == X_STAGES) { fill = 0; free ^= 1; }
    };
    if (tid == 0) {
        asm volatile("fence.proxy.async;" ::: "memory");
        while (next < min(c0 + X_STAGES, c1)) refill();
    }
    __syncwarp();
    float acc[BN / 2], tot[BN / 2], ss = 0.f;
#pragma unroll
    for (int e = 0; e < BN / 2; e++) tot[e] = 0.f;
    // squares in gemv's order: thread t of four has the words t of the pieces of a row
    const int sq_row = tid >> 2;
    const unsigned char* const sq_at = ring_s + sq_row * 128 + t4 * 4;
    int slot = 0, phase = 0, q = 0, part = 0;
    auto step = [&](uint4* a, int c) {
        // into the place of the chunk before this one, which all warps have read by now or soon
        if (tid == 0 && c > c0 && next < c1) refill();
        __syncwarp();
        bar_wait(full + slot * 8, phase);
        const u64 desc = (u64)((ring + slot * STAGE) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) group_mma(acc, a[k], desc + 2 * k, k > 0 || q > 0);
        group_commit();
        if (p.eps > 0.f) {
            uint4 u[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const unsigned char* b = sq_at + slot * STAGE;
                u[h].x = *(const u32*)(b + (((h * 4 + 0) ^ (sq_row & 7)) << 4));
                u[h].y = *(const u32*)(b + (((h * 4 + 1) ^ (sq_row & 7)) << 4));
                u[h].z = *(const u32*)(b + (((h * 4 + 2) ^ (sq_row & 7)) << 4));
                u[h].w = *(const u32*)(b + (((h * 4 + 3) ^ (sq_row & 7)) << 4));
            }
            ss = squares(u[1], squares(u[0], ss));
        }
        group_wait();
        if (c + 2 < c1) fetch(a, c + 2);
        __syncwarp();
        if (lane == 0) bar_arrive(empty + slot * 8);
        if (++slot == X_STAGES) { slot = 0; phase ^= 1; }
        if (++q < per && c + 1 < c1) return;
        // the end of a part; of a cluster's two, the second stays where it is
        if (!SPLIT || part == 0)
#pragma unroll
            for (int e = 0; e < BN / 2; e++) tot[e] += acc[e];
        if (p.eps > 0.f) {
            ss += __shfl_xor_sync(~0u, ss, 1);
            ss += __shfl_xor_sync(~0u, ss, 2);
            if (t4 == 0) sq[part][sq_row] = ss;
            ss = 0.f;
        }
        q = 0;
        part++;
    };
#pragma unroll 1
    for (int c = c0; c < c1; c += 2) {
        step(ahead[0], c);
        if (c + 1 < c1) step(ahead[1], c + 1);
    }
    // The ring has been read by everybody: the sums take its place. Outputs 2g, 2g+1 of the warp's tile and rows
    // 2*t4, 2*t4+1 of every eight are this thread's.
    __syncthreads();
    auto keep = [&](const float* v, u32 to) {
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + j * 8 * LD * 4), "f"(v[j * 4]), "f"(v[j * 4 + 2]) : "memory");
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + (j * 8 + 1) * LD * 4), "f"(v[j * 4 + 1]), "f"(v[j * 4 + 3]) : "memory");
        }
    };
    const u32 mine = sums + ((2 * t4) * LD + warp * 16 + 2 * g) * 4;
    keep(tot, mine);
    if (SPLIT && part > 1) keep(acc, mine + PART);
    if (SPLIT) cluster_sync(); else __syncthreads();
    constexpr int share = SPLIT ? BN / SHARED_BY : BN;
    const int first = rank * share;
    if (p.eps > 0.f) {
        if (tid < share) {
            float z[SPLITS], all = 0.f;
#pragma unroll
            for (int i = 0; i < SPLITS; i++)
                z[i] = i >= all_parts ? 0.f : SPLIT ? peer_load(peer(smem_addr(&sq[i % parts][first + tid]), i / parts)) : sq[i][tid];
#pragma unroll
            for (int i = 0; i < SPLITS; i++) all += z[i];
            inv[tid] = rsqrtf(all / p.kreal + p.eps);
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int i = tid; i < share * (BM / 4); i += THREADS) {
        const int r = i / (BM / 4), n = i % (BM / 4) * 4, row = t0 + first + r;
        if (row >= p.rows || n0 + n >= p.n) continue;
        const u32 at = sums + ((first + r) * LD + n) * 4;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (SPLIT) {
            // many on their way at once: each comes from another multiprocessor
#pragma unroll
            for (int from = 0; from < SPLITS; from += 8) {
                float4 u[8];
#pragma unroll
                for (int e = 0; e < 8; e++)
                    u[e] = from + e < all_parts ? peer_load4(peer(at + (from + e) % parts * PART, (from + e) / parts)) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int e = 0; e < 8; e++) { v.x += u[e].x; v.y += u[e].y; v.z += u[e].z; v.w += u[e].w; }
            }
        } else {
            uint4 b = lds(at);
            v = make_float4(__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w));
        }
        wide_epilogue(p, n0 + n, row, v, p.eps > 0.f ? inv[r] : 1.f);
    }
    // Nobody leaves while its sums are read.
    if (SPLIT) cluster_sync();
}
KERNEL __launch_bounds__(THREADS, 2) wide_alone(const __grid_constant__ Conv p) { wide<false>(p); }
KERNEL __launch_bounds__(THREADS, 2) wide_shared(const __grid_constant__ Conv p) { wide<true>(p); }
#endif
