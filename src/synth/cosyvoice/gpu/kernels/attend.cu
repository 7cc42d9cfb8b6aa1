// Attention of the flow: a chunk's queries over its utterance's keys so far. Continues flow.cu.
#define KEY(c, j, v) ((const elt*)(c.page[(j) / BLOCK] + kv_offset(c.step, layer, c.row, v, head)) + ((j) % BLOCK) * HD)
#if ELT != 0
#define QT 64
#define KT 64
#define CPR (HD / 8)
DEV u32 swz(int r, int q) { return r * (HD * 2) + ((q ^ (r & (CPR - 1))) << 4); }
// One head of one row: 64 queries by tiles of 64 keys, with the running softmax of flash attention.
#define TILE_BYTES (KT * HD * 2)
#define VOFF (HEADS * HEAD_BYTES) // values lie so many bytes after keys
DEV float power2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
// Weights of a softmax need no bounds.
#if ELT == 1
DEV u32 pack_weights(float lo, float hi) { return pack2(lo, hi); }
#else
DEV u32 pack_weights(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
#endif
#define O_LD (HD + 4)
// A warp's sixteen queries, of which a lane has two, and what their softmax has come to.
struct Softmax {
    uint4 qf[HD / 16];
    float o[HD / 8][4] = {}, m0 = -1e30f, m1 = -1e30f, l0 = 0.f, l1 = 0.f;
    DEV void queries(u32 q_s, int warp, int lane) {
#pragma unroll
        for (int k = 0; k < HD / 16; k++)
            ldm4(q_s + swz(warp * 16 + (lane & 15), k * 2 + (lane >> 4)), qf[k].x, qf[k].y, qf[k].z, qf[k].w);
    }
    // Makes weights of the scores of eight times so many keys, and what there is of before as much less as the largest has grown.
    template <int COLUMNS> DEV void weigh(float (*s)[4], float sc) {
        float n0 = -1e30f, n1 = -1e30f;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            n0 = fmaxf(n0, fmaxf(s[n][0], s[n][1]));
            n1 = fmaxf(n1, fmaxf(s[n][2], s[n][3]));
        }
        n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 1)); n0 = fmaxf(n0, __shfl_xor_sync(~0u, n0, 2));
        n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 1)); n1 = fmaxf(n1, __shfl_xor_sync(~0u, n1, 2));
        // Scores are scaled inside the exponential.
        n0 = fmaxf(m0, n0 * sc);
        n1 = fmaxf(m1, n1 * sc);
        const float c0 = power2(m0 - n0), c1 = power2(m1 - n1);
        m0 = n0; m1 = n1;
        float a0 = 0.f, a1 = 0.f;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            s[n][0] = power2(fmaf(s[n][0], sc, -m0)); s[n][1] = power2(fmaf(s[n][1], sc, -m0));
            s[n][2] = power2(fmaf(s[n][2], sc, -m1)); s[n][3] = power2(fmaf(s[n][3], sc, -m1));
            a0 += s[n][0] + s[n][1];
            a1 += s[n][2] + s[n][3];
        }
        l0 = l0 * c0 + a0;
        l1 = l1 * c1 + a1;
        if (__any_sync(~0u, c0 != 1.f || c1 != 1.f)) {
#pragma unroll
            for (int n = 0; n < HD / 8; n++) { o[n][0] *= c0; o[n][1] *= c0; o[n][2] *= c1; o[n][3] *= c1; }
        }
    }
    // TILE keys at ks and values at vs, of which `left` count.
    template <int TILE> DEV void add(u32 ks, u32 vs, int left, int lane) {
        const float sc = rsqrtf((float)HD) * 1.4426950408889634f;
        float s[TILE / 8][4] = {};
#pragma unroll
        for (int k = 0; k < HD / 16; k++)
#pragma unroll
            for (int n = 0; n < TILE / 8; n += 2) {
                u32 b0, b1, b2, b3;
                ldm4(ks + swz(n * 8 + (lane & 7) + ((lane >> 4) << 3), k * 2 + ((lane >> 3) & 1)), b0, b1, b2, b3);
                mma(s[n], qf[k], b0, b1);
                mma(s[n + 1], qf[k], b2, b3);
            }
        if (left < TILE) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (n * 8 + (lane & 3) * 2 + (e & 1) >= left) s[n][e] = -1e30f;
        }
        weigh<TILE / 8>(s, sc);
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            uint4 p = make_uint4(pack_weights(s[2 * k][0], s[2 * k][1]), pack_weights(s[2 * k][2], s[2 * k][3]), pack_weights(s[2 * k + 1][0], s[2 * k + 1][1]), pack_weights(s[2 * k + 1][2], s[2 * k + 1][3]));
#pragma unroll
            for (int n = 0; n < HD / 8; n += 2) {
                u32 b0, b1, b2, b3;
                ldm4t(vs + swz(k * 16 + (lane & 7) + (((lane >> 3) & 1) << 3), n + (lane >> 4)), b0, b1, b2, b3);
                mma(o[n], p, b0, b1);
                mma(o[n + 1], p, b2, b3);
            }
        }
    }
    DEV void close() {
        l0 += __shfl_xor_sync(~0u, l0, 1); l0 += __shfl_xor_sync(~0u, l0, 2);
        l1 += __shfl_xor_sync(~0u, l1, 1); l1 += __shfl_xor_sync(~0u, l1, 2);
    }
};
#define ATTEND_ARGS const Chunk *chunks, const elt *qkv, elt *out, const float2 *rope, int layer, int append, float by
// Where the results of a row's head go.
DEV unsigned char* heard_at(elt* out, i64 row, int head, int bytes) { return (unsigned char*)out + (row * HEADS + head) * bytes; }
// Two neighbouring results, `d` the channel of the first.
DEV void put_heard(elt* out, i64 row, int head, int d, float a, float b, float by) {
#if FP8
    if (by != 0.f) {
        *(u16*)(heard_at(out, row, head, HD) + d) = pack2_fp8(a * by, b * by);
        return;
    }
#endif
    store2(out + row * INNER + head * HD + d, a, b);
}
// Zeros for a row of nobody's chunk.
template <int T> DEV void put_nothing(elt* out, i64 row0, int head, float by) {
#if FP8
    const int bytes = by != 0.f ? HD : HD * 2;
#else
    constexpr int bytes = HD * 2;
#endif
    for (int i = threadIdx.x; i < BLOCK * (bytes / 16); i += T)
        *(uint4*)(heard_at(out, row0 + i / (bytes / 16), head, bytes) + i % (bytes / 16) * 16) = make_uint4(0, 0, 0, 0);
}
// A block has the queries of MW warps of one head of one row, and G groups of as many warps share the tiles of TILE keys and
// put their sums together at the end: few chunks still use the whole device. Tiles of keys that were there before are in flight before the GEMM ends, two a
// group; the chunk's own come through registers, which rotates them and puts them into the slab as they pass. Keys in 8 bits
// arrive as they are and are widened into a tile of their own when their turn comes.
template <int MW, int G, int TILE> DEV void attend(ATTEND_ARGS) {
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ u64 page_s[PAGES];
    constexpr int GT = 32 * MW, T = GT * G, PIECES = (QT * CPR + T - 1) / T, QB = 16 * MW, BYTES = TILE * HD * 2;
#if INT8
    constexpr int RAW = BYTES + 8 * TILE, RING = 2 * BYTES + 2 * RAW; // integers of keys and values, then their scales
#else
    constexpr int RING = 4 * BYTES;
#endif
    dep_go();
    const int head = blockIdx.x, rr = blockIdx.y, grp = threadIdx.x / GT, tid = threadIdx.x % GT, lane = tid & 31, warp = tid >> 5;
    // the first of the block's queries
    const int q0 = blockIdx.z * QB;
    const Chunk& c = chunks[rr];
    const i64 row0 = (i64)rr * BLOCK;
    const u64 there = threadIdx.x < PAGES ? c.page[threadIdx.x] : 0;
    if (c.row < 0) {
        dep_wait();
        put_nothing<T>(out, row0, head, by);
        return;
    }
    const int keys = c.keys, key0 = c.key0, frame0 = c.frame0, limit = append ? frame0 : keys;
    const i64 koff = kv_offset(c.step, layer, c.row, 0, head);
    if (threadIdx.x < PAGES) page_s[threadIdx.x] = there + koff;
    __syncthreads();
    // Queries, own keys, own values, then two tiles of keys and of values a group; of integers one, and two that arrive.
    constexpr int RINGS = QB * HD * 2 + 2 * TILE_BYTES;
    const u32 q_s = smem_addr(smem), own_s = q_s + QB * HD * 2, ring = q_s + RINGS + grp * RING;
    const int before = (limit - key0 + TILE - 1) / TILE, tiles = before + (append ? (keys - frame0 + TILE - 1) / TILE : 0);
    auto fetch = [&](int t, int stage) {
        if (t < before) {
#if INT8
            const u32 to = ring + 2 * BYTES + stage * RAW;
            for (int i = tid; i < TILE * (HD / 16); i += GT) {
                const int r = i / (HD / 16), q = i % (HD / 16), j = key0 + t * TILE + r;
                const bool ok = j < limit;
                const int at = ok ? j : key0, pg = at / BLOCK, f = at - pg * BLOCK;
                const u64 k = page_s[pg];
                cp16(to + r * HD + q * 16, (const void*)(k + f * HD + q * 16), ok);
                cp16(to + (TILE + r) * HD + q * 16, (const void*)(k + VOFF + f * HD + q * 16), ok);
                if (q == 0) {
                    cp4(to + BYTES + r * 4, (const void*)(k + BLOCK * HD + f * 4), ok);
                    cp4(to + BYTES + (TILE + r) * 4, (const void*)(k + VOFF + BLOCK * HD + f * 4), ok);
                }
            }
#else
#pragma unroll
            for (int r = tid / CPR; r < TILE; r += GT / CPR) {
                const int q = tid % CPR, j = key0 + t * TILE + r;
                const bool ok = j < limit;
                const int at = ok ? j : key0, pg = at / BLOCK;
                const u64 k = page_s[pg] + kv_piece(at - pg * BLOCK, q);
                cp16(ring + stage * 2 * BYTES + swz(r, q), (const void*)k, ok);
                cp16(ring + (stage * 2 + 1) * BYTES + swz(r, q), (const void*)(k + VOFF), ok);
            }
#endif
        }
        cp_commit();
    };
    // Keys of earlier chunks were written in earlier rounds: they need not wait for the GEMM.
    if (append) fetch(grp, 0);
    float4 turn[PIECES][2];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = threadIdx.x + i * T, f = at / CPR;
        if (head == 0 && f < BLOCK) {
            const float4* r = (const float4*)(rope + (i64)(frame0 + f) * (HD / 2) + at % CPR * 4);
            turn[i][0] = r[0];
            turn[i][1] = r[1];
        }
    }
    dep_wait();
    uint4 v[PIECES][3];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = threadIdx.x + i * T, f = at / CPR;
