// Products for many rows on Hopper: the sums of gemm.cu's `gemv`, to the bit, by warpgroup instructions.
//
// Continues product.cuh. Weights are gemm.cu's packed fragments, which a warpgroup product takes from registers as they are.
// Activations are tiled (`tiled` in common.cuh): [64 columns][rows][64 values], in the order of the fragments and
// swizzled, so that any run of rows is one bulk copy and lies in shared memory as the product wants it.
//
// A block makes 64*WG outputs of BN rows. One warp copies, WG groups of four warps multiply. The inputs' axis has
// SPLITS parts whose sums are added in order. Where there are too few blocks, a cluster of blocks shares the parts,
// keeps a sum of each in shared memory, and every block adds up some of the rows.
#if ELT != 0 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MAX_STAGES 6

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
DEV u32 lds1(u32 addr) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr));
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
// c (+)= a * b: 64 outputs (a: this warp's 16 of them) x BN rows x 16 inputs; b describes shared memory.
template <int BN> DEV void group_mma(float* c, uint4 a, u64 b, bool add) {
    if constexpr (BN == 64)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
            : F16(c, 0), F16(c, 16) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)add));
    else
        asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
            "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"
            "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
            : F16(c, 0), F16(c, 16), F16(c, 32), F16(c, 48) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)add));
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

template <int WG, int BN, bool SPLIT> DEV void wide(const Conv& p, int stages) {
    extern __shared__ __align__(1024) unsigned char raw[];
    constexpr int BM = 64 * WG, TILES = BM / 16, TH = 128 * WG, LD = BM + 4, TASKS = (BN * 4 + TH - 1) / TH;
    constexpr u32 WBYTES = TILES * 2048, STAGE = WBYTES + BN * 128, PART = BN * LD * 4;
    __shared__ __align__(8) u64 full_s[MAX_STAGES], empty_s[MAX_STAGES];
    __shared__ float sq[SPLITS][BN], inv[BN];
    dep_go();
    const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
    const u32 ring = (smem_addr(raw) + 1023) & ~1023u, full = smem_addr(full_s), empty = smem_addr(empty_s);
    const u32 sums = SPLIT ? ring + stages * STAGE : ring;
    const int blocks = SPLIT ? gridDim.x : 1, rank = SPLIT ? blockIdx.x : 0, parts = SPLITS / blocks, shift = 31 - __clz(parts);
    const int n0 = blockIdx.z * BM, t0 = blockIdx.y * BN, tile0 = n0 >> 4, tiles = min(TILES, (p.n >> 4) - tile0);
    const int chunks = p.cin >> 6, per = SPLIT_CHUNKS(p.cin), all_parts = (chunks + per - 1) / per;
    const int c0 = min(rank * parts * per, chunks), c1 = min(c0 + parts * per, chunks);
    if (tid == 0) {
        for (int i = 0; i < stages; i++) { bar_init(full + i * 8, 1); bar_init(empty + i * 8, 4 * WG); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == 4 * WG) {
        const uint4* w = (const uint4*)p.w + ((i64)(tile0 + lane) * (p.cin >> 4)) * 32;
        const elt* x = p.x + (i64)t0 * 64;
        auto weights = [&](int c, int slot) {
            if (lane == 0) bar_expect(full + slot * 8, tiles * 2048 + BN * 128);
            __syncwarp();
            if (lane < tiles) bulk_copy(ring + slot * STAGE + lane * 2048, w + (i64)c * 128, 2048, full + slot * 8);
        };
        auto inputs = [&](int c, int slot) {
            if (lane == 0) bulk_copy(ring + slot * STAGE + WBYTES, x + (i64)c * p.ldx * 64, BN * 128, full + slot * 8);
        };
        const int early = min(stages, c1 - c0);
        for (int i = 0; i < early; i++) weights(c0 + i, i);
        dep_wait();
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int i = 0; i < early; i++) inputs(c0 + i, i);
        int slot = 0, phase = 0;
        for (int c = c0 + early; c < c1; c++) {
            bar_wait(empty + slot * 8, phase);
            weights(c, slot);
            inputs(c, slot);
            if (++slot == stages) { slot = 0; phase ^= 1; }
        }
        __syncwarp();
    } else {
        dep_wait();
        float acc[BN / 2], tot[SPLIT ? 1 : BN / 2];
        if (!SPLIT)
#pragma unroll
            for (int e = 0; e < (SPLIT ? 1 : BN / 2); e++) tot[e] = 0.f;
        const int g = lane >> 2, t4 = lane & 3;
        // where this thread's results go: outputs 2g, 2g+1 of the warp's tile, rows 2*t4, 2*t4+1 of every eight
        const u32 mine = sums + ((2 * t4) * LD + warp * 16 + 2 * g) * 4;
        auto keep = [&](const float* v, u32 to) {
#pragma unroll
            for (int j = 0; j < BN / 8; j++) {
                asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + j * 8 * LD * 4), "f"(v[j * 4]), "f"(v[j * 4 + 2]) : "memory");
                asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to + (j * 8 + 1) * LD * 4), "f"(v[j * 4 + 1]), "f"(v[j * 4 + 3]) : "memory");
            }
        };
        int slot = 0, phase = 0;
        for (int part = 0, c = c0; c < c1; part++) {
            float ss[TASKS] = {};
            for (int q = 0; q < per && c < c1; q++, c++) {
                const u32 st = ring + slot * STAGE, xb = st + WBYTES, wb = st + warp * 2048 + lane * 16;
                bar_wait(full + slot * 8, phase);
                const u64 desc = (u64)(xb >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
                uint4 a[4];
#pragma unroll
                for (int k = 0; k < 4; k++) a[k] = lds(wb + k * 512);
                group_fence();
#pragma unroll
                for (int k = 0; k < 4; k++) group_mma<BN>(acc, a[k], desc + 2 * k, k > 0 || q > 0);
                group_commit();
                if (p.eps > 0.f) {
                    // squares in gemv's order: thread t of four has the words t of a row's pieces
#pragma unroll
                    for (int i = 0; i < TASKS; i++) {
                        int task = tid + i * TH, r = task >> 2;
                        if (task >= BN * 4) break;
                        for (int h = 0; h < 2; h++) {
                            u32 b = xb + r * 128 + (task & 3) * 4;
                            uint4 u;
                            u.x = lds1(b + (((h * 4 + 0) ^ (r & 7)) << 4));
                            u.y = lds1(b + (((h * 4 + 1) ^ (r & 7)) << 4));
                            u.z = lds1(b + (((h * 4 + 2) ^ (r & 7)) << 4));
                            u.w = lds1(b + (((h * 4 + 3) ^ (r & 7)) << 4));
                            ss[i] = squares(u, ss[i]);
                        }
                    }
                }
                group_wait();
                __syncwarp();
                if (lane == 0) bar_arrive(empty + slot * 8);
                if (++slot == stages) { slot = 0; phase ^= 1; }
            }
            if (SPLIT) {
                keep(acc, mine + part * PART);
            } else {
#pragma unroll
                for (int e = 0; e < (SPLIT ? 1 : BN / 2); e++) tot[e] += acc[e];
            }
            if (p.eps > 0.f)
#pragma unroll
                for (int i = 0; i < TASKS; i++) {
                    int task = tid + i * TH;
                    if (task >= BN * 4) break;
                    float v = ss[i];
                    v += __shfl_xor_sync(~0u, v, 1);
                    v += __shfl_xor_sync(~0u, v, 2);
                    if ((task & 3) == 0) sq[part][task >> 2] = v;
                }
        }
        if (!SPLIT) {
            // All of the ring has arrived and been read: by this group now, by the others after the barrier.
            asm volatile("bar.sync 1, %0;" ::"n"(TH) : "memory");
            keep(tot, mine);
        }
    }
    if (SPLIT) cluster_sync(); else __syncthreads();
    const int share = BN / blocks, first = rank * share, added = SPLIT ? all_parts : 1;
    if (p.eps > 0.f) {
        for (int r = tid; r < share; r += TH + 32) {
            float z = 0.f;
            for (int q = 0; q < all_parts; q++) {
                if (SPLIT) z += peer_load(peer(smem_addr(&sq[q & (parts - 1)][first + r]), q >> shift));
                else z += sq[q][r];
            }
            inv[r] = rsqrtf(z / p.kreal + p.eps);
        }
        __syncthreads();
    }
