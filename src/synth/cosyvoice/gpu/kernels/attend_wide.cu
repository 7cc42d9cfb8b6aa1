// Attention of many chunks on Hopper, by warpgroup MMAs. Continues attend.cu.
//
// A warpgroup has one head of one row. Blocks of earlier keys and values are copied into a ring, the first of them before the
// launch before has ended; scores and weights stay in registers. The chunk's own keys and values are its last tile: they
// come through registers, are rotated there and go into the slab as they pass.
//
// Four blocks have a multiprocessor: one copies while another multiplies and a third has its exponentials made.
#if ELT != 0 && !INT8 && defined(__CUDA_ARCH_FEAT_SM90_ALL) && BLOCK <= 56 && HD == 64
#define WIDE_STAGES 2
#define WIDE_TILE (64 * HD * 2) // of BLOCK keys or values, with room for as many as an MMA takes
// clang-format off
// c (+)= a * b: 64 x 56 over 16 channels; b describes keys.
DEV void scores_mma(float* c, uint4 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %33, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n56k16." GROUP_TYPES " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27}, {%28,%29,%30,%31}, %32, p, 1, 1, 0;}"
        : F16(c, 0), F4(c, 16), F4(c, 20), F4(c, 24) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"((int)add));
}
// clang-format on
KERNEL __launch_bounds__(128, 4) flow_attend_wide(ATTEND_ARGS) {
    extern __shared__ __align__(1024) unsigned char wide_smem[];
    dep_go();
    const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0), head = blockIdx.x, rr = blockIdx.y;
    const Chunk& c = chunks[rr];
    const i64 row0 = (i64)rr * BLOCK;
    // A ring of keys and values, the chunk's own, its queries: each tile where an MMA can read it. Barriers lie after the
    // last of the chunk's own keys that an MMA reads.
    const u32 ring = smem_addr(wide_smem), own_s = ring + WIDE_STAGES * 2 * WIDE_TILE, q_s = own_s + 2 * WIDE_TILE;
    const u32 full = own_s + 56 * 128, empty = full + WIDE_STAGES * 8;
    if (c.row < 0) {
        dep_wait();
        put_nothing<128>(out, row0, head, by);
        return;
    }
    const int first = c.key0 / BLOCK, frame0 = c.frame0, before = frame0 / BLOCK - first, here = c.keys - frame0;
    const i64 koff = kv_offset(c.step, layer, c.row, 0, head);
    if (tid == 0) {
        for (int i = 0; i < WIDE_STAGES; i++) { bar_init(full + i * 8, 1); bar_init(empty + i * 8, 4); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Weights of no key are zero; what they are multiplied by must be a number.
    constexpr int TAIL = (64 - BLOCK) * 8;
    for (int i = tid; i < WIDE_STAGES * TAIL; i += 128)
        *(uint4*)(wide_smem + (i / TAIL * 2 + 1) * WIDE_TILE + BLOCK * 128 + i % TAIL * 16) = make_uint4(0, 0, 0, 0);
    __syncthreads();
    auto fetch = [&](int t, int slot) {
        const u64 k = c.page[first + t] + koff;
        bar_expect(full + slot * 8, 2 * BLOCK * 128);
        bulk_copy(ring + slot * 2 * WIDE_TILE, (const void*)k, BLOCK * 128, full + slot * 8);
        bulk_copy(ring + (slot * 2 + 1) * WIDE_TILE, (const void*)(k + VOFF), BLOCK * 128, full + slot * 8);
    };
    if (tid == 0) {
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int t = 0; t < min(before, WIDE_STAGES); t++) fetch(t, t);
    }
    constexpr int PIECES = 4;
    float4 turn[PIECES][2];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = tid + i * 128, f = at / 8;
        if (head == 0 && f < BLOCK) {
            const float4* r = (const float4*)(rope + (i64)(frame0 + f) * (HD / 2) + at % 8 * 4);
            turn[i][0] = r[0];
            turn[i][1] = r[1];
        }
    }
    const u64 page = c.page[frame0 / BLOCK] + koff;
    dep_wait();
    {
        uint4 v[PIECES][3];
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int at = tid + i * 128, f = at / 8;
#pragma unroll
            for (int n = 0; n < 3; n++)
                v[i][n] = f < BLOCK ? *(const uint4*)(qkv + (row0 + f) * 3 * INNER + n * INNER + head * HD + at % 8 * 8) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int at = tid + i * 128, f = at / 8, q = at % 8;
            if (head == 0 && f < BLOCK)
#pragma unroll
                for (int n = 0; n < 2; n++) v[i][n] = rotate_eight(v[i][n], (const float2*)turn[i]);
            *(uint4*)(wide_smem + (2 * WIDE_STAGES + 2) * WIDE_TILE + swz(f, q)) = v[i][0];
#pragma unroll
            for (int n = 1; n < 3; n++) {
                if (n == 2 || f < 56) *(uint4*)(wide_smem + (2 * WIDE_STAGES + n - 1) * WIDE_TILE + swz(f, q)) = v[i][n];
                // Nobody waits for these: later rounds read them.
                if (f < BLOCK) *(uint4*)(page + (n - 1) * VOFF + kv_piece(f, q)) = v[i][n];
            }
        }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, 128;" ::: "memory");
    Softmax softmax;
    softmax.queries(q_s, warp, lane);
    const float sc = rsqrtf((float)HD) * 1.4426950408889634f;
    const u64 shape = (1ull << 16) | (64ull << 32) | (1ull << 62);
    int slot = 0, phase = 0;