#pragma unroll
        for (int n = 0; n < 3; n++) {
            v[i][n] = make_uint4(0, 0, 0, 0);
            if (f < BLOCK && (n == 0 ? f >= q0 && f < q0 + QB : append)) v[i][n] = *(const uint4*)(qkv + (row0 + f) * 3 * INNER + n * INNER + head * HD + at % CPR * 8);
        }
    }
    if (!append) fetch(grp, 0);
    fetch(grp + G, 1);
    const u64 page = append ? page_s[frame0 / BLOCK] : 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int at = threadIdx.x + i * T, f = at / CPR, q = at % CPR;
        if (f >= QT) break;
        if (head == 0 && f < BLOCK)
#pragma unroll
            for (int n = 0; n < 2; n++) v[i][n] = rotate_eight(v[i][n], (const float2*)turn[i]);
#pragma unroll
        for (int n = 0; n < 3; n++) {
            if (n == 0) {
                if (f >= q0 && f < q0 + QB) *(uint4*)(smem + swz(f - q0, q)) = v[i][n];
                continue;
            }
            *(uint4*)(smem + QB * HD * 2 + (n - 1) * TILE_BYTES + swz(f, q)) = v[i][n];
            // Nobody waits for these: later rounds read them.
#if INT8
            if (append && f < BLOCK && blockIdx.z == 0) store_int8(page + (n - 1) * VOFF, f, q, v[i][n]);
#else
            if (append && f < BLOCK && blockIdx.z == 0) *(uint4*)(page + (n - 1) * VOFF + kv_piece(f, q)) = v[i][n];
#endif
        }
    }
    __syncthreads();
    auto group_meets = [&] { asm volatile("bar.sync %0, %1;" ::"r"(grp + 1), "n"(GT) : "memory"); };