#pragma unroll 1
    for (int i = tid; i < share * (BM / 4); i += TH + 32) {
        const int r = i / (BM / 4), n = i % (BM / 4) * 4, row = t0 + first + r;
        if (row >= p.rows || n0 + n >= p.n) continue;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        const u32 at = sums + ((first + r) * LD + n) * 4;
        for (int q = 0; q < added; q++) {
            float4 u;
            if (SPLIT) {
                u = peer_load4(peer(at + (q & (parts - 1)) * PART, q >> shift));
            } else {
                uint4 b = lds(at);
                u = make_float4(__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w));
            }
            v.x += u.x; v.y += u.y; v.z += u.z; v.w += u.w;
        }
        wide_epilogue(p, n0 + n, row, v, p.eps > 0.f ? inv[r] : 1.f);
    }
    // Nobody leaves while its sums are read.
    if (SPLIT) cluster_sync();
}
// names: outputs x rows of a block
KERNEL __launch_bounds__(288, 2) wide_128x64(const __grid_constant__ Conv p, int stages) { wide<2, 64, false>(p, stages); }
KERNEL __launch_bounds__(288, 1) wide_128x128(const __grid_constant__ Conv p, int stages) { wide<2, 128, false>(p, stages); }
KERNEL __launch_bounds__(288, 1) wide_shared(const __grid_constant__ Conv p, int stages) { wide<2, 64, true>(p, stages); }
#endif