#pragma unroll 1
    for (int t = 0; t <= before; t++) {
        const bool mine = t == before;
        const u32 ks = mine ? own_s : ring + slot * 2 * WIDE_TILE;
        const u64 kd = (u64)(ks >> 4) | shape, vd = (u64)((ks + WIDE_TILE) >> 4) | shape;
        if (!mine) bar_wait(full + slot * 8, phase);
        float s[7][4];
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) scores_mma(&s[0][0], softmax.qf[k], kd + 2 * k, k > 0);
        group_commit();
        // The tile before this one has been read by everybody soon, if not yet.
        if (tid == 0 && t > 0 && t - 1 + WIDE_STAGES < before) {
            const int last = slot == 0 ? WIDE_STAGES - 1 : slot - 1;
            bar_wait(empty + last * 8, slot == 0 ? phase ^ 1 : phase);
            fetch(t - 1 + WIDE_STAGES, last);
        }
        __syncwarp();
        group_wait();
        const int count = mine ? here : BLOCK;
        if (count == BLOCK) {
            // of the last eight columns
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (48 + (lane & 3) * 2 + (e & 1) >= BLOCK) s[6][e] = -1e30f;
        } else {
#pragma unroll
            for (int n = 0; n < 7; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (n * 8 + (lane & 3) * 2 + (e & 1) >= count) s[n][e] = -1e30f;
        }
        softmax.weigh<7>(s, sc);
        uint4 p[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            p[k] = make_uint4(pack_weights(s[2 * k][0], s[2 * k][1]), pack_weights(s[2 * k][2], s[2 * k][3]), 0, 0);
            if (k < 3) {
                p[k].z = pack_weights(s[2 * k + 1][0], s[2 * k + 1][1]);
                p[k].w = pack_weights(s[2 * k + 1][2], s[2 * k + 1][3]);
            }
        }
        group_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) group_mma_rows<1>(&softmax.o[0][0], p[k], vd + 128 * k, true);
        group_commit();
        group_wait();
        if (!mine) {
            if (lane == 0) bar_arrive(empty + slot * 8);
            __syncwarp();
            if (++slot == WIDE_STAGES) { slot = 0; phase ^= 1; }
        }
    }
    softmax.close();
    // A warp's sixteen rows of results take its queries' place, so that rows are written whole.
    const float i0 = 1.f / softmax.l0, i1 = 1.f / softmax.l1;
    const int f0 = warp * 16 + (lane >> 2);
    unsigned char* rows = wide_smem + (2 * WIDE_STAGES + 2) * WIDE_TILE;
#if FP8
    if (by != 0.f) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int at = (n & 1) * 8 + (lane & 3) * 2;
            *(u16*)(rows + swz(f0, n >> 1) + at) = pack2_fp8(softmax.o[n][0] * i0 * by, softmax.o[n][1] * i0 * by);
            *(u16*)(rows + swz(f0 + 8, n >> 1) + at) = pack2_fp8(softmax.o[n][2] * i1 * by, softmax.o[n][3] * i1 * by);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int f = warp * 16 + i * 8 + (lane >> 2), q = lane & 3;
            if (f < BLOCK) *(uint4*)(heard_at(out, row0 + f, head, HD) + q * 16) = *(const uint4*)(rows + swz(f, q));
        }
        return;
    }
#endif
#pragma unroll
    for (int n = 0; n < 8; n++) {
        store2((elt*)(rows + swz(f0, n)) + (lane & 3) * 2, softmax.o[n][0] * i0, softmax.o[n][1] * i0);
        store2((elt*)(rows + swz(f0 + 8, n)) + (lane & 3) * 2, softmax.o[n][2] * i1, softmax.o[n][3] * i1);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int f = warp * 16 + i * 4 + (lane >> 3), q = lane & 7;
        if (f < BLOCK) *(uint4*)(out + (row0 + f) * INNER + head * HD + q * 8) = *(const uint4*)(rows + swz(f, q));
    }
}
#endif