#if INT8
    auto widen = [&](int stage) {
        unsigned char *to = smem + RINGS + grp * RING, *from = to + 2 * BYTES + stage * RAW;
        const float* scales = (const float*)(from + BYTES);
#pragma unroll 2
        for (int i = tid; i < 2 * TILE * CPR; i += GT) {
            const int r = i / CPR, q = i % CPR, n = r / TILE;
            *(uint4*)(to + n * BYTES + swz(r - n * TILE, q)) = from_int8(*(const uint2*)(from + r * HD + q * 8), scales[r]);
        }
    };
#endif
    Softmax s;
    s.queries(q_s, warp, lane);
    for (int t = grp, stage = 0; t < tiles; t += G, stage ^= 1) {
        cp_wait<1>();
        group_meets();
        const bool own = t >= before;
        const int first = own ? frame0 + (t - before) * TILE : key0 + t * TILE;
#if INT8
        if (!own) {
            widen(stage);
            group_meets();
        }
        const u32 ks = own ? own_s + (t - before) * BYTES : ring;
#else
        const u32 ks = own ? own_s + (t - before) * BYTES : ring + stage * 2 * BYTES;
#endif
        s.add<TILE>(ks, ks + (own ? TILE_BYTES : BYTES), (own ? keys : limit) - first, lane);
        if (t + G < tiles) {
            group_meets();
            fetch(t + 2 * G, stage);
        }
    }
    s.close();
    const int f0 = warp * 16 + (lane >> 2), f1 = f0 + 8;
    if (G == 1) {
        const float i0 = 1.f / s.l0, i1 = 1.f / s.l1;
#pragma unroll
        for (int n = 0; n < HD / 8; n++) {
            const int d = n * 8 + (lane & 3) * 2;
            if (q0 + f0 < BLOCK) put_heard(out, row0 + q0 + f0, head, d, s.o[n][0] * i0, s.o[n][1] * i0, by);
            if (q0 + f1 < BLOCK) put_heard(out, row0 + q0 + f1, head, d, s.o[n][2] * i1, s.o[n][3] * i1, by);
        }
        return;
    }
    // Where the keys were: each group's maximum, sum and weighted values.
    __syncthreads();
    float* sums = (float*)smem;
    float2* ml = (float2*)(sums + G * QB * O_LD);
    float* mine = sums + grp * QB * O_LD;
#pragma unroll
    for (int n = 0; n < HD / 8; n++) {
        int d = n * 8 + (lane & 3) * 2;
        *(float2*)(mine + f0 * O_LD + d) = make_float2(s.o[n][0], s.o[n][1]);
        *(float2*)(mine + f1 * O_LD + d) = make_float2(s.o[n][2], s.o[n][3]);
    }
    if ((lane & 3) == 0) {
        ml[grp * QB + f0] = make_float2(s.m0, s.l0);
        ml[grp * QB + f1] = make_float2(s.m1, s.l1);
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < (QB * (HD / 2) + T - 1) / T; u++) {
        const int i = threadIdx.x + u * T, f = i / (HD / 2), d = i % (HD / 2) * 2;
        if (i >= QB * (HD / 2) || q0 + f >= BLOCK) break;
        float m = -1e30f, l = 0.f;
        float2 x = make_float2(0.f, 0.f);
#pragma unroll
        for (int q = 0; q < G; q++) m = fmaxf(m, ml[q * QB + f].x);
#pragma unroll
        for (int q = 0; q < G; q++) {
            float w = power2(ml[q * QB + f].x - m);
            float2 y = *(const float2*)(sums + (q * QB + f) * O_LD + d);
            l = fmaf(w, ml[q * QB + f].y, l);
            x.x = fmaf(w, y.x, x.x);
            x.y = fmaf(w, y.y, x.y);
        }
        put_heard(out, row0 + q0 + f, head, d, x.x / l, x.y / l, by);
    }
}
// names: warps with queries of their own, and groups of them
#define ATTEND(NAME, MW, G, TILE, BLOCKS) \
    KERNEL __launch_bounds__(32 * MW * G, BLOCKS) NAME(ATTEND_ARGS) { attend<MW, G, TILE>(chunks, qkv, out, rope, layer, append, by); }
ATTEND(flow_attend_4x1, 4, 1, 32, 4)
ATTEND(flow_attend_4x2, 4, 2, 32, 2)
ATTEND(flow_attend_4x4, 4, 4, 64, 1)
ATTEND(flow_attend_2x4, 2, 4, 64, 1)
ATTEND(flow_attend_1x8, 1, 8, 32, 1)
#else
// Plain float: a warp a query, a lane a key.
KERNEL __launch_bounds__(256) flow_attend(const Chunk* chunks, const elt* qkv, elt* out, const float2* rope, int layer, int append, float) {
    __shared__ float q_s[8][HD];
    dep_go();
    dep_wait();
    const int head = blockIdx.x, rr = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Chunk& c = chunks[rr];
    const i64 row0 = (i64)rr * BLOCK;
    if (c.row < 0) return;
    if (append) append_kv(c, qkv, row0, layer, head, rope, threadIdx.x, 256);
    __threadfence_block();
    __syncthreads();
    const float sc = rsqrtf((float)HD);
    for (int f = warp; f < BLOCK; f += 8) {
        for (int j = lane; j < HD / 2; j += 32) {
            float2 q = load2(qkv + (row0 + f) * 3 * INNER + head * HD + 2 * j);
            if (head == 0) q = rotate_pair(q, rope[(i64)(c.frame0 + f) * (HD / 2) + j]);
            q_s[warp][2 * j] = q.x * sc;
            q_s[warp][2 * j + 1] = q.y * sc;
        }
        __syncwarp();
        float m = -1e30f, l = 0.f, o[HD];
#pragma unroll
        for (int d = 0; d < HD; d++) o[d] = 0.f;
        for (int j = c.key0 + lane; j < c.keys; j += 32) {
            const float *k = KEY(c, j, 0), *v = KEY(c, j, 1);
            float s = 0.f;
#pragma unroll
            for (int d = 0; d < HD; d++) s = fmaf(q_s[warp][d], k[d], s);
            float n = fmaxf(m, s), cc = expf(m - n), e = expf(s - n);
            m = n;
            l = l * cc + e;
#pragma unroll
            for (int d = 0; d < HD; d++) o[d] = o[d] * cc + e * v[d];
        }
        float n = m;
        for (int w = 16; w; w >>= 1) n = fmaxf(n, __shfl_xor_sync(~0u, n, w));
        float e = expf(m - n), z = warp_sum(l * e);
#pragma unroll
        for (int d = 0; d < HD; d++) {
            float v = warp_sum(o[d] * e);
            if (lane == 0) out[(row0 + f) * INNER + head * HD + d] = v / z;
        }
        __syncwarp();
    }
}
#endif
